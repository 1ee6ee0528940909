"""Indexes in memory, within a byte budget: when it is full, the eviction policy says who leaves."""

from __future__ import annotations

import mmap
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from .catalog import Catalog, inconsistent
from .errors import IndexFormatError, IndexNotFound, IndexStoreError, StoreClosed, StoreFull
from .eviction import Candidate, choose_victims, has_expired, policy_of
from .keys import PAGE_TOKENS, IndexIdentity, ModelFingerprint
from .lease import LocalLeases
from .reader import IndexFile, check_identity
from .served import Served
from .store import BuildLease, IndexEntry, IndexLookup, Problem, Retention, digest_of
from .writer import IndexPayload, IndexWriter

_OTHER_PUTS_S: Final = 30.0


class _Held(NamedTuple):
    """``version`` counts all puts of the store."""

    buffer: mmap.mmap
    last_used: float
    version: int


class MemoryStore:
    """An ``IndexStore`` in this process. Holds containers, the same bytes as a file, in page-aligned memory.

    ``budget_bytes`` bounds the containers that the store holds or that are being put, not counting for each put the
    one that it replaces; one that was handed out and then evicted lives on until its last user drops it. ``put``
    copies the arrays in, while others go on; ``get`` copies nothing. Contents end with ``close()``.

    ``eviction`` is ``lru`` or ``cost_aware`` (``eviction.py``); ``clock`` gives seconds since the Unix epoch, for
    expiry. Recency stands still where the clock goes backwards.
    """

    def __init__(self, budget_bytes: int, *, eviction: str = "lru", clock: Callable[[], float] = time.time) -> None:
        self.budget_bytes = budget_bytes
        self._policy = policy_of(eviction)
        self._clock = clock
        self._latest = 0.0
        self._lock = threading.RLock()
        self._put_ended = threading.Condition(self._lock)
        self._catalog = Catalog(clock)
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._problems: dict[str, IndexStoreError] = {}
        self._served: Served[int] = Served()
        self._puts = 0
        self._leases = LocalLeases()
        self._used = 0
        self._reserved = 0
        self._is_open = False

    @property
    def used_bytes(self) -> int:
        """Bytes of all containers held now."""
        return self._used

    def open(self) -> None:
        with self._lock:
            self._is_open = True

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            self._catalog.clear()
            self._held.clear()
            self._problems.clear()
            self._served.clear()
            self._used = 0
            self._put_ended.notify_all()

    def __enter__(self) -> MemoryStore:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, payload: IndexPayload, *, retention: Retention | None = None) -> IndexEntry:
        """As in the protocol. A put that only fits once others under way have ended waits for them, up to 30 s."""
        self._check_open()
        writer = IndexWriter.of(payload)
        digest, nbytes = payload.identity.digest, writer.nbytes
        buffer = self._allocate(nbytes)
        self._reserve(nbytes, digest)
        try:
            writer.begin(buffer)
            writer.write_all(payload)
            with self._lock:
                self._check_open()
                return self._publish(digest, payload, buffer, retention)
        finally:
            with self._lock:
                self._reserved -= nbytes
                self._put_ended.notify_all()

    def get(self, key: IndexLookup) -> IndexFile:
        digest = digest_of(key)
        with self._lock:
            self._check_open()
            if digest in self._problems:
                raise self._problems[digest].at(digest)
            self._live(digest)
            buffer, _, version = self._held[digest]
            self._use(digest, buffer, version)
            self._served.gave(digest, version)
        index = IndexFile.from_buffer(buffer)
        if isinstance(key, IndexIdentity):
            check_identity(key, index.identity)
        return index

    def contains(self, key: IndexLookup) -> bool:
        with self._lock:
            self._check_open()
            return digest_of(key) in self._catalog

    def delete(self, key: IndexLookup) -> bool:
        with self._lock:
            self._check_open()
            reported = self._problems.pop(digest_of(key), None) is not None
            return self._drop(digest_of(key)) or reported

    def retain(self, key: IndexLookup, retention: Retention) -> IndexEntry:
        digest = digest_of(key)
        with self._lock:
            self._check_open()
            entry = msgspec.structs.replace(self._live(digest), retention=retention)
            self._catalog.add(digest, entry)
            return entry

    def lease(self, key: IndexLookup) -> BuildLease | None:
        digest = digest_of(key)
        self._check_open()
        return self._leases.acquire(digest)

    def prefetch(self, key: IndexLookup) -> None:
        """Nothing to do: it is in memory already, or nowhere."""
        digest_of(key)
        self._check_open()

    def collect(self) -> Sequence[IndexEntry]:
        with self._lock:
            self._check_open()
            now = self._clock()
            removed = [(d, e) for d, e in self._catalog.all_held() if has_expired(e.retention, now)]
            for digest, _ in removed:
                self._drop(digest)
            return tuple(entry for _, entry in removed)

    def list(self) -> Sequence[IndexEntry]:
        with self._lock:
            self._check_open()
            return self._catalog.entries()

    def problems(self) -> Sequence[Problem]:
        with self._lock:
            self._check_open()
            return tuple(Problem(digest, error) for digest, error in sorted(self._problems.items()))

    def report(self, key: IndexLookup, error: IndexStoreError) -> None:
        digest = digest_of(key)
        with self._lock:
            self._check_open()
            held = self._held.get(digest)
            if held is None or digest not in self._catalog:  # an expired one is a miss already
                return
            certain = self._served.only(digest, held.version)
        if not certain:  # about another version, perhaps: this one is guilty only if it is damaged
            try:
                IndexFile.from_buffer(held.buffer).verify()
                return
            except IndexFormatError as err:
                error = err
        with self._lock:
            now = self._held.get(digest)
            if self._is_open and now is not None and now.version == held.version and self._drop(digest):
                self._problems[digest] = error

    def longest(
        self,
        namespace: str,
        page_hashes: Sequence[bytes],
        model: ModelFingerprint,
        profile_digest: str,
        *,
        page_tokens: int = PAGE_TOKENS,
    ) -> IndexEntry | None:
        with self._lock:
            self._check_open()
            return self._catalog.longest(namespace, page_hashes, model, profile_digest, page_tokens)

    def near_miss(
        self,
        namespace: str,
        page_hashes: Sequence[bytes],
        model: ModelFingerprint,
        profile_digest: str,
        *,
        page_tokens: int = PAGE_TOKENS,
    ) -> str | None:
        with self._lock:
            self._check_open()
            return self._catalog.near_miss(namespace, page_hashes, model, profile_digest, page_tokens)

    def rescan(self, *, full: bool = False) -> None:
        """Nothing to learn: no other process can reach this memory."""
        with self._lock:
            self._check_open()

    def check_integrity(self) -> None:
        with self._lock:
            self._check_open()
            self._catalog.check_integrity()
            listed = {digest: entry.nbytes for digest, entry in self._catalog.all_held()}
            held = {digest: len(item.buffer) for digest, item in self._held.items()}
            if listed != held:
                raise inconsistent("bytes per index", listed, held)
            if sum(held.values()) != self._used:
                raise inconsistent("used_bytes", sum(held.values()), self._used)
            if self._used > self.budget_bytes:
                raise inconsistent("used_bytes", f"at most {self.budget_bytes}", self._used)
            if self._reserved < 0:
                raise inconsistent("bytes of puts under way", "0 or more", self._reserved)

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreClosed("memory store", expected="open", found="closed", remedy="call open() first")

    def _live(self, digest: str) -> IndexEntry:
        entry = self._catalog.get(digest)
        if entry is None:
            found = "none" if self._catalog.held(digest) is None else "one that has expired"
            raise IndexNotFound("index", expected=digest, found=found, remedy="build it, or raise the budget")
        return entry

    def _use(self, digest: str, buffer: mmap.mmap, version: int) -> None:
        self._latest = max(self._latest, self._clock())
        self._held[digest] = _Held(buffer, self._latest, version)
        self._held.move_to_end(digest)

    def _publish(
        self, digest: str, payload: IndexPayload, buffer: mmap.mmap, retention: Retention | None
    ) -> IndexEntry:
        if retention is None:
            replaced = self._catalog.get(digest)
            retention = Retention() if replaced is None else replaced.retention
        self._drop(digest)
        self._problems.pop(digest, None)
        entry = IndexEntry(
            identity=payload.identity,
            nbytes=len(buffer),
            created=payload.info.created,
            build_seconds=payload.info.build_seconds,
            retention=retention,
        )
        self._catalog.add(digest, entry)
        self._puts += 1
        self._use(digest, buffer, self._puts)
        self._used += len(buffer)
        return entry

    def _drop(self, digest: str) -> bool:
        held = self._held.pop(digest, None)
        if held is None:
            return False
        self._used -= len(held.buffer)
        return self._catalog.remove(digest)

    def _allocate(self, nbytes: int) -> mmap.mmap:
        """Memory for a container, before anything leaves for it. Raises StoreFull."""
        if nbytes > self.budget_bytes:
            raise self._full(nbytes)
        try:
            return mmap.mmap(-1, nbytes)
        except (OSError, OverflowError) as err:
            remedy = "free memory, or lower the budget"
            expected, found = f"{nbytes} bytes of memory", str(err)
            raise StoreFull("memory store", expected=expected, found=found, remedy=remedy) from err

    def _reserve(self, nbytes: int, replaced: str) -> None:
        """Evicts until ``nbytes`` fit, and keeps them for this put; the index to be replaced counts as gone but stays
        until then. Raises StoreFull, having evicted nothing.
        """
        with self._lock:
            until = time.monotonic() + _OTHER_PUTS_S
            while True:
                self._check_open()
                victims = self._victims(nbytes, replaced)
                if victims is not None:
                    break
                if not self._reserved or not self._put_ended.wait(until - time.monotonic()):
                    raise self._full(nbytes)
            for victim in victims:
                self._drop(victim.digest)
            self._reserved += nbytes

    def _victims(self, nbytes: int, replaced: str) -> Sequence[IndexEntry] | None:
        old = self._held.get(replaced)
        free = self.budget_bytes - self._used - self._reserved + (0 if old is None else len(old.buffer))
        if free >= nbytes:
            return ()
        entries = ((d, held, self._catalog.held(d)) for d, held in self._held.items() if d != replaced)
        candidates = [Candidate(e, held.last_used) for _, held, e in entries if e is not None]
        self._latest = now = max(self._latest, self._clock())
        return choose_victims(candidates, nbytes - free, policy=self._policy, now=now)

    def _full(self, nbytes: int) -> StoreFull:
        expected = f"at most {self.budget_bytes} bytes"
        under_way = f", with {self._reserved} bytes of puts under way" if self._reserved else ""
        found = f"an index of {nbytes} bytes{under_way}"
        return StoreFull("memory store", expected=expected, found=found, remedy="raise the budget")
