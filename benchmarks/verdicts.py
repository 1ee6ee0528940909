"""How many wrong answers rounding explains: for `soak.py` and `replay.py`."""

from __future__ import annotations

from collections import Counter
from math import comb

CHANCE = 0.00135
"""Of as many wrong answers or more, where both kinds are wrong equally often: that of three standard deviations."""


def no_worse(control: Counter[str] | None, treated: Counter[str]) -> bool:
    """Whether no more answers are wrong than dense batches give by their own rounding, as far as chance can tell.

    Fisher's exact test, one-sided: how likely so many of all wrong answers or more are among the treated ones, if it
    does not depend on how they were attended who is wrong (a hypergeometric count). So a short control condemns nobody,
    and acquits too easily: see `detectable`. Without any control no wrong answer is allowed.

    Args:
        control, treated: answers that were "equal", "tie" or "wrong".
    """
    if not treated["wrong"]:
        return True
    if control is None or not answers(control):
        return False
    return _chance(answers(control), answers(treated), control["wrong"], treated["wrong"]) > CHANCE


def detectable(control: Counter[str] | None, treated: Counter[str]) -> int:
    """The least number of wrong answers among the treated that `no_worse` would not have allowed: what a run of this
    length can find. One more than there were answers: it could find nothing.
    """
    wrong, number = 1, answers(treated)
    while wrong <= number and no_worse(control, Counter(equal=number - wrong, wrong=wrong)):
        wrong += 1
    return wrong


def answers(of: Counter[str]) -> int:
    """That were judged."""
    return of["equal"] + of["tie"] + of["wrong"]


def _chance(controls: int, treated: int, wrong_controls: int, wrong_treated: int) -> float:
    """That of all wrong answers so many or more are among the treated ones."""
    wrong = wrong_controls + wrong_treated
    cases = sum(
        comb(treated, count) * comb(controls, wrong - count) for count in range(wrong_treated, min(wrong, treated) + 1)
    )
    return cases / comb(controls + treated, wrong)
