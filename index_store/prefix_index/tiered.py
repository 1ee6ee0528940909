"""A fast store in front of a slow one. The slow one is the truth; the fast one holds copies (``copies.py``)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from .catalog import inconsistent
from .copies import Copies, TierCounters, checksum_in, digest_in, entry_of
from .errors import IndexStoreError, StoreClosed, StoreUnavailable
from .keys import PAGE_TOKENS, ModelFingerprint
from .prefetch import Promoter
from .reader import IndexFile
from .store import BuildLease, IndexEntry, IndexLookup, IndexStore, Problem, Retention, digest_of
from .waits import Wait, check_seconds, wait_of
from .writer import IndexPayload, LazyArray

_CLOSE_S: Final = 5.0


class TieredStore:
    """An ``IndexStore`` of two. Owns both: ``open()`` and ``close()`` are theirs too. Any tier may be tiered itself.

    *Writing.* ``put`` is slow's put: it returns, or raises, what that does; a copy goes to fast if it fits. Each
    ``LazyArray`` is loaded once: for such payloads the copy is read back from slow in the background.

    *Reading.* A copy in fast is served only if slow has the same bytes: its ``IndexFile.checksum``, which covers
    every array's, equals slow's at the time of this ``get``. So a replacement, deletion or expiry in slow takes
    effect at the next ``get``, whoever made it. For that slow opens its file (a header, no arrays), or answers from
    its catalog if it offers ``checksum`` (``KnowsChecksums``); then the guarantee is as fresh as that catalog: what
    went through this store at once, what others did after ``rescan()``. ``wait`` says what happens when fast has no
    such copy; in front of a store whose ``get`` downloads, ``wait_complete`` and ``timeout`` download once,
    ``best_effort`` twice (to serve, and to copy).

    *Errors.* Those of slow are the answer. Those of fast never are: a damaged copy is dropped and made anew, a full
    or broken fast tier only makes ``get`` slower (see ``counters`` and ``problems()``). One exception: while slow
    raises StoreUnavailable, ``get`` serves a copy that slow confirmed since ``open()``, unless its own retention says
    it expired; it may be outdated. Slow is then asked again at most once a second, so such a ``get`` takes at most
    slow's own time limit once a second, else none.

    Listings, look-ups and leases are slow's; retention is applied to both. ``close()`` gives up copies under way and
    takes at most a few seconds more than closing both tiers.
    """

    def __init__(
        self,
        fast: IndexStore,
        slow: IndexStore,
        *,
        wait: Wait | str = Wait.BEST_EFFORT,
        timeout_s: float = 1.0,
        workers: int = 1,
    ) -> None:
        self._wait = wait_of(wait)
        check_seconds("timeout_s", timeout_s)
        self.fast = fast
        self.slow = slow
        self._timeout_s = timeout_s
        self._copies = Copies(fast, slow)
        self._new_promoter: Callable[[], Promoter] = partial(
            Promoter, self._copies.promote, workers=workers, on_drop=partial(self._copies.count, "prefetch_dropped")
        )
        self._promoter = self._new_promoter()
        self._lifetime = threading.Lock()
        self._is_open = False
        self._fast_problem: IndexStoreError | None = None

    @property
    def counters(self) -> TierCounters:
        """What happened so far, as of now."""
        return self._copies.counters

    def open(self) -> None:
        with self._lifetime:
            if self._is_open:
                return
            self.slow.open()
            try:
                self.fast.open()
            except BaseException:
                self.slow.close()
                raise
            self._copies.forget()
            self._promoter = self._new_promoter()
            self._is_open = True
            with contextlib.suppress(IndexStoreError):
                self._copies.drop_orphans(full=False)

    def close(self) -> None:
        with self._lifetime:
            self._is_open = False
            self._promoter.close(_CLOSE_S)
            self.fast.close()
            self.slow.close()

    def __enter__(self) -> TieredStore:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, payload: IndexPayload, *, retention: Retention | None = None) -> IndexEntry:
        self._check_open()
        entry = self.slow.put(payload, retention=retention)
        digest = payload.identity.digest
        self._copies.wanted(digest)
        if any(isinstance(array, LazyArray) for array in payload.arrays.values()):
            self._copies.drop(digest)
            self._promoter.request(digest)
        else:
            self._copies.put(payload, entry.retention)
        return entry

    def get(self, key: IndexLookup) -> IndexFile:
        digest = digest_of(key)
        self._check_open()
        copy = self._copies.current(digest)
        promote = copy is None and self._copies.due(digest)
        if promote and self._wait is not Wait.BEST_EFFORT and self.slow.contains(digest):
            limit = self._timeout_s if self._wait is Wait.TIMEOUT else None
            promoted = self._promoter.request(digest, urgent=True).wait(limit)
            self._check_open()
            copy = self._copies.current(digest) if promoted else None
        if copy is not None:
            self._copies.count("hits_fast")
            return copy
        index = self.slow.get(key)
        self._copies.count("hits_slow")
        if promote and self._wait is Wait.BEST_EFFORT:
            self._promoter.request(digest)
        return index

    def contains(self, key: IndexLookup) -> bool:
        digest = digest_of(key)
        self._check_open()
        try:
            return self.slow.contains(digest)
        except StoreUnavailable:
            return self._copies.confirmed(digest)

    def delete(self, key: IndexLookup) -> bool:
        digest = digest_of(key)
        self._check_open()
        deleted = self.slow.delete(digest)
        self._copies.drop(digest)
        return deleted

    def retain(self, key: IndexLookup, retention: Retention) -> IndexEntry:
        digest = digest_of(key)
        self._check_open()
        entry = self.slow.retain(digest, retention)
        self._copies.retain(digest, retention)
        return entry

    def lease(self, key: IndexLookup) -> BuildLease | None:
        self._check_open()
        return self.slow.lease(key)

    def prefetch(self, key: IndexLookup) -> None:
        digest = digest_of(key)
        self._check_open()
        self._copies.wanted(digest)
        self._promoter.request(digest)

    def promotion(self, key: IndexLookup, timeout_s: float) -> bool:
        """Prefetches, and waits up to ``timeout_s`` seconds: whether fast has slow's index by then. False too
        where it does not fit, is in neither tier, or was dropped from the queue.
        """
        digest = digest_of(key)
        self._check_open()
        self._copies.wanted(digest)
        return self._promoter.request(digest, urgent=True).wait(timeout_s)

    def collect(self) -> Sequence[IndexEntry]:
        self._check_open()
        removed = self.slow.collect()
        for entry in removed:
            self._copies.drop(entry.digest)
        with contextlib.suppress(IndexStoreError):
            self.fast.collect()
        return removed

    def list(self) -> Sequence[IndexEntry]:
        self._check_open()
        return self.slow.list()

    def problems(self) -> Sequence[Problem]:
        """Slow's, then those of fast that are no damaged copies (those are dropped, not listed)."""
        self._check_open()
        found = [*self.slow.problems()]
        with contextlib.suppress(IndexStoreError):
            found += [p for p in self.fast.problems() if digest_in(p.path) is None]
        if self._fast_problem is not None:
            found.append(Problem(self._fast_problem.path or "fast tier", self._fast_problem))
        return tuple(found)

    def report(self, key: IndexLookup, error: IndexStoreError) -> None:
        """As in the protocol; but where only the copy in fast is damaged, that is dropped and slow's stays offered.

        It is the copy's damage if the error names the copy's path, or a full check of the copy fails.
        """
        digest = digest_of(key)
        self._check_open()
        if not self._copies.blame(digest, error):
            self.slow.report(digest, error)
            self._copies.drop(digest)

    def longest(
        self,
        namespace: str,
        page_hashes: Sequence[bytes],
        model: ModelFingerprint,
        profile_digest: str,
        *,
        page_tokens: int = PAGE_TOKENS,
    ) -> IndexEntry | None:
        self._check_open()
        return self.slow.longest(namespace, page_hashes, model, profile_digest, page_tokens=page_tokens)

    def near_miss(
        self,
        namespace: str,
        page_hashes: Sequence[bytes],
        model: ModelFingerprint,
        profile_digest: str,
        *,
        page_tokens: int = PAGE_TOKENS,
    ) -> str | None:
        self._check_open()
        return self.slow.near_miss(namespace, page_hashes, model, profile_digest, page_tokens=page_tokens)

    def rescan(self, *, full: bool = False) -> None:
        """Both tiers', then drops what fast holds of indexes that slow no longer lists, or lists differently; with
        ``full`` by checksum.
        """
        self._check_open()
        self.slow.rescan(full=full)
        self._fast_problem = None
        try:
            self.fast.rescan(full=full)
            self._copies.drop_orphans(full=full)
        except IndexStoreError as err:
            self._fast_problem = err

    def check_integrity(self) -> None:
        """Both tiers' books, and after a rescan: whatever fast lists, slow lists too."""
        self._check_open()
        self.slow.check_integrity()
        busy = self._promoter.busy()
        self.rescan()
        self.fast.check_integrity()
        copies = self.fast.list()
        known = self.slow.list()
        busy |= self._promoter.busy()
        for copy in copies:
            digest = copy.digest
            if entry_of(known, digest) is None and digest not in busy and self.fast.contains(digest):
                raise inconsistent("copy in the fast tier", "an index of the slow one", digest)

    def checksum(self, key: IndexLookup) -> str | None:
        """See ``KnowsChecksums``: slow's."""
        digest = digest_of(key)
        self._check_open()
        return checksum_in(self.slow, digest)

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreClosed("tiered store", expected="open", found="closed", remedy="call open() first")
