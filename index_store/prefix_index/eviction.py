"""Which indexes leave a full store first, and what a store removes from its folder: them, and what the dead left."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from threading import RLock
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from .books import FolderBooks
from .errors import IndexStoreError, IndexUnreadable, InvalidPayload, StoreFolderError, StoreFull
from .folder import PARTIAL, SUFFIX, Signature, free_bytes, remove_unlocked, shard_fd, shard_of
from .lease import LEASE
from .retention import read_retention, remove_orphans, remove_retention
from .store import DEFAULT, IndexEntry, Retention, has_expired

Rank: TypeAlias = tuple[float, float]
"""Of two indexes, the one of the smaller rank leaves first."""

_SHORTEST_IDLE_S: Final = 1e-3


class Candidate(NamedTuple):
    """An index that could leave. ``last_used`` is in seconds, by the clock that also gives ``now``."""

    entry: IndexEntry
    last_used: float


def lru(candidate: Candidate, now: float) -> Rank:
    """The least recently used first."""
    return candidate.last_used, 0.0


def cost_aware(candidate: Candidate, now: float) -> Rank:
    """First what costs least to build again, per byte held and second since its last use (GreedyDual-Size)."""
    idle = max(now - candidate.last_used, _SHORTEST_IDLE_S)
    return candidate.entry.build_seconds / (max(candidate.entry.nbytes, 1) * idle), candidate.last_used


EvictionPolicy: TypeAlias = Callable[[Candidate, float], Rank]
POLICIES: Final[Mapping[str, EvictionPolicy]] = MappingProxyType({"lru": lru, "cost_aware": cost_aware})


def policy_of(name: str) -> EvictionPolicy:
    """The policy of that name. Raises InvalidPayload."""
    try:
        return POLICIES[name]
    except (KeyError, TypeError):
        raise InvalidPayload("eviction", " or ".join(POLICIES), repr(name), "choose one of them") from None


def choose_victims(
    candidates: Iterable[Candidate], nbytes: int, *, policy: EvictionPolicy, now: float, latest: float = 0.0
) -> Sequence[IndexEntry] | None:
    """The fewest first leavers that hold ``nbytes`` bytes together; None where all of them do not.

    Order: expired, then not pinned, then pinned; within each by ``policy``. Idle times count from ``latest``, the last
    use of all, where it lies after ``now``: the clock was set back.
    """

    def rank(candidate: Candidate) -> tuple[int, Rank]:
        retention = candidate.entry.retention
        group = 0 if has_expired(retention, now) else 2 if retention.pinned else 1
        return group, policy(candidate, max(now, latest))

    victims: list[IndexEntry] = []
    for entry, _ in sorted(candidates, key=rank):
        if nbytes <= 0:
            break
        victims.append(entry)
        nbytes -= entry.nbytes
    return victims if nbytes <= 0 else None


class FolderLimits(NamedTuple):
    """``max_bytes`` for all index files together (None: any), ``min_free_bytes`` to leave free on the disk."""

    max_bytes: int | None
    min_free_bytes: int
    policy: EvictionPolicy
    clock: Callable[[], float]

    @property
    def any(self) -> bool:
        return self.max_bytes is not None or self.min_free_bytes > 0


class Housekeeper:
    """Removes files, and says so in the books, whose lock is ``lock``. Raises OSError.

    But for ``clean_partials``, call it while nobody else changes the folder (``folder.exclusive``).
    """

    def __init__(self, folder: Path, books: FolderBooks, limits: FolderLimits, lock: RLock, *, grace_s: float) -> None:
        self._folder, self._books, self._limits, self._lock = folder, books, limits, lock
        self._grace_s = grace_s

    def remove(self, digest: str, *, sync: bool) -> bool:
        """Removes an index and its retention. Returns whether there was an index."""
        there = False
        with contextlib.suppress(FileNotFoundError), shard_fd(self._folder, shard_of(digest)) as fd:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(digest + SUFFIX, dir_fd=fd)
                there = True
            with contextlib.suppress(OSError):
                remove_retention(fd, digest)
            if sync:
                os.fsync(fd)
        with self._lock:
            self._books.forget(digest)
        return there

    def make_room(self, nbytes: int, replaced: str) -> None:
        """Evicts until ``nbytes`` fit. Raises StoreFull, having evicted nothing unless some cannot be removed."""
        if not self._limits.any:
            return
        short = self._shortage(nbytes, replaced)
        if short > 0:
            # Dead writers' partials count as used: no index leaves for them.
            self.clean_partials(grace_s=0.0)
            short = self._shortage(nbytes, replaced)
        staying = {replaced}
        _, missing = self._evict(short, staying)
        if missing > 0:
            with self._lock:
                evictable = sum(entry.nbytes for digest, entry, _ in self._books.uses() if digest not in staying)
            limits = f"(max_bytes={self._limits.max_bytes}, min_free_bytes={self._limits.min_free_bytes})"
            found = f"{missing} bytes too few and {evictable} to evict"
            remedy = "raise the limit, free disk space, or delete what problems() lists"
            raise StoreFull("index store", f"room for {nbytes} bytes {limits}", found, remedy, self._folder)

    def collect(self, *, alone: bool) -> Sequence[IndexEntry]:
        """Removes what the dead left, what has expired, and what exceeds the limits; returns those indexes."""
        with self._lock:
            self._books.rescan()
        self._clean_leftovers(alone=alone)
        with self._lock:
            self._books.rescan()
            self._books.unremovable.clear()
            expired = self._books.catalog.expired()
        removed = [entry for entry in expired if self._remove_unchanged(entry)]
        if self._limits.any:
            removed += self._evict(self._shortage(0, None), set())[0]
        return tuple(removed)

    def clean_partials(self, *, grace_s: float | None = None) -> int:
        """Removes partial files whose writer is dead and that are older than the grace. Returns how many."""
        with self._lock:
            shards = self._books.shards
        removed = 0
        for shard in shards:
            with contextlib.suppress(OSError), shard_fd(self._folder, shard) as fd:
                removed += remove_unlocked(fd, PARTIAL, grace_s=self._grace_s if grace_s is None else grace_s)
        return removed

    def _shortage(self, nbytes: int, replaced: str | None) -> int:
        """How many bytes must go before ``nbytes`` may come. Raises OSError.

        The index to be replaced counts as gone, but the disk has to hold both for a while.
        """
        with self._lock:
            self._books.rescan()
            old = None if replaced is None else self._books.signature(replaced)
            used = self._books.used_bytes
        gone = 0 if old is None else old.nbytes
        free = free_bytes(self._folder)
        needs = [nbytes - free, nbytes + self._limits.min_free_bytes - free - gone]
        if self._limits.max_bytes is not None:
            needs.append(used + nbytes - gone - self._limits.max_bytes)
        return max(needs)

    def _evict(self, nbytes: int, staying: set[str]) -> tuple[list[IndexEntry], int]:
        """Removes who leaves first for ``nbytes`` bytes: (what was removed, bytes too few). None of ``staying``
        (digests) leaves. Who cannot be removed is added to it, and others leave instead, as long as there are enough.

        Counted by what was removed, not by what the disk has free then: evicted indexes that are open keep theirs.
        """
        removed: list[IndexEntry] = []
        while nbytes > 0:
            with self._lock:
                known = [(entry, used) for digest, entry, used in self._books.uses() if digest not in staying]
                latest = self._books.latest_use
            held = [Candidate(entry, _last_used(entry, used)) for entry, used in known]
            now, policy = self._limits.clock(), self._limits.policy
            victims = choose_victims(held, nbytes, policy=policy, now=now, latest=latest)
            if victims is None:
                break
            nbytes = 0
            for entry in victims:
                if self._remove_unchanged(entry):
                    removed.append(entry)
                else:
                    staying.add(entry.digest)
                    nbytes += entry.nbytes
        return removed, nbytes

    def _remove_unchanged(self, entry: IndexEntry) -> bool:
        """Removes an index, if its file and its retention are those that the books know. Whether it is gone."""
        digest, path = entry.digest, self._books.path_of(entry.digest)
        with self._lock:
            known = self._books.signature(digest)
        if known is None:
            return True
        try:
            if Signature.of(os.lstat(path)) != known or not self._is_kept_as(digest, entry.retention):
                return False
            self.remove(digest, sync=False)
        except FileNotFoundError:
            with self._lock:
                self._books.forget(digest)
        except OSError as err:
            found, remedy = err.strerror or str(err), "remove it, or change the owner or mode of its folder"
            error = StoreFolderError("index that must leave", "a file to remove", found, remedy, path)
            with self._lock:
                self._books.unremovable[path] = error
            return False
        return True

    def _is_kept_as(self, digest: str, known: Retention) -> bool:
        """Whether the retention on disk is the known one. Raises OSError where nobody can tell."""
        with shard_fd(self._folder, shard_of(digest)) as fd:
            try:
                kept = read_retention(fd, digest)
            except IndexUnreadable as err:
                raise OSError(errno.EIO, f"its retention cannot be read: {err.found}") from err
            except IndexStoreError:
                kept = DEFAULT
        if kept != known:
            with self._lock:
                self._books.look_again(digest)
        return kept == known

    def _clean_leftovers(self, *, alone: bool) -> None:
        self.clean_partials()
        for shard in self._books.shards:
            with contextlib.suppress(OSError), shard_fd(self._folder, shard) as fd:
                remove_unlocked(fd, LEASE, grace_s=self._grace_s, access=os.O_RDWR)
                with self._lock:
                    orphans = self._books.orphans(shard)
                # Alone, nobody is between writing a retention and naming its index.
                remove_orphans(fd, orphans, grace_s=0.0 if alone else self._grace_s)


def _last_used(entry: IndexEntry, known: float) -> float:
    """As the file says now: other processes use it too."""
    try:
        return max(known, os.lstat(entry.path or "").st_atime)
    except OSError:
        return known
