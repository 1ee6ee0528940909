"""`benchmarks/positions.py`: its table, what it skips, and what it refuses to call a comparison."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.attention.trace import Selected

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def positions(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("positions")


def row(task: str, tokens: int, together: int, equal: int, scores: int = 0, other: int = 0) -> dict[str, Any]:
    found = {"equal": equal, "equal scores": scores, "other": other, "steps": (equal + scores + other) // 10}
    return {
        "task": task,
        "num_tokens": tokens,
        "together": together,
        "asked": 16,
        "right": 15,
        "largest_group": together,
        **found,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def test_the_table_adds_tasks_up_and_then_everything(positions: Any, tmp_path: Path) -> None:
    rows = [row("many_keys", 32768, 1, 980, 10, 10), row("single_needle", 16384, 16, 1000)]
    rows += [row("copy_span", 16384, 16, 1490, 10)]
    assert positions.table([write(tmp_path / "rows.jsonl", rows)]).splitlines()[2:] == [
        "| 16,384 | 16 | 2 | 30 of 32 | 16 | 250 | 2,500 | 2,490 (99.60%) | 10 | 0 |",
        "| 32,768 | 1 | 1 | 15 of 16 | 1 | 100 | 1,000 | 980 (98.00%) | 10 | 10 |",
        "| all | | 3 | 45 of 48 | 16 | 350 | 3,500 | 3,470 (99.14%) | 20 | 10 |",
    ]


def test_what_the_file_holds_is_skipped_unless_it_was_measured_otherwise(positions: Any, tmp_path: Path) -> None:
    options = ["--tasks", "many_keys", "--lengths", "16384", "32768", "--out", str(tmp_path / "rows.jsonl")]
    args = positions.parse(options)
    assert positions.cells(args) == [("many_keys", length, size) for length in (16384, 32768) for size in (1, 16)]
    origin = positions.provenance(args)
    same = {**row("many_keys", 16384, 16, 10), **origin}
    other = {**row("many_keys", 32768, 1, 10), **origin, "config": {"keep_ratio": 0.2}}
    write(tmp_path / "rows.jsonl", [same, other])
    assert positions.cells(args) == [("many_keys", 16384, 1), ("many_keys", 32768, 1), ("many_keys", 32768, 16)]


def test_a_trace_without_steps_without_queries_or_of_a_lost_index_is_no_comparison(positions: Any) -> None:
    gone = SimpleNamespace(compare=lambda step, queries: None)
    step = Selected(["trace-1"], [70], "d", 64, {1: [1]}, {1: [b"\x80" * 8]})
    with pytest.raises(RuntimeError, match="expected sparse steps in the trace"):
        positions.compared(gone, iter([]), 16)
    with pytest.raises(RuntimeError, match="expected queries in the trace"):
        positions.compared(gone, iter([step]), 16)
    with pytest.raises(RuntimeError, match="expected index d in the server's store"):
        positions.compared(gone, iter([Selected(**{**vars_of(step), "queries": {1: b"\0" * 64}})]), 16)


def vars_of(step: Selected) -> dict[str, Any]:
    return {name: getattr(step, name) for name in step.__struct_fields__}
