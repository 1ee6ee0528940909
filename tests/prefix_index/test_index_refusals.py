"""What the system refuses costs a folder's store an error that says so: no index is forgotten or hidden for it, no
retention lost, no descriptor leaked. And reports of damage: whom they hide, for how long, and whom they must not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from prefix_index import (
    FileStore,
    IndexCorrupt,
    IndexFile,
    IndexPayload,
    IndexStoreError,
    IndexUnreadable,
    Retention,
    StoreFolderError,
    books,
)
from tests.prefix_index.balance import balanced
from tests.prefix_index.samples import IDS, PINNED, find, read_fill, sample_identity, sample_payload
from tests.prefix_index.small_stores import (
    ONE,
    Clock,
    flip,
    fork,
    held,
    index_file,
    keep_file,
    opened,
    reap,
    refuse,
    refuse_call,
    settled,
)
from tests.prefix_index.tiers import copies_in

# ---- what passes is no verdict ----


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("what", ["index", "shard"])
def test_get_tells_a_refusal_from_absence(folder: Path, error: int, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]))
        path = index_file(folder, IDS[0])
        with monkeypatch.context() as patch:
            refuse(patch, path if what == "index" else path.parent, error)
            with pytest.raises(IndexUnreadable):
                store.get(IDS[0])
            assert not store.contains(IDS[0])
        assert [e.identity for e in store.list()] == [IDS[0]]
        assert list(store.problems()) == []
        store.get(IDS[0]).close()


@pytest.mark.parametrize("suffix", [".pfxindex", ".pfxkeep"])
def test_a_scan_asks_again_for_what_it_was_refused(folder: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder) as writer:
        writer.put(sample_payload(IDS[0]), retention=PINNED)
    settled(folder)
    path = index_file(folder, IDS[0]).with_suffix(suffix)
    with monkeypatch.context() as patch:
        refuse(patch, path, errno.EIO)
        store = opened(folder)
        assert [Path(p.path) for p in store.problems()] == [path]
        assert isinstance(store.problems()[0].error, IndexUnreadable)
        balanced(store)
    with store:
        store.rescan()
        assert [e.retention for e in store.list()] == [PINNED]
        assert list(store.problems()) == []
        with monkeypatch.context() as patch:
            refuse(patch, keep_file(folder, IDS[0]), errno.EIO)
            store.rescan(full=True)
            assert [e.retention for e in store.list()] == [PINNED]
        balanced(store)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_shard_that_cannot_be_listed_stays_as_known_and_is_a_problem(
    folder: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as store, opened(folder) as other:
        store.put(sample_payload(IDS[0]), retention=PINNED)
        used = store._books.used_bytes
        other.put(sample_payload(IDS[1]))
        settled(folder)
        shard = index_file(folder, IDS[0]).parent
        with monkeypatch.context() as patch:
            refuse(patch, shard, error)
            for full in (False, True):
                store.rescan(full=full)
                assert IDS[0] in [e.identity for e in store.list()]
                assert store._books.used_bytes >= used
                assert [Path(p.path) for p in store.problems()] == [shard]
                with pytest.raises(StoreFolderError, match="folder of indexes: expected one that can be listed, found"):
                    raise store.problems()[0].error
                balanced(store)
            late = opened(folder)
        for one in (store, late):
            one.rescan()
            assert list(one.problems()) == []
            assert {e.identity for e in one.list()} == {IDS[0], IDS[1]}
            assert [e.retention for e in one.list() if e.identity == IDS[0]] == [PINNED]


def test_a_copy_that_cannot_be_opened_now_is_not_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dram = folder.parent / "dram"
    with opened(folder, copies=copies_in(dram)) as store:
        store.put(sample_payload(IDS[0]))
        assert store._copier.settle(60)
        with monkeypatch.context() as patch:
            none_left = IndexUnreadable("file", expected="a descriptor", found="none left", remedy="wait")
            patch.setattr("prefix_index.reader.open_named", Mock(side_effect=none_left))
            store.get(IDS[0]).close()
        assert store.counters is not None
        assert store.counters.damaged_dropped == 0
        assert index_file(dram, IDS[0]).exists()


# ---- what stands still ----


def filled(folder: Path, count: int, **options: Any) -> FileStore:
    store = opened(folder, clock=Clock(), **options)
    for i in range(count):
        store._clock.now += 10  # type: ignore[attr-defined]
        store.put(sample_payload(IDS[i]))
    return store


def test_the_next_one_leaves_for_one_that_cannot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(folder, 3, max_bytes=3 * ONE) as store:
        refuse_call(monkeypatch, "unlink", lambda name, *_: IDS[0].digest in str(name), errno.EPERM)
        store.put(sample_payload(IDS[3]))
        assert held(store) == {0, 2, 3}
        assert store._books.used_bytes == 3 * ONE
        assert [Path(p.path) for p in store.problems()] == [index_file(folder, IDS[0])]
        with pytest.raises(StoreFolderError, match="index that must leave: expected a file to remove, found Operation"):
            raise store.problems()[0].error
        assert store.contains(IDS[0])
        balanced(store)
        monkeypatch.undo()
        assert store.delete(IDS[0])
        assert list(store.problems()) == []


def test_collect_tells_what_it_could_not_remove(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(folder, 3).close()
    with opened(folder, max_bytes=2 * ONE) as store:
        refuse_call(monkeypatch, "unlink", lambda name, *_: IDS[0].digest in str(name), errno.EPERM)
        assert [e.identity for e in store.collect()] == [IDS[1]]
        assert held(store) == {0, 2}
        assert [Path(p.path) for p in store.problems()] == [index_file(folder, IDS[0])]
        store.retain(IDS[0], Retention(expires=1.0))
        assert list(store.collect()) == []
        balanced(store)
        monkeypatch.undo()
        assert [e.identity for e in store.collect()] == [IDS[0]]
        assert list(store.problems()) == []


# ---- retention ----


def test_an_index_whose_retention_cannot_be_read_is_not_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0], fill=1), retention=PINNED)
        with monkeypatch.context() as patch:
            refuse(patch, keep_file(folder, IDS[0]), errno.EIO)
            with pytest.raises(StoreFolderError, match=r"retention of index .*, which is to be replaced: expected"):
                store.put(sample_payload(IDS[0], fill=2))
        assert read_fill(store, IDS[0]) == 1
        assert [e.retention for e in store.list()] == [PINNED]


def test_a_retention_that_cannot_be_lengthened_is_no_success(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0], fill=1), retention=Retention(expires=4e9))
        with monkeypatch.context() as patch:
            refuse_call(patch, "unlink", lambda name, *_: str(name).endswith(".pfxkeep"))
            with pytest.raises(StoreFolderError):
                store.put(sample_payload(IDS[0], fill=2), retention=Retention())
        store.rescan()
        with store.get(IDS[0]) as index:
            assert (index.stats["fill"], store.list()[0].retention) == (1, Retention(expires=4e9))


def test_an_index_that_cannot_be_read_now_is_not_told_to_be_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]))
    refuse(monkeypatch, index_file(folder, IDS[0]), errno.EMFILE)
    with opened(folder) as store:
        with pytest.raises(IndexUnreadable):
            store.retain(IDS[0], PINNED)
        monkeypatch.undo()
        assert store.retain(IDS[0], PINNED).retention == PINNED


def test_an_index_whose_retention_is_not_known_leaves_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]), retention=PINNED)
        store.put(sample_payload(IDS[1]))
    refuse(monkeypatch, keep_file(folder, IDS[0]), errno.EIO)
    with opened(folder, max_bytes=2 * ONE) as store:
        assert {e.identity: e.retention for e in store.list()} == {IDS[0]: Retention(pinned=True), IDS[1]: Retention()}
        store.put(sample_payload(IDS[2]))
        store.put(sample_payload(IDS[3]))
        store.collect()
        assert {e.identity for e in store.list()} == {IDS[0], IDS[3]}
    monkeypatch.undo()
    with opened(folder) as store:
        assert store.list()[[e.identity for e in store.list()].index(IDS[0])].retention == PINNED


def test_nothing_leaves_by_what_was_known_of_a_folder_that_cannot_be_listed(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder, clock=clock) as store, opened(folder, clock=clock) as other:
        store.put(sample_payload(IDS[0]), retention=Retention(expires=clock.now + 10))
        other.rescan()
        other.retain(IDS[0], PINNED)
        clock.now += 20
        with monkeypatch.context() as patch:
            refuse_call(patch, "scandir", lambda place: isinstance(place, int))
            assert list(store.collect()) == []
        other.rescan()
        assert [(e.identity, e.retention) for e in other.list()] == [(IDS[0], PINNED)]
        store.rescan()
        assert [(e.identity, e.retention) for e in store.list()] == [(IDS[0], PINNED)]


# ---- looking ----


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Folders listed since the test cleared it."""
    real, seen = os.scandir, []

    def scandir(place: Any) -> Any:
        seen.append(place)
        return real(place)

    monkeypatch.setattr(os, "scandir", scandir)
    return seen


@pytest.mark.parametrize("ahead_s", [-60, 3600])
def test_folders_that_do_not_change_are_not_listed_again(
    folder: Path, ahead_s: float, listed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their time says: the clock was set back, or is another one's."""
    monkeypatch.setattr(books, "_SETTLES_S", 0.05)
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]))
        for place in (folder, index_file(folder, IDS[0]).parent):
            os.utime(place, (place.stat().st_atime, place.stat().st_mtime + ahead_s))
        for _ in range(2):
            store.rescan()
            threading.Event().wait(0.1)
        store.rescan()
        listed.clear()
        store.rescan()
        assert listed == []
        with opened(folder) as other:
            other.put(sample_payload(IDS[1]))
        store.rescan()
        assert {e.identity for e in store.list()} == {IDS[0], IDS[1]}


def test_very_many_foreign_files_are_some_problems_and_a_number(folder: Path, listed: list[object]) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]))
        shard = index_file(folder, IDS[0]).parent
        for place in (folder, shard):
            for number in range(150):
                (place / f"foreign-{number}").touch()
        settled(folder)
        os.utime(folder, (1e9, 1e9))
        store.rescan()
        texts = [str(problem.error) for problem in store.problems()]
        assert len(texts) == 202
        assert sum("found 50 beside the 100 listed; move it elsewhere" in text for text in texts) == 2
        assert len(store.list()) == 1
        listed.clear()
        store.rescan()
        assert listed == []
        for place in (folder, shard):
            for number in range(150):
                (place / f"foreign-{number}").unlink()
        store.rescan()
        assert list(store.problems()) == []


def test_look_ups_do_not_wait_for_a_rescan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder) as store:
        store.put(sample_payload())
        with stuck_listing(monkeypatch) as begun:
            thread = threading.Thread(target=store.rescan, kwargs={"full": True})
            thread.start()
            assert begun.wait(60)
            answers: list[object] = []
            asking = threading.Thread(target=lambda: answers.append(find(store, range(32))))
            asking.start()
            asking.join(60)
            assert [entry is not None for entry in answers] == [True]
        thread.join()


@contextlib.contextmanager
def stuck_listing(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Listing a folder takes until the end of the block. Gives what is set once somebody waits."""
    begun, over, real = threading.Event(), threading.Event(), os.scandir

    def scandir(place: Any) -> Any:
        begun.set()
        over.wait(120)
        return real(place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        try:
            yield begun
        finally:
            over.set()


# ---- reading, not mapping ----


def test_a_file_that_is_cut_while_it_is_carried_is_an_error_and_no_signal(folder: Path) -> None:
    def work() -> None:
        with opened(folder) as store, pytest.MonkeyPatch.context() as patch:
            patch.setattr("prefix_index.reader._READ_AHEAD_NBYTES", 0)
            store.put(sample_payload(IDS[0], values_per_array=1 << 14))
            index: IndexFile = store.get(IDS[0])
            payload: IndexPayload = index.payload()
            first, *_, last = (array for array in payload.arrays.values())
            first.load()  # type: ignore[union-attr]
            os.truncate(index_file(folder, IDS[0]), 8192)
            with pytest.raises(IndexStoreError):
                last.load()  # type: ignore[union-attr]

    assert reap(fork(work), 120) == 0


# Reports of damage

ERROR = IndexCorrupt("checksum", expected="a", found="b", remedy="build again")


def test_a_file_that_another_process_replaced_is_offered_again(folder: Path) -> None:
    with opened(folder) as store, opened(folder) as other:
        store.put(sample_payload())
        with store.get(sample_identity()) as index:
            assert store.report(index, ERROR)
        other.put(sample_payload(fill=2))
        assert store.contains(sample_identity())  # even before a rescan
        assert read_fill(store) == 2
        store.rescan()
        assert list(store.problems()) == []


def test_a_damaged_header_is_found_by_get_and_stays_hidden(folder: Path) -> None:
    with opened(folder) as store:
        store.put(sample_payload())
        flip(index_file(folder, sample_identity()), 100)
        for _ in range(2):
            with pytest.raises(IndexCorrupt, match="header entry checksum"):
                store.get(sample_identity())
            assert not store.contains(sample_identity())
            assert list(store.list()) == []
        assert len(store.problems()) == 1


def test_a_put_whose_file_was_deleted_meanwhile_is_not_listed_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the put's rename and its last step another thread deletes the index and looks at the folder."""
    named, deleted = threading.Event(), threading.Event()
    real = os.fsync

    def slow(fd: int) -> None:
        real(fd)
        if stat.S_ISDIR(os.fstat(fd).st_mode) and threading.current_thread() is writer:
            named.set()
            assert deleted.wait(60)

    with opened(folder) as store:
        store.put(sample_payload(IDS[0]))
        writer = threading.Thread(target=store.put, args=(sample_payload(IDS[0]),))
        monkeypatch.setattr(os, "fsync", slow)
        writer.start()
        assert named.wait(60)
        monkeypatch.undo()
        assert store.delete(IDS[0])
        settled(folder)
        store.rescan()
        deleted.set()
        writer.join()
        store.rescan()
        assert list(store.list()) == []
        assert store._books.used_bytes == 0
        balanced(store)


def test_after_a_failed_last_sync_the_books_tell_what_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder) as store:
        store.put(sample_payload(fill=1))
        settled(folder)
        store.rescan()
        with monkeypatch.context() as patch:
            refuse_call(patch, "fsync", lambda fd: stat.S_ISDIR(os.fstat(fd).st_mode))
            with pytest.raises(Exception, match="Input/output error"):
                store.put(sample_payload(values_per_array=4096, fill=2))
        nbytes = index_file(folder, sample_identity()).stat().st_size
        assert [e.nbytes for e in store.list()] == [nbytes]
        balanced(store)
