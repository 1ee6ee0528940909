"""The remote tier over object stores: obstore's local and memory stores, moto's S3 server over real sockets. Damage,
edges, several machines, their leases, writers that are killed; stores that do not answer or say absurd things; and a
machine that lacks what asking takes. And over a real Mooncake: ``mooncake_cases.py``, in a network namespace.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from prefix_index import (
    IndexCorrupt,
    IndexForeign,
    IndexFormatError,
    IndexNotFound,
    IndexTooNew,
    InvalidPayload,
    OutOfMemory,
    Retention,
    StoreUnavailable,
    link,
)
from prefix_index.remote import BlobMissing, BlobsFailed, MooncakeBlobs, ObjectBlobs, RemoteStore
from prefix_index.remote import store as remote_store
from prefix_index.remote.values import CHUNK, HEADER, LEASE, LEASES, Calls, unpack_record, value_header
from prefix_index.store import Catalog
from tests.prefix_index import mooncake_cluster
from tests.prefix_index.remote_stores import (
    CHUNK_NBYTES,
    DIGEST,
    LONG,
    MANIFEST,
    OBJECT_STORE_NAMES,
    OBJECT_STORES,
    Make,
    Shaky,
    check_values,
    chunks_of,
    damage,
    file_blobs,
    flip_bit,
    forge_manifest,
    killed_writers,
    machine,
)
from tests.prefix_index.samples import read_fill, sample_identity, sample_payload
from tests.prefix_index.small_stores import SOON, Clock, balanced, in_threads, of_version, python, refused
from tests.prefix_index.tiers import eventually, set_credentials


@pytest.fixture(params=OBJECT_STORE_NAMES)
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectBlobs]:
    made = OBJECT_STORES[request.param](tmp_path)
    made.open(60)
    yield made
    made.close()


@pytest.fixture
def store(objects: ObjectBlobs) -> Iterator[RemoteStore]:
    with machine(objects) as store:
        yield store


def test_values(objects: ObjectBlobs) -> None:
    check_values(objects, "a")
    assert objects.create("a/x", memoryview(b"one")) is True
    assert objects.create("a/x", memoryview(b"two")) is False
    assert objects.fetch("a/x", 10) == b"one"
    before = objects.names("a")
    objects.write("a/x", memoryview(b"three"))
    assert objects.names("a").keys() == before.keys()
    assert objects.names("a") != before


def test_every_bit_of_a_chunk_header_and_of_the_manifest_counts(tmp_path: Path) -> None:
    objects = file_blobs(tmp_path)
    with machine(objects) as store:
        store.put(sample_payload())
        tried = 0
        for name, bits in (
            (chunks_of(objects)[0], range(HEADER.size * 8)),
            (MANIFEST, range(0, objects.size(MANIFEST) * 8, 11)),
            (chunks_of(objects)[1], range(HEADER.size * 8, objects.size(chunks_of(objects)[1]) * 8, 8009)),
        ):
            for bit in bits:
                damage(objects, name, flip_bit(bit))
                with pytest.raises(IndexFormatError):
                    store.get(DIGEST)
                damage(objects, name, flip_bit(bit))
                tried += 1
        assert tried > 900
        with store.get(DIGEST) as index:
            index.verify()


def test_chunks_that_belong_elsewhere(store: RemoteStore, objects: ObjectBlobs) -> None:
    store.put(sample_payload(fill=1))
    store.put(sample_payload(sample_identity(range(64)), fill=2))
    mine, others = chunks_of(objects), chunks_of(objects, sample_identity(range(64)).digest)
    values = {name: objects.fetch(name, 1 << 20) for name in (*mine, others[1], MANIFEST)}
    body = values[mine[1]][HEADER.size :]
    older = value_header(CHUNK, DIGEST, "0" * 16, 1, body) + body
    swaps = ((mine[1], values[mine[0]]), (mine[1], values[others[1]]), (mine[0], values[MANIFEST]), (mine[1], older))
    for name, other in swaps:
        objects.write(name, memoryview(other))
        with pytest.raises(IndexCorrupt, match=r"\(kind, index, digest, generation, length, xxh3\) of chunk \d: exp"):
            store.get(DIGEST)
        objects.write(name, memoryview(values[name]))
    store.get(DIGEST).verify()
    objects.write(MANIFEST, memoryview(objects.fetch(MANIFEST.replace(DIGEST, others[0].split("/")[1][:64]), 1 << 20)))
    with pytest.raises(IndexCorrupt, match="of manifest: expected"):
        store.get(DIGEST)


def test_a_newer_version_and_somebody_elses_value(store: RemoteStore, objects: ObjectBlobs) -> None:
    store.put(sample_payload())
    objects.write(MANIFEST, memoryview(of_version(2, objects.fetch(MANIFEST, 1 << 20))))
    with pytest.raises(IndexTooNew, match=r"version of manifest: expected at most 1, found 2 \(written by a newer"):
        store.get(DIGEST)
    assert not store.put(sample_payload()), "a newer version's stays"
    objects.write(MANIFEST, memoryview(b"GIF89a and so on, for a good many bytes, more than there are in a header"))
    with pytest.raises(IndexForeign, match="manifest type: expected a prefix index"):
        store.get(DIGEST)
    assert store.delete(DIGEST)
    assert MANIFEST not in objects.names("prefix_index"), "its chunks are for sweep()"


def test_a_manifest_with_more_fields_is_read(store: RemoteStore, objects: ObjectBlobs) -> None:
    """It had the retention, too."""
    store.put(sample_payload())
    forge_manifest(objects, retention={"pinned": True})
    store.get(DIGEST).verify()
    assert [entry.retention for entry in store.list()] == [Retention()]


def test_a_manifest_that_speaks_of_something_else(store: RemoteStore, objects: ObjectBlobs) -> None:
    store.put(sample_payload())
    true, identity = objects.fetch(MANIFEST, 1 << 20), msgspec.to_builtins(sample_identity(range(64)))
    info = msgspec.to_builtins(sample_payload().info)
    for wrong in ({"generation": "0" * 16}, {"entry": {"identity": identity, "info": info}}):
        objects.write(MANIFEST, memoryview(true))
        forge_manifest(objects, **wrong)
        with pytest.raises(IndexCorrupt, match="identity digest and generation: expected"):
            store.get(DIGEST)


def test_a_manifest_too_long_is_not_read(tmp_path: Path) -> None:
    objects = file_blobs(tmp_path)
    with machine(objects) as store:
        objects.write(MANIFEST, memoryview(bytes(5 << 20)))
        with pytest.raises(IndexCorrupt, match="manifest: expected at most 4194304 bytes, found 5242880 bytes"):
            store.get(DIGEST)


def test_lost_chunks_are_a_miss_and_then_garbage(store: RemoteStore, objects: ObjectBlobs) -> None:
    store.put(sample_payload())
    store.put(sample_payload(sample_identity(range(64))))
    objects.delete(chunks_of(objects)[1])
    with pytest.raises(IndexNotFound, match=r"index: expected .*, found chunk 1 gone \(evicted"):
        store.get(DIGEST)
    assert not store.contains(DIGEST)
    store.rescan()
    assert [e.digest for e in store.list()] == [sample_identity(range(64)).digest]
    assert "2 of its 3 chunks" in str(store.problems()[0].error)
    balanced(store)
    store.sweep()
    assert list(store.problems()) == []
    assert chunks_of(objects) == []


def test_a_full_disk_is_a_full_store(tmp_path: Path) -> None:
    """As a disk says it, through obstore: a limit on the size of this process's files."""
    code = (
        "import resource, signal, sys; from prefix_index import StoreFull; from prefix_index.remote import *\n"
        "from tests.prefix_index.samples import *\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "store = RemoteStore(ObjectBlobs(sys.argv[1])); store.open()\n"
        "store.put(sample_payload(fill=1))\n"
        "no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, no_limit[1]))\n"
        "try: store.put(sample_payload(sample_identity(range(64))))\n"
        "except StoreFull as err: print('full', err)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)\n"
        "print(int(store.get(sample_identity()).array('channels')[0]), len(store.problems()))\n"
    )
    with python(code, (tmp_path / "o").as_uri()) as process:
        told, _ = process.communicate()
    assert told.startswith("full file://")
    assert "expected room for the index, found" in told
    assert told.endswith("1 0\n")


def test_credentials_show_nowhere() -> None:
    assert ObjectBlobs("s3://key:secret@bucket/x?token=hidden").name == "s3://bucket/x"
    objects = ObjectBlobs("s3://bucket/x", no_such_option="hidden-value")
    with pytest.raises(BlobsFailed) as caught:
        objects.open(1)
    assert "hidden-value" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("full", [False, True])
def test_a_listing_that_took_long_does_not_undo_what_happened_meanwhile(full: bool) -> None:
    class Slow(ObjectBlobs):
        """While the names come in, this process goes on."""

        meanwhile: Callable[[], object] | None = None

        def names(self, folder: str) -> Any:
            names = super().names(folder)
            call, self.meanwhile = self.meanwhile, None
            if call is not None:
                call()
            return names

    objects = Slow("memory:///")
    with machine(objects) as store:
        objects.meanwhile = lambda: store.put(sample_payload())
        store.rescan(full=full)
        assert [e.digest for e in store.list()] == [DIGEST]
        objects.meanwhile = lambda: store.delete(DIGEST)
        store.rescan(full=full)
        assert list(store.list()) == list(store.problems()) == []
        balanced(store)


def test_two_writers_of_one_key_on_two_machines(tmp_path: Path) -> None:
    """The first index stays, whole, and nothing of the other one."""
    objects = file_blobs(tmp_path)
    with machine(objects) as one, machine(objects) as two:
        for turn in range(10):
            put: dict[int, bool] = {}

            def write(i: int, put: dict[int, bool] = put) -> None:
                put[i] = (one, two)[i].put(sample_payload(fill=i + 1))

            in_threads(partial(write, 0), partial(write, 1))
            assert sorted(put.values()) == [False, True]
            assert len(chunks_of(objects)) == 3
            for store in (one, two):
                with store.get(DIGEST) as index:
                    index.verify()
                    assert put[int(index.array("channels")[0]) - 1]
            assert (one, two)[turn % 2].delete(DIGEST)


def test_readers_under_a_writer_on_another_machine(tmp_path: Path) -> None:
    objects = file_blobs(tmp_path)
    with machine(objects) as writer, machine(objects) as reader:
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                with contextlib.suppress(IndexNotFound), reader.get(DIGEST) as index:
                    assert index.stats == {"fill": int(index.array("channels")[0])}
                    index.verify()
                reader.rescan()

        def write() -> None:
            try:
                for fill in range(1, 40):
                    assert writer.put(sample_payload(fill=fill))
                    assert writer.delete(DIGEST)
            finally:
                done.set()

        in_threads(write, read, read, read)


def test_sweep_leaves_a_put_under_way_alone(tmp_path: Path) -> None:
    """By the writer's clock; one that ran backwards only keeps garbage longer."""
    objects = file_blobs(tmp_path)
    objects.open(5)
    clock = Clock()
    with machine(objects, grace_s=100, clock=clock) as store:
        store.put(sample_payload())
        for age, kept in ((0, True), (99, True), (101, False), (-1e6, True)):
            generation = f"{int(clock.now - age):08x}00000000"
            name = f"prefix_index/{DIGEST}.{generation}.000000"
            objects.write(name, memoryview(b"x"))
            store.sweep()
            assert (name in objects.names("prefix_index")) == kept
        with store.get(DIGEST) as index:
            index.verify()


def test_a_writer_killed_at_any_moment_leaves_an_index_or_none(tmp_path: Path) -> None:
    """Processes put and delete in a loop and are killed; what is there afterwards is always whole."""
    objects = file_blobs(tmp_path)
    with machine(objects) as store:
        for _ in killed_writers(8, store, "ObjectBlobs(sys.argv[1])", (tmp_path / "objects").as_uri()):
            store.rescan()
            assert list(store.problems()) == []
        store.put(sample_payload())
    with machine(objects, grace_s=-10) as store:
        store.sweep()
        (entry,) = store.list()
        assert len(chunks_of(objects)) in (3, -(-entry.nbytes // 4096))
        read_fill(store)


def test_a_lease_outlives_its_time_only_while_its_holder_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of this machine that the test sets: how soon the holder gets its turn does not matter."""
    objects, clock = file_blobs(tmp_path), Clock()
    monkeypatch.setattr(remote_store, "time", SimpleNamespace(time=clock))
    code = (
        "import sys, time; from prefix_index.remote import *\n"
        "store = RemoteStore(ObjectBlobs(sys.argv[1]), lease_ttl_s=0.6); store.open()\n"
        "lease = store.lease(sys.argv[2]); print(lease is not None, flush=True); time.sleep(600)\n"
    )

    def expires() -> float:
        return unpack_record(LEASE, DIGEST, objects.fetch(f"prefix_index/{DIGEST}.lease", 1 << 20), LEASES)[1].expires

    with machine(objects, lease_ttl_s=0.6, grace_s=0) as store:
        with python(code, (tmp_path / "objects").as_uri(), DIGEST) as holder:
            try:
                assert holder.stdout is not None
                assert holder.stdout.readline() == "True\n"
                first, deadline = expires(), time.monotonic() + 60
                while expires() == first:
                    assert time.monotonic() < deadline, "the holder does not renew it"
                    time.sleep(0.05)
                os.kill(holder.pid, signal.SIGSTOP)
                os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
                last = expires()
                clock.now = last - 0.001
                assert clock.now > first
                assert store.lease(DIGEST) is None
            finally:
                holder.kill()
        clock.now = last
        lease = store.lease(DIGEST)
        assert lease is not None
        lease.release()


def test_a_broken_or_absurd_lease_stops_nobody(tmp_path: Path) -> None:
    objects = file_blobs(tmp_path)
    with machine(objects, grace_s=0) as store:
        objects.write(f"prefix_index/{DIGEST}.lease", memoryview(b"garbage"))
        with store.lease(DIGEST) or pytest.fail("held"):
            pass
        objects.write(f"prefix_index/{DIGEST}.lease", memoryview(b"garbage"))
        store.sweep()
        assert objects.names("prefix_index") == {}


def test_a_forgotten_lease_ends(tmp_path: Path) -> None:
    with machine(file_blobs(tmp_path), lease_ttl_s=3600) as store:
        store.lease(DIGEST)
        eventually(lambda: store.lease(DIGEST))


def test_a_lease_that_gets_no_thread_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread, real: Any = threading.Thread.start) -> None:
        if thread.name == "build lease":
            raise RuntimeError("can't start new thread")
        real(thread)

    with machine(file_blobs(tmp_path), lease_ttl_s=3600) as store, machine(file_blobs(tmp_path)) as other:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises(OutOfMemory, match="a thread for the lease, found can't start new thread"):
                store.lease(DIGEST)
        assert other.lease(DIGEST) is not None


@pytest.fixture
def silent() -> Iterator[ObjectBlobs]:
    """An S3 endpoint that takes connections and never says a word."""
    set_credentials()
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        yield ObjectBlobs("s3://bucket/x", endpoint=endpoint, region="r", client_options={"allow_http": True})


def test_nobody_waits_for_a_silent_store(silent: ObjectBlobs) -> None:
    silent.open(3.0)  # the client's own limit is far behind the store's, so that it is the store's that is met
    store = RemoteStore(silent, timeout_s=0.3)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"x: expected an answer within 0.3 s, found none; check"):
            store.open()
        eventually(lambda: is_idle(store._calls), 25)  # without its limit the client asks for half a minute or more


def is_idle(calls: Calls) -> bool:
    try:
        calls.check_idle()
    except StoreUnavailable:
        return False
    return True


def test_a_store_that_stops_answering(blobs: Shaky) -> None:
    with RemoteStore(blobs, chunk_nbytes=CHUNK_NBYTES, timeout_s=SOON) as store:
        store.put(sample_payload(fill=1))
        blobs.answers.clear()
        store._calls.timeout_s = 0.2
        asked = time.monotonic()
        calls: list[Callable[[], object]] = [
            lambda: store.get(DIGEST),
            lambda: store.put(sample_payload(sample_identity(LONG))),
            lambda: store.delete(DIGEST),
            lambda: store.lease(DIGEST),
            store.rescan,
            store.sweep,
        ]
        for call in calls:
            with pytest.raises(StoreUnavailable):
                call()
        assert not store.contains(DIGEST)
        assert time.monotonic() - asked < SOON / 2
        assert [e.digest for e in store.list()] == [DIGEST]  # a look-up asks nobody
        blobs.answers.set()
        store._calls.timeout_s = SOON
        eventually(lambda: read_fill(store, DIGEST) == 1, but=(StoreUnavailable,))


def test_a_refused_connection_says_so() -> None:
    set_credentials()
    blobs = ObjectBlobs("s3://b/x", endpoint="http://127.0.0.1:1", region="r", client_options={"allow_http": True})
    with pytest.raises(StoreUnavailable, match="s3://b/x: expected the request done, found GenericError"):
        RemoteStore(blobs, timeout_s=60).open()
    with pytest.raises(BlobsFailed, match="GenericError"):
        blobs.create("a", memoryview(b"a"))


def test_a_call_that_overran_keeps_the_client_open_until_it_is_back() -> None:
    calls = Calls("a store", timeout_s=0.2)
    release, order = threading.Event(), []

    def hang() -> None:
        release.wait(60)
        order.append("call")

    with pytest.raises(StoreUnavailable, match=r"a store: expected an answer within 0.2 s, found none; check"):
        calls.run_all([hang])
    calls.timeout_s = 60.0
    assert calls.run_all([lambda: 1]) == [1]
    calls.timeout_s = 0.2
    calls.close(lambda: order.append("closed"))
    assert order == []
    with pytest.raises(StoreUnavailable, match="found one that is being closed"):
        calls.check_idle()
    for _ in range(20):  # more than can be under way: none of these takes the place of one that could
        with pytest.raises(StoreUnavailable, match="found one that is being closed"):
            calls.run_all([lambda: 2])
    release.set()
    eventually(lambda: is_idle(calls))
    assert order == ["call", "closed"]


def test_results_come_in_order_and_an_error_waits_for_the_calls_under_way_and_begins_no_other() -> None:
    calls, begun, ended = Calls("a store", timeout_s=60.0), threading.Event(), list[str]()
    assert calls.run_all([lambda i=i: i * i for i in range(20)]) == [i * i for i in range(20)]  # type: ignore[misc]

    def fail() -> None:
        begun.wait(60)
        raise ValueError("no")

    def slow() -> None:
        begun.set()
        time.sleep(0.2)
        ended.append("slow")

    with pytest.raises(ValueError, match="no"):
        calls.run_all([fail, slow, *[lambda: None] * 2, *[lambda: ended.append("late")] * 9])
    assert ended == ["slow"]
    calls.close(lambda: None)


def test_more_calls_hang_than_can_be_under_way() -> None:
    calls, release = Calls("a store", timeout_s=0.05), threading.Event()
    for _ in range(20):
        with pytest.raises(StoreUnavailable, match="found none; check"):
            calls.run_all([lambda: release.wait(60)])
    release.set()
    calls.timeout_s = 60.0
    assert calls.run_all([lambda: 1]) == [1]


# What a store says of sizes is not believed, and what this machine lacks is not the store's fault


@pytest.mark.parametrize("nbytes", [1 << 46, 1 << 62, 1 << 64, 1 << 40], ids=hex)
def test_an_index_of_absurd_length_is_damaged_and_the_others_are_served(
    make: Make, blobs: Shaky, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RemoteStore(blobs) as other:
        other.put(sample_payload())
        other.put(sample_payload(sample_identity(LONG), fill=7))
        forge_manifest(blobs, nbytes=nbytes, chunk_nbytes=nbytes)
    store = make("a")
    monkeypatch.setattr(link, "FIRST_AWAY_S", 60.0)
    listed = DIGEST in {entry.digest for entry in store.list()}
    assert listed == (nbytes <= 1 << 46), "more than any container has is refused before anybody asks for it"
    with pytest.raises(IndexCorrupt):
        store.get(DIGEST)
    assert read_fill(store, sample_identity(LONG)) == 7, "the remote store is asked as before"
    assert [problem.path for problem in store.problems()] == [DIGEST]


@pytest.mark.parametrize("call", ["memfd_create", "pwrite"])
def test_no_memory_here_is_not_an_absent_store(
    make: Make, blobs: Shaky, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RemoteStore(blobs) as other:
        other.put(sample_payload(fill=3))
    store = make("a")
    monkeypatch.setattr(link, "FIRST_AWAY_S", 60.0)
    with refused(call, error=errno.ENOMEM), pytest.raises(OutOfMemory, match="free memory") as raised:
        store.get(DIGEST)
    assert raised.value.reason == "index_memory"
    assert read_fill(store) == 3
    assert list(store.problems()) == []


def test_no_thread_for_a_request_is_no_absent_store_either(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("a store", timeout_s=5)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        for _ in range(40):  # more than can be under way
            with pytest.raises(OutOfMemory, match="can't start new thread"):
                calls.run_all([lambda: 1])
    assert calls.run_all([lambda: 2]) == [2]
    calls.close(lambda: None)


@pytest.mark.parametrize(
    ("error", "local"),
    [(MemoryError(), True), (OSError(errno.EMFILE, "Too many open files"), True), (KeyError("a defect"), False)],
    ids=repr,
)
def test_a_call_that_this_process_could_not_make_closes_no_tier(error: Exception, local: bool) -> None:
    one = link.Link(RemoteStore(ObjectBlobs("memory:///")), Catalog())
    one.is_open = True
    with pytest.raises(Exception) as raised:  # noqa: PT011
        one.ask(Mock(side_effect=error))
    assert isinstance(raised.value, OutOfMemory) == local
    assert one.is_away() is not local


HERE = Path(__file__).parent


@pytest.mark.full
@pytest.mark.skipif(mooncake_cluster.why_not() is not None, reason=str(mooncake_cluster.why_not()))
def test_everything_over_mooncake_in_a_network_namespace(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--hypothesis-profile=full"]
    command += ["-k", "mooncake", f"--junitxml={report}"]
    modules = ("mooncake_cases.py", "test_index_stores.py")
    command += [*(str(HERE / name) for name in modules), "--durations=8"]
    done = mooncake_cluster.run_inside(command, timeout_s=800)
    assert done.returncode == 0, done.stdout[-20_000:]
    suites = ET.parse(report).getroot().findall("testsuite")
    count = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "skipped", "failures")}
    print(done.stdout[-2000:])
    assert count["tests"] >= 25
    assert count["skipped"] == count["failures"] == 0


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(BlobsFailed, match=r"mooncake.store.*: install mooncake-transfer-engine and libibverbs1"):
        MooncakeBlobs("127.0.0.1:1", host="127.0.0.1").open(1)


@pytest.mark.parametrize(("code", "error"), [(-704, BlobMissing), (-707, BlobMissing), (-800, BlobsFailed)])
def test_a_value_that_is_gone_before_it_is_read_or_meanwhile_is_a_miss(code: int, error: type[Exception]) -> None:
    blobs = MooncakeBlobs("127.0.0.1:1")
    registering = {"register_buffer": lambda *_: 0, "unregister_buffer": lambda _: 0}
    blobs._client = SimpleNamespace(get_size=lambda _: 4, get_into=lambda *_: code, **registering)
    with pytest.raises(error):
        blobs.fetch("a", 10)


@pytest.mark.parametrize("master", ["", "host", "host:", ":50051", "host:port"])
def test_a_master_without_host_or_port(master: str) -> None:
    with pytest.raises(InvalidPayload, match=r"Mooncake master: expected host:port, found "):
        MooncakeBlobs(master)
