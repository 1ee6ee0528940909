"""`benchmarks/hostile_indexes.py`: hostile indexes do nothing, and where the loader looks at nothing they do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.results import ROOT, rows_of

METHODS = ["token_index", "ab_sparse", "csattention", "two_level", "union"]


def hostile(out: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and rows of a run, in a process of its own: Triton's interpreter is chosen before its import."""
    folders = [ROOT, ROOT / "kernels", ROOT / "index_store"]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, ROOT / "benchmarks/hostile_indexes.py", *arguments, "--out", out]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert run.returncode in (0, 1), run.stderr[-2000:]
    print(run.stdout)
    return run.returncode, rows_of(out)


@pytest.mark.parametrize("sample", ["12", pytest.param("", marks=pytest.mark.full)], ids=["some", "all"])
def test_no_damage_reaches_a_decode_step(tmp_path: Path, sample: str) -> None:
    chosen = ["--sample", sample, "--methods", *METHODS] if sample else []
    status, rows = hostile(tmp_path / "rows", *chosen)
    assert status == 0
    assert {row["method"] for row in rows} >= set(METHODS)
    assert {(row["method"], row["path"]) for row in rows} >= {
        (method, "decode graphs") for method in ("token_index", "csattention")
    }
    for row in rows:
        assert row["damages"] >= (int(sample) if sample else 25 if row["method"] == "exact" else 40)
        assert 0 < row["accepted"] < row["refused"], "of those that fit some are looked at, too"
        assert row["exceptions"] == row["positions outside"] == row["selections of another index"] == 0


def test_without_the_check_damages_are_seen(tmp_path: Path) -> None:
    status, (row, _) = hostile(tmp_path / "rows", "--unchecked", "--methods", "token_index", "--sample", "20")
    assert status == 1
    assert row["exceptions"] > 0
    assert row["accepted"] > row["refused"]
