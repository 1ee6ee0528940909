"""Indexes in an existing distributed store, shared by a fleet: chunks under fresh names, a manifest last.

A cache that may lose, never the only copy. What comes back is whole and checked, or a miss with a reason, in time.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from ..errors import IndexFormatError, IndexNotFound, IndexStoreError, StoreFull
from ..format import ALIGN, Entry, IndexIdentity, aligned, xxh3_hex
from ..reader import IndexFile, IndexLookup, check_identity
from ..store import BuildLease, Catalog, IndexEntry, IndexStore, Retention, has_expired
from ..writer import IndexPayload, IndexWriter
from .blobs import Blobs
from .calls import Calls
from .claims import SharedLeases
from .values import Found, Manifest, Outcome, Values, generation_time, new_generation, not_found


class _Bad(NamedTuple):
    """The generation that a problem is about (None: look again). ``reported`` by a reader, or else found by ``get``."""

    generation: str | None
    reported: bool = False


class RemoteStore(IndexStore):
    """An ``IndexStore`` on a ``Blobs``. Any number of machines may use one ``folder`` of one store.

    ``timeout_s``     seconds that one request (at most one chunk) may take. A whole get or put of n chunks takes
                      at most n / 4 times as long: four are under way at a time
    ``chunk_nbytes``  size of the values that a container is cut into; readers take it from the manifest
    ``lease_ttl_s``   how long a build lease outlives its holder, where the store can arbitrate (``claims.py``)
    ``grace_s``       age, by the writer's clock, from which ``collect()`` removes chunks that no manifest names
    ``clock``         gives the seconds since the Unix epoch by which indexes expire and writers date their chunks

    ``put`` holds one container in memory while it writes; ``get`` returns an index that lies in memory as a whole.
    ``open`` raises StoreUnavailable when nothing answers. Look-ups see what this object put or read, and what other
    machines did after ``rescan()``.
    """

    kind = "remote"

    def __init__(
        self,
        blobs: Blobs,
        *,
        folder: str = "prefix_index",
        timeout_s: float = 5.0,
        chunk_nbytes: int = 32 << 20,
        lease_ttl_s: float = 60.0,
        grace_s: float = 3600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self.folder = folder
        self.catalog = Catalog(clock)
        self._blobs = blobs
        self._timeout_s, self._grace_s, self._clock = timeout_s, grace_s, clock
        if chunk_nbytes <= 0 or aligned(chunk_nbytes) != chunk_nbytes:
            raise ValueError(f"chunk_nbytes: expected a positive multiple of {ALIGN}, found {chunk_nbytes}")
        self._chunk_nbytes = chunk_nbytes
        self._calls = Calls(blobs.name, timeout_s=timeout_s)
        self._values = Values(blobs, self._calls, folder)
        self._leases = SharedLeases(self._values, ttl_s=lease_ttl_s)
        self._swap = threading.RLock()  # one change of a manifest at a time
        self._opening = threading.Lock()
        self._scanning = threading.Lock()
        self._manifests: dict[str, Manifest] = {}
        self._bad: dict[str, _Bad] = {}
        self._seen: dict[str, Found] = {}
        self._touched: set[str] = set()
        """What this process learned of since a listing began: newer than the listing, which says nothing of it then."""

    def open(self) -> None:
        with self._opening:
            if self._is_open:
                return
            self._calls.check_idle()
            try:
                self._values.ask([lambda: self._blobs.open(self._timeout_s)])
                self._scan(full=True)
            except BaseException:
                self._calls.close(self._blobs.close)
                self._clear()
                raise
            self._is_open = True

    def close(self) -> None:
        with self._opening:
            if self._is_open:
                self._is_open = False
                self._calls.close(self._blobs.close)
                self._clear()

    def put(self, payload: IndexPayload, *, retention: Retention | None = None) -> IndexEntry:
        """As in the protocol; when the store stops answering in the end, either the old or the new index is there."""
        self._check_open()
        writer = IndexWriter(payload)
        digest = payload.identity.digest
        container, size = mmap.mmap(-1, writer.nbytes), self._chunk_nbytes
        writer.write(container)
        manifest = Manifest(
            entry=Entry(payload.identity, payload.info),
            nbytes=writer.nbytes,
            chunk_nbytes=size,
            generation=new_generation(self._clock()),
            chunks=[xxh3_hex(memoryview(container)[at : at + size]) for at in range(0, writer.nbytes, size)],
            retention=retention or Retention(),
        )
        with self._undone(manifest):
            self._values.upload(manifest, memoryview(container))
            if not self._values.is_whole(manifest):
                found = f"parts of its {manifest.nbytes} bytes evicted while the rest was written"
                remedy = "add room to the store, or put smaller indexes"
                raise StoreFull(self._blobs.name, "room for the index", found, remedy)
        with self._swap:
            with self._undone(manifest):
                old = self._current(digest)
            if retention is None and isinstance(old, Manifest) and not self._is_expired(old):
                manifest = msgspec.structs.replace(manifest, retention=old.retention)
            self._values.put_manifest(manifest)
            self._learn(manifest)
        if isinstance(old, Manifest):
            self._drop_chunks(old)
        return manifest.listed

    def get(self, key: IndexLookup) -> IndexFile:
        """As in the protocol; the index is downloaded as a whole. Raises StoreUnavailable, too."""
        digest = self._digest(key)
        manifest: Manifest | None = None
        try:
            manifest = self._values.manifest(digest)
            while True:
                self._check_offered(digest, manifest)
                try:
                    index = IndexFile(self._values.download(manifest))
                    check_identity(manifest.entry.identity, index.identity)
                    break
                except (IndexNotFound, IndexFormatError):
                    # Another machine may have replaced it under our hands: then there is a new one to try.
                    failed, manifest = manifest, self._values.manifest(digest)
                    if manifest.generation == failed.generation:
                        raise
        except (IndexNotFound, IndexFormatError) as err:
            self._take_failure(digest, manifest, err)
            raise
        if self._manifests.get(digest) != manifest:
            self._learn(manifest, unless_bad=True)
        with self._lock:
            self.catalog.gave(digest, manifest.generation)
        if isinstance(key, IndexIdentity):
            check_identity(key, index.identity)
        return index

    def contains(self, key: IndexLookup) -> bool:
        """As in the protocol: manifest and lengths of all chunks are asked for. False, too, when nobody answers."""
        digest = self._digest(key)
        try:
            manifest = self._values.manifest(digest)
            return not self._is_expired(manifest) and not self._is_bad(manifest) and self._values.is_whole(manifest)
        except IndexStoreError:
            return False

    def delete(self, key: IndexLookup) -> bool:
        """As in the protocol. Raises StoreUnavailable; then the index may be gone or not."""
        digest = self._digest(key)
        with self._swap:
            old = self._current(digest)
            if old is not None:
                self._values.remove(f"{digest}.manifest")
            self._forget(digest)
        if isinstance(old, Manifest):
            self._drop_chunks(old)
        elif old is not None and (names := self._values.listing().get(digest)) is not None:
            for generation, indexes in names.chunks.items():
                self._values.remove_chunks(digest, generation, indexes)
        return old is not None

    def retain(self, key: IndexLookup, retention: Retention) -> IndexEntry:
        """As in the protocol. Raises StoreUnavailable, IndexFormatError, too."""
        digest = self._digest(key)
        with self._swap:
            manifest = self._values.manifest(digest)
            if self._is_expired(manifest):
                raise not_found(digest, "one that has expired", "build it again")
            manifest = msgspec.structs.replace(manifest, retention=retention)
            self._values.put_manifest(manifest)
            self._learn(manifest, unless_bad=True)
        return manifest.listed

    def lease(self, key: IndexLookup) -> BuildLease | None:
        """As in the protocol: between machines where the store can create a value only if there is none."""
        return self._leases.acquire(self._digest(key))

    def collect(self) -> Sequence[IndexEntry]:
        """As in the protocol; also removes indexes that lost chunks, chunks without a manifest, leases of the dead."""
        self._check_open()
        found = self._scan(full=False)
        with self._lock:
            now = self._clock()
            due = [(d, self._is_expired) for d, e in self.catalog.all_held() if has_expired(e.retention, now)]
            lost = [d for d, error in self.catalog.problems.items() if isinstance(error, IndexNotFound)]
            due += [(d, lambda manifest: not self._values.is_whole(manifest)) for d in lost]
        removed = []
        for digest, is_due in due:
            with self._swap:
                manifest = self._current(digest)
                if not isinstance(manifest, Manifest) or not is_due(manifest):
                    continue
                self._values.remove(f"{digest}.manifest")
                self._forget(digest)
            self._drop_chunks(manifest)
            removed.append(manifest.listed)
        for digest, names in found.items():
            self._drop_orphans(digest, names)
            if names.leased:
                self._leases.remove_expired(digest, grace_s=self._grace_s)
        return sorted(removed, key=lambda entry: entry.digest)

    def report(self, key: IndexLookup, error: IndexStoreError) -> None:
        """As in the protocol; one that may be about an older version counts for nothing: ``get`` checks all bytes."""
        digest = self._digest(key)
        with self._lock:
            manifest = self._manifests.get(digest)
            if manifest is None or self._is_expired(manifest):
                return
            if self.catalog.gave_only(digest, manifest.generation):
                self._hide(digest, error, _Bad(manifest.generation, reported=True))

    def rescan(self, *, full: bool = False) -> None:
        """Lists the names; reads the manifests that are new, or all with ``full``. Raises StoreUnavailable, having
        changed nothing.
        """
        self._check_open()
        self._scan(full=full)

    # ---- what it knows without asking ----

    def _clear(self) -> None:
        with self._lock:
            self.catalog.clear()
            for book in (self._manifests, self._bad, self._seen, self._touched):
                book.clear()

    def _learn(self, manifest: Manifest, *, unless_bad: bool = False) -> None:
        """There is an index of this manifest. ``unless_bad``: if this generation is a problem, it stays one."""
        digest = manifest.entry.identity.digest
        with self._lock:
            if unless_bad and self._is_bad(manifest):
                return
            self._forget(digest)
            self.catalog.add(digest, manifest.listed)
            self._manifests[digest] = manifest

    def _forget(self, digest: str) -> None:
        with self._lock:
            self._touched.add(digest)
            self.catalog.remove(digest)
            for book in (self._seen, self._bad, self.catalog.problems, self._manifests):
                book.pop(digest, None)

    def _hide(self, digest: str, error: IndexStoreError, bad: _Bad) -> None:
        """The index is offered no more, until another generation of it comes."""
        with self._lock:
            self._forget(digest)
            self.catalog.problems[digest] = error
            self._bad[digest] = bad

    def _is_bad(self, manifest: Manifest, *, reported: bool = False) -> bool:
        """Whether this generation of the index is a problem; one that was ``reported``, even."""
        bad = self._bad.get(manifest.entry.identity.digest)
        return bad is not None and bad.generation == manifest.generation and bad.reported >= reported

    def _check_offered(self, digest: str, manifest: Manifest) -> None:
        """Raises what was reported about this generation; IndexNotFound for one that has expired."""
        with self._lock:
            if self._is_bad(manifest, reported=True):
                raise self.catalog.problems[digest].at(digest)
        if self._is_expired(manifest):
            raise not_found(digest, "one that has expired", "build it again")

    def _take_failure(self, digest: str, manifest: Manifest | None, error: IndexStoreError) -> None:
        """After a failed get: what was reported stands, what is damaged is a problem, what is gone is forgotten."""
        with self._lock:
            if manifest is not None and self._is_bad(manifest, reported=True):
                return
            if isinstance(error, IndexFormatError):
                known = manifest or self._manifests.get(digest)
                self._hide(digest, error, _Bad(None if known is None else known.generation))
            elif manifest is None or not self._is_expired(manifest):
                self._forget(digest)

    def _scan(self, *, full: bool) -> dict[str, Found]:
        with self._scanning:
            with self._lock:
                self._touched.clear()
            found = self._values.listing()
            with self._lock:
                there = {d: names for d, names in found.items() if names.tag is not None}
                news = [d for d, names in there.items() if full or self._seen.get(d) != names]
            outcomes = self._values.manifests(news)
            with self._lock:
                for digest in {*self._manifests, *self._bad} - there.keys() - self._touched:
                    self._forget(digest)
                touched = set(self._touched)
                for digest, outcome in outcomes.items():
                    if digest not in touched:
                        self._take_in(digest, outcome, found[digest])
                        self._seen[digest] = found[digest]
        return found

    def _take_in(self, digest: str, outcome: Outcome, names: Found) -> None:
        if isinstance(outcome, IndexNotFound):
            self._forget(digest)
        elif isinstance(outcome, IndexFormatError):
            self._hide(digest, outcome, _Bad(None))
        elif names.is_whole(outcome):
            self._learn(outcome, unless_bad=True)
        else:
            there = len(names.chunks.get(outcome.generation, ()))
            found = f"{there} of its {len(outcome.chunks)} chunks (evicted, or lost with their machine)"
            self._hide(digest, not_found(digest, found, "build it again; collect() removes the rest"), _Bad(None))

    # ---- what it asks ----

    def _current(self, digest: str) -> Manifest | IndexFormatError | None:
        try:
            return self._values.manifest(digest)
        except IndexNotFound:
            return None
        except IndexFormatError as err:
            return err

    def _is_expired(self, manifest: Manifest) -> bool:
        return has_expired(manifest.retention, self._clock())

    def _drop_chunks(self, manifest: Manifest) -> None:
        """Removes the chunks of a generation that no manifest names any more. What fails, ``collect`` removes."""
        with contextlib.suppress(IndexStoreError):
            digest = manifest.entry.identity.digest
            self._values.remove_chunks(digest, manifest.generation, range(len(manifest.chunks)))

    def _drop_orphans(self, digest: str, names: Found) -> None:
        before = self._clock() - self._grace_s
        old = [generation for generation in names.chunks if generation_time(generation) < before]
        current = self._current(digest) if old else None
        if isinstance(current, IndexFormatError):
            return
        for generation in old:
            if current is None or generation != current.generation:
                self._values.remove_chunks(digest, generation, names.chunks[generation])

    @contextlib.contextmanager
    def _undone(self, manifest: Manifest) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._drop_chunks(manifest)
            raise
