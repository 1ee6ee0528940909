"""What one refused system call costs a folder's store: an error that says so, never a retention or a descriptor."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefix_index import (
    FileStore,
    IndexFile,
    IndexPayload,
    IndexStoreError,
    IndexUnreadable,
    Retention,
    StoreFolderError,
    books,
)
from prefix_index.folder import PARTIAL, remove_unlocked
from prefix_index.retention import _prepared
from prefix_index.testing import sample_payload
from tests.prefix_index.conformance import find
from tests.prefix_index.faults.refusals import KINDS, Refusals, refusing
from tests.prefix_index.faults.tools import fork, reap
from tests.prefix_index.machine import Clock
from tests.prefix_index.small_stores import IDS, ONE, PINNED, index_file, keep_file, opened, settled
from tests.prefix_index.test_index_passing import refuse

FAR = Retention(expires=4e9)


def raising(monkeypatch: pytest.MonkeyPatch, name: str, fails: Callable[..., bool]) -> None:
    """A call of ``os`` fails with EIO where ``fails`` says so of its arguments."""
    real = getattr(os, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if fails(*args):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, call)


# ---- retention ----


@pytest.mark.parametrize("asked", [None, FAR, Retention()], ids=str)
@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO])
def test_a_put_over_a_retention_that_cannot_be_read_changes_nothing(
    folder: Path, error: int, asked: Retention | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0], fill=1), retention=PINNED)
        with monkeypatch.context() as patch:
            refuse(patch, keep_file(folder, IDS[0]), error)
            with pytest.raises(StoreFolderError, match=r"retention of index .*readable bytes.*; put it again"):
                store.put(sample_payload(IDS[0], fill=2), retention=asked)
        store.rescan(full=True)
        assert [e.retention for e in store.list()] == [PINNED]
        with store.get(IDS[0]) as index:
            assert index.stats["fill"] == 1
        assert store.put(sample_payload(IDS[0], fill=2)).retention == PINNED
        store.check_integrity()


def test_reads_and_writes_that_do_a_part_are_gone_on_with(folder: Path) -> None:
    for kept in (PINNED, FAR):
        with refusing(Refusals("short", 0, 10**6)), opened(folder) as store:
            store.put(sample_payload(IDS[0], fill=1))
            store.retain(IDS[0], kept)
            store.put(sample_payload(IDS[0], fill=2))
            with store.get(IDS[0]) as index:
                index.verify()
        with opened(folder) as store:
            assert [e.retention for e in store.list()] == [kept]
            assert list(store.problems()) == []
        with refusing(Refusals("short", 0, 10**6)), opened(folder) as store:
            assert [e.retention for e in store.list()] == [kept]
            assert store.contains(IDS[0])
            assert list(store.problems()) == []


def test_what_is_about_to_become_a_retention_is_nobodys_to_clear_away(folder: Path) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]))
        fd = os.open(keep_file(folder, IDS[0]).parent, os.O_RDONLY)
        with _prepared(fd, IDS[0].digest, PINNED, mode=0o600) as commit:
            assert remove_unlocked(fd, PARTIAL, grace_s=0.0) == 0
            commit()
        os.close(fd)
        store.rescan()
        assert [e.retention for e in store.list()] == [PINNED]


def test_a_retention_that_cannot_be_lengthened_is_no_success(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0], fill=1), retention=FAR)
        with monkeypatch.context() as patch:
            raising(patch, "unlink", lambda name, *_: str(name).endswith(".pfxkeep"))
            with pytest.raises(StoreFolderError):
                store.put(sample_payload(IDS[0], fill=2), retention=Retention())
        store.rescan()
        with store.get(IDS[0]) as index:
            assert (index.stats["fill"], store.list()[0].retention) == (1, FAR)


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
            raising(patch, "scandir", lambda place: isinstance(place, int))
            assert list(store.collect()) == []
        other.rescan()
        assert [(e.identity, e.retention) for e in other.list()] == [(IDS[0], PINNED)]
        store.rescan()
        assert [(e.identity, e.retention) for e in store.list()] == [(IDS[0], PINNED)]


# ---- descriptors and errors ----


def open_in(folder: Path) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in found if path.startswith(str(folder))]


OPERATIONS: dict[str, Callable[[FileStore], object]] = {
    "get": lambda store: store.get(IDS[0]).close(),
    "read": lambda store: read_all(store),
    "contains": lambda store: store.contains(IDS[0]),
    "lease": lambda store: store.lease(IDS[0]),
    "put": lambda store: store.put(sample_payload(IDS[0]), retention=PINNED),
    "retain": lambda store: store.retain(IDS[0], FAR),
    "delete": lambda store: store.delete(IDS[0]),
    "collect": lambda store: store.collect(),
    "rescan": lambda store: store.rescan(full=True),
}


def read_all(store: FileStore) -> None:
    with store.get(IDS[0]) as index:
        index.read_many()


@pytest.mark.parametrize("kind", ["EIO", "EMFILE", "ENOSPC"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_call_refused_once_loses_no_descriptor(folder: Path, name: str, kind: str) -> None:
    """In a child: other threads of this process open and close files meanwhile."""

    def work() -> None:
        with opened(folder) as store:
            refusals = Refusals(kind, 0, 1)
            number = 0
            while number == 0 or refusals.refused:
                store.put(sample_payload(IDS[0]), retention=PINNED)
                refusals = Refusals(kind, number, 1)
                with contextlib.suppress(IndexStoreError), refusing(refusals):
                    OPERATIONS[name](store)
                assert open_in(folder) == [], (number, open_in(folder))
                store.rescan()
                assert name == "delete" or [e.identity for e in store.list()] == [IDS[0]], number
                number += 1

    assert reap(fork(work), 300) == 0


def test_an_index_that_cannot_be_read_now_is_not_told_to_be_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]))
    refuse(monkeypatch, index_file(folder, IDS[0]), errno.EMFILE)
    with opened(folder) as store:
        with pytest.raises(IndexUnreadable):
            store.retain(IDS[0], PINNED)
        monkeypatch.undo()
        assert store.retain(IDS[0], PINNED).retention == PINNED


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


def test_what_is_carried_to_another_store_is_read_and_not_mapped(folder: Path) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0], fill=3))
        with store.get(IDS[0]) as index:
            payload = index.payload()
            arrays = {key: array.load() for key, array in payload.arrays.items()}  # type: ignore[union-attr]
            assert str(folder) not in Path("/proc/self/maps").read_text()
            assert {key: array.tobytes() for key, array in arrays.items()} == {
                key: index.array(*key).tobytes() for key in index.keys
            }


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


def test_every_kind_of_refusal_names_calls_that_exist() -> None:
    for _, names in KINDS.values():
        assert all(name in ("flock", "file.write") or hasattr(os, name) for name in names)
