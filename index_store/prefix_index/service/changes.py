"""The listing that clients mirror, and what changed since they last asked."""

from __future__ import annotations

import bisect
import secrets
import threading
from collections.abc import Mapping
from typing import Final

from ..store import IndexEntry
from .messages import PAGE_NBYTES, Delta, TierEntry, encode, entry_out

_MAX_GONE: Final = 16384


class ChangeLog:
    """Entries by digest, each with the number (``seq``) of its last change.

    ``epoch`` is random, so that a client of an earlier service sees that its numbers mean nothing here. Removed
    digests are remembered up to a bound; who asks for what is older starts over.
    """

    def __init__(self) -> None:
        self.epoch = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._entries: dict[str, IndexEntry] = {}
        self._changed: dict[str, int] = {}
        self._log: list[tuple[int, str]] = []
        self._seq = 0
        self._forgotten = 0
        self._nbytes = 0

    def get(self, digest: str) -> IndexEntry | None:
        return self._entries.get(digest)

    def totals(self) -> tuple[int, int, int]:
        """(seq, number of indexes, their bytes)."""
        with self._lock:
            return self._seq, len(self._entries), self._nbytes

    def entries(self) -> dict[str, IndexEntry]:
        with self._lock:
            return dict(self._entries)

    def put(self, digest: str, entry: IndexEntry) -> None:
        with self._lock:
            self._set(digest, entry)

    def remove(self, digest: str) -> None:
        with self._lock:
            self._set(digest, None)

    def become(self, entries: Mapping[str, IndexEntry], seq: int | None = None) -> list[str] | None:
        """Takes over a whole listing; only what differs is a change. Returns the digests that went.

        With ``seq``, what it was before the listing was made: None, and nothing was taken over, if there were changes
        meanwhile, which the listing may not show.
        """
        with self._lock:
            if seq is not None and seq != self._seq:
                return None
            gone = [digest for digest in self._entries if digest not in entries]
            for digest in gone:
                self._set(digest, None)
            for digest, entry in entries.items():
                old = self._entries.get(digest)
                if old is not entry and old != entry:
                    self._set(digest, entry)
            return gone

    def since(self, epoch: str, seq: int) -> Delta:
        """The next page after ``seq``."""
        with self._lock:
            reset = epoch != self.epoch or seq < self._forgotten or seq > self._seq
            start = 0 if reset else seq
            first = bisect.bisect_left(self._log, (start + 1, ""))
            entries: list[TierEntry] = []
            removed: list[str] = []
            nbytes, last = 0, self._seq
            for number, digest in self._log[first:]:
                if self._changed.get(digest) != number:
                    continue
                if nbytes >= PAGE_NBYTES:
                    break
                last = number
                entry = self._entries.get(digest)
                if entry is None:
                    removed.append(digest)
                    nbytes += len(digest)
                else:
                    entries.append(entry_out(entry))
                    nbytes += len(encode(entries[-1]))
            else:
                last = self._seq
            return Delta(
                epoch=self.epoch, seq=last, entries=entries, removed=removed, more=last < self._seq, reset=reset
            )

    def _set(self, digest: str, entry: IndexEntry | None) -> None:
        old = self._entries.pop(digest, None)
        if old is None and entry is None:
            return
        self._nbytes += (0 if entry is None else entry.nbytes) - (0 if old is None else old.nbytes)
        if entry is not None:
            self._entries[digest] = entry
        self._seq += 1
        self._changed[digest] = self._seq
        self._log.append((self._seq, digest))
        if len(self._log) > 2 * len(self._changed) + 1024:
            self._log = [(n, d) for n, d in self._log if self._changed.get(d) == n]
        if len(self._changed) - len(self._entries) > _MAX_GONE:
            self._forget_gone()

    def _forget_gone(self) -> None:
        """Drops the older half of the removed digests."""
        gone = sorted((n, d) for d, n in self._changed.items() if d not in self._entries)
        for number, digest in gone[: len(gone) // 2]:
            del self._changed[digest]
            self._forgotten = number
        self._log = [(n, d) for n, d in self._log if self._changed.get(d) == n]
