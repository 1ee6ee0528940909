"""Limits of a folder, who leaves for them, and how long what stays stays."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from prefix_index import (
    ArrayKey,
    BuildInfo,
    FileStore,
    IndexCorrupt,
    IndexEntry,
    IndexForeign,
    IndexIdentity,
    IndexNotFound,
    IndexPayload,
    IndexStoreError,
    InvalidPayload,
    LazyArray,
    MemoryStore,
    Retention,
    StoreFolderError,
    StoreFull,
    StoreInconsistent,
)
from prefix_index.eviction import Candidate, choose_victims, cost_aware, lru
from prefix_index.testing import sample_identity, sample_payload
from tests.prefix_index.machine import Clock

IDS = [sample_identity(range(i, i + 32)) for i in range(8)]
PINNED = Retention(pinned=True)
with MemoryStore(1 << 20) as _store:
    ONE = _store.put(sample_payload()).nbytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(folder: Path, **options: Any) -> FileStore:
    store = FileStore(folder, **{"create": True, **options})
    store.open()
    return store


def keep_file(folder: Path, identity: IndexIdentity) -> Path:
    return folder / identity.digest[:2] / f"{identity.digest}.pfxkeep"


def index_file(folder: Path, identity: IndexIdentity) -> Path:
    return keep_file(folder, identity).with_suffix(".pfxindex")


def built_in(seconds: float, identity: IndexIdentity, values_per_array: int = 16) -> IndexPayload:
    payload = sample_payload(identity, values_per_array=values_per_array)
    return IndexPayload(identity, payload.arrays, payload.dtypes, info=BuildInfo(created=1.0, build_seconds=seconds))


def held(store: FileStore | MemoryStore) -> set[int]:
    """Which of IDS the store has."""
    return {IDS.index(e.identity) for e in store.list()}


# Policies.


def candidate(
    number: int, last_used: float, *, nbytes: int = 100, seconds: float = 1.0, retention: Retention | None = None
) -> Candidate:
    entry = IndexEntry(
        identity=IDS[number],
        nbytes=nbytes,
        created=0.0,
        build_seconds=seconds,
        retention=retention or Retention(),
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


@pytest.mark.parametrize("policy", [lru, cost_aware])
def test_last_use_is_looked_up_for_those_about_to_leave_only(policy: Any) -> None:
    asked: list[int] = []
    true = {0: 99.0, 1: 20.0, 2: 30.0, 3: 40.0}

    def last_used(c: Candidate) -> float:
        asked.append(IDS.index(c.entry.identity))
        return true[asked[-1]]

    candidates = [candidate(0, 10), candidate(1, 20), candidate(2, 30), candidate(3, 40)]
    assert leave(candidates, 200, policy, last_used=last_used) == [1, 2]
    assert 3 not in asked


@pytest.mark.parametrize("make", [lambda **o: FileStore("x", **o), lambda **o: MemoryStore(1, **o)])
def test_unknown_policy(make: Callable[..., object]) -> None:
    with pytest.raises(InvalidPayload, match="eviction: expected lru or cost_aware, found 'fifo'; choose one"):
        make(eviction="fifo")


# A folder's byte cap.


def test_least_recently_used_leaves_a_full_folder(folder: Path, clock: Clock) -> None:
    with opened(folder, max_bytes=3 * ONE, clock=clock) as store, opened(folder, clock=clock) as other:
        for identity in IDS[:3]:
            clock.now += 10
            store.put(sample_payload(identity))
        assert store.used_bytes == 3 * ONE
        other.rescan()
        clock.now += 10
        with other.get(IDS[0]) as reader:  # another store's use counts
            clock.now += 10
            with store.get(IDS[1]) as leaving:
                clock.now += 10
                other.get(IDS[2]).close()
                clock.now += 10
                store.put(sample_payload(IDS[3]))
                assert held(store) == {1, 2, 3}
                reader.verify()
                store.put(sample_payload(IDS[4]))
                assert held(store) == {2, 3, 4}
                leaving.verify()
        with pytest.raises(IndexNotFound):
            other.get(IDS[0])
        other.rescan()
        assert held(other) == {2, 3, 4}
        assert sum(p.stat().st_size for p in folder.rglob("*.pfxindex")) == 3 * ONE
        store.check_integrity()
        other.check_integrity()


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


def test_pinned_leaves_last_and_expired_first(folder: Path, clock: Clock) -> None:
    with opened(folder, max_bytes=3 * ONE, clock=clock) as store, opened(folder, clock=clock) as other:
        store.put(sample_payload(IDS[0]), retention=PINNED)
        for i in (1, 2):
            clock.now += 10
            store.put(sample_payload(IDS[i]))
        other.rescan()
        other.retain(IDS[2], Retention(expires=clock.now + 5))  # the store learns of it when it looks for room
        clock.now += 10
        store.put(sample_payload(IDS[3]))
        assert held(store) == {0, 1, 3}
        clock.now += 10
        store.put(sample_payload(IDS[4]))
        assert held(store) == {0, 3, 4}
        store.retain(IDS[3], PINNED)
        store.retain(IDS[4], PINNED)
        clock.now += 10
        store.put(sample_payload(IDS[5]))
        assert held(store) == {3, 4, 5}
        assert not keep_file(folder, IDS[0]).exists()
        store.check_integrity()


def test_replacing_needs_no_room_but_the_difference(folder: Path, clock: Clock) -> None:
    large = sample_payload(IDS[0], values_per_array=1 << 12)
    with MemoryStore(1 << 30) as memory:
        nbytes = memory.put(large).nbytes
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


def test_without_limits_nothing_leaves(folder: Path) -> None:
    with opened(folder) as store:
        for identity in IDS:
            store.put(sample_payload(identity))
        assert list(store.collect()) == []
        assert held(store) == set(range(8))


def test_collect_brings_a_folder_under_a_smaller_cap(folder: Path, clock: Clock) -> None:
    with opened(folder, clock=clock) as store:
        for identity in IDS[:4]:
            clock.now += 10
            store.put(sample_payload(identity))
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

    monkeypatch.setattr("prefix_index.room.free_bytes", free_bytes)
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


SMALL_DISK = """
import os, sys
from prefix_index import FileStore, StoreFull
from prefix_index.testing import sample_identity, sample_payload
ids = [sample_identity(range(i, i + 32)) for i in range(40)]
def fill(folder, **options):
    with FileStore(folder, create=True, **options) as store:
        for i in ids:
            store.put(sample_payload(i))
            free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
            assert free >= options.get("min_free_bytes", 0), free
        assert store.contains(ids[-1]) and not store.contains(ids[0])
        store.check_integrity()
        return len(store.list())
assert fill(sys.argv[1] + "/floor", min_free_bytes=300_000) in range(10, 20)
with FileStore(sys.argv[1] + "/floor") as store:
    for i in ids:
        store.delete(i)
assert fill(sys.argv[1] + "/cap", max_bytes=1 << 40) in range(18, 24)
try:
    with FileStore(sys.argv[1] + "/cap") as store:
        for i in ids:
            store.put(sample_payload(i))
except StoreFull as err:
    print(err)
"""


def test_on_a_disk_of_one_mebibyte(tmp_path: Path) -> None:
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    disk = f"mount -t tmpfs -o size=1m none '{tmp_path}' && "
    try:
        subprocess.run([*mount, disk + "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as err:
        pytest.skip(f"no mount namespace here: {err}")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*mount, disk + f"exec '{sys.executable}' -c \"$0\" '{tmp_path}'", SMALL_DISK]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "disk: expected room for the index, found No space left on device; free" in done.stdout


# Recency.


def test_recency_is_the_access_time(folder: Path, clock: Clock) -> None:
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
        other.prefetch(IDS[0])
        assert path.stat().st_atime == clock.now - 100.5  # looking is no use
        clock.now -= 10_000  # set back: the order of uses stays what it was
        store.get(IDS[0]).close()
        assert path.stat().st_atime == got.st_atime
        store.put(sample_payload(IDS[1]))
        assert index_file(folder, IDS[1]).stat().st_atime == got.st_atime + 1
        store.get(IDS[0]).close()
        assert path.stat().st_atime == got.st_atime + 2


def test_a_folder_whose_times_cannot_be_set_is_read_all_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with opened(folder) as store:
        store.put(sample_payload(IDS[0]))
        os.utime(index_file(folder, IDS[0]), (1, 1))
        store.rescan()
        monkeypatch.setattr(os, "utime", refuse)
        with store.get(IDS[0]) as index:
            index.verify()


def test_a_clock_set_back_evicts_in_order_and_expires_nothing(folder: Path, clock: Clock) -> None:
    with opened(folder, max_bytes=3 * ONE, clock=clock) as store:
        store.put(sample_payload(IDS[0]), retention=Retention(expires=clock.now + 5))
        for i in (1, 2):
            clock.now += 1
            store.put(sample_payload(IDS[i]))
        clock.now += 10
        assert held(store) == {1, 2}
        clock.now -= 1_000_000
        assert held(store) == {0, 1, 2}
        store.put(sample_payload(IDS[3]))
        assert len(store.list()) == 3
        assert store.contains(IDS[3])
        store.check_integrity()


# Sidecars.


def test_retention_survives_and_is_seen_by_others(folder: Path) -> None:
    keep = Retention(pinned=True, expires=4e9)
    with opened(folder) as store, opened(folder) as other:
        store.put(sample_payload(IDS[0]))
        assert not keep_file(folder, IDS[0]).exists()
        other.rescan()
        store.retain(IDS[0], keep)
        path = keep_file(folder, IDS[0])
        kept, checksum = path.read_bytes().splitlines()
        assert msgspec.json.decode(kept) == {"pinned": True, "expires": 4e9}
        assert checksum.decode() == xxhash.xxh3_64_hexdigest(IDS[0].digest.encode() + b"\n" + kept)
        assert path.stat().st_mode & 0o777 == 0o600
        other.rescan()
        assert [e.retention for e in other.list()] == [keep]
        other.retain(IDS[0], Retention(expires=1.0))
        store.rescan()
        assert list(store.list()) == []
        assert not store.contains(IDS[0])
        other.put(sample_payload(IDS[0], fill=1))
        with store.get(IDS[0]) as index:
            assert index.array("channels")[0] == 1
        assert [e.retention for e in store.list()] == [Retention()]
        store.retain(IDS[0], keep)
    with opened(folder) as store:
        assert [e.retention for e in store.list()] == [keep]
        assert store.delete(IDS[0])
        assert [p for p in folder.rglob("*") if p.is_file()] == []


def test_expiry_set_elsewhere_does_not_hide_what_was_put_since(folder: Path, clock: Clock) -> None:
    with opened(folder, clock=clock) as store, opened(folder, clock=clock) as other:
        store.put(sample_payload(IDS[0]), retention=Retention(expires=clock.now + 10))
        clock.now += 20
        other.put(sample_payload(IDS[0], fill=1))
        assert store.contains(IDS[0])
        store.get(IDS[0]).close()


def seal(path: Path, kept: bytes, digest: str | None = None) -> None:
    """Writes a sidecar whose checksum is right: by default that of the index it belongs to."""
    checksum = xxhash.xxh3_64_hexdigest((digest or path.stem).encode() + b"\n" + kept)
    path.write_bytes(kept + b"\n" + checksum.encode() + b"\n")


PLANTS: dict[str, tuple[Callable[[Path, Path], object], type[IndexStoreError], str]] = {
    "empty": (lambda p, _: p.write_bytes(b""), IndexCorrupt, "expected checksum"),
    "unsealed": (lambda p, _: p.write_bytes(b'{"pinned":true}'), IndexCorrupt, "expected checksum"),
    "another's": (lambda p, _: seal(p, b'{"pinned":true}', "0" * 64), IndexCorrupt, "expected checksum"),
    "garbage": (lambda p, _: seal(p, b"\xff\x00{"), IndexCorrupt, "JSON of Retention"),
    "other-field": (lambda p, _: seal(p, b'{"pinned":true,"x":1}'), IndexCorrupt, "JSON of Retention"),
    "nan": (lambda p, _: seal(p, b'{"expires":-1}'), IndexCorrupt, "0 or more, found -1"),
    "nested": (lambda p, _: seal(p, b"[" * 4000), IndexCorrupt, "JSON of Retention"),
    "large": (lambda p, _: p.write_bytes(b" " * 5000), IndexCorrupt, "at most 4096 bytes, found more"),
    "link": (lambda p, t: p.symlink_to(t), IndexForeign, "a regular file, found a link"),
    "dangling": (lambda p, _: p.symlink_to("nowhere"), IndexForeign, "a regular file, found a link"),
    "fifo": (lambda p, _: os.mkfifo(p), IndexForeign, "a regular file, found a link, folder, pipe"),
    "folder": (lambda p, _: p.mkdir(), IndexForeign, "a regular file, found a link, folder"),
}


@pytest.mark.parametrize("kind", PLANTS)
def test_a_bad_sidecar_is_a_problem_and_counts_as_none(folder: Path, tmp_path: Path, kind: str) -> None:
    plant, error, message = PLANTS[kind]
    target = tmp_path / "target"
    target.write_bytes(b'{"pinned":true}')
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]))
        path = keep_file(folder, IDS[0])
        plant(path, target)
        for full in (False, True):
            store.rescan(full=full)
            assert [(p.path, type(p.error)) for p in store.problems()] == [(str(path), error)]
            assert message in str(store.problems()[0].error)
            assert str(path) in str(store.problems()[0].error)
            assert [e.retention for e in store.list()] == [Retention()]
            store.check_integrity()
        store.get(IDS[0]).close()
        store.collect()
        assert path.is_symlink() or path.exists()
        assert store.put(sample_payload(IDS[0], fill=1)).retention == Retention()
        if kind == "folder":
            with pytest.raises(StoreFolderError):
                store.retain(IDS[0], PINNED)
            with pytest.raises(StoreFolderError):
                store.put(sample_payload(IDS[0], fill=2), retention=PINNED)
            with store.get(IDS[0]) as index:
                assert index.array("channels")[0] == 1
        else:
            assert not path.is_symlink()
            assert not path.exists()
            assert list(store.problems()) == []
            plant(path, target)
            store.rescan()
            assert store.retain(IDS[0], PINNED).retention == PINNED
            assert list(store.problems()) == []
            store.rescan()
            assert [e.retention for e in store.list()] == [PINNED]
        store.rescan()
        store.check_integrity()
        assert store.delete(IDS[0])
        assert target.read_bytes() == b'{"pinned":true}'


def test_sidecars_without_an_index_are_cleared_away(folder: Path) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]), retention=PINNED)
        index_file(folder, IDS[0]).unlink()
        keep_file(folder, IDS[1]).parent.mkdir(exist_ok=True)
        keep_file(folder, IDS[1]).symlink_to(folder)
        foreign = keep_file(folder, IDS[0]).with_name("notes.pfxkeep")
        foreign.write_text("hello")
        store.rescan()
        assert store.collect() == ()
        assert [p for p in folder.rglob("*") if not p.is_dir()] == [foreign]
        assert [(p.path, type(p.error)) for p in store.problems()] == [(str(foreign), IndexForeign)]
        assert store.put(sample_payload(IDS[0])).retention == Retention()
        store.check_integrity()


def test_an_orphan_speaks_for_no_new_index(folder: Path) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]), retention=Retention(expires=1.0))
        index_file(folder, IDS[0]).unlink()
        assert store.put(sample_payload(IDS[0])).retention == Retention()
        assert store.contains(IDS[0])


@pytest.mark.parametrize("before", [None, PINNED, Retention(expires=1.0)])
@pytest.mark.parametrize("suffix", [".pfxindex", ".pfxkeep"])
def test_a_failed_put_leaves_the_retention(
    folder: Path, before: Retention | None, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def full(source: str, to: str, **options: Any) -> None:
        if to.endswith(suffix):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(source, to, **options)

    with opened(folder) as store:
        if before is not None:
            store.put(sample_payload(IDS[0], fill=1), retention=before)
        files = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", full)
            with pytest.raises(StoreFull):
                store.put(sample_payload(IDS[0], fill=2), retention=Retention(expires=5e9))
        assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == files
        store.rescan()
        store.check_integrity()


def test_wrong_retention_in_the_books_is_an_inconsistency(folder: Path) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]), retention=PINNED)
        store.check_integrity()
        wrong = msgspec.structs.replace(store.list()[0], retention=Retention())
        store._books.catalog.add(IDS[0].digest, wrong)
        with pytest.raises(StoreInconsistent, match=r"retention of .*: expected Retention\(pinned=True"):
            store.check_integrity()


# Several at a time.


def test_a_store_that_somebody_keeps_locked_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefix_index.folder._EXCLUSIVE_WAIT_S", 0.05)
    with opened(folder, max_bytes=2 * ONE) as store:
        fd = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            for identity in IDS[:3]:
                store.put(sample_payload(identity))
            store.retain(IDS[2], Retention(expires=1.0))
            assert [e.identity for e in store.collect()] == [IDS[2]]
            assert len(store.list()) == 1
            store.check_integrity()
        finally:
            os.close(fd)


WRITER = """
import random, sys
from prefix_index import FileStore, IndexNotFound
from prefix_index.testing import sample_identity, sample_payload
rng = random.Random(int(sys.argv[2]))
with FileStore(sys.argv[1], max_bytes=int(sys.argv[3])) as store:
    for step in range(60):
        i = rng.randrange(1000)
        store.put(sample_payload(sample_identity(range(i, i + 32)), fill=i))
        for entry in store.list():
            try:
                with store.get(entry.digest) as index:
                    index.verify()
            except IndexNotFound:
                pass
        if step % 10 == 0:
            store.collect()
    assert not store.problems(), store.problems()
"""


def test_processes_keep_one_cap_together(folder: Path) -> None:
    cap = 5 * ONE + 100
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with opened(folder) as store:
        command = [sys.executable, "-c", WRITER, str(folder)]
        children = [subprocess.Popen([*command, str(i), str(cap)], env=env) for i in range(3)]
        most = 0
        fd = os.open(folder, os.O_RDONLY)
        while any(child.poll() is None for child in children):
            fcntl.flock(fd, fcntl.LOCK_EX)  # so that nothing gets a name, or takes room, while files are counted
            sizes = 0
            for path in (*folder.rglob("*.pfxindex"), *folder.rglob(".partial-*")):
                with contextlib.suppress(FileNotFoundError):
                    sizes += path.stat().st_size
            fcntl.flock(fd, fcntl.LOCK_UN)
            most = max(most, sizes)
            time.sleep(0.03)
        os.close(fd)
        assert [child.wait() for child in children] == [0, 0, 0]
        store.rescan()
        assert store.used_bytes <= cap
        assert cap - ONE < most <= cap
        assert list(folder.rglob(".partial-*")) == []
        store.check_integrity()


def resident_bytes(path: Path) -> int:
    """How much of a file is in the page cache (mincore)."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        pages = (ctypes.c_ubyte * (len(mapping) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapping)
        libc = ctypes.CDLL(None, use_errno=True)
        address, nbytes = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapping))
        assert libc.mincore(address, nbytes, pages) == 0
        del first
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


KEEPER = """
import sys
from prefix_index import FileStore, Retention
from prefix_index.testing import sample_payload
with FileStore(sys.argv[1]) as store:
    print("ready", flush=True)
    fill = int(sys.argv[2])
    while True:
        store.put(sample_payload(fill=fill), retention=Retention(pinned=True, expires=5e9))
        store.retain(sample_payload().identity, Retention(expires=4e9))
        store.put(sample_payload(fill=fill + 1), retention=Retention())
        fill += 2
"""


def test_killed_at_random_moments_of_keeping(folder: Path) -> None:
    legal = {Retention(), Retention(expires=4e9), Retention(pinned=True, expires=5e9)}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    rng = random.Random(0)
    with opened(folder) as store:
        store.put(sample_payload(fill=1))
    for round_ in range(10):
        command = [sys.executable, "-c", KEEPER, str(folder), str(1000 * round_)]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0, 0.05))
            child.kill()
        with opened(folder, partial_grace_s=0.0) as store:
            assert list(store.problems()) == []
            assert {e.retention for e in store.list()} <= legal
            with store.get(sample_identity()) as index:
                index.verify()
            store.check_integrity()
            assert list(folder.rglob(".partial-*")) == []


def test_prefetch_brings_the_whole_file_into_the_page_cache(folder: Path) -> None:
    with opened(folder) as store:
        entry = store.put(sample_payload(IDS[0], values_per_array=1 << 20))
        path = index_file(folder, IDS[0])
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if resident_bytes(path):
            pytest.skip("this file system is memory")
        store.prefetch(IDS[1])
        store.prefetch(IDS[0])
        until = time.monotonic() + 20
        while resident_bytes(path) < entry.nbytes and time.monotonic() < until:
            time.sleep(0.01)
        assert resident_bytes(path) == entry.nbytes


# In memory.


def test_memory_follows_the_same_order(clock: Clock) -> None:
    with MemoryStore(3 * ONE, clock=clock) as store:
        store.put(sample_payload(IDS[0]), retention=PINNED)
        store.put(sample_payload(IDS[1]))
        store.put(sample_payload(IDS[2]), retention=Retention(expires=clock.now + 5))
        clock.now += 10
        store.put(sample_payload(IDS[3]))
        assert held(store) == {0, 1, 3}
        store.put(sample_payload(IDS[4]))
        assert held(store) == {0, 3, 4}
        clock.now -= 1_000_000
        store.get(IDS[3])
        store.put(sample_payload(IDS[5]))
        assert held(store) == {0, 3, 5}
        store.check_integrity()


def test_memory_by_cost(clock: Clock) -> None:
    with MemoryStore(2 * ONE, eviction="cost_aware", clock=clock) as store:
        for i, seconds in enumerate((60.0, 1.0, 1.0)):
            clock.now += 10
            store.put(built_in(seconds, IDS[i]))
        assert held(store) == {0, 2}


class Gate:
    """A payload whose array is made only when the gate opens."""

    def __init__(self, identity: IndexIdentity) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        lazy = LazyArray("uint8", (ONE,), self._load)
        self.payload = IndexPayload(identity, {ArrayKey("kv"): lazy})
        self.errors: list[BaseException] = []

    def _load(self) -> Any:
        self.entered.set()
        assert self.open.wait(20)
        return np.zeros(ONE, "uint8")

    def put(self, store: MemoryStore) -> threading.Thread:
        def run() -> None:
            try:
                store.put(self.payload)
            except BaseException as err:
                self.errors.append(err)

        thread = threading.Thread(target=run)
        thread.start()
        assert self.entered.wait(20)
        return thread


def test_memory_is_usable_while_arrays_are_copied_in() -> None:
    gate = Gate(IDS[0])
    with MemoryStore(6 * ONE) as store:
        store.put(sample_payload(IDS[1]))
        thread = gate.put(store)
        store.get(IDS[1]).verify()
        store.put(sample_payload(IDS[2]))
        assert held(store) == {1, 2}
        store.check_integrity()
        gate.open.set()
        thread.join()
        assert gate.errors == []
        assert held(store) == {0, 1, 2}
        store.check_integrity()


def test_memory_keeps_its_budget_while_puts_are_under_way() -> None:
    gate = Gate(IDS[0])
    with MemoryStore(3 * ONE) as store:  # the gated one takes a little more than ONE
        store.put(sample_payload(IDS[1]))
        thread = gate.put(store)
        store.put(sample_payload(IDS[2]))
        assert held(store) == {2}
        waiting = threading.Thread(target=store.put, args=(sample_payload(IDS[3], values_per_array=1 << 12),))
        waiting.start()
        time.sleep(0.05)
        assert waiting.is_alive()
        gate.open.set()
        thread.join()
        waiting.join()
        assert held(store) == {3}
        assert store.used_bytes <= 3 * ONE
        store.check_integrity()


def test_memory_closed_during_a_put_stays_empty() -> None:
    gate = Gate(IDS[0])
    store = MemoryStore(3 * ONE)
    store.open()
    thread = gate.put(store)
    store.close()
    gate.open.set()
    thread.join()
    assert [type(e).__name__ for e in gate.errors] == ["StoreClosed"]
    store.open()
    assert store.used_bytes == 0
    store.put(sample_payload(IDS[1], values_per_array=1 << 12))
    store.check_integrity()
