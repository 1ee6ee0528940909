#!/usr/bin/env bash
# Make (or bring up to date) a virtual environment with SGLang, this checkout (editable) and the dev tools.
#
#   scripts/make_venv.sh VERSION DIR        for instance: scripts/make_venv.sh 0.5.16 .venv-0.5.16
#
# PYTHON names the interpreter to use (3.10 to 3.12). SGLANG_EXT_FULL=1 or 0 overrides the choice between a
# full SGLang (a GPU answers) and the light set that is enough to serve on a CPU. Packages come from wherever
# pip is configured to look; where that offers CUDA builds of torch only, the light set works but is larger.
set -euo pipefail

SGLANG_DEPENDENCIES=(
  torch==2.13.0 triton transformers==5.12.1 pillow orjson psutil pybase64 requests starlette fastapi uvicorn
  uvloop python-multipart ipython aiohttp msgspec pyzmq dill partial-json-parser sentencepiece einops loguru
  gguf==0.19.0 setproctitle jsonschema soundfile openai==2.6.1 openai-harmony==0.0.4 xgrammar==0.2.1 prometheus-client
)

fail() {
  echo "make_venv: $*" >&2
  exit 1
}

[ $# -eq 2 ] || fail "expected VERSION and DIR, got $# arguments. Example: scripts/make_venv.sh 0.5.16 .venv-0.5.16"
version=$1
venv=$2
root=$(cd "$(dirname "$0")/.." && pwd)
begun=$SECONDS

say() {
  printf '[sglang %s] %4ds  %s\n' "$version" $((SECONDS - begun)) "$*"
}

fits() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
    >/dev/null 2>&1
}

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    fits "$PYTHON" || fail "expected PYTHON to be Python 3.10 to 3.12 with the venv module; got '$PYTHON'" \
      "($("$PYTHON" --version 2>&1 || true)). Set PYTHON to another interpreter."
    echo "$PYTHON"
    return
  fi
  local name
  for name in python3.11 python3.12 python3.10 python3; do
    if fits "$name"; then
      echo "$name"
      return
    fi
  done
  fail "expected Python 3.10, 3.11 or 3.12 with the venv module on the PATH; found none." \
    "Install one (on Debian and Ubuntu: python3 and python3-venv), or set PYTHON=/path/to/python3.11."
}

full=${SGLANG_EXT_FULL:-}
if [ -z "$full" ]; then
  full=0
  if nvidia-smi -L >/dev/null 2>&1; then full=1; fi
fi

python=$(find_python)
stamp=$venv/.sglang-ext-stamp
wanted=$({
  cat "$0" "$root/pyproject.toml"
  echo "$version $full $root"
  "$python" --version
} | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  say "$venv is up to date"
  exit 0
fi
if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
  fail "expected $venv to be a virtual environment or absent; it is something else. Move it away."
fi

# A venv of another interpreter, or a half-made one whose interpreter is gone, is made anew.
if ! cmp -s <("$venv/bin/python" --version 2>/dev/null) <("$python" --version); then
  say "making $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
fi
rm -f "$stamp"
export PIP_DISABLE_PIP_VERSION_CHECK=1
pip=("$venv/bin/python" -m pip install -qq)

if [ "$full" = 1 ]; then
  # Not tested by the project's CI, which has no GPU: the GPU runs use a machine that comes with its own torch.
  say "installing SGLang with everything it pins (a GPU answers; 9 to 11 GB)"
  "${pip[@]}" "sglang==$version" prometheus-client
else
  say "installing torch and what SGLang imports on a CPU (2.6 GB with a CPU build of torch)"
  "${pip[@]}" "${SGLANG_DEPENDENCIES[@]}"
  say "installing sglang==$version without its pinned GPU packages"
  "${pip[@]}" --no-deps torchvision==0.28.0 compressed-tensors "sglang==$version"
fi

say "installing this checkout (editable) and the dev tools"
"${pip[@]}" hatchling editables
# pip names each package that SGLang pins and the light set leaves out: 40 lines that look like a failure.
"${pip[@]}" --no-build-isolation --editable "$root[dev]" \
  2> >([ "$full" = 1 ] && cat >&2 || grep -v -e '^ERROR: pip.s dependency resolver' -e "^sglang $version requires " >&2)

# A torchvision compiled for CUDA cannot register its operators beside a CPU build of torch. Nothing here
# uses them; empty modules in the place of the two registering ones let the rest be imported.
if [ "$full" = 0 ] && ! "$venv/bin/python" -c 'import torchvision' >/dev/null 2>&1; then
  say "torchvision's compiled operators do not load here: standing in for them"
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  # A .pth file runs lines that begin with 'import', each by itself.
  printf '%s' 'import sys, types; ' \
    'sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations")); ' \
    'sys.modules.setdefault("torchvision._autograd_registrations", types.ModuleType("torchvision._autograd_registrations"))' \
    >"$site/sglang_ext_torchvision.pth"
  echo >>"$site/sglang_ext_torchvision.pth"
fi

say "checking"
"$venv/bin/python" - "$version" <<'PYTHON' || fail "the environment $venv does not import; see the error above"
import sys
from importlib.metadata import version

import torchvision  # noqa: F401

import prefix_index  # noqa: F401
import prefix_kernels  # noqa: F401
import sglang_ext  # noqa: F401

if version("sglang") != sys.argv[1]:
    sys.exit(f"expected sglang {sys.argv[1]}, got {version('sglang')}")
PYTHON
echo "$wanted" >"$stamp"
say "$venv is ready"
