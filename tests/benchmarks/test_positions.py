"""`benchmarks/positions.py`: its table, what it skips, and what it refuses to call a comparison."""

from __future__ import annotations

import importlib
import json
from collections import Counter
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


@pytest.mark.parametrize(("share", "status"), [(1.0, 0), (0.998, 1)])
def test_a_file_that_holds_too_few_equal_ones_stays_bad(
    positions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, status: int
) -> None:
    out = tmp_path / "rows.jsonl"
    options = ["positions.py", "--tasks", "many_keys", "--lengths", "16384", "--together", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", options)
    monkeypatch.setattr(positions.signal, "signal", lambda *_: None)
    origin = positions.provenance(positions.parse(options[1:]))
    write(out, [{**row("many_keys", 16384, 1, 10), **origin, "share_by_position": share}])
    assert positions.main() == status


DIGESTS = {"trace-many_keys-16384-1-4": "a", "trace-many_keys-16384-2-4": "b"}
FIRST, SECOND = DIGESTS


def selected(rids: list[str], digest: str, *, queries: bool = True) -> Selected:
    """Of two heads of one layer: two positions of 64."""
    found = {1: b"\0" * 4 * 16 * len(rids)} if queries else {}
    return Selected(rids, [70] * len(rids), digest, 64, {1: [2, 2]}, {1: [b"\xc0" + b"\0" * 7] * 2}, found)


@pytest.fixture
def equal() -> Any:
    """A reference that selects the same; what it was asked for."""
    asked: list[Selected] = []

    def compare(step: Selected, queries: Any) -> Counter[str]:
        assert list(queries) == [1]
        asked.append(step)
        return Counter(equal=2)

    return SimpleNamespace(compare=compare, asked=asked)


def test_a_step_on_another_documents_index_is_other_as_a_whole(positions: Any, equal: Any) -> None:
    right = selected([f"{FIRST}-0", f"{FIRST}-1"], "a")
    wrong = [selected([f"{FIRST}-0"], "b"), selected([f"{FIRST}-0", f"{SECOND}-0"], "a")]
    wrong.append(selected([f"{FIRST}-0", "somebody else's"], "a"))
    found = positions.compared(equal, [right, *wrong], DIGESTS, 16)
    assert equal.asked == [right]
    assert found == {
        "equal": 2,
        "equal scores": 0,
        "other": 6,
        "steps": 4,
        "share_by_position": 1 / 4,
        "share_equal": 1 / 4,
        "misplaced": 3,
        "not searched": 0,
        "largest_group": 2,
        "kept": {"2": 2},
    }


def test_steps_that_searched_nothing_are_counted_beside_the_others(positions: Any, equal: Any) -> None:
    steps = [selected([f"{FIRST}-0"], "a", queries=queries) for queries in (True, False, False)]
    found = positions.compared(equal, steps, DIGESTS, 16)
    assert (found["steps"], found["not searched"], found["equal"]) == (1, 2, 2)


def test_a_trace_without_steps_without_queries_or_of_a_lost_index_is_no_comparison(positions: Any, equal: Any) -> None:
    with pytest.raises(RuntimeError, match="expected sparse steps with their queries in the trace, got none"):
        positions.compared(equal, [], DIGESTS, 16)
    with pytest.raises(RuntimeError, match="got 1 that searched nothing"):
        positions.compared(equal, [selected([f"{FIRST}-0"], "a", queries=False)], DIGESTS, 16)
    gone = SimpleNamespace(compare=lambda step, queries: None)
    with pytest.raises(RuntimeError, match="expected index a in the server's store"):
        positions.compared(gone, [selected([f"{FIRST}-0"], "a")], DIGESTS, 16)


def test_a_table_of_nothing_is_refused(positions: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected rows of"):
        positions.table([write(tmp_path / "none.jsonl", [])])


def test_the_documentation_shows_what_the_file_holds(positions: Any) -> None:
    shown = (ROOT / "docs" / "benchmarks.md").read_text()
    last = positions.table([str(ROOT / "benchmarks/results/positions-cpu.jsonl")]).splitlines()[-1]
    answers, _, _, selections, *found = [cell.strip() for cell in last.split("|")[4:-1]]
    right = answers.removesuffix(" of 448")
    assert found == [f"{selections} (100.00%)", "0", "0"]
    assert f"all {selections} selections behind 448\nquestions ({right} right) are equal by position" in shown
