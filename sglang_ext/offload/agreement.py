"""What all tensor-parallel ranks know of prefixes in host memory: the least that any of them knows.

Each rank has its own KV heads in its own memory and files. Files come and go, moves end and fail, look-ups find an
index, and clocks run on each rank by itself. Decisions are made from what was agreed on.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple, Protocol

import torch
import xxhash

from sglang_ext.offload.directory import Offload, OffloadDirectory, OffloadState
from sglang_ext.offload.host import HostPool
from sglang_ext.offload.kv_files import KVFiles, Move, Mover, waits_for
from sglang_ext.prefix.requests import Attachment
from sglang_ext.ranks import Ranks

logger = logging.getLogger(__name__)

WAIT_S = 60.0
"""For so long a request waits for a file, at most; then it is prefilled. Behind it reading and writing hang."""
_RETRY_S = 60.0
"""For so long a file that could not be read is as if it were not there."""
_LOOK_S = 1.0
"""For so long what a look at the disk has found is taken as true."""
_LOOKED = 4096
"""Prefixes of which is remembered whether there is a file, at most."""
_FAILED, _DONE = 1, 2
"""How a move has ended on a rank; 0: not yet."""


class Word(NamedTuple):
    """What all ranks say of a request.

    Attributes:
        digest: of its index; None: they found none, or not the same.
        may: whether it may be served by that.
        filed: whether there is a file, where one may be wanted.
        loaded: whether the index is not on its way to the device any more.
        copied: whether a request that runs has the prefix copied out.
    """

    digest: str | None = None
    may: bool = False
    filed: bool = False
    loaded: bool = False
    copied: bool = False


NOTHING = Word()


class Here(Protocol):
    """What this rank says by itself. None of it may raise: others wait for it.

    Attributes:
        loading: whether an index is on its way to the device.
    """

    loading: Callable[[str], bool]

    def may(self, one: Attachment) -> bool:
        """Whether a request may be served by its index."""

    def is_copied(self, digest: str) -> bool:
        """Whether a request that runs has a prefix copied out."""

    def filled(self, offload: Offload) -> None:
        """A prefix was read from its file; this may raise."""


class OffloadAgreement:
    """Used by the scheduler's thread only. Methods that are said to be collectives stand where all ranks come by, with
    the same requests in the same order.

    Attributes:
        now: when the last collective was, seconds of `time.monotonic`.
        moves: between host memory and files, as they were begun; the same on all ranks.
        progress: when the last one ended, or went on, by whether it loads.

    Args:
        ranks: of this process.
        here: what it says by itself.
        directory: of the prefixes in host memory.
        files: of this rank; None: there are none.
        pool: of host memory.
        device: of the KV pool.
    """

    def __init__(
        self,
        ranks: Ranks,
        here: Here,
        directory: OffloadDirectory,
        files: KVFiles | None,
        pool: HostPool,
        device: torch.device,
    ) -> None:
        self._ranks, self._here, self._directory, self._device = ranks, here, directory, device
        self._words: weakref.WeakKeyDictionary[Attachment, Word] = weakref.WeakKeyDictionary()
        self._ended = dict[Offload, int]()
        self._looked = dict[str, tuple[float, bool]]()
        self._files = files
        self._mover = None if files is None else Mover(files, pool)
        self.moves = list[Move]()
        self.progress = dict.fromkeys((True, False), 0.0)
        self.now = 0.0

    def settle(self, ones: Sequence[Attachment | None]) -> None:
        """A collective: take the moves that have ended on all ranks, and learn what all say of requests."""
        self._end_moves()
        facts = dict[str, tuple[int, ...]]()
        values = list[int]()
        for move in self.moves:
            values += self._ended.get(move.offload, 0), round(move.progress * 1e6)
        for one in ones:
            values += self._said_here(one, facts)
        least = iter(self.least(values))
        for move in list(self.moves):
            state, progress = islice(least, 2)
            self.progress[move.loads] = max(self.progress[move.loads], progress / 1e6)
            if state:
                self._moved(move, state)
        for one in ones:
            low, high, *rest = islice(least, 1 + len(NOTHING))
            if one is not None:
                digest = one.entry.digest if one.entry is not None and low == -high else None
                self._words[one] = NOTHING if digest is None else Word(digest, *map(bool, rest))

    def least(self, values: Sequence[int]) -> list[int]:
        """A collective, see `Ranks`; it also says what time it is, in microseconds."""
        now, *least = self._ranks.least([round(time.monotonic() * 1e6), *values])
        self.now = now / 1e6
        return least

    def word(self, one: Attachment | None) -> Word:
        """What all ranks say of a request, as of the last time that they were asked. A collective, where they never
        were.
        """
        if one is not None and one not in self._words:
            self.settle([one])
        return self.known(one)

    def known(self, one: Attachment | None) -> Word:
        """As `word`, and nothing where they never were."""
        return NOTHING if one is None or one.entry is None else self._words.get(one, NOTHING)

    def _said_here(self, one: Attachment | None, facts: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
        """A request's word on this rank, its index as a number and less that number; `facts` of digests are kept."""
        if one is None or one.entry is None:
            return (0,) * (1 + len(NOTHING))
        digest = one.entry.digest
        if digest not in facts:
            state = self._directory.state(digest)
            copies = state is OffloadState.COPYING
            filed = (copies or state is None) and self._filed(digest)
            facts[digest] = filed, not self._here.loading(digest), copies and self._here.is_copied(digest)
        number = xxhash.xxh3_64_intdigest(digest.encode()) >> 1
        return number, -number, self._here.may(one), *facts[digest]

    def _filed(self, digest: str) -> bool:
        """Whether there is a file, as of the last look at the disk."""
        if self._files is None:
            return False
        now = time.monotonic()
        until, there = self._looked.get(digest, (0.0, False))
        if now >= until:
            there = False
            with suppress(OSError):
                there = self._files.path(digest).exists()
            if len(self._looked) >= _LOOKED:
                self._looked.clear()
            self._looked[digest] = now + _LOOK_S, there
        return there

    # -- moves -----------------------------------------------------------------------------------------------

    def move(self, offload: Offload, *, loads: bool) -> None:
        """Begin to read a prefix from its file, or to write it, behind a collective."""
        assert self._mover is not None
        self._directory.pin(offload)
        offload.moved_at = self.now
        used = [] if loads else self._directory.digests
        self.moves.append(Move(offload, loads, waits_for(self._device), used))
        self._mover.begin(self.moves[-1])

    def hangs(self, *, loads: bool) -> bool:
        """Whether moves of a kind are under way, and for long none has gone on."""
        first = next((move.offload for move in self.moves if move.loads == loads), None)
        return first is not None and self.now >= max(first.moved_at, self.progress[loads]) + WAIT_S

    def _end_moves(self) -> None:
        """What this rank does by itself for moves that have ended on it."""
        for move in () if self._mover is None else self._mover.ended():
            offload = move.offload
            if move.loads and move.error is None and not offload.dropped:
                try:
                    self._here.filled(offload)
                except Exception as error:  # the server lives on
                    move.error = error
            self._ended[offload] = _DONE if move.error is None else _FAILED
            if move.error is not None:
                what = "read from" if move.loads else "written to"
                logger.error("sparse attention: offload: a prefix was not %s its file", what, exc_info=move.error)
                gone = isinstance(move.error, FileNotFoundError)  # it had been there within the last second
                self._looked[offload.digest] = time.monotonic() + (_LOOK_S if gone else _RETRY_S), False
            elif not move.loads:
                self._looked.pop(offload.digest, None)

    def _moved(self, move: Move, state: int) -> None:
        """A move has ended on all ranks."""
        offload = move.offload
        self.moves.remove(move)
        del self._ended[offload]
        self.progress[move.loads] = self.now
        if state == _FAILED:
            self._directory.moved("load_failed" if move.loads else "save_failed", offload)
        elif not (move.loads and offload.dropped):
            self._directory.moved("loaded" if move.loads else "saved", offload)
        self._directory.unpin(offload)
