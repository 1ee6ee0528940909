"""Where a service listens, a socket file of its owner's alone, one service per socket; and how many it lets in.

Each connection is a descriptor, and libzmq ends the process that has none left for one more: there is a bound below.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import InvalidPayload, StoreFolderError
from ..folder import kept_fd, pread, try_lock

SCHEME: Final = "ipc://"
_LONGEST_PATH: Final = 107
"""Of a Unix socket's address; a longer one cannot be bound."""
_OTHERS: Final = 512
"""Descriptors for what is no connection: files that are read and copied, libraries."""
_SPARE: Final = 64
"""Connections beyond the bound that stay open for as long as it takes to tell them."""
_WANTED: Final = 1 << 16


def socket_path(endpoint: str) -> Path:
    """The socket file of ``ipc:///FOLDER/NAME``. Raises InvalidPayload for anything else, TCP by name."""
    text = endpoint if isinstance(endpoint, str) else repr(endpoint)
    remedy = "give ipc:///FOLDER/NAME, FOLDER being the owner's alone"
    if text.split("://", 1)[0] in ("tcp", "udp", "ws", "wss", "pgm", "epgm", "vmci"):
        found = f"{text[:100]!r}, a network address: the service knows no authentication"
        raise InvalidPayload("service endpoint", "a Unix socket", found, remedy)
    path = text.removeprefix(SCHEME)
    if not text.startswith(SCHEME) or not path.startswith("/") or path.endswith("/") or not path.isprintable():
        raise InvalidPayload("service endpoint", "ipc:// and an absolute path", repr(text)[:200], remedy)
    if len(os.fsencode(path)) > _LONGEST_PATH:
        found = f"{len(os.fsencode(path))} bytes"
        remedy = "use a shorter folder, such as $XDG_RUNTIME_DIR"
        raise InvalidPayload("service endpoint", f"a path of at most {_LONGEST_PATH} bytes", found, remedy)
    return Path(path)


def check_place(path: Path) -> None:
    """Raises StoreFolderError where somebody else could answer in our name: who owns the socket, or may write to its
    folder; and where there cannot be a socket. One that is not there yet is fine.
    """
    folder = path.parent
    with _usable(folder), contextlib.suppress(FileNotFoundError):
        _check_owner("socket's folder", folder, folder.lstat().st_uid)  # a link's, if it is one
        status = folder.stat()
        _check_owner("socket's folder", folder, status.st_uid)
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o022:
            expected, found = f"one that only user {os.geteuid()} can write to", f"mode {mode:04o}"
            remedy = f"{_closing(folder, status)}give the socket of a service elsewhere"
            raise StoreFolderError("socket's folder", expected, found, remedy, folder)
        _check_owner("service socket", path, path.lstat().st_uid)


def _closing(folder: Path, status: os.stat_result) -> str:
    """The command that closes a folder to others; none for one of the machine, such as /tmp, or of another user."""
    machines = status.st_uid == 0 and len(folder.parts) <= 3
    return "" if machines or status.st_uid != os.geteuid() else f"chmod 700 {folder}, or "


def _check_owner(what: str, path: Path, owner: int) -> None:
    if owner not in (os.geteuid(), 0):
        expected, found = f"owner {os.geteuid()}", f"owner {owner}"
        raise StoreFolderError(what, expected, found, "give the socket of your own service", path)


class SocketPlace:
    """A service's hold on its socket file: the folder is private, the lock file beside it is ours.

    A socket file without a locked lock file is a dead service's and is replaced. The lock file itself stays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = -1

    def take(self) -> None:
        """Raises StoreFolderError: the folder is open to others, or a service listens there."""
        folder = self.path.parent
        with _usable(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            mode, mine = stat.S_IMODE(status.st_mode), os.geteuid()
            if status.st_uid != mine or mode & 0o077:
                found = f"mode {mode:04o} of user {status.st_uid}"
                remedy = f"{_closing(folder, status)}give another folder, such as {folder / 'sglang-ext'}"
                raise StoreFolderError("socket's folder", f"mode 0700 of user {mine}", found, remedy, folder)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(self.path.with_name(self.path.name + ".lock"), flags, 0o600)
        with kept_fd(fd):
            if not try_lock(fd):
                pid = pread(fd, 20, 0).decode(errors="replace").strip()
                remedy = "use that one, end it, or give another endpoint"
                raise StoreFolderError("service socket", "no running service", f"process {pid}", remedy, self.path)
            with _usable(folder):
                os.ftruncate(fd, 0)
                os.write(fd, f"{os.getpid()}\n".encode())
                self._remove_socket()
        self._lock_fd = fd

    def give_back(self) -> None:
        """Removes the socket file and frees the lock. Twice does nothing."""
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError, StoreFolderError):
                self._remove_socket()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _remove_socket(self) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            remedy = "move it elsewhere, or give another endpoint"
            raise StoreFolderError("service socket", "a socket or nothing", "another file", remedy, self.path)
        self.path.unlink()


@contextlib.contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """An OSError of the socket's folder as a StoreFolderError."""
    try:
        yield
    except OSError as err:
        found = err.strerror or str(err)
        raise StoreFolderError("socket's folder", "a usable folder", found, "give another endpoint", folder) from err


def raise_descriptor_limit() -> None:
    """Raises this process's soft limit of descriptors, as far as is of use and the hard one goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections(wanted: int) -> int:
    """As many as wanted, or as the limit of descriptors leaves room for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - min(_OTHERS, soft // 2) - _SPARE))


class Admission:
    """Counts the connections of a listening socket, by what libzmq tells of it. Used by the service's loop only."""

    def __init__(self, listening: zmq.Socket[bytes], wanted: int) -> None:
        self.most = most_connections(wanted)
        self._listening = listening
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        self.monitor: zmq.Socket[bytes] = listening.get_monitor_socket(events)
        """Readable when connections came or went: ``update()`` then."""
        self._open: set[int] = set()

    @property
    def count(self) -> int:
        return len(self._open)

    def update(self) -> int:
        """Takes in what happened; ends connections that are too many to be even told so. Returns how many."""
        ended = 0
        while True:
            try:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return ended
            fd = event["value"]
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._open.discard(fd)
                continue
            self._open.add(fd)
            if len(self._open) > self.most + _SPARE:
                _end(fd)
                ended += 1

    def close(self) -> None:
        self._listening.disable_monitor()
        self.monitor.close(linger=0)


def _end(fd: int) -> None:
    """Shuts a connection down, which libzmq then closes. Its number may be another file's by now, which is no socket:
    there are no others in this process but those of its clients.
    """
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=fd)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()
