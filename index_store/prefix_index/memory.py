"""Indexes in memory, within a byte budget: the least recently used leaves first."""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Sequence

from .catalog import Catalog, inconsistent
from .errors import IndexNotFound, IndexStoreError, StoreClosed, StoreFull
from .keys import PAGE_TOKENS, IndexIdentity, ModelFingerprint
from .reader import IndexFile, check_identity
from .store import IndexEntry, IndexLookup, Problem, digest_of
from .writer import IndexPayload, IndexWriter


class MemoryStore:
    """An ``IndexStore`` in this process. Holds containers, the same bytes as a file, in page-aligned memory.

    ``budget_bytes`` bounds the containers that the store holds; one that was handed out and then evicted
    lives on until its last user drops it. ``put`` copies the arrays in; ``get`` copies nothing. Contents end
    with ``close()``.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._lock = threading.RLock()
        self._catalog = Catalog()
        self._buffers: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._problems: dict[str, IndexStoreError] = {}
        self._used = 0
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
            self._buffers.clear()
            self._problems.clear()
            self._used = 0

    def __enter__(self) -> MemoryStore:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, payload: IndexPayload) -> IndexEntry:
        digest = payload.identity.digest
        with self._lock:
            self._check_open()
            writer = IndexWriter.of(payload)
            nbytes = writer.nbytes
            self._make_room(nbytes, digest)
            buffer = mmap.mmap(-1, nbytes)
            writer.begin(buffer)
            writer.write_all(payload)
            self._drop(digest)
            self._problems.pop(digest, None)
            info = payload.info
            entry = IndexEntry(
                identity=payload.identity,
                nbytes=nbytes,
                created=info.created,
                build_seconds=info.build_seconds,
            )
            self._catalog.add(digest, entry)
            self._buffers[digest] = buffer
            self._used += nbytes
            return entry

    def get(self, key: IndexLookup) -> IndexFile:
        digest = digest_of(key)
        with self._lock:
            self._check_open()
            buffer = self._buffers.get(digest)
            if buffer is None:
                raise IndexNotFound("index", expected=digest, found="none", remedy="build it, or raise the budget")
            self._buffers.move_to_end(digest)
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
            self._problems.pop(digest_of(key), None)
            return self._drop(digest_of(key))

    def list(self) -> Sequence[IndexEntry]:
        with self._lock:
            self._check_open()
            return self._catalog.entries()

    def problems(self) -> Sequence[Problem]:
        with self._lock:
            self._check_open()
            return tuple(Problem(digest, error) for digest, error in sorted(self._problems.items()))

    def report(self, key: IndexLookup, error: IndexStoreError) -> None:
        with self._lock:
            self._check_open()
            if self._drop(digest_of(key)):
                self._problems[digest_of(key)] = error

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
            listed = {entry.digest: entry.nbytes for entry in self._catalog.entries()}
            held = {digest: len(buffer) for digest, buffer in self._buffers.items()}
            if listed != held:
                raise inconsistent("bytes per index", listed, held)
            if sum(held.values()) != self._used:
                raise inconsistent("used_bytes", sum(held.values()), self._used)
            if self._used > self.budget_bytes:
                raise inconsistent("used_bytes", f"at most {self.budget_bytes}", self._used)

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreClosed("memory store", expected="open", found="closed", remedy="call open() first")

    def _drop(self, digest: str) -> bool:
        buffer = self._buffers.pop(digest, None)
        if buffer is None:
            return False
        self._used -= len(buffer)
        return self._catalog.remove(digest)

    def _make_room(self, nbytes: int, replaced: str) -> None:
        """Evicts until ``nbytes`` fit; the index to be replaced counts as gone but is kept until then."""
        if nbytes > self.budget_bytes:
            found = f"an index of {nbytes} bytes"
            raise StoreFull(
                "memory store",
                expected=f"at most {self.budget_bytes} bytes",
                found=found,
                remedy="raise the budget",
            )
        old = self._buffers.get(replaced)
        free = self.budget_bytes - self._used + (0 if old is None else len(old))
        for digest in tuple(self._buffers):
            if free >= nbytes:
                return
            if digest != replaced:
                free += len(self._buffers[digest])
                self._drop(digest)
