"""Remote stores that do not answer, or say absurd things, and a machine that lacks what asking takes. And a real
Mooncake: the conformance suite and ``mooncake_cases.py``, in a network namespace.
"""

from __future__ import annotations

import errno
import socket
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from prefix_index import IndexCorrupt, InvalidPayload, OutOfMemory, StoreUnavailable, link
from prefix_index.remote import BlobMissing, BlobsFailed, MooncakeBlobs, ObjectBlobs, RemoteStore
from prefix_index.remote.values import Calls
from prefix_index.store import Catalog
from tests.prefix_index import mooncake_cluster
from tests.prefix_index.remote_stores import CHUNK_NBYTES, DIGEST, LONG, Make, Shaky, forge_manifest
from tests.prefix_index.samples import read_fill, sample_identity, sample_payload
from tests.prefix_index.small_stores import SOON, refused
from tests.prefix_index.tiers import eventually, set_credentials


@pytest.fixture
def silent() -> Iterator[ObjectBlobs]:
    """An S3 endpoint that takes connections and never says a word."""
    set_credentials()
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        yield ObjectBlobs("s3://bucket/x", endpoint=endpoint, region="r", client_options={"allow_http": True})


def test_nobody_waits_for_a_silent_store(silent: ObjectBlobs) -> None:
    silent.open(1.0)  # the client's own limit is far behind the store's, so that it is the store's that is met
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
