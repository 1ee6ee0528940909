"""How many wrong answers rounding explains: for `soak.py` and `replay.py`."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from math import exp, lgamma, sqrt

CHANCE = 0.00135
"""Below it so many wrong answers are not explained: that of three standard deviations."""
SHOWS = 0.25
"""Share of the answers: where even so many wrong ones would not show, there are too few to say anything."""

GOOD, WORSE, TOO_FEW = "good", "worse", "too few to tell"


def verdict(control: Counter[str] | None, treated: Counter[str]) -> str:
    """Whether more answers are wrong than dense batches give by their own rounding: `GOOD`, `WORSE`, or `TOO_FEW`.

    Allowed are the control's share and three standard deviations of a count. That takes the share to be known: beside a
    short control a `WORSE` may be chance, and `chance` says how likely. Where the control is so short that it would not
    show a `SHOWS` of the answers (`detectable`), none are good.

    Args:
        control, treated: answers that were "equal", "tie" or "wrong". Without any control none may be wrong.
    """
    share = control["wrong"] / answers(control) if control and answers(control) else 0.0
    expected = share * answers(treated)
    if treated["wrong"] > expected + 3 * sqrt(expected):
        return WORSE
    return GOOD if detectable(control, treated) <= max(1.0, SHOWS * answers(treated)) else TOO_FEW


def chance(control: Counter[str] | None, treated: Counter[str]) -> float:
    """How likely so many of all wrong answers or more are among the treated ones, if it does not depend on how they
    were attended who is wrong: Fisher's exact test, one-sided. It takes answers to be independent; wrong ones that come
    in clusters are fewer than they seem. Without a control: 0 where any is wrong.
    """
    if not treated["wrong"]:
        return 1.0
    if control is None or not answers(control):
        return 0.0
    return _chance(answers(control), answers(treated), control["wrong"], treated["wrong"])


def detectable(control: Counter[str] | None, treated: Counter[str]) -> int:
    """The least number of wrong answers among the treated that chance would not explain: what a run of this length can
    show. One more than there were answers: it could show nothing.
    """
    number = answers(treated)

    def shows(wrong: int) -> bool:
        return chance(control, Counter(equal=number - wrong, wrong=wrong)) <= CHANCE

    return bisect_left(range(number + 1), True, key=shows)


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
