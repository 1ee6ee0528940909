"""Connections of a client to the service: each call has one to itself, and each call ends in time."""

from __future__ import annotations

import threading
import time
from typing import Final, NamedTuple

import zmq

from ..errors import StoreClosed
from .endpoint import check_place, socket_path
from .messages import (
    ID_NBYTES,
    MAX_ANSWER_NBYTES,
    PROTOCOL,
    Answer,
    BadMessageError,
    Failed,
    Hello,
    HelloFirst,
    Ping,
    Request,
    Welcome,
    decode_answer,
    encode,
    error_of,
    unavailable,
)

_SLICE_S: Final = 0.25
"""While it waits, a call looks this often whether the service it asked still lives."""
_MAX_CONNECTIONS: Final = 16
_QUEUE: Final = 64


class _LostError(Exception):
    """The service went away or was restarted; what was asked will not be answered."""


class _Wait(NamedTuple):
    """How long a call may take: until ``deadline``, of which ``connect_s`` for finding a service at all."""

    timeout_s: float
    deadline: float
    connect_s: float
    closed: threading.Event


class Connection:
    """One DEALER socket. Used by one thread at a time."""

    def __init__(self, endpoint: str, hello: Hello) -> None:
        self._hello = hello
        self._path = socket_path(endpoint)
        self._next_id = 0
        self.greeted = False
        """Whether a service has taken this connection; one that has not is not kept."""
        self.welcome: Welcome | None = None
        """Of the service that this connection last said hello to."""
        self.late = 0
        """Answers that came after their call had given up."""
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
            (zmq.SNDHWM, _QUEUE),
            (zmq.RCVHWM, _QUEUE),
            (zmq.RCVTIMEO, int(_SLICE_S * 1000)),
        ):
            self._socket.setsockopt(option, value)
        self._socket.connect(endpoint)

    def call(self, request: Request, timeout_s: float, connect_s: float, closed: threading.Event) -> Answer:
        """The answer. Asks again where the service was restarted meanwhile: a request says twice what it says once.

        Raises StoreFolderError where somebody else could have swapped the socket, which libzmq may have connected to
        anew; StoreUnavailable after ``timeout_s`` seconds, after ``connect_s`` where no service listens; StoreClosed
        when ``closed`` is set. An error that the service's store raised is an answer: Failed.
        """
        wait = _Wait(timeout_s, time.monotonic() + timeout_s, connect_s, closed)
        while True:
            check_place(self._path)
            try:
                if not self.greeted:
                    self._greet(wait)
                return self._exchange(request, wait)
            except _LostError:
                self.greeted = False

    def tell(self, request: Request) -> None:
        """Sends a request whose answer nobody waits for, if that is possible at once."""
        if self.greeted:
            try:
                self._send(request)
            except _LostError:
                self.greeted = False

    def close(self) -> None:
        self._socket.close(linger=0)

    def _greet(self, wait: _Wait) -> None:
        answer = self._exchange(self._hello, wait)
        if isinstance(answer, Failed):
            raise error_of(answer.error)
        if not isinstance(answer, Welcome) or answer.version != PROTOCOL:
            raise unavailable(type(answer).__name__, expected=f"a service of protocol version {PROTOCOL}")
        self.welcome = answer
        self.greeted = True

    def _send(self, request: Request) -> bytes:
        self._next_id += 1
        number = self._next_id.to_bytes(ID_NBYTES, "little")
        try:
            self._socket.send(number + encode(request), zmq.NOBLOCK)
        except zmq.Again:
            raise _LostError from None
        return number

    def _exchange(self, request: Request, wait: _Wait) -> Answer:
        number = self._send_by(request, wait)
        ping = b""
        while True:
            left = wait.deadline - time.monotonic()
            if left < _SLICE_S and not self._socket.poll(max(int(left * 1000), 0)):
                raise unavailable(f"none within {wait.timeout_s:g} s")
            try:
                frame = self._socket.recv()
            except zmq.Again:
                if wait.closed.is_set():
                    raise closed_error() from None
                # Alive, and the same one? A service that was killed leaves no other trace in this socket.
                ping = self._send(Ping())
                continue
            answer = self._answer(frame[ID_NBYTES:])
            found = frame[:ID_NBYTES]
            if found == number:
                if isinstance(answer, HelloFirst):
                    raise _LostError
                return answer
            if found == ping and isinstance(answer, HelloFirst):
                raise _LostError
            self.late += found != ping

    def _send_by(self, request: Request, wait: _Wait) -> bytes:
        began = time.monotonic()
        deadline = min(wait.deadline, began + wait.connect_s)
        while True:
            try:
                return self._send(request)
            except _LostError:
                left = min(deadline - time.monotonic(), _SLICE_S)
                if wait.closed.is_set():
                    raise closed_error() from None
                if left <= 0:
                    raise unavailable(f"no service within {deadline - began:.2g} s", path=str(self._path)) from None
                self._socket.poll(max(int(left * 1000), 1), zmq.POLLOUT)

    def _answer(self, raw: bytes) -> Answer:
        try:
            return decode_answer(raw)
        except BadMessageError as err:
            raise unavailable(str(err), expected="a message of this protocol version") from None


class ConnectionPool:
    """As many connections as there are calls at a time, up to a bound; kept for the next ones."""

    def __init__(self, endpoint: str, hello: Hello) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._room = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._closed = threading.Event()

    def call(self, request: Request, timeout_s: float, connect_s: float) -> tuple[Answer, Welcome]:
        """The answer, and the service that gave it. Raises as ``Connection.call``."""
        if not self._room.acquire(timeout=timeout_s):
            raise unavailable(f"{_MAX_CONNECTIONS} calls that wait for theirs", expected="a free connection")
        connection: Connection | None = None
        try:
            connection = self._take()
            answer = connection.call(request, timeout_s, connect_s, self._closed)
            assert connection.welcome is not None
            return answer, connection.welcome
        finally:
            if connection is not None:
                self._put_back(connection)
            self._room.release()

    def tell(self, request: Request) -> None:
        """As ``Connection.tell``."""
        if self._room.acquire(blocking=False):
            connection = None
            try:
                connection = self._take()
                connection.tell(request)
            finally:
                if connection is not None:
                    self._put_back(connection)
                self._room.release()

    def close(self) -> None:
        """Ends idle connections now, those in use when their call ends: soon."""
        with self._lock:
            self._closed.set()
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self) -> Connection:
        with self._lock:
            if self._closed.is_set():
                raise closed_error()
            if self._idle:
                return self._idle.pop()
        return Connection(self._endpoint, self._hello)

    def _put_back(self, connection: Connection) -> None:
        with self._lock:
            if connection.greeted and not self._closed.is_set():
                self._idle.append(connection)
                return
        connection.close()


def closed_error() -> StoreClosed:
    return StoreClosed("service store", expected="open", found="closed", remedy="call open() first")
