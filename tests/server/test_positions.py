"""`benchmarks/positions.py` on a real server, small: what a group of requests selected is the reference's selection."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import CPU_FLAGS, DISK, ROOT, SGLANG, rendezvous
from tests.server.jobs import run_job

pytestmark = [pytest.mark.full, pytest.mark.skipif(SGLANG != "0.5.16", reason="benchmarks are run on 0.5.16")]
CONFIG = {**DISK, "keep_ratio": 0.1, "group_growth": "sqrt", "max_keep_ratio": 0.5, "prefetch_policy": "wait_complete"}


def test_a_servers_selections_are_the_references_position_by_position(serve: Any, tmp_path: Path) -> None:
    serve.close()
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks" / "positions.py"), "--out", str(out), "--tasks", "multi_query"]
    command += ["--lengths", "2048", "--together", "4", "--questions", "8", "--config", json.dumps(CONFIG)]
    roots = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "index_store")))
    env = {"SGLANG_EXT_CPU_SHORT_EXTEND": "1", "PYTHONPATH": roots}
    flags = [*CPU_FLAGS, "--page-size", "16", *rendezvous()]
    status, output = run_job([*command, "--", *flags], tmp_path / "positions.log", env=env)
    assert status == 0, output[-4000:]
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["largest_group"] == 4
    assert row["equal"] == 10 * row["steps"] > 100, "five anchor layers of two KV heads"
    assert (row["share_by_position"], row["misplaced"], row["not searched"]) == (1.0, 0, 0)
    assert row["kept"]["4"] == 2 * 204, "a tenth of 2,048, and twice that for four"
    assert row["right"] >= 4, "it answers"
    assert row["dense_rows"] == 0 < row["sparse_rows"]
    assert row["dtype"] == "float32"
