"""Releases that cannot be served stop the start, with a message. Flags: tests/compat/test_settings_travel.py."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sglang_ext.compat.versions import SUPPORTED, unsupported_message

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
        assert f"expected SGLang {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]}; found 0.5.99." in done.stderr
        assert "pip install sglang==" in done.stderr
    else:
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "False", "")


def test_the_version_message_names_what_is_missing() -> None:
    assert all(unsupported_message(version) is None for version in SUPPORTED)
    assert "found no SGLang distribution" in str(unsupported_message(None))
    for version in ("0.5.15", "0.5.16.post1", "0.5.23rc1", "0.6.0"):
        assert f"found {version}." in str(unsupported_message(version))
