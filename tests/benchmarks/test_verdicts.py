"""`benchmarks/verdicts.py`: wrong answers that a control of this length explains, and those that it does not."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest


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
        *((control, of(1_000, 0), "good") for control in (None, Counter(), Counter(aborted=7))),
        *((control, of(1_000, 1), "worse") for control in (None, Counter(), Counter(aborted=7))),
    ],
)
def test_wrong_answers_are_allowed_as_far_as_chance_explains_them(
    bench: Any, control: Counter[str] | None, treated: Counter[str], wanted: str
) -> None:
    assert bench.verdicts.verdict(control, treated) == wanted


def test_in_float32_a_control_excuses_nothing(bench: Any) -> None:
    control = dict(of(500, 3))
    excusing, counted = bench.verdicts.excusing, bench.verdicts.counted
    assert excusing(control, "float32") is excusing(None, "bfloat16") is None
    assert excusing(control, "bfloat16") == counted(control) == Counter(equal=497, tie=0, wrong=3)


def test_the_chance_is_that_of_drawing_who_is_wrong(bench: Any) -> None:
    """Against 20,000 drawings: 30 of 400 answers are wrong, 300 of them treated; 27 or more of the 30 among these."""
    rng = random.Random(0)
    drawn = sum(sum(one < 300 for one in rng.sample(range(400), 30)) >= 27 for _ in range(20_000)) / 20_000
    chance = bench.verdicts._chance(100, 300, 3, 27)
    assert chance == pytest.approx(drawn, abs=4 * math.sqrt(chance / 20_000))
    assert bench.verdicts._chance(5, 5, 0, 0) == 1.0
    assert bench.verdicts._chance(3, 3, 0, 3) == pytest.approx(1 / 20)
