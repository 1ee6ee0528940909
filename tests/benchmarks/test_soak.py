"""`benchmarks/soak.py`: what counts as a wrong token; and the tables of soaks and replays in the documents."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.results import RESULTS, ROOT, cells, documented_table

TIE = 0.13


@pytest.mark.parametrize(
    ("tokens", "tie", "wanted"),
    [
        ([5, 6, 7, 8], TIE, ("equal", 4, 0.0)),
        ([5, 6], TIE, ("equal", 2, 0.0)),  # aborted, or asked for fewer
        ([], TIE, ("equal", 0, 0.0)),
        ([5, 6, 9, 0], TIE, ("tie", 2, 0.125)),  # nothing behind a difference is compared
        ([5, 6, 9, 0], 0.125, ("tie", 2, 0.125)),
        ([5, 6, 9, 0], 0.12, ("wrong", 2, 0.125)),
        ([5, 6, 5, 8], TIE, ("wrong", 2, 0.5)),
        ([5, 6, 5, 8], math.inf, ("tie", 2, 0.5)),
        ([5, 6, 4, 8], TIE, ("wrong", 2, math.inf)),  # not among the tokens whose probability was asked for
        ([0, 6, 7, 8], TIE, ("wrong", 0, math.inf)),
    ],
)
def test_a_token_is_equal_or_as_good_or_wrong(bench: Any, tokens: list[int], tie: float, wanted: Any) -> None:
    """At the third token 9 is nearly as good as 7, and 5 is not."""
    reference = bench.soak.Reference([1, 2], [5, 6, 7, 8], [{5: 0.0}, {6: 0.0}, {7: 0.0, 9: 0.125, 5: 0.5}, {8: 0.0}])
    assert bench.soak.compare(reference, tokens, tie) == wanted


@pytest.mark.parametrize(
    ("histories", "size", "wanted"),
    [([], 1, True), ([5, 5], 2, True), ([5, 6], 2, False), ([5], 2, False), ([], 2, False)],
)
def test_ranks_took_the_same_paths_and_all_of_them_say_so(bench: Any, histories: Any, size: int, wanted: bool) -> None:
    assert bench.soak.together(histories, size) == wanted


# -- tables ----------------------------------------------------------------------------------------------------


def printed(*files: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/soak_tables.py", *map(str, files)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def written(folder: Path, name: str, row: dict[str, Any]) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(row))
    return path


def test_aborted_answers_are_none_and_halves_that_did_not_run_have_no_row(tmp_path: Path) -> None:
    found = {"control": {"equal": 8, "tie": 1, "wrong": 1, "aborted": 5}, "shared": {"equal": 200}}
    row = {"good": True, "found": found, "commit": "abc"}
    assert printed(written(tmp_path, "a", row)).stdout.splitlines()[2:] == [
        "| a | abc | dense control | 10 | 8 | 1 | 1 (10.00%) |  | yes |",
        "| a | abc | shared steps | 200 | 200 | 0 | 0 (0.00%) | 125 | yes |",
    ]


def test_the_documentation_shows_what_the_files_hold() -> None:
    shown = documented_table("benchmarks", "| wrong answers |")

    def wrong(*files: Path) -> list[list[str]]:
        """Rows of a printed table: [kind, 'WRONG of ALL', how many would show]; of replays the sum is the last two."""
        _, _, *rows = cells(printed(*files).stdout)
        return [[row[2], f"{row[6].split()[0]} of {row[3]}", row[7]] for row in rows]

    replays = [one for one in RESULTS.glob("replay-h200*.json") if "fp16" not in one.stem]
    control, shared, beside = wrong(RESULTS / "soak-h200-fp16.json")
    assert shown[0][1:] == [control[1], *shared[1:]]
    assert shown[1][1:] == ["", *beside[1:]]
    sparse, dense = wrong(RESULTS / "replay-h200-fp16.json")
    assert shown[2][1:] == [dense[1], *sparse[1:]]
    for row, name in zip(shown[3:5], ("exact", "tp2"), strict=True):
        control, shared = wrong(RESULTS / f"soak-h200-{name}.json")[:2]
        assert row[1:3] == [control[1], shared[1]]
    sparse, dense = wrong(*replays)[-2:]
    assert shown[5][1:3] == [dense[1], sparse[1]]


def test_no_answer_is_wrong_in_fp16_over_eight_minutes_nor_of_retracted_requests() -> None:
    row, replayed, retracted = (
        json.loads((RESULTS / f"{name}.json").read_text())
        for name in ("soak-h200-fp16", "replay-h200-fp16", "soak-cpu-retracted")
    )
    assert row["dtype"] == replayed["dtype"] == "float16"
    assert row["good"] and replayed["good"] and retracted["good"]  # noqa: PT018
    assert sum(row["ran"].values()) >= 480
    assert not any(row["found"][half].get("wrong") for half in ("control", "shared", "beside"))
    assert not any(replayed[kind].get("wrong") for kind in ("sparse", "dense"))
    sparse, chosen = retracted["replay"]["sparse"], retracted["replay"]["selections"]["by the server's queries"]
    assert (retracted["dtype"], sparse["tokens behind"], chosen["other"]) == ("float32", 0, 0)
    assert sparse["retractions"] > 0
