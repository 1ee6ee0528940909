"""The values of one remote store: their bytes and names, moving them with deadlines and checks, what a failure means.

``Calls`` is for a client library that may hang. A Mooncake client asks a dead machine for half a minute, and crashes
the process when it is called after its end, or inside a call when the process ends. So calls run on threads of their
own, whoever waits gives up, the client is closed when the last call has come back, and the process's end waits for that
(as it does for all threads of ``concurrent.futures``).

A value is a 64-byte header that says what it is, then its body. A container is cut into chunks, each one value under
``<folder>/<digest>.<generation>.<index>``. A manifest under ``<folder>/<digest>.manifest`` names the generation. It is
written last, only where none is, and removed first. A generation is new for every put: no chunk's name is ever written
twice.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias, TypeVar

import msgspec
import xxhash

from ..errors import IndexFormatError, IndexNotFound, StoreFull, StoreUnavailable, out_of_memory
from ..folder import owned_file
from ..format import ALIGN, MAX_NBYTES, Entry, corrupt, sealed, unsealed, xxh3_hex
from ..store import IndexEntry
from .blobs import BlobMissing, Blobs, BlobsError, BlobsFull, BlobsLocal, BlobTooLong

MAGIC: Final = b"\x89PFXVAL\n"
VERSION: Final = 1
MANIFEST: Final = 1
CHUNK: Final = 2
LEASE: Final = 3
KINDS: Final = {MANIFEST: "manifest", CHUNK: "chunk", LEASE: "lease"}
MAX_MANIFEST_NBYTES: Final = 4 << 20

# magic, version, kind, index, first half of the digest, generation, length of the body, its xxh3, xxh3 of the 56
# bytes before
HEADER: Final = struct.Struct("<8sHHI16sQQQQ")

_NAME = re.compile(r"([0-9a-f]{64})\.(?:(manifest)|(lease)|([0-9a-f]{16})\.([0-9]{6}))")
_T = TypeVar("_T")
_MAX_RUNNING: Final = 16
_PARALLEL: Final = 4
_Record = TypeVar("_Record", bound=msgspec.Struct)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What one index consists of. ``chunks`` are the xxh3 of the chunk bodies, 16 hex digits each.

    All chunks have ``chunk_nbytes`` bytes of the container but the last, which has the rest of ``nbytes``.
    """

    entry: Entry
    nbytes: int
    chunk_nbytes: int
    generation: str
    chunks: list[str]

    def __post_init__(self) -> None:
        for name in ("nbytes", "chunk_nbytes"):
            value = getattr(self, name)
            if not 0 < value <= MAX_NBYTES or value % ALIGN:
                raise ValueError(f"{name}: expected a multiple of {ALIGN}, at most {MAX_NBYTES}, found {value}")
        if len(self.chunks) != -(-self.nbytes // self.chunk_nbytes):
            raise ValueError(f"chunks: expected {-(-self.nbytes // self.chunk_nbytes)}, found {len(self.chunks)}")

    @property
    def listed(self) -> IndexEntry:
        return IndexEntry.of(self.entry, self.nbytes)

    def size_of(self, index: int) -> int:
        """Bytes of the container in one chunk; the value has 64 more."""
        return min(self.chunk_nbytes, self.nbytes - index * self.chunk_nbytes)


class LeaseRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who may build an index, until when (seconds since the Unix epoch, by the holder's clock)."""

    holder: str
    expires: float


Outcome: TypeAlias = Manifest | IndexNotFound | IndexFormatError
"""Of asking for a manifest."""
_MANIFESTS: Final = msgspec.json.Decoder(Manifest)
LEASES: Final = msgspec.json.Decoder(LeaseRecord)
"""Decodes the body of a lease."""


def new_generation(now: float) -> str:
    """16 hex digits: ``now``, seconds since the Unix epoch (for ``collect``), then 32 random bits."""
    return f"{int(now) & 0xFFFFFFFF:08x}{secrets.token_hex(4)}"


def generation_time(generation: str) -> int:
    """When its writer began, seconds since the Unix epoch."""
    return int(generation[:8], 16)


def value_header(kind: int, digest: str, generation: str, index: int, body: memoryview | bytes) -> bytes:
    """The 64 bytes before ``body``."""
    names = bytes.fromhex(digest[:32]), int(generation, 16)
    return sealed(HEADER.pack(MAGIC, VERSION, kind, index, *names, len(body), xxhash.xxh3_64_intdigest(body), 0))


def unpack_value(
    raw: bytes, kind: int, digest: str, *, generation: str | None = None, index: int = 0
) -> tuple[str, str, memoryview]:
    """(generation, xxh3, body) of a value. Raises IndexForeign, IndexTooNew, IndexCorrupt (or another index's)."""
    what, body = f"{KINDS[kind]} {index}" if kind == CHUNK else KINDS[kind], memoryview(raw)[HEADER.size :]
    *places, prefix, number, length, checksum = unsealed(raw[: HEADER.size], HEADER, MAGIC, VERSION, what)
    said = (*places, prefix.hex(), f"{number:016x}", length, f"{checksum:016x}")
    true = (kind, index, digest[:32], generation or f"{number:016x}", len(body), xxh3_hex(body))
    if said != true:
        raise corrupt(f"(kind, index, digest, generation, length, xxh3) of {what}", true, said)
    return f"{number:016x}", f"{checksum:016x}", body


def pack_record(kind: int, digest: str, generation: str, record: msgspec.Struct) -> bytes:
    """A manifest or lease as one value."""
    body = msgspec.json.encode(record)
    return value_header(kind, digest, generation, 0, body) + body


def unpack_record(kind: int, digest: str, raw: bytes, decoder: msgspec.json.Decoder[_Record]) -> tuple[str, _Record]:
    """The other way: (generation, record). Raises IndexFormatError for anything that is not exactly that."""
    generation, _, body = unpack_value(raw, kind, digest)
    try:
        return generation, decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as err:
        raise corrupt(KINDS[kind], f"the JSON of version {VERSION}", err) from err


def unpack_manifest(digest: str, raw: bytes) -> Manifest:
    """A manifest, its identity compared with the name it was found under. Raises IndexFormatError."""
    generation, manifest = unpack_record(MANIFEST, digest, raw, _MANIFESTS)
    found = manifest.entry.identity.digest, manifest.generation
    if found != (digest, generation):
        raise corrupt("identity digest and generation", (digest, generation), found)
    return manifest


@dataclass
class Found:
    """What a listing shows of one digest: the manifest's tag (None: no manifest), chunks by generation, a lease."""

    tag: str | None = None
    chunks: dict[str, set[int]] = field(default_factory=dict)
    leased: bool = False

    def is_whole(self, manifest: Manifest) -> bool:
        return self.chunks.get(manifest.generation, set()).issuperset(range(len(manifest.chunks)))


class Calls:
    """Runs calls with a deadline each. ``what`` names the store in messages; times are seconds.

    A call that overran goes on in its thread, which keeps alive what the call refers to. At most 16 can be under way.
    """

    def __init__(self, what: str, *, timeout_s: float) -> None:
        self.what, self.timeout_s = what, timeout_s
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0
        self._opening = threading.Lock()
        self._closing: threading.Thread | None = None

    def run_all(self, calls: Iterable[Callable[[], _T]]) -> list[_T]:
        """All results in order, four calls at a time, each with the whole ``timeout_s``.

        After an error no further call begins; those under way are waited for, then it is raised: a call's own, or
        StoreUnavailable for one that does not end in time.
        """
        waiting: deque[tuple[Future[_T], float]] = deque()
        results: list[_T] = []
        pending = iter(calls)
        try:
            while True:
                while len(waiting) < _PARALLEL and (call := next(pending, None)) is not None:
                    waiting.append((self._start(call), time.monotonic() + self.timeout_s))
                if not waiting:
                    return results
                results.append(self._result(*waiting.popleft()))
        except Exception:
            for under_way in waiting:
                with contextlib.suppress(Exception):
                    self._result(*under_way)
            raise

    def _result(self, future: Future[_T], deadline: float) -> _T:
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except NotInTime as err:
            if future.done() and future.exception() is err:
                raise  # the call's own
            future.cancel()
            raise self._unavailable(f"an answer within {self.timeout_s:g} s", "none") from None

    def close(self, last: Callable[[], None]) -> None:
        """Runs ``last``, which must not raise, once no call is inside. Returns in time, if need be before."""
        with self._opening:
            pool, self._pool = self._pool, None
            self._closing = threading.Thread(target=_close, args=(pool, last), name=f"{self.what} end", daemon=True)
            self._closing.start()
        self._closing.join(self.timeout_s)

    def check_idle(self) -> None:
        """Raises StoreUnavailable while an earlier ``close`` is not through."""
        if self._closing is not None and self._closing.is_alive():
            raise self._unavailable("a client that is open or closed", "one that is being closed")

    def _start(self, call: Callable[[], _T]) -> Future[_T]:
        with self._opening:
            self.check_idle()
            if self._pool is None or self._pid != os.getpid():  # a forked child has none of its parent's threads
                self._pid = os.getpid()
                self._pool = ThreadPoolExecutor(_MAX_RUNNING, thread_name_prefix=f"{self.what} call")
            try:
                return self._pool.submit(call)
            except RuntimeError as err:  # the system's limit of threads
                raise out_of_memory(err, "a thread for the request") from err

    def _unavailable(self, expected: str, found: str) -> StoreUnavailable:
        return StoreUnavailable(self.what, expected, found, "check the store and the network, and ask again later")


def _close(pool: ThreadPoolExecutor | None, last: Callable[[], None]) -> None:
    if pool is not None:
        pool.shutdown()
    last()


class Values:
    """The values below ``folder``. Methods raise StoreUnavailable, and OutOfMemory where nobody was asked."""

    def __init__(self, blobs: Blobs, calls: Calls, folder: str) -> None:
        self._blobs, self._calls, self._folder = blobs, calls, folder

    def ask(self, calls: Iterable[Callable[[], _T]]) -> list[_T]:
        """What the calls return, a few at a time. Raises StoreFull, BlobMissing, and what a call raises that asks."""
        what = self._blobs.name
        try:
            return self._calls.run_all(calls)
        except BlobMissing:
            raise
        except BlobsLocal as err:
            raise out_of_memory(err, "a request sent") from err
        except BlobsFull as err:
            remedy = "free room there, add machines, or raise its limit"
            raise StoreFull(what, "room for the index", str(err), remedy) from err
        except BlobsError as err:
            remedy = "check the store, the network and the permissions"
            raise StoreUnavailable(what, "the request done", str(err), remedy) from err

    def manifest(self, digest: str) -> Manifest:
        """Raises IndexNotFound, IndexFormatError."""
        return self.ask([partial(self._fetch_manifest, digest)])[0]

    def manifests(self, digests: Sequence[str]) -> dict[str, Outcome]:
        """Many at once, each with what became of it."""

        def fetch(digest: str) -> Outcome:
            try:
                return self._fetch_manifest(digest)
            except (IndexNotFound, IndexFormatError) as err:
                return err

        return dict(zip(digests, self.ask(partial(fetch, digest) for digest in digests), strict=True))

    def create_manifest(self, manifest: Manifest) -> bool:
        """From now on the index is there, unless another one is: returns whether it is this one. Where the store cannot
        arbitrate, the last of several writers wins. Raises StoreFull.
        """
        digest = manifest.entry.identity.digest
        name, raw = f"{digest}.manifest", pack_record(MANIFEST, digest, manifest.generation, manifest)
        created = self.create(name, raw)
        if created is None:
            self.write(name, raw)
        return created is not False

    def write(self, name: str, raw: bytes) -> None:
        self.ask([partial(self._blobs.write, self._at(name), memoryview(raw))])

    def create(self, name: str, raw: bytes) -> bool | None:
        """See ``Blobs.create``."""
        return self.ask([partial(self._blobs.create, self._at(name), memoryview(raw))])[0]

    def fetch(self, name: str) -> bytes | None:
        """A whole small value, None where there is none."""
        try:
            return self.ask([partial(self._blobs.fetch, self._at(name), MAX_MANIFEST_NBYTES)])[0]
        except BlobMissing:
            return None

    def remove(self, *names: str) -> None:
        self.ask(partial(self._blobs.delete, self._at(name)) for name in names)

    def remove_chunks(self, digest: str, generation: str, indexes: Iterable[int]) -> None:
        self.remove(*(_chunk_name(digest, generation, i) for i in indexes))

    def listing(self) -> dict[str, Found]:
        """What there is, by digest. Names that are none of ours count for nothing."""
        (names,) = self.ask([partial(self._blobs.names, self._folder)])
        there: dict[str, Found] = {}
        for name, tag in names.items():
            match = _NAME.fullmatch(name.removeprefix(self._folder + "/"))
            if match is None:
                continue
            digest, is_manifest, is_lease, generation, index = match.groups()
            found = there.setdefault(digest, Found())
            if is_manifest:
                found.tag = tag
            elif is_lease:
                found.leased = True
            else:
                found.chunks.setdefault(generation, set()).add(int(index))
        return there

    def upload(self, manifest: Manifest, container: memoryview) -> None:
        """Writes all chunks of a container. Raises StoreFull."""
        digest, generation = manifest.entry.identity.digest, manifest.generation

        def send(index: int) -> None:
            start = index * manifest.chunk_nbytes
            body = container[start : start + manifest.size_of(index)]
            value = b"".join((value_header(CHUNK, digest, generation, index, body), body))
            self._blobs.write(self._at(_chunk_name(digest, generation, index)), memoryview(value))

        self.ask(partial(send, i) for i in range(len(manifest.chunks)))

    def download(self, manifest: Manifest) -> io.FileIO:
        """The whole container in a file in memory, each chunk compared with its checksums; the caller closes it.

        Raises IndexNotFound, IndexFormatError. The file is not closed then: a call that overran may write to it still.
        """
        digest = manifest.entry.identity.digest
        try:
            file = owned_file(os.memfd_create("prefix_index"), "w+b")
        except OSError as err:
            raise out_of_memory(err, "a file in memory") from err

        def fetch(index: int) -> None:
            name, limit = _chunk_name(digest, manifest.generation, index), HEADER.size + manifest.size_of(index)
            try:
                raw = self._blobs.fetch(self._at(name), limit)
            except BlobMissing:
                found = f"chunk {index} gone (evicted, lost with its machine, or deleted)"
                raise not_found(digest, found, "build it again") from None
            except BlobTooLong as err:
                raise corrupt(f"length of chunk {index}", limit, err) from None
            _, checksum, body = unpack_value(raw, CHUNK, digest, generation=manifest.generation, index=index)
            expected = manifest.size_of(index), manifest.chunks[index]
            if (len(body), checksum) != expected:
                raise corrupt(f"(length, xxh3) of chunk {index}", expected, (len(body), checksum))
            at = index * manifest.chunk_nbytes
            try:
                while body:
                    done = os.pwrite(file.fileno(), body, at)
                    body, at = body[done:], at + done
            except OSError as err:
                raise out_of_memory(err, f"{manifest.nbytes} bytes") from err

        try:
            self.ask(partial(fetch, i) for i in range(len(manifest.chunks)))
        except BaseException:
            os.ftruncate(file.fileno(), 0)  # who holds the error holds the file
            raise
        return file

    def is_whole(self, manifest: Manifest) -> bool:
        """Whether all chunks are there and have their lengths; their bytes are not read."""
        digest, count = manifest.entry.identity.digest, len(manifest.chunks)
        names = (self._at(_chunk_name(digest, manifest.generation, i)) for i in range(count))
        try:
            sizes = self.ask(partial(self._blobs.size, name) for name in names)
        except BlobMissing:
            return False
        return sizes == [HEADER.size + manifest.size_of(i) for i in range(count)]

    def _at(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _fetch_manifest(self, digest: str) -> Manifest:
        try:
            raw = self._blobs.fetch(self._at(f"{digest}.manifest"), MAX_MANIFEST_NBYTES)
        except BlobMissing:
            raise not_found(digest, "none", "build it: a remote tier may lose what it held") from None
        except BlobTooLong as err:
            raise corrupt("manifest", f"at most {MAX_MANIFEST_NBYTES} bytes", err) from None
        return unpack_manifest(digest, raw)


def _chunk_name(digest: str, generation: str, index: int) -> str:
    return f"{digest}.{generation}.{index:06d}"


def not_found(digest: str, found: str, remedy: str) -> IndexNotFound:
    return IndexNotFound("index", digest, found, remedy)
