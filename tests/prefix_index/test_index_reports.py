"""Reports of damage: whom they hide, for how long, and whom they must not."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from prefix_index import ArrayKey, FileStore, IndexCorrupt, IndexPayload, LazyArray
from tests.prefix_index.balance import balanced
from tests.prefix_index.samples import IDS, read_fill, sample_identity, sample_payload
from tests.prefix_index.small_stores import flip, index_file, opened, refuse_call, settled

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


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOSPC, errno.EIO])
def test_an_error_of_the_payload_s_own_files_is_not_the_store_s(folder: Path, number: int) -> None:
    error = OSError(number, os.strerror(number), "model/kv.bin")

    def load() -> Any:
        raise error

    with FileStore(folder, create=True) as store:
        store.put(sample_payload(fill=1))
        with pytest.raises(OSError, match=r"model/kv\.bin") as caught:
            store.put(IndexPayload(sample_identity(), {ArrayKey("kv"): LazyArray("uint8", (4,), load)}))
        assert caught.value is error
        assert read_fill(store) == 1
        balanced(store)
