"""Benchmarks that start SGLang, once each: rows with figures and origin, which are not measured again. No time in them
means anything.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.results import BENCHMARKS, rows_of
from tests.server.jobs import run_job

Rows = list[dict[str, Any]]
ORIGIN = {"device", "sglang", "torch", "commit", "date", "config"}
SIZES = "groups.groups=2 groups.prefix=512 groups.question=16 groups.output=64 groups.requests=8 groups.concurrency=4 "
SIZES += "agent.groups=2 agent.prefix=512 agent.question=16 agent.output=64 agent.conversations=4 agent.concurrency=4 "
SIZES += "agent.turns=2"
TINY = "--shape tiny --page 16"


def check_decode(rows: Rows) -> None:
    """Both paths of a batch that shares its prefix; only one of them is grouped. Drafts are kept as asked."""
    shared, stock, drafting = rows
    assert (drafting["acceptance"], shared.get("acceptance")) == ("0.75", None)
    assert drafting["drafted"] > drafting["accepted"] > 0.4 * drafting["drafted"]
    assert (shared["path"], stock["path"]) == ("shared", "stock")
    assert shared["cascade_steps"] > 40
    assert (stock["cascade_steps"], stock["sparse_steps"]) == (0, 0)
    for one in (shared, stock):
        assert 20 <= one["steps"] <= 60 - 1 - 20, "fewer where more than 20 tokens came first, at once"
        assert 0 < one["ms_p10"] <= one["ms"] <= one["ms_p90"]
        assert one["ms_mean"] >= 0.8 * one["ms_p10"], "nine in ten take as long or longer"


def check_serving(rows: Rows) -> None:
    """Two runs of the plugin through HTTP, by SGLang's own `bench_serving`."""
    groups, agent = rows
    assert (groups["run"], groups["requests"], groups["output_tokens"]) == ("groups", 8, 8 * 64)
    assert (groups["prompt_tokens"], groups["cached_tokens"]) == ([512 + 16] * 2, [512] * 2)
    assert (agent["run"], agent["requests"]) == ("agent", 4 * 2)
    first, last = 512 + 16, 512 + 16 + 64 + 16
    assert agent["prompt_tokens"] in ([first, first], [first, last])  # 0.5.16 counts each conversation's first turn
    assert agent["cached_tokens"] == [512, 576], "behind the first turn also its question and answer, by pages"
    for one in rows:
        assert one["cascade_steps"] > 0
        assert (one["sparse_steps"], one["hits"]) == (0, 0)
        assert 0 < one["tpot_ms"] <= one["tpot_ms_p99"]
        assert 0 < one["ttft_ms"] <= one["ttft_ms_p99"]


def check_build(rows: Rows) -> None:
    """Dummy weights build too: finite, though tiny, keys and queries."""
    (recording,) = rows
    assert recording["chunked_prefill_size"] == 512
    assert recording["kv_bytes"] == 2 * 1024 * 2 * 64 * 2 * 4
    assert 0 < recording["build"]["min"] <= recording["held"]["max"]
    assert list(recording["method_bytes"]) == ["two_level"]
    assert 0 < recording["recall"]["two_level"] <= 1 + 1e-6


@pytest.mark.full
@pytest.mark.server
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("program", "words", "config", "behind", "check"),
    [
        (
            "decode.py",
            "--engines plugin lossless --contexts 512 4096 --batches 3 --tokens 60 --acceptance 0.75 --plan anchors",
            '{"min_shared_tokens": 256, "min_sparse_prompt_len": 256}',
            "-- --max-total-tokens 4096",  # the longer prefix is left out
            check_decode,
        ),
        (
            "serving.py",
            f"--engines shared --runs groups agent --set {SIZES}",
            '{"min_shared_tokens": 256}',
            "",
            check_serving,
        ),
        (
            "build.py",
            "--lengths 1024 --pairs 2 --only recording --dir {folder}",
            '{"method": "two_level", "store_min_free_bytes": 16777216}',
            "-- --chunked-prefill-size 512",
            check_build,
        ),
    ],
    ids=["decode", "serving", "build"],
)
def test_with_sglang(program: str, words: str, config: str, behind: str, check: Any, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(BENCHMARKS / program), *f"{TINY} --out {out}".split()]
    command += [*words.format(folder=tmp_path).split(), "--config", config, *behind.split()]
    status, output = run_job(command, tmp_path / "first.log")
    assert status == 0, output[-6000:]
    rows = rows_of(out)
    assert all(row.keys() >= ORIGIN for row in rows)
    check(rows)
    before = out.read_text()
    assert run_job(command, tmp_path / "again.log")[0] == 0
    assert out.read_text() == before, "rows that are there are not measured again"
