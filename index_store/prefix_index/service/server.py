"""The service's loop: one thread reads requests and sends answers and never waits for a disk or for a client."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from ..errors import IndexStoreError, StoreFolderError
from .admission import Admission
from .depot import Depot
from .endpoint import SocketPlace, socket_path
from .messages import (
    ID_NBYTES,
    MAX_REQUEST_NBYTES,
    PROTOCOL,
    Answer,
    BadMessageError,
    Changes,
    Done,
    Failed,
    GetStatus,
    Hello,
    HelloFirst,
    Locate,
    Located,
    Ping,
    Prefetch,
    Request,
    Status,
    Welcome,
    decode_request,
    encode,
    error_text,
    unavailable,
)

log = logging.getLogger("prefix_index.service")


class Limits(NamedTuple):
    """Bounds of the service's memory and of its patience. Times are seconds."""

    workers: int = 3
    jobs: int = 256
    """Requests that wait for a worker; further ones are told that the service is busy."""
    jobs_per_client: int = 32
    connections: int = 4096
    """Connections at a time, fewer where this process may not have as many descriptors; further ones are refused."""
    clients: int = 4096
    """Connections remembered, those last heard from; one that was forgotten says hello again."""
    forget_s: float = 900.0
    """Connections not heard from for so long are forgotten: most are of processes that are gone."""
    answers: int = 64
    """Answers that wait for a client to read them; further ones are dropped."""
    requests: int = 256
    """Requests of one connection that wait to be read; the sender waits after that."""
    burst: int = 64
    rescan_s: float = 2.0
    collect_s: float = 30.0
    stats_s: float = 600.0
    finish_s: float = 10.0


@dataclass
class _Client:
    name: str
    seen: float
    jobs: int = 0


class StoreServer:
    """Serves a depot at ``endpoint``. ``open()``, ``serve()`` until ``stop()``, ``close()``; it owns the depot.

    ``serve`` runs in one thread; ``stop`` may be called from any, and from a signal handler.
    """

    def __init__(self, depot: Depot, endpoint: str, limits: Limits | None = None) -> None:
        self.endpoint = endpoint
        self.counts: Counter[str] = Counter()
        self._depot = depot
        self._limits = limits or Limits()
        self._place = SocketPlace(socket_path(endpoint))
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()
        self._done: deque[tuple[bytes, bytes, Answer | None]] = deque()
        self._jobs = 0
        self._stopping = threading.Event()
        self._tending = threading.Lock()
        self._complaint = ""
        self._began = 0.0
        self._wake_out = self._wake_in = -1
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._admission: Admission | None = None
        self._executor = ThreadPoolExecutor(self._limits.workers, thread_name_prefix="store")

    def open(self) -> None:
        """Takes the socket's place, opens the store, listens. Raises StoreFolderError."""
        self._place.take()
        try:
            self._depot.open()
            self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._context = zmq.Context(1)
            self._socket = self._context.socket(zmq.ROUTER)
            for option, value in (
                (zmq.LINGER, 500),
                (zmq.ROUTER_MANDATORY, 1),  # a client that is gone, or reads nothing, is an error to count
                (zmq.MAXMSGSIZE, MAX_REQUEST_NBYTES),
                (zmq.SNDHWM, self._limits.answers),
                (zmq.RCVHWM, self._limits.requests),
            ):
                self._socket.setsockopt(option, value)
            self._admission = Admission(self._socket, self._limits.connections)
            old = os.umask(0o177)
            try:
                self._socket.bind(self.endpoint)
            except zmq.ZMQError as err:
                remedy = "give another endpoint"
                raise StoreFolderError(
                    "service socket",
                    expected="a place that can be bound",
                    found=str(err),
                    remedy=remedy,
                    path=self._place.path,
                ) from err
            finally:
                os.umask(old)
        except BaseException:
            self.close()
            raise
        self._began = time.monotonic()
        self._next_stats = self._began + self._limits.stats_s
        self._next_rescan = self._began + self._limits.rescan_s
        self._next_collect = self._began + self._limits.collect_s

    def serve(self) -> None:
        """Answers until ``stop()``; then what was begun is finished and answered."""
        assert self._admission is not None, "open() first"
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._admission.monitor, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        while not self._stopping.is_set():
            for source, _ in poller.poll(200):
                if source == self._wake_out:
                    self._drain()
                elif source is self._socket:
                    self._receive()
            self._count_connections()  # at each turn: those that are too many do not wait for those that ask much
            self._send_done()
            self._keep_house()
        poller.unregister(self._socket)
        deadline = time.monotonic() + self._limits.finish_s
        while self._jobs and time.monotonic() < deadline:
            poller.poll(50)
            self._drain()
            self._send_done()
        log.info("ends after %.0f s: %s", time.monotonic() - self._began, self._summary())

    def stop(self) -> None:
        self._stopping.set()
        self._wake()

    def close(self) -> None:
        """Removes the socket file, closes the store. Twice does nothing."""
        context, self._context = self._context, None
        if context is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            if self._admission is not None:
                self._admission.close()
            self._socket.close()
            context.term()
        if self._wake_in >= 0:
            fds, self._wake_in, self._wake_out = (self._wake_in, self._wake_out), -1, -1
            for fd in fds:
                os.close(fd)
        self._place.give_back()
        self._depot.close()

    def status(self) -> Status:
        """What `sglang-ext store status` shows."""
        now = time.monotonic()
        clients = [f"{c.name}, idle {now - c.seen:.0f} s" for c in list(self._clients.values())]
        counts = dict(self.counts)
        return self._depot.status(
            endpoint=self.endpoint, uptime_s=now - self._began, clients=clients[-1000:], counts=counts
        )

    # ---- in ----

    def _receive(self) -> None:
        for _ in range(self._limits.burst):
            try:
                client, frame = self._socket.recv(zmq.NOBLOCK), self._socket.recv(zmq.NOBLOCK)
                nframes = 1
                while self._socket.getsockopt(zmq.RCVMORE):
                    self._socket.recv(zmq.NOBLOCK)
                    nframes += 1
            except zmq.Again:
                return
            self.counts["requests"] += 1
            self._read(client, frame, nframes)

    def _read(self, client: bytes, frame: bytes, nframes: int) -> None:
        number = frame[:ID_NBYTES]
        if len(number) != ID_NBYTES:
            self.counts["bad_messages"] += 1  # nobody could tell what an answer answers
            return
        try:
            if nframes != 1:
                raise BadMessageError(f"{nframes} frames")
            request = decode_request(frame[ID_NBYTES:])
        except BadMessageError as err:
            self.counts["bad_messages"] += 1
            error = IndexStoreError(
                "service message",
                expected=f"one frame of an id and a message of protocol version {PROTOCOL}",
                found=str(err),
                remedy="use a client of the service's version",
            )
            self._send(client, number, Failed(error=error_text(error)))
            return
        try:
            self._take(client, number, request)
        except Exception as err:  # the loop outlives whatever a request can do
            self.counts["defects"] += 1
            log.exception("%s", type(request).__name__)
            self._send(client, number, Failed(error=error_text(err)))

    def _take(self, client: bytes, number: bytes, request: Request) -> None:
        if isinstance(request, Hello):
            self._send(client, number, self._welcome(client, request))
            return
        known = self._clients.get(client)
        if known is None:
            self._send(client, number, HelloFirst())
            return
        known.seen = time.monotonic()
        self._clients.move_to_end(client)
        if isinstance(request, Locate):
            tier = self._depot.locate_now(request.digest, request.skip, touch=request.touch)
            if tier is not None:
                self._send(client, number, Located(tier=tier))
                return
        elif isinstance(request, Changes):
            self._send(client, number, self._depot.log.since(request.epoch, request.since))
            return
        elif isinstance(request, Ping) and not request.work:
            self._send(client, number, Done())
            return
        elif isinstance(request, Prefetch):
            self._send(client, number, Done())
        self._start(client, known, number, request)

    def _count_connections(self) -> None:
        if self._admission is not None and (ended := self._admission.update()):
            self.counts["cut"] += ended

    def _welcome(self, client: bytes, hello: Hello) -> Answer:
        if hello.version != PROTOCOL:
            self.counts["bad_messages"] += 1
            error = unavailable(f"version {hello.version}", expected=f"protocol version {PROTOCOL}")
            return Failed(error=error_text(error))
        old = self._clients.get(client)
        self._count_connections()  # this one too: libzmq told of it before its first message
        if old is None and self._admission is not None and self._admission.is_full:
            self.counts["refused"] += 1
            most = f"at most {self._admission.most} connections (its own limit, or `ulimit -n` of its process)"
            return Failed(error=error_text(unavailable(f"{self._admission.count} of them", expected=most)))
        name = f"pid {hello.pid}" + (f" ({hello.name})" if hello.name else "")
        self._clients[client] = _Client(name, time.monotonic(), 0 if old is None else old.jobs)
        self._clients.move_to_end(client)
        while len(self._clients) > self._limits.clients:
            self._clients.popitem(last=False)  # the first is who was heard from least recently
        return Welcome(version=PROTOCOL, epoch=self._depot.log.epoch, folders=self._depot.folders)

    # ---- work ----

    def _start(self, client: bytes, known: _Client, number: bytes, request: Request) -> None:
        if self._jobs >= self._limits.jobs or known.jobs >= self._limits.jobs_per_client:
            self.counts["busy"] += 1
            found = f"{self._jobs} requests in work, {known.jobs} of them this client's"
            self._send(client, number, Failed(error=error_text(unavailable(found, expected="a free worker"))))
            return
        self._jobs += 1
        known.jobs += 1
        self._executor.submit(self._work, client, number, request)

    def _work(self, client: bytes, number: bytes, request: Request) -> None:
        answer: Answer | None
        try:
            answer = self.status() if isinstance(request, GetStatus) else self._depot.do(request)
        except IndexStoreError as err:
            answer = Failed(error=error_text(err))
        except Exception as err:
            self.counts["defects"] += 1
            log.exception("%s", type(request).__name__)
            answer = Failed(error=error_text(err))
        if isinstance(request, Prefetch):
            answer = None  # it has one already
        self._done.append((client, number, answer))
        self._wake()

    def _keep_house(self) -> None:
        now = time.monotonic()
        while self._clients and now - next(iter(self._clients.values())).seen > self._limits.forget_s:
            self._clients.popitem(last=False)
        if now >= self._next_stats:
            self._next_stats = now + self._limits.stats_s
            log.info("%s", self._summary())
        if now >= self._next_rescan and self._tending.acquire(blocking=False):
            self._next_rescan = now + self._limits.rescan_s
            collect = now >= self._next_collect
            if collect:
                self._next_collect = now + self._limits.collect_s
            self._executor.submit(self._tend, collect)

    def _tend(self, collect: bool) -> None:
        try:
            self._depot.tend(collect=collect)
            if self._complaint:
                log.info("the store is usable again")
            self._complaint = ""
        except IndexStoreError as err:
            if str(err) != self._complaint:
                log.warning("%s", err)
            self._complaint = str(err)
        except Exception:
            self.counts["defects"] += 1
            log.exception("rescan")
        finally:
            self._tending.release()

    # ---- out ----

    def _send_done(self) -> None:
        while self._done:
            client, number, answer = self._done.popleft()
            self._jobs -= 1
            known = self._clients.get(client)
            if known is not None:
                known.jobs = max(known.jobs - 1, 0)  # it may have been forgotten and have come back meanwhile
            if answer is not None:
                self._send(client, number, answer)

    def _send(self, client: bytes, number: bytes, answer: Answer) -> None:
        try:
            self._socket.send_multipart((client, number + encode(answer)), zmq.NOBLOCK)
        except zmq.Again:
            self.counts["dropped"] += 1  # it does not read; waiting for it would be everybody's loss
        except zmq.ZMQError as err:
            if err.errno != errno.EHOSTUNREACH:
                raise
            self.counts["gone"] += 1
            self._clients.pop(client, None)

    def _wake(self) -> None:
        if self._wake_in >= 0:
            with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
                os.write(self._wake_in, b"x")

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_out, 4096):
                pass

    def _summary(self) -> str:
        _, count, nbytes = self._depot.log.totals()
        counts = ", ".join(f"{n} {what}" for what, n in sorted(self.counts.items()))
        return f"{count} indexes of {nbytes / 1e6:.1f} MB, {len(self._clients)} connections; {counts or 'no requests'}"
