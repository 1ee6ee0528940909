"""The client's side of a put: an index goes straight into the file that the service reserved in its folder.

No reader looks at that file before the service has checked it and given it its name. The writer holds a shared lock
on it (flock) until then, or until it dies: so the service knows whose partial files to leave alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ..folder import shard_fd, shard_of
from ..source import owned_file
from ..writer import IndexPayload, IndexWriter
from .folder import lock_shared

_FLAGS: Final = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class SweptError(Exception):
    """The reserved file is gone: the service took this writer for dead."""


@contextlib.contextmanager
def written_partial(folder: Path, digest: str, name: str, writer: IndexWriter, payload: IndexPayload) -> Iterator[int]:
    """Fills and syncs a reserved file; gives its inode. At the end of the block its lock is free.

    Raises SweptError, OSError, and whatever the payload's lazy arrays raise.
    """
    with shard_fd(folder, shard_of(digest)) as dir_fd:
        try:
            fd = os.open(name, _FLAGS, dir_fd=dir_fd)
        except FileNotFoundError:
            raise SweptError from None
    with owned_file(fd, "wb") as out:
        _being_written.add(out)
        lock_shared(fd)
        try:
            writer.begin(out)
            writer.write_all(payload)
            os.fsync(fd)
            yield os.fstat(fd).st_ino
        finally:
            if not out.closed:  # as it is in a child that was forked meanwhile
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)


_being_written: weakref.WeakSet[io.FileIO] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: the lock is the parent's, and must end with it although the child lives on."""
    for out in tuple(_being_written):
        with contextlib.suppress(OSError):
            out.close()


os.register_at_fork(after_in_child=_leave_to_parent)
