"""What a fault campaign is, and what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Outcome:
    """Counts of one campaign.

    ``tried``  faults that were made
    ``lost``   acknowledged indexes that were gone afterwards
    ``wrong``  wrong bytes given out, or anything but the promised error, miss or state
    ``stuck``  calls or processes that did not end in time
    ``detail`` what was made, and the first thing that went wrong
    """

    name: str
    tried: int
    lost: int = 0
    wrong: int = 0
    stuck: int = 0
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.tried > 0 and self.lost == self.wrong == self.stuck == 0


class Campaign(NamedTuple):
    """``run(count, seed)`` makes at least ``count`` faults. ``full`` and ``quick`` are counts, the quick one for
    every test run (a few seconds), the full one for the documented figures.
    """

    run: Callable[[int, int], Outcome]
    full: int
    quick: int
