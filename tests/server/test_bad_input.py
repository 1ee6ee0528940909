"""Flags and releases that cannot be served stop the start, with a message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from sglang_ext.profiles import PROFILE_FILE
from tests.server.harness import MODEL


def test_an_unknown_config_key_stops_the_start() -> None:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "models/needle", "--device", "cpu"]
    command += ["--sparse-attn", "--sparse-attn-config", '{"keep_ration": 0.1}']
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert "keep_ration" in done.stdout + done.stderr
    assert "Known keys" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


#: Flags, and words of the message: each from another place that refuses. What else a configuration or tensor
#: parallelism cannot be, and modes that are not supported: tests/serving/test_config.py,
#: tests/compat/test_tensor_parallel.py, test_settings_travel.py. All are tried in one process: importing SGLang takes
#: seconds.
BAD_FLAGS: dict[str, tuple[list[str], list[str]]] = {
    "missing store": (["--sparse-attn-store", "/nowhere/store"], ["/nowhere/store", "expected an existing folder"]),
    "tp, capturing": (
        ["--tp-size", "2", "--sparse-attn-config", '{"build": "capture", "capture_folder": "c"}'],
        ["tensor parallelism (--tp-size)", "build='capture'", "tp_size=2", "calibrate on one GPU"],
    ),
    "pp": (["--pp-size", "2"], ["pipeline parallelism (--pp-size)"]),
    "another model's profile": (
        ["--sparse-attn-config", '{"profile": "OTHER"}'],
        ["profile: expected config_digest=", "it is of another model", "set 'profile' to \"none\""],
    ),
    "another model's layer plan": (
        ["--sparse-attn-config", '{"profile": "none", "layer_plan": ["dense", "anchor"]}'],
        ["layer_plan: expected 6 layers in the plan (the model's), got 2"],
    ),
    "a layer plan that ranks cannot share": (
        [
            "--tp-size",
            "2",
            "--sparse-attn-config",
            '{"profile": "none", "layer_plan": ["dense", "anchor", {"reuse": 1, "head_map": [1, 0]}, "dense", "dense", '
            '"dense"]}',
        ],
        ["layer_plan: layer 2: expected KV head 0 to reuse a selection of its own rank 0 of 2", "Serve with fewer"],
    ),
}

_TRY_ALL = """
import contextlib, io, json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
results = {}
for name, flags in json.loads(sys.argv[1]).items():
    err = io.StringIO()
    status = None
    with contextlib.redirect_stderr(err):
        try:
            record = prepare_server_args(flags)
            getattr(record, "resolve_once", lambda: None)()  # as 0.5.23 does when it launches
            record.check_server_args()
        except SystemExit as error:
            status = error.code
        except BaseException as error:
            status = repr(error)
    results[name] = [status, err.getvalue()]
print("RESULT", json.dumps(results))
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    profile = json.loads((MODEL / PROFILE_FILE).read_text())
    profile["model"]["config_digest"] = "f" * 64
    other = tmp_path_factory.mktemp("other") / "profile.json"
    other.write_text(json.dumps(profile))
    base = ["--model-path", str(MODEL), "--device", "cpu", "--sparse-attn"]
    wanted = {
        name: base + [flag.replace("OTHER", str(other)) for flag in flags] for name, (flags, _) in BAD_FLAGS.items()
    }
    done = subprocess.run(
        [sys.executable, "-c", _TRY_ALL, json.dumps(wanted)], capture_output=True, text=True, timeout=900
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    results: dict[str, Any] = json.loads(lines[0][7:])
    return results


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags_stop_the_start_with_a_message(refused: dict[str, Any], name: str) -> None:
    status, output = refused[name]
    assert status == 2, output
    line = next(line for line in output.splitlines() if line.startswith("sglang-ext:"))
    for word in BAD_FLAGS[name][1]:
        assert word in line


_PATCHED = """
import importlib.metadata as metadata, sys
real = metadata.version
metadata.version = lambda name: "0.5.99" if name == "sglang" else real(name)
sys.argv = ["launch_server", *{argv!r}]
from sglang_ext.plugin import register
register()
print("sglang" in sys.modules)
"""


@pytest.mark.parametrize(
    ("argv", "environment", "asked"),
    [
        (["--sparse-attn"], {}, True),
        (["--sparse-attn-store=x"], {}, True),
        ([], {"SGLANG_SPARSE_ATTN": "1"}, True),
        (["--model-path", "x"], {}, False),
    ],
)
def test_an_unsupported_sglang_is_refused_by_name_when_asked_for_and_else_left_alone(
    argv: list[str], environment: dict[str, str], asked: bool
) -> None:
    command, env = [sys.executable, "-c", _PATCHED.format(argv=argv)], {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    if asked:
        assert done.returncode == 2
        assert "expected SGLang 0.5.16 or 0.5.23; found 0.5.99" in done.stderr
        assert "pip install sglang==" in done.stderr
    else:
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "False", "")


def test_the_version_message_names_what_is_missing() -> None:
    from sglang_ext.compat.versions import SUPPORTED, unsupported_message

    assert all(unsupported_message(version) is None for version in SUPPORTED)
    assert "found no SGLang distribution" in str(unsupported_message(None))
    for version in ("0.5.17", "0.5.16.post1", "0.5.23rc1", "0.6.0"):
        assert f"found {version}." in str(unsupported_message(version))
