"""What leaves a folder is written down beside it, whatever the reason, and never in the way of the removal."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefix_index import FileStore, Retention, read_removals, removals
from tests.prefix_index.samples import sample_identity, sample_payload

IDS = [sample_identity(tuple(range(16 * (n + 1)))) for n in range(4)]


@pytest.fixture
def store(folder: Path) -> Iterator[FileStore]:
    with FileStore(folder, create=True) as store:
        for number, identity in enumerate(IDS):
            store.put(sample_payload(identity), retention=Retention(name=f"index {number}"))
        yield store


def told(folder: Path) -> list[tuple[Any, ...]]:
    return [(one.identity, one.name, one.why) for one in read_removals(folder)]


def test_each_way_to_leave_is_written_down_the_newest_first(store: FileStore, folder: Path) -> None:
    assert told(folder) == []
    begun = time.time()
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


def test_an_index_that_left_twice_is_told_once(store: FileStore, folder: Path) -> None:
    for _ in range(2):
        store.delete(IDS[0])
        store.put(sample_payload(IDS[0]))
    assert [identity for identity, *_ in told(folder)] == [IDS[0]]


@pytest.mark.parametrize("damage", [b"\xff\x00 nonsense\n", b'{"identity": {}, "removed": 1}\n', b'{"identity":\n'])
def test_a_damaged_record_hides_nothing_else(store: FileStore, folder: Path, damage: bytes) -> None:
    store.delete(IDS[0])
    with (folder / removals.NAME).open("ab") as file:
        file.write(damage)
    store.delete(IDS[1])
    assert [identity for identity, *_ in told(folder)] == [IDS[1], IDS[0]]


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_an_index_leaves_though_nothing_can_be_written_down(
    store: FileStore, folder: Path, kind: str, tmp_path: Path
) -> None:
    record, elsewhere = folder / removals.NAME, tmp_path / "elsewhere"
    elsewhere.write_bytes(b"not ours")
    if kind == "folder":
        record.mkdir()
    elif kind == "link":
        record.symlink_to(elsewhere)
    else:
        os.mkfifo(record)
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
