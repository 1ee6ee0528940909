"""A store's folder on disk: names, partial files, durable replacement, and what the operating system says no
to.

Layout: ``FOLDER/<first two digits>/<digest>.pfxindex``; a file being written is ``.partial-<pid>-<random>``
beside its final name, locked (flock) by its writer for as long as that lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from .errors import IndexStoreError, StoreFolderError, StoreFull
from .writer import IndexPayload, IndexWriter

SUFFIX: Final = ".pfxindex"
PARTIAL: Final = ".partial-"
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_HEX = "0123456789abcdef"


class Signature(NamedTuple):
    """What tells one version of a file from the next without reading it."""

    inode: int
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Signature:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


def shard_of(digest: str) -> str:
    return digest[:2]


def is_shard(name: str) -> bool:
    return len(name) == 2 and name[0] in _HEX and name[1] in _HEX


def check_folder(folder: Path, *, create: bool) -> None:
    """Raises StoreFolderError unless the folder is there (made, with ``create``) and can be written to."""
    if create:
        with os_errors(folder), contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True, exist_ok=True)
    if not folder.is_dir():
        found = "something that is not a folder" if folder.exists() else "nothing"
        remedy = "create it, or correct the path" if found == "nothing" else "give another path"
        raise StoreFolderError("index store", expected="an existing folder", found=found, remedy=remedy, path=folder)
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        remedy = "change its owner or mode, or give another folder"
        raise StoreFolderError(
            "index store", expected="a writable folder", found="no permission", remedy=remedy, path=folder
        )


@contextlib.contextmanager
def os_errors(folder: Path) -> Iterator[None]:
    """Turns an OSError of the file system into StoreFull or StoreFolderError."""
    try:
        yield
    except OSError as err:
        found = err.strerror or str(err)
        error: IndexStoreError
        if err.errno in _FULL:
            remedy = "free disk space or delete indexes"
            error = StoreFull("disk", expected="room for the index", found=found, remedy=remedy, path=folder)
        else:
            remedy = "check that the folder exists and is writable"
            error = StoreFolderError("index store", expected="a usable folder", found=found, remedy=remedy, path=folder)
        raise error from err


@contextlib.contextmanager
def shard_fd(folder: Path, shard: str, *, create: bool = False) -> Iterator[int]:
    """A descriptor of one shard folder, never through a symbolic link. Raises OSError."""
    path = folder / shard
    if create:
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            _fsync_folder(folder)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _fsync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(dir_fd: int, name: str, writer: IndexWriter, payload: IndexPayload, *, mode: int) -> Signature:
    """Writes a container and gives it its name, all or nothing: partial, fsync, rename, fsync of the folder.

    Raises OSError, and whatever the payload's lazy arrays raise; then no partial is left.
    """
    partial = f"{PARTIAL}{os.getpid()}-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with io.FileIO(os.open(partial, flags, mode, dir_fd=dir_fd), "wb") as out:
            _lock(out.fileno())
            _reserve(out.fileno(), writer.nbytes)
            writer.begin(out)
            writer.write_all(payload)
            os.fsync(out.fileno())
            os.rename(partial, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            signature = Signature.of(os.fstat(out.fileno()))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial, dir_fd=dir_fd)
        raise
    os.fsync(dir_fd)
    return signature


def _lock(fd: int) -> bool:
    """Whether this process could lock the file; a file system without locks says no."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _reserve(fd: int, nbytes: int) -> None:
    """Takes the space first, so that a full disk is noticed before gigabytes are written."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as err:
        if err.errno in _FULL:
            raise


def remove_partials(dir_fd: int, *, grace_s: float) -> int:
    """Removes what writers left that died. Returns how many.

    Alive is who holds the lock (process ids of another container mean nothing here); a file touched within
    ``grace_s`` seconds is left alone, since its writer may not have locked it yet.
    """
    removed = 0
    with os.scandir(dir_fd) as items:
        names = [item.name for item in items if item.name.startswith(PARTIAL)]
    for name in names:
        with contextlib.suppress(OSError):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
            try:
                if time.time() - os.fstat(fd).st_mtime >= grace_s and _lock(fd):
                    os.unlink(name, dir_fd=dir_fd)
                    removed += 1
            finally:
                os.close(fd)
    return removed
