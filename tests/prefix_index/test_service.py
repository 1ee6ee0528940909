"""The store service: what comes over the socket, what happens when it goes, who may listen where."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import settings

from prefix_index import (
    ArrayKey,
    FileStore,
    IndexCorrupt,
    IndexMismatch,
    IndexNotFound,
    IndexPayload,
    IndexStoreError,
    InvalidPayload,
    LazyArray,
    Retention,
    StoreClosed,
    StoreFolderError,
    StoreFull,
    StoreInconsistent,
    StoreUnavailable,
    errors,
)
from prefix_index.folder import PARTIAL
from prefix_index.service import Depot, Limits, ServedFolder, StoreClient, StoreServer, messages
from prefix_index.service.changes import ChangeLog
from prefix_index.service.endpoint import SocketPlace, socket_path
from prefix_index.testing import sample_identity, sample_payload
from tests.prefix_index.faults.service import Service
from tests.prefix_index.faults.tools import fork, reap
from tests.prefix_index.machine import STEPS, StoreMachine
from tests.prefix_index.tiers import serving

PROMPT = tuple(range(64))


def eventually(holds: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path) as endpoint:
        yield endpoint


@pytest.fixture
def client(endpoint: str) -> Iterator[StoreClient]:
    with StoreClient(endpoint) as client:
        yield client


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Service]:
    """A service in a process of its own."""
    with Service(tmp_path) as service:
        yield service


# ---- tiers ----


def test_a_used_index_is_served_from_dram_and_a_replaced_one_never_is(client: StoreClient, tmp_path: Path) -> None:
    def tier() -> str:
        with client.get(sample_identity()) as index:
            assert index.array("channels")[0] == fill
            index.verify()
            return Path(index.path or "").relative_to(tmp_path).parts[0]

    for fill in (1, 2, 3):
        client.put(sample_payload(fill=fill))
        eventually(lambda: tier() == "dram")
    assert client.status().tiers[0].indexes == 1
    # Somebody who knows nothing of the service replaces it: the next get sees it.
    fill = 4
    with FileStore(tmp_path / "store") as other:
        other.put(sample_payload(fill=fill))
    assert tier() == "store"
    eventually(lambda: tier() == "dram")


def test_a_damaged_copy_is_dropped_and_the_original_served(client: StoreClient, tmp_path: Path) -> None:
    client.put(sample_payload(fill=5))
    (copy,) = wait_for_files(tmp_path / "dram")
    eventually(lambda: client.get(sample_identity()).path == str(copy))
    raw = bytearray(copy.read_bytes())
    raw[70] ^= 1
    copy.write_bytes(raw)
    with client.get(sample_identity()) as index:
        assert index.array("channels")[0] == 5
        assert index.path == str(tmp_path / "store" / copy.parent.name / copy.name)
    assert list(client.problems()) == []
    eventually(lambda: client.get(sample_identity()).path == str(copy))
    error = IndexCorrupt("an array", expected="a", found="b", remedy="c", path=copy)
    client.report(sample_identity(), error)
    assert list(client.problems()) == []
    assert client.contains(sample_identity())


def wait_for_files(folder: Path) -> list[Path]:
    eventually(lambda: any(folder.glob("*/*.pfxindex")))
    return list(folder.glob("*/*.pfxindex"))


def test_a_damaged_original_becomes_a_problem(client: StoreClient, tmp_path: Path) -> None:
    with serving(tmp_path / "2", fast_bytes=4096) as endpoint, StoreClient(endpoint) as client:
        client.put(sample_payload(fill=5))
        (file,) = (tmp_path / "2" / "store").glob("*/*.pfxindex")
        raw = bytearray(file.read_bytes())
        raw[70] ^= 1
        file.write_bytes(raw)
        with pytest.raises(IndexCorrupt, match="header entry checksum"):
            client.get(sample_identity())
        assert not client.contains(sample_identity())
        assert [p.path for p in client.problems()] == [str(file)]
        client.put(sample_payload(fill=6))
        assert list(client.problems()) == []
        assert client.contains(sample_identity())


def test_dram_contents_outlive_the_service(tmp_path: Path) -> None:
    with serving(tmp_path) as endpoint, StoreClient(endpoint) as client:
        client.put(sample_payload(fill=1))
        (copy,) = wait_for_files(tmp_path / "dram")
    inode = copy.stat().st_ino
    with serving(tmp_path) as endpoint, StoreClient(endpoint) as client, client.get(sample_identity()) as index:
        assert index.path == str(copy)
        assert copy.stat().st_ino == inode


def test_a_full_store_evicts_and_every_client_learns_of_it(tmp_path: Path) -> None:
    ids = [sample_identity(PROMPT[: 16 * n]) for n in range(1, 5)]
    with serving(tmp_path, max_bytes=3 * 45056) as endpoint, StoreClient(endpoint) as a, StoreClient(endpoint) as b:
        for identity in ids:
            a.put(sample_payload(identity))
            time.sleep(0.01)
        assert {e.identity.num_tokens for e in a.list()} == {32, 48, 64}
        b.rescan()
        assert a.list() == b.list()
        assert not b.contains(ids[0])
        with pytest.raises(StoreFull, match="index store: expected room for"):
            a.put(sample_payload(ids[0], values_per_array=1 << 18))
        assert len(a.list()) == 3
        a.check_integrity()


# ---- putting ----


def test_a_failed_put_leaves_no_partial_and_no_reservation(client: StoreClient, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("the GPU went away")

    payload = IndexPayload(sample_identity(), {ArrayKey("kv"): LazyArray("uint8", (1 << 20,), fail)})  # type: ignore[arg-type]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="the GPU went away"):
            client.put(payload)
    eventually(lambda: client.status().reservations == 0)
    assert not [p for p in (tmp_path / "store").glob("*/.*") if p.name.startswith(PARTIAL)]


def test_what_is_not_what_was_reserved_is_refused(client: StoreClient, tmp_path: Path) -> None:
    digest = sample_identity().digest
    big = sample_payload(sample_identity(PROMPT))

    def commit(partial: str, nbytes: int, inode: int) -> messages.Stored:
        request = messages.Commit(digest=digest, partial=partial, nbytes=nbytes, inode=inode)
        return client._ask(request, messages.Stored)

    reserved = client._ask(messages.Reserve(digest=digest, nbytes=45056), messages.Reserved)
    file = tmp_path / "store" / digest[:2] / reserved.partial
    assert (file.stat().st_size, stat.S_IMODE(file.stat().st_mode)) == (45056, 0o600)
    inode = file.stat().st_ino
    with pytest.raises(errors.IndexForeign, match="file type"):
        commit(reserved.partial, 45056, inode)
    with pytest.raises(IndexCorrupt, match="partial file's length: expected 4096 bytes, found 45056"):
        commit(reserved.partial, 4096, inode)
    with pytest.raises(IndexMismatch, match="partial file: expected the writer's own"):
        commit(reserved.partial, 45056, inode + 1)
    with pytest.raises(IndexNotFound, match="partial file"):
        commit(f"{PARTIAL}1-{'0' * 16}", 45056, inode)
    with FileStore(tmp_path / "other", create=True) as other:
        raw = Path(other.put(big).path or "").read_bytes()
    file.write_bytes(raw)
    with pytest.raises(IndexMismatch, match="identity digest"):
        commit(reserved.partial, len(raw), inode)
    for bad in ("../../etc/passwd", ".partial-1-/", digest + ".pfxindex", reserved.partial + "\n", ""):
        with pytest.raises(IndexStoreError, match="service message: expected one frame"):
            commit(bad, 45056, inode)
    assert list(client.list()) == []
    assert list(client.problems()) == []


def test_a_link_in_the_place_of_a_partial_file_is_not_followed(client: StoreClient, tmp_path: Path) -> None:
    digest = sample_identity().digest
    reserved = client._ask(messages.Reserve(digest=digest, nbytes=45056), messages.Reserved)
    file = tmp_path / "store" / digest[:2] / reserved.partial
    with FileStore(tmp_path / "other", create=True) as other:
        target = Path(other.put(sample_payload()).path or "")
    file.unlink()
    file.symlink_to(target)
    request = messages.Commit(digest=digest, partial=reserved.partial, nbytes=45056, inode=target.stat().st_ino)
    with pytest.raises(StoreFolderError):
        client._ask(request, messages.Stored)
    assert list(client.list()) == []


def test_a_commit_said_twice_is_one_commit(client: StoreClient, tmp_path: Path) -> None:
    client.put(sample_payload())
    digest = sample_identity().digest
    inode = (tmp_path / "store" / digest[:2] / f"{digest}.pfxindex").stat().st_ino
    request = messages.Commit(digest=digest, partial=f"{PARTIAL}1-{'0' * 16}", nbytes=45056, inode=inode)
    assert client._ask(request, messages.Stored).entry.identity == sample_identity()


def test_reservations_are_bounded(client: StoreClient) -> None:
    request = messages.Reserve(digest=sample_identity().digest, nbytes=4096)
    for _ in range(256):
        client._ask(request, messages.Reserved)
    with pytest.raises(StoreUnavailable, match="expected at most 256 indexes being written, found 256 already"):
        client._ask(request, messages.Reserved)


def test_an_embedded_writer_in_the_folder_is_seen_within_a_rescan(tmp_path: Path, process: Service) -> None:
    with StoreClient(process.endpoint) as client, FileStore(tmp_path / "store") as other:
        other.put(sample_payload(fill=3))
        eventually(lambda: client.rescan() or len(client.list()) == 1)  # type: ignore[func-returns-value]
        other.delete(sample_identity())
        with pytest.raises(IndexNotFound):
            client.get(sample_identity())
        eventually(lambda: client.rescan() or not client.list())  # type: ignore[func-returns-value]


# ---- listings ----


def test_a_long_listing_comes_in_pages_and_changes_come_alone(tmp_path: Path) -> None:
    payload = sample_payload()
    entry_of = {}
    with FileStore(tmp_path / "one", create=True) as store:
        entry = store.put(payload)
    log = ChangeLog()
    for n in range(2000):
        identity = sample_identity(range(n, n + 16))
        entry_of[identity.digest] = msgspec.structs.replace(entry, identity=identity)
        log.put(identity.digest, entry_of[identity.digest])
    seen, seq, pages, epoch = {}, 0, 0, "another"
    while True:
        delta = log.since(epoch, seq)
        assert delta.reset == (pages == 0)
        assert len(messages.encode(delta)) < messages.MAX_ANSWER_NBYTES // 2
        seen |= {e.identity.digest: e for e in delta.entries}
        epoch, seq, pages = delta.epoch, delta.seq, pages + 1
        if not delta.more:
            break
    assert seen.keys() == entry_of.keys()
    assert pages > 3
    gone = next(iter(entry_of))
    log.remove(gone)
    assert log.since(epoch, seq) == messages.Delta(epoch=epoch, seq=seq + 1, entries=[], removed=[gone])
    assert log.since(epoch, seq + 1).entries == []
    assert log.since(epoch, seq + 2).reset
    assert log.become({}, seq) is None
    assert len(log.become({}) or ()) == 1999


def test_removed_digests_are_forgotten_in_time_and_who_is_behind_starts_over(tmp_path: Path) -> None:
    with FileStore(tmp_path / "one", create=True) as store:
        entry = store.put(sample_payload())
    log = ChangeLog()
    for n in range(20_000):
        log.put(f"{n:064x}", entry)
        log.remove(f"{n:064x}")
    assert len(log._changed) <= 16_385
    assert len(log._log) <= 2 * 16_385 + 1025
    assert log.since(log.epoch, 3).reset
    assert not log.since(log.epoch, 39_990).reset


def test_two_clients_agree_after_a_rescan(endpoint: str) -> None:
    with StoreClient(endpoint) as a, StoreClient(endpoint) as b:
        for n in range(1, 5):
            a.put(sample_payload(sample_identity(PROMPT[: 16 * n])))
        assert list(b.list()) == []
        b.rescan()
        assert a.list() == b.list()
        a.delete(sample_identity(PROMPT))
        a.retain(sample_identity(PROMPT[:16]), Retention(pinned=True))
        b.rescan()
        assert a.list() == b.list()
        b.check_integrity()


# ---- errors over the wire ----

KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, IndexStoreError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_comes_back_as_its_class(kind: type[IndexStoreError]) -> None:
    for path in (None, "/a/b"):
        error = kind("w", expected="e", found="f", remedy="r", path=path)
        raw = messages.encode(messages.Failed(error=messages.error_text(error)))
        back = messages.error_of(messages.decode_answer(raw).error)  # type: ignore[union-attr]
        assert (type(back), str(back), back.path) == (kind, str(error), path)


def test_an_unknown_error_comes_back_as_the_base_class() -> None:
    for kind in ("FromTheFuture", "os", "IndexStoreError", "Path", ""):
        text = messages.ErrorText(kind=kind, what="w", expected="e", found="f", remedy="r")
        assert type(messages.error_of(text)) is IndexStoreError
    text = messages.error_text(ZeroDivisionError("division by zero"))
    assert str(messages.error_of(text)) == (
        "store service: expected an answer, found ZeroDivisionError: division by zero; "
        "this is a defect of the service: see its log"
    )


def test_an_error_with_an_undecodable_path_crosses() -> None:
    error = IndexCorrupt("w" * 10_000, expected="e", found="f", remedy="r", path="/a/\udcff")
    back = messages.error_of(messages.error_text(error))
    assert back.path == "/a/\\udcff"
    assert len(back.what) == messages.MAX_TEXT


# ---- when the service goes ----


def test_while_the_service_is_away(process: Service, tmp_path: Path) -> None:
    client = StoreClient(process.endpoint, timeout_s=0.3)
    with client:
        client.put(sample_payload(fill=7))
        process.kill()
        began = time.monotonic()
        for _ in range(3):
            with client.get(sample_identity()) as index:
                assert index.array("channels")[0] == 7
        assert time.monotonic() - began < 0.25
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
        assert time.monotonic() - began < 5.0
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
    with StoreClient(process.endpoint, timeout_s=0.3) as client:
        client.put(sample_payload(), retention=Retention(expires=time.time() + 1.0))
        process.kill()
        assert client.contains(sample_identity())
        time.sleep(1.0)
        with pytest.raises(StoreUnavailable):
            client.get(sample_identity())


def test_a_restarted_service_gives_the_whole_listing_again(process: Service, tmp_path: Path) -> None:
    with StoreClient(process.endpoint) as client:
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
    with StoreClient(process.endpoint, timeout_s=0.5, slow_timeout_s=1.0) as client:
        client.put(sample_payload(fill=9))
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"none within 0.5 s"):
            client.rescan()
        assert 0.4 < time.monotonic() - began < 1.5
        began = time.monotonic()
        for _ in range(20):
            with client.get(sample_identity()) as index:
                assert index.array("channels")[0] == 9
        assert time.monotonic() - began < 1.5
        os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: rescans(client))
        client.put(sample_payload(fill=10))  # late answers to earlier calls are nobody's
        with client.get(sample_identity()) as index:
            assert index.array("channels")[0] == 10


def test_no_service_at_all(tmp_path: Path) -> None:
    client = StoreClient(f"ipc://{tmp_path}/none", timeout_s=0.2)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"no service within 0.2 s; start `sglang-ext store serve`"):
        client.open()
    assert time.monotonic() - began < 2.0
    with pytest.raises(StoreClosed):
        client.list()


def test_the_folder_goes_and_comes_back(process: Service, tmp_path: Path) -> None:
    with StoreClient(process.endpoint) as client:
        client.put(sample_payload(fill=1))
        shutil.rmtree(tmp_path / "store")
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
    client = StoreClient(process.endpoint, timeout_s=30.0)
    client.open()
    os.kill(process.pid, signal.SIGSTOP)
    caught: list[Exception] = []

    def ask() -> None:
        try:
            client.rescan()
        except IndexStoreError as err:
            caught.append(err)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.1)
    client.close()
    thread.join(5.0)
    assert not thread.is_alive()
    assert isinstance(caught[0], StoreClosed)
    os.kill(process.pid, signal.SIGCONT)
    path = socket_path(process.endpoint)
    assert path.exists()
    assert process.stop() == 0
    assert not path.exists()
    process.start()


# ---- processes and threads ----


def test_a_forked_child_must_open_anew(process: Service) -> None:
    client = StoreClient(process.endpoint)
    client.open()
    client.put(sample_payload(fill=4))

    def child() -> None:
        with pytest.raises(StoreClosed, match=r"expected a client opened by this process, .* in this process"):
            client.get(sample_identity())
        client.open()
        with client.get(sample_identity()) as index:
            assert index.array("channels")[0] == 4
        client.close()

    assert reap(fork(child), 20.0) == 0
    with client.get(sample_identity()) as index:
        assert index.array("channels")[0] == 4
    client.close()


def test_more_threads_than_connections(client: StoreClient) -> None:
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
        thread.join(60)
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
    client.put(sample_payload(sample_identity(PROMPT)))
    adopt = ServedFolder.adopt

    def slow(*args: object) -> object:
        time.sleep(0.7)
        return adopt(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(ServedFolder, "adopt", slow)
    thread = threading.Thread(target=lambda: client.put(sample_payload()))
    thread.start()
    time.sleep(0.1)
    slowest = 0.0
    while thread.is_alive():
        began = time.monotonic()
        client.get(sample_identity(PROMPT)).close()
        client.rescan()
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 0.4


def test_a_service_with_no_free_worker_says_so(tmp_path: Path) -> None:
    limits = Limits(jobs=0)
    with own_server(tmp_path, limits) as endpoint, StoreClient(endpoint) as client:
        with pytest.raises(StoreUnavailable, match="expected a free worker, found 0 requests in work"):
            client.put(sample_payload())
        assert list(client.list()) == []


def test_a_forgotten_connection_says_hello_again(tmp_path: Path) -> None:
    with own_server(tmp_path, Limits(clients=1)) as endpoint, StoreClient(endpoint) as a, StoreClient(endpoint) as b:
        for client in (a, b, a, b):
            client.put(sample_payload())
            client.rescan()
        assert len(a.status().clients) == 1


@contextlib.contextmanager
def own_server(tmp_path: Path, limits: Limits) -> Iterator[str]:
    (tmp_path / "run").mkdir(mode=0o700)
    endpoint = f"ipc://{tmp_path}/run/s"
    server = StoreServer(Depot(ServedFolder(tmp_path / "store", create=True)), endpoint, limits)
    server.open()
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield endpoint
    finally:
        server.stop()
        thread.join()
        server.close()


# ---- the socket ----


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "tcp://*:5555", "udp://x", "ws://x"])
def test_network_endpoints_are_refused_by_name(endpoint: str) -> None:
    with pytest.raises(InvalidPayload, match="a network address: the service knows no authentication"):
        StoreClient(endpoint)
    with pytest.raises(InvalidPayload, match="expected a Unix socket"):
        socket_path(endpoint)


@pytest.mark.parametrize(
    "endpoint", ["", "ipc://", "ipc://relative", "ipc://@abstract", "ipc:///a/", "/a/b", "ipc:///a\n"]
)
def test_only_absolute_socket_paths(endpoint: str) -> None:
    with pytest.raises(InvalidPayload, match="service endpoint: expected ipc:// and an absolute path"):
        socket_path(endpoint)


def test_too_long_a_path() -> None:
    with pytest.raises(InvalidPayload, match="expected a path of at most 107 bytes, found 201 bytes"):
        socket_path("ipc:///" + "a" * 200)


def test_a_place_that_cannot_be_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SocketPlace, "take", lambda self: None)
    server = StoreServer(Depot(ServedFolder(tmp_path / "store", create=True)), f"ipc://{tmp_path}/none/s")
    with pytest.raises(
        StoreFolderError, match="service socket: expected a place that can be bound, found No such file"
    ):
        server.open()
    server.close()


def test_a_folder_that_cannot_be_told_to_clients(tmp_path: Path) -> None:
    depot = Depot(ServedFolder(tmp_path / "a\nb", create=True))
    with pytest.raises(StoreFolderError, match="index store: expected a printable path"):
        depot.open()


def test_the_socket_is_its_owners_alone(tmp_path: Path) -> None:
    with own_server(tmp_path, Limits()) as endpoint:
        assert stat.S_IMODE(socket_path(endpoint).stat().st_mode) == 0o600


def test_an_open_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(StoreFolderError, match=r"socket's folder: expected mode 0700 .* chmod 700"):
        SocketPlace(tmp_path / "open" / "s").take()
    (tmp_path / "file").touch()
    with pytest.raises(StoreFolderError, match="expected a usable folder"):
        SocketPlace(tmp_path / "file" / "s").take()


def test_a_live_service_keeps_its_socket_and_a_dead_ones_is_replaced(process: Service, tmp_path: Path) -> None:
    path = socket_path(process.endpoint)
    with pytest.raises(StoreFolderError, match=f"expected no running service, found process {process.pid}"):
        SocketPlace(path).take()
    process.kill()
    assert path.exists()
    assert process.start()
    with StoreClient(process.endpoint) as client:
        client.put(sample_payload())


def test_a_file_in_the_sockets_place_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "s").write_text("mine")
    with pytest.raises(StoreFolderError, match="expected a socket or nothing, found another file"):
        SocketPlace(tmp_path / "run" / "s").take()
    assert (tmp_path / "run" / "s").read_text() == "mine"
    (tmp_path / "run" / "s").unlink()
    place = SocketPlace(tmp_path / "run" / "s")
    place.take()
    place.give_back()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_somebody_elses_socket_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "s").touch()
    os.chown(tmp_path / "s", 12345, -1)
    with pytest.raises(StoreFolderError, match="service socket: expected owner 0, found owner 12345"):
        StoreClient(f"ipc://{tmp_path}/s").open()


def test_a_client_of_another_protocol_version_is_told(endpoint: str) -> None:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    try:
        socket.send(b"12345678" + messages.encode(messages.Hello(version=99, pid=1)))
        assert socket.poll(5000)
        answer = socket.recv()
        assert answer[:8] == b"12345678"
        failed = messages.decode_answer(answer[8:])
        assert isinstance(failed, messages.Failed)
        error = messages.error_of(failed.error)
        assert isinstance(error, StoreUnavailable)
        assert "expected protocol version 1, found version 99" in str(error)
        socket.send(b"12345679" + messages.encode(messages.Ping()))
        assert socket.poll(5000)
        assert isinstance(messages.decode_answer(socket.recv()[8:]), messages.HelloFirst)
    finally:
        socket.close(linger=0)


# ---- the command ----


def test_the_command_serves_and_tells(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    endpoint = f"ipc://{tmp_path}/run/s"
    command = [sys.executable, "-m", "sglang_ext.cli", "store"]
    flags = [
        "--dir",
        tmp_path / "store",
        "--memory-bytes",
        "1M",
        "--memory-dir",
        tmp_path / "dram",
        "--max-bytes",
        "1G",
    ]
    served = subprocess.Popen([*command, "serve", *flags, "--endpoint", endpoint], stderr=subprocess.PIPE, text=True)
    try:
        with StoreClient(endpoint, timeout_s=30.0, name="test") as client:
            client.put(sample_payload())
            lease = client.lease(sample_identity(PROMPT))
            assert lease is not None
            told = subprocess.run(
                [*command, "status", "--endpoint", endpoint, "--json"], capture_output=True, check=True
            )
            status = msgspec.json.decode(told.stdout, type=messages.Status)
            assert (status.pid, status.indexes) == (served.pid, 1)
            assert [(t.name, t.max_bytes) for t in status.tiers] == [("dram", 1 << 20), ("ssd", 1 << 30)]
            assert status.leases == [sample_identity(PROMPT).digest]
            assert any("(test)" in text for text in status.clients)
            shown = subprocess.run(
                [*command, "status", "--endpoint", endpoint], capture_output=True, text=True, check=True
            )
            assert f"pid {served.pid}" in shown.stdout
            assert "1 leases held" in shown.stdout
            again = subprocess.run(
                [*command, "serve", *flags, "--endpoint", endpoint], capture_output=True, text=True, check=False
            )
            assert (again.returncode, "expected no running service" in again.stderr) == (1, True)
        served.send_signal(signal.SIGTERM)
        _, said = served.communicate(timeout=20)
        assert served.returncode == 0
        assert "store INFO serves" in said
        assert "ends after" in said
        assert "Traceback" not in said
    finally:
        served.kill()
        served.wait()
    missing = subprocess.run([*command, "status", "--endpoint", endpoint], capture_output=True, text=True, check=False)
    assert missing.returncode == 1
    assert "start `sglang-ext store serve`" in missing.stderr


class ServiceMachine(StoreMachine):
    """One client of a service with both tiers, against the dictionary; a second client sees the same."""

    def make(self) -> StoreClient:
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.context = serving(Path(self.folder.name))
        endpoint = self.context.__enter__()
        self.other = StoreClient(endpoint)
        self.other.open()
        return StoreClient(endpoint)

    def teardown(self) -> None:
        self.other.rescan()
        assert self.other.list() == self.store.list()
        self.other.close()
        super().teardown()
        self.context.__exit__(None, None, None)
        self.folder.cleanup()

    def reopen(self) -> None:
        """Nothing is lost with a client."""


TestServiceMachine = ServiceMachine.TestCase
TestServiceMachine.settings = settings(STEPS, max_examples=10)


def test_arrays_of_a_megabyte(client: StoreClient) -> None:
    values = np.random.default_rng(1).integers(0, 255, 1 << 20, dtype=np.uint8)
    client.put(IndexPayload(sample_identity(), {ArrayKey("kv"): values}))
    with client.get(sample_identity()) as index:
        assert np.array_equal(index.array("kv"), values)
        copy = index.payload()
        client.put(copy)
