"""Copies of hot indexes in DRAM: never wrong, whoever changes the folder, and never an error of its store. And work in
the background, which makes them: across a fork, and at the end of a process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefix_index import (
    ArrayKey,
    Copies,
    FileStore,
    IndexCorrupt,
    IndexFile,
    IndexNotFound,
    Retention,
    StoreFolderError,
    background,
)
from prefix_index.copies import TierCounters
from prefix_index.store import digest_of
from tests.prefix_index.samples import IDS, fill_of, read_fill, sample_identity, sample_payload
from tests.prefix_index.small_stores import (
    SOON,
    balanced,
    flip,
    fork,
    in_threads,
    index_file,
    place_of,
    python,
    reap,
    remove,
)
from tests.prefix_index.tiers import copies_in, eventually

OTHER = sample_identity(range(48))
DIGEST = sample_identity().digest
CHANNELS = ArrayKey("channels")


@contextlib.contextmanager
def opened(folder: Path, *, max_bytes: int = 64 << 20) -> Iterator[FileStore]:
    """A store of ``folder`` with copies in ``dram`` beside it."""
    with FileStore(folder, create=True, copies=copies_in(folder.parent / "dram", max_bytes)) as store:
        yield store
        balanced(store)


@pytest.fixture
def store(folder: Path) -> Iterator[FileStore]:
    """One that has an index, and a copy of it."""
    with opened(folder) as store:
        store.put(sample_payload(fill=4))
        assert copied(store)
        yield store


@pytest.fixture
def copy(folder: Path) -> Path:
    """Where that copy is."""
    return index_file(folder.parent / "dram", sample_identity())


def counts(store: FileStore) -> TierCounters:
    assert store.counters is not None
    return store.counters


def copied(store: FileStore, key: Any = None) -> bool:
    """Asks for a copy, and waits until that is made, or could not be. Whether ``get`` opens one then."""
    store._copier.request(digest_of(key or sample_identity()))
    assert store._copier.settle(SOON)
    with store.get(key or sample_identity()) as index:
        return in_dram(index)


def in_dram(index: IndexFile) -> bool:
    return "/dram/" in str(index.path)


def copies(folder: Path) -> set[str]:
    """Digests of the copies that there are."""
    return {path.stem for path in (folder.parent / "dram").glob("*/*.pfxindex")}


def put_elsewhere(folder: Path, **changes: Any) -> None:
    with FileStore(folder, create=True) as other:
        other.put(sample_payload(**changes))


def damage(path: Path) -> None:
    with IndexFile.open(path) as index:
        flip(path, place_of(index, CHANNELS))


def test_what_a_dead_maker_of_copies_left_goes_with_a_collection(store: FileStore, copy: Path) -> None:
    left = copy.with_name(".partial-1-deadbeefdeadbeef")
    left.touch()
    os.utime(left, (1.0, 1.0))
    store.rescan(full=True)
    assert left.exists()
    store.collect()
    assert not left.exists()


def test_a_copy_is_used_when_its_index_is(store: FileStore, copy: Path) -> None:
    os.utime(copy, (1.0, 1.0))
    with store.get(sample_identity()) as index:
        assert in_dram(index)
    assert copy.stat().st_atime == pytest.approx(store.path_of(DIGEST).stat().st_atime, abs=1e-3)


def test_put_and_get_make_a_copy_and_get_opens_it(folder: Path, copy: Path) -> None:
    with opened(folder) as store:
        entry = store.put(sample_payload(fill=7))
        assert entry.path == str(store.path_of(DIGEST))
        assert copied(store)
        assert read_fill(store) == 7
        assert copies(folder) == {DIGEST}
        assert (counts(store).hits_fast, counts(store).promotions, counts(store).promotion_failures) == (2, 1, 0)
        with store.get(DIGEST) as index:
            assert index.tier == "dram"
        assert store.path_of(DIGEST).read_bytes() == copy.read_bytes()
    put_elsewhere(folder, identity=OTHER)
    with opened(folder) as store:
        store.get(OTHER).close()
        eventually(lambda: copies(folder) == {DIGEST, OTHER.digest})


def test_what_does_not_fit_is_stored_and_served_and_not_read_again_at_each_get(folder: Path) -> None:
    with opened(folder, max_bytes=4096) as store:
        store.put(sample_payload(fill=7))
        assert not copied(store)
        failures = counts(store).promotion_failures
        for _ in range(3):
            assert read_fill(store) == 7
        assert store._copier.settle(SOON)
        assert counts(store).promotion_failures == failures
        assert not copied(store), "asked for, it is tried again"
        assert counts(store).promotion_failures == failures + 1


def test_a_replacement_by_another_process_is_served_though_size_and_times_are_equal(
    folder: Path, store: FileStore
) -> None:
    before = store.path_of(DIGEST).stat()
    put_elsewhere(folder, fill=2)
    os.utime(store.path_of(DIGEST), ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read_fill(store) == 2
    assert counts(store).stale_dropped == 1
    assert copied(store)
    assert read_fill(store) == 2


def test_what_was_deleted_or_has_expired_is_a_miss_and_loses_its_copy(folder: Path) -> None:
    ids = IDS[:3]
    with opened(folder) as store, FileStore(folder) as other:
        for identity in ids:
            store.put(sample_payload(identity))
            assert copied(store, identity)
        other.rescan()
        assert store.delete(ids[0])
        assert other.delete(ids[1])
        other.retain(ids[2], Retention(expires=1.0))
        store.rescan()
        for identity in ids:
            with pytest.raises(IndexNotFound):
                store.get(identity)
            assert not store.contains(identity)
        assert copies(folder) == {ids[2].digest}
        assert [e.identity for e in store.collect()] == [ids[2]]
        assert copies(folder) == set()


@pytest.mark.parametrize("where", ["magic", "footer", "cut", "a folder"])
def test_a_damaged_header_of_a_copy_costs_only_time(store: FileStore, copy: Path, where: str) -> None:
    if where == "cut":
        copy.write_bytes(copy.read_bytes()[:5000])
    elif where == "a folder":
        copy.unlink()
        copy.mkdir()
    else:
        flip(copy, 2 if where == "magic" else copy.stat().st_size - 3)
    index = store.get(DIGEST)
    assert not in_dram(index)
    assert fill_of(index) == 4
    assert list(store.problems()) == []
    assert counts(store).damaged_dropped + counts(store).stale_dropped == (where != "a folder")
    if where == "a folder":
        copy.rmdir()
    assert copied(store)


def test_damage_in_a_copy_is_never_held_against_the_index(store: FileStore, copy: Path) -> None:
    damage(copy)
    readers = [store.get(DIGEST) for _ in range(3)]
    for reader in readers:
        assert reader.path == str(copy)
        with reader, pytest.raises(IndexCorrupt, match="checksum of") as caught:
            reader.verify()
        assert not store.report(reader, caught.value)
        assert list(store.problems()) == []
        assert read_fill(store) == 4
    eventually(lambda: copied(store))  # the copy that was removed last may have been a job that still ran
    damage(copy)
    reader = store.get(DIGEST)
    reader.close()
    nameless = IndexCorrupt("an array", expected="a", found="b", remedy="c")
    assert not store.report(reader, nameless)
    assert list(store.problems()) == [], "a check of the copy has found it guilty"


def test_damage_found_while_copying_takes_the_index_out_of_the_offer(folder: Path) -> None:
    put_elsewhere(folder, fill=4)
    path = FileStore(folder).path_of(DIGEST)
    damage(path)
    with opened(folder) as store:
        store._copier.request(DIGEST)
        assert store._copier.settle(SOON)
        assert list(store.list()) == []
        assert [type(p.error) for p in store.problems()] == [IndexCorrupt]
        assert copies(folder) == set()
        store.put(sample_payload(fill=5))
        assert read_fill(store) == 5
        assert list(store.problems()) == []


def test_the_copies_folder_may_go(store: FileStore, folder: Path) -> None:
    remove(folder.parent / "dram")
    assert read_fill(store) == 4
    store.put(sample_payload(fill=5))
    assert not copied(store)
    assert read_fill(store) == 5
    store.rescan()
    assert [type(p.error) for p in store.problems()] == [StoreFolderError]
    assert store.delete(DIGEST)
    (folder.parent / "dram").mkdir()
    store.rescan()
    assert list(store.problems()) == []


def test_a_copies_folder_that_cannot_be_opened_is_an_error_at_once(folder: Path) -> None:
    missing = folder.parent / "missing"
    store = FileStore(folder, create=True, copies=Copies(missing, keeper=FileStore(missing)))
    with pytest.raises(StoreFolderError, match="expected an existing folder, found nothing"):
        store.open()


def test_who_only_reads_copies_tells_of_each_use_and_makes_none(store: FileStore, folder: Path, copy: Path) -> None:
    told: list[tuple[str, bool | None]] = []
    reading = Copies(folder.parent / "dram", tell=lambda digest, copy: told.append((digest, copy)))
    with FileStore(folder, copies=reading) as reader:
        assert in_dram(reader.get(DIGEST))
        copy.unlink()
        assert not in_dram(reader.get(DIGEST))
        assert reader._copier.settle(SOON)
        assert copies(folder) == set()
    assert told == [(DIGEST, True), (DIGEST, False)]


def test_threads_never_see_an_older_index_than_the_last_that_was_put(folder: Path) -> None:
    """One writer counts up, or deletes; what a reader gets was current at some time during its get."""
    latest, stop = [0], threading.Event()
    with opened(folder, max_bytes=100 << 10) as store:
        payloads = [sample_payload(fill=fill) for fill in range(1, 60)]
        crowd = [sample_payload(identity) for identity in IDS[1:4]]
        for payload in crowd:
            store.put(payload)

        def read() -> None:
            while not stop.is_set():
                least = latest[0]
                with contextlib.suppress(IndexNotFound):
                    assert read_fill(store) >= least

        def crowd_out() -> None:
            while not stop.is_set():
                for payload in crowd:
                    assert read_fill(store, payload.identity) == 0
                store._copier.request(DIGEST)
                store.rescan()

        def write() -> None:
            with contextlib.ExitStack() as stack:
                stack.callback(stop.set)
                for fill, payload in enumerate(payloads, 1):
                    if fill % 7 == 0:
                        store.delete(DIGEST)
                    store.put(payload)
                    latest[0] = fill
                    time.sleep(0.005)

        in_threads(write, read, read, read, crowd_out)
        assert read_fill(store) == 59


class SlowInParent(FileStore):
    """Copying from it begins, and does not end before ``go``; not so in a child."""

    parent = os.getpid()
    began, go = threading.Event(), threading.Event()

    def _copy(self, digest: str, check: background.Check) -> None:
        if os.getpid() == self.parent and threading.current_thread().name.startswith("prefix_index-promoter"):
            self.began.set()
            assert self.go.wait(200)  # longer than the child may take
        super()._copy(digest, check)


def test_a_child_does_its_own_jobs_and_waits_for_none_of_its_parent_s(folder: Path) -> None:
    put_elsewhere(folder)
    slow = SlowInParent(folder, copies=copies_in(folder.parent / "dram"))
    with slow as store:
        store._copier.request(IDS[0].digest)
        assert slow.began.wait(60)
        job = store._copier.request(IDS[0].digest)

        def work() -> None:
            signal.alarm(60)
            assert not job.wait()
            store._copier.request(IDS[0].digest)
            assert store._copier.settle(60)
            assert in_dram(store.get(IDS[0]))
            store.close()

        assert reap(fork(work), 120) == 0
        slow.go.set()


def test_jobs_are_one_a_digest_few_and_cancelled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Semaphore(0), threading.Event()
    steps: list[str] = []

    def slow(self: FileStore, digest: str, check: background.Check) -> None:
        steps.append(digest)
        begun.release()
        assert go.wait(60)
        check()
        steps.append("second")

    monkeypatch.setattr(FileStore, "_copy", slow)
    store = FileStore(folder, create=True)
    store.open()
    for _ in range(1000):
        for identity in IDS[:2]:
            store._copier.request(identity.digest)
    assert begun.acquire(timeout=60)  # else it may be dropped for those that follow
    for number in range(1000):
        store._copier.request(f"{number:064x}")
    assert len(store._copier._pending) <= background.MAX_PENDING
    closing = threading.Thread(target=store.close)
    closing.start()
    eventually(lambda: store._copier._closed)
    go.set()  # not before: a job that goes on earlier is right to take its second step
    closing.join(60)
    assert not closing.is_alive()
    assert len(steps) == 1  # neither its second step nor another job


EXIT = """
import sys, time
from prefix_index import FileStore
FileStore._copy = lambda *_: time.sleep(10)
store = FileStore(sys.argv[1], create=True)
store.open()
for i in range(60):
    store._copier.request(f"{i:064x}")
"""


def test_a_process_with_jobs_under_way_ends(folder: Path) -> None:
    """Without doing them all: that takes ten minutes, ten seconds each."""
    with python(EXIT, folder) as process:
        assert process.wait(300) == 0


def test_a_folder_of_indexes_is_not_taken_for_one_of_copies(folder: Path) -> None:
    """As when the two folders are named the wrong way round: nothing of it goes."""
    dram = folder.parent / "dram"
    with FileStore(dram, create=True) as other:
        other.put(sample_payload())
    copies = copies_in(dram, 64 << 20)
    with pytest.raises(StoreFolderError, match=r"one with \.copies, which holds copies only, found indexes"):
        FileStore(folder, create=True, copies=copies).open()
    with FileStore(dram) as other:
        assert [entry.digest for entry in other.list()] == [DIGEST]
