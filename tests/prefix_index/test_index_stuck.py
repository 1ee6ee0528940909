"""Indexes that must leave a folder and cannot be removed: others leave for them, or the store says that it is full."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from prefix_index import FileStore, Retention, StoreFolderError, StoreFull
from prefix_index.testing import sample_payload
from tests.prefix_index.machine import Clock
from tests.prefix_index.small_stores import IDS, ONE, held, index_file, opened


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
