"""The right to build an index while nobody else does: between processes by a locked file, within one by a table.

The lock (flock) of ``.lease-<digest>`` in the index's shard folder is the lease. The kernel frees it when its holder
dies, however it dies: no clock and no heartbeat is involved. The file itself says nothing; one that nobody has
locked is free for the taking, and ``remove_leases`` clears it away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
import weakref
from pathlib import Path
from typing import Final

from .errors import StoreFolderError
from .folder import Access, give_mode, os_errors, shard_fd, shard_of, try_lock
from .store import BuildLease

LEASE: Final = ".lease-"
_NO_LOCKS = frozenset((errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS))
_PLANTED = frozenset((errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EMLINK))
_RACES: Final = 100


class _Lease:
    """What both kinds share: a block, and an end when nobody refers to the object any more."""

    def __init__(self, digest: str) -> None:
        self.digest = digest

    def release(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> BuildLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.release()


class LocalLeases:
    """Leases among the threads of this process."""

    def __init__(self) -> None:
        self._held: dict[str, object] = {}

    def acquire(self, digest: str) -> BuildLease | None:
        """None while the lease is held. ``setdefault`` is the arbiter: it needs no lock, so that a lease may end
        anywhere, in a garbage collection too.
        """
        ticket = object()
        if self._held.setdefault(digest, ticket) is not ticket:
            return None
        return _LocalLease(digest, self._held, ticket)


class _LocalLease(_Lease):
    def __init__(self, digest: str, held: dict[str, object], ticket: object) -> None:
        super().__init__(digest)
        self._held, self._ticket = held, ticket

    def release(self) -> None:
        if self._held.get(self.digest) is self._ticket:
            del self._held[self.digest]


class FolderLeases:
    """Leases among all processes, and all stores of one process, that share a folder.

    Where the file system has no locks, they hold among the threads that use this object only.
    """

    def __init__(self, folder: Path, access: Access) -> None:
        self._folder = folder
        self._access = access
        self._local = LocalLeases()

    def acquire(self, digest: str) -> BuildLease | None:
        """None while somebody holds it. Raises StoreFolderError for a folder that cannot be written to, and for a
        link, pipe or folder by the lease's name.
        """
        name = LEASE + digest
        with os_errors(self._folder), shard_fd(self._folder, shard_of(digest), create=self._access) as dir_fd:
            for _ in range(_RACES):
                fd = self._open(dir_fd, name)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    ours = _is_named(fd, dir_fd, name)
                except OSError as err:
                    os.close(fd)
                    if isinstance(err, BlockingIOError):
                        return None
                    if err.errno in _NO_LOCKS:
                        return self._local.acquire(digest)
                    raise
                if ours:
                    return _FileLease(digest, self._folder, fd)
                # The last holder unlinked it between our open and our lock.
                os.close(fd)
        return None

    def _open(self, dir_fd: int, name: str) -> int:
        # O_RDWR never waits for a pipe's other end, and locks over NFS need it.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, self._access.file_mode, dir_fd=dir_fd)
        except OSError as err:
            if err.errno in _PLANTED:
                raise self._planted(name) from None
            raise
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise self._planted(name)
            give_mode(fd, self._access.file_mode)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _planted(self, name: str) -> StoreFolderError:
        path = self._folder / shard_of(name.removeprefix(LEASE)) / name
        return StoreFolderError("lease", "a regular file", "a link, pipe, socket or folder", "remove it", path)


class _FileLease(_Lease):
    """Owns the descriptor whose lock is the lease."""

    def __init__(self, digest: str, folder: Path, fd: int) -> None:
        super().__init__(digest)
        self._folder = folder
        self._fd = fd
        _held.add(self)

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        name = LEASE + self.digest
        try:
            with contextlib.suppress(OSError), shard_fd(self._folder, shard_of(self.digest)) as dir_fd:
                if _is_named(fd, dir_fd, name):
                    os.unlink(name, dir_fd=dir_fd)
        finally:
            self._let_go(fd, unlock=True)

    def forget(self) -> None:
        """In a forked child: the lease is the parent's, and must end with it although the child lives on."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._let_go(fd, unlock=False)

    def _let_go(self, fd: int, *, unlock: bool) -> None:
        with contextlib.suppress(OSError):
            if unlock:
                fcntl.flock(fd, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(fd)


_held: weakref.WeakSet[_FileLease] = weakref.WeakSet()


def _forget_all() -> None:
    for lease in tuple(_held):
        lease.forget()


os.register_at_fork(after_in_child=_forget_all)


def remove_leases(dir_fd: int, *, grace_s: float) -> int:
    """Removes lease files that nobody has locked. Returns how many.

    One touched within ``grace_s`` seconds is left alone: whoever made it may be about to lock it, and would be told
    that somebody else builds.
    """
    removed = 0
    with os.scandir(dir_fd) as items:
        names = [item.name for item in items if item.name.startswith(LEASE)]
    for name in names:
        with contextlib.suppress(OSError):
            fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
            try:
                status = os.fstat(fd)
                old = abs(time.time() - status.st_mtime) >= grace_s  # the clock may have been set back
                if stat.S_ISREG(status.st_mode) and old and try_lock(fd) and _is_named(fd, dir_fd, name):
                    os.unlink(name, dir_fd=dir_fd)
                    removed += 1
            finally:
                os.close(fd)
    return removed


def _is_named(fd: int, dir_fd: int, name: str) -> bool:
    """Whether ``name`` is still the file that is open as ``fd``."""
    ours = os.fstat(fd)
    try:
        there = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)
