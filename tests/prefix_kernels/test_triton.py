"""The Triton kernels: their tests in Triton's interpreter, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))
#: Files that share a process: it starts in seconds.
SHARES = [FILES[share::4] for share in range(4)]


@pytest.mark.parametrize("names", SHARES, ids=" ".join)
def test_kernels_in_the_interpreter(names: list[str]) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    files = [str(FOLDER / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-rp", "-p", "no:cacheprovider", *files]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    for name in names:
        assert re.search(rf"^PASSED \S*{name}::", ran.stdout, re.MULTILINE), name
