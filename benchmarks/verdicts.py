"""How many wrong answers rounding explains: for `soak.py` and `replay.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import exp, lgamma

CHANCE = 0.00135
"""Of as many wrong answers or more, where both kinds are wrong equally often: that of three standard deviations."""
SHOWS = 0.25
"""Share of the answers: where even so many wrong ones would not show, there are too few to say anything."""

GOOD, WORSE, TOO_FEW = "good", "worse", "too few to tell"


def verdict(control: Counter[str] | None, treated: Counter[str]) -> str:
    """Whether more answers are wrong than dense batches give by their own rounding: `GOOD`, `WORSE`, or `TOO_FEW`.

    Fisher's exact test, one-sided: how likely so many of all wrong answers or more are among the treated ones, if it
    does not depend on how they were attended who is wrong (a hypergeometric count). It takes answers to be independent;
    wrong ones that come in clusters are fewer than they seem.

    Args:
        control, treated: answers that were "equal", "tie" or "wrong". Without any control none may be wrong.
    """
    if not _allowed(control, answers(treated), treated["wrong"]):
        return WORSE
    return GOOD if detectable(control, treated) <= max(1.0, SHOWS * answers(treated)) else TOO_FEW


def detectable(control: Counter[str] | None, treated: Counter[str]) -> int:
    """The least number of wrong answers among the treated that would have been too many: what a run of this length can
    find. One more than there were answers: it could find nothing.
    """
    allowed, number = 0, answers(treated)
    too_many = number + 1
    while too_many - allowed > 1:
        middle = (allowed + too_many) // 2
        if _allowed(control, number, middle):
            allowed = middle
        else:
            too_many = middle
    return too_many


def counted(of: Mapping[str, int]) -> Counter[str]:
    """Answers by verdict, and nothing else that a row counts."""
    return Counter({one: of.get(one, 0) for one in ("equal", "tie", "wrong")})


def excusing(control: Mapping[str, int] | None, dtype: str) -> Counter[str] | None:
    """What wrong answers are compared with: the control; None in float32, where rounding excuses nothing.

    Args:
        control: answers by verdict; None: there was none.
        dtype: of the model, as torch names it.
    """
    return None if control is None or dtype == "float32" else counted(control)


def answers(of: Counter[str]) -> int:
    """That were judged."""
    return of["equal"] + of["tie"] + of["wrong"]


def _allowed(control: Counter[str] | None, treated: int, wrong: int) -> bool:
    if not wrong:
        return True
    if control is None or not answers(control):
        return False
    return _chance(answers(control), treated, control["wrong"], wrong) > CHANCE


def _chance(controls: int, treated: int, wrong_controls: int, wrong_treated: int) -> float:
    """That of all wrong answers so many or more are among the treated ones."""
    wrong = wrong_controls + wrong_treated
    every = _log_choices(controls + treated, wrong)
    return sum(
        exp(_log_choices(treated, count) + _log_choices(controls, wrong - count) - every)
        for count in range(wrong_treated, min(wrong, treated) + 1)
    )


def _log_choices(of: int, count: int) -> float:
    """Natural log of the number of ways to choose `count` of them."""
    return lgamma(of + 1) - lgamma(count + 1) - lgamma(of - count + 1)
