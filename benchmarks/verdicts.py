"""How many wrong answers rounding explains: for `soak.py` and `replay.py`."""

from __future__ import annotations

import math
from collections import Counter


def no_worse(control: Counter[str] | None, shared: Counter[str]) -> bool:
    """Whether wrong answers are no more than dense batches give by their own rounding: three standard deviations of a
    count above the control's share. Without a control, or where that has none, none is allowed.
    """

    def answers(of: Counter[str]) -> int:
        return of["equal"] + of["tie"] + of["wrong"]

    share = control["wrong"] / answers(control) if control and answers(control) else 0.0
    expected = share * answers(shared)
    return shared["wrong"] <= expected + 3 * math.sqrt(expected)
