"""docs/benchmarks.md: its tables of answers are what the committed command prints from the committed rows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.benchmarks.results import RESULTS, document


@pytest.fixture(scope="module")
def summary(load: Any) -> Any:
    """Names of files of rows -> the printed table."""
    print_of = load("accuracy").accuracy.summary
    return lambda *names: print_of([str(RESULTS / f"accuracy-h200-{name}.jsonl") for name in names])


@pytest.mark.parametrize("name", ["token_index", "graphs-int8", "graphs-period"])
def test_the_tables_of_answers_are_the_printed_ones(summary: Any, name: str) -> None:
    assert summary(name) in document("benchmarks")


def test_the_sentences_about_the_default_and_earlier_forms_are_the_rows(summary: Any) -> None:
    default, earlier = (
        [line.split(" | ") for line in summary(*names).splitlines()[2:]]
        for names in (["token_index"], ["graphs", "graphs-sums"])
    )
    assert [(row[2], row[6], row[7].split(" [")[0], row[8]) for row in default] == [
        ("5%", "multi_value", "-0.6%", "-0.08%"),
        ("5%", "multi_value", "-0.6%", "-0.08%"),
        ("10%", "multi_value", "-0.2%", "-0.03%"),
        ("10%", "multi_value", "+0.0%", "+0.00%"),
    ]
    assert min(float(row[7].split("%")[0]) for row in earlier) == -0.4
