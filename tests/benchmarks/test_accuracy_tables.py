"""docs/benchmarks.md: its tables of answers are what the committed command prints from the committed rows."""

from __future__ import annotations

import importlib
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


def test_the_sentences_about_the_default_are_the_rows(accuracy: ModuleType) -> None:
    rows = [line.split(" | ") for line in accuracy.summary(files("token_index")).splitlines()[2:]]
    assert [(row[2], row[6], row[7].split(" [")[0], row[8]) for row in rows] == [
        ("5%", "multi_value", "-0.6%", "-0.08%"),
        ("5%", "multi_value", "-0.6%", "-0.08%"),
        ("10%", "multi_value", "-0.2%", "-0.03%"),
        ("10%", "multi_value", "+0.0%", "+0.00%"),
    ]


@pytest.mark.parametrize("name", ["token_index", "graphs-int8", "graphs-period"])
def test_the_tables_of_answers_are_the_printed_ones(accuracy: ModuleType, name: str) -> None:
    assert accuracy.summary(files(name)) in (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_sentence_about_earlier_forms_inside_graphs_is_the_rows(accuracy: ModuleType) -> None:
    rows = [line.split(" | ") for line in accuracy.summary(files("graphs", "graphs-sums")).splitlines()[2:]]
    assert min(float(row[7].split("%")[0]) for row in rows) == -0.4
