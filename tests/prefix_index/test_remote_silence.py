"""Object stores that do not answer, or say absurd things, and a machine that lacks what asking takes."""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefix_index import IndexCorrupt, OutOfMemory, StoreUnavailable, link
from prefix_index.remote import ObjectBlobs, RemoteStore
from prefix_index.remote.calls import Calls
from prefix_index.remote.values import HEADER, value_header
from prefix_index.remote.values import MANIFEST as MANIFEST_KIND
from prefix_index.store import Catalog
from tests.prefix_index import s3_server
from tests.prefix_index.remote_stores import CHUNK_NBYTES, DIGEST, LONG, MANIFEST, Make, Shaky
from tests.prefix_index.samples import read_fill, sample_identity, sample_payload
from tests.prefix_index.small_stores import refuse_call
from tests.prefix_index.tiers import eventually


@pytest.fixture(autouse=True)
def credentials() -> None:
    s3_server.set_credentials()


@pytest.fixture
def silent() -> Iterator[ObjectBlobs]:
    """An S3 endpoint that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        yield ObjectBlobs("s3://bucket/x", endpoint=endpoint, region="r", client_options={"allow_http": True})


def test_nobody_waits_for_a_silent_store(silent: ObjectBlobs) -> None:
    silent.open(3.0)  # the client's own limit is far behind the store's, so that it is the store's that is met
    store = RemoteStore(silent, timeout_s=0.5)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"x: expected an answer within 0.5 s, found none; check"):
            store.open()
        eventually(lambda: is_idle(store._calls), 25)  # without its limit the client asks for half a minute or more


def is_idle(calls: Calls) -> bool:
    try:
        calls.check_idle()
    except StoreUnavailable:
        return False
    return True


def test_a_store_that_stops_answering(tmp_path: Path) -> None:
    """The bytes of a real server behind a relay that can fall silent, and speak again."""
    with Relay(s3_server.endpoint()) as relay:
        name = s3_server.new_bucket().name.split("/")[2]
        relayed = ObjectBlobs(
            f"s3://{name}/fleet", endpoint=relay.endpoint, region="us-east-1", client_options={"allow_http": True}
        )
        relayed.open(10.0)
        with RemoteStore(relayed, chunk_nbytes=CHUNK_NBYTES, timeout_s=30.0) as store:
            store.put(sample_payload(fill=1))
            relay.silent = True
            store._calls.timeout_s = 1.0
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
            assert time.monotonic() - asked < 20  # eight times the client's own limit is more
            assert [e.digest for e in store.list()] == [DIGEST]  # a look-up asks nobody
            relay.silent = False
            store._calls.timeout_s = 30.0

            eventually(lambda: read_fill(store) == 1, but=(StoreUnavailable,))


class Relay:
    """A TCP relay. While ``silent`` it takes what comes and passes nothing on."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("http://").split(":")
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.endpoint = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.silent = False

    def __enter__(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            upstream = socket.create_connection(self._target)
            for source, target in ((client, upstream), (upstream, client)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                if not self.silent:
                    target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()


def test_a_refused_connection_says_so() -> None:
    blobs = ObjectBlobs("s3://b/x", endpoint="http://127.0.0.1:1", region="r", client_options={"allow_http": True})
    with pytest.raises(StoreUnavailable, match="s3://b/x: expected the request done, found GenericError"):
        RemoteStore(blobs, timeout_s=60).open()


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


def test_more_calls_hang_than_can_be_under_way() -> None:
    calls, release = Calls("a store", timeout_s=0.1), threading.Event()
    for _ in range(20):
        with pytest.raises(StoreUnavailable, match="found none; check"):
            calls.run_all([lambda: release.wait(60)])
    release.set()
    calls.timeout_s = 60.0
    assert calls.run_all([lambda: 1]) == [1]


def test_results_come_in_order_and_the_first_error_stops_the_rest() -> None:
    calls = Calls("a store", timeout_s=60)
    assert calls.run_all([lambda i=i: i * i for i in range(20)]) == [i * i for i in range(20)]  # type: ignore[misc]
    ran: list[int] = []

    def work(i: int) -> None:
        ran.append(i)
        if i == 4:
            raise KeyError(i)

    with pytest.raises(KeyError):
        calls.run_all([lambda i=i: work(i) for i in range(100)])  # type: ignore[misc]
    assert len(ran) < 10


# What a store says of sizes is not believed, and what this machine lacks is not the store's fault


def say(blobs: Shaky, **changes: int) -> None:
    """The manifest with other numbers and right checksums."""
    body: dict[str, Any] = json.loads(blobs.fetch(MANIFEST, 1 << 20)[HEADER.size :])
    raw = json.dumps(body | changes).encode()
    blobs.write(MANIFEST, memoryview(value_header(MANIFEST_KIND, DIGEST, body["generation"], 0, raw) + raw))


@pytest.mark.parametrize("nbytes", [1 << 46, 1 << 62, 1 << 64, 1 << 40], ids=hex)
def test_an_index_of_absurd_length_is_damaged_and_the_others_are_served(
    make: Make, blobs: Shaky, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RemoteStore(blobs) as other:
        other.put(sample_payload())
        other.put(sample_payload(sample_identity(LONG), fill=7))
        say(blobs, nbytes=nbytes, chunk_nbytes=nbytes)
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
    with monkeypatch.context() as patched:
        refuse_call(patched, call, error=errno.ENOMEM)
        with pytest.raises(OutOfMemory, match="free memory") as raised:
            store.get(DIGEST)
    assert raised.value.reason == "index_memory"
    assert read_fill(store) == 3
    assert list(store.problems()) == []


def test_no_thread_for_a_request_is_no_absent_store_either(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("a store", timeout_s=5)

    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
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

    def fails() -> None:
        raise error

    with pytest.raises(Exception) as raised:  # noqa: PT011
        one.ask(fails)
    assert isinstance(raised.value, OutOfMemory) == local
    assert one.is_away() is not local
