"""Making room in a store's folder: its limits, how much is missing, and who leaves for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from .books import FolderBooks
from .errors import StoreFull
from .eviction import Candidate, EvictionPolicy, choose_victims
from .folder import free_bytes
from .store import IndexEntry


@dataclass(frozen=True)
class FolderLimits:
    """``max_bytes`` for all index files together (None: any), ``min_free_bytes`` to leave free on the disk.

    With neither, nothing is ever evicted.
    """

    max_bytes: int | None
    min_free_bytes: int
    policy: EvictionPolicy
    clock: Callable[[], float]

    @property
    def any(self) -> bool:
        return self.max_bytes is not None or self.min_free_bytes > 0

    def shortage(self, books: FolderBooks, folder: Path, nbytes: int, replaced: str | None) -> int:
        """How many bytes must go before ``nbytes`` may come; 0 or less: none. Raises OSError.

        The index to be replaced counts as gone, but the disk has to hold both for a while.
        """
        old = None if replaced is None else books.signature(replaced)
        gone = 0 if old is None else old.nbytes
        free = free_bytes(folder)
        needs = [nbytes - free, nbytes + self.min_free_bytes - free - gone]
        if self.max_bytes is not None:
            needs.append(books.used_bytes + nbytes - gone - self.max_bytes)
        return max(needs)

    def victims(
        self, books: FolderBooks, folder: Path, nbytes: int, replaced: str | None
    ) -> Sequence[IndexEntry] | None:
        """Who leaves so that ``nbytes`` fit; None where all of them would not be enough. Raises OSError."""
        short = self.shortage(books, folder, nbytes, replaced)
        if short <= 0:
            return ()
        return self.leaving(books, short, () if replaced is None else (replaced,))

    def leaving(self, books: FolderBooks, nbytes: int, staying: Collection[str]) -> Sequence[IndexEntry] | None:
        """Who leaves for ``nbytes`` bytes, none of ``staying`` (digests); None where all others are not enough."""
        candidates = [c for digest, c in books.candidates() if digest not in staying]
        now, latest = self.clock(), books.latest_use
        return choose_victims(candidates, nbytes, policy=self.policy, now=now, latest=latest, last_used=_last_used)

    def full(
        self, books: FolderBooks, folder: Path, nbytes: int, replaced: str | None, *, stuck: int | None = None
    ) -> StoreFull:
        """The error that says which limit stands in the way, and what the store itself cannot free. ``stuck`` are
        bytes of indexes that should have left and could not be removed.
        """
        short = self.shortage(books, folder, nbytes, replaced) if stuck is None else stuck
        evictable = (
            sum(c.entry.nbytes for digest, c in books.candidates() if digest != replaced) if stuck is None else 0
        )
        return StoreFull(
            "index store",
            expected=f"room for {nbytes} bytes (max_bytes={self.max_bytes}, min_free_bytes={self.min_free_bytes})",
            found=f"{short} bytes too few and {evictable} to evict",
            remedy="raise the limit, free disk space, or delete what problems() lists",
            path=folder,
        )


def _last_used(candidate: Candidate) -> float:
    """As the file says now: other processes use it too."""
    try:
        return os.lstat(candidate.entry.path or "").st_atime
    except OSError:
        return candidate.last_used
