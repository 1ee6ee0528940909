"""Reading one index: header first, arrays on demand, nothing believed before its checksum was compared.

A bulk read is cut into pieces: a run of whole neighbouring arrays, or a part of one long array. Each thread fetches a
piece and then checks it while the other threads fetch theirs, so the disk does not wait for the checksums.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import IndexFormatError, IndexMismatch, IndexNotFound, IndexStoreError, StoreClosed, out_of_memory
from .folder import (
    BufferSource,
    Fetch,
    FileSource,
    Source,
    open_fd,
    open_named,
    owned_file,
    path_in,
    pread,
    regular_size,
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
    invalid,
    parse_entry,
    parse_prelude,
    parse_table,
    records_by_key,
    xxh3_hex,
)
from .writer import IndexPayload, LazyArray

PIECE_NBYTES: Final = 4 << 20
THREADS: Final = 8
_VERIFY_NBYTES: Final = 64 << 20
_READ_AHEAD_NBYTES: Final = 32 << 20
_OFFSET: Final = attrgetter("offset")

IndexLookup: TypeAlias = str | IndexIdentity
"""An identity, or its ``digest`` (64 hex digits)."""

ReadAt = Callable[[int, int], bytes]
"""(offset, nbytes) -> that many bytes, fewer at the end."""


class IndexFile:
    """One stored index, open for reading. Use as a context manager, or ``close()`` it.

    Opening reads the header only. ``array()`` gives read-only views of a shared mapping, which stay valid after
    ``close()``. ``read_many()`` copies arrays with several threads, without mapping the file: the fastest way to all of
    an index, one layer, or one rank's heads.

    Stored files are never changed in place, only replaced and unlinked. Whoever truncates a file under a mapping kills
    its readers (SIGBUS), as with every mapped file; ``read_many`` reports IndexCorrupt.
    """

    def __init__(self, source: Source, *, path: str | None = None) -> None:
        self.path = path
        self._source: Source | None = source
        self._verified: set[ArrayKey] = set()
        self.nbytes = source.nbytes
        prelude, entry = _read_head(source.read_at, source.nbytes)
        self.checksum = f"{prelude.prelude_xxh3:016x}"
        """xxh3-64 (16 hex digits) over length, header and so every array's checksum: equal for equal containers."""
        raw = source.read_at(prelude.table_offset, prelude.data_offset - prelude.table_offset)
        if raw.count(0, prelude.table_nbytes) != len(raw) - prelude.table_nbytes:
            raise corrupt("padding after the header", "zeros", "other bytes")
        table = parse_table(raw[: prelude.table_nbytes], prelude)
        self.identity: IndexIdentity = entry.identity
        self.info: BuildInfo = entry.info
        self.spec: dict[str, Any] = table.spec
        self.stats: dict[str, Any] = table.stats
        self._data_offset = prelude.data_offset
        self._records = records_by_key(table.arrays)

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
                index = cls(FileSource(file), path=os.fspath(path))
                if expected is not None:
                    check_identity(expected, index.identity)
            except IndexStoreError as err:
                raise err.at(path) from None
            except OSError as err:
                raise unreadable(err).at(path) from err
            owned.pop_all()
            return index

    @classmethod
    def from_buffer(cls, buffer: bytes | memoryview | mmap.mmap) -> IndexFile:
        """Opens a container that lies in memory. The buffer is kept alive, and must not change."""
        return cls(BufferSource(buffer))

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
        """A read-only view [shape] of one array in the stored dtype of its tag (``format.DTYPES``), checked the first
        time.

        Raises IndexNotFound for an address that is not there, IndexCorrupt, StoreClosed.
        """
        record = self.record(ArrayKey(name, layer, kv_head))
        self._verify(record)
        dtype = DTYPES[record.dtype]
        if not record.nbytes:
            view = np.empty(record.shape, dtype)
        else:
            start = self._data_offset + record.offset
            count = record.nbytes // dtype.itemsize
            view = np.frombuffer(self._open().mapping(), dtype, count, start).reshape(record.shape)
        view.flags.writeable = False
        return view

    def read_many(
        self,
        keys: Iterable[ArrayKey] | None = None,
        *,
        out: NDArray[Any] | None = None,
        threads: int = THREADS,
        direct: bool | None = None,
        verify: bool = True,
    ) -> dict[ArrayKey, NDArray[Any]]:
        """Copies of arrays (None: all), read and checked by several threads, without mapping the file.

        All lie in one buffer, each from a 4 KiB boundary: the caller's ``out`` (``read_nbytes()`` bytes or more,
        contiguous, writable, page-aligned for the best speed), else new memory. The arrays are writable and the
        caller's own, in the order of ``keys``. Checksums and padding are compared while the next bytes arrive, unless
        ``verify=False``.

        ``direct``  None: O_DIRECT for what the page cache does not hold, where possible; False: never; True: always
        ``threads`` at most this many at a time; a stretch of up to 4 MiB is read in the calling thread

        Raises IndexNotFound for an address that is not there, IndexCorrupt, also for a file that somebody cut,
        IndexUnreadable, InvalidPayload for an ``out`` that cannot take the bytes, StoreClosed, OutOfMemory. ``out``
        holds garbage then.
        """
        wanted = self._records if keys is None else {key: self.record(key) for key in keys}
        plan = ReadPlan.of(wanted.values(), self._data_offset)
        try:
            with self._open().bulk(direct) as fetch:
                flat = fresh_buffer(plan.nbytes) if out is None else flat_buffer(out, plan.nbytes, direct=direct)
                run(plan, fetch, flat.data, threads=threads, verify=verify)
        except IndexStoreError as err:
            raise self._named(err) from err.__cause__
        except MemoryError as err:
            raise self._named(out_of_memory(err, f"{plan.nbytes} bytes")) from None
        views = {
            record.key: np.ndarray(record.shape, DTYPES[record.dtype], flat[at : at + record.nbytes])
            for record, at in plan.places
        }
        return {key: views[key] for key in wanted}

    def read_nbytes(self, keys: Iterable[ArrayKey] | None = None) -> int:
        """Bytes of the buffer that ``read_many(keys)`` fills: a multiple of 4 KiB. Raises IndexNotFound."""
        wanted = self.keys if keys is None else dict.fromkeys(keys)
        return sum(aligned(self.record(key).nbytes) for key in wanted)

    def payload(self) -> IndexPayload:
        """This index as something to put into another store while this file is open, checked while it is read. A file
        is not mapped, so that a disk that fails is an error; up to 32 MiB are read at a time.
        """
        ahead = _ReadAhead(self, _READ_AHEAD_NBYTES)
        arrays = {key: LazyArray(r.dtype, r.shape, partial(ahead.load, key)) for key, r in self._records.items()}
        return IndexPayload(self.identity, arrays, spec=self.spec, stats=self.stats, info=self.info)

    def verify(self, *, threads: int = 1) -> None:
        """Checks every array and its padding, by bulk reads of 64 MiB or the longest array. Raises as ``read_many``."""
        ahead = _ReadAhead(self, _VERIFY_NBYTES, threads)
        for key in self._records:
            if key not in self._verified:
                ahead.load(key)
                self._verified.add(key)

    def close(self) -> None:
        """Closes the file. Arrays that were handed out stay valid."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def __enter__(self) -> IndexFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Source:
        if self._source is None:
            raise self._named(StoreClosed("index file", "open", "closed", "get it from the store again"))
        return self._source

    def _verify(self, record: ArrayRecord) -> None:
        if record.key in self._verified:
            return
        if record.nbytes:
            start = self._data_offset + record.offset
            raw = np.frombuffer(self._open().mapping(), np.uint8, aligned(record.nbytes), start)
            try:
                check_array(record, raw.data)
            except IndexStoreError as err:
                raise self._named(err) from None
        self._verified.add(record.key)

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
        if self._index.path is None:
            return self._index.array(*key)
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


def read_entry(fd: int) -> tuple[Entry, int]:
    """(first header section, file length) of an open file: two small reads. Raises as ``IndexFile.open``."""
    nbytes = regular_size(fd)
    return _read_head(lambda offset, n: pread(fd, n, offset), nbytes)[1], nbytes


def _read_head(read_at: ReadAt, nbytes: int) -> tuple[Prelude, Entry]:
    head = read_at(0, ALIGN)
    prelude = parse_prelude(head[: PRELUDE.size], nbytes)
    if prelude.table_offset > len(head):
        head += read_at(len(head), prelude.table_offset - len(head))
    check_footer(read_at(nbytes - ALIGN, ALIGN), prelude)
    return prelude, parse_entry(head[PRELUDE.size : prelude.table_offset], prelude)


# ---- bulk reads ----


class Placed(NamedTuple):
    """An array and where it goes: ``at`` bytes from the start of the buffer."""

    record: ArrayRecord
    at: int

    def check(self, buffer: memoryview) -> None:
        check_array(self.record, buffer[self.at : self.at + aligned(self.record.nbytes)])


class _LongArray:
    """An array whose parts arrive in any order, in several threads. Who brings the last part checks all of them."""

    def __init__(self, placed: Placed, parts: int) -> None:
        self._placed, self._missing = placed, parts
        self._lock = threading.Lock()

    def arrived(self, buffer: memoryview) -> None:
        with self._lock:
            self._missing -= 1
            is_last = self._missing == 0
        if is_last:
            self._placed.check(buffer)


@dataclass
class Piece:
    """``nbytes`` (a multiple of 4 KiB) from ``offset`` of the container to ``at`` of the buffer.

    It holds the arrays of ``whole``, or a part of the array of ``part_of``.
    """

    offset: int
    at: int
    nbytes: int
    whole: list[Placed] = field(default_factory=list)
    part_of: _LongArray | None = None

    def check(self, buffer: memoryview) -> None:
        for placed in self.whole:
            placed.check(buffer)
        if self.part_of is not None:
            self.part_of.arrived(buffer)


@dataclass(frozen=True)
class ReadPlan:
    """Pieces to fetch, where each array ends up, and how long the buffer must be (bytes, a multiple of 4 KiB)."""

    pieces: Sequence[Piece]
    places: Sequence[Placed]
    nbytes: int

    @classmethod
    def of(cls, records: Iterable[ArrayRecord], data_offset: int) -> ReadPlan:
        """The arrays in the order of the file, each from a 4 KiB boundary of the buffer, nothing between them."""
        pieces: list[Piece] = []
        places: list[Placed] = []
        at = 0
        last: Piece | None = None
        for record in sorted(records, key=_OFFSET):
            placed = Placed(record, at)
            places.append(placed)
            size, offset = -(-record.nbytes // ALIGN) * ALIGN, data_offset + record.offset
            if not size:
                continue
            if size > PIECE_NBYTES:
                array = _LongArray(placed, -(-size // PIECE_NBYTES))
                for begin in range(0, size, PIECE_NBYTES):
                    nbytes = min(PIECE_NBYTES, size - begin)
                    pieces.append(Piece(offset + begin, at + begin, nbytes, part_of=array))
            elif last is not None and last.offset + last.nbytes == offset and last.nbytes + size <= PIECE_NBYTES:
                last.nbytes += size
                last.whole.append(placed)
            else:
                last = Piece(offset, at, size, [placed])
                pieces.append(last)
            at += size
        return cls(pieces, places, at)


def run(plan: ReadPlan, fetch: Fetch, buffer: memoryview, *, threads: int, verify: bool) -> None:
    """Fetches all pieces. Raises the first error, IndexCorrupt or ``fetch``'s; no thread is at work any more then."""
    stopped = threading.Event()

    def work(piece: Piece) -> None:
        if stopped.is_set():
            return
        try:
            got = fetch(buffer[piece.at : piece.at + piece.nbytes], piece.offset)
            if got != piece.nbytes:
                raise corrupt(f"bytes from {piece.offset} on", piece.nbytes, f"{got}: somebody cut the file")
            if verify:
                piece.check(buffer)
        except BaseException:
            stopped.set()
            raise

    threads = min(threads, len(plan.pieces))
    if threads <= 1:
        for piece in plan.pieces:
            work(piece)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="index-read") as pool:
        try:
            for done in [pool.submit(work, piece) for piece in plan.pieces]:
                done.result()
        finally:
            stopped.set()


def fresh_buffer(nbytes: int) -> NDArray[np.uint8]:
    """Page-aligned memory that nothing else uses, not zeroed. Raises MemoryError."""
    memory = np.empty(nbytes + ALIGN - 1, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + nbytes]


def flat_buffer(out: NDArray[Any], nbytes: int, *, direct: bool | None) -> NDArray[np.uint8]:
    """The first ``nbytes`` bytes of a caller's array. Raises InvalidPayload for one that cannot take them."""
    good = out.nbytes >= nbytes and out.flags.c_contiguous and out.flags.writeable
    if not good or (direct and out.ctypes.data % ALIGN):
        wanted = f"{nbytes} bytes or more, contiguous, writable"
        found = f"{out.nbytes} bytes, contiguous {out.flags.c_contiguous}, writable {out.flags.writeable}"
        if direct:
            wanted, found = f"{wanted}, on a {ALIGN}-byte boundary", f"{found}, {out.ctypes.data % ALIGN} bytes off"
        raise invalid("buffer of a bulk read", wanted, found, "take read_nbytes() bytes of page-aligned memory")
    return out.reshape(-1).view(np.uint8)[:nbytes]


def check_array(record: ArrayRecord, raw: memoryview) -> None:
    """Raises IndexCorrupt where an array's bytes, or those behind them (its padding), are others than were written."""
    found, padding = xxh3_hex(raw[: record.nbytes]), bytes(raw[record.nbytes :])
    if found != record.xxh3:
        raise corrupt(f"checksum of {tuple(record.key)}", record.xxh3, found)
    if padding != bytes(len(padding)):
        raise corrupt(f"padding after {tuple(record.key)}", "zeros", "other bytes")
