"""`benchmarks/build.py`: its rows and tables, the limits that its results meet, and once SGLang's engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.benchmarks.results import BENCHMARKS

ORIGIN = {"shape": "tiny", "device": "CPU", "sglang": "0", "commit": "a", "date": "2026-11-21"}


def timed(*seconds: float) -> dict[str, Any]:
    return {"median": sorted(seconds)[len(seconds) // 2], "min": min(seconds), "max": max(seconds)}


def rows(build_seconds: float, ratio: float) -> list[dict[str, Any]]:
    size = {"num_tokens": 64, "chunk": "32", "chunked_prefill_size": 32, **ORIGIN}
    recording = {"plain": timed(2.5), "recorded": timed(2.6), "held": timed(1.0), "config": {}}
    recording |= {"ratio": timed(ratio), "build": timed(build_seconds), "index_bytes": 10, "kv_bytes": 100}
    return [
        {"bench": "prefill", "seconds": timed(2.0), **size},
        {"bench": "prefill", "seconds": timed(3.0), **size, "chunk": "16"},
        {"bench": "recording", **recording, **size},
        {"bench": "layer", "seconds": timed(0.05), **size},
    ]


def test_the_table_takes_shares_of_the_fastest_prefill(bench: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows(0.1, 1.01)))
    text = bench.build.table(bench.build.engines.read([str(file)]))
    assert "| 64 | 32 | stock | 2.000 (2.000-2.000) |" in text
    assert "| 1.0100 (1.0100-1.0100) | 0.100 (0.100-0.100) | 5.0% | 1.00 (1.00-1.00) | 10.0% |" in text
    for part in text.split("\n\n"):
        assert len({line.count("|") for line in part.splitlines() if line.startswith("|")}) <= 1


def test_builds_and_recording_met_their_limits(bench: Any) -> None:
    """Of the rows in the repository: a tenth of the prefill, and 3% more."""
    rows = bench.build.engines.read([str(BENCHMARKS / "results" / "build-h200.jsonl")])
    prefill: dict[int, float] = {}
    for row in rows:
        if row["bench"] == "prefill":
            seconds = row["seconds"]["median"]
            prefill[row["num_tokens"]] = min(seconds, prefill.get(row["num_tokens"], seconds))
    recorded = [row for row in rows if row["bench"] == "recording"]
    assert {row["num_tokens"] for row in recorded} == {32768, 131072}
    assert all(row["build"]["median"] <= 0.1 * prefill[row["num_tokens"]] for row in recorded)
    assert all(row["ratio"]["median"] <= 1.03 for row in recorded)
