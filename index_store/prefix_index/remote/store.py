"""Indexes in an existing distributed store, shared by a fleet: chunks under fresh names, a manifest last.

A cache that may lose, never the only copy: keep what must not be lost in a ``FileStore`` (``SharedStore`` composes
the two). What comes back is whole and checked, or it is a miss with a reason, within a bounded time.
docs/remote-tiers.md is the page about it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import msgspec

from ..errors import (
    IndexFormatError,
    IndexNotFound,
    IndexStoreError,
    StoreClosed,
    StoreFull,
    StoreUnavailable,
)
from ..eviction import has_expired
from ..format import Entry
from ..keys import PAGE_TOKENS, IndexIdentity, ModelFingerprint
from ..reader import IndexFile, check_identity
from ..store import BuildLease, IndexEntry, IndexLookup, Problem, Retention, digest_of
from ..writer import IndexPayload, IndexWriter
from .blobs import Blobs
from .books import Books
from .calls import Calls
from .claims import SharedLeases
from .ondemand import OnDemandSource
from .transfer import Found, Values, not_found
from .values import ChunkedBuffer, Manifest, check_chunk_nbytes, generation_time, new_generation


class RemoteStore:
    """An ``IndexStore`` on a ``Blobs``. Any number of machines may use one ``folder`` of one store.

    ``timeout_s``     seconds that one request (at most one chunk) may take; after one that took longer, every call
                      raises StoreUnavailable for ``backoff_s`` seconds. A whole get or put of n chunks takes at
                      most n / 4 times as long: four are under way at a time
    ``chunk_nbytes``  size of the values that a container is cut into; readers take it from the manifest
    ``lease_ttl_s``   how long a build lease outlives its holder, where the store can arbitrate (``claims.py``)
    ``grace_s``       age, by the writer's clock, from which ``collect()`` removes chunks that no manifest names
    ``clock``         gives the seconds since the Unix epoch by which indexes expire and writers date their chunks

    ``put`` holds one container in memory while it writes; ``get`` returns an index that lies in memory as a whole.
    ``get_on_demand`` leaves the bytes where they are. ``open`` raises StoreUnavailable when nothing answers. Look-ups
    see what this object put or read, and what other machines did after ``rescan()``.
    """

    def __init__(
        self,
        blobs: Blobs,
        *,
        folder: str = "prefix_index",
        timeout_s: float = 5.0,
        backoff_s: float = 5.0,
        chunk_nbytes: int = 32 << 20,
        lease_ttl_s: float = 60.0,
        grace_s: float = 3600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self._blobs = blobs
        self._timeout_s, self._grace_s, self._clock = timeout_s, grace_s, clock
        self._chunk_nbytes = check_chunk_nbytes(chunk_nbytes)
        self._calls = Calls(blobs.name, timeout_s=timeout_s, backoff_s=backoff_s)
        self._values = Values(blobs, self._calls, folder)
        self._leases = SharedLeases(self._values, ttl_s=lease_ttl_s)
        self._books = Books(clock)
        self._swap = threading.RLock()  # one change of a manifest at a time
        self._opening = threading.Lock()
        self._streams: weakref.WeakSet[OnDemandSource] = weakref.WeakSet()
        self._is_open = False

    def open(self) -> None:
        with self._opening:
            if self._is_open:
                return
            self._calls.check_idle()
            try:
                with self._values.asking():
                    self._calls.run(lambda: self._blobs.open(self._timeout_s))
                self._scan(full=True)
            except BaseException:
                self._calls.close(self._blobs.close)
                self._books.clear()
                raise
            self._is_open = True

    def close(self) -> None:
        with self._opening:
            if self._is_open:
                self._is_open = False
                self._calls.close(self._blobs.close)
                self._books.clear()

    def __enter__(self) -> RemoteStore:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, payload: IndexPayload, *, retention: Retention | None = None) -> IndexEntry:
        """As in the protocol, and: when the store stops answering while the manifest is written, either the old or
        the new index is there afterwards.
        """
        self._check_open()
        writer = IndexWriter.of(payload)
        digest, generation = payload.identity.digest, new_generation(self._clock())
        buffer = ChunkedBuffer(writer.nbytes, self._chunk_nbytes)
        writer.begin(buffer)
        writer.write_all(payload)
        manifest = Manifest(
            entry=Entry(payload.identity, payload.info),
            nbytes=writer.nbytes,
            chunk_nbytes=self._chunk_nbytes,
            generation=generation,
            chunks=buffer.seal(digest, generation),
            retention=retention or Retention(),
        )
        with self._undone(lambda: self._drop_chunks(manifest)):
            self._values.upload(digest, generation, buffer)
            if not self._values.is_whole(manifest):
                found = f"parts of its {manifest.nbytes} bytes evicted while the rest was written"
                remedy = "add room to the store, or put smaller indexes"
                raise StoreFull(self._blobs.name, expected="room for the index", found=found, remedy=remedy)
        with self._swap:
            with self._undone(lambda: self._drop_chunks(manifest)):
                old = self._current(digest)
            if retention is None and isinstance(old, Manifest) and not self._is_expired(old):
                manifest = msgspec.structs.replace(manifest, retention=old.retention)
            self._values.put_manifest(manifest)
            self._books.learn(manifest)
        if isinstance(old, Manifest):
            self._drop_chunks(old)
        return manifest.listed

    def get(self, key: IndexLookup) -> IndexFile:
        """As in the protocol; the index is downloaded as a whole. Raises StoreUnavailable, too."""
        return self._get(key, lambda manifest: IndexFile.from_buffer(self._values.download(manifest)))

    def get_on_demand(self, key: IndexLookup) -> IndexFile:
        """As ``get``, but only the header comes now; ``read_into`` and ``read_many`` fetch the arrays they are asked
        for, ``array`` the whole index once. So one layer, or one rank's heads, costs its own bytes.

        Until then it lives with its remote values: when another machine deletes or replaces the index, later reads
        raise IndexNotFound; when this object does, it is downloaded before.
        """

        def attach(manifest: Manifest) -> IndexFile:
            source = OnDemandSource(self._values, manifest)
            self._streams.add(source)
            return IndexFile(source)

        return self._get(key, attach)

    def contains(self, key: IndexLookup) -> bool:
        """As in the protocol: manifest and lengths of all chunks are asked for. False, too, when nobody answers."""
        digest = digest_of(key)
        self._check_open()
        try:
            manifest = self._values.manifest(digest)
            return (
                not self._is_expired(manifest) and not self._books.is_bad(manifest) and self._values.is_whole(manifest)
            )
        except IndexStoreError:
            return False

    def delete(self, key: IndexLookup) -> bool:
        """As in the protocol. Raises StoreUnavailable; then the index may be gone or not."""
        digest = digest_of(key)
        self._check_open()
        with self._swap:
            old = self._current(digest)
            if old is not None:
                self._values.remove_manifest(digest)
            self._books.forget(digest)
        if isinstance(old, Manifest):
            self._drop_chunks(old)
        elif old is not None:
            self._drop_generations(digest, self._values.listing()[0].get(digest))
        return old is not None

    def retain(self, key: IndexLookup, retention: Retention) -> IndexEntry:
        """As in the protocol. Raises StoreUnavailable, IndexFormatError, too."""
        digest = digest_of(key)
        self._check_open()
        with self._swap:
            manifest = self._values.manifest(digest)
            if self._is_expired(manifest):
                raise not_found(digest, "one that has expired", "build it again")
            manifest = msgspec.structs.replace(manifest, retention=retention)
            self._values.put_manifest(manifest)
            self._books.learn(manifest, unless_bad=True)
        return manifest.listed

    def lease(self, key: IndexLookup) -> BuildLease | None:
        """As in the protocol: between machines where the store can create a value only if there is none. Raises
        StoreUnavailable.
        """
        digest = digest_of(key)
        self._check_open()
        return self._leases.acquire(digest)

    def prefetch(self, key: IndexLookup) -> None:
        """Nothing to do: a faster tier above this one brings indexes nearer."""
        digest_of(key)
        self._check_open()

    def collect(self) -> Sequence[IndexEntry]:
        """Removes what has expired, indexes of which chunks were lost, chunks that no manifest names and that are
        older than the grace, leases whose holders died. Returns the indexes. Raises StoreUnavailable.
        """
        self._check_open()
        found = self._scan(full=False)
        with self._books.lock:
            now = self._clock()
            expired = [d for d, entry in self._books.catalog.all_held() if has_expired(entry.retention, now)]
            lost = self._books.incomplete()
        removed = []
        for digest, is_due in (*((d, self._is_expired) for d in expired), *((d, self._is_lost) for d in lost)):
            with self._swap:
                manifest = self._current(digest)
                if not isinstance(manifest, Manifest) or not is_due(manifest):
                    continue
                self._values.remove_manifest(digest)
                self._books.forget(digest)
            self._drop_chunks(manifest)
            removed.append(manifest.listed)
        for digest, names in found.items():
            self._drop_orphans(digest, names)
            if names.leased:
                self._leases.remove_expired(digest, grace_s=self._grace_s)
        return sorted(removed, key=lambda entry: entry.digest)

    def list(self) -> Sequence[IndexEntry]:
        self._check_open()
        with self._books.lock:
            return self._books.catalog.entries()

    def problems(self) -> Sequence[Problem]:
        self._check_open()
        return self._books.problems()

    def report(self, key: IndexLookup, error: IndexStoreError) -> None:
        """As in the protocol. Where the index has to be read first and cannot be, the report is not believed."""
        digest = digest_of(key)
        self._check_open()
        manifest = self._books.offered(digest)
        if manifest is None or self._is_expired(manifest):
            return
        if not self._books.gave_only(manifest):
            try:
                IndexFile.from_buffer(self._values.download(manifest)).verify()
                return
            except (IndexNotFound, StoreUnavailable):
                return
            except IndexFormatError as err:
                error = err
        self._books.report(manifest, error)

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
        with self._books.lock:
            return self._books.catalog.longest(namespace, page_hashes, model, profile_digest, page_tokens)

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
        with self._books.lock:
            return self._books.catalog.near_miss(namespace, page_hashes, model, profile_digest, page_tokens)

    def rescan(self, *, full: bool = False) -> None:
        """Lists the names; reads the manifests that are new, or all with ``full``. Raises StoreUnavailable; then the
        books are what they were.
        """
        self._check_open()
        self._scan(full=full)

    def check_integrity(self) -> None:
        """As in the protocol: books against manifests. Meaningful while no other machine writes, or evicts."""
        self._check_open()
        found = self._scan(full=False)
        self._books.check_integrity(self._values.manifests([d for d, names in found.items() if names.tag is not None]))

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreClosed("remote store", expected="open", found="closed", remedy="call open() first")

    def _get(self, key: IndexLookup, opener: Callable[[Manifest], IndexFile]) -> IndexFile:
        digest = digest_of(key)
        self._check_open()
        manifest: Manifest | None = None
        try:
            manifest = self._values.manifest(digest)
            while True:
                reported = self._books.verdict(manifest)
                if reported is not None:
                    raise reported.at(digest)
                if self._is_expired(manifest):
                    raise not_found(digest, "one that has expired", "build it again")
                try:
                    index = opener(manifest)
                    check_identity(manifest.entry.identity, index.identity)
                    break
                except (IndexNotFound, IndexFormatError):
                    # Another machine may have replaced it under our hands: then there is a new one to try.
                    failed, manifest = manifest, self._values.manifest(digest)
                    if manifest.generation == failed.generation:
                        raise
        except (IndexNotFound, IndexFormatError) as err:
            if manifest is not None and self._books.verdict(manifest) is not None:
                pass  # what was reported stands
            elif isinstance(err, IndexFormatError):
                self._books.add_problem(digest, err, manifest)
            elif manifest is None or not self._is_expired(manifest):
                self._books.forget(digest)
            raise
        if not self._books.is_known(manifest):
            self._books.learn(manifest, unless_bad=True)
        self._books.gave(manifest)
        if isinstance(key, IndexIdentity):
            check_identity(key, index.identity)
        return index

    def _current(self, digest: str) -> Manifest | IndexFormatError | None:
        try:
            return self._values.manifest(digest)
        except IndexNotFound:
            return None
        except IndexFormatError as err:
            return err

    def _scan(self, *, full: bool) -> dict[str, Found]:
        begun = self._books.begin_scan()
        found, strays = self._values.listing()
        outcomes = self._values.manifests(self._books.news(found, full=full))
        self._books.end_scan(begun, found, outcomes, strays)
        return found

    def _is_expired(self, manifest: Manifest) -> bool:
        return has_expired(manifest.retention, self._clock())

    def _is_lost(self, manifest: Manifest) -> bool:
        return not self._values.is_whole(manifest)

    def _drop_chunks(self, manifest: Manifest) -> None:
        """Removes the chunks of a generation that no manifest names any more. What fails, ``collect`` removes."""
        for source in tuple(self._streams):
            if source.manifest.generation == manifest.generation:
                with contextlib.suppress(IndexStoreError):
                    source.mapping()
        with contextlib.suppress(IndexStoreError):
            digest = manifest.entry.identity.digest
            self._values.remove_chunks(digest, manifest.generation, range(len(manifest.chunks)))

    def _drop_generations(self, digest: str, names: Found | None) -> None:
        for generation, indexes in {} if names is None else names.chunks.items():
            self._values.remove_chunks(digest, generation, sorted(indexes))

    def _drop_orphans(self, digest: str, names: Found) -> None:
        before = self._clock() - self._grace_s
        old = {g: indexes for g, indexes in names.chunks.items() if generation_time(g) < before}
        if old:
            current = self._current(digest)
            if not isinstance(current, IndexFormatError):
                keep = None if current is None else current.generation
                rest = {g: indexes for g, indexes in old.items() if g != keep}
                self._drop_generations(digest, names._replace(chunks=rest))

    @contextlib.contextmanager
    def _undone(self, undo: Callable[[], None]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            undo()
            raise
