"""Tables of soaks and replays: counts of the files, and the tables that the documentation shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"


def run(*files: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/soak_tables.py", *map(str, files)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def soak(**changed: Any) -> dict[str, Any]:
    found = {"control": {"equal": 8, "tie": 1, "wrong": 1, "aborted": 5}, "shared": {"equal": 200}}
    return {"good": True, "found": found, "commit": "abc", "seconds": 60.0, "control": 20.0} | changed


def judged(equal: int, wrong: int, nats: float) -> dict[str, Any]:
    return {"equal": equal, "wrong": wrong, "tokens of sparse steps": 1000, "max_nats": nats}


def test_aborted_answers_are_none_and_halves_that_did_not_run_have_no_row(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(soak()))
    lines = run(path).stdout.splitlines()
    assert lines[2:] == [
        "| a | abc | dense control | 20 | 10 | 8 | 1 | 1 (10.00%) |  |  | yes |",
        "| a | abc | shared steps | 60 | 200 | 200 | 0 | 0 (0.00%) |  | 125 | yes |",
    ]


def test_the_farthest_answer_is_told_where_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(soak(farthest={"control": None, "shared": 0.0})))
    lines = run(path).stdout.splitlines()
    assert [line.split(" | ")[8] for line in lines[2:]] == ["not told", "0.000"]


def test_how_long_a_half_ran_comes_before_what_was_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(soak(ran={"control": 18.2, "shared": 213.2}, good=False)))
    lines = run(path).stdout.splitlines()
    assert [line.split(" | ")[3] for line in lines[2:]] == ["18", "213"]
    assert all(line.endswith("| no |") for line in lines[2:])


def test_replays_are_added_up(tmp_path: Path) -> None:
    for name, nats in (("a", 0.2), ("b", 0.4)):
        row = {"good": True, "commit": name, "sparse": judged(9, 1, nats), "dense": judged(5, 0, 0.0)}
        (tmp_path / f"{name}.json").write_text(json.dumps(row))
    one = run(tmp_path / "a.json").stdout.splitlines()
    assert len(one) == 4
    both = run(tmp_path / "a.json", tmp_path / "b.json").stdout.splitlines()
    assert both[-2:] == [
        "| all 2 |  | sparse | 2,000 | 20 | 18 | 0 | 2 (10.00%) | 13 | 0.400 |  |",
        "| all 2 |  | dense | 2,000 | 10 | 10 | 0 | 0 (0.00%) |  | 0.000 |  |",
    ]


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON", '{"found": 3}'])
def test_a_file_that_is_neither_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    done = run(path)
    assert done.returncode == 2
    assert f"{path}: expected a row of soak.py or replay.py" in done.stderr


def test_the_documentation_shows_what_the_files_hold() -> None:
    shown = (ROOT / "docs/benchmarks.md").read_text()
    table = run(RESULTS / "soak-h200-fp16.json", RESULTS / "replay-h200-fp16.json").stdout
    assert len(table.splitlines()) > 4
    assert table in shown
    soaks = [RESULTS / f"soak-h200-{one}.json" for one in ("exact", "tp2")]
    replays = [one for one in RESULTS.glob("replay-h200*.json") if "fp16" not in one.stem]
    for line in [*run(*soaks).stdout.splitlines()[2:], *run(*replays).stdout.splitlines()[-2:]]:
        cells = line.split(" | ")
        if cells[2] != "exact, beside sparse steps":
            assert f" | {' | '.join(cells[4:8])} |\n" in shown


def test_no_answer_is_wrong_in_fp16_over_eight_minutes() -> None:
    row = json.loads((RESULTS / "soak-h200-fp16.json").read_text())
    replayed = json.loads((RESULTS / "replay-h200-fp16.json").read_text())
    assert row["dtype"] == replayed["dtype"] == "float16"
    assert (row["good"], replayed["good"]) == (True, True)
    assert sum(row["ran"].values()) >= 480
    assert not any(row["found"][half].get("wrong") for half in ("control", "shared", "beside"))
    assert not any(replayed[kind].get("wrong") for kind in ("sparse", "dense"))


def test_retracted_requests_are_replayed_without_a_wrong_token() -> None:
    row = json.loads((RESULTS / "soak-cpu-retracted.json").read_text())
    sparse, chosen = row["replay"]["sparse"], row["replay"]["selections"]["by the server's queries"]
    assert (row["good"], row["dtype"], sparse["tokens behind"], chosen["other"]) == (True, "float32", 0, 0)
    assert sparse["retractions"] > 0
