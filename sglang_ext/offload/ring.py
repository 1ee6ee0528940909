"""A ring of places on the device, through which pieces of host memory pass: copies run ahead of the work on them.

Pieces of a forward are numbered in the order of the work. Piece n passes through place n % num_places: it is copied
there when the work on piece n - num_places has ended, and worked on when its copy has ended. Both are queued by one
thread; on CUDA copies are on a stream of their own, and nobody waits but the streams.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch


class Queues:
    """A queue for copies, and the one that all else of a forward is in. By itself that of a device without streams:
    everything at once.
    """

    def begin(self) -> None:
        """Copies queued from now on run behind all that was queued elsewhere so far."""

    def copy(self, place: int, work: Callable[[], None]) -> None:
        """Queue a copy to a place, behind the last work on it."""
        work()

    def attend(self, place: int, work: Callable[[], None]) -> None:
        """Queue work on a place, behind the last copy to it."""
        work()


class TwoStreams(Queues):
    """Copies on a CUDA stream of their own, the work on the current one.

    Args:
        device: of CUDA.
        num_places: of the ring.
    """

    def __init__(self, device: torch.device, num_places: int) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied, self._attended = (
            [torch.cuda.Event() for _ in range(num_places)]  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

    def begin(self) -> None:
        """See `Queues.begin`; also KV that a decode step still copies to host memory is there before it is read."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, place: int, work: Callable[[], None]) -> None:
        """See `Queues.copy`."""
        self._side.wait_event(self._attended[place])
        with torch.cuda.stream(self._side):
            work()
        self._copied[place].record(self._side)

    def attend(self, place: int, work: Callable[[], None]) -> None:
        """See `Queues.attend`."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._copied[place])
        work()
        self._attended[place].record(stream)


class Ring:
    """Used by one thread.

    Args:
        queues: where copies and work go.
        num_places: of the device, used by nothing else.
    """

    def __init__(self, queues: Queues, num_places: int) -> None:
        self._queues, self._num_places = queues, num_places
        self._numbers = range(0)
        self._copy: Callable[[int, int], None]

    def begin(self, numbers: range, copy: Callable[[int, int], None]) -> None:
        """Queue the first copies. What is left of the pieces before, after an error, is given up.

        Args:
            numbers: of the pieces that are to come, one after another.
            copy: what copies a piece, by its number, to a place.
        """
        self._numbers, self._copy = numbers, copy
        self._queues.begin()
        for number in numbers[: self._num_places]:
            self._fetch(number)

    def attend(self, number: int, work: Callable[[int], None]) -> None:
        """Queue the work on the next piece, which is told its place, and the copy of the one that comes there next."""
        place = number % self._num_places
        self._queues.attend(place, partial(work, place))
        if number + self._num_places in self._numbers:
            self._fetch(number + self._num_places)

    def _fetch(self, number: int) -> None:
        place = number % self._num_places
        self._queues.copy(place, partial(self._copy, number, place))
