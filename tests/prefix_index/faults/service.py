"""The store service: killed under load, clients that stall, lie, or die, and messages that are none."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import resource
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

from prefix_index import IndexStoreError, Retention, StoreUnavailable, write_index
from prefix_index.folder import PARTIAL, SUFFIX, shard_of
from prefix_index.service import Depot, Limits, ServedFolder, StoreClient, StoreServer, messages, writing

from .outcome import Campaign, Outcome
from .tools import (
    SMALL,
    Line,
    Tally,
    folder,
    fork,
    identity_of,
    opened,
    payload_of,
    read_fill,
    reap,
    stored_files,
)

CLIENTS = 4
LISTED = 400
KEYS = 3
CALL_S = 12.0
"""Longer than any call of these clients may take: 5 s for what waits for a disk, tried again after a restart."""
MAX_GROWTH = 96 << 20


class Service:
    """A service in a forked process, which can be killed and started again at the same place."""

    def __init__(self, path: Path, *, rescan_s: float = 0.1, grace_s: float = 0.3, max_file: int = 0) -> None:
        self._socket_folder = tempfile.TemporaryDirectory(prefix="svc-")
        self.endpoint = f"ipc://{self._socket_folder.name}/s"
        self.pid = -1
        self._path = path
        self._options = rescan_s, grace_s, max_file

    def start(self) -> bool:
        """Whether it listens."""
        line = Line()
        self.pid = fork(lambda: self._serve(line))
        up = line.wait_for("up", 20.0)
        os.close(line.writer)
        os.close(line.reader)
        return up

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        reap(self.pid, 20.0)

    def stop(self) -> int | None:
        """Its exit status, None where SIGTERM did not end it."""
        os.kill(self.pid, signal.SIGTERM)
        return reap(self.pid, 20.0)

    def rss(self) -> int:
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self) -> Service:
        assert self.start(), "the service did not start"
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.kill()
        self._socket_folder.cleanup()

    def _serve(self, line: Line) -> None:
        rescan_s, grace_s, max_file = self._options
        if max_file:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_file, max_file))
        slow = ServedFolder(self._path / "store", create=True)
        fast = ServedFolder(self._path / "dram", create=True, max_bytes=8 << 20)
        server = StoreServer(Depot(slow, fast, grace_s=grace_s), self.endpoint, Limits(rescan_s=rescan_s))
        signal.signal(signal.SIGTERM, lambda *_: server.stop())
        server.open()
        line.say("up")
        server.serve()
        server.close()


def client_of(service: Service) -> StoreClient:
    return StoreClient(service.endpoint, timeout_s=2.0, slow_timeout_s=5.0)


# ---- killed and restarted under load ----


def work(service: Service, line: Line, me: int, seed: int, until: Path) -> None:
    """A client: puts, gets and looks up its own keys until the file ``until`` is there. Says what came of it."""
    rng = random.Random(seed * 100 + me)
    said: Counter[str] = Counter()
    bad: list[str] = []
    may: dict[int, set[int]] = {}
    fills = itertools.count(1)
    client = client_of(service)
    began = 0.0
    while True:
        with contextlib.suppress(StoreUnavailable):
            client.open()
            break
    while not until.exists():
        number = me * KEYS + rng.randrange(KEYS)
        began = time.monotonic()
        try:
            if rng.random() < 0.4 or number not in may:
                fill = next(fills)
                try:
                    client.put(payload_of(number, fill, rng.choice((SMALL, 1 << 16, 1 << 19))))
                    may[number] = {fill}
                    said["puts"] += 1
                except StoreUnavailable:
                    if number in may:
                        may[number].add(fill)
                    said["unacknowledged"] += 1
            elif rng.random() < 0.8:
                found = read_fill(client, number)
                said["gets"] += 1
                if found not in may[number]:
                    bad.append(f"wrong: index {number} has fill {found}, may be {sorted(may[number])}")
                may[number] = {found}
            else:
                client.rescan()
                said["rescans"] += 1
        except StoreUnavailable:
            said["unavailable"] += 1
        except (IndexStoreError, AssertionError) as err:
            bad.append(f"lost: index {number}: {type(err).__name__}: {err}")
        if time.monotonic() - began > CALL_S:
            bad.append(f"stuck: {time.monotonic() - began:.1f} s")
    line.say(json.dumps({"said": said, "bad": bad[:5], "may": {n: sorted(f) for n, f in may.items()}}))


def kill_service_under_load(count: int, seed: int) -> Outcome:
    """``kill -9`` of the service at random moments, with CLIENTS processes at work on it all the time."""
    tally, rng, said = Tally("service_killed_under_load"), random.Random(seed), Counter[str]()
    with folder() as path, Service(path) as service:
        line, until = Line(), path / "stop"
        pids = [fork(lambda me=me: work(service, line, me, seed, until)) for me in range(CLIENTS)]  # type: ignore[misc]
        for i in range(count):
            time.sleep(rng.choice((0.02, 0.1, 0.3)) * rng.random())
            service.kill()
            tally.tried += 1
            time.sleep(rng.choice((0.0, 0.0, 0.2)) * rng.random())
            if not service.start():
                tally.hang(f"kill {i}: the service did not start again")
        time.sleep(0.5)
        until.touch()
        for pid in pids:
            code = reap(pid, 60.0)
            if code is None:
                tally.hang("a client did not end")
            tally.expect(code in (0, None), f"a client ended with {code}")
        tally.expect(service.stop() == 0, "the service did not end well")
        results = [json.loads(text) for text in line.close()]
        tally.expect(len(results) == CLIENTS, f"{len(results)} of {CLIENTS} clients said what they did")
        with opened(path / "store", create=False) as store:
            for result in results:
                said.update(result["said"])
                for text in result["bad"]:
                    {"lost": tally.lose, "wrong": tally.err, "stuck": tally.hang}[text.split(":")[0]](text)
                for number, fills in result["may"].items():
                    try:
                        tally.expect(read_fill(store, int(number)) in fills, f"index {number} is none of {fills}")
                    except (IndexStoreError, AssertionError) as err:
                        tally.lose(f"in the end: index {number}: {err}")
            store.check_integrity()
        service.start()
    for what in ("puts", "gets"):
        tally.expect(said[what] > 0, f"no {what}")
    return tally.outcome(
        f"kill -9 of the service, {CLIENTS} clients: " + ", ".join(f"{n} {w}" for w, n in said.items())
    )


# ---- a client that reads nothing ----


def stalled_reader(count: int, seed: int) -> Outcome:
    """A client asks ``count`` times for a long listing and reads no answer; another one works on."""
    tally = Tally("service_stalled_reader")
    with folder() as path:
        for number in range(LISTED):
            write_small(path / "store", number)
        with Service(path) as service, client_of(service) as good:
            wire = Wire(service.endpoint, queue=1)
            wire.hello()
            before, slowest = service.rss(), 0.0
            request = messages.encode(messages.Changes(epoch="none", since=0))
            for i in range(count):
                wire.send((wire.number() + request,), tally)
                tally.tried += 1
                if i % 50 == 0:
                    began = time.monotonic()
                    try:
                        tally.expect(read_fill(good, i % LISTED) == 1, "another fill")
                        good.rescan()
                    except IndexStoreError as err:
                        tally.hang(f"the other client: {err}")
                    slowest = max(slowest, time.monotonic() - began)
            growth = service.rss() - before
            tally.expect(growth < MAX_GROWTH, f"the service grew by {growth >> 20} MiB")
            counts = good.status().counts
            tally.expect(counts.get("dropped", 0) > 0, f"nothing was dropped: {counts}")
            tally.expect(service.stop() == 0, "the service did not end well")
            wire.close()
    made = f"unread listings, {counts.get('dropped', 0)} answers dropped, service +{growth >> 20} MiB, "
    return tally.outcome(made + f"slowest call of another client {slowest * 1e3:.0f} ms")


def write_small(path: Path, number: int) -> None:
    digest = identity_of(number).digest
    shard = path / shard_of(digest)
    shard.mkdir(parents=True, exist_ok=True)
    with (shard / (digest + SUFFIX)).open("wb") as out:
        write_index(out, payload_of(number, 1, parts=1))  # type: ignore[arg-type]


class Wire:
    """A DEALER socket that sends whatever it is given."""

    def __init__(self, endpoint: str, queue: int = 1000) -> None:
        self._endpoint, self._queue = endpoint, queue
        self._numbers = itertools.count(1)
        self._connect()

    def _connect(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RCVHWM, self._queue)
        self._socket.connect(self._endpoint)

    def number(self) -> bytes:
        return next(self._numbers).to_bytes(8, "little")

    def hello(self) -> None:
        self._socket.poll(5000, zmq.POLLOUT)
        hello = messages.Hello(version=messages.PROTOCOL, pid=os.getpid(), name="fault")
        self._socket.send(self.number() + messages.encode(hello))
        assert self._socket.poll(5000), "no welcome"
        self._socket.recv()

    def again(self) -> None:
        """A new connection."""
        self.close()
        self._connect()
        self.hello()

    def send(self, frames: Any, tally: Tally) -> None:
        if not self._socket.poll(10_000, zmq.POLLOUT):
            tally.hang("nothing could be sent for 10 s")
            return
        self._socket.send_multipart(list(frames))

    def answers(self) -> Iterator[bytes]:
        """What has come so far."""
        with contextlib.suppress(zmq.Again):
            while True:
                yield self._socket.recv(zmq.NOBLOCK)

    def settled(self) -> bool:
        """Whether all that was sent has been read: a Ping is answered. Answers to a flood may be dropped, so it is
        asked again.
        """
        for _ in range(20):
            number = self.number()
            if self._socket.poll(500, zmq.POLLOUT):
                self._socket.send(number + messages.encode(messages.Ping()))
                if self.answer_to(number, 0.5) is not None:
                    return True
        return False

    def answer_to(self, number: bytes, seconds: float) -> bytes | None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and self._socket.poll(int(left * 1000) + 1):
            for frame in self.answers():
                if frame[:8] == number:
                    return frame[8:]
        return None

    def close(self) -> None:
        self._socket.close(linger=0)


# ---- messages that are none ----


def valid_messages() -> list[bytes]:
    """One of each request that changes nothing that is looked at afterwards."""
    digest = identity_of(999_999).digest
    partial = f"{PARTIAL}1-{'0' * 16}"
    error = messages.ErrorText(kind="IndexCorrupt", what="a", expected="b", found="c", remedy="d", path="e")
    requests = [
        messages.Hello(version=messages.PROTOCOL, pid=1, name="n"),
        messages.Ping(),
        messages.Locate(digest=digest, skip=1, touch=True),
        messages.Changes(epoch="0" * 16, since=0),
        messages.Reserve(digest=digest, nbytes=8192),
        messages.Commit(digest=digest, partial=partial, nbytes=8192, inode=7, retention=Retention(pinned=True)),
        messages.Release(digest=digest, partial=partial),
        messages.Delete(digest=digest),
        messages.Retain(digest=digest, retention=Retention(expires=1.0)),
        messages.Report(digest=digest, error=error, tier=0),
        messages.Report(digest=digest, error=error),
        messages.Prefetch(digest=digest),
        messages.Problems(start=3),
        messages.GetStatus(),
    ]
    return [messages.encode(request) for request in requests]


def nasty(rng: random.Random, valid: list[bytes]) -> bytes:
    """One body: noise, a valid message bent, cut or lengthened, deep nesting, lengths that lie, path-like names."""
    raw = bytearray(rng.choice(valid))
    match rng.randrange(9):
        case 0:
            return rng.randbytes(rng.choice((0, 1, 7, 64, 1000)))
        case 1 | 2:
            for _ in range(rng.randint(1, 4)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
        case 3:
            del raw[rng.randrange(len(raw)) :]
        case 4:
            raw += rng.randbytes(rng.randint(1, 40))
        case 5:
            at = rng.randrange(len(raw))
            raw[at:at] = rng.randbytes(rng.randint(1, 9))
        case 6:
            one = rng.choice((b"\x91", b"\x81\xa4type", b"\xdc\x00\x01", b"\x81\x91"))
            return bytes(raw[: rng.choice((0, 6))]) + one * rng.choice((10, 1000, 15_000))
        case 7:
            lie = rng.choice((b"\xdb", b"\xc6", b"\xdd", b"\xdf")) + rng.choice((b"\xff" * 4, b"\x7f\xff\xff\xff"))
            at = rng.randrange(len(raw))
            return bytes(raw[:at]) + lie + bytes(raw[at:])
        case 8:
            digest = rng.choice(("../" * 20 + "etcd", "A" * 64, "0" * 63 + "\n", "0" * 65, "\0" * 64, "/" * 64, ""))
            kind = rng.choice(("Locate", "Delete", "Prefetch", "Reserve", "Commit"))
            fields: dict[str, Any] = {"type": kind, "digest": digest, "nbytes": 4096, "inode": 1}
            fields["partial"] = rng.choice(("../../x", PARTIAL + "1-/etc", "x" + SUFFIX, PARTIAL + "1-" + "0" * 16))
            return messages.encode(fields)
    return bytes(raw)


def fuzz_messages(count: int, seed: int) -> Outcome:
    """Bad messages on the real socket; between them the service is asked for what it must still know."""
    tally, rng, said = Tally("service_fuzzed_messages"), random.Random(seed), Counter[str]()
    valid = valid_messages()
    with folder() as path:
        for number in range(20):
            write_small(path / "store", number)
        with Service(path, rescan_s=1.0, max_file=16 << 20) as service, client_of(service) as good:
            wire = Wire(service.endpoint)
            wire.hello()
            before = 0
            while tally.tried < count:
                for _ in range(min(500, count - tally.tried)):
                    fuzz_one(service, wire, rng, valid, tally, said)
                check_alive(wire, good, rng, tally, said)
                before = before or service.rss()
            growth = service.rss() - before
            tally.expect(growth < MAX_GROWTH, f"the service grew by {growth >> 20} MiB")
            counts = good.status().counts
            tally.expect(counts.get("defects", 0) == 0, f"defects: {counts}")
            tally.expect(counts.get("bad_messages", 0) > 0, f"nothing was found bad: {counts}")
            wire.close()
            tally.expect(service.stop() == 0, "the service did not end well")
        with opened(path / "store", create=False, partial_grace_s=0.0) as store:
            for number in range(20):
                tally.expect(read_fill(store, number) == 1, f"index {number} changed")
            store.check_integrity()
    made = f"messages, {counts.get('bad_messages', 0)} found bad, service +{growth >> 20} MiB: "
    return tally.outcome(made + ", ".join(f"{n} {what}" for what, n in sorted(said.items())))


def fuzz_one(
    service: Service, wire: Wire, rng: random.Random, valid: list[bytes], tally: Tally, said: Counter[str]
) -> None:
    tally.tried += 1
    kind = rng.random()
    if kind < 0.001:
        said["oversized"] += 1  # the service drops the connection, as it should
        wire.send((wire.number() + rng.randbytes(messages.MAX_REQUEST_NBYTES + rng.choice((1, 100, 1 << 20))),), tally)
        wire.again()
    elif kind < 0.004:
        said["raw bytes on the socket"] += 1
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 32)
        raw = rng.choice((rng.randbytes(rng.randint(1, 2000)), greeting[: rng.randint(1, 64)] + rng.randbytes(200)))
        with socket.socket(socket.AF_UNIX) as plain, contextlib.suppress(OSError):
            plain.settimeout(5.0)
            plain.connect(service.endpoint.removeprefix("ipc://"))
            plain.sendall(raw)
    elif kind < 0.1:
        said["wrong frames"] += 1
        frames = [nasty(rng, valid)[:200] for _ in range(rng.choice((1, 1, 3, 4, 50)))]
        wire.send([b"", *frames] if rng.random() < 0.3 else [wire.number() + rng.choice(valid), *frames], tally)
    elif kind < 0.13:
        said["no id"] += 1
        wire.send((rng.randbytes(rng.choice((0, 1, 7))),), tally)
    elif kind < 0.2:
        said["valid, from nowhere"] += 1
        wire.send((wire.number() + rng.choice(valid),), tally)
    else:
        said["bent"] += 1
        wire.send((wire.number() + nasty(rng, valid),), tally)
    for _ in wire.answers():
        pass


def check_alive(wire: Wire, good: StoreClient, rng: random.Random, tally: Tally, said: Counter[str]) -> None:
    """The service answers the one that sends rubbish, tells it so, and serves the other as ever."""
    if not wire.settled():
        tally.hang("no answer to a Ping within 10 s")
        wire.again()
    number = wire.number()
    wire.send((number + b"\xc1 rubbish",), tally)
    answer = wire.answer_to(number, 10.0)
    if answer is None or not isinstance(messages.decode_answer(answer), messages.Failed):
        tally.err("rubbish with a readable id got no error answer")
    began = time.monotonic()
    try:
        tally.expect(read_fill(good, rng.randrange(20)) == 1, "another fill")
        tally.expect(len(good.list()) >= 20, f"{len(good.list())} indexes listed")
        said["checks"] += 1
    except IndexStoreError as err:
        tally.err(f"the other client: {err}")
    if time.monotonic() - began > CALL_S:
        tally.hang(f"a get took {time.monotonic() - began:.1f} s")


# ---- clients that die ----


def kill_client_mid_put(count: int, seed: int) -> Outcome:
    """``kill -9`` of a writer: after its reservation, while it writes, before its commit. Nothing of it stays."""
    tally, rng, said = Tally("service_client_killed_mid_put"), random.Random(seed), Counter[str]()
    phases = ("reserved", "load", "synced")
    with folder() as path, Service(path) as service, client_of(service) as good:
        for number in range(KEYS):
            good.put(payload_of(number, 1, 1 << 18))
        for i in range(count):
            phase, number = phases[i % len(phases)], rng.randrange(KEYS)
            line = Line()
            pid = fork(lambda: put_and_hang(service, line, phase, number, i))  # noqa: B023
            if not line.wait_for(f"at {phase}", 20.0):
                tally.hang(f"try {i}: the writer never was at {phase}")
            os.kill(pid, signal.SIGKILL)
            reap(pid, 20.0)
            line.close()
            tally.tried += 1
            said[f"at {phase}"] += 1
            tally.expect(read_fill(good, number) == 1, f"try {i}: index {number} changed")
        deadline = time.monotonic() + 15.0
        while left := [name for name in stored_files(path / "store") if name.startswith(PARTIAL)]:
            if time.monotonic() > deadline:
                tally.err(f"partial files stay: {left[:2]}")
                break
            time.sleep(0.05)
        tally.expect(good.status().reservations == 0, "reservations stay")
        for number in range(KEYS):
            try:
                tally.expect(read_fill(good, number) == 1, f"index {number} changed")
                good.put(payload_of(number, 2, 1 << 18))
                tally.expect(read_fill(good, number) == 2, f"index {number} could not be replaced")
            except IndexStoreError as err:
                tally.lose(f"index {number}: {err}")
        good.check_integrity()
    return tally.outcome("writers killed " + ", ".join(f"{n} {what}" for what, n in said.items()))


def put_and_hang(service: Service, line: Line, phase: str, number: int, fill: int) -> None:
    """In a child: a put that stands still at ``phase`` until it is killed."""

    def stand(*_: Any) -> Any:
        line.say(f"at {phase}")
        time.sleep(60)

    payload = payload_of(number, fill + 10, 1 << 18)
    if phase == "load":
        object.__setattr__(list(payload.arrays.values())[-1], "load", stand)
    elif phase == "synced":
        os.fsync = stand
    else:
        writing.shard_fd = stand  # type: ignore[attr-defined]
    with client_of(service) as client:
        client.put(payload)


def kill_lease_holder(count: int, seed: int) -> Outcome:
    """``kill -9`` of whoever holds a build lease: nobody else has it before, anybody can right after."""
    tally = Tally("service_lease_holder_killed")
    slowest = 0.0
    with folder() as path, Service(path) as service, client_of(service) as good:
        for i in range(count):
            line, identity = Line(), identity_of(i % 5)
            pid = fork(lambda: hold_lease(service, line, i % 5))  # noqa: B023
            if not line.wait_for("held", 20.0):
                tally.hang(f"try {i}: no lease")
            tally.expect(good.lease(identity) is None, f"try {i}: two leases")
            os.kill(pid, signal.SIGKILL)
            reap(pid, 20.0)
            line.close()
            tally.tried += 1
            began = time.monotonic()
            lease = good.lease(identity)
            while lease is None and time.monotonic() - began < 5.0:
                time.sleep(0.001)
                lease = good.lease(identity)
            slowest = max(slowest, time.monotonic() - began)
            if lease is None:
                tally.hang(f"try {i}: the lease of a dead process stays")
            else:
                lease.release()
    return tally.outcome(f"lease holders killed; free again within {slowest * 1e3:.1f} ms")


def hold_lease(service: Service, line: Line, number: int) -> None:
    with client_of(service) as client:
        lease = client.lease(identity_of(number))
        line.say("held" if lease is not None else "refused")
        time.sleep(60)


CAMPAIGNS = {
    "service_killed_under_load": Campaign(kill_service_under_load, full=300, quick=16),
    "service_stalled_reader": Campaign(stalled_reader, full=20_000, quick=2_000),
    "service_fuzzed_messages": Campaign(fuzz_messages, full=120_000, quick=4_000),
    "service_client_killed_mid_put": Campaign(kill_client_mid_put, full=150, quick=18),
    "service_lease_holder_killed": Campaign(kill_lease_holder, full=200, quick=20),
}
