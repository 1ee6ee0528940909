"""A store's folder on disk: names, partial files, durable replacement, and what the operating system says no
to.

Layout: ``FOLDER/<first two digits>/<digest>.pfxindex``; a file being written is ``.partial-<pid>-<random>``
beside its final name, locked (flock) by its writer for as long as that lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import io
import os
import secrets
import stat
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from .errors import (
    IndexForeign,
    IndexFormatError,
    IndexMismatch,
    IndexNotFound,
    IndexStoreError,
    InvalidPayload,
    StoreFolderError,
    StoreFull,
)
from .keys import IndexIdentity
from .reader import IndexFile, open_fd
from .source import owned_file, unreadable
from .writer import IndexPayload, IndexWriter, LazyArray

SUFFIX: Final = ".pfxindex"
PARTIAL: Final = ".partial-"
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
GONE: Final = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP))
"""What the system says of a folder that is not there, or is no folder, or a link. Anything else may pass."""
_HEX = "0123456789abcdef"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOATIME = getattr(os, "O_NOATIME", 0)
_READ_AHEAD: Final = 2 << 20
_EXCLUSIVE_WAIT_S: Final = 5.0


class Signature(NamedTuple):
    """What tells one version of a file from the next without reading it."""

    inode: int
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Signature:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class Access(NamedTuple):
    """Who may use a store's folders: their ``mode``, which its files have without the right to execute, and the number
    of their ``group``, which what is made in them inherits. By default they are the owner's alone.
    """

    mode: int = 0o700
    group: int | None = None

    @classmethod
    def of(cls, mode: int | str, group: str | int | None) -> Access:
        """Of a number, or of one in octal digits. Raises InvalidPayload for a mode that keeps the owner out, or is
        none, and for a group that is not there.
        """
        try:
            bits = int(mode, 8) if isinstance(mode, str) else mode
        except ValueError:
            bits = 0
        if bits & 0o700 != 0o700 or bits & ~0o777:
            expected, found = "0700 to 0777, such as 0750", repr(mode) if isinstance(mode, str) else f"{mode:04o}"
            raise InvalidPayload("mode of the store's folder", expected, found, "correct it")
        try:
            number = grp.getgrnam(group).gr_gid if isinstance(group, str) else group
        except KeyError:
            raise InvalidPayload("group of the store", "a group", repr(group), "name one of `getent group`") from None
        return cls(bits, number)

    @classmethod
    def found(cls, folder: Path) -> Access:
        """That of a folder that is there; the default where none is."""
        if not folder.is_dir():
            return cls()
        there = os.stat(folder)
        return cls(there.st_mode & 0o777 | 0o700, there.st_gid if there.st_mode & stat.S_ISGID else None)

    @property
    def file_mode(self) -> int:
        return self.mode & 0o666

    def make(self, folder: Path) -> None:
        """Makes one folder. Raises OSError, FileExistsError among them."""
        folder.mkdir(mode=0o700)
        if self.group is not None:
            os.chown(folder, -1, self.group)
        if self != PRIVATE:
            folder.chmod(self.mode | (0 if self.group is None else stat.S_ISGID))


PRIVATE: Final = Access()


def shard_of(digest: str) -> str:
    return digest[:2]


def is_shard(name: str) -> bool:
    return len(name) == 2 and name[0] in _HEX and name[1] in _HEX


def check_folder(folder: Path, *, create: bool, write: bool = True, access: Access = PRIVATE) -> None:
    """Raises StoreFolderError unless the folder is there (made, with ``create``) and can be read, and written to with
    ``write``.
    """
    if create:
        with os_errors(folder), contextlib.suppress(FileExistsError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            access.make(folder)
    with os_errors(folder):
        is_folder, there = folder.is_dir(), folder.exists()
    if not is_folder:
        found = "something that is not a folder" if there else "nothing"
        remedy = "create it, or correct the path" if found == "nothing" else "give another path"
        raise StoreFolderError("index store", "an existing folder", found, remedy, folder)
    if not os.access(folder, os.R_OK | os.X_OK | (os.W_OK if write else 0)):
        remedy = "change its owner or mode, or give another folder"
        expected = "a writable folder" if write else "a readable folder"
        raise StoreFolderError("index store", expected, "no permission", remedy, folder)


def come_back(folder: Path) -> bool:
    """Makes a folder of the owner's alone again where it is gone; whether it was. Raises StoreFolderError.

    Never where its own parent has become another user's, who could then swap its files.
    """
    with os_errors(folder):
        if folder.is_dir():
            return False
        parent = folder.absolute().parent
        os.makedirs(parent, mode=0o700, exist_ok=True)
        owner = parent.stat().st_uid
        if owner not in (os.geteuid(), 0):
            remedy = "give another folder, and start the service again"
            raise StoreFolderError("folder's parent", f"one of user {os.geteuid()}", f"user {owner}'s", remedy, parent)
        try:
            PRIVATE.make(folder)
        except FileExistsError:
            if not folder.is_dir():
                raise
    return True


def check_apart(folders: Iterable[Path]) -> None:
    """Raises StoreFolderError where two tiers would be one folder: a copy that is dropped would be the index itself."""
    seen: set[str] = set()
    for folder in folders:
        place = os.path.realpath(folder)
        if place in seen:
            found = f"{place} twice"
            raise StoreFolderError("tiers of a store", "different folders", found, "give each tier a folder of its own")
        seen.add(place)


class _LoadFailed(Exception):  # noqa: N818 (carries an error, is none)
    """An OSError that a payload's own array raised: it says nothing about the store's folder."""

    def __init__(self, error: OSError) -> None:
        self.error = error


@contextlib.contextmanager
def os_errors(folder: Path) -> Iterator[None]:
    """Turns an OSError of the file system into StoreFull or StoreFolderError; that of a payload's array stays."""
    try:
        yield
    except _LoadFailed as failed:
        raise failed.error from failed.error.__cause__
    except OSError as err:
        found = err.strerror or str(err)
        error: IndexStoreError
        if err.errno in _FULL:
            remedy = "free disk space or delete indexes"
            error = StoreFull("disk", "room for the index", found, remedy, folder)
        else:
            remedy = "check that the folder exists and is writable"
            error = StoreFolderError("index store", "a usable folder", found, remedy, folder)
        raise error from err


@contextlib.contextmanager
def shard_fd(folder: Path, shard: str, *, create: Access | None = None) -> Iterator[int]:
    """A descriptor of one shard folder (made, for ``create``, where it is missing), never through a symbolic link.
    Raises OSError.
    """
    path = folder / shard
    if create is not None:
        with contextlib.suppress(FileExistsError):
            create.make(path)
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
        _reserve(self._out.fileno(), self._writer.nbytes)

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
        raise _LoadFailed(err) from err


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


def give_mode(fd: int, mode: int) -> None:
    """To a new file: for others than its owner the process's umask may have taken some of it away."""
    if mode & 0o077:
        with contextlib.suppress(OSError):
            os.fchmod(fd, mode)


def write_all(fd: int, data: bytes) -> None:
    """Writes all of it from where the file stands. Raises OSError."""
    left = memoryview(data)
    while left:
        done = os.write(fd, left)
        if not done:
            raise OSError(errno.EIO, "wrote nothing")
        left = left[done:]


def touch(fd: int, used: float) -> None:
    """Records when an index was last used (seconds) as its access time; its modification time stays.

    The kernel's own access times will not do: they follow mounts' options, and a scan of headers is no use. Where
    the file is not ours, or its disk not writable, it keeps the time it has.
    """
    with contextlib.suppress(OSError):
        os.utime(fd, ns=(max(int(used * 1e9), 0), os.fstat(fd).st_mtime_ns))


def open_index(name: str, dir_fd: int) -> int:
    """Opens an index for reading, never through a link, never blocking, without making it look used.

    Raises as ``reader.open_fd``.
    """
    try:
        return os.open(name, _READ | _NOATIME, dir_fd=dir_fd)
    except OSError:
        return open_fd(name, dir_fd=dir_fd, follow=False)  # not the owner, or a real error: this one names it


def path_in(folder: Path, digest: str) -> Path:
    """Where an index lies, or would lie."""
    return folder / shard_of(digest) / (digest + SUFFIX)


def open_named(folder: Path, digest: str) -> int:
    """A descriptor of an index's file, never through a link, without making it look used. The error names the path.

    Only a name that is not there is IndexNotFound. What else the system says no to (no descriptors left, an I/O
    error) is IndexUnreadable: it says nothing about the index. Raises IndexForeign for a link.
    """
    path = path_in(folder, digest)
    try:
        with shard_fd(folder, shard_of(digest)) as dir_fd:
            return open_index(path.name, dir_fd)
    except IndexStoreError as err:
        raise err.at(path) from None
    except OSError as err:
        found = err.strerror or str(err)
        if err.errno not in GONE:
            raise unreadable(err, "folder of the index").at(path) from err
        if err.errno == errno.ELOOP:
            expected, found, remedy = "a folder", "a symbolic link", "replace the link by the folder"
            raise IndexForeign("folder of the index", expected, found, remedy, path) from None
        raise IndexNotFound("index", "a file", found, "build it", path) from None


def open_in(folder: Path, digest: str, expected: IndexIdentity | None) -> IndexFile:
    """Opens an index by its name, without making it look used. Raises as ``open_named`` and ``IndexStore.get``."""
    path = path_in(folder, digest)
    index = IndexFile.from_fd(open_named(folder, digest), path=path, expected=expected)
    if index.identity.digest != digest:
        index.close()
        raise renamed(digest, index.identity).at(path)
    return index


def renamed(digest: str, found: IndexIdentity) -> IndexMismatch:
    return IndexMismatch("identity digest", digest, found.digest, "delete the file: it was renamed or misplaced")


def is_damaged(folder: Path, digest: str) -> bool:
    """Whether reading all of an index finds damage; what the system does not give is none."""
    try:
        with open_in(folder, digest, None) as index:
            index.verify()
    except (IndexFormatError, IndexMismatch):
        return True
    except IndexStoreError:
        pass
    return False


def read_ahead(fd: int) -> Iterator[int]:
    """Asks the kernel for the whole file, a step (of which it gives the offset) at a time: of one large request it
    reads only the first few MiB.

    Waits where the disk's queue is full. Raises OSError.
    """
    for start in range(0, os.fstat(fd).st_size, _READ_AHEAD):
        os.posix_fadvise(fd, start, _READ_AHEAD, os.POSIX_FADV_WILLNEED)
        yield start


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[bool]:
    """Keeps other processes, and other threads, from changing names in the folder meanwhile (flock of the folder).

    Nothing hangs on it: after ``_EXCLUSIVE_WAIT_S``, or where the file system has no locks, the block runs without.
    It then costs at most a cached index or a byte cap exceeded, never a wrong byte. Gives whether it is locked. Do
    not nest.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield False  # what the block does in that folder says what is wrong with it
        return
    locked = _lock_soon(fd)
    try:
        yield locked
    finally:
        with contextlib.suppress(OSError):
            if locked:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
        os.close(fd)


def _lock_soon(fd: int) -> bool:
    until = time.monotonic() + _EXCLUSIVE_WAIT_S
    pause = 0.0002
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(pause)
            pause = min(pause * 2, 0.002)
        except OSError:
            return False


def free_bytes(folder: Path) -> int:
    """What the file system has left for this user. Raises OSError."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def try_lock(fd: int) -> bool:
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

    Alive is who holds the lock (process ids of another container mean nothing here). A file touched within
    ``grace_s`` seconds is left alone: a new writer then need not begin again (``create_partial``).
    """
    removed = 0
    with os.scandir(dir_fd) as items:
        names = [item.name for item in items if item.name.startswith(PARTIAL)]
    for name in names:
        with contextlib.suppress(OSError):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
            try:
                age_s = abs(time.time() - os.fstat(fd).st_mtime)  # of the future: the clock was set back
                if age_s >= grace_s and try_lock(fd):
                    os.unlink(name, dir_fd=dir_fd)
                    removed += 1
            finally:
                os.close(fd)
    return removed
