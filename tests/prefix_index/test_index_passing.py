"""What the operating system refuses for a moment is no verdict: a folder store forgets and hides nothing for it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from prefix_index import (
    FileStore,
    IndexForeign,
    IndexNotFound,
    IndexUnreadable,
    Retention,
    StoreClosed,
    StoreFolderError,
    StoreFull,
)
from prefix_index.testing import sample_payload
from tests.prefix_index.faults.tools import fork, reap
from tests.prefix_index.machine import Clock
from tests.prefix_index.small_stores import (
    IDS,
    ONE,
    PINNED,
    few_descriptors,
    held,
    index_file,
    keep_file,
    opened,
    settled,
)
from tests.prefix_index.tiers import copies_in


def refuse(monkeypatch: pytest.MonkeyPatch, path: Path, error: int) -> None:
    """Opening this file, or folder, fails from now on, whoever asks."""
    real = os.open

    def call(name: Any, flags: int, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> int:
        if Path(name).name == path.name and not flags & os.O_CREAT:
            raise OSError(error, os.strerror(error))
        return real(name, flags, *args, dir_fd=dir_fd, **kwargs)

    monkeypatch.setattr(os, "open", call)


@pytest.mark.parametrize("left", [0, 1])
def test_get_without_descriptors_forgets_nothing(folder: Path, left: int) -> None:
    """In a child: other threads of this process may open and close files meanwhile."""

    def work() -> None:
        with opened(folder) as store:
            store.put(sample_payload(IDS[0]), retention=PINNED)
            settled(folder)
            store.rescan()
            with (
                few_descriptors(left),
                pytest.raises(IndexUnreadable, match="expected readable bytes, found Too many open"),
            ):
                store.get(IDS[0])
            store.rescan()
            assert [e.identity for e in store.list()] == [IDS[0]]
            assert list(store.problems()) == []
            store.check_integrity()
            store.collect()
            assert keep_file(folder, IDS[0]).exists()
            assert store.contains(IDS[0])
            store.get(IDS[0]).close()

    assert reap(fork(work), 120) == 0


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


def test_a_linked_shard_is_not_followed(folder: Path) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]))
        shard = index_file(folder, IDS[0]).parent
        shard.rename(folder / "elsewhere")
        shard.symlink_to(folder / "elsewhere")
        with pytest.raises((IndexNotFound, IndexForeign)):
            store.get(IDS[0])
        store.rescan()
        assert list(store.list()) == []


def test_a_linked_folder_is_foreign(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As systems say it that look at the link before they look for a folder."""
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]))
        refuse(monkeypatch, index_file(folder, IDS[0]).parent, errno.ELOOP)
        with pytest.raises(IndexForeign, match="folder of the index: expected a folder, found a symbolic link"):
            store.get(IDS[0])
        assert list(store.list()) == []


def test_what_came_back_is_seen_again(folder: Path) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]))
        path = index_file(folder, IDS[0])
        times = path.parent.stat()
        path.rename(folder / "away")
        os.utime(path.parent, ns=(times.st_atime_ns, times.st_mtime_ns - 60 * 10**9))
        store.rescan()
        with pytest.raises(IndexNotFound):
            store.get(IDS[0])
        (folder / "away").rename(path)
        os.utime(path.parent, ns=(times.st_atime_ns, times.st_mtime_ns - 60 * 10**9))
        store.rescan()
        assert len(store.list()) == 1


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
        store.check_integrity()
    with store:
        store.rescan()
        assert [e.retention for e in store.list()] == [PINNED]
        assert list(store.problems()) == []
        with monkeypatch.context() as patch:
            refuse(patch, keep_file(folder, IDS[0]), errno.EIO)
            store.rescan(full=True)
            assert [e.retention for e in store.list()] == [PINNED]
        store.check_integrity()


@pytest.mark.parametrize("left", range(5))
def test_a_store_that_opened_without_descriptors_sees_all_after_a_rescan(folder: Path, left: int) -> None:
    with opened(folder) as writer:
        writer.put(sample_payload(IDS[0]))
    settled(folder)

    def work() -> None:
        store = FileStore(folder)
        with few_descriptors(left):
            try:
                store.open()
            except StoreFolderError:
                with pytest.raises(StoreClosed):
                    store.list()
        with store:
            store.rescan()
            assert len(store.list()) == 1
            assert list(store.problems()) == []
            store.check_integrity()

    assert reap(fork(work), 120) == 0


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_shard_that_cannot_be_listed_stays_as_known_and_is_a_problem(
    folder: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as store, opened(folder) as other:
        store.put(sample_payload(IDS[0]), retention=PINNED)
        used = store.used_bytes
        other.put(sample_payload(IDS[1]))
        settled(folder)
        shard = index_file(folder, IDS[0]).parent
        with monkeypatch.context() as patch:
            refuse(patch, shard, error)
            for full in (False, True):
                store.rescan(full=full)
                assert IDS[0] in [e.identity for e in store.list()]
                assert store.used_bytes >= used
                assert [Path(p.path) for p in store.problems()] == [shard]
                with pytest.raises(StoreFolderError, match="folder of indexes: expected one that can be listed, found"):
                    raise store.problems()[0].error
                store.check_integrity()
        store.rescan()
        assert list(store.problems()) == []
        assert {e.identity for e in store.list()} == {IDS[0], IDS[1]}
        assert [e.retention for e in store.list() if e.identity == IDS[0]] == [PINNED]


def test_a_copy_that_cannot_be_opened_now_is_not_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dram = folder.parent / "dram"
    with opened(folder, copies=copies_in(dram)) as store:
        store.put(sample_payload(IDS[0]))
        assert store._prefetches.settle(60)
        with monkeypatch.context() as patch:
            none_left = IndexUnreadable("file", expected="a descriptor", found="none left", remedy="wait")
            patch.setattr("prefix_index.copies.open_named", Mock(side_effect=none_left))
            store.get(IDS[0]).close()
        assert store.counters is not None
        assert store.counters.damaged_dropped == 0
        assert index_file(dram, IDS[0]).exists()


# What stands still


def nail_down(monkeypatch: pytest.MonkeyPatch, folder: Path, *numbers: int) -> None:
    """These files cannot be unlinked, as another user's in a sticky folder cannot."""
    real = os.unlink
    nailed = {index_file(folder, IDS[i]).name for i in numbers}

    def unlink(path: Any, **options: Any) -> None:
        if Path(path).name in nailed:
            raise PermissionError(1, "Operation not permitted")
        real(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)


def filled(folder: Path, count: int, **options: Any) -> FileStore:
    store = opened(folder, clock=Clock(), **options)
    for i in range(count):
        store._clock.now += 10  # type: ignore[attr-defined]
        store.put(sample_payload(IDS[i]))
    return store


def test_the_next_one_leaves_for_one_that_cannot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(folder, 3, max_bytes=3 * ONE) as store:
        nail_down(monkeypatch, folder, 0)
        store.put(sample_payload(IDS[3]))
        assert held(store) == {0, 2, 3}
        assert store.used_bytes == 3 * ONE
        assert [Path(p.path) for p in store.problems()] == [index_file(folder, IDS[0])]
        with pytest.raises(StoreFolderError, match="index that must leave: expected a file to remove, found Operation"):
            raise store.problems()[0].error
        assert store.contains(IDS[0])
        store.check_integrity()
        monkeypatch.undo()
        assert store.delete(IDS[0])
        assert list(store.problems()) == []


def test_the_cap_holds_where_nothing_can_be_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(folder, 3, max_bytes=3 * ONE) as store:
        nail_down(monkeypatch, folder, 0, 1, 2)
        for i in (3, 4):
            with pytest.raises(StoreFull, match=rf"found {ONE} bytes too few and 0 to evict"):
                store.put(sample_payload(IDS[i]))
        store.rescan(full=True)
        assert held(store) == {0, 1, 2}
        assert store.used_bytes == 3 * ONE
        store.put(sample_payload(IDS[1], fill=7))  # replacing takes no room
        store.check_integrity()


def test_collect_tells_what_it_could_not_remove(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(folder, 3).close()
    with opened(folder, max_bytes=2 * ONE) as store:
        nail_down(monkeypatch, folder, 0)
        assert [e.identity for e in store.collect()] == [IDS[1]]
        assert held(store) == {0, 2}
        assert [Path(p.path) for p in store.problems()] == [index_file(folder, IDS[0])]
        store.retain(IDS[0], Retention(expires=1.0))
        assert list(store.collect()) == []
        store.check_integrity()
        monkeypatch.undo()
        assert [e.identity for e in store.collect()] == [IDS[0]]
        assert list(store.problems()) == []
