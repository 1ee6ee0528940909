"""`benchmarks/verdicts.py`: wrong answers that a control of this length explains, and those that it does not."""

from __future__ import annotations

import importlib
import math
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("verdicts")


def of(answers: int, wrong: int, ties: int = 0) -> Counter[str]:
    return Counter(equal=answers - wrong - ties, tie=ties, wrong=wrong, aborted=100)


@pytest.mark.parametrize(
    ("control", "treated", "wanted"),
    [
        (of(16_000, 46), of(24_000, 18), "good"),
        (of(16_000, 46), of(24_000, 69), "good"),  # the same share
        (of(16_000, 46), of(24_000, 120), "worse"),
        (of(1_900, 1), of(19_600, 24), "worse"),  # by the bound; the chance of it is one in three
        (of(1_900, 1), of(19_600, 200), "worse"),
        (of(2_000, 0), of(2_000, 1), "worse"),
        (of(2_000, 1), of(2_000, 4), "good"),
        (of(2_000, 1), of(2_000, 5), "worse"),
        (of(100, 0), of(100, 0, ties=100), "good"),
        (of(12, 0), of(160, 0), "too few to tell"),
        (of(1, 0), of(160, 0), "too few to tell"),
        (of(12, 1), of(160, 4), "too few to tell"),
        (of(12, 0), of(160, 4), "worse"),
    ],
)
def test_wrong_answers_are_allowed_as_far_as_chance_explains_them(
    verdicts: Any, control: Counter[str], treated: Counter[str], wanted: str
) -> None:
    assert verdicts.verdict(control, treated) == wanted


@pytest.mark.parametrize("control", [None, Counter(), Counter(aborted=7)])
def test_without_a_control_none_is_allowed(verdicts: Any, control: Counter[str] | None) -> None:
    for number in (1, 1_000):
        assert verdicts.verdict(control, of(number, 0)) == "good"
        assert verdicts.verdict(control, of(number, 1)) == "worse"
    assert verdicts.detectable(control, of(1_000, 0)) == 1


def test_in_float32_a_control_excuses_nothing(verdicts: Any) -> None:
    control = dict(of(500, 3))
    assert verdicts.excusing(control, "float32") is None
    assert verdicts.excusing(None, "bfloat16") is None
    assert verdicts.excusing(control, "bfloat16") == verdicts.counted(control) == Counter(equal=497, tie=0, wrong=3)


def test_the_chance_is_that_of_drawing_who_is_wrong(verdicts: Any) -> None:
    """Against 20,000 drawings: 30 of 400 answers are wrong, 300 of them treated; 27 or more of the 30 among these."""
    rng = random.Random(0)
    drawn = sum(sum(one < 300 for one in rng.sample(range(400), 30)) >= 27 for _ in range(20_000)) / 20_000
    chance = verdicts._chance(100, 300, 3, 27)
    assert chance == pytest.approx(drawn, abs=4 * math.sqrt(chance / 20_000))
    assert verdicts._chance(5, 5, 0, 0) == 1.0
    assert verdicts._chance(3, 3, 0, 3) == pytest.approx(1 / 20)


@pytest.mark.parametrize(
    ("control", "treated"), [(of(2_000, 3), of(18_000, 5)), (of(12, 0), of(160, 4)), (of(100, 8), of(250, 8))]
)
def test_a_run_can_find_one_wrong_answer_more_than_it_allows(
    verdicts: Any, control: Counter[str], treated: Counter[str]
) -> None:
    least, number = verdicts.detectable(control, treated), verdicts.answers(treated)
    assert verdicts.chance(control, of(number, least - 1)) > verdicts.CHANCE
    assert verdicts.chance(control, of(number, least)) <= verdicts.CHANCE


def test_a_control_of_three_can_find_nothing(verdicts: Any) -> None:
    assert verdicts.detectable(of(3, 1), of(3, 0)) == 4


def test_many_wrong_answers_are_counted_in_no_time(verdicts: Any) -> None:
    """1,166 of 16,080 and some 2,000 of 24,000: with sums of whole numbers that took half an hour."""
    begun = time.monotonic()
    assert 1_800 < verdicts.detectable(of(16_080, 1_166), of(24_000, 0)) < 2_100
    assert time.monotonic() - begun < 20
