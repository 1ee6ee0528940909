"""The ring's order of copies and work, in all orders in which two queues can run."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.offload.ring import Ring

Op = Callable[[], bool]
"""Does something, unless it has to wait."""


class Queued:
    """Two queues with events, as CUDA's: a wait is for what was recorded last before it was queued."""

    def __init__(self) -> None:
        self.main: list[Op] = []
        self.side: list[Op] = []
        self._done: set[int] = set()
        self._events = count()
        self._copied: dict[int, int] = {}
        self._attended: dict[int, int] = {}

    def _record(self, queue: list[Op]) -> int:
        number = next(self._events)
        self._do(queue, lambda: self._done.add(number))
        return number

    def _wait(self, queue: list[Op], event: int | None) -> None:
        if event is not None:
            queue.append(lambda: event in self._done)

    def _do(self, queue: list[Op], work: Callable[[], None]) -> None:
        queue.append(lambda: (work(), True)[1])

    def begin(self) -> None:
        self._wait(self.side, self._record(self.main))

    def copy(self, place: int, work: Callable[[], None]) -> None:
        self._wait(self.side, self._attended.get(place))
        self._do(self.side, work)
        self._copied[place] = self._record(self.side)

    def attend(self, place: int, work: Callable[[], None]) -> None:
        self._wait(self.main, self._copied.get(place))
        self._do(self.main, work)
        self._attended[place] = self._record(self.main)

    def run(self, seed: int, hurry: float) -> None:
        """Until both are empty; `hurry` is how often the copies come first."""
        drawn = random.Random(seed)
        while self.main or self.side:
            queues = [self.side, self.main] if drawn.random() < hurry else [self.main, self.side]
            ran = next((queue for queue in queues if queue and queue[0]()), None)
            assert ran is not None, "both wait"
            del ran[0]


@given(
    num_places=st.integers(1, 5),
    counts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=4),
    seed=st.integers(0, 999),
    hurry=st.floats(0, 1),
)
def test_work_sees_its_own_piece_whichever_queue_is_faster(
    num_places: int, counts: list[tuple[int, int]], seed: int, hurry: float
) -> None:
    """Forwards of so many pieces, of which so many are worked on before an error or a jump ends them."""
    queues = Queued()
    ring, held = Ring(queues, num_places), dict[int, tuple[int, int]]()
    wanted, found = [], []
    for forward, (pieces, worked) in enumerate(counts):

        def copy(number: int, place: int, forward: int = forward) -> None:
            held[place] = forward, number

        ring.begin(range(3, 3 + pieces), copy)
        for number in range(3, 3 + min(pieces, worked)):
            wanted.append((forward, number))
            ring.attend(number, lambda place: found.append(held.get(place)))
    queues.run(seed, hurry)
    assert found == wanted


@pytest.mark.parametrize("num_places", [1, 2, 5])
def test_copies_run_ahead_as_far_as_there_are_places(num_places: int) -> None:
    """Before any work, so many are copied; each work lets one more come."""
    copies: list[int] = []
    queues = Queued()
    ring = Ring(queues, num_places)
    ring.begin(range(20), lambda number, place: copies.append(number))
    for number in range(20):
        ring.attend(number, lambda place: None)
    queues.main.pop(0)()  # the forward has begun
    for done in range(20):
        while queues.side and queues.side[0]():
            del queues.side[0]
        assert copies == list(range(min(20, done + num_places)))
        for _ in "wait", "work", "record":
            assert queues.main.pop(0)()
