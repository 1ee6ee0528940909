"""The store service's clients: when the service or its folder goes and comes back, forks, threads, time limits."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefix_index import (
    ArrayKey,
    FileStore,
    IndexNotFound,
    IndexPayload,
    IndexStoreError,
    LazyArray,
    Retention,
    StoreClosed,
    StoreFolderError,
    StoreInconsistent,
    StoreUnavailable,
)
from prefix_index.service import Depot, Limits, ServedFolder, StoreClient, messages, patience
from prefix_index.service.endpoint import socket_path
from prefix_index.service.patience import Patience
from prefix_index.testing import sample_identity, sample_payload
from tests.prefix_index.faults.service_process import Service
from tests.prefix_index.faults.tools import SOON, fork, reap
from tests.prefix_index.machine import Clock
from tests.prefix_index.served_stores import PROMPT, eventually, patient, remove, served
from tests.prefix_index.tiers import PATIENCE_S, serving


@pytest.fixture
def client(tmp_path: Path) -> Iterator[StoreClient]:
    with serving(tmp_path) as endpoint, patient(endpoint) as client:
        yield client


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Service]:
    """A service in a process of its own."""
    with Service(tmp_path) as service:
        yield service


def test_an_embedded_writer_in_the_folder_is_seen_within_a_rescan(tmp_path: Path, process: Service) -> None:
    with patient(process.endpoint) as client, FileStore(tmp_path / "store") as other:
        other.put(sample_payload(fill=3))
        eventually(lambda: client.rescan() or len(client.list()) == 1)  # type: ignore[func-returns-value]
        other.delete(sample_identity())
        with pytest.raises(IndexNotFound):
            client.get(sample_identity())
        eventually(lambda: client.rescan() or not client.list())  # type: ignore[func-returns-value]


def test_while_the_service_is_away(process: Service, tmp_path: Path) -> None:
    """Nothing takes anything like the client's time limit."""
    client = patient(process.endpoint)
    with client:
        client.put(sample_payload(fill=7))
        process.kill()
        began = time.monotonic()
        for _ in range(3):
            with client.get(sample_identity()) as index:
                assert index.array("channels")[0] == 7
        assert time.monotonic() - began < PATIENCE_S / 2
        assert client.contains(sample_identity())
        assert len(client.list()) == 1
        lease = client.lease(sample_identity())
        assert lease is not None
        lease.release()
        client.prefetch(sample_identity())
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="store service: expected an answer of the service"):
            client.put(sample_payload(fill=8))
        calls = [
            lambda: client.get(sample_identity(PROMPT)),
            lambda: client.delete(sample_identity()),
            client.rescan,
            client.collect,
            client.problems,
            client.check_integrity,
            client.status,
        ]
        for call in calls:
            with pytest.raises(StoreUnavailable):
                call()
        assert time.monotonic() - began < PATIENCE_S / 2
        process.start()
        eventually(lambda: rescans(client))
        client.put(sample_payload(fill=8))
        with client.get(sample_identity()) as index:
            assert index.array("channels")[0] == 8
        client.check_integrity()


def rescans(client: StoreClient) -> bool:
    with contextlib.suppress(StoreUnavailable):
        client.rescan()
        return True
    return False


def test_an_expired_index_is_a_miss_while_the_service_is_away(process: Service) -> None:
    clock = Clock(time.time())
    with patient(process.endpoint) as client:
        client._mirror.catalog._clock = clock
        client.put(sample_payload(), retention=Retention(expires=clock.now + 3600))
        process.kill()
        client.get(sample_identity()).close()
        assert client.contains(sample_identity())
        clock.now += 3600
        with pytest.raises(StoreUnavailable):
            client.get(sample_identity())


def test_a_restarted_service_gives_the_whole_listing_again(process: Service, tmp_path: Path) -> None:
    with patient(process.endpoint) as client:
        client.put(sample_payload(sample_identity(PROMPT)))
        process.kill()
        with FileStore(tmp_path / "store") as other:
            other.delete(sample_identity(PROMPT))
            other.put(sample_payload())
        process.start()
        client.rescan()
        assert [e.identity for e in client.list()] == [sample_identity()]
        client.check_integrity()


def test_a_service_that_hangs_costs_its_time_limit_once(process: Service) -> None:
    with patient(process.endpoint) as client:
        client.put(sample_payload(fill=9))
        os.kill(process.pid, signal.SIGSTOP)
        client._patience.timeout_s = 0.5
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"none within 0.5 s"):
            client.rescan()
        assert 0.4 < time.monotonic() - began < PATIENCE_S / 2
        began = time.monotonic()
        for _ in range(200):
            with client.get(sample_identity()) as index:
                assert index.array("channels")[0] == 9
        assert time.monotonic() - began < 50  # the limit at each would be 100
        os.kill(process.pid, signal.SIGCONT)
        client._patience.timeout_s = PATIENCE_S
        eventually(lambda: rescans(client))
        client.put(sample_payload(fill=10))  # late answers to earlier calls are nobody's
        with client.get(sample_identity()) as index:
            assert index.array("channels")[0] == 10


def test_workers_that_wait_for_a_disk_cost_their_time_limit_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Depot(ServedFolder(tmp_path / "store", create=True))
    do, disk = own.do, threading.Event()
    began: list[type[messages.Request]] = []

    def slow(request: messages.Request) -> messages.Answer:
        began.append(type(request))
        disk.wait()
        return do(request)

    def took(call: Callable[[], object]) -> float:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="expected an answer of the service, found none"):
            call()
        return time.monotonic() - began

    with served(tmp_path, own, Limits(workers=64)) as endpoint, patient(endpoint) as client:
        client.put(sample_payload())
        monkeypatch.setattr(own, "do", slow)
        client._patience.timeout_s = client._patience.slow_timeout_s = 0.5
        try:
            assert 0.4 < took(client.problems) < PATIENCE_S / 2
            took(lambda: client.contains(sample_identity(PROMPT)))
            took(client.problems)
            eventually(lambda: rescans(client))  # takes no worker
            client.get(sample_identity()).close()
            took(lambda: client.put(sample_payload(sample_identity(PROMPT))))
            # Only the first was sent; before the others no more than a sign of life was asked for.
            eventually(lambda: messages.Problems in began)
            assert began.count(messages.Problems) == 1
            assert set(began) <= {messages.Problems, messages.Ping}
        finally:
            disk.set()
        eventually(lambda: answers(client))
        client._patience.timeout_s = client._patience.slow_timeout_s = PATIENCE_S
        client.put(sample_payload(sample_identity(PROMPT)))


def answers(client: StoreClient) -> bool:
    with contextlib.suppress(StoreUnavailable):
        client.problems()
        return True
    return False


def test_time_limits_follow_from_one() -> None:
    assert Patience(5.0, None).slow_timeout_s == 15.0
    assert Patience(5.0, 1.0).slow_timeout_s == 5.0
    assert StoreClient("ipc:///a/b", timeout_s=1.0)._mirror._timeout_s == 3.0


def test_no_service_at_all(tmp_path: Path) -> None:
    client = StoreClient(f"ipc://{tmp_path}/none", timeout_s=0.2)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"no service within 0.2 s; start `sglang-ext store serve`"):
        client.open()
    assert time.monotonic() - began < 30.0
    with pytest.raises(StoreClosed):
        client.list()


def test_the_folder_goes_and_comes_back(process: Service, tmp_path: Path) -> None:
    with patient(process.endpoint) as client:
        client.put(sample_payload(fill=1))
        remove(tmp_path / "store")
        with pytest.raises(IndexNotFound):
            client.get(sample_identity())
        assert not client.contains(sample_identity())
        with pytest.raises(StoreFolderError, match="index store: expected a usable folder"):
            client.put(sample_payload(fill=2))
        eventually(lambda: client.rescan() or not client.list())  # type: ignore[func-returns-value]
        eventually(lambda: client.status().tiers[-1].error is not None)
        (tmp_path / "store").mkdir()
        client.put(sample_payload(fill=3))
        with client.get(sample_identity()) as index:
            assert index.array("channels")[0] == 3
        eventually(lambda: client.status().tiers[-1].error is None)
        client.check_integrity()


def test_sigterm_ends_it_well_and_closing_ends_a_waiting_call(process: Service) -> None:
    client = StoreClient(process.endpoint, timeout_s=600.0)
    client.open()
    pool = client._pool
    assert pool is not None
    os.kill(process.pid, signal.SIGSTOP)
    caught: list[Exception] = []

    def ask() -> None:
        try:
            client.rescan()
        except IndexStoreError as err:
            caught.append(err)

    thread = threading.Thread(target=ask)
    thread.start()
    eventually(lambda: not pool._idle)  # the call has the connection
    client.close()
    thread.join(SOON)
    assert not thread.is_alive()
    assert isinstance(caught[0], StoreClosed)
    os.kill(process.pid, signal.SIGCONT)
    path = socket_path(process.endpoint)
    assert path.exists()
    assert process.stop() == 0
    assert not path.exists()
    process.start()


def test_a_forked_child_must_open_anew(process: Service) -> None:
    client = patient(process.endpoint)
    client.open()
    client.put(sample_payload(fill=4))

    def child() -> None:
        with pytest.raises(StoreClosed, match=r"expected a client opened by this process, .* in this process"):
            client.get(sample_identity())
        client.open()
        with client.get(sample_identity()) as index:
            assert index.array("channels")[0] == 4
        client.close()

    assert reap(fork(child), SOON) == 0
    with client.get(sample_identity()) as index:
        assert index.array("channels")[0] == 4
    client.close()


def test_a_child_forked_during_a_put_keeps_nothing_of_a_dead_writer(process: Service) -> None:
    reader, writer = os.pipe()

    def die() -> np.ndarray[Any, Any]:
        child = os.fork()
        if child == 0:
            time.sleep(10 * SOON)
            os._exit(0)
        os.write(writer, str(child).encode())
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def put() -> None:
        with patient(process.endpoint) as client:
            client.put(IndexPayload(sample_identity(), {ArrayKey("kv"): LazyArray("uint8", (4096,), die)}))

    reap(fork(put), SOON)
    child = int(os.read(reader, 20))
    try:
        with patient(process.endpoint) as client:
            eventually(lambda: client.status().reservations == 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


def test_a_child_forked_during_a_put_leaves_it_to_its_parent(process: Service) -> None:
    class InChildError(Exception):
        pass

    parent = os.getpid()

    def load() -> np.ndarray[Any, Any]:
        child = os.fork()
        if child == 0:
            raise InChildError
        assert reap(child, SOON) == 0
        return np.full(4096, 7, np.uint8)

    with patient(process.endpoint) as client:
        try:
            client.put(IndexPayload(sample_identity(), {ArrayKey("kv"): LazyArray("uint8", (4096,), load)}))
        except BaseException as err:
            if os.getpid() != parent:
                os._exit(not isinstance(err, InChildError))
            raise
        with client.get(sample_identity()) as index:
            assert index.array("kv")[0] == 7


def test_more_threads_than_connections(client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CONNECT_S", "_PROBE_S"):  # among so many threads a connection may take its time
        monkeypatch.setattr(patience, name, PATIENCE_S)
    client.put(sample_payload(fill=6))
    errors_seen: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                with client.get(sample_identity()) as index:
                    assert index.array("channels")[0] == 6
                client.rescan()
        except BaseException as err:
            errors_seen.append(err)

    threads = [threading.Thread(target=work) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert errors_seen == []
    assert len(client.status().clients) <= 16


def test_calls_that_wait_for_others_end_in_time(client: StoreClient) -> None:
    client._mirror._timeout_s = 0.1
    client._mirror._updating.acquire()
    with pytest.raises(StoreUnavailable, match=r"expected the end of another thread's rescan, found none within 0.1 s"):
        client.rescan()
    client._mirror._updating.release()
    pool = client._pool
    assert pool is not None
    for _ in range(16):
        pool._room.acquire()
    with pytest.raises(StoreUnavailable, match="expected a free connection, found 16 calls that wait for theirs"):
        pool.call(messages.Ping(), 0.1, 0.1)
    for _ in range(16):
        pool._room.release()
    client.rescan()


def test_a_mirror_that_differs_is_found(client: StoreClient) -> None:
    client.put(sample_payload())
    client._mirror.catalog.remove(sample_identity().digest)
    with pytest.raises(StoreInconsistent, match=r"mirror of the listing: expected \(1, 45056\), found \(0, 0\)"):
        client.check_integrity()


def test_a_slow_commit_does_not_hold_up_lookups(client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CONNECT_S", "_PROBE_S"):  # the look-ups need a connection of their own
        monkeypatch.setattr(patience, name, PATIENCE_S)
    client.put(sample_payload(sample_identity(PROMPT)))
    adopt, begun, disk = ServedFolder.adopt, threading.Event(), threading.Event()

    def slow(*args: object) -> object:
        begun.set()
        disk.wait()
        return adopt(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(ServedFolder, "adopt", slow)
    thread = threading.Thread(target=lambda: client.put(sample_payload()))
    thread.start()
    try:
        assert begun.wait(SOON)
        began = time.monotonic()
        for _ in range(20):
            client.get(sample_identity(PROMPT)).close()
            client.rescan()
        assert time.monotonic() - began < PATIENCE_S / 2
        assert len(client.list()) == 1
    finally:
        disk.set()
        thread.join()
    assert len(client.list()) == 2
