"""Uses of an index in a folder: when the last one was, and pages brought in ahead of the next."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from prefix_index import Retention
from prefix_index.testing import sample_payload
from tests.prefix_index.machine import Clock
from tests.prefix_index.small_stores import IDS, ONE, held, index_file, opened, resident_bytes


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


def test_prefetch_brings_the_whole_file_into_the_page_cache(folder: Path) -> None:
    with opened(folder) as store:
        entry = store.put(sample_payload(IDS[0], values_per_array=1 << 20))
        path = index_file(folder, IDS[0])
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if resident_bytes(path):
            pytest.skip("this file system is memory")
        store.prefetch(IDS[1])
        until = time.monotonic() + 60
        while (found := resident_bytes(path)) < entry.nbytes and time.monotonic() < until:
            store.prefetch(IDS[0])  # again: short of memory, the kernel reads less, or drops what it has read
            time.sleep(0.01)
        assert found == entry.nbytes
