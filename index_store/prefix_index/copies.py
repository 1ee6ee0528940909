"""The copies that a fast store holds of a slow one's indexes: which are current, making them, dropping them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from numpy.typing import NDArray

from .errors import (
    IndexCorrupt,
    IndexFormatError,
    IndexMismatch,
    IndexNotFound,
    IndexStoreError,
    StoreUnavailable,
)
from .format import ArrayKey, aligned
from .keys import is_digest
from .prefetch import Cancelled, Check
from .reader import IndexFile
from .store import IndexEntry, IndexLookup, IndexStore, Retention
from .writer import IndexPayload, LazyArray

_ASK_AGAIN_S: Final = 1.0
_PROMOTE_AGAIN_S: Final = 30.0
_MAX_FAILED: Final = 10_000
_READ_AHEAD_NBYTES: Final = 32 << 20
_DAMAGE: Final = (IndexFormatError, IndexMismatch)


class TierCounters(NamedTuple):
    """Events since the store was made; they never decrease.

    ``hits_fast``, ``hits_slow``  indexes that ``get`` served, by tier
    ``promotions``                copies that arrived in fast, those of ``put`` not counted
    ``promotion_failures``        copies to fast that failed, those of ``put`` counted
    ``prefetch_dropped``          background requests given up for newer ones
    ``stale_dropped``             copies removed from fast because slow has another index there, or none
    ``damaged_dropped``           copies removed from fast because they could not be read
    """

    hits_fast: int = 0
    hits_slow: int = 0
    promotions: int = 0
    promotion_failures: int = 0
    prefetch_dropped: int = 0
    stale_dropped: int = 0
    damaged_dropped: int = 0


@runtime_checkable
class KnowsChecksums(Protocol):
    """What a store may offer on top of ``IndexStore`` where ``get`` is dear, as on another machine."""

    def checksum(self, key: IndexLookup) -> str | None:
        """``IndexFile.checksum`` of the index that ``get`` would open, None where it would open none.

        May be as old as the last ``rescan()``, put or delete through this store. Counts as a use of the index.
        Raises StoreUnavailable.
        """
        ...


class _Seen(NamedTuple):
    """A copy that was last seen to be what slow has, and where fast keeps it."""

    checksum: str
    path: str | None


class Copies:
    """Keeps ``fast`` honest: what it serves is what ``slow`` has. Errors of fast end here, those of slow are raised.

    Sound without a lock between the tiers: whoever removes an index removes it from slow first, then from fast;
    whoever copies one looks at slow again after writing to fast (``confirm``). Of two threads that do both at
    once, one sees the other, so no copy outlives its index; and one that another process outdated is found at
    the next look.
    """

    def __init__(self, fast: IndexStore, slow: IndexStore) -> None:
        self.fast = fast
        self.slow = slow
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(TierCounters._fields, 0)
        self._seen: dict[str, _Seen] = {}
        self._not_before: dict[str, float] = {}
        self._ask_slow_at = 0.0

    @property
    def counters(self) -> TierCounters:
        with self._lock:
            return TierCounters(**self._counts)

    def count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def forget(self) -> None:
        """Trusts no copy until slow was asked again."""
        self._seen.clear()
        self._not_before.clear()
        self._ask_slow_at = 0.0

    def current(self, digest: str) -> IndexFile | None:
        """The copy in fast if slow has the same index now, else None; the caller closes it.

        Raises what slow raises; but after StoreUnavailable, and for a second after one, a copy that slow confirmed
        before is still current.
        """
        copy = self._open(digest)
        if copy is None:
            return None
        try:
            if time.monotonic() < self._ask_slow_at and self._was_current(digest, copy):
                return copy
            if checksum_in(self.slow, digest) == copy.checksum:
                self._seen[digest] = _Seen(copy.checksum, copy.path)
                return copy
        except StoreUnavailable:
            self._ask_slow_at = time.monotonic() + _ASK_AGAIN_S
            if self._was_current(digest, copy):
                return copy
            copy.close()
            raise
        except BaseException:
            copy.close()
            raise
        copy.close()
        self.drop(digest, "stale_dropped")
        return None

    def confirmed(self, digest: str) -> bool:
        """Whether there is a copy that slow confirmed before. Does not ask slow."""
        copy = self._open(digest)
        if copy is None:
            return False
        with copy:
            return self._was_current(digest, copy)

    def due(self, digest: str) -> bool:
        """False for a while after copying failed: what does not fit is not read again at each get."""
        return time.monotonic() >= self._not_before.get(digest, 0.0)

    def wanted(self, digest: str) -> None:
        """Ends the while of ``due``."""
        self._not_before.pop(digest, None)

    def put(self, payload: IndexPayload, retention: Retention) -> None:
        """Copies an index that slow has just taken. Its arrays are read again, so none may be lazy."""
        digest = payload.identity.digest
        try:
            self.fast.put(payload, retention=retention)
            self._confirm(digest)
        except Exception:  # the index is stored: nothing that fast does, MemoryError included, undoes that
            self.count("promotion_failures")
            self.drop(digest)

    def promote(self, digest: str, check: Check) -> None:
        """Copies what slow has. Raises where fast does not have it afterwards. ``check`` may cancel it."""
        try:
            check()
            copy = self.current(digest)
            if copy is not None:
                copy.close()
                return
            with self.slow.get(digest) as source:
                self._copy(digest, source, check)
            self.wanted(digest)
            self.count("promotions")
        except Cancelled:
            raise
        except Exception as err:
            if not isinstance(err, IndexNotFound):
                if len(self._not_before) >= _MAX_FAILED:
                    self._not_before.clear()
                self._not_before[digest] = time.monotonic() + _PROMOTE_AGAIN_S
            self.count("promotion_failures")
            raise

    def retain(self, digest: str, retention: Retention) -> None:
        with contextlib.suppress(IndexStoreError):
            self.fast.retain(digest, retention)

    def blame(self, digest: str, error: IndexStoreError) -> bool:
        """Whether an error after ``get`` was the copy's alone: it names the copy's path, or the copy, which is then
        dropped, fails a full check.
        """
        seen = self._seen.get(digest)
        try:
            with self.fast.get(digest) as copy:
                copy.verify()
        except _DAMAGE as err:
            self._discard(digest, err)
            return True
        except IndexStoreError:
            pass
        return seen is not None and error.path is not None and error.path == seen.path

    def drop(self, digest: str, counter: str | None = None) -> None:
        """Removes the copy. Where even that fails it stays unserved: slow is asked at each get."""
        self._seen.pop(digest, None)
        with contextlib.suppress(IndexStoreError):
            if self.fast.delete(digest) and counter is not None:
                self.count(counter)

    def drop_orphans(self, *, full: bool) -> None:
        """Drops damaged copies, and those of indexes that slow does not list, or lists differently (``full``: that
        differ in checksum). Raises what either's listing raises.
        """
        for problem in self.fast.problems():
            digest = digest_in(problem.path)
            if digest is not None:
                self.drop(digest, "damaged_dropped")
        copies = self.fast.list()  # before slow's list: what is put meanwhile is in slow first
        known = self.slow.list()
        for copy in copies:
            digest = copy.digest
            entry = entry_of(known, digest)
            same = entry is not None and _alike(entry, copy)
            if same and full:
                with contextlib.suppress(IndexStoreError):
                    same = checksum_in(self.slow, digest) == checksum_in(self.fast, digest)
            if not same:
                self.drop(digest, "stale_dropped")
        held = {copy.digest for copy in copies}
        for digest in tuple(self._seen):
            if digest not in held:
                self._seen.pop(digest, None)

    def _open(self, digest: str) -> IndexFile | None:
        try:
            return self.fast.get(digest)
        except (IndexFormatError, IndexMismatch) as err:
            self._discard(digest, err)
        except IndexStoreError:
            pass  # IndexUnreadable among them: what the system refuses now it may give a moment later
        return None

    def _was_current(self, digest: str, copy: IndexFile) -> bool:
        seen = self._seen.get(digest)
        return seen is not None and seen.checksum == copy.checksum

    def _discard(self, digest: str, error: IndexStoreError) -> None:
        with contextlib.suppress(IndexStoreError):
            self.fast.report(digest, error)
        self.drop(digest, "damaged_dropped")

    def _confirm(self, digest: str) -> bool:
        """Whether the copy just made is slow's index still. If not, it is removed."""
        try:
            copy = self.current(digest)
        except Exception:
            self.drop(digest)
            raise
        if copy is None:
            return False
        copy.close()
        return True

    def _copy(self, digest: str, source: IndexFile, check: Check) -> None:
        reading = _Reading(source, check)
        entry = entry_of(self.slow.list(), digest)
        retention = Retention() if entry is None else entry.retention
        try:
            self.fast.put(reading.payload(), retention=retention)
        except Exception:
            if reading.damage is not None and checksum_in(self.slow, digest) == source.checksum:
                self.slow.report(digest, reading.damage)
            raise
        check()
        if not self._confirm(digest):
            remedy = "prefetch it again; if that repeats, the fast tier is too small"
            raise IndexNotFound("copy in the fast tier", expected=source.checksum, found="none", remedy=remedy)


class _Reading:
    """A source's arrays in the order in which they are written. From a file several at a time: one bulk read of up
    to 32 MiB (parallel, and past the page cache, which need not hold the same bytes a second time).
    """

    def __init__(self, source: IndexFile, check: Check) -> None:
        self._source = source
        self._check = check
        self._payload = source.payload()
        self._order = [record.key for record in self._payload.records()]
        self._place = {key: i for i, key in enumerate(self._order)}
        self._ahead: dict[ArrayKey, NDArray[Any]] = {}
        self.damage: IndexCorrupt | None = None

    def payload(self) -> IndexPayload:
        arrays = {
            key: LazyArray(r.dtype, r.shape, partial(self._load, key))
            for key, r in ((key, self._source.record(key)) for key in self._order)
        }
        return dataclasses.replace(self._payload, arrays=arrays)

    def _load(self, key: ArrayKey) -> NDArray[Any]:
        self._check()
        try:
            if self._source.path is None:
                return self._source.array(*key)
            if key not in self._ahead:
                self._ahead = {}
                self._ahead = self._source.read_many(self._next(key))
            return self._ahead.pop(key)
        except IndexCorrupt as err:
            self.damage = err
            raise

    def _next(self, first: ArrayKey) -> Sequence[ArrayKey]:
        keys: list[ArrayKey] = []
        nbytes = 0
        for key in self._order[self._place[first] :]:
            nbytes += aligned(self._source.record(key).nbytes)
            if keys and nbytes > _READ_AHEAD_NBYTES:
                break
            keys.append(key)
        return keys


def checksum_in(store: IndexStore, digest: str) -> str | None:
    """``IndexFile.checksum`` of the index that the store has, None where it has none. Raises what ``get`` raises."""
    if isinstance(store, KnowsChecksums):
        return store.checksum(digest)
    try:
        with store.get(digest) as index:
            return index.checksum
    except IndexNotFound:
        return None


def entry_of(entries: Sequence[IndexEntry], digest: str) -> IndexEntry | None:
    """The entry of that digest in a listing, which is ordered by digest: computing each one's would be slow."""
    i = bisect_left(entries, digest, key=lambda entry: entry.digest)
    return entries[i] if i < len(entries) and entries[i].digest == digest else None


def digest_in(path: str) -> str | None:
    """The digest that a problem's path names: the path itself, or that of ``<digest>.pfxindex``."""
    digest = path.rpartition("/")[2].partition(".")[0]
    return digest if is_digest(digest) else None


def _alike(a: IndexEntry, b: IndexEntry) -> bool:
    return (a.nbytes, a.created, a.build_seconds) == (b.nbytes, b.created, b.build_seconds)
