"""Bulk reads: many arrays into one buffer, by several threads, each array checked as soon as its bytes are there.

The plan cuts what was asked for into pieces: a run of whole neighbouring arrays, or a part of one long array. Each
thread fetches a piece and then checks it while the other threads fetch theirs, so the disk does not wait for the
checksums. Long arrays are hashed in order by whichever thread finds the next part in place.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from .format import ALIGN, ArrayRecord, corrupt, invalid, xxh3_hex
from .source import Fetch

PIECE_NBYTES: Final = 4 << 20
THREADS: Final = 8
_ZEROS: Final = bytes(ALIGN)
_OFFSET: Final = attrgetter("offset")


class Placed(NamedTuple):
    """An array and where it goes: ``at`` bytes from the start of the buffer."""

    record: ArrayRecord
    at: int


class _LongArray:
    """Checks one array whose parts arrive in any order, in several threads."""

    def __init__(self, placed: Placed, parts: int) -> None:
        self.placed = placed
        self._lock = threading.Lock()
        self._arrived = [False] * parts
        self._next = 0
        self._busy = False
        self._hash = xxhash.xxh3_64()

    def arrived(self, part: int, buffer: memoryview) -> None:
        """Hashes what is next in order, unless another thread does. Raises IndexCorrupt after the last part."""
        with self._lock:
            self._arrived[part] = True
            if self._busy:
                return
            self._busy = True
        start, end = self.placed.at, self.placed.at + self.placed.record.nbytes
        while True:
            with self._lock:
                if self._next == len(self._arrived) or not self._arrived[self._next]:
                    self._busy = False
                    break
            first = start + self._next * PIECE_NBYTES
            self._hash.update(buffer[first : min(first + PIECE_NBYTES, end)])
            self._next += 1
        if part == len(self._arrived) - 1 and end % ALIGN:
            check_padding(self.placed, buffer)
        if self._next == len(self._arrived):
            compare(self.placed.record, self._hash.hexdigest())


@dataclass
class Piece:
    """``nbytes`` (a multiple of 4 KiB) from ``offset`` of the container to ``at`` of the buffer."""

    offset: int
    at: int
    nbytes: int
    whole: list[Placed] = field(default_factory=list)
    part: tuple[_LongArray, int] | None = None

    def check(self, buffer: memoryview) -> None:
        for placed in self.whole:
            record, at = placed
            end = at + record.nbytes
            compare(record, xxh3_hex(buffer[at:end]))
            if end % ALIGN:
                check_padding(placed, buffer)
        if self.part is not None:
            array, number = self.part
            array.arrived(number, buffer)


@dataclass(frozen=True)
class ReadPlan:
    """Pieces to fetch, where each array ends up, and how long the buffer must be (bytes, a multiple of 4 KiB)."""

    pieces: Sequence[Piece]
    places: Sequence[Placed]
    nbytes: int

    @classmethod
    def of(cls, records: Iterable[ArrayRecord], data_offset: int) -> ReadPlan:
        """The arrays in the order of the file, each from a 4 KiB boundary of the buffer, nothing between them."""
        pieces: list[Piece] = []
        places: list[Placed] = []
        at = 0
        last: Piece | None = None
        for record in sorted(records, key=_OFFSET):
            placed = Placed(record, at)
            places.append(placed)
            size, offset = -(-record.nbytes // ALIGN) * ALIGN, data_offset + record.offset
            if not size:
                continue
            if size > PIECE_NBYTES:
                array = _LongArray(placed, -(-size // PIECE_NBYTES))
                for number, begin in enumerate(range(0, size, PIECE_NBYTES)):
                    nbytes = min(PIECE_NBYTES, size - begin)
                    pieces.append(Piece(offset + begin, at + begin, nbytes, part=(array, number)))
            elif last is not None and last.offset + last.nbytes == offset and last.nbytes + size <= PIECE_NBYTES:
                last.nbytes += size
                last.whole.append(placed)
            else:
                last = Piece(offset, at, size, [placed])
                pieces.append(last)
            at += size
        return cls(pieces, places, at)


def run(plan: ReadPlan, fetch: Fetch, buffer: memoryview, *, threads: int, verify: bool) -> None:
    """Fetches all pieces into ``buffer``. Raises the first error; then no thread is at work any more.

    Raises IndexCorrupt for a wrong checksum, padding or length, and what ``fetch`` raises.
    """
    stopped = threading.Event()

    def work(piece: Piece) -> None:
        if stopped.is_set():
            return
        try:
            got = fetch(buffer[piece.at : piece.at + piece.nbytes], piece.offset)
            if got != piece.nbytes:
                raise corrupt(f"bytes from {piece.offset} on", piece.nbytes, f"{got}: somebody cut the file")
            if verify:
                piece.check(buffer)
        except BaseException:
            stopped.set()
            raise

    threads = min(threads, len(plan.pieces))
    if threads <= 1:
        for piece in plan.pieces:
            work(piece)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="index-read") as pool:
        try:
            for done in [pool.submit(work, piece) for piece in plan.pieces]:
                done.result()
        finally:
            stopped.set()


def fresh_buffer(nbytes: int) -> NDArray[np.uint8]:
    """Page-aligned memory that nothing else uses, not zeroed. Raises MemoryError."""
    memory = np.empty(nbytes + ALIGN - 1, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + nbytes]


def flat_buffer(out: NDArray[Any], nbytes: int, *, direct: bool | None) -> NDArray[np.uint8]:
    """The first ``nbytes`` bytes of a caller's array. Raises InvalidPayload for one that cannot take them."""
    good = out.nbytes >= nbytes and out.flags.c_contiguous and out.flags.writeable
    if not good or (direct and out.ctypes.data % ALIGN):
        wanted = f"{nbytes} bytes or more, contiguous, writable"
        found = f"{out.nbytes} bytes, contiguous {out.flags.c_contiguous}, writable {out.flags.writeable}"
        if direct:
            wanted, found = f"{wanted}, on a {ALIGN}-byte boundary", f"{found}, {out.ctypes.data % ALIGN} bytes off"
        raise invalid("buffer of a bulk read", wanted, found, "take read_nbytes() bytes of page-aligned memory")
    return out.reshape(-1).view(np.uint8)[:nbytes]


def compare(record: ArrayRecord, found: str) -> None:
    """Raises IndexCorrupt where an array's checksum is another one."""
    if found != record.xxh3:
        raise corrupt(f"checksum of {tuple(record.key)}", record.xxh3, found)


def check_padding(placed: Placed, buffer: memoryview) -> None:
    """Raises IndexCorrupt where something else than zeros follows an array."""
    end = placed.at + placed.record.nbytes
    nbytes = -end % ALIGN
    if bytes(buffer[end : end + nbytes]) != _ZEROS[:nbytes]:
        raise corrupt(f"padding after {tuple(placed.record.key)}", "zeros", "other bytes")
