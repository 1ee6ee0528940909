"""Files and folders of a store: names, opening, reading, locks, and what the operating system says no to.

Layout: ``FOLDER/<first two digits>/<digest>.pfxindex``; a file being written is ``.partial-<pid>-<random>`` beside its
final name, locked (flock) by its writer for as long as that lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import io
import os
import random
import shutil
import stat
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from .errors import (
    IndexForeign,
    IndexNotFound,
    IndexStoreError,
    IndexUnreadable,
    InvalidPayload,
    StoreFolderError,
    StoreFull,
)
from .format import ALIGN

SUFFIX: Final = ".pfxindex"
PARTIAL: Final = ".partial-"
FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
GONE: Final = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP))
"""What the system says of a folder that is not there, or is no folder, or a link. Anything else may pass."""
_HEX = "0123456789abcdef"
_NOATIME = getattr(os, "O_NOATIME", 0)
_EXCLUSIVE_WAIT_S: Final = 5.0

Fetch: TypeAlias = Callable[[memoryview, int], int]
"""(out, offset) -> bytes put into ``out``: all of them, or fewer where the container ends. Any thread may call it."""


class Signature(NamedTuple):
    """What tells one version of a file from the next without reading it."""

    inode: int
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Signature:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class Access(NamedTuple):
    """Who may use a store's folders, by default their owner alone: their ``mode``, their ``group``'s number."""

    mode: int = 0o700
    group: int | None = None

    @classmethod
    def of(cls, mode: int | str, group: str | int | None) -> Access:
        """Of a number, or of one in octal digits. Raises InvalidPayload for a mode or a group that is none."""
        try:
            bits = int(mode, 8) if isinstance(mode, str) else mode
        except ValueError:
            bits = 0
        if bits & 0o700 != 0o700 or bits & ~0o777:
            expected, found = "0700 to 0777, such as 0750", repr(mode) if isinstance(mode, str) else f"{mode:04o}"
            raise InvalidPayload("mode of the store's folder", expected, found, "correct it")
        try:
            number = grp.getgrnam(group).gr_gid if isinstance(group, str) else group
        except (KeyError, ValueError):  # ValueError: a NUL
            raise InvalidPayload("group of the store", "a group", repr(group), "name one of `getent group`") from None
        return cls(bits, number)

    @classmethod
    def found(cls, folder: Path) -> Access:
        """That of a folder; the default where none is. Raises StoreFolderError: the system does not say."""
        try:
            there = os.stat(folder)
        except ValueError:  # a NUL, so no path
            return cls()
        except OSError as err:
            if err.errno not in GONE:
                with os_errors(folder):
                    raise
            return cls()
        if not stat.S_ISDIR(there.st_mode):
            return cls()
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
    """Raises StoreFolderError unless the folder is there (``create``: made), readable, and writable (``write``)."""
    if create:
        with os_errors(folder), contextlib.suppress(FileExistsError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            access.make(folder)
    with os_errors(folder):
        is_folder, there = folder.is_dir(), folder.exists()
    if not is_folder:
        found = "something that is not a folder" if there else "nothing"
        remedy = "give another path" if there else "create it, or correct the path"
        raise StoreFolderError("index store", "an existing folder", found, remedy, folder)
    if not os.access(folder, os.R_OK | os.X_OK | (os.W_OK if write else 0)):
        remedy = "change its owner or mode, or give another folder"
        expected = "a writable folder" if write else "a readable folder"
        raise StoreFolderError("index store", expected, "no permission", remedy, folder)


def come_back(folder: Path) -> bool:
    """Makes an owner's folder again where it is gone; whether it was. Raises StoreFolderError, also where the folder's
    parent has become another user's, who could swap its files.
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
    check_folder(folder, create=True)
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


@contextlib.contextmanager
def os_errors(folder: Path) -> Iterator[None]:
    """Turns an OSError into StoreFull or StoreFolderError."""
    try:
        yield
    except OSError as err:
        found = err.strerror or str(err)
        error: IndexStoreError
        if err.errno in FULL:
            remedy = "free disk space or delete indexes"
            error = StoreFull("disk", "room for the index", found, remedy, folder)
        else:
            remedy = _remedy(err, "check that the folder exists and is writable")
            error = StoreFolderError("index store", "a usable folder", found, remedy, folder)
        raise error from err


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """The descriptor, which is closed in the end."""
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def kept_fd(fd: int) -> Iterator[int]:
    """The descriptor, which is closed where the block raises."""
    try:
        yield fd
    except BaseException:
        os.close(fd)
        raise


def folder_fd(folder: Path, flags: int = 0) -> contextlib.AbstractContextManager[int]:
    """A descriptor of a folder, closed in the end. Raises OSError."""
    return closing_fd(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags))


@contextlib.contextmanager
def shard_fd(folder: Path, shard: str, *, create: Access | None = None) -> Iterator[int]:
    """A descriptor of a shard folder (made, for ``create``, if missing), never through a link. Raises OSError."""
    path = folder / shard
    if create is not None:
        with contextlib.suppress(FileExistsError):
            create.make(path)
            with folder_fd(folder) as fd:
                os.fsync(fd)
    with folder_fd(path, os.O_NOFOLLOW) as fd:
        yield fd


def give_mode(fd: int, mode: int) -> None:
    """To a new file: for others than its owner the process's umask may have taken some of it away."""
    if mode & 0o077:
        with contextlib.suppress(OSError):
            os.fchmod(fd, mode)


def touch(fd: int, used: float) -> None:
    """Records when an index was last used (seconds) as its access time, if possible; its modification time stays.

    The kernel's own access times will not do: they follow mounts' options, and a scan of headers is no use.
    """
    with contextlib.suppress(OSError):
        os.utime(fd, ns=(max(int(used * 1e9), 0), os.fstat(fd).st_mtime_ns))


def open_fd(path: str | os.PathLike[str], *, dir_fd: int | None = None, follow: bool = True) -> int:
    """Opens a file, never blocking, and, where that is allowed, without making it look used.

    Raises IndexNotFound, IndexForeign for a link (not ``follow``), IndexUnreadable.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    with contextlib.suppress(OSError):  # not the owner, or a real error: the second call names it
        return os.open(path, flags | _NOATIME, dir_fd=dir_fd)
    try:
        return os.open(path, flags, dir_fd=dir_fd)
    except (FileNotFoundError, NotADirectoryError):
        remedy = "correct the path, build the index, or rescan the store"
        raise IndexNotFound("index", "a file", "none", remedy, path) from None
    except OSError as err:
        if err.errno != errno.ELOOP:
            raise unreadable(err).at(path) from err
        remedy = "replace the link by the file"
        raise IndexForeign("file type", "a file", "a symbolic link", remedy, path) from None


def open_regular(path: str | os.PathLike[str], flags: int, mode: int = 0, *, dir_fd: int | None = None) -> int:
    """Opens a file of ours, never blocking. Raises OSError: EINVAL for a pipe or device, ELOOP for a link."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with kept_fd(os.open(path, flags, mode, dir_fd=dir_fd)) as fd:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "expected a regular file", str(path))
    return fd


def path_in(folder: Path, digest: str) -> Path:
    """Where an index lies, or would lie."""
    return folder / shard_of(digest) / (digest + SUFFIX)


def open_named(folder: Path, digest: str) -> tuple[int, os.stat_result]:
    """Descriptor and status of an index's file, not through a link, without making it look used. Errors name the path.

    Only a name that is not there is IndexNotFound. What else the system refuses is IndexUnreadable: it says nothing
    about the index. Raises IndexForeign for a link.
    """
    path = path_in(folder, digest)
    try:
        with (
            shard_fd(folder, shard_of(digest)) as dir_fd,
            kept_fd(open_fd(path.name, dir_fd=dir_fd, follow=False)) as fd,
        ):
            return fd, status_of(fd)
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
        found = "a folder, pipe, socket or device"
        raise IndexForeign("file type", "a regular file", found, "move it elsewhere")
    return status.st_size


def owned_file(fd: int, mode: str) -> io.FileIO:
    """A file object that owns the descriptor, which is closed where none can be made. Raises OSError."""
    with kept_fd(fd):
        return io.FileIO(fd, mode, closefd=True)


def unreadable(err: OSError, what: str = "file") -> IndexUnreadable:
    remedy = _remedy(err, "check its permissions and the disk")
    return IndexUnreadable(what, "readable bytes", err.strerror or str(err), remedy)


def _remedy(err: OSError, usual: str) -> str:
    if err.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return "free memory or descriptors on this machine"
    return "remove the folder that has a file's name" if err.errno == errno.EISDIR else usual


def pread(fd: int, nbytes: int, offset: int) -> bytes:
    """``nbytes`` bytes at ``offset``, fewer only where the file ends. Raises IndexUnreadable."""
    out = bytearray(nbytes)
    return bytes(out[: read_full(fd, memoryview(out), max(offset, 0))])


def read_full(fd: int, out: memoryview, offset: int) -> int:
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


@contextlib.contextmanager
def bulk_reads(file_fd: int) -> Iterator[Fetch]:
    """Reads of a file; of what the page cache does not hold past it (O_DIRECT), where that is possible.

    Descriptors of its own: a close() by another thread must not let them be reused for another file. Raises
    IndexUnreadable.
    """
    with contextlib.ExitStack() as opened:
        try:
            fd = os.dup(file_fd)
        except OSError as err:
            raise unreadable(err) from err
        opened.callback(os.close, fd)
        direct_fd = open_direct(fd)
        if direct_fd is not None:
            opened.callback(os.close, direct_fd)
        yield _DirectReads(fd, direct_fd)


class _DirectReads:
    """What the page cache holds comes from there, the rest by ``direct_fd``."""

    def __init__(self, fd: int, direct_fd: int | None) -> None:
        self._fd, self._direct_fd = fd, direct_fd

    def __call__(self, out: memoryview, offset: int) -> int:
        direct_fd = self._direct_fd
        if direct_fd is None or self._is_cached(offset, len(out)):
            return read_full(self._fd, out, offset)
        done = 0
        while done < len(out) and done % ALIGN == 0:
            try:
                got = os.preadv(direct_fd, [out[done:]], offset + done)
            except OSError as err:
                if err.errno != errno.EINVAL:
                    raise unreadable(err, "O_DIRECT read") from err
                self._direct_fd = None  # this file system, or this disk's sectors: once is enough
                break
            if got == 0:
                return done
            done += got
        # What is left begins inside a sector: the file ends here, or it has refused.
        return done + read_full(self._fd, out[done:], offset + done)

    def _is_cached(self, offset: int, nbytes: int) -> bool:
        """Whether a page of the stretch is in the page cache: a random one, since asking makes the kernel fetch it."""
        page = offset + random.randrange(-(-nbytes // ALIGN)) * ALIGN
        try:
            return os.preadv(self._fd, [bytearray(1)], page, os.RWF_NOWAIT) == 1
        except OSError:  # not there, or a file system that cannot tell
            return False


def open_direct(fd: int) -> int | None:
    """A second descriptor of the same open file, for O_DIRECT. None where that is refused."""
    flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
    for more in (_NOATIME, 0):  # access times are the store's to set; not those of another user's file
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{fd}", flags | more)
    return None


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keeps others from changing names in the folder meanwhile (flock of the folder).

    After ``_EXCLUSIVE_WAIT_S``, or without locks, the block runs all the same. It then costs at most a cached index or
    a byte cap exceeded, never a wrong byte. Do not nest.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield  # what the block does in that folder says what is wrong with it
        return
    locked = _lock_soon(fd)
    try:
        yield
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


_own: Final[weakref.WeakSet[io.FileIO]] = weakref.WeakSet()


def close_in_children(file: io.FileIO) -> None:
    """For a file that is locked: the lock must end with this process, although a child that it forked lives on."""
    _own.add(file)


def _close_all() -> None:
    for file in tuple(_own):
        with contextlib.suppress(OSError):
            file.close()


os.register_at_fork(after_in_child=_close_all)


def try_lock(fd: int) -> bool:
    """Whether this process could lock the file; a file system without locks says no."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def locked_inodes(folder: Path) -> set[int]:
    """Of files on the folder's file system that some process has locked, by the kernel's list: to try the locks would
    disturb their holders. Of all file systems where the folder's is not told.
    """
    try:
        with folder_fd(folder) as fd:
            about = Path(f"/proc/self/fdinfo/{fd}").read_text().split()
        mounts = {line.split()[0]: line.split()[2] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
        fields = Path("/proc/locks").read_text().split()  # of device and inode; lines of those who wait have one more
    except OSError:
        return set()
    # Of the mount: what `stat` says of a file's device is another number on Btrfs.
    device = mounts.get(about[about.index("mnt_id:") + 1]) if "mnt_id:" in about else None
    start = "" if device is None else "{:02x}:{:02x}:".format(*map(int, device.split(":")))
    return {int(field.rpartition(":")[2]) for field in fields if field.count(":") == 2 and field.startswith(start)}


def free_bytes(folder: Path) -> int:
    """What the file system has left for this user. Raises OSError."""
    return shutil.disk_usage(folder).free


def stat_named(dir_fd: int, name: str) -> os.stat_result | None:
    """None where nothing has that name. Raises OSError where nobody can tell."""
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def is_named(fd: int, dir_fd: int, name: str) -> bool:
    """Whether ``name`` is still the file that is open as ``fd``."""
    there = stat_named(dir_fd, name)
    return there is not None and os.path.samestat(os.fstat(fd), there)


def is_old(status: os.stat_result, grace_s: float) -> bool:
    """Whether it was not changed within ``grace_s`` seconds; also where its time is to come: the clock was set back."""
    return abs(time.time() - status.st_mtime) >= grace_s


def remove_unlocked(dir_fd: int, *starts: str, grace_s: float) -> None:
    """Removes files whose names begin so and that nobody has locked: who made them died.

    A file touched within ``grace_s`` seconds is left alone: whoever made it may be about to lock it.
    """
    with os.scandir(dir_fd) as items:
        names = [item.name for item in items if item.name.startswith(starts)]
    for name in names:
        # NFS locks what can be written to.
        with contextlib.suppress(OSError), closing_fd(open_regular(name, os.O_RDWR, dir_fd=dir_fd)) as fd:
            if is_old(os.fstat(fd), grace_s) and try_lock(fd) and is_named(fd, dir_fd, name):
                os.unlink(name, dir_fd=dir_fd)
