"""A remote store that is away, hangs or fails: what it costs the machine, and what is sent when it is back."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from prefix_index import FileStore, IndexFormatError, IndexNotFound, StoreUnavailable, link
from prefix_index.remote import BlobsFull, ObjectBlobs, RemoteStore
from tests.prefix_index.remote_stores import DIGEST, LONG, Make, Shaky, damage, flip_bit, flushed, longest, reached
from tests.prefix_index.samples import read_fill, sample_identity, sample_payload
from tests.prefix_index.small_stores import SOON
from tests.prefix_index.tiers import eventually


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


def test_a_deletion_reaches_a_remote_store_that_was_away(make: Make, blobs: Shaky) -> None:
    store = make("a")
    store.put(sample_payload())
    assert flushed(store)
    blobs.fails = True
    assert store.delete(DIGEST)
    assert (longest(store), store.contains(DIGEST), list(store.list())) == (0, False, [])
    assert blobs._store is not None
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


# What a machine does to a store that others use, when it starts


@pytest.mark.parametrize("what", ["manifest", "000001"])
def test_what_is_damaged_there_says_nothing_of_the_folder_s_which_takes_its_place(
    make: Make, blobs: Shaky, what: str
) -> None:
    store = make("a")
    store.put(sample_payload(fill=5))
    assert flushed(store)
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


def test_what_another_process_held_is_published_once_it_lets_go(make: Make, blobs: Shaky, tmp_path: Path) -> None:
    with FileStore(tmp_path / "a", create=True) as neighbour:
        neighbour.put(sample_payload(fill=3))
        lease = neighbour.lease(DIGEST)
        assert lease is not None
        store = make("a")
        assert not store.flush(1)
        lease.release()
    assert flushed(store)
    with RemoteStore(blobs) as remote:
        assert read_fill(remote) == 3
