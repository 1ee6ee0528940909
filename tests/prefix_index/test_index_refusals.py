"""What the system refuses costs a folder's store an error that says so: no index is forgotten or hidden for it, no
retention lost, no descriptor leaked. And reports of damage: whom they hide, for how long, and whom they must not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from prefix_index import FileStore, IndexCorrupt, IndexStoreError, IndexUnreadable, Retention, StoreFolderError, books
from tests.prefix_index.samples import IDS, PINNED, find, read_fill, sample_payload
from tests.prefix_index.small_stores import (
    ONE,
    Clock,
    balanced,
    filled,
    flip,
    held,
    holding,
    index_file,
    keep_file,
    opened,
    refused,
    settled,
)
from tests.prefix_index.tiers import copies_in


def paths(store: FileStore) -> list[Path]:
    """What the store's problems are about."""
    return [Path(problem.path) for problem in store.problems()]


def retentions(store: FileStore) -> list[Retention]:
    return [entry.retention for entry in store.list()]


@pytest.mark.parametrize("error", [errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("what", ["index", "shard"])
def test_get_tells_a_refusal_from_absence(folder: Path, error: int, what: str) -> None:
    with holding(folder, IDS[0]) as store:
        path = index_file(folder, IDS[0])
        with refused(path if what == "index" else path.parent, error=error):
            with pytest.raises(IndexUnreadable):
                store.get(IDS[0])
            assert not store.contains(IDS[0])
        assert [e.identity for e in store.list()] == [IDS[0]]
        assert list(store.problems()) == []
        store.get(IDS[0]).close()


@pytest.mark.parametrize("suffix", [".pfxindex", ".pfxkeep"])
def test_a_scan_asks_again_for_what_it_was_refused(folder: Path, suffix: str) -> None:
    holding(folder, IDS[0], retention=PINNED).close()
    settled(folder)
    path = index_file(folder, IDS[0]).with_suffix(suffix)
    with refused(path):
        store = opened(folder)
        assert paths(store) == [path]
        assert isinstance(store.problems()[0].error, IndexUnreadable)
        balanced(store)
    with store:
        store.rescan()
        assert retentions(store) == [PINNED]
        assert list(store.problems()) == []
        with refused(keep_file(folder, IDS[0])):
            store.rescan(full=True)
            assert retentions(store) == [PINNED]
        balanced(store)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_shard_that_cannot_be_listed_stays_as_known_and_is_a_problem(folder: Path, error: int) -> None:
    with holding(folder, IDS[0], retention=PINNED) as store, opened(folder) as other:
        used = store._books.used_bytes
        other.put(sample_payload(IDS[1]))
        settled(folder)
        shard = index_file(folder, IDS[0]).parent
        with refused(shard, error=error):
            for full in (False, True):
                store.rescan(full=full)
                assert IDS[0] in [e.identity for e in store.list()]
                assert store._books.used_bytes >= used
                assert paths(store) == [shard]
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
    with holding(folder, IDS[0], copies=copies_in(dram)) as store:
        assert store._copier.settle(60)
        with monkeypatch.context() as patch:
            none_left = IndexUnreadable("file", expected="a descriptor", found="none left", remedy="wait")
            patch.setattr("prefix_index.reader.open_named", Mock(side_effect=none_left))
            store.get(IDS[0]).close()
        assert store.counters is not None
        assert store.counters.damaged_dropped == 0
        assert index_file(dram, IDS[0]).exists()


def test_messages_tell_what_to_do_about_a_process_without_descriptors_and_a_folder_in_a_files_place(
    folder: Path,
) -> None:
    with holding(folder, IDS[0]) as store:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        for call in (partial(store.get, IDS[0]), partial(store.put, sample_payload(IDS[1]))):
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            try:
                with pytest.raises(IndexStoreError, match="Too many open files; free memory or descriptors") as raised:
                    call()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert isinstance(raised.value, (IndexUnreadable, StoreFolderError))
        store.delete(IDS[0])
        index_file(folder, IDS[0]).mkdir()
        with pytest.raises(StoreFolderError, match="found Is a directory; remove the folder that has a file's name"):
            store.delete(IDS[0])


def standing() -> contextlib.AbstractContextManager[None]:
    """The first index cannot be removed in the block."""
    return refused("unlink", lambda name, *_: IDS[0].digest in str(name), errno.EPERM)


def test_the_next_one_leaves_for_one_that_cannot(folder: Path) -> None:
    with filled(folder, 3, max_bytes=3 * ONE) as store:
        with standing():
            store.put(sample_payload(IDS[3]))
            assert held(store) == {0, 2, 3}
            assert store._books.used_bytes == 3 * ONE
            assert paths(store) == [index_file(folder, IDS[0])]
            message = "index that must leave: expected a file to remove, found Operation"
            with pytest.raises(StoreFolderError, match=message):
                raise store.problems()[0].error
            assert store.contains(IDS[0])
            balanced(store)
        assert store.delete(IDS[0])
        assert list(store.problems()) == []


def test_collect_tells_what_it_could_not_remove(folder: Path) -> None:
    filled(folder, 3).close()
    with opened(folder, max_bytes=2 * ONE) as store:
        with standing():
            assert [e.identity for e in store.collect()] == [IDS[1]]
            assert held(store) == {0, 2}
            assert paths(store) == [index_file(folder, IDS[0])]
            store.retain(IDS[0], Retention(expires=1.0))
            assert list(store.collect()) == []
            balanced(store)
        assert [e.identity for e in store.collect()] == [IDS[0]]
        assert list(store.problems()) == []


def test_an_index_whose_retention_cannot_be_read_is_not_replaced(folder: Path) -> None:
    with holding(folder, IDS[0], retention=PINNED) as store:
        message = r"retention of index .*, which is to be replaced: expected"
        with refused(keep_file(folder, IDS[0])), pytest.raises(StoreFolderError, match=message):
            store.put(sample_payload(IDS[0], fill=2))
        assert read_fill(store) == 0
        assert retentions(store) == [PINNED]


def test_an_index_that_cannot_be_read_now_is_not_told_to_be_none(folder: Path) -> None:
    holding(folder, IDS[0]).close()
    with refused(index_file(folder, IDS[0]), error=errno.EMFILE):
        store = opened(folder)
        with pytest.raises(IndexUnreadable):
            store.retain(IDS[0], PINNED)
    with store:
        assert store.retain(IDS[0], PINNED).retention == PINNED


def test_an_index_whose_retention_is_not_known_leaves_last(folder: Path) -> None:
    with holding(folder, IDS[0], retention=PINNED) as store:
        store.put(sample_payload(IDS[1]))
    with refused(keep_file(folder, IDS[0])), opened(folder, max_bytes=2 * ONE) as store:
        assert {e.identity: e.retention for e in store.list()} == {IDS[0]: Retention(pinned=True), IDS[1]: Retention()}
        store.put(sample_payload(IDS[2]))
        store.put(sample_payload(IDS[3]))
        store.collect()
        assert held(store) == {0, 3}
    with opened(folder) as store:
        assert PINNED in retentions(store)


def test_nothing_leaves_by_what_was_known_of_a_folder_that_cannot_be_listed(folder: Path, clock: Clock) -> None:
    over = Retention(expires=clock.now + 10)
    with holding(folder, IDS[0], retention=over, clock=clock) as store, opened(folder, clock=clock) as other:
        other.retain(IDS[0], PINNED)
        clock.now += 20
        with refused("scandir", lambda place: isinstance(place, int)):
            assert list(store.collect()) == []
        for one in (other, store):
            one.rescan()
            assert (held(one), retentions(one)) == ({0}, [PINNED])


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
    with holding(folder, IDS[0]) as store:
        for place in (folder, index_file(folder, IDS[0]).parent):
            os.utime(place, (place.stat().st_atime, place.stat().st_mtime + ahead_s))
        for _ in range(2):
            store.rescan()
            threading.Event().wait(0.1)
        store.rescan()
        listed.clear()
        store.rescan()
        assert listed == []
        holding(folder, IDS[1]).close()
        store.rescan()
        assert {e.identity for e in store.list()} == {IDS[0], IDS[1]}


def test_very_many_foreign_files_are_some_problems_and_a_number(folder: Path, listed: list[object]) -> None:
    with holding(folder, IDS[0]) as store:
        foreign = [
            place / f"foreign-{number}"
            for place in (folder, index_file(folder, IDS[0]).parent)
            for number in range(150)
        ]
        for path in foreign:
            path.touch()
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
        for path in foreign:
            path.unlink()
        store.rescan()
        assert list(store.problems()) == []


def test_look_ups_do_not_wait_for_a_rescan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with holding(folder, IDS[0]) as store:
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


def test_a_file_that_another_process_replaced_is_offered_again(folder: Path) -> None:
    with holding(folder, IDS[0]) as store, opened(folder) as other:
        with store.get(IDS[0]) as index:
            assert store.report(index, IndexCorrupt("checksum", expected="a", found="b", remedy="build again"))
        other.put(sample_payload(fill=2))
        assert store.contains(IDS[0])  # even before a rescan
        assert read_fill(store) == 2
        store.rescan()
        assert list(store.problems()) == []


def test_a_damaged_header_is_found_by_get_and_stays_hidden(folder: Path) -> None:
    with holding(folder, IDS[0]) as store:
        flip(index_file(folder, IDS[0]), 100)
        for _ in range(2):
            with pytest.raises(IndexCorrupt, match="header entry checksum"):
                store.get(IDS[0])
            assert not store.contains(IDS[0])
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

    with holding(folder, IDS[0]) as store:
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


def test_after_a_failed_last_sync_the_books_tell_what_is_there(folder: Path) -> None:
    with holding(folder, IDS[0]) as store:
        settled(folder)
        store.rescan()
        failing = refused("fsync", lambda fd: stat.S_ISDIR(os.fstat(fd).st_mode))
        with failing, pytest.raises(StoreFolderError, match="Input/output error"):
            store.put(sample_payload(values_per_array=4096, fill=2))
        nbytes = index_file(folder, IDS[0]).stat().st_size
        assert [e.nbytes for e in store.list()] == [nbytes]
        balanced(store)
