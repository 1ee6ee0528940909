"""The right to build an index while nobody else does: between processes by a locked file, within one by a table.

The lock (flock) of ``.lease-<digest>`` in the index's shard folder is the lease. The kernel frees it when its holder
dies. The file itself says nothing; ``folder.remove_unlocked`` clears it away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
from functools import partial
from pathlib import Path
from typing import Final

from .errors import StoreFolderError
from .folder import (
    Access,
    close_in_children,
    give_mode,
    is_named,
    open_regular,
    os_errors,
    owned_file,
    path_in,
    shard_fd,
    shard_of,
)
from .store import BuildLease

LEASE: Final = ".lease-"
_NO_LOCKS = frozenset((errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS))
_PLANTED = frozenset((errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EMLINK))
_RACES: Final = 100


class LocalLeases:
    """Leases among the threads of this process."""

    def __init__(self) -> None:
        self._held: dict[str, object] = {}

    def acquire(self, digest: str) -> BuildLease | None:
        """None while it is held. ``setdefault`` arbitrates, without a lock: leases may end in a garbage collection."""
        ticket = object()
        if self._held.setdefault(digest, ticket) is not ticket:
            return None
        return BuildLease(digest, partial(self._end, digest, ticket))

    def _end(self, digest: str, ticket: object) -> None:
        if self._held.get(digest) is ticket:
            del self._held[digest]


class FolderLeases:
    """Leases among all users of a folder; where the file system has no locks, among those of this object."""

    def __init__(self, folder: Path, access: Access) -> None:
        self._folder = folder
        self._access = access
        self._local = LocalLeases()

    def acquire(self, digest: str) -> BuildLease | None:
        """None while somebody holds it. Raises StoreFolderError, also for a link or pipe by the lease's name."""
        name = LEASE + digest
        with os_errors(self._folder), shard_fd(self._folder, shard_of(digest), create=self._access) as dir_fd:
            for _ in range(_RACES):
                with contextlib.ExitStack() as owned:
                    file = owned.enter_context(owned_file(self._open(dir_fd, name), "r+b"))
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        return None
                    except OSError as err:
                        if err.errno in _NO_LOCKS:
                            return self._local.acquire(digest)
                        raise
                    # Otherwise the last holder unlinked it between our open and our lock.
                    if is_named(file.fileno(), dir_fd, name):
                        owned.pop_all()
                        close_in_children(file)
                        return BuildLease(digest, partial(_give_back, self._folder, digest, file))
        return None

    def _open(self, dir_fd: int, name: str) -> int:
        try:
            # O_RDWR never waits for a pipe's other end, and locks over NFS need it.
            fd = open_regular(name, os.O_RDWR | os.O_CREAT, self._access.file_mode, dir_fd=dir_fd)
        except OSError as err:
            if err.errno not in _PLANTED:
                raise
            path = path_in(self._folder, name.removeprefix(LEASE)).with_name(name)
            found = "a link, pipe, socket or folder"
            raise StoreFolderError("lease", "a regular file", found, "remove it", path) from None
        give_mode(fd, self._access.file_mode)
        return fd


def _give_back(folder: Path, digest: str, file: io.FileIO) -> None:
    """Ends the lease whose lock ``file`` has. In a forked child the file is closed, and the lease is the parent's."""
    if file.closed:
        return
    name = LEASE + digest
    with contextlib.suppress(OSError), file:
        with contextlib.suppress(OSError), shard_fd(folder, shard_of(digest)) as dir_fd:
            if is_named(file.fileno(), dir_fd, name):
                os.unlink(name, dir_fd=dir_fd)
        fcntl.flock(file, fcntl.LOCK_UN)  # a child that is being forked has the descriptor too
