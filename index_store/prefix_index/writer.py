"""Writing one index: a payload's arrays go out one at a time, and a file gets its name when it is whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from .folder import FULL, PARTIAL, LoadFailed, Signature, give_mode, owned_file, touch
from .format import (
    ALIGN,
    DTYPES,
    ArrayKey,
    ArrayRecord,
    BuildInfo,
    Entry,
    IndexIdentity,
    Table,
    aligned,
    encode_footer,
    encode_prelude,
    encode_sections,
    invalid,
    lay_out,
    xxh3_hex,
)

_WRITE_BACK_NBYTES: Final = 8 << 20
_SMALL_NBYTES: Final = 64 << 10


class SeekableWriter(Protocol):
    """What a container is written to: an unbuffered file, or a buffer. ``write`` may take less."""

    def seek(self, offset: int, /) -> object: ...
    def write(self, data: memoryview, /) -> int | None: ...


@dataclass(frozen=True)
class LazyArray:
    """An array that is made when it is written: of what fits in memory, only one at a time has to.

    ``dtype`` is a tag of ``format.DTYPES``; ``load()`` returns an array of ``shape`` in the tag's stored
    dtype.
    """

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], NDArray[Any]]


@dataclass(frozen=True)
class IndexPayload:
    """Everything of one index, to be stored. The arrays stay the caller's and are only read, during the put.

    ``arrays``  address -> numpy array, or LazyArray
    ``dtypes``  tags of those arrays whose numpy dtype does not say it: ``bfloat16`` (held in uint16),
    ``int4x2``,
                ``float8_*`` (held in uint8)
    ``spec``    the build spec, a JSON object; ``stats`` what the build measured, likewise
    """

    identity: IndexIdentity
    arrays: Mapping[ArrayKey, NDArray[Any] | LazyArray]
    dtypes: Mapping[ArrayKey, str] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)
    info: BuildInfo = field(default_factory=lambda: BuildInfo(created=time.time()))

    def records(self) -> list[ArrayRecord]:
        """The array table in its canonical order: layer, name, KV head; so one layer is one stretch of the
        file.

        Raises InvalidPayload for what the format cannot hold.
        """
        unknown = [tuple(key) for key in self.dtypes if key not in self.arrays]
        if unknown:
            raise invalid("dtypes", "keys of arrays only", unknown[0], "remove the tag or add the array")
        for key in self.arrays:
            _check_key(key)
        order = sorted(self.arrays, key=lambda k: (k.layer, k.name, k.kv_head))
        return lay_out((key, self._tag(key), self.arrays[key].shape) for key in order)

    def _tag(self, key: ArrayKey) -> str:
        array = self.arrays[key]
        if isinstance(array, LazyArray):
            return array.dtype
        return self.dtypes.get(key, array.dtype.name)


def _check_key(key: ArrayKey) -> None:
    ok = isinstance(key, ArrayKey) and isinstance(key.name, str)
    if not ok or type(key.layer) is not int or type(key.kv_head) is not int:
        raise invalid("array key", "ArrayKey(name: str, layer: int, kv_head: int)", repr(key), "build an ArrayKey")


class IndexWriter:
    """One container on its way out: ``begin(out)``, ``write()`` of each array in any order, ``finish()``.

    Owns nothing: the caller opens, syncs and closes ``out``. Until ``finish()`` returns, the bytes are no
    index. The constructor raises InvalidPayload for what the format cannot hold.
    """

    def __init__(
        self,
        *,
        identity: IndexIdentity,
        records: Sequence[ArrayRecord],
        spec: Mapping[str, Any],
        stats: Mapping[str, Any],
        info: BuildInfo,
    ) -> None:
        self._out: SeekableWriter | None = None
        self._write_back: _WriteBack | None = None
        self._entry = Entry(identity, info)
        self._table = Table(dict(spec), dict(stats), list(records))
        self._sums: dict[ArrayKey, str] = {}
        self._records = {r.key: r for r in records}
        raw_entry, raw_table = encode_sections(self._entry, self._table)
        self._header_nbytes = 64 + len(raw_entry) + len(raw_table)
        self._data_offset = aligned(self._header_nbytes)
        self.nbytes = self._data_offset + sum(aligned(r.nbytes) for r in records) + ALIGN
        """Length of the whole container, known before the first byte is written."""

    @classmethod
    def of(cls, payload: IndexPayload) -> IndexWriter:
        """A writer of the payload's table, spec and statistics."""
        return cls(
            identity=payload.identity,
            records=payload.records(),
            spec=payload.spec,
            stats=payload.stats,
            info=payload.info,
        )

    def begin(self, out: SeekableWriter) -> None:
        """Says where to: ``nbytes`` bytes from offset 0 of ``out``."""
        self._out = out
        self._write_back = _WriteBack(out.fileno()) if isinstance(out, io.FileIO) else None

    def write(self, key: ArrayKey, array: NDArray[Any]) -> None:
        """Writes one array and its padding. Raises InvalidPayload for what the table did not announce."""
        record = self._records.get(key)
        if record is None or key in self._sums:
            what = "an array of the table, once" if record is None else "one write"
            raise invalid(f"array {tuple(key)}", what, "another", "write each announced array once")
        stored = DTYPES[record.dtype]
        if array.shape != record.shape or array.dtype != stored:
            found = f"{array.dtype} {array.shape}"
            raise invalid(
                f"array {tuple(key)}", f"{stored} {record.shape} for {record.dtype}", found, "view or cast it"
            )
        raw = _bytes_of(array)
        self._sums[key] = xxh3_hex(raw)
        if record.nbytes:
            start = self._data_offset + record.offset
            padding = bytes(aligned(record.nbytes) - record.nbytes)
            if record.nbytes <= _SMALL_NBYTES:
                self._write_at(start, memoryview(bytes(raw) + padding))
            else:
                self._write_at(start, raw)
                self._write_at(start + record.nbytes, memoryview(padding))

    def finish(self) -> None:
        """Writes header and footer. Raises InvalidPayload while announced arrays are missing."""
        missing = [key for key in self._records if key not in self._sums]
        if missing:
            raise invalid("arrays", f"{len(self._records)} written", f"{tuple(missing[0])} missing", "write it first")
        rows = [msgspec.structs.replace(r, xxh3=self._sums[r.key]) for r in self._table.arrays]
        raw_entry, raw_table = encode_sections(self._entry, Table(self._table.spec, self._table.stats, rows))
        prelude = encode_prelude(raw_entry, raw_table, self.nbytes)
        header = (prelude + raw_entry + raw_table).ljust(self._data_offset, b"\0")
        self._write_at(0, memoryview(header))
        self._write_at(self.nbytes - ALIGN, memoryview(encode_footer(prelude, self.nbytes)))

    def write_all(
        self, payload: IndexPayload, *, load: Callable[[LazyArray], NDArray[Any]] = lambda array: array.load()
    ) -> None:
        """Writes every array of the payload that this writer is ``of``, then finishes. ``load`` makes the lazy ones."""
        for record in self._table.arrays:
            array = payload.arrays[record.key]
            self.write(record.key, load(array) if isinstance(array, LazyArray) else array)
        self.finish()

    def _write_at(self, offset: int, data: memoryview) -> None:
        if self._out is None:
            raise invalid("index writer", "begin(out) first", "no output", "call begin()")
        if not data:
            return
        self._out.seek(offset)
        while data:
            # Not more at a time than the disk should be told of: it works on this part during the next.
            done = self._out.write(data[:_WRITE_BACK_NBYTES])
            if not done:
                raise OSError(errno.EIO, "wrote nothing")
            data = data[done:]
            if self._write_back is not None:
                self._write_back.wrote(offset, done)
            offset += done


class _WriteBack:
    """Has the kernel begin to write what is in the page cache, so that fsync finds little left to do.

    POSIX_FADV_DONTNEED on pages that were just written starts their write-back; it drops none of them, since they
    are not clean yet. Measured for 512 MB on ext4: 2.3 GB/s with the fsync, 1.3 without this.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start = self._end = 0

    def wrote(self, offset: int, nbytes: int) -> None:
        if offset != self._end:
            self._start = offset
        self._end = offset + nbytes
        if self._end - self._start >= _WRITE_BACK_NBYTES:
            with contextlib.suppress(OSError):  # it is advice
                os.posix_fadvise(self._fd, self._start, self._end - self._start, os.POSIX_FADV_DONTNEED)
            self._start = self._end


def _bytes_of(array: NDArray[Any]) -> memoryview:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data


def write_index(out: SeekableWriter, payload: IndexPayload) -> int:
    """Writes the payload as one container from offset 0 of ``out``. Returns its length in bytes.

    Deterministic: equal payloads give equal bytes. Raises InvalidPayload before the first byte is written,
    and whatever ``out`` raises.
    """
    writer = IndexWriter.of(payload)
    writer.begin(out)
    writer.write_all(payload)
    return writer.nbytes


# ---- files ----


class PartialFile:
    """A container on its way into a shard folder, all or nothing: partial, fsync, rename, fsync of the folder.

    ``reserve()`` makes the file and takes its space, ``write()`` fills it, ``publish()`` gives it its name. As a
    context manager it leaves nothing behind that was not published.
    """

    def __init__(self, dir_fd: int, writer: IndexWriter, *, mode: int) -> None:
        self._dir_fd = dir_fd
        self._writer = writer
        self._mode = mode
        self._name = ""
        self._out: io.FileIO | None = None
        self._published = False

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._out is not None and not self._out.closed:  # as it is in a child that was forked meanwhile
            if not self._published:
                with contextlib.suppress(OSError):
                    os.unlink(self._name, dir_fd=self._dir_fd)
            self._out.close()

    def reserve(self) -> None:
        """Raises OSError where the disk has no room: before gigabytes are written."""
        self._name, fd = create_partial(self._dir_fd, mode=self._mode)
        try:
            self._out = owned_file(fd, "wb")
        except OSError:
            os.unlink(self._name, dir_fd=self._dir_fd)
            raise
        _being_written.add(self._out)
        try:
            # The space first, so that a full disk is noticed before gigabytes are written.
            os.posix_fallocate(self._out.fileno(), 0, self._writer.nbytes)
        except OSError as err:
            if err.errno in FULL:
                raise

    def write(self, payload: IndexPayload) -> None:
        """Raises OSError, and whatever the payload's lazy arrays raise (through ``os_errors``)."""
        assert self._out is not None, "reserve() first"
        self._writer.begin(self._out)
        self._writer.write_all(payload, load=_load)
        os.fsync(self._out.fileno())

    @property
    def is_published(self) -> bool:
        return self._published

    def publish(self, name: str, *, used: float) -> Signature:
        """Gives the file its name; it counts as used at ``used`` (seconds). The caller syncs the folder."""
        assert self._out is not None, "reserve() first"
        touch(self._out.fileno(), used)
        os.rename(self._name, name, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
        self._published = True
        return Signature.of(os.fstat(self._out.fileno()))


_being_written: weakref.WeakSet[io.FileIO] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: the lock is the parent's, and must end with it although the child lives on."""
    for out in tuple(_being_written):
        with contextlib.suppress(OSError):
            out.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def _load(array: LazyArray) -> NDArray[Any]:
    try:
        return array.load()
    except OSError as err:
        raise LoadFailed(err) from err


def replace_file(dir_fd: int, name: str, writer: IndexWriter, payload: IndexPayload, *, mode: int) -> Signature:
    """Writes a container and gives it its name, in one go. Raises as ``PartialFile``."""
    with PartialFile(dir_fd, writer, mode=mode) as partial:
        partial.reserve()
        partial.write(payload)
        signature = partial.publish(name, used=time.time())
    os.fsync(dir_fd)
    return signature


def create_partial(dir_fd: int, *, mode: int, access: int = os.O_WRONLY, lock: int = fcntl.LOCK_EX) -> tuple[str, int]:
    """(name, descriptor) of a new file that no reader looks at, locked by ``lock`` for as long as its writer lives.

    Once it is locked nobody clears it away; what was cleared away before that is made anew. Raises OSError.
    """
    flags = access | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        name = f"{PARTIAL}{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(name, flags, mode, dir_fd=dir_fd)
        give_mode(fd, mode)
        try:
            fcntl.flock(fd, lock | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return name, fd
        except BlockingIOError:
            pass  # somebody is about to clear it away
        except OSError:
            return name, fd  # no locks here, so nobody clears away either
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Writes all of it from where the file stands. Raises OSError."""
    left = memoryview(data)
    while left:
        done = os.write(fd, left)
        if not done:
            raise OSError(errno.EIO, "wrote nothing")
        left = left[done:]
