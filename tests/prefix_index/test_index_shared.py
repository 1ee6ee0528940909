"""A folder that is the truth of one machine, and a remote store that loses, lies and goes away."""

from __future__ import annotations

import gc
import os
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest

from prefix_index import (
    FileStore,
    IndexCorrupt,
    IndexFormatError,
    IndexNotFound,
    IndexUnreadable,
    Retention,
    SharedStore,
    StoreFull,
    StoreUnavailable,
    folder,
    link,
)
from prefix_index.reader import IndexLookup
from prefix_index.remote import BlobsFailed, BlobsFull, ObjectBlobs, RemoteStore
from prefix_index.store import BuildLease
from tests.prefix_index.remote_stores import (
    DIGEST,
    LONG,
    Make,
    Shaky,
    chunks_of,
    damage,
    flip_bit,
    flushed,
    longest,
    reached,
)
from tests.prefix_index.samples import read_fill, sample_identity, sample_payload
from tests.prefix_index.small_stores import SOON, python
from tests.prefix_index.tiers import eventually, set_credentials

ITEM = "<Contents><Key>x/a</Key><LastModified>2026-01-01T00:00:00Z</LastModified><Size>1</Size></Contents>"
ERROR = IndexCorrupt("a test", expected="a", found="b", remedy="none")


@pytest.fixture
def store(make: Make) -> SharedStore:
    """A machine that has published an index."""
    store = make("a")
    store.put(sample_payload(fill=5))
    assert flushed(store)
    return store


def test_what_one_machine_built_the_others_find_and_keep(make: Make, tmp_path: Path) -> None:
    one, two = make("a"), make("b")
    entry = one.put(sample_payload(fill=7), retention=Retention(pinned=True))
    assert flushed(one)
    assert longest(two) == 0
    two.rescan(full=True)
    assert longest(two) == 32
    assert two.contains(DIGEST)
    assert read_fill(two) == 7
    eventually(lambda: two.counters.fetched == 1)
    (copy,) = (tmp_path / "b").glob("*/*.pfxindex")
    assert copy.read_bytes() == Path(str(entry.path)).read_bytes()
    assert [entry.retention for entry in two.list()] == [Retention()], "retention is a folder's own"
    assert read_fill(two) == 7
    assert two.counters[:4] == (1, 1, 1, 0)
    assert one.counters.published == 1


def test_the_longer_prefix_wins_wherever_it_is_but_not_from_a_remote_store_that_is_away(
    make: Make, blobs: Shaky, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make("a"), make("b")
    one.put(sample_payload(sample_identity(LONG)))
    two.put(sample_payload())
    assert flushed(one)
    two.rescan(full=True)
    assert longest(two) == 64
    monkeypatch.setattr(link, "FIRST_AWAY_S", 60.0)
    blobs.fails = True
    with pytest.raises(StoreUnavailable, match="the network is gone"):
        two.get(sample_identity(LONG))
    assert longest(two) == 32
    two.local.delete(DIGEST)
    assert longest(two) == 64, "the reason of the miss is the remote store's"


def test_one_lease_among_machines_and_a_local_one_while_the_remote_store_is_away(make: Make, blobs: Shaky) -> None:
    one, two, neighbour = make("a"), make("b"), make("a")
    lease = one.lease(DIGEST)
    assert lease is not None
    assert two.lease(DIGEST) is None
    assert neighbour.lease(DIGEST) is None
    lease.release()
    blobs.fails = True
    with two.lease(DIGEST) or pytest.fail("no lease"):
        assert two.lease(DIGEST) is None
        with one.lease(DIGEST) or pytest.fail("no lease"):
            assert neighbour.lease(DIGEST) is None
    blobs.fails = False
    with one.lease(DIGEST) or pytest.fail("still held"):
        assert two.lease(DIGEST) is None


def test_what_expired_here_is_a_miss_and_deleted_there(store: SharedStore, blobs: Shaky) -> None:
    store.retain(DIGEST, Retention(expires=1.0))
    for full in (False, True):
        store.rescan(full=full)
        assert (longest(store), store.contains(DIGEST), list(store.list())) == (0, False, [])
    with pytest.raises(IndexNotFound):
        store.get(DIGEST)
    assert flushed(store)
    assert blobs.names("prefix_index") == {}
    assert [entry.digest for entry in store.collect()] == [DIGEST]
    assert (longest(store), store.contains(DIGEST)) == (0, False)


def test_an_index_that_only_a_remote_store_has_is_kept_in_the_folder(store: SharedStore, make: Make) -> None:
    two = make("b")
    eventually(lambda: longest(two) == 32)
    kept = Retention(pinned=True, name="tools")
    assert two.retain(DIGEST, kept).retention == kept
    assert [entry.retention for entry in two.local.list()] == [kept]


def test_a_damaged_copy_here_is_replaced_by_the_remote_stores(store: SharedStore) -> None:
    path = store.local.path_of(DIGEST)
    raw = bytearray(path.read_bytes())
    raw[raw.index(bytes([5] * 4))] ^= 1
    path.write_bytes(raw)
    with store.get(DIGEST) as index, pytest.raises(IndexCorrupt) as caught:
        index.verify()
    for _ in range(2):  # there is a second reader of the same file
        assert store.report(index, caught.value)
    assert longest(store) == 32
    assert read_fill(store) == 5
    assert list(store.problems()) == []
    assert read_fill(store.local) == 5


def test_a_report_about_an_older_index_changes_nothing(store: SharedStore) -> None:
    with store.get(DIGEST) as old:
        store.put(sample_payload(fill=2))
    assert not store.report(old, ERROR)
    assert flushed(store)
    assert read_fill(store) == 2
    store.local.delete(DIGEST)
    assert read_fill(store) == 5, "the remote store's"
    assert list(store.problems()) == []


def test_what_is_wrong_though_its_bytes_are_whole_goes_there_too_and_is_put_again(make: Make, blobs: Shaky) -> None:
    store, other = make("a"), make("b", max_bytes=4096)
    blobs.gate.clear()
    store.put(sample_payload())
    assert blobs.writing.wait(SOON)
    with store.get(DIGEST) as index:
        assert store.report(index, ERROR)
    blobs.gate.set()
    assert flushed(store)
    assert (longest(store), store.contains(DIGEST), blobs.names("prefix_index")) == (0, False, {})
    with pytest.raises(IndexCorrupt, match="a test"):
        store.get(DIGEST)
    for fill in (1, 2):
        store.put(sample_payload(fill=fill))
        assert flushed(store)
        other.rescan(full=True)
        with other.get(DIGEST) as index:  # from memory: its folder has no room
            assert index.array("channels")[0] == fill
        if fill == 1:
            assert other.report(index, ERROR)
            assert flushed(other)
            store.rescan(full=True)


def test_what_the_system_does_not_give_now_is_served_from_there_and_neither_reported_nor_replaced(
    store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.local.path_of(DIGEST)
    inode = path.stat().st_ino
    none_left = IndexUnreadable("file", expected="a descriptor", found="none left", remedy="wait")
    with monkeypatch.context() as patch:
        patch.setattr(folder, "open_fd", Mock(side_effect=none_left))
        assert read_fill(store) == 5
        assert store.counters.hits_remote == 1
        store.put(sample_payload(sample_identity(LONG), fill=6))
        assert not store.flush(0.2), "the publication is tried again"
    assert flushed(store)
    assert path.stat().st_ino == inode
    assert (read_fill(store), read_fill(store, sample_identity(LONG))) == (5, 6)
    assert store.remotes[0].contains(sample_identity(LONG))
    assert list(store.problems()) == []


def test_what_local_refuses_is_refused(make: Make, blobs: Shaky) -> None:
    store = make("a", max_bytes=4096)
    with pytest.raises(StoreFull):
        store.put(sample_payload())
    assert flushed(store)
    assert blobs.names("prefix_index") == {}


def test_what_local_has_no_room_for_is_served_from_remote(store: SharedStore, make: Make) -> None:
    two = make("b", max_bytes=4096)
    assert [read_fill(two) for _ in range(3)] == [5, 5, 5]
    assert (two.counters.hits_remote, two.counters.fetch_failures) == (3, 1)
    assert [one.get(DIGEST).tier for one in (store, two)] == ["disk", "remote"]


def test_an_index_is_read_where_it_is_while_it_is_changed_here(make: Make, blobs: Shaky) -> None:
    with RemoteStore(blobs) as other:
        other.put(sample_payload(sample_identity(LONG), fill=9))
    store = make()
    eventually(lambda: longest(store) == 64)
    digest = sample_identity(LONG).digest
    held, done = threading.Event(), threading.Event()

    def change() -> None:
        with store._lock_of(digest):
            held.set()
            done.wait(60)

    thread = threading.Thread(target=change)
    thread.start()
    held.wait(60)
    try:
        assert read_fill(store, digest) == 9
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("change", ["put", "delete"])
def test_a_fetch_never_undoes_what_came_meanwhile(store: SharedStore, make: Make, blobs: Shaky, change: str) -> None:
    two = make("b")
    blobs.reading.clear()
    blobs.gate.clear()
    two._fetcher.request(DIGEST)
    assert blobs.reading.wait(SOON)
    if change == "put":
        two.put(sample_payload(fill=2))
    else:
        assert two.delete(DIGEST)
    blobs.gate.set()
    assert flushed(two)
    assert two._fetcher.settle(SOON)
    assert two.local.contains(DIGEST) == (change == "put")
    assert change == "delete" or read_fill(two) == 2


def test_a_forgotten_lease_waits_for_no_remote_store(tmp_path: Path) -> None:
    forgotten, in_time = threading.Event(), []

    class Slow(ObjectBlobs):
        def fetch(self, name: str, limit: int) -> bytes:
            if name.endswith(".lease"):
                in_time.append(forgotten.wait(30))
            return super().fetch(name, limit)

    with SharedStore(FileStore(tmp_path / "store", create=True), [RemoteStore(Slow("memory:///"))]) as store:
        lease = store.lease(DIGEST)
        assert lease is not None
        del lease
        gc.collect()
        forgotten.set()
    assert in_time == [True]


FORGOTTEN_WHILE_CALLING = """
import gc, sys
from prefix_index import FileStore, SharedStore
from prefix_index.remote import ObjectBlobs, RemoteStore
store = SharedStore(FileStore(sys.argv[1], create=True), [RemoteStore(ObjectBlobs("memory:///"))])
store.open()
gc.disable()
def forget():
    circle = [store.lease("a" * 64)]
    circle.append(circle)
forget()
with store.remotes[0]._calls._opening:  # as where a call begins, and an allocation may start a collection
    gc.collect()
store.close()
"""


def test_a_lease_that_ends_in_a_garbage_collection_stops_nobody(tmp_path: Path) -> None:
    with python(FORGOTTEN_WHILE_CALLING, tmp_path / "store") as process:
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_the_store_opens_without_its_remote_store_and_finds_it_later(make: Make, blobs: Shaky) -> None:
    with RemoteStore(blobs) as other:
        other.put(sample_payload(sample_identity(LONG)))
    blobs.fails = True
    store = make("a")
    assert ["the network is gone" in str(p.error) for p in store.problems()] == [True]
    store.put(sample_payload(fill=5))
    assert not store.flush(0.2)
    with pytest.raises(IndexNotFound):
        store.get(sample_identity(LONG))
    assert read_fill(store) == 5
    eventually(lambda: store.counters.publish_failures > 0)
    blobs.fails = False
    store.rescan(full=True)
    assert longest(store) == 64
    assert flushed(store)
    assert list(store.problems()) == []
    assert store.counters.published == 1


def test_a_deletion_reaches_a_remote_store_that_was_away(store: SharedStore, blobs: Shaky) -> None:
    blobs.fails = True
    assert store.delete(DIGEST)
    assert (longest(store), store.contains(DIGEST), list(store.list())) == (0, False, [])
    assert ObjectBlobs.names(blobs, "prefix_index") != {}  # past the network, which fails until this was looked at
    blobs.fails = False
    store.rescan()
    assert longest(store) == 0
    assert flushed(store)
    assert blobs.names("prefix_index") == {}
    assert not store.delete(DIGEST)


def test_a_hanging_remote_store_costs_its_time_limit_once_and_local_answers_nothing(
    make: Make, blobs: Shaky, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network hangs until the end of the test: who waits for it longer than its limit is seen to."""
    one, two = make("a"), make("b", remote={"timeout_s": 2 * SOON}, timeout_s=2 * SOON)
    impatient = make("c", remote={"timeout_s": 0.4})
    one.put(sample_payload(sample_identity(LONG)))
    assert flushed(one)
    assert reached(impatient)
    assert longest(impatient) == 64
    monkeypatch.setattr(link, "FIRST_AWAY_S", 60.0)
    blobs.answers.clear()
    before, begun = blobs.calls, time.monotonic()
    with pytest.raises(StoreUnavailable):
        impatient.get(sample_identity(LONG))
    assert time.monotonic() - begun < SOON / 2
    eventually(lambda: blobs.calls > before)
    asked = blobs.calls
    with pytest.raises(StoreUnavailable):
        impatient.get(sample_identity(LONG))
    assert blobs.calls == asked, "it was asked again"
    begun = time.monotonic()
    two.put(sample_payload(fill=5))
    assert read_fill(two) == 5
    assert time.monotonic() - begun < SOON / 2
    impatient.put(sample_payload(fill=5))
    begun = time.monotonic()
    impatient.close()
    assert time.monotonic() - begun < SOON / 2
    for store in (two, impatient):
        assert list((store.local.folder).glob("*/*.pfxindex"))


def test_closing_while_something_is_published_takes_a_bounded_time(make: Make, blobs: Shaky) -> None:
    store = make("a", timeout_s=0.2, remote={"timeout_s": 1.0})
    assert reached(store)
    blobs.gate.clear()
    store.put(sample_payload(fill=5))
    assert blobs.writing.wait(SOON)
    begun = time.monotonic()
    store.close()
    assert time.monotonic() - begun < SOON / 2  # the gate opens after SOON
    blobs.gate.set()
    eventually(lambda: not any(t.name == "prefix_index-promoter" for t in threading.enumerate()))
    store.open()
    assert read_fill(store) == 5
    assert flushed(store), "what was not published then is now"
    eventually(lambda: store.remotes[0].contains(DIGEST))


@pytest.mark.parametrize("what", ["manifest", "000001"])
def test_what_is_damaged_there_says_nothing_of_the_folder_s_which_takes_its_place(
    store: SharedStore, blobs: Shaky, what: str
) -> None:
    damage(blobs, next(name for name in blobs.names("prefix_index") if name.endswith(what)), flip_bit(900))
    with pytest.raises(IndexFormatError):
        store.remotes[0].get(DIGEST)
    assert read_fill(store) == 5
    assert list(store.local.problems()) == []
    store.close()
    store.open()
    if what != "manifest":  # nobody finds out before it is read
        with pytest.raises(IndexFormatError):
            store.remotes[0].get(DIGEST)
        store.put(sample_payload(fill=5))
    assert flushed(store)
    with RemoteStore(blobs) as remote:
        assert read_fill(remote) == 5


def test_a_store_without_room_is_asked_later_and_later_and_is_a_problem(
    make: Make, blobs: Shaky, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[str] = []

    def full(name: str, value: memoryview) -> None:
        writes.append(name)
        raise BlobsFull("the bucket is full")

    monkeypatch.setattr(blobs, "write", full)
    monkeypatch.setattr(link, "FIRST_AWAY_S", 5.0)
    store = make()
    for number in range(3):
        store.put(sample_payload(sample_identity(tuple(range(number, number + 32)))))
    store.flush(1)
    tried = len(writes)
    for _ in range(50):
        store.rescan(full=True)
    store.flush(1)
    assert len(writes) <= tried + 3, "at most one more round, which ends with the first index that is refused"
    assert any("full" in str(problem.error) for problem in store.problems())
    for _, error in store.problems():
        assert (error.__traceback__, error.__cause__) == (None, None), "they would keep the index that was to be sent"


def test_of_a_damaged_index_nothing_stays_in_memory(make: Make, blobs: Shaky) -> None:
    """As long as it is a problem, and for all errors behind it."""
    one, other = make("a"), make("b")
    one.put(sample_payload())
    assert flushed(one)
    damage(blobs, chunks_of(blobs)[-1], flip_bit(8 * 200))
    assert reached(other)
    gc.disable()  # a server may collect seldom
    try:
        for _ in range(3):
            with pytest.raises(IndexCorrupt):
                other.get(sample_identity())
        assert all(path.stat().st_blocks == 0 for path in in_memory())
    finally:
        gc.enable()
    gc.collect()
    assert in_memory() == []


def in_memory() -> list[Path]:
    """Open files that lie there."""
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [path for path in links if "memfd:prefix_index" in os.readlink(path)]


def test_what_another_process_held_is_published_once_it_lets_go(make: Make, blobs: Shaky, tmp_path: Path) -> None:
    with FileStore(tmp_path / "a", create=True) as neighbour:
        neighbour.put(sample_payload(fill=3))
        lease = neighbour.lease(DIGEST)
        assert lease is not None
        store = make("a")
        assert not store.flush(1)
        assert blobs.names("prefix_index") == {}
        lease.release()
    assert flushed(store)
    with RemoteStore(blobs) as remote:
        assert read_fill(remote) == 3


def test_an_index_whose_lease_fails_is_published_later(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A disk that is full for a while has no room for the file of a lease either."""
    with FileStore(tmp_path / "a", create=True) as folder:
        folder.put(sample_payload())
    failing, lease = [StoreFull("disk", "room", "none", "free some")], FileStore.lease

    def fails_once(folder: FileStore, key: IndexLookup) -> BuildLease | None:
        if failing:
            raise failing.pop()
        return lease(folder, key)

    monkeypatch.setattr(FileStore, "lease", fails_once)
    store = make()
    assert flushed(store)
    assert not failing
    assert store.remotes[0].contains(DIGEST)


def test_a_listing_without_an_end_is_given_up() -> None:
    """Some stores begin anew at each page. A process could never end while it lists one."""
    asked: list[str] = []

    class FirstPage(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            token = "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"<ListBucketResult>{token}{ITEM * 1000}</ListBucketResult>".encode())

        def log_message(self, *_: object) -> None:
            pass

    set_credentials()
    with ThreadingHTTPServer(("127.0.0.1", 0), FirstPage) as server:
        threading.Thread(target=server.serve_forever).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        blobs = ObjectBlobs("s3://bucket/x", endpoint=endpoint, region="r", client_options={"allow_http": True})
        try:
            with pytest.raises(StoreUnavailable):
                RemoteStore(blobs, timeout_s=0.5).open()
            time.sleep(1.0)  # for the last page
            count = len(asked)
            time.sleep(0.5)
            assert len(asked) == count > 1
        finally:
            server.shutdown()


def test_a_sweep_removes_nothing_of_which_the_store_does_not_say_now_whether_it_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What comes between two pages of a listing has a manifest there and lacks chunks."""
    blobs = ObjectBlobs("memory:///")
    with RemoteStore(blobs, chunk_nbytes=4096) as store:
        store.put(sample_payload(fill=3))
        seen = {name: tag for name, tag in blobs.names(store.folder).items() if not name.endswith(".000001")}
        with monkeypatch.context() as patch:
            patch.setattr(blobs, "names", lambda _: seen)
            patch.setattr(blobs, "size", Mock(side_effect=BlobsFailed("busy")))
            with pytest.raises(StoreUnavailable, match="busy"):
                store.sweep()
            patch.setattr(blobs, "size", partial(ObjectBlobs.size, blobs))
            store.sweep()
            assert [entry.digest for entry in store.list()] == [DIGEST]
        assert read_fill(store) == 3


@pytest.mark.parametrize("below", ["a file", "a file/deeper"])
def test_a_folder_of_objects_that_cannot_be_made_is_no_store_that_answers(tmp_path: Path, below: str) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(StoreUnavailable, match=r"a file.*expected the request done, found \w+Error: .*check the store"):
        RemoteStore(ObjectBlobs(f"file://{tmp_path}/{below}")).open()
