"""Where a container's bytes come from: a file or memory, in small reads, as one mapping, or by a bulk read."""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from .errors import IndexForeign, IndexUnreadable
from .format import ALIGN, corrupt, invalid

Fetch: TypeAlias = Callable[[memoryview, int], int]
"""(out, offset) -> bytes put into ``out``: all of them, or fewer where the container ends. Any thread may call it."""


class Source:
    """Where a container's bytes come from."""

    nbytes: int

    def read_at(self, offset: int, nbytes: int) -> bytes:
        raise NotImplementedError

    def read_into(self, out: memoryview, offset: int) -> int:
        raise NotImplementedError

    def mapping(self) -> Any:
        """A read-only buffer over the whole container."""
        raise NotImplementedError

    def bulk(self, direct: bool | None) -> AbstractContextManager[Fetch]:
        """What a bulk read fetches through, valid in the context even when ``close()`` comes meanwhile."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class BufferSource(Source):
    """A container in memory. The buffer is kept alive."""

    def __init__(self, buffer: bytes | memoryview | mmap.mmap) -> None:
        self._view = memoryview(buffer).cast("B").toreadonly()
        self.nbytes = len(self._view)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return bytes(self._view[offset : offset + nbytes])

    def read_into(self, out: memoryview, offset: int) -> int:
        part = self._view[offset : offset + len(out)]
        out[: len(part)] = part
        return len(part)

    def mapping(self) -> memoryview:
        return self._view

    def bulk(self, direct: bool | None) -> AbstractContextManager[Fetch]:
        if direct:
            raise invalid("direct read", "a file", "an index in memory", "leave direct at None")
        return contextlib.nullcontext(self.read_into)

    def close(self) -> None:
        """Views that were handed out keep the buffer; there is nothing else to release."""


class FileSource(Source):
    """A container in a file, whose descriptor this object owns."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.nbytes = regular_size(file.fileno())
        self._mapping: mmap.mmap | None = None

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return pread(self._file.fileno(), nbytes, offset)

    def read_into(self, out: memoryview, offset: int) -> int:
        return _read_full(self._file.fileno(), out, offset)

    def mapping(self) -> mmap.mmap:
        if self._mapping is None:
            try:
                self._mapping = mmap.mmap(self._file.fileno(), self.nbytes, access=mmap.ACCESS_READ)
            except ValueError:
                found = regular_size(self._file.fileno())
                raise corrupt("file length", self.nbytes, f"{found}: somebody cut the file") from None
            except OSError as err:
                raise unreadable(err) from err
        return self._mapping

    @contextlib.contextmanager
    def bulk(self, direct: bool | None) -> Iterator[Fetch]:
        # Descriptors of its own: a close() by another thread must not let them be reused for another file.
        with contextlib.ExitStack() as opened:
            try:
                fd = os.dup(self._file.fileno())
            except OSError as err:
                raise unreadable(err) from err
            opened.callback(os.close, fd)
            direct_fd = None
            if direct is not False:
                try:
                    direct_fd = open_direct(fd)
                    opened.callback(os.close, direct_fd)
                except IndexUnreadable:
                    if direct:
                        raise
            yield _DirectReads(fd, direct_fd, must=direct is True)

    def close(self) -> None:
        """The mapping is not closed but dropped: it ends with the last array that views it."""
        self._file.close()
        self._mapping = None


class _DirectReads:
    """Bulk reads of one file: what the page cache holds comes from there, the rest past it (O_DIRECT).

    Without ``direct_fd`` all comes through the page cache; with ``must`` nothing does.
    """

    def __init__(self, fd: int, direct_fd: int | None, *, must: bool) -> None:
        self._fd, self._direct_fd, self._must = fd, direct_fd, must

    def __call__(self, out: memoryview, offset: int) -> int:
        direct_fd = self._direct_fd
        if direct_fd is None or (not self._must and self._is_cached(offset, len(out))):
            return _read_full(self._fd, out, offset)
        done = 0
        while done < len(out) and done % ALIGN == 0:
            try:
                got = os.preadv(direct_fd, [out[done:]], offset + done)
            except OSError as err:
                if err.errno != errno.EINVAL or self._must:
                    raise unreadable(err, "O_DIRECT read") from err
                self._direct_fd = None  # this file system, or this disk's sectors: once is enough
                break
            if got == 0:
                return done
            done += got
        # What is left begins inside a sector: the file ends here, or it has refused.
        return done + _read_full(self._fd, out[done:], offset + done)

    def _is_cached(self, offset: int, nbytes: int) -> bool:
        """Whether one page of the stretch is in the page cache. Which one is random, since asking for a page that
        is not there makes the kernel fetch it: the same page would be there the next time.
        """
        page = offset + random.randrange(-(-nbytes // ALIGN)) * ALIGN
        try:
            return os.preadv(self._fd, [bytearray(1)], page, os.RWF_NOWAIT) == 1
        except OSError:  # not there, or a file system that cannot tell
            return False


def open_direct(fd: int) -> int:
    """A second descriptor of the same open file, for O_DIRECT. Raises IndexUnreadable where that is refused."""
    flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
    try:
        try:
            return os.open(f"/proc/self/fd/{fd}", flags | os.O_NOATIME)  # access times are the store's to set
        except PermissionError:  # another user's file
            return os.open(f"/proc/self/fd/{fd}", flags)
    except OSError as err:
        found = f"{err.strerror or err}"
        remedy = "read without direct=True, or keep the store on another file system"
        raise IndexUnreadable("O_DIRECT", "a file system with direct reads", found, remedy) from (err)


def _read_full(fd: int, out: memoryview, offset: int) -> int:
    done = 0
    while done < len(out):
        try:
            got = os.preadv(fd, [out[done:]], offset + done)
        except OSError as err:
            raise unreadable(err) from err
        if got == 0:
            break
        done += got
    return done


def pread(fd: int, nbytes: int, offset: int) -> bytes:
    """``nbytes`` bytes at ``offset``, fewer only where the file ends. Raises IndexUnreadable."""
    out = bytearray(nbytes)
    return bytes(out[: _read_full(fd, memoryview(out), max(offset, 0))])


def status_of(fd: int) -> os.stat_result:
    """Of an open file. Raises IndexUnreadable."""
    try:
        return os.fstat(fd)
    except OSError as err:
        raise unreadable(err) from err


def regular_size(fd: int) -> int:
    """Length of a regular file. Raises IndexForeign for anything else, IndexUnreadable."""
    status = status_of(fd)
    if not stat.S_ISREG(status.st_mode):
        raise not_regular()
    return status.st_size


def owned_file(fd: int, mode: str) -> io.FileIO:
    """A file object that owns the descriptor, which is closed where none can be made. Raises OSError."""
    try:
        return io.FileIO(fd, mode, closefd=True)
    except BaseException:
        os.close(fd)
        raise


def not_regular() -> IndexForeign:
    return IndexForeign("file type", "a regular file", "a folder, pipe, socket or device", "move it elsewhere")


def unreadable(err: OSError, what: str = "file") -> IndexUnreadable:
    found = err.strerror or str(err)
    return IndexUnreadable(what, "readable bytes", found, "check its permissions and the disk")
