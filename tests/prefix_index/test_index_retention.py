"""How long an index in a folder stays: sidecars, read by other stores, damaged, orphaned or half written; who leaves a
full store; a folder's limits: its byte cap and the disk's free space; and what is written down of all that left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import xxhash

from prefix_index import (
    FileStore,
    IndexCorrupt,
    IndexEntry,
    IndexForeign,
    IndexStoreError,
    Retention,
    StoreFolderError,
    StoreFull,
    file,
    read_removals,
    removals,
)
from prefix_index.folder import Signature, folder_fd
from prefix_index.retention import Candidate, choose_victims, remove_orphans
from tests.prefix_index.samples import IDS, PINNED, sample_payload
from tests.prefix_index.small_stores import (
    ONE,
    Clock,
    balanced,
    filled,
    held,
    holding,
    index_file,
    keep_file,
    opened,
    refused,
)


def test_a_sidecar_on_disk(folder: Path) -> None:
    with holding(folder, IDS[0]) as store:
        path = keep_file(folder, IDS[0])
        assert not path.exists()
        store.retain(IDS[0], Retention(pinned=True, expires=4e9))
        kept, checksum = path.read_bytes().splitlines()
        assert msgspec.json.decode(kept) == {"pinned": True, "expires": 4e9}
        assert checksum.decode() == xxhash.xxh3_64_hexdigest(IDS[0].digest.encode() + b"\n" + kept)
        assert path.stat().st_mode & 0o777 == 0o600
        assert store.delete(IDS[0])
        assert [p.name for p in folder.rglob("*") if p.is_file()] == [removals.NAME]


def test_a_sidecar_from_before_names_is_read(folder: Path) -> None:
    with holding(folder, IDS[0]) as store:
        seal(keep_file(folder, IDS[0]), b'{"pinned":true,"expires":null}')
        store.rescan()
        assert [e.retention for e in store.list()] == [Retention(pinned=True)]


def test_expiry_set_elsewhere_does_not_hide_what_was_put_since(folder: Path, clock: Clock) -> None:
    over = Retention(expires=clock.now + 10)
    with holding(folder, IDS[0], retention=over, clock=clock) as store, opened(folder, clock=clock) as other:
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
    "another's": (lambda p, _: seal(p, b'{"pinned":true}', "0" * 64), IndexCorrupt, "expected checksum"),
    "garbage": (lambda p, _: seal(p, b"\xff\x00{"), IndexCorrupt, "JSON of Retention"),
    "name-of-a-terminal": (lambda p, _: seal(p, rb'{"name":"a\u001b[1m"}'), IndexCorrupt, "printable characters"),
    "name-too-long": (lambda p, _: seal(p, b'{"name":"%s"}' % (b"a" * 257)), IndexCorrupt, "printable characters"),
    "nan": (lambda p, _: seal(p, b'{"expires":-1}'), IndexCorrupt, "0 or more, found -1"),
    "nested": (lambda p, _: seal(p, b"[" * 4000), IndexCorrupt, "JSON of Retention"),
    "large": (lambda p, _: p.write_bytes(b" " * 5000), IndexCorrupt, "expected checksum"),
    "link": (lambda p, t: p.symlink_to(t), IndexForeign, "a regular file, found a link"),
    "fifo": (lambda p, _: os.mkfifo(p), IndexForeign, "a regular file, found a link, folder, pipe"),
    "folder": (lambda p, _: p.mkdir(), IndexForeign, "a regular file, found a link, folder"),
}


@pytest.mark.parametrize("kind", PLANTS)
def test_a_bad_sidecar_is_a_problem_and_counts_as_none(folder: Path, tmp_path: Path, kind: str) -> None:
    plant, error, message = PLANTS[kind]
    target = tmp_path / "target"
    target.write_bytes(b'{"pinned":true}')
    with holding(folder, IDS[0]) as store:
        path = keep_file(folder, IDS[0])
        plant(path, target)
        for full in (False, True):
            store.rescan(full=full)
            assert [(p.path, type(p.error)) for p in store.problems()] == [(str(path), error)]
            assert message in str(store.problems()[0].error)
            assert str(path) in str(store.problems()[0].error)
            assert [e.retention for e in store.list()] == [Retention()]
            balanced(store)
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
        balanced(store)
        assert store.delete(IDS[0])
        assert target.read_bytes() == b'{"pinned":true}'


def test_an_orphan_speaks_for_no_new_index(folder: Path) -> None:
    with holding(folder, IDS[0], retention=Retention(expires=1.0)) as store:
        index_file(folder, IDS[0]).unlink()
        assert store.put(sample_payload(IDS[0])).retention == Retention()
        assert store.contains(IDS[0])


@pytest.mark.parametrize("before", [PINNED, Retention(expires=1.0)])
def test_a_failed_put_leaves_the_retention(folder: Path, before: Retention) -> None:
    with holding(folder, IDS[0], retention=before) as store:
        kept = keep_file(folder, IDS[0]).read_bytes()
        with refused("rename", lambda _, to: to.endswith(".pfxindex"), errno.ENOSPC), pytest.raises(StoreFull):
            store.put(sample_payload(IDS[0], fill=2), retention=Retention(expires=5e9))
        assert keep_file(folder, IDS[0]).read_bytes() == kept


def test_an_index_that_is_gone_keeps_the_sidecar_of_who_is_about_to_name_it(folder: Path) -> None:
    kept = Retention(expires=4e9)
    with holding(folder, IDS[0], retention=kept) as store:
        path = index_file(folder, IDS[0])
        seen = Signature.of(os.lstat(path)), kept
        path.unlink()
        assert not store.delete(IDS[0].digest, seen=seen)
        assert keep_file(folder, IDS[0]).exists()


def test_a_writer_who_waited_in_vain_for_the_folder_keeps_its_pin(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another process collects, the retention is there and the index has no name yet."""
    monkeypatch.setattr("prefix_index.folder._EXCLUSIVE_WAIT_S", 0.05)
    folder.mkdir()
    rename = os.rename

    def collected_before(source: str, target: str, **where: Any) -> None:
        if target.endswith(".pfxindex"):
            fcntl.flock(lock, fcntl.LOCK_UN)
            other.collect()
        rename(source, target, **where)

    with FileStore(folder) as store, FileStore(folder) as other, folder_fd(folder) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(os, "rename", collected_before)
        assert store.put(sample_payload(IDS[0]), retention=PINNED).retention == PINNED
        other.rescan()
        assert [entry.retention for entry in other.list()] == [PINNED]


def test_orphans_and_the_dead_s_files_of_the_future_go_too(folder: Path) -> None:
    """The clock was set back."""

    def leave(*paths: Path) -> None:
        for path in paths:
            path.touch()
            os.utime(path, (time.time() + 3600, time.time() + 3600))

    with holding(folder, IDS[0], retention=PINNED) as store:
        kept, shard = keep_file(folder, IDS[0]), index_file(folder, IDS[0]).parent
        index_file(folder, IDS[0]).unlink()
        partial, lease = shard / ".partial-1-deadbeefdeadbeef", shard / f".lease-{IDS[0].digest}"
        leave(partial, lease, kept)
        store.collect()
        assert [path.name for path in (partial, lease, kept) if path.exists()] == []
        leave(partial, kept)
        store._clean(60.0)
        assert not partial.exists()
        with folder_fd(shard) as fd:
            remove_orphans(fd, [IDS[0].digest], grace_s=60.0)
        assert not kept.exists()


@pytest.mark.parametrize("what", ["retain", "put"])
def test_nothing_fails_behind_the_rename_of_a_retention(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    rename, armed = os.rename, list[bool]()

    def renaming(*args: Any, **options: Any) -> None:
        rename(*args, **options)
        armed.extend([True] if str(args[1]).endswith(".pfxkeep") else [])

    with holding(folder, IDS[0]) as store:
        monkeypatch.setattr(os, "rename", renaming)
        with refused("fstat", lambda _: bool(armed) and armed.pop()):
            if what == "retain":
                store.retain(IDS[0], Retention(pinned=True))
            else:
                store.put(sample_payload(fill=2), retention=Retention(pinned=True))
        monkeypatch.undo()
        store.rescan(full=True)
        assert [entry.retention.pinned for entry in store.list()] == [True]


def test_order_of_leaving_expired_then_unpinned_then_pinned_each_by_use() -> None:
    over, not_yet = Retention(expires=50.0, pinned=True), Retention(expires=101.0, pinned=True)
    uses = [
        (PINNED, 10),
        (Retention(), 90),
        (Retention(), 20),
        (Retention(expires=100.0), 99),
        (over, 95),
        (not_yet, 5),
    ]
    form = {"nbytes": 100, "created": 0.0, "build_seconds": 1.0}
    candidates = [
        Candidate(IndexEntry(identity=IDS[number], retention=kept, **form), used)
        for number, (kept, used) in enumerate(uses)
    ]
    for nbytes, expected in ((600, [4, 3, 2, 1, 5, 0]), (300, [4, 3, 2]), (201, [4, 3, 2])):
        victims = choose_victims(candidates, nbytes, now=100.0)
        assert [IDS.index(victim.identity) for victim in victims or ()] == expected
    assert choose_victims(candidates, 601, now=100.0) is None


def test_what_cannot_fit_evicts_nobody(folder: Path) -> None:
    with holding(folder, IDS[0], max_bytes=2 * ONE) as store:
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
    with filled(folder, 4, clock) as store:
        assert list(store.collect()) == []
    with opened(folder, max_bytes=2 * ONE, clock=clock) as store:
        assert held(store) == {0, 1, 2, 3}
        removed = store.collect()
        assert {IDS.index(e.identity) for e in removed} == {0, 1}
        assert held(store) == {2, 3}
        assert list(store.collect()) == []
        assert store.evicted[:2] == (2, sum(e.nbytes for e in removed))
        assert store.evicted.seconds > 0


@pytest.mark.parametrize("alive", [True, False])
def test_a_write_under_way_takes_room_and_a_dead_one_does_not(folder: Path, alive: bool) -> None:
    with holding(folder, IDS[0], max_bytes=2 * ONE) as store:
        partial = index_file(folder, IDS[0]).with_name(".partial-1-other")
        with partial.open("wb") as writer:
            writer.truncate(ONE)
            if alive:
                fcntl.flock(writer, fcntl.LOCK_EX)
            os.utime(partial, (time.time() - 2, time.time() - 2))
            store.put(sample_payload(IDS[1]))
            assert held(store) == ({1} if alive else {0, 1})
            assert partial.exists() == alive


@pytest.mark.parametrize("max_bytes", [None, 1 << 40])
def test_free_space_floor(
    tmp_path: Path, folder: Path, clock: Clock, max_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = 5 * ONE

    def free_bytes(_: Path) -> int:
        return disk - sum(p.stat().st_size for p in folder.rglob("*.pfxindex"))

    assert 0.5 < file.free_bytes(tmp_path) / shutil.disk_usage(tmp_path).free < 2  # others write and remove
    monkeypatch.setattr(file, "free_bytes", free_bytes)
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


def test_recency_is_the_access_time(folder: Path, clock: Clock) -> None:
    with holding(folder, IDS[0], clock=clock) as store, opened(folder) as other:
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
        with refused("utime"):
            store.get(IDS[0]).close()  # whose time cannot be set is read all the same


@pytest.fixture
def store(folder: Path) -> Iterator[FileStore]:
    with opened(folder) as store:
        for number in range(4):
            store.put(sample_payload(IDS[number]), retention=Retention(name=f"index {number}"))
        yield store


def told(folder: Path) -> list[tuple[Any, ...]]:
    return [(one.identity, one.name, one.why) for one in read_removals(folder)]


def test_each_way_to_leave_is_written_down_the_newest_first(store: FileStore, folder: Path) -> None:
    assert told(folder) == []
    begun = time.time()
    store.delete(IDS[0])
    store.put(sample_payload(IDS[0]), retention=Retention(name="index 0"))
    store.delete(IDS[0])
    assert not store.delete(IDS[0]), "one that is not there leaves no record"
    store.retain(IDS[1], Retention(name="index 1", expires=1.0))
    store.collect()
    store.get(IDS[3]).close()
    nbytes = sum(entry.nbytes for entry in store.list())
    with FileStore(folder, max_bytes=nbytes - 1) as store:
        assert [entry.identity for entry in store.collect()] == [IDS[2]]
        assert store.problems() == (), "the record is no index, and no problem"
    assert told(folder) == [
        (IDS[2], "index 2", "evicted"),
        (IDS[1], "index 1", "expired"),
        (IDS[0], "index 0", "removed"),
    ]
    assert all(begun <= one.removed <= time.time() for one in read_removals(folder))
    assert (folder / removals.NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "damage",
    [b"\xff\x00 nonsense\n", b'{"identity": {}, "removed": 1}\n', b'{"identity":\n', b'{"x":' + b"[" * 100_000 + b"\n"],
    ids=["nonsense", "another", "cut", "deep"],
)
def test_a_damaged_record_hides_nothing_else(store: FileStore, folder: Path, damage: bytes) -> None:
    store.delete(IDS[0])
    with (folder / removals.NAME).open("ab") as file:
        file.write(damage)
    store.delete(IDS[1])
    assert [identity for identity, *_ in told(folder)] == [IDS[1], IDS[0]]
    assert len(removals.removals_behind(folder, b"")[0]) == 2


def test_a_line_that_a_full_disk_cuts_short_hides_no_other(store: FileStore, folder: Path) -> None:
    store.delete(IDS[0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((folder / removals.NAME).stat().st_size + 20, limits[1]))
    try:
        store.delete(IDS[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (folder / removals.NAME).read_bytes().endswith(b"\n")
    store.delete(IDS[2])
    assert [identity for identity, *_ in told(folder)] == [IDS[2], IDS[0]]


def test_a_record_that_a_full_disk_keeps_from_being_shortened_stays(
    store: FileStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for identity in IDS[:2]:
        store.delete(identity)
    before = (folder / removals.NAME).read_bytes()
    monkeypatch.setattr(removals, "MAX_NBYTES", len(before) - 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        assert store.delete(IDS[2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (folder / removals.NAME).read_bytes() == before


@pytest.mark.parametrize("plant", [Path.mkdir, os.mkfifo, lambda at: at.symlink_to(at.parent.parent / "elsewhere")])
def test_an_index_leaves_though_nothing_can_be_written_down(
    store: FileStore, folder: Path, tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"not ours")
    plant(folder / removals.NAME)
    assert store.delete(IDS[0])
    assert not store.contains(IDS[0])
    assert told(folder) == []
    assert elsewhere.read_bytes() == b"not ours"


def test_of_a_record_of_any_size_only_the_end_is_read(store: FileStore, folder: Path) -> None:
    record = folder / removals.NAME
    store.delete(IDS[0])
    line = record.read_bytes()
    with record.open("r+b") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + line)
    store.delete(IDS[1])
    assert [identity for identity, *_ in told(folder)] == [IDS[1], IDS[0]]
    assert record.stat().st_size < 3 * removals.MAX_NBYTES


def test_a_record_is_read_only_to_shorten_it(store: FileStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Mock(side_effect=removals._lines)
    with monkeypatch.context() as patch:
        patch.setattr(removals, "_lines", reads)
        store.delete(IDS[0])
        store.delete(IDS[1])
        assert reads.call_count == 0, "who makes much room would read it for each index that leaves, the folder locked"
        patch.setattr(removals, "MAX_NBYTES", 0)
        store.delete(IDS[2])
        assert reads.call_count == 1
    assert [identity for identity, *_ in told(folder)] == [IDS[2]]


def test_what_a_dead_process_left_while_it_shortened_the_record_goes(
    store: FileStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removals, "MAX_NBYTES", 0)
    left = folder / f"{removals.PARTIAL}{os.getpid()}"
    store.delete(IDS[0])
    left.write_bytes(b"of another process of this number\n" * 100)
    store.delete(IDS[1])
    assert b"of another" not in (folder / removals.NAME).read_bytes()
    left.write_bytes(b"of one that is dead")
    young = folder / f"{removals.PARTIAL}1"
    young.write_bytes(b"of one that may live")
    os.utime(left, (1e9, 1e9))
    with FileStore(folder):
        assert (left.exists(), young.exists()) == (False, True)
    os.utime(young, (1e9, 1e9))
    with FileStore(folder, partial_grace_s=1e12) as store:
        assert young.exists()
        store._partial_grace_s = 60.0
        store.collect()
    assert not young.exists()
