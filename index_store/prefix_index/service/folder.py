"""The folder that a service owns and its clients write into: it makes room and a file, checks what came, names it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import stat
import time
from typing import Final, NamedTuple

from ..books import renamed
from ..errors import IndexMismatch, IndexNotFound, IndexUnreadable, StoreFolderError
from ..file import FileStore
from ..folder import (
    SUFFIX,
    PartialFile,
    Signature,
    create_partial,
    exclusive,
    os_errors,
    shard_fd,
    shard_of,
    touch,
)
from ..format import Entry, corrupt
from ..reader import IndexFile
from ..retention import publish
from ..source import owned_file, status_of
from ..store import IndexEntry, Retention

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOT_HERE: Final = frozenset((errno.EOPNOTSUPP, errno.EINVAL))


class Reservation(NamedTuple):
    """Room for one index: a file of its size under a partial name. ``fd`` is the service's, and holds a shared lock
    on it; the writer takes one too, so that cleaners leave it alone while either lives.
    """

    digest: str
    name: str
    nbytes: int
    fd: int
    began: float


class ServedFolder(FileStore):
    """A ``FileStore`` whose indexes other processes write: ``reserve()``, they write, ``adopt()``.

    A reservation takes its bytes on the disk at once; so it counts against ``max_bytes`` for whoever uses the
    folder, this process or another.
    """

    @property
    def file_mode(self) -> int:
        return self._access.file_mode

    @property
    def max_bytes(self) -> int | None:
        return self._limits.max_bytes

    @property
    def evicts(self) -> bool:
        """Whether indexes may leave to make room."""
        return self._limits.any

    def see(self, digest: str, *, use: bool = False) -> Signature | None:
        """The version of an index's file that is there now, None for none; ``use`` counts as its use.

        Waits for nothing but the file system's cache: it takes no lock (a rescan holds that for seconds), so that of
        two uses at the same moment one may be written down.
        """
        try:
            fd = os.open(self._books.path_of(digest), _READ)
        except OSError:
            return None
        try:
            status = status_of(fd)
            if not stat.S_ISREG(status.st_mode):
                return None
            before = status.st_atime_ns / 1e9
            if use and (used := self._books.time_of_use(before)) != before:
                touch(fd, used)
            return Signature.of(status)
        except IndexUnreadable:
            return None
        finally:
            os.close(fd)

    def come_back(self) -> bool:
        """Makes the folder again where it is gone; whether it was. Raises StoreFolderError.

        Never where its own parent has become another user's, who could then swap its files.
        """
        with os_errors(self.folder):
            if self.folder.is_dir():
                return False
            parent = self.folder.absolute().parent
            os.makedirs(parent, mode=0o700, exist_ok=True)
            owner = parent.stat().st_uid
            if owner not in (os.geteuid(), 0):
                remedy = "give another folder, and start the service again"
                expected, found = f"one of user {os.geteuid()}", f"user {owner}'s"
                raise StoreFolderError("tier's parent", expected=expected, found=found, remedy=remedy, path=parent)
            try:
                self._access.make(self.folder)
            except FileExistsError:
                if not self.folder.is_dir():
                    raise
        return True

    def check_whole(self, digest: str) -> None:
        """Reads an index to its last byte, which is no use of it. Raises as ``get``, and as ``IndexFile.verify``."""
        self._check_open()
        path = self.path_of(digest)
        with IndexFile.from_fd(self._open_file(digest)[0], path=path) as index:
            if index.identity.digest != digest:
                raise renamed(digest, index.identity).at(path)
            index.verify()

    def reserve(self, digest: str, nbytes: int) -> Reservation:
        """Evicts for ``nbytes`` bytes and takes them. Raises StoreFull, StoreFolderError."""
        self._check_open()
        with (
            os_errors(self.folder),
            shard_fd(self.folder, shard_of(digest), create=self._access) as dir_fd,
            exclusive(self.folder),
        ):
            self._keeper.make_room(nbytes, digest)
            # Shared by the server and the writer: as long as one of them lives, the file stays.
            name, fd = create_partial(dir_fd, mode=self._access.file_mode, access=os.O_RDWR, lock=fcntl.LOCK_SH)
            try:
                try:
                    os.posix_fallocate(fd, 0, max(nbytes, 1))
                except OSError as err:
                    if err.errno not in _NOT_HERE:
                        raise
            except BaseException:
                os.close(fd)
                os.unlink(name, dir_fd=dir_fd)
                raise
        return Reservation(digest, name, nbytes, fd, time.monotonic())

    def adopt(self, digest: str, name: str, nbytes: int, inode: int, retention: Retention | None) -> IndexEntry:
        """Gives the partial file its name: the same file (``inode``), of that size, whole, of that identity.

        What was adopted before is adopted again, as long as nobody replaced it. Raises IndexNotFound where neither
        is there, IndexCorrupt, IndexTooNew, IndexForeign, IndexMismatch, IndexUnreadable, StoreFolderError.
        """
        self._check_open()
        with os_errors(self.folder), shard_fd(self.folder, shard_of(digest)) as dir_fd:
            try:
                fd = os.open(name, _READ, dir_fd=dir_fd)
            except FileNotFoundError:
                return self._adopted(digest, dir_fd, inode)
            with owned_file(fd, "rb") as part:
                entry = self._checked(part.fileno(), digest, name, nbytes, inode)
                os.fsync(part.fileno())
                received = _ReceivedFile(dir_fd, name, part)
                with self._lock:
                    used = self._books.time_of_use()
                with exclusive(self.folder):
                    signature, kept = publish(
                        dir_fd, digest, received, retention, mode=self._access.file_mode, now=self._clock(), used=used
                    )
            os.fsync(dir_fd)
        with self._lock:
            self._books.retained(digest, kept)
            return self._books.learn(digest, entry, signature)

    def abandon(self, reservation: Reservation) -> None:
        """Removes a partial file, if it is still there, and frees its lock."""
        with contextlib.suppress(OSError), shard_fd(self.folder, shard_of(reservation.digest)) as dir_fd:
            there = os.stat(reservation.name, dir_fd=dir_fd, follow_symlinks=False)
            if there.st_ino == os.fstat(reservation.fd).st_ino:
                os.unlink(reservation.name, dir_fd=dir_fd)
        os.close(reservation.fd)

    def _checked(self, fd: int, digest: str, name: str, nbytes: int, inode: int) -> Entry:
        path = self.folder / shard_of(digest) / name
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_ino != inode or status.st_uid != os.geteuid():
            remedy = "write to the file that was reserved"
            found = f"inode {status.st_ino} of user {status.st_uid}, mode {status.st_mode:o}"
            raise IndexMismatch(
                "partial file", expected=f"the writer's own, inode {inode}", found=found, remedy=remedy, path=path
            )
        if status.st_size != nbytes:
            raise corrupt("partial file's length", f"{nbytes} bytes", status.st_size).at(path)
        with IndexFile.from_fd(os.dup(fd), path=path) as index:
            if index.identity.digest != digest:
                remedy = "commit it under its own digest"
                found = index.identity.digest
                raise IndexMismatch("identity digest", expected=digest, found=found, remedy=remedy, path=path)
            return Entry(index.identity, index.info)

    def _adopted(self, digest: str, dir_fd: int, inode: int) -> IndexEntry:
        with contextlib.suppress(FileNotFoundError):
            if os.stat(digest + SUFFIX, dir_fd=dir_fd, follow_symlinks=False).st_ino == inode:
                with self._lock:
                    self._books.look_again(digest)
                    entry = self._books.catalog.held(digest)
                if entry is not None:
                    return entry
        remedy = "write it again"
        raise IndexNotFound("partial file", expected="the one that was reserved", found="none", remedy=remedy)


class _ReceivedFile(PartialFile):
    """A partial file that somebody else wrote; only ``publish`` is left to do."""

    def __init__(self, dir_fd: int, name: str, out: io.FileIO) -> None:
        self._dir_fd = dir_fd
        self._name = name
        self._out = out
        self._published = False


def lock_shared(fd: int) -> None:
    """Says that somebody who lives uses the file; a file system without locks says nothing."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def has_writer(fd: int) -> bool:
    """Whether anybody but this descriptor holds a lock on its file. Keeps this one's shared lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        lock_shared(fd)
    return False
