"""Indexes in an existing distributed store, shared by a fleet: chunks under fresh names, a manifest last.

A cache that may lose, never the only copy. What comes back is whole and checked, or a miss with a reason, in time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from ..errors import (
    IndexFormatError,
    IndexMismatch,
    IndexNotFound,
    IndexStoreError,
    IndexTooNew,
    StoreFull,
    out_of_memory,
)
from ..format import Entry, IndexIdentity, xxh3_hex
from ..lease import LocalLeases
from ..reader import IndexFile, IndexLookup, check_identity
from ..store import BuildLease, Catalog, IndexSource
from ..writer import IndexPayload, IndexWriter
from .blobs import Blobs
from .values import (
    LEASE,
    LEASES,
    Calls,
    Found,
    LeaseRecord,
    Manifest,
    Outcome,
    Values,
    generation_time,
    new_generation,
    not_found,
    pack_record,
    unpack_record,
)

_GENERATION: Final = new_generation(0)
"""Of all leases of this process."""


class RemoteStore(IndexSource):
    """An ``IndexSource`` on a ``Blobs``: indexes that never change. Any number of machines may use one ``folder``.

    ``timeout_s``     seconds that one request (at most one chunk) may take. A whole get or put of n chunks takes
                      at most n / 4 times as long: four are under way at a time
    ``chunk_nbytes``  size of the values that a container is cut into, whole pages; readers take it from the manifest
    ``lease_ttl_s``   how long a build lease outlives its holder, where the store can arbitrate
    ``grace_s``       age, by the writer's clock, from which ``sweep()`` removes chunks that no manifest names
    ``clock``         gives the seconds since the Unix epoch by which writers date their chunks

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
        self.catalog = Catalog()
        self._blobs = blobs
        self._timeout_s, self._grace_s, self._clock = timeout_s, grace_s, clock
        self._chunk_nbytes = chunk_nbytes
        self._calls = Calls(blobs.name, timeout_s=timeout_s)
        self._values = Values(blobs, self._calls, folder)
        self._leases = SharedLeases(self._values, ttl_s=lease_ttl_s)
        self._opening = threading.Lock()
        self._scanning = threading.Lock()
        self._bad: dict[str, str] = {}
        """The generation of an index that was read and found damaged."""
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

    def put(self, payload: IndexPayload) -> bool:
        """Stores an index unless one of its identity is there; returns whether it did. One that is damaged, or lost
        chunks, is deleted first; one of a newer version stays. Raises InvalidPayload, StoreFull, StoreUnavailable, and
        what a ``LazyArray`` raises.
        """
        self._check_open()
        digest = payload.identity.digest
        if self._is_taken(digest):
            return False
        writer = IndexWriter(payload)
        container, size = mmap.mmap(-1, writer.nbytes), self._chunk_nbytes
        writer.write(container)
        manifest = Manifest(
            entry=Entry(payload.identity, payload.info),
            nbytes=writer.nbytes,
            chunk_nbytes=size,
            generation=new_generation(self._clock()),
            chunks=[xxh3_hex(memoryview(container)[at : at + size]) for at in range(0, writer.nbytes, size)],
        )
        try:
            self._values.upload(manifest, memoryview(container))
            if not self._values.is_whole(manifest):
                found = f"parts of its {manifest.nbytes} bytes evicted while the rest was written"
                remedy = "add room to the store, or put smaller indexes"
                raise StoreFull(self._blobs.name, "room for the index", found, remedy)
        except BaseException:
            self._drop_chunks(manifest)
            raise
        if not self._values.create_manifest(manifest):  # somebody else was faster
            self._drop_chunks(manifest)
            return False
        self._learn(manifest)
        return True

    def get(self, key: IndexLookup) -> IndexFile:
        """As in the protocol; the index is downloaded as a whole. Raises StoreUnavailable, too."""
        digest = self._digest(key)
        manifest: Manifest | None = None
        try:
            manifest = self._values.manifest(digest)
            index = IndexFile(self._values.download(manifest))
            check_identity(manifest.entry.identity, index.identity)
        except (IndexFormatError, IndexMismatch) as err:
            self._hide(digest, err, None if manifest is None else manifest.generation)
            raise
        except IndexNotFound:
            self._forget(digest)
            raise
        if self.catalog.get(digest) != manifest.listed:
            self._learn(manifest)
        if isinstance(key, IndexIdentity):
            check_identity(key, index.identity)
        return index

    def contains(self, key: IndexLookup) -> bool:
        """As in the protocol: manifest and lengths of all chunks are asked for. False, too, when nobody answers."""
        digest = self._digest(key)
        try:
            manifest = self._values.manifest(digest)
            return self._bad.get(digest) != manifest.generation and self._values.is_whole(manifest)
        except IndexStoreError:
            return False

    def delete(self, key: IndexLookup) -> bool:
        """As in the protocol. Raises StoreUnavailable; then the index may be gone or not."""
        digest = self._digest(key)
        manifest: Manifest | None = None
        try:
            manifest = self._values.manifest(digest)
        except IndexNotFound:
            self._forget(digest)
            return False
        except IndexFormatError:
            pass  # it does not say which chunks it had: sweep() finds them
        self._values.remove(f"{digest}.manifest")
        self._forget(digest)
        if manifest is not None:
            self._drop_chunks(manifest)
        return True

    def lease(self, key: IndexLookup) -> BuildLease | None:
        """As in the protocol: between machines where the store can create a value only if there is none."""
        return self._leases.acquire(self._digest(key))

    def sweep(self) -> None:
        """Removes indexes that lost chunks, chunks that no manifest names, and leases of the dead."""
        self._check_open()
        found = self._scan(full=False)
        with self._lock:
            lost = [d for d, error in self.catalog.problems.items() if isinstance(error, IndexNotFound)]
        for digest in lost:
            self._is_taken(digest)  # deletes it, unless it is whole; raises where nobody says so now
        for digest, names in found.items():
            self._drop_orphans(digest, names)
            if names.leased:
                self._leases.remove_expired(digest, grace_s=self._grace_s)

    def rescan(self, *, full: bool = False) -> None:
        """Lists the names; reads the manifests that are new, or all with ``full``. Raises StoreUnavailable, having
        changed nothing.
        """
        self._check_open()
        self._scan(full=full)

    def _clear(self) -> None:
        with self._lock:
            for book in (self.catalog, self._bad, self._seen, self._touched):
                book.clear()

    def _learn(self, manifest: Manifest) -> None:
        digest = manifest.entry.identity.digest
        with self._lock:
            self._forget(digest)
            self.catalog.add(digest, manifest.listed)

    def _forget(self, digest: str) -> None:
        with self._lock:
            self._touched.add(digest)
            self.catalog.remove(digest)
            for book in (self._seen, self._bad, self.catalog.problems):
                book.pop(digest, None)

    def _hide(self, digest: str, error: IndexStoreError, generation: str | None = None) -> None:
        """The index is offered no more; if its ``generation`` is known, until another one comes."""
        with self._lock:
            self._forget(digest)
            self.catalog.problems[digest] = error.bare()
            if generation is not None:
                self._bad[digest] = generation

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
                known = {*(digest for digest, _ in self.catalog.all_held()), *self.catalog.problems}
                for digest in known - there.keys() - self._touched:
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
            self._hide(digest, outcome)
        elif not names.is_whole(outcome):
            there = len(names.chunks.get(outcome.generation, ()))
            found = f"{there} of its {len(outcome.chunks)} chunks (evicted, or lost with their machine)"
            self._hide(digest, not_found(digest, found, "build it again"))
        elif self._bad.get(digest) != outcome.generation:
            self._learn(outcome)

    def _is_taken(self, digest: str) -> bool:
        """Whether an index is there that stays. Makes way for another where it is damaged."""
        try:
            manifest = self._values.manifest(digest)
            if self._bad.get(digest) != manifest.generation and self._values.is_whole(manifest):
                self._learn(manifest)
                return True
        except IndexNotFound:
            return False
        except IndexTooNew:
            return True
        except IndexFormatError:
            pass
        self.delete(digest)
        return False

    def _drop_chunks(self, manifest: Manifest) -> None:
        """Removes the chunks of a generation that no manifest names. What fails, ``sweep`` removes."""
        with contextlib.suppress(IndexStoreError):
            digest = manifest.entry.identity.digest
            self._values.remove_chunks(digest, manifest.generation, range(len(manifest.chunks)))

    def _drop_orphans(self, digest: str, names: Found) -> None:
        before = self._clock() - self._grace_s
        old = [generation for generation in names.chunks if generation_time(generation) < before]
        if not old:
            return
        try:
            current = self._values.manifest(digest).generation
        except IndexNotFound:
            current = ""
        except IndexFormatError:
            return
        for generation in old:
            if generation != current:
                self._values.remove_chunks(digest, generation, names.chunks[generation])


class SharedLeases:
    """Build leases between machines: a small value that only one can create, kept alive by its holder. Times: seconds.

    The value says who holds the lease and until when by the holder's clock; a thread renews it every third of its
    ``ttl_s``. One whose time has passed by *our* clock is taken over. Where clocks are further apart than ``ttl_s`` /
    3, and in the moment of a takeover, two machines may build the same index: work is wasted, nothing is lost. Stores
    that cannot create a value only where there is none (Mooncake) arbitrate within this process.
    """

    def __init__(self, values: Values, *, ttl_s: float) -> None:
        self._values, self._ttl_s = values, ttl_s
        self._local = LocalLeases()

    def acquire(self, digest: str) -> BuildLease | None:
        """None while somebody holds it. Raises StoreUnavailable."""
        local = self._local.acquire(digest)
        if local is None:
            return None
        holder = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
        with contextlib.ExitStack() as owned:
            owned.callback(local.release)
            claimed = self._claim(digest, holder)
            if claimed is False:
                return None
            if claimed is None:
                owned.pop_all()
                return local
            stop = threading.Event()
            # It refers to no lease object, so that a forgotten one ends.
            beat = threading.Thread(target=self._beat, args=(digest, holder, stop), name="build lease", daemon=True)
            try:
                beat.start()
            except RuntimeError as err:  # the system's limit of threads
                self._values.remove(_name(digest))
                raise out_of_memory(err, "a thread for the lease") from err
            owned.pop_all()
            return BuildLease(digest, local.release, beat.join, stop.set, forgotten=stop.set)

    def remove_expired(self, digest: str, *, grace_s: float) -> None:
        """Removes a lease value whose time passed more than ``grace_s`` ago, and one that cannot be read."""
        record = self._read(digest)
        if record is None or record.expires + grace_s < time.time():
            self._values.remove(_name(digest))

    def _claim(self, digest: str, holder: str) -> bool | None:
        """None where the store cannot arbitrate."""
        raw = self._pack(digest, holder)
        created = self._values.create(_name(digest), raw)
        if created is not False:
            return created
        record = self._read(digest)
        if record is not None and time.time() < record.expires < time.time() + 10 * self._ttl_s:
            return False
        self._values.remove(_name(digest))
        return self._values.create(_name(digest), raw)

    def _beat(self, digest: str, holder: str, stop: threading.Event) -> None:
        """Keeps a lease alive until it ends, or is somebody else's."""
        while not stop.wait(self._ttl_s / 3):
            # A store that does not answer now is asked again at the next beat.
            with contextlib.suppress(IndexStoreError):
                record = self._read(digest)
                if record is not None and record.holder != holder:
                    return
                self._values.write(_name(digest), self._pack(digest, holder))
        with contextlib.suppress(IndexStoreError):
            record = self._read(digest)
            if record is not None and record.holder == holder:
                self._values.remove(_name(digest))

    def _pack(self, digest: str, holder: str) -> bytes:
        return pack_record(LEASE, digest, _GENERATION, LeaseRecord(holder=holder, expires=time.time() + self._ttl_s))

    def _read(self, digest: str) -> LeaseRecord | None:
        """None where there is none, and for a value that is none of ours."""
        raw = self._values.fetch(_name(digest))
        try:
            return None if raw is None else unpack_record(LEASE, digest, raw, LEASES)[1]
        except IndexFormatError:
            return None


def _name(digest: str) -> str:
    return f"{digest}.lease"
