"""The store service's socket, its folder, and its clients: what is no message, answers that nobody reads, deaths."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from prefix_index import IndexNotFound, IndexStoreError, IndexWriter
from prefix_index.service import StoreClient, messages
from prefix_index.service.endpoint import socket_path
from tests.examples import examples
from tests.prefix_index.samples import identity_of, payload_of, read_fill
from tests.prefix_index.small_stores import SOON, balanced, index_file, opened, remove
from tests.prefix_index.tiers import Service, eventually, patient

MAX_GROWTH = 96 << 20


class Wire:
    """A DEALER socket that sends whatever it is given."""

    def __init__(self, endpoint: str, queue: int = 1000) -> None:
        self._endpoint, self._queue = endpoint, queue
        self._numbers = itertools.count(1)
        self.connect()

    def connect(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RCVHWM, self._queue)
        self._socket.connect(self._endpoint)
        assert self.ask(messages.encode(messages.Hello(version=messages.PROTOCOL, pid=os.getpid(), name="fault")))

    def number(self) -> bytes:
        return next(self._numbers).to_bytes(8, "little")

    def send(self, *frames: bytes) -> None:
        assert self._socket.poll(int(1000 * SOON), zmq.POLLOUT), "nothing can be sent"
        self._socket.send_multipart(frames)

    def answers(self) -> Iterator[bytes]:
        """What has come so far."""
        with contextlib.suppress(zmq.Again):
            while True:
                yield self._socket.recv(zmq.NOBLOCK)

    def ask(self, body: bytes, seconds: float = SOON) -> bytes | None:
        """The answer to it, None where that did not come in time."""
        number, deadline = self.number(), time.monotonic() + seconds
        self.send(number + body)
        while (left := deadline - time.monotonic()) > 0 and self._socket.poll(int(left * 1000) + 1):
            for frame in self.answers():
                if frame[:8] == number:
                    return frame[8:]
        return None

    def close(self) -> None:
        self._socket.close(linger=0)


STATUS = messages.encode(messages.GetStatus())


def store_of(path: Path, count: int) -> None:
    for number in range(count):
        file = index_file(path, identity_of(number))
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as out:
            IndexWriter(payload_of(number, 1)).write(out)  # type: ignore[arg-type]


def test_who_asks_and_reads_no_answer_costs_the_others_nothing(tmp_path: Path) -> None:
    store_of(tmp_path / "store", 400)
    with Service(tmp_path) as service, patient(service.endpoint) as good:
        wire, before = Wire(service.endpoint, queue=1), service.rss()
        for i in range(examples(20_000, 2_000)):
            wire.send(wire.number() + STATUS)
            if i % 50 == 0:
                assert read_fill(good, i % 400) == 1
                good.rescan()
        assert service.rss() - before < MAX_GROWTH
        assert good.status().counts["dropped"] > 0
        wire.close()
        check_ends_well(service, good)


def check_ends_well(service: Service, good: StoreClient) -> None:
    assert good.status().counts.get("defects", 0) == 0
    assert service.stop() == 0
    assert not socket_path(service.endpoint).exists()
    assert service.start()


VALID = [
    messages.encode(messages.Hello(version=messages.PROTOCOL, pid=1, name="n")),
    STATUS,
    *(messages.encode(messages.Used(digest=identity_of(999_999).digest, copy=copy)) for copy in (False, True)),
]
NO_MESSAGES = [
    *(b"", b"\xc1 rubbish", b"\x91" * 4000, b"\x81\xa4type" * 600, b"\x81\x91" * 2000),
    *(bytes([length]) + b"\xff" * 4 for length in b"\xdb\xc6\xdd\xdf"),
    *(messages.encode({"type": "Used", "digest": digest}) for digest in ("../" * 20 + "etcd", "A" * 64, "0" * 65)),
    bytes(messages.MAX_REQUEST_NBYTES - messages.ID_NBYTES),
]


def bent(rng: random.Random) -> bytes:
    """A valid message with other bytes, cut, or lengthened; at times noise, or what is none for another reason."""
    raw = bytearray(rng.choice(VALID))
    at = rng.randrange(len(raw))
    match rng.randrange(5):
        case 0:
            return rng.choice((*NO_MESSAGES, rng.randbytes(rng.choice((1, 7, 1000)))))
        case 1:
            raw[at] = rng.randrange(256)
        case 2:
            del raw[at:]
        case 3:
            raw[at:at] = rng.randbytes(rng.randint(1, 9))
        case _:
            raw[at:at] = rng.choice(NO_MESSAGES)[:40]
    return bytes(raw)


def test_what_is_no_message_is_told_so_and_harms_nobody(tmp_path: Path) -> None:
    rng = random.Random(7)
    store_of(tmp_path / "store", 20)
    with Service(tmp_path, rescan_s=1.0, max_file=16 << 20) as service, patient(service.endpoint) as good:
        wire, before = Wire(service.endpoint), 0
        for sent in range(1, examples(12_000, 1_500) + 1):
            send_one(service, wire, rng)
            if sent % 500 == 0:
                check_alive(wire, good, rng)
                before = before or service.rss()
        assert service.rss() - before < MAX_GROWTH
        assert good.status().counts["bad_messages"] > 0
        wire.close()
        check_ends_well(service, good)
    with opened(tmp_path / "store", partial_grace_s=0.0) as store:
        assert [read_fill(store, number) for number in range(20)] == [1] * 20
        balanced(store)


def send_one(service: Service, wire: Wire, rng: random.Random) -> None:
    kind = rng.random()
    if kind < 0.001:
        wire.send(wire.number() + rng.randbytes(messages.MAX_REQUEST_NBYTES + rng.choice((1, 1 << 20))))
        wire.close()
        wire.connect()  # the service drops the connection, as it should
    elif kind < 0.004:
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 32)
        with socket.socket(socket.AF_UNIX) as plain, contextlib.suppress(OSError):
            plain.settimeout(5.0)
            plain.connect(service.endpoint.removeprefix("ipc://"))
            plain.sendall(greeting[: rng.randint(0, 64)] + rng.randbytes(200))
    elif kind < 0.1:
        wire.send(wire.number() + rng.choice(VALID), *[bent(rng)[:200]] * rng.choice((1, 3, 50)))
    elif kind < 0.13:
        wire.send(rng.randbytes(rng.choice((0, 1, 7))))
    else:
        wire.send(wire.number() + bent(rng))
    for _ in wire.answers():
        pass


def check_alive(wire: Wire, good: StoreClient, rng: random.Random) -> None:
    """The service answers the one that sends rubbish, tells it so, and serves the other as ever."""
    eventually(lambda: wire.ask(STATUS, 0.5))  # answers to a flood may be dropped
    for raw in NO_MESSAGES:
        answer = wire.ask(raw)
        assert answer is not None
        assert isinstance(messages.decode_answer(answer), messages.Failed)
    assert read_fill(good, rng.randrange(20)) == 1
    assert len(good.list()) >= 20


def test_a_folder_goes_under_a_service_and_comes_back(tmp_path: Path) -> None:
    """Misses and clear errors, and right bytes; the same service and client store and serve again."""
    with Service(tmp_path) as service, patient(service.endpoint) as client:
        for turn in range(examples(60, 8)):
            client.put(payload_of(0, 2 * turn))
            assert read_fill(client) == 2 * turn
            remove(tmp_path / "store")
            for _ in range(2):
                with contextlib.suppress(IndexStoreError):
                    assert read_fill(client) == 2 * turn
                with pytest.raises(IndexStoreError) as caught:
                    client.put(payload_of(1, turn))
                assert not isinstance(caught.value, IndexNotFound)
                with contextlib.suppress(IndexStoreError):
                    client.rescan()
            (tmp_path / "store").mkdir()
            client.put(payload_of(0, 2 * turn + 1))
            assert read_fill(client) == 2 * turn + 1
        check_ends_well(service, client)
