"""What a machine does to a remote store that others use: when it starts, and when the store refuses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from prefix_index import BuildInfo, FileStore, IndexFormatError, Retention, link
from prefix_index.remote import BlobsFull, RemoteStore
from prefix_index.testing import sample_identity, sample_payload
from tests.prefix_index.remote_stores import DIGEST, damage, flip
from tests.prefix_index.shared_stores import Make, Shaky, fill_of, flushed, machines, shaky


@pytest.fixture
def blobs() -> Iterator[Shaky]:
    with shaky() as blobs:
        yield blobs


@pytest.fixture
def make(tmp_path: Path, blobs: Shaky, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with machines(tmp_path, blobs, monkeypatch) as make:
        yield make


def test_what_is_damaged_there_says_nothing_of_the_folders_index(make: Make, blobs: Shaky) -> None:
    store = make(rescan_s=3600.0)
    store.put(sample_payload(fill=5))
    assert store.flush(60)
    damage(blobs, f"prefix_index/{DIGEST}.manifest", flip(300))
    store.retain(DIGEST, Retention(pinned=True))
    store.flush(60)
    assert (fill_of(store), [entry.retention.pinned for entry in store.list()]) == (5, [True])
    assert not any(isinstance(problem.error, IndexFormatError) for problem in store.local.problems())


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


def test_a_start_leaves_the_retention_of_others(make: Make, blobs: Shaky) -> None:
    one, other = make("a"), make("b")
    one.put(sample_payload())
    assert flushed(one)
    other.put(sample_payload())
    wanted = Retention(pinned=True, name="tools")
    other.retain(DIGEST, wanted)
    assert flushed(other)
    one.close()
    one.open()
    assert flushed(one)
    with RemoteStore(blobs) as remote:
        assert [entry.retention for entry in remote.list()] == [wanted]


def test_what_has_expired_in_one_folder_is_not_taken_from_others(make: Make, blobs: Shaky, tmp_path: Path) -> None:
    with FileStore(tmp_path / "b", create=True) as old:
        old.put(sample_payload(fill=1), retention=Retention(expires=time.time() - 10))
    one = make("a")
    one.put(sample_payload(fill=2), retention=Retention(pinned=True))
    assert flushed(one)
    other = make("b")
    assert flushed(other)
    with RemoteStore(blobs) as remote:
        assert [entry.retention for entry in remote.list()] == [Retention(pinned=True)]
        assert not remote.collect()
    assert fill_of(other) == 2


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
        assert fill_of_remote(remote) == 3


def test_a_newer_build_that_could_not_be_published_is_at_the_next_start(make: Make, blobs: Shaky) -> None:
    store = make("a")
    store.put(replace(sample_payload(fill=1), info=BuildInfo(created=100.0)))
    assert flushed(store)
    blobs.fails = True
    store.put(replace(sample_payload(fill=2), info=BuildInfo(created=200.0)))
    store.close()
    blobs.fails = False
    store.open()
    assert flushed(store)
    with RemoteStore(blobs) as remote:
        assert fill_of_remote(remote) == 2


def test_names_of_others_are_forgotten_when_they_are_gone(blobs: Shaky) -> None:
    blobs.open(60)
    with RemoteStore(blobs) as store:
        for number in range(150):
            blobs.write(f"prefix_index/stray-{number}", memoryview(b"x"))
        store.rescan(full=True)
        assert len(store.problems()) == 100
        for number in range(150):
            blobs.delete(f"prefix_index/stray-{number}")
        store.rescan(full=True)
        assert store.problems() == ()


def fill_of_remote(store: RemoteStore) -> int:
    with store.get(DIGEST) as index:
        return int(index.array("channels")[0])
