"""A system that refuses now and then: calls of ``os`` that fail, or do a part of what they were asked for.

The real calls are made on real files, but for the one that is refused. So errors come where a kernel may give them, in
each order, and what was done before them is there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
from collections.abc import Callable, Iterator
from typing import Any, Final

_OPENING: Final = ("open", "dup", "scandir")
_READING: Final = ("read", "pread", "preadv")
_LOOKING: Final = ("stat", "lstat", "fstat", "statvfs", "scandir", "open", "dup")
_CHANGING: Final = ("mkdir", "rename", "unlink", "fsync", "utime", "posix_fallocate", "flock", "write", "file.write")

KINDS: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "EMFILE": (errno.EMFILE, _OPENING),
    "EIO": (errno.EIO, (*_READING, *_LOOKING, *_CHANGING)),
    "ENOSPC": (errno.ENOSPC, ("mkdir", "rename", "fsync", "posix_fallocate", "write", "file.write", "open")),
    "short": (0, (*_READING, "write", "file.write")),
}
"""Error number (0: less is done than was asked for), and the calls that may end so."""


class Refusals:
    """What the system refuses: calls of ``kind`` from number ``first`` on, ``number`` of them."""

    def __init__(self, kind: str, first: int, number: int) -> None:
        self.error, self._names = KINDS[kind]
        self._first, self._number = first, number
        self.asked = 0
        """Calls that could have been refused."""
        self.refused = 0

    def refuses(self, name: str) -> bool:
        if name not in self._names:
            return False
        self.asked += 1
        if not self._first < self.asked <= self._first + self._number:
            return False
        self.refused += 1
        return True

    def call(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name == "open" and self.error == errno.ENOSPC and not args[1] & os.O_CREAT:
            return real(*args, **kwargs)
        if not self.refuses(name):
            return real(*args, **kwargs)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return _less(name, real, *args, **kwargs)


def _less(name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call for about half of the bytes, one at least."""
    match name:
        case "read" | "pread":
            fd, nbytes, *rest = args
            return real(fd, max(1, nbytes // 2), *rest, **kwargs)
        case "preadv":
            fd, (out,), *rest = args
            nbytes = len(out) // 2 // 4096 * 4096 or max(1, len(out) // 2)  # whole sectors, for O_DIRECT
            return real(fd, [memoryview(out)[:nbytes]], *rest, **kwargs)
    *before, data = args
    return real(*before, memoryview(data)[: max(1, len(data) // 2)])


@contextlib.contextmanager
def refusing(what: Refusals) -> Iterator[None]:
    """In the block the system refuses. For a process of one thread."""
    patched: list[tuple[Any, str, Any]] = []

    def patch(module: Any, name: str) -> None:
        real = getattr(module, name)
        patched.append((module, name, real))
        setattr(module, name, lambda *args, **kwargs: what.call(name, real, *args, **kwargs))

    class File(io.FileIO):
        def write(self, data: Any, /) -> int:
            return int(what.call("file.write", super().write, data))

    for name in dict.fromkeys((*_READING, *_LOOKING, *_CHANGING)):
        if name == "flock":
            patch(fcntl, name)
        elif name != "file.write":
            patch(os, name)
    patched.append((io, "FileIO", io.FileIO))
    io.FileIO = File  # type: ignore[misc]
    try:
        yield
    finally:
        for module, name, real in patched:
            setattr(module, name, real)
