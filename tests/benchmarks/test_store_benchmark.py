"""The store's benchmark runs, small: every row with its figures, its reference and its origin."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.results import BENCHMARKS, rows_of

ORIGIN = {"config", "date", "commit", "cpu", "kernel", "filesystem", "disk", "direct", "python", "numpy", "xxhash"}
HALF = 0.000_501


@pytest.mark.full
def test_every_row_has_its_figures_and_its_origin(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, BENCHMARKS / "store.py", "--quick", "--out", out, "--dir", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = rows_of(out)
    assert all(row.keys() >= ORIGIN for row in rows)
    fio = shutil.which("fio") is not None
    assert len([row for row in rows if row["bench"] == "cold_read_verified"]) == (2 if rows[0]["direct"] and fio else 0)
    always = {"warm_read_verified", "startup_scan", "get_latency"}
    wanted = always | ({"write_durable"} if fio else set())
    assert {row["bench"] for row in rows} - {"cold_read_verified"} == wanted
    for row in rows:
        if "ratio" in row:
            ours, reference = (row[name]["median"] for name in ("ours_GB_s", "reference_GB_s"))
            # All three are rounded to the third digit, which is much of what a slow disk gives.
            assert (ours - HALF) / (reference + HALF) - HALF <= row["ratio"]
            assert reference <= HALF or row["ratio"] <= (ours + HALF) / (reference - HALF) + HALF
            assert row["reference"]
            assert row["ours_GB_s"]["spread"][0] <= ours <= row["ours_GB_s"]["spread"][1]
