"""Every fault campaign at its quick count; ``benchmarks/results/store_faults.jsonl`` has the full ones' rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.prefix_index.faults.outcome import Outcome
from tests.prefix_index.faults.runner import ROOT, campaigns, markdown, run_one, table

FOUND = campaigns()
LIMIT_S = 600.0
RESULTS = ROOT / "benchmarks" / "results" / "store_faults.jsonl"


#: In `make test-all` only: these take more than three seconds.
SLOW = {"planted_files", "service_fuzzed_messages", "service_killed_under_load"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in SLOW else []) for name in sorted(FOUND)]
)
def test_campaign(name: str) -> None:
    outcome = run_one(name, FOUND[name].quick, 7, LIMIT_S)
    assert outcome.ok, outcome
    assert outcome.tried >= min(FOUND[name].quick, 16)


@pytest.mark.parametrize(
    ("outcome", "ok"),
    [
        (Outcome("a", 0), False),
        (Outcome("a", 1), True),
        (Outcome("a", 1, lost=1), False),
        (Outcome("a", 1, wrong=1), False),
        (Outcome("a", 1, stuck=1), False),
    ],
)
def test_only_a_tried_and_clean_campaign_is_ok(outcome: Outcome, ok: bool) -> None:
    assert outcome.ok is ok


def test_a_campaign_that_does_not_end_is_stuck() -> None:
    outcome = run_one("kill_during_write", 1_000_000, 1, 1.5)
    assert (outcome.ok, outcome.stuck) == (False, 1)
    assert "not done after 2 s" in outcome.detail


def test_a_campaign_that_fails_says_why() -> None:
    outcome = run_one("no_such_campaign", 1, 1, LIMIT_S)
    assert not outcome.ok
    assert "KeyError: 'no_such_campaign'" in outcome.detail


@pytest.mark.full
def test_the_command_prints_a_table_and_writes_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "tests.prefix_index.faults", "--quick", "--only", "flip_arrays", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "flip_arrays" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["tried"] == FOUND["flip_arrays"].quick
    again = subprocess.run([*command[:3], "--table", str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "| `flip_arrays` | Single random bits of arrays" in again.stdout
    assert f"| {row['tried']:,} | 0 | 0 | 0 |" in again.stdout
    assert {"date", "commit", "kernel", "filesystem", "versions", "seed", "seconds"} <= row.keys()


def test_the_last_full_run_of_every_campaign_was_clean() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    assert {row["name"] for row in rows} == FOUND.keys()
    assert [row["name"] for row in rows if not row["ok"]] == []
    assert markdown(rows).count("| 0 | 0 | 0 |") == len(FOUND)


def test_a_bad_row_is_told_in_full_width() -> None:
    row = {"name": "n", "tried": 5, "lost": 1, "wrong": 0, "stuck": 0, "seconds": 1.0, "ok": False, "detail": "x " * 99}
    text = table([row])
    assert "! x x" in text
    assert "1 campaigns, 5 faults, 1 not ok" in text
    assert max(map(len, text.splitlines())) <= 80
