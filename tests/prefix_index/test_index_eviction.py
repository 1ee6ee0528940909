"""Who leaves a store, by each policy, and a folder's limits: its byte cap and the disk's free space."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest

from prefix_index import FileStore, IndexEntry, IndexWriter, InvalidPayload, Retention, StoreFull
from prefix_index.eviction import Candidate, choose_victims, cost_aware, lru
from tests.prefix_index.samples import IDS, PINNED, sample_payload
from tests.prefix_index.small_stores import ONE, Clock, built_in, held, index_file, opened, refuse_call

# Policies.


def candidate(
    number: int, last_used: float, *, nbytes: int = 100, seconds: float = 1.0, retention: Retention | None = None
) -> Candidate:
    entry = IndexEntry(
        identity=IDS[number], nbytes=nbytes, created=0.0, build_seconds=seconds, retention=retention or Retention()
    )
    return Candidate(entry, last_used)


def leave(candidates: list[Candidate], nbytes: int, policy: Any = lru, now: float = 100.0, **more: Any) -> list[int]:
    victims = choose_victims(candidates, nbytes, policy=policy, now=now, **more)
    return [-1] if victims is None else [IDS.index(v.identity) for v in victims]


def test_order_of_leaving_expired_then_unpinned_then_pinned() -> None:
    candidates = [
        candidate(0, 10, retention=PINNED),
        candidate(1, 90),
        candidate(2, 20),
        candidate(3, 99, retention=Retention(expires=100.0)),
        candidate(4, 95, retention=Retention(expires=50.0, pinned=True)),
        candidate(5, 5, retention=Retention(pinned=True, expires=101.0)),
    ]
    assert leave(candidates, 600) == [4, 3, 2, 1, 5, 0]
    assert leave(candidates, 300) == [4, 3, 2]
    assert leave(candidates, 201) == [4, 3, 2]
    assert leave(candidates, 601) == [-1]
    assert leave([], 1) == [-1]


def test_cost_aware_keeps_what_is_dear_per_byte_and_second() -> None:
    cheap, dear = candidate(0, 50, seconds=1.0), candidate(1, 50, seconds=60.0)
    assert leave([dear, cheap], 1, cost_aware) == [0]
    small, large = candidate(2, 50, nbytes=10), candidate(3, 50, nbytes=1000)
    assert leave([small, large], 1, cost_aware) == [3]
    # 60 times as dear, but idle 100 times as long
    assert leave([candidate(4, 0, seconds=60.0), candidate(5, 99, seconds=1.0)], 1, cost_aware) == [4]
    assert leave([candidate(6, 60, seconds=0.0), candidate(7, 50, seconds=0.0)], 1, cost_aware) == [7]


@pytest.mark.parametrize("policy", [lru, cost_aware])
def test_a_use_in_the_future_counts_as_one_now(policy: Any) -> None:
    assert leave([candidate(0, 1e9), candidate(1, 99)], 1, policy) == [1]
    assert leave([candidate(0, 1e9), candidate(1, 2e9), candidate(2, 100)], 100, policy) == [2]
    dear = candidate(1, 100, seconds=2.0)
    assert leave([candidate(0, 200), dear], 1, policy, latest=200.0) == [1], "the clock was set back: dear is idle"


def test_unknown_policy() -> None:
    with pytest.raises(InvalidPayload, match="eviction: expected lru or cost_aware, found 'fifo'; choose one"):
        FileStore("x", eviction="fifo")


# A folder's byte cap.


def test_cost_aware_folder(folder: Path, clock: Clock) -> None:
    with opened(folder, max_bytes=2 * ONE, eviction="cost_aware", clock=clock) as store:
        store.put(built_in(60.0, IDS[0]))
        clock.now += 10
        store.put(built_in(1.0, IDS[1]))
        clock.now += 10
        store.put(built_in(1.0, IDS[2]))
        assert held(store) == {0, 2}
        clock.now += 10_000
        store.get(IDS[2]).close()
        clock.now += 10
        store.put(built_in(1.0, IDS[3]))
        assert held(store) == {2, 3}


def test_replacing_needs_no_room_but_the_difference(folder: Path, clock: Clock) -> None:
    large = sample_payload(IDS[0], values_per_array=1 << 12)
    nbytes = IndexWriter(large).nbytes
    with opened(folder, max_bytes=nbytes + ONE, clock=clock) as store:
        for payload in (sample_payload(IDS[0]), sample_payload(IDS[1]), large, large):
            clock.now += 10
            store.put(payload)
        assert held(store) == {0, 1}
        store.put(sample_payload(IDS[2]))
        assert held(store) == {0, 2}


def test_what_cannot_fit_evicts_nobody(folder: Path) -> None:
    with opened(folder, max_bytes=2 * ONE) as store:
        store.put(sample_payload(IDS[0]))
        store.put(sample_payload(IDS[1]), retention=Retention(expires=1.0))
        with pytest.raises(StoreFull, match=r"store: index store: expected room for \d+ bytes \(max_bytes=90112, min"):
            store.put(sample_payload(IDS[2], values_per_array=1 << 16))
        assert index_file(folder, IDS[1]).exists()
        assert held(store) == {0}
        store.put(sample_payload(IDS[0], fill=1))
        index_file(folder, IDS[0]).write_bytes(b"x" * (2 * ONE))  # damaged, and nobody's to evict
        with pytest.raises(StoreFull, match=r"found 90112 bytes too few and 45056 to evict; raise"):
            store.put(sample_payload(IDS[2]))
        assert index_file(folder, IDS[0]).exists()
        assert [p.name for p in folder.rglob(".partial*")] == []


def test_collect_brings_a_folder_under_a_smaller_cap_and_removes_nothing_without_one(
    folder: Path, clock: Clock
) -> None:
    with opened(folder, clock=clock) as store:
        for identity in IDS[:4]:
            clock.now += 10
            store.put(sample_payload(identity))
        assert list(store.collect()) == []
    with opened(folder, max_bytes=2 * ONE, clock=clock) as store:
        assert held(store) == {0, 1, 2, 3}
        assert {IDS.index(e.identity) for e in store.collect()} == {0, 1}
        assert held(store) == {2, 3}
        assert list(store.collect()) == []


@pytest.mark.parametrize("alive", [True, False])
def test_a_write_under_way_takes_room_and_a_dead_one_does_not(folder: Path, alive: bool) -> None:
    with opened(folder, max_bytes=2 * ONE) as store:
        store.put(sample_payload(IDS[0]))
        partial = index_file(folder, IDS[0]).with_name(".partial-1-other")
        with partial.open("wb") as writer:
            writer.truncate(ONE)
            if alive:
                fcntl.flock(writer, fcntl.LOCK_EX)
            os.utime(partial, (time.time() - 2, time.time() - 2))
            store.put(sample_payload(IDS[1]))
            assert held(store) == ({1} if alive else {0, 1})
            assert partial.exists() == alive


# The disk's free space.


@pytest.mark.parametrize("max_bytes", [None, 1 << 40])
def test_free_space_floor(folder: Path, clock: Clock, max_bytes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = 5 * ONE

    def free_bytes(_: Path) -> int:
        return disk - sum(p.stat().st_size for p in folder.rglob("*.pfxindex"))

    monkeypatch.setattr("prefix_index.eviction.free_bytes", free_bytes)
    with opened(folder, max_bytes=max_bytes, min_free_bytes=2 * ONE, clock=clock) as store:
        for identity in IDS[:5]:
            clock.now += 10
            store.put(sample_payload(identity))
            assert free_bytes(folder) >= 2 * ONE
        assert held(store) == {2, 3, 4}
        store.put(sample_payload(IDS[4], fill=1))
        assert held(store) == {2, 3, 4}
        disk = 4 * ONE  # somebody else writes
        assert [IDS.index(e.identity) for e in store.collect()] == [2]
        disk = 0
        assert list(store.collect()) == []
        with pytest.raises(StoreFull, match=r"min_free_bytes=90112\), found \d+ bytes too few and 90112 to evict"):
            store.put(sample_payload(IDS[0]))
        assert held(store) == {3, 4}
    disk = 2 * ONE
    with opened(folder, max_bytes=1 << 40, clock=clock) as store:  # with any limit a full disk is made room on
        store.put(sample_payload(IDS[5]))
        assert held(store) == {4, 5}
        store.put(sample_payload(IDS[5], fill=1))  # for a while the disk holds both
        assert held(store) == {5}


# Recency


def test_recency_is_the_access_time(folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder, clock=clock) as store, opened(folder) as other:
        store.put(sample_payload(IDS[0]))
        path = index_file(folder, IDS[0])
        put = path.stat()
        assert put.st_atime == clock.now
        clock.now += 100
        store.get(IDS[0]).close()
        got = path.stat()
        assert (got.st_atime, got.st_mtime_ns) == (clock.now, put.st_mtime_ns)
        clock.now += 0.5
        store.get(IDS[0]).close()
        assert path.stat().st_ctime_ns == got.st_ctime_ns  # within a second it is the same use
        clock.now += 100
        other.rescan(full=True)
        other.contains(IDS[0])
        assert path.stat().st_atime == clock.now - 100.5  # looking is no use
        clock.now -= 10_000  # set back: the order of uses stays what it was
        store.get(IDS[0]).close()
        assert path.stat().st_atime == got.st_atime
        store.put(sample_payload(IDS[1]))
        assert index_file(folder, IDS[1]).stat().st_atime == got.st_atime + 1
        store.get(IDS[0]).close()
        assert path.stat().st_atime == got.st_atime + 2
        clock.now += 20_000
        refuse_call(monkeypatch, "utime")
        store.get(IDS[0]).close()  # whose time cannot be set is read all the same
