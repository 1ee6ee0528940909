"""What the hooks take for granted of arguments and results is what SGLang's functions have, on this release.

A hook once looked for a tuple, as the function's annotation says, where an object comes; its test gave it a tuple.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_ext.compat.seams import SEAMS, Seam, here
from sglang_ext.compat.versions import SUPPORTED

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    """What `seam_types` found, by target."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compat.seam_types"],
        capture_output=True, text=True, timeout=600, cwd=ROOT, env=clean,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[-1][7:])
    return found


@pytest.mark.parametrize("seam", here(), ids=lambda seam: seam.target.rsplit(".", 1)[1])
def test_a_hook_gets_the_arguments_and_reads_of_the_result_what_is_there(real: dict[str, Any], seam: Seam) -> None:
    found = real[seam.target]
    assert tuple(found["takes"][: len(seam.takes)]) == seam.takes
    assert found["fits"] == "", "the hook takes every argument that the function does"
    assert (found["results"] > 0) == bool(seam.reads)
    assert found["wrong"] == []


def test_slots_are_heard_of_from_their_beginning_to_their_end(real: dict[str, Any]) -> None:
    *calls, rows, freed = real["life"]
    assert calls == [["taken", "a"], ["taken", "b"], ["freed", "b", freed, False], ["taken", "c"]]
    assert len(set(rows)) == 2


def test_every_seam_is_of_a_supported_release() -> None:
    assert all(set(seam.releases) <= set(SUPPORTED) for seam in SEAMS)
    assert {seam.target.rsplit(".", 1)[1] for seam in SEAMS if seam.releases != SUPPORTED} == {"end_weight_update"}
