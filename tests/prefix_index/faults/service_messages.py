"""The store service's socket: clients that send what is no message, or ask and read no answer."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

from prefix_index import IndexStoreError, IndexWriter
from prefix_index.folder import SUFFIX, shard_of
from prefix_index.service import StoreClient, messages
from tests.prefix_index.balance import balanced

from .outcome import Campaign, Outcome
from .service_process import CALL_S, MAX_GROWTH, Service, client_of
from .tools import SOON, Tally, folder, identity_of, opened, payload_of, read_fill

LISTED = 400
_SOON_MS = int(1000 * SOON)


def stalled_reader(count: int, seed: int) -> Outcome:
    """A client asks ``count`` times for the status and reads no answer; another one works on."""
    tally = Tally("service_stalled_reader")
    with folder() as path:
        for number in range(LISTED):
            write_small(path / "store", number)
        with Service(path) as service, client_of(service) as good:
            wire = Wire(service.endpoint, queue=1)
            wire.hello()
            before, slowest = service.rss(), 0.0
            request = messages.encode(messages.GetStatus())
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
    made = f"unread answers, {counts.get('dropped', 0)} answers dropped, service +{growth >> 20} MiB, "
    return tally.outcome(made + f"slowest call of another client {slowest * 1e3:.0f} ms")


def write_small(path: Path, number: int) -> None:
    digest = identity_of(number).digest
    shard = path / shard_of(digest)
    shard.mkdir(parents=True, exist_ok=True)
    with (shard / (digest + SUFFIX)).open("wb") as out:
        IndexWriter(payload_of(number, 1, parts=1)).write(out)  # type: ignore[arg-type]


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
        self._socket.poll(_SOON_MS, zmq.POLLOUT)
        hello = messages.Hello(version=messages.PROTOCOL, pid=os.getpid(), name="fault")
        self._socket.send(self.number() + messages.encode(hello))
        assert self._socket.poll(_SOON_MS), "no welcome"
        self._socket.recv()

    def again(self) -> None:
        """A new connection."""
        self.close()
        self._connect()
        self.hello()

    def send(self, frames: Any, tally: Tally) -> None:
        if not self._socket.poll(_SOON_MS, zmq.POLLOUT):
            tally.hang(f"nothing could be sent for {SOON:.0f} s")
            return
        self._socket.send_multipart(list(frames))

    def answers(self) -> Iterator[bytes]:
        """What has come so far."""
        with contextlib.suppress(zmq.Again):
            while True:
                yield self._socket.recv(zmq.NOBLOCK)

    def settled(self) -> bool:
        """Whether all that was sent has been read: a question is answered. Answers to a flood may be dropped, so
        it is asked again.
        """
        deadline = time.monotonic() + SOON
        while time.monotonic() < deadline:
            number = self.number()
            if self._socket.poll(500, zmq.POLLOUT):
                self._socket.send(number + messages.encode(messages.GetStatus()))
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


def valid_messages() -> list[bytes]:
    """One of each request."""
    digest = identity_of(999_999).digest
    requests = [
        messages.Hello(version=messages.PROTOCOL, pid=1, name="n"),
        messages.Used(digest=digest),
        messages.Used(digest=digest, copy=True),
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
            return messages.encode({"type": rng.choice(("Used", "Hello", "Located")), "digest": digest, "copy": 1})
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
            balanced(store)
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
        tally.hang(f"no answer within {SOON:.0f} s")
        wire.again()
    number = wire.number()
    wire.send((number + b"\xc1 rubbish",), tally)
    answer = wire.answer_to(number, SOON)
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


CAMPAIGNS = {
    "service_stalled_reader": Campaign(stalled_reader, full=20_000, quick=2_000),
    "service_fuzzed_messages": Campaign(fuzz_messages, full=120_000, quick=4_000),
}
