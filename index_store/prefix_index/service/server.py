"""The service's loop: one thread reads requests and sends answers, and never waits for a disk or for a client."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import zmq
from msgspec.structs import replace

from ..errors import IndexStoreError, StoreFolderError, printable
from ..file import FileStore
from ..folder import check_apart, come_back, is_shard, locked_inodes
from ..lease import LEASE
from ..removals import removals_behind
from .endpoint import Admission, SocketPlace, socket_path
from .messages import (
    ID_NBYTES,
    MAX_REQUEST_NBYTES,
    MAX_TEXT,
    PROTOCOL,
    Answer,
    BadMessageError,
    Failed,
    GetStatus,
    Hello,
    Request,
    Status,
    TierStatus,
    Used,
    Welcome,
    decode_request,
    encode,
)

log = logging.getLogger("prefix_index.service")


class Limits(NamedTuple):
    """Bounds of the service's memory and of its patience. Times are seconds."""

    connections: int = 4096
    """Connections at a time, fewer where this process may not have as many descriptors; further ones are refused."""
    clients: int = 4096
    """Connections remembered, those last heard from."""
    answers: int = 64
    """Answers that wait for a client to read them; further ones are dropped."""
    requests: int = 256
    """Requests of one connection that wait to be read; the sender waits after that."""
    burst: int = 64
    rescan_s: float = 2.0
    collect_s: float = 30.0
    finish_s: float = 10.0


class StoreServer:
    """Keeps ``store``, whose ``copies`` in DRAM are made here, for all clients at ``endpoint``. Owns it.

    ``open()``, ``serve()`` in one thread until ``stop()`` in any, ``close()``. A second thread looks after the folders.
    """

    def __init__(self, store: FileStore, endpoint: str, limits: Limits | None = None) -> None:
        self.endpoint = endpoint
        self.counts: Counter[str] = Counter()
        self.store = store
        self._limits = limits or Limits()
        self._place = SocketPlace(socket_path(endpoint))
        self._clients: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._stopping = threading.Event()
        self._began = 0.0
        self._hits: Counter[str] = Counter()
        self._evicted = 0
        self._last_removal = b""
        self._complaints: dict[str, str] = {}
        self._seen: Status
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._admission: Admission | None = None

    def open(self) -> None:
        """Takes the socket's place, opens the store, listens. Raises StoreFolderError."""
        self._place.take()
        try:
            self._open_store()
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
                expected, path = "a place that can be bound", self._place.path
                raise StoreFolderError("service socket", expected, str(err), "give another endpoint", path) from err
            finally:
                os.umask(old)
        except BaseException:
            self.close()
            raise
        self._began = time.monotonic()

    def _open_store(self) -> None:
        memory = [] if self.store.copies is None else [self.store.copies.folder]
        for folder in (self.store.folder, *memory):
            if not str(folder.absolute()).isprintable():
                remedy = "give a folder whose name is plain text"
                raise StoreFolderError("index store", "a printable path", repr(str(folder)), remedy)
        check_apart([self.store.folder, *memory])
        self.store.open()
        _, self._last_removal = removals_behind(self.store.folder, b"")
        self._look()

    def serve(self) -> None:
        """Answers until ``stop()``."""
        assert self._admission is not None, "open() first"
        keeper = threading.Thread(target=self._keep_house, name="store-keeper", daemon=True)
        keeper.start()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._admission.monitor, zmq.POLLIN)
        while not self._stopping.is_set():
            for source, _ in poller.poll(200):
                if source is self._socket:
                    self._receive()
            self._count_connections()  # at each turn: those that are too many do not wait for those that ask much
        keeper.join(self._limits.finish_s)
        log.info("ends after %.0f s: %s", time.monotonic() - self._began, self._summary())

    def stop(self) -> None:
        self._stopping.set()

    def close(self) -> None:
        """Removes the socket file, closes the store. Twice does nothing."""
        context, self._context = self._context, None
        if context is not None:
            if self._admission is not None:
                self._admission.close()
            self._socket.close()
            context.term()
        self._place.give_back()
        self.store.close()

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
            number = frame[:ID_NBYTES]
            if len(number) != ID_NBYTES:
                self.counts["bad_messages"] += 1  # nobody could tell what an answer answers
                continue
            answer = self._answer(client, frame[ID_NBYTES:], nframes)
            if answer is not None:
                self._send(client, number, answer)

    def _answer(self, client: bytes, raw: bytes, nframes: int) -> Answer | None:
        try:
            if nframes != 1:
                raise BadMessageError(f"{nframes} frames")
            return self._take(client, decode_request(raw))
        except BadMessageError as err:
            self.counts["bad_messages"] += 1
            expected = f"one frame of an id and a message of protocol version {PROTOCOL}, from a client of this version"
            return Failed(expected=expected, found=str(err)[:MAX_TEXT])
        except Exception as err:  # the loop outlives whatever a request can do
            self.counts["defects"] += 1
            log.exception("request")
            return Failed(expected="an answer", found=f"a defect of the service, {type(err).__name__}: see its log")

    def _take(self, client: bytes, request: Request) -> Answer | None:
        """Failed for a client that is one too many, or of another version; None for what nobody answers."""
        if isinstance(request, Hello):
            return self._welcome(client, request)
        if client in self._clients or not isinstance(request, GetStatus):  # not who only asks how the service does
            self._remember(client, None)
        if isinstance(request, Used):
            if request.copy is not None:
                self._hits["dram" if request.copy else "ssd"] += 1
            self.store.served(request.digest, copy=bool(request.copy))
            return None
        return self.status()

    def _welcome(self, client: bytes, hello: Hello) -> Welcome | Failed:
        if hello.version != PROTOCOL:
            self.counts["bad_messages"] += 1
            return Failed(expected=f"protocol version {PROTOCOL}", found=f"version {hello.version}")
        self._count_connections()  # this one too: libzmq told of it before its first message
        admission = self._admission
        if client not in self._clients and admission is not None and admission.count > admission.most:
            self.counts["refused"] += 1
            most = f"at most {admission.most} connections (its own limit, or `ulimit -n` of its process)"
            return Failed(expected=most, found=f"{admission.count} of them")
        self._remember(client, f"pid {hello.pid}" + (f" ({hello.name})" if hello.name else ""))
        copies = self.store.copies
        return Welcome(
            version=PROTOCOL,
            folder=str(self.store.folder.absolute()),
            memory=None if copies is None else str(copies.folder.absolute()),
            max_bytes=self.store.max_bytes,
            min_free_bytes=self.store.min_free_bytes,
        )

    def _remember(self, client: bytes, name: str | None) -> None:
        known, _ = self._clients.pop(client, ("connected before this service started", 0.0))
        self._clients[client] = name or known, time.monotonic()
        while len(self._clients) > self._limits.clients:
            self._clients.popitem(last=False)  # the first is who was heard from least recently

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

    def _count_connections(self) -> None:
        if self._admission is not None and (ended := self._admission.update()):
            self.counts["cut"] += ended

    def _keep_house(self) -> None:
        collect_at = self._began + self._limits.collect_s
        while not self._stopping.wait(self._limits.rescan_s):
            now = time.monotonic()
            try:
                self._look_after(collect=now >= collect_at)
            except Exception:
                self.counts["defects"] += 1
                log.exception("rescan")
            if now >= collect_at:
                collect_at = now + self._limits.collect_s

    def _look_after(self, *, collect: bool) -> None:
        copies = self.store.copies
        if copies is not None:
            with self._complaining("memory"):
                if come_back(copies.folder):
                    copies.not_before.clear()
                    log.warning("%s: the DRAM tier's folder was gone, with all copies; it was made anew", copies.folder)
                if copies.problem is not None:
                    raise copies.problem
        with self._complaining("store"):
            self.store.rescan()
            if collect:
                self.store.collect()
        news, self._last_removal = removals_behind(self.store.folder, self._last_removal)
        self._evicted += sum(removal.why != "removed" for removal in news)
        self._look()

    @contextlib.contextmanager
    def _complaining(self, what: str) -> Iterator[None]:
        """Logs a folder's error once, and that it is over."""
        try:
            yield
            if self._complaints.pop(what, None) is not None:
                log.info("the %s folder is usable again", what)
        except IndexStoreError as err:
            if self._complaints.get(what) != str(err):
                log.warning("%s", err)
            self._complaints[what] = str(err)

    def _look(self) -> None:
        """What ``status`` shows of the folders, which takes a disk's time."""
        copies = self.store.copies
        tiers = [self._tier("ssd", self.store, "store")]
        if copies is not None and isinstance(copies.keeper, FileStore):
            tiers.insert(0, self._tier("dram", copies.keeper, "memory"))
        writing, nbytes = self.store.being_written
        self._seen = Status(
            pid=os.getpid(),
            uptime_s=0.0,
            endpoint=self.endpoint,
            tiers=tiers,
            indexes=tiers[-1].indexes,
            problems=len(self.store.problems()),
            connections=0,
            clients=[],
            reserved_bytes=nbytes,
            reservations=writing,
            leases=_leases(self.store.folder)[:1000],
            promoted=0 if copies is None else copies.counters.promotions,
            counts={},
        )

    def _tier(self, name: str, store: FileStore, what: str) -> TierStatus:
        entries, error = store.list(), self._complaints.get(what)
        return TierStatus(
            name=name,
            folder=str(store.folder),
            indexes=len(entries),
            nbytes=sum(entry.nbytes for entry in entries),
            max_bytes=store.max_bytes,
            hits=0,
            evicted=self._evicted if store is self.store else None,
            error=None if error is None else printable(error)[:MAX_TEXT],
        )

    def status(self) -> Status:
        """What `sglang-ext store status` shows: the folders as they were seen last, and what this process knows."""
        now, tiers = time.monotonic(), self._seen.tiers
        return replace(
            self._seen,
            uptime_s=now - self._began,
            tiers=[replace(tier, hits=self._hits[tier.name]) for tier in tiers],
            connections=self._connections,
            clients=[f"{name}, idle {now - seen:.0f} s" for name, seen in list(self._clients.values())[-1000:]],
            counts=dict(self.counts),
        )

    @property
    def _connections(self) -> int:
        return 0 if self._admission is None else self._admission.count

    def _summary(self) -> str:
        counts = ", ".join(f"{n} {what}" for what, n in sorted(self.counts.items()))
        held = self._seen.tiers[-1]
        indexes = f"{held.indexes} indexes of {held.nbytes / 1e6:.1f} MB"
        return f"{indexes}, {self._connections} connections; {counts or 'no requests'}"


def _leases(folder: Path) -> list[str]:
    """Digests whose lease somebody holds."""
    found, locked = [], locked_inodes(folder)
    try:
        shards = [path for path in folder.iterdir() if is_shard(path.name)]
    except OSError:
        return []
    for shard in shards:
        with contextlib.suppress(OSError), os.scandir(shard) as items:
            found += [i.name[len(LEASE) :] for i in items if i.name.startswith(LEASE) and i.inode() in locked]
    return sorted(found)
