"""`benchmarks/verdicts.py`: wrong answers that a control of this length explains, and those that it does not."""

from __future__ import annotations

import importlib
import math
import random
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
        (of(16_000, 46), of(24_000, 18), True),
        (of(16_000, 46), of(24_000, 69), True),  # the same share
        (of(16_000, 46), of(24_000, 120), False),
        (of(1_900, 1), of(19_600, 24), True),  # the control's share is 0.05% or 0.3%: nobody can tell
        (of(1_900, 1), of(19_600, 200), False),
        (of(2_000, 0), of(2_000, 8), True),
        (of(2_000, 0), of(2_000, 12), False),
        (of(12, 0), of(160, 4), True),
        (of(12, 0), of(160, 120), False),
        (of(100, 0), of(100, 0, ties=100), True),
    ],
)
def test_wrong_answers_are_allowed_as_far_as_chance_explains_them(
    verdicts: Any, control: Counter[str], treated: Counter[str], wanted: bool
) -> None:
    assert verdicts.no_worse(control, treated) is wanted


@pytest.mark.parametrize("control", [None, Counter(), Counter(aborted=7)])
def test_without_a_control_none_is_allowed(verdicts: Any, control: Counter[str] | None) -> None:
    assert verdicts.no_worse(control, of(1_000, 0))
    assert not verdicts.no_worse(control, of(1_000, 1))
    assert verdicts.detectable(control, of(1_000, 0)) == 1


def test_the_chance_is_that_of_drawing_who_is_wrong(verdicts: Any) -> None:
    """Against 20,000 drawings: 30 of 400 answers are wrong, 300 of them treated; 27 or more of the 30 among these."""
    rng = random.Random(0)
    drawn = sum(sum(one < 300 for one in rng.sample(range(400), 30)) >= 27 for _ in range(20_000)) / 20_000
    chance = verdicts._chance(100, 300, 3, 27)
    assert chance == pytest.approx(drawn, abs=4 * math.sqrt(chance / 20_000))
    assert verdicts._chance(5, 5, 0, 0) == 1.0
    assert verdicts._chance(3, 3, 0, 3) == pytest.approx(1 / 20)


def test_a_row_says_how_many_wrong_answers_it_could_have_found(verdicts: Any) -> None:
    for control, treated in ((of(2_000, 3), of(18_000, 5)), (of(12, 0), of(160, 4)), (of(100, 8), of(250, 8))):
        least = verdicts.detectable(control, treated)
        assert verdicts.no_worse(control, of(verdicts.answers(treated), least - 1))
        assert least > verdicts.answers(treated) or not verdicts.no_worse(control, of(verdicts.answers(treated), least))
    assert verdicts.detectable(of(3, 1), of(3, 0)) == 4, "so short that all could be wrong"
