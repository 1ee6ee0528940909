"""Reading one index: header first, arrays on demand, nothing believed before its checksum was compared.

A bulk read is cut into pieces: a run of neighbouring arrays, or a long one. Each thread fetches a piece and then checks
it while the other threads fetch theirs, so the disk does not wait for the checksums.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import IndexFormatError, IndexMismatch, IndexNotFound, IndexStoreError, StoreClosed, out_of_memory
from .folder import (
    Fetch,
    Signature,
    bulk_reads,
    open_fd,
    open_named,
    owned_file,
    path_in,
    pread,
    regular_size,
    status_of,
    unreadable,
)
from .format import (
    ALIGN,
    DTYPES,
    PRELUDE,
    ArrayKey,
    ArrayRecord,
    BuildInfo,
    Entry,
    IndexIdentity,
    Prelude,
    aligned,
    check_footer,
    corrupt,
    parse_entry,
    parse_prelude,
    parse_table,
    xxh3_hex,
)
from .writer import IndexPayload, LazyArray

PIECE_NBYTES: Final = 4 << 20
THREADS: Final = 8
_VERIFY_NBYTES: Final = 64 << 20
_READ_AHEAD_NBYTES: Final = 32 << 20
_OFFSET: Final = attrgetter("offset")
_ADDRESS: Final = attrgetter("name", "layer", "kv_head")

IndexLookup: TypeAlias = str | IndexIdentity
"""An identity, or its ``digest`` (64 hex digits)."""


class IndexFile:
    """One stored index, open for reading. Use as a context manager, or ``close()`` it.

    Opening reads the header only. ``read_many()`` copies arrays with several threads: all of an index, one layer, or
    one rank's heads; ``array()`` copies one. Files are never mapped, so whoever cuts one is an error and no SIGBUS.
    """

    def __init__(self, file: io.FileIO, *, path: str | None = None) -> None:
        """Of a file that this object owns from now on; ``path`` None: one in memory. Raises IndexFormatError."""
        self.path = path
        self.version: object = None
        """What the store that served it tells this version from others by."""
        self.tier = "disk"
        """Where the store that served it has its bytes: a folder on ``disk``, a copy in ``dram``, or ``remote``."""
        self._file = file
        self.nbytes = regular_size(file.fileno())
        prelude, entry = _read_head(file.fileno(), self.nbytes)
        raw = pread(file.fileno(), prelude.data_offset - prelude.table_offset, prelude.table_offset)
        if raw.count(0, prelude.table_nbytes) != len(raw) - prelude.table_nbytes:
            raise corrupt("padding after the header", "zeros", "other bytes")
        table = parse_table(raw[: prelude.table_nbytes], prelude)
        self.identity: IndexIdentity = entry.identity
        self.info: BuildInfo = entry.info
        self.spec: dict[str, Any] = table.spec
        self.stats: dict[str, Any] = table.stats
        self._data_offset = prelude.data_offset
        # Tens of thousands of rows: no property of each is asked.
        self._records = dict(zip(map(ArrayKey._make, map(_ADDRESS, table.arrays)), table.arrays, strict=True))

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, expected: IndexLookup | None = None) -> IndexFile:
        """Opens a file. Raises IndexNotFound, IndexUnreadable, IndexForeign, IndexTooNew, IndexCorrupt; and
        IndexMismatch where it is not the ``expected`` one. Every error names the path.
        """
        return cls.from_fd(open_fd(path), path=path, expected=expected)

    @classmethod
    def from_fd(cls, fd: int, *, path: str | os.PathLike[str], expected: IndexLookup | None = None) -> IndexFile:
        """As ``open``, on a descriptor, which this object owns from now on (and closes when it raises)."""
        with contextlib.ExitStack() as owned:
            owned.callback(os.close, fd)
            try:
                regular_size(fd)
                owned.pop_all()
                file = owned.enter_context(owned_file(fd, "rb"))
                index = cls(file, path=os.fspath(path))
                index.version = Signature.of(status_of(fd))
                if expected is not None:
                    check_identity(expected, index.identity)
            except IndexStoreError as err:
                raise err.at(path) from None
            except OSError as err:
                raise unreadable(err).at(path) from err
            owned.pop_all()
            return index

    @property
    def keys(self) -> tuple[ArrayKey, ...]:
        """Addresses of all arrays, in file order."""
        return tuple(self._records)

    def record(self, key: ArrayKey) -> ArrayRecord:
        """Dtype tag, shape and place of one array. Raises IndexNotFound."""
        try:
            return self._records[key]
        except KeyError:
            remedy = "the index was built by another method or profile: build it again"
            raise IndexNotFound("array", str(tuple(key)), "no such array", remedy, self.path) from None

    def array(self, name: str, layer: int = -1, kv_head: int = -1) -> NDArray[Any]:
        """A copy [shape] of one array, in the stored dtype of its tag (``format.DTYPES``). Raises as ``read_many``."""
        key = ArrayKey(name, layer, kv_head)
        return self.read_many([key])[key]

    def read_many(
        self,
        keys: Iterable[ArrayKey] | None = None,
        *,
        threads: int = THREADS,
    ) -> dict[ArrayKey, NDArray[Any]]:
        """Copies of arrays (None: all), read and checked by several threads.

        All lie in one buffer, each from a 4 KiB boundary. They are writable and the caller's own, in the order of
        ``keys``. Checksums and padding are compared while the next bytes arrive. ``threads``: at most this many at a
        time; a stretch of up to 4 MiB, or one array, is read in the calling thread.

        Raises IndexNotFound for an address that is not there, IndexCorrupt, also for a file that somebody cut,
        IndexUnreadable, StoreClosed, OutOfMemory.
        """
        wanted = self._records if keys is None else {key: self.record(key) for key in keys}
        pieces = pieces_of(wanted.values(), self._data_offset)
        nbytes = sum(piece.nbytes for piece in pieces)
        try:
            with bulk_reads(self.fileno()) as fetch:
                flat = fresh_buffer(nbytes)
                run(pieces, fetch, flat.data, threads=threads)
        except IndexStoreError as err:
            raise self._named(err) from err.__cause__
        except MemoryError as err:
            raise self._named(out_of_memory(err, f"{nbytes} bytes")) from None
        views = {
            record.key: np.ndarray(record.shape, DTYPES[record.dtype], flat[at : at + record.nbytes])
            for piece in pieces
            for record, at in piece.places()
        }
        return {key: views[key] for key in wanted}

    def read_nbytes(self, keys: Iterable[ArrayKey] | None = None) -> int:
        """Bytes of the buffer that ``read_many(keys)`` fills: a multiple of 4 KiB. Raises IndexNotFound."""
        wanted = self.keys if keys is None else dict.fromkeys(keys)
        return sum(aligned(self.record(key).nbytes) for key in wanted)

    def payload(self, check: Callable[[], object] = lambda: None) -> IndexPayload:
        """This index as something to put into another store while this file is open, checked while it is read, up to
        32 MiB at a time. ``check`` is called before each array, and may raise.
        """
        ahead = _ReadAhead(self, _READ_AHEAD_NBYTES)

        def load(key: ArrayKey) -> NDArray[Any]:
            check()
            return ahead.load(key)

        arrays = {key: LazyArray(r.dtype, r.shape, partial(load, key)) for key, r in self._records.items()}
        return IndexPayload(self.identity, arrays, spec=self.spec, stats=self.stats, info=self.info)

    def verify(self, *, threads: int = 1) -> None:
        """Checks every array and its padding, by bulk reads of 64 MiB or the longest array. Raises as ``read_many``."""
        ahead = _ReadAhead(self, _VERIFY_NBYTES, threads)
        for key in self._records:
            ahead.load(key)

    def close(self) -> None:
        """Closes the file. Arrays that were handed out stay valid."""
        self._file.close()

    def __enter__(self) -> IndexFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The descriptor. Raises StoreClosed."""
        try:
            return self._file.fileno()
        except ValueError:
            closed = StoreClosed("index file", "open", "closed", "get it from the store again")
            raise self._named(closed) from None

    def _named(self, err: IndexStoreError) -> IndexStoreError:
        return err if self.path is None else err.at(self.path)


class _ReadAhead:
    """An index's arrays in the order of the file, read by stretches of at most ``limit`` bytes. For one thread."""

    def __init__(self, index: IndexFile, limit: int, threads: int = THREADS) -> None:
        self._index, self._limit, self._threads = index, limit, threads
        self._order = index.keys
        self._place = {key: i for i, key in enumerate(self._order)}
        self._ready: dict[ArrayKey, NDArray[Any]] = {}

    def load(self, key: ArrayKey) -> NDArray[Any]:
        if key not in self._ready:
            keys, nbytes = [key], aligned(self._index.record(key).nbytes)
            for other in self._order[self._place[key] + 1 :]:
                nbytes += aligned(self._index.record(other).nbytes)
                if nbytes > self._limit:
                    break
                keys.append(other)
            self._ready = {}  # before the next stretch comes
            self._ready = self._index.read_many(keys, threads=self._threads)
        return self._ready.pop(key)


def open_in(folder: Path, digest: str, expected: IndexLookup | None = None) -> IndexFile:
    """Opens an index by its name, without making it look used. Raises as ``open_named`` and ``IndexStore.get``."""
    return IndexFile.from_fd(open_named(folder, digest)[0], path=path_in(folder, digest), expected=expected or digest)


def is_damaged(folder: Path, digest: str) -> bool:
    """Whether reading all of an index finds damage; what the system does not give is none."""
    try:
        with open_in(folder, digest) as index:
            index.verify()
    except (IndexFormatError, IndexMismatch):
        return True
    except IndexStoreError:
        pass
    return False


def check_identity(expected: IndexLookup, found: IndexIdentity) -> None:
    """Raises IndexMismatch that names the first field that differs, or the digests."""
    if isinstance(expected, str):
        if found.digest != expected:
            remedy = "delete the file: it was renamed or misplaced"
            raise IndexMismatch("identity digest", expected, found.digest, remedy)
    elif (difference := expected.mismatch(found)) is not None:
        what, _, values = difference.partition(": expected ")
        left, _, right = values.rpartition(", found ")
        raise IndexMismatch(what, left, right, "build an index for this model, prefix and profile")


def read_entry(fd: int) -> Entry:
    """The first header section of an open file: two small reads. Raises as ``IndexFile.open``."""
    return _read_head(fd, regular_size(fd))[1]


def _read_head(fd: int, nbytes: int) -> tuple[Prelude, Entry]:
    head = pread(fd, ALIGN, 0)
    prelude = parse_prelude(head[: PRELUDE.size], nbytes)
    if prelude.table_offset > len(head):
        head += pread(fd, prelude.table_offset - len(head), len(head))
    check_footer(pread(fd, ALIGN, nbytes - ALIGN), prelude)
    return prelude, parse_entry(head[PRELUDE.size : prelude.table_offset], prelude)


@dataclass
class Piece:
    """Neighbouring arrays: ``nbytes`` (whole pages) from ``offset`` of the container to ``at`` of the buffer."""

    offset: int
    at: int
    nbytes: int = 0
    records: list[ArrayRecord] = field(default_factory=list)

    def places(self) -> Iterator[tuple[ArrayRecord, int]]:
        """Each array, and how many bytes from the start of the buffer it goes."""
        at = self.at
        for record in self.records:
            yield record, at
            at += aligned(record.nbytes)


def pieces_of(records: Iterable[ArrayRecord], data_offset: int) -> list[Piece]:
    """The arrays in the order of the file, each from a 4 KiB boundary of the buffer, nothing between them."""
    pieces: list[Piece] = []
    at = 0
    for record in sorted(records, key=_OFFSET):
        size, offset = aligned(record.nbytes), data_offset + record.offset
        piece = pieces[-1] if pieces else Piece(-1, 0)
        if piece.offset + piece.nbytes != offset or piece.nbytes + size > PIECE_NBYTES:
            piece = Piece(offset, at)
            pieces.append(piece)
        piece.records.append(record)
        piece.nbytes += size
        at += size
    return pieces


def run(pieces: Iterable[Piece], fetch: Fetch, buffer: memoryview, *, threads: int) -> None:
    """Fetches and checks all. Raises the first error, IndexCorrupt or ``fetch``'s, once all threads rest."""
    stopped = threading.Event()

    def work(piece: Piece) -> None:
        if stopped.is_set():
            return
        try:
            got = fetch(buffer[piece.at : piece.at + piece.nbytes], piece.offset)
            if got != piece.nbytes:
                raise corrupt(f"bytes from {piece.offset} on", piece.nbytes, f"{got}: somebody cut the file")
            for record, at in piece.places():
                if record.nbytes:
                    check_array(record, buffer[at : at + aligned(record.nbytes)])
        except BaseException:
            stopped.set()
            raise

    pieces = [piece for piece in pieces if piece.nbytes]
    threads = min(threads, len(pieces))
    if threads <= 1:
        for piece in pieces:
            work(piece)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="index-read") as pool:
        try:
            try:
                asked = [pool.submit(work, piece) for piece in pieces]
            except RuntimeError as err:  # the system's limit of threads
                raise out_of_memory(err, f"{threads} threads to read with") from err
            for done in asked:
                done.result()
        finally:
            stopped.set()


def fresh_buffer(nbytes: int) -> NDArray[np.uint8]:
    """Page-aligned memory that nothing else uses, not zeroed. Raises MemoryError."""
    memory = np.empty(nbytes + ALIGN - 1, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + nbytes]


def check_array(record: ArrayRecord, raw: memoryview) -> None:
    """Raises IndexCorrupt where an array's bytes, or those behind them (its padding), are others than were written."""
    found, padding = xxh3_hex(raw[: record.nbytes]), bytes(raw[record.nbytes :])
    if found != record.xxh3:
        raise corrupt(f"checksum of {tuple(record.key)}", record.xxh3, found)
    if padding != bytes(len(padding)):
        raise corrupt(f"padding after {tuple(record.key)}", "zeros", "other bytes")
