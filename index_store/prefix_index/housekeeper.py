"""What a store removes from its folder: indexes by name, those that must leave, and what the dead left behind."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

from .books import FolderBooks
from .errors import IndexStoreError, IndexUnreadable, StoreFolderError, StoreFull
from .eviction import Candidate, EvictionPolicy, choose_victims, has_expired
from .folder import SUFFIX, Signature, free_bytes, remove_partials, shard_fd, shard_of
from .lease import remove_leases
from .retention import DEFAULT, read_retention, remove_orphans, remove_retention
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
            f"room for {nbytes} bytes (max_bytes={self.max_bytes}, min_free_bytes={self.min_free_bytes})",
            f"{short} bytes too few and {evictable} to evict",
            "raise the limit, free disk space, or delete what problems() lists",
            folder,
        )


class Housekeeper:
    """Removes files, and says so in the books. ``lock`` is the books' own, held for each look at them.

    But for ``clean_partials``, call it while nobody else changes the folder (``folder.exclusive``). Raises OSError.
    """

    def __init__(self, folder: Path, books: FolderBooks, limits: FolderLimits, lock: RLock, *, grace_s: float) -> None:
        self._folder = folder
        self._books = books
        self._limits = limits
        self._lock = lock
        self._grace_s = grace_s

    def remove(self, digest: str, *, sync: bool) -> bool:
        """Removes an index and its retention. Returns whether there was an index."""
        try:
            with shard_fd(self._folder, shard_of(digest)) as fd:
                try:
                    os.unlink(digest + SUFFIX, dir_fd=fd)
                    there = True
                except FileNotFoundError:
                    there = False
                with contextlib.suppress(OSError):
                    remove_retention(fd, digest)
                if sync:
                    os.fsync(fd)
        except FileNotFoundError:
            there = False
        with self._lock:
            self._books.forget(digest)
        return there

    def make_room(self, nbytes: int, replaced: str) -> None:
        """Evicts until ``nbytes`` fit within the limits. Raises StoreFull: having evicted nothing, unless some of
        those that could leave cannot be removed.
        """
        if not self._limits.any:
            return
        self._rescan()
        with self._lock:
            short = self._limits.shortage(self._books, self._folder, nbytes, replaced)
        if short > 0:
            # Dead writers' partials count as used: no index leaves for them.
            self.clean_partials(grace_s=0.0)
            self._rescan()
        with self._lock:
            victims = self._limits.victims(self._books, self._folder, nbytes, replaced)
            if victims is None:
                raise self._limits.full(self._books, self._folder, nbytes, replaced)
        missing = self._evict(victims, replaced)[1]
        if missing:
            with self._lock:
                raise self._limits.full(self._books, self._folder, nbytes, replaced, stuck=missing)

    def collect(self, *, alone: bool) -> Sequence[IndexEntry]:
        """Removes what the dead left, what has expired, and what exceeds the limits; returns those indexes.

        ``alone``: nobody else changes the folder for certain.
        """
        self._rescan()
        self._clean_leftovers(alone=alone)
        self._rescan()
        with self._lock:
            self._books.unremovable.clear()
            now = self._limits.clock()
            expired = [e for _, e in self._books.catalog.all_held() if has_expired(e.retention, now)]
        removed = [entry for entry in expired if self._remove_unchanged(entry)]
        if self._limits.any:
            with self._lock:
                victims = self._limits.victims(self._books, self._folder, 0, None)
            removed += self._evict(victims or (), None)[0]
        return tuple(removed)

    def clean_partials(self, *, grace_s: float | None = None) -> int:
        """See ``FileStore.clean_partials``."""
        with self._lock:
            shards = self._books.shards
        removed = 0
        for shard in shards:
            with contextlib.suppress(OSError), shard_fd(self._folder, shard) as fd:
                removed += remove_partials(fd, grace_s=self._grace_s if grace_s is None else grace_s)
        return removed

    def _rescan(self) -> None:
        with self._lock:
            self._books.rescan()

    def _evict(self, victims: Iterable[IndexEntry], replaced: str | None) -> tuple[list[IndexEntry], int]:
        """(what was removed, bytes too few): for one that cannot be removed others leave, as long as there are some.

        Counted by what was removed, not by what the disk has free then: evicted indexes that are open keep theirs.
        """
        removed: list[IndexEntry] = []
        stuck: set[str] = set() if replaced is None else {replaced}
        while True:
            failed: list[IndexEntry] = []
            for entry in victims:
                (removed if self._remove_unchanged(entry) else failed).append(entry)
            missing = sum(entry.nbytes for entry in failed)
            if not missing:
                return removed, 0
            stuck.update(entry.digest for entry in failed)
            with self._lock:
                others = self._limits.leaving(self._books, missing, stuck)
            if others is None:
                return removed, missing
            victims = others

    def _remove_unchanged(self, entry: IndexEntry) -> bool:
        """Removes what the books know, but not what has replaced it meanwhile, nor what is to stay otherwise than they
        know: a folder that could not be listed is known as it was. Whether it is gone.
        """
        digest, path = entry.digest, self._books.path_of(entry.digest)
        with self._lock:
            known = self._books.signature(digest)
        if known is None:
            return True
        try:
            if Signature.of(os.lstat(path)) != known or not self._is_kept_as(entry):
                return False
            self.remove(digest, sync=False)
            return True
        except FileNotFoundError:
            with self._lock:
                self._books.forget(digest)
            return True
        except OSError as err:
            with self._lock:
                self._books.unremovable[path] = _unremovable(err, path)
            return False

    def _is_kept_as(self, entry: IndexEntry) -> bool:
        """Whether the retention on disk is the entry's, now. Raises OSError where nobody can tell."""
        with shard_fd(self._folder, shard_of(entry.digest)) as fd:
            try:
                kept = read_retention(fd, entry.digest)
            except IndexUnreadable as err:
                raise OSError(errno.EIO, f"its retention cannot be read: {err.found}") from err
            except IndexStoreError:
                kept = DEFAULT
        if kept != entry.retention:
            with self._lock:
                self._books.look_again(entry.digest)
        return kept == entry.retention

    def _clean_leftovers(self, *, alone: bool) -> None:
        self.clean_partials()
        for shard in self._books.shards:
            with contextlib.suppress(OSError), shard_fd(self._folder, shard) as fd:
                remove_leases(fd, grace_s=self._grace_s)
                with self._lock:
                    keeps, indexes = self._books.keeps(shard), self._books.indexes(shard)
                # Alone, nobody is between writing a retention and naming its index.
                remove_orphans(fd, keeps, indexes, grace_s=0.0 if alone else self._grace_s)


def _unremovable(err: OSError, path: str) -> StoreFolderError:
    found = err.strerror or str(err)
    remedy = "remove it, or change the owner or mode of its folder"
    return StoreFolderError("index that must leave", "a file to remove", found, remedy, path)


def _last_used(candidate: Candidate) -> float:
    """As the file says now: other processes use it too."""
    try:
        return os.lstat(candidate.entry.path or "").st_atime
    except OSError:
        return candidate.last_used
