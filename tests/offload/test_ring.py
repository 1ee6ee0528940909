"""The ring's order of copies and work, in all orders in which two queues can run."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.offload.ring import Ring

Op = Callable[[], bool]
"""Does something, unless it has to wait."""


class Queued:
    """Two queues with events, as CUDA's: a wait is for what was recorded last before it was queued.

    Args:
        waits: whether copies wait for the work on their place; a ring without is wrong.
    """

    def __init__(self, *, waits: bool = True) -> None:
        self.main: list[Op] = []
        self.side: list[Op] = []
        self._done: set[int] = set()
        self._events = 0
        self._copied: dict[int, int] = {}
        self._attended: dict[int, int] = {}
        self._waits = waits

    def _record(self, queue: list[Op]) -> int:
        self._events += 1
        number = self._events

        def record() -> bool:
            self._done.add(number)
            return True

        queue.append(record)
        return number

    def _wait(self, queue: list[Op], event: int | None) -> None:
        if event is not None:
            queue.append(lambda: event in self._done)

    def _do(self, queue: list[Op], work: Callable[[], None]) -> None:
        def done() -> bool:
            work()
            return True

        queue.append(done)

    def begin(self) -> None:
        self._wait(self.side, self._record(self.main))

    def copy(self, place: int, work: Callable[[], None]) -> None:
        if self._waits:
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
            for queue in queues:
                if queue and queue[0]():
                    del queue[0]
                    break
            else:
                raise AssertionError("both wait")


def forwards(queues: Queued, num_places: int, counts: list[tuple[int, int]]) -> list[tuple[int, int, int | None]]:
    """Forwards of so many pieces, of which so many are worked on before an error or a jump ends them: per work, which
    forward's piece it is of, and what its place held then.
    """
    ring, held, found = Ring(queues, num_places), defaultdict[int, tuple[int, int]](lambda: (-1, -1)), []
    for forward, (count, worked) in enumerate(counts):

        def copy(number: int, place: int, forward: int = forward) -> None:
            held[place] = forward, number

        ring.begin(range(3, 3 + count), copy)
        for number in range(3, 3 + min(count, worked)):

            def work(place: int, wanted: tuple[int, int] = (forward, number)) -> None:
                found.append((*wanted, held[place][1] if held[place][0] == wanted[0] else None))

            ring.attend(number, work)
    return found


COUNTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=4)


@given(num_places=st.integers(1, 5), counts=COUNTS, seed=st.integers(0, 999), hurry=st.floats(0, 1))
def test_work_sees_its_own_piece_whichever_queue_is_faster(
    num_places: int, counts: list[tuple[int, int]], seed: int, hurry: float
) -> None:
    queues = Queued()
    found = forwards(queues, num_places, counts)
    queues.run(seed, hurry)
    wanted = [
        (forward, number, number)
        for forward, (count, worked) in enumerate(counts)
        for number in range(3, 3 + min(count, worked))
    ]
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


def test_a_ring_that_does_not_wait_is_seen() -> None:
    queues = Queued(waits=False)
    found = forwards(queues, 2, [(8, 8)])
    queues.run(0, 1.0)
    assert any(number != held for _, number, held in found)
