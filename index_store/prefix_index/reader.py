"""Reading one index: header first, arrays on demand, nothing believed before its checksum was compared."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .direct import THREADS, ReadPlan, flat_buffer, fresh_buffer, run
from .errors import IndexForeign, IndexMismatch, IndexNotFound, IndexStoreError, StoreClosed, out_of_memory
from .format import (
    ALIGN,
    DTYPES,
    PRELUDE,
    ArrayKey,
    ArrayRecord,
    BuildInfo,
    Entry,
    Prelude,
    Table,
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
from .keys import IndexIdentity
from .source import BufferSource, FileSource, Source, owned_file, pread, regular_size, unreadable
from .writer import IndexPayload, LazyArray

_VERIFY_NBYTES: Final = 64 << 20
_READ_AHEAD_NBYTES: Final = 32 << 20

ReadAt = Callable[[int, int], bytes]
"""(offset, nbytes) -> that many bytes, fewer at the end."""


class IndexFile:
    """One stored index, open for reading. Use as a context manager, or ``close()`` it.

    Opening reads the header only. ``array()`` gives read-only views of a shared mapping and checks each
    array's checksum the first time; the views stay valid after ``close()``. ``read_into()`` copies into
    memory of the caller (a pinned staging buffer) without mapping the file, and ``read_many()`` does so for many
    arrays with several threads: the fastest way to all of an index, one layer, or one rank's heads.

    Stored files are never changed in place, only replaced and unlinked, which leaves open ones whole. Whoever
    truncates a file under a mapping kills its readers (SIGBUS), as with every mapped file; ``read_into`` and
    ``read_many`` report that as IndexCorrupt.
    """

    def __init__(self, source: Source, *, path: str | None = None) -> None:
        self.path = path
        self._source: Source | None = source
        self._verified: set[ArrayKey] = set()
        self.nbytes = source.nbytes
        prelude, entry = _read_head(source.read_at, source.nbytes)
        self.checksum = f"{prelude.prelude_xxh3:016x}"
        """xxh3-64 (16 hex digits) over length, header and so every array's checksum: equal for equal containers."""
        table = _read_table(source.read_at, prelude)
        self.identity: IndexIdentity = entry.identity
        self.info: BuildInfo = entry.info
        self.spec: dict[str, Any] = table.spec
        self.stats: dict[str, Any] = table.stats
        self._data_offset = prelude.data_offset
        self._records = records_by_key(table.arrays)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, expected: IndexIdentity | None = None) -> IndexFile:
        """Opens a file. Raises IndexNotFound, IndexUnreadable, IndexForeign, IndexTooNew, IndexCorrupt; and
        IndexMismatch where its identity is not the ``expected`` one. Every error names the path.
        """
        return cls.from_fd(open_fd(path), path=path, expected=expected)

    @classmethod
    def from_fd(cls, fd: int, *, path: str | os.PathLike[str], expected: IndexIdentity | None = None) -> IndexFile:
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

    def select(
        self, name: str | None = None, *, layers: Container[int] | None = None, kv_heads: Container[int] | None = None
    ) -> list[ArrayKey]:
        """Addresses that match, in file order, for instance one layer or one rank's KV heads. None is all."""
        return [
            k
            for k in self._records
            if (name is None or k.name == name)
            and (layers is None or k.layer in layers)
            and (kv_heads is None or k.kv_head in kv_heads)
        ]

    def record(self, key: ArrayKey) -> ArrayRecord:
        """Dtype tag, shape and place of one array. Raises IndexNotFound."""
        try:
            return self._records[key]
        except KeyError:
            remedy = "the index was built by another method or profile: build it again"
            raise self._named(IndexNotFound("array", str(tuple(key)), "no such array", remedy)) from None

    def array(self, name: str, layer: int = -1, kv_head: int = -1, *, verify: bool = True) -> NDArray[Any]:
        """A read-only view [shape] of one array in the stored dtype of its tag (``format.DTYPES``).

        With ``verify`` the first call per array compares its checksum and raises IndexCorrupt; without, the
        bytes are as found. Raises IndexNotFound for an address that is not there, StoreClosed after
        ``close()``.
        """
        record = self.record(ArrayKey(name, layer, kv_head))
        if verify:
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

    def load(self, keys: Iterable[ArrayKey], *, verify: bool = True) -> dict[ArrayKey, NDArray[Any]]:
        """``array()`` of each address, usually of a ``select()``."""
        return {key: self.array(*key, verify=verify) for key in keys}

    def read_into(self, key: ArrayKey, out: NDArray[Any], *, verify: bool = True) -> None:
        """Copies one array into ``out``: C-contiguous, writable, of as many bytes; any dtype and shape.

        The copy itself is checksummed. After IndexCorrupt, ``out`` holds garbage.
        """
        record = self.record(key)
        if out.nbytes != record.nbytes or not out.flags.c_contiguous or not out.flags.writeable:
            found = f"{out.nbytes} bytes, contiguous {out.flags.c_contiguous}, writable {out.flags.writeable}"
            raise invalid(
                f"buffer for {tuple(key)}", f"{record.nbytes} bytes, contiguous, writable", found, "resize it"
            )
        if not record.nbytes:
            return
        raw = out.reshape(-1).view(np.uint8)
        got = self._open().read_into(raw.data, self._data_offset + record.offset)
        if got != record.nbytes:
            raise self._named(corrupt(f"bytes of {tuple(key)}", record.nbytes, got))
        if verify:
            self._compare(record, raw)

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
        contiguous, writable, page-aligned for the best speed), else new memory that lives as long as an array
        that views it. The arrays are writable and the caller's own, in the order of ``keys``.

        ``direct``  None: O_DIRECT for what the page cache does not hold, where the file system has it; False:
                    never; True: always, or an error
        ``threads`` at most this many at a time; a stretch of up to 4 MiB is read in the calling thread

        Every array's checksum and padding are compared while the next bytes arrive (not with ``verify=False``).
        Raises IndexNotFound for an address that is not there, IndexCorrupt for other bytes than were written and
        for a file that somebody cut, IndexUnreadable for an I/O error and for a refused ``direct=True``,
        InvalidPayload for an ``out`` that cannot take the bytes, StoreClosed, OutOfMemory. After an error
        ``out`` holds garbage.
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
        starts = {record.offset: at for record, at in plan.places if record.nbytes}
        return {key: _shaped(flat, starts.get(record.offset, 0), record) for key, record in wanted.items()}

    def read_nbytes(self, keys: Iterable[ArrayKey] | None = None) -> int:
        """Bytes of the buffer that ``read_many(keys)`` fills: a multiple of 4 KiB. Raises IndexNotFound."""
        wanted = self.keys if keys is None else dict.fromkeys(keys)
        return sum(aligned(self.record(key).nbytes) for key in wanted)

    def payload(self) -> IndexPayload:
        """This index as something to put into another store, checked while it is read. Written again, it gives the
        same bytes. Use it while this file is open. A file is read, never mapped: a disk that fails is an error then;
        up to 32 MiB at a time, in the order of the file.
        """
        ahead = _ReadAhead(self)
        arrays = {key: LazyArray(r.dtype, r.shape, partial(ahead.load, key)) for key, r in self._records.items()}
        return IndexPayload(self.identity, arrays, spec=self.spec, stats=self.stats, info=self.info)

    def verify(self, *, threads: int = 1) -> None:
        """Checks every array and the padding behind it, by bulk reads: nothing is mapped, the page cache stays as it
        is. Holds up to 64 MiB, or the longest array. Raises as ``read_many``, for the first array that is wrong.
        """
        batch: list[ArrayKey] = []
        nbytes = 0
        for key, record in self._records.items():
            if key in self._verified:
                continue
            if batch and nbytes + record.nbytes > _VERIFY_NBYTES:
                self._verify_batch(batch, threads)
                batch, nbytes = [], 0
            batch.append(key)
            nbytes += aligned(record.nbytes)
        self._verify_batch(batch, threads)

    def _verify_batch(self, keys: list[ArrayKey], threads: int) -> None:
        self.read_many(keys, threads=threads)
        self._verified.update(keys)

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
            self._compare(record, raw[: record.nbytes])
            if raw[record.nbytes :].any():
                raise self._named(corrupt(f"padding after {tuple(record.key)}", "zeros", "other bytes"))
        self._verified.add(record.key)

    def _compare(self, record: ArrayRecord, raw: NDArray[np.uint8]) -> None:
        found = xxh3_hex(raw)
        if found != record.xxh3:
            raise self._named(corrupt(f"checksum of {tuple(record.key)}", record.xxh3, found))

    def _named(self, err: IndexStoreError) -> IndexStoreError:
        return err if self.path is None else err.at(self.path)


class _ReadAhead:
    """A payload's arrays, read when the first of a stretch is asked for. Used by one thread at a time."""

    def __init__(self, index: IndexFile) -> None:
        self._index = index
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
                if nbytes > _READ_AHEAD_NBYTES:
                    break
                keys.append(other)
            self._ready = {}  # before the next stretch comes
            self._ready = self._index.read_many(keys)
        return self._ready.pop(key)


def _shaped(flat: NDArray[np.uint8], at: int, record: ArrayRecord) -> NDArray[Any]:
    return np.ndarray(record.shape, DTYPES[record.dtype], flat[at : at + record.nbytes])


def check_identity(expected: IndexIdentity, found: IndexIdentity) -> None:
    """Raises IndexMismatch that names the first field that differs."""
    difference = expected.mismatch(found)
    if difference is not None:
        what, _, values = difference.partition(": expected ")
        left, _, right = values.rpartition(", found ")
        raise IndexMismatch(what, left, right, "build an index for this model, prefix and profile")


def open_fd(path: str | os.PathLike[str], *, dir_fd: int | None = None, follow: bool = True) -> int:
    """Opens a file for reading, never blocking on a pipe. Raises IndexNotFound, or IndexForeign for a
    symbolic link when not ``follow``, IndexUnreadable for what else the system refuses.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        return os.open(path, flags, dir_fd=dir_fd)
    except (FileNotFoundError, NotADirectoryError):
        remedy = "build the index, or rescan the store"
        raise IndexNotFound("index", "a file", "none", remedy, path) from None
    except OSError as err:
        if err.errno != errno.ELOOP:
            raise unreadable(err).at(path) from err
        remedy = "replace the link by the file"
        raise IndexForeign("file type", "a file", "a symbolic link", remedy, path) from None


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


def _read_table(read_at: ReadAt, prelude: Prelude) -> Table:
    raw = read_at(prelude.table_offset, prelude.data_offset - prelude.table_offset)
    if raw.count(0, prelude.table_nbytes) != len(raw) - prelude.table_nbytes:
        raise corrupt("padding after the header", "zeros", "other bytes")
    return parse_table(raw[: prelude.table_nbytes], prelude)
