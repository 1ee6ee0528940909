"""docs/benchmarks.md: its tables of answers are what the committed command prints from the committed rows."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def accuracy() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("accuracy")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def files(*names: str) -> list[str]:
    return [str(RESULTS / f"accuracy-h200-{name}.jsonl") for name in names]


def documented(heading: str) -> list[str]:
    """Lines of the first table behind a heading."""
    lines = (ROOT / "docs" / "benchmarks.md").read_text().splitlines()
    behind = itertools.dropwhile(lambda line: not line.startswith("|"), lines[lines.index(heading) + 1 :])
    return list(itertools.takewhile(lambda line: line.startswith("|"), behind))


def without_names(lines: list[str]) -> list[str]:
    """Rows without their first cell, which names the recipe in words."""
    return [line.split("|", 2)[2] for line in lines]


def test_the_table_of_the_default_is_the_printed_one(accuracy: ModuleType) -> None:
    heading = "## Accuracy of the default recipe, dense and sparse, paired"
    assert documented(heading) == accuracy.table(files("token_index")).splitlines()


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("### The default before, and blocks", ("default", "ab_sparse")),
        ("### Two earlier recipes", ("flashinfer", "two_level")),
    ],
)
def test_the_summaries_of_other_recipes_are_the_printed_ones(
    accuracy: ModuleType, heading: str, names: tuple[str, ...]
) -> None:
    assert without_names(documented(heading)) == without_names(accuracy.summary(files(*names)).splitlines())


def test_the_sentences_about_the_default_are_the_rows(accuracy: ModuleType) -> None:
    rows = [line.split(" | ") for line in accuracy.summary(files("token_index")).splitlines()[2:]]
    assert [(row[2], row[6], row[7].split(" [")[0], row[8]) for row in rows] == [
        ("5%", "multi_value", "-0.6%", "-0.08%"),
        ("5%", "multi_value", "-0.6%", "-0.08%"),
        ("10%", "multi_value", "-0.2%", "-0.03%"),
        ("10%", "multi_value", "+0.0%", "+0.00%"),
    ]


def test_the_tables_of_answers_inside_graphs_are_the_printed_ones(accuracy: ModuleType) -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    table = accuracy.summary(files("graphs-int8"))
    assert table in text
    assert [line.split(" | ")[4] for line in table.splitlines()[2:]] == ["1", "16", "1", "16"]
    assert accuracy.table(files("graphs-period")) in text


def test_the_sentence_about_earlier_forms_inside_graphs_is_the_rows(accuracy: ModuleType) -> None:
    rows = [line.split(" | ") for line in accuracy.summary(files("graphs", "graphs-sums")).splitlines()[2:]]
    assert min(float(row[7].split("%")[0]) for row in rows) == -0.4
