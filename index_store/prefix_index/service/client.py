"""The store of a service's folder: a ``FileStore`` that asks the service where, and tells it what is hot."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import zmq

from ..copies import Copies
from ..errors import IndexStoreError, printable
from ..file import FileStore
from ..store import Problem
from .endpoint import check_place, socket_path
from .messages import (
    ID_NBYTES,
    MAX_ANSWER_NBYTES,
    PROTOCOL,
    Answer,
    BadMessageError,
    Failed,
    GetStatus,
    Hello,
    Request,
    Status,
    Used,
    Welcome,
    decode_answer,
    encode,
    unavailable,
)

_Answer = TypeVar("_Answer", bound=Answer)


class StoreClient(FileStore):
    """The store kept by ``sglang-ext store serve`` at ``endpoint`` (ipc:///FOLDER/SOCKET).

    The service says once, in ``open()``, which folder that is, its limits, and where copies in DRAM are. From then on
    the client reads and writes the folder itself, as any ``FileStore``. The service makes the copies, evicts, and
    clears away what the dead left. ``timeout_s`` bounds each of its answers.
    """

    def __init__(self, endpoint: str, *, timeout_s: float = 2.0, name: str = "") -> None:
        socket_path(endpoint)
        super().__init__(Path())
        self.endpoint = endpoint
        self._timeout_s, self._name = timeout_s, name[:64]
        self._link: Link | None = None

    def open(self) -> None:
        """Raises StoreUnavailable, and StoreFolderError where another user could answer in the service's place."""
        if self._is_open:
            return
        link = Link(self.endpoint)
        try:
            welcome = link.ask(Hello(version=PROTOCOL, pid=os.getpid(), name=self._name), Welcome, self._timeout_s)
            copies = Copies(Path(welcome.memory), tell=self._tell) if welcome.memory is not None else None
            super().__init__(
                welcome.folder,
                write=False,  # where this process may only read, only what writes fails
                max_bytes=welcome.max_bytes,
                min_free_bytes=welcome.min_free_bytes,
                copies=copies,
            )
            self._link = link
            super().open()
        except BaseException:
            link.close()
            raise

    def close(self) -> None:
        super().close()
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def problems(self) -> Sequence[Problem]:
        """The folder's, and that nobody makes copies while no service is connected."""
        found, link = super().problems(), self._link
        if link is None or link.is_connected():
            return found
        error = unavailable("no service; what is in the folder is served", path=str(socket_path(self.endpoint)))
        return (*found, Problem(self.endpoint, error))

    def served(self, digest: str, *, copy: bool) -> None:
        super().served(digest, copy=copy)
        if self.copies is None:  # which tell of it themselves
            self._tell(digest, copy)

    def status(self) -> Status:
        """The service as it is now. Raises StoreUnavailable."""
        self._check_open()
        assert self._link is not None
        return self._link.ask(GetStatus(), Status, self._timeout_s)

    def _tell(self, digest: str, copy: bool | None) -> None:
        link = self._link
        if link is not None:
            link.tell(Used(digest=digest, copy=copy))


def service_status(endpoint: str, *, timeout_s: float = 2.0) -> Status:
    """A service as it is now; its folder is not looked at. Raises as ``StoreClient.open``."""
    link = Link(endpoint)
    try:
        return link.ask(GetStatus(), Status, timeout_s)
    finally:
        link.close()


class Link:
    """One connection to the service; libzmq makes it anew when the service comes back. Any thread may use it."""

    def __init__(self, endpoint: str) -> None:
        self._path = socket_path(endpoint)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._next_id = 0
        check_place(self._path)
        try:
            self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        except zmq.ZMQError as err:  # this process has no descriptors left
            raise unavailable(str(err), expected="a socket for a connection") from err
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),  # a message for a service that is away fails now, and is not sent much later
            (zmq.RECONNECT_IVL, 10),
            (zmq.RECONNECT_IVL_MAX, 100),
            (zmq.MAXMSGSIZE, MAX_ANSWER_NBYTES),
            (zmq.SNDHWM, 64),
            (zmq.RCVHWM, 64),
        ):
            self._socket.setsockopt(option, value)
        self._socket.connect(endpoint)

    def ask(self, request: Request, kind: type[_Answer], timeout_s: float) -> _Answer:
        """Raises StoreUnavailable after ``timeout_s`` seconds, StoreFolderError, and what the service says."""
        deadline = time.monotonic() + timeout_s
        check_place(self._path)
        if self._pid != os.getpid():
            raise unavailable(f"one of process {self._pid}", expected="a connection of this process")
        with self._lock:
            if not self._socket.poll(int(timeout_s * 1000), zmq.POLLOUT):
                raise unavailable(f"no service within {timeout_s:.2g} s", path=str(self._path))
            number = self._send(request)
            while True:
                left = max(int((deadline - time.monotonic()) * 1000), 0)
                if not self._socket.poll(left):
                    raise unavailable(f"none within {timeout_s:g} s", path=str(self._path))
                frame = self._socket.recv()
                if frame[:ID_NBYTES] == number:
                    break
        check_place(self._path)
        return _answer(frame[ID_NBYTES:], kind)

    def is_connected(self) -> bool:
        """Whether a service holds the other end, as far as can be told now."""
        if self._pid != os.getpid() or not self._lock.acquire(blocking=False):
            return True
        try:
            return bool(self._socket.poll(0, zmq.POLLOUT))
        finally:
            self._lock.release()

    def tell(self, request: Request) -> None:
        """Sends what nobody answers, if possible at once. A forked child, whose socket it is not, sends nothing."""
        if self._pid != os.getpid() or not self._lock.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(zmq.ZMQError, IndexStoreError):
                check_place(self._path)
                self._send(request)
        finally:
            self._lock.release()

    def close(self) -> None:
        if self._pid == os.getpid():
            with self._lock:
                self._socket.close(linger=0)

    def _send(self, request: Request) -> bytes:
        self._next_id += 1
        number = self._next_id.to_bytes(ID_NBYTES, "little")
        try:
            self._socket.send(number + encode(request), zmq.NOBLOCK)
        except zmq.Again:
            raise unavailable("no service", path=str(self._path)) from None
        return number


def _answer(raw: bytes, kind: type[_Answer]) -> _Answer:
    try:
        answer = decode_answer(raw)
    except BadMessageError as err:
        raise unavailable(str(err), expected=f"a message of protocol version {PROTOCOL}") from None
    if isinstance(answer, Failed):
        raise unavailable(printable(answer.found), expected=printable(answer.expected))
    if not isinstance(answer, kind) or (isinstance(answer, Welcome) and answer.version != PROTOCOL):
        raise unavailable(type(answer).__name__, expected=f"{kind.__name__} of protocol version {PROTOCOL}")
    return answer
