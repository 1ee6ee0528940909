"""Two stores as one: copies in the fast tier that are never wrong, whoever changes the slow one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefix_index import (
    FileStore,
    IndexEntry,
    IndexNotFound,
    IndexPayload,
    InvalidPayload,
    MemoryStore,
    Retention,
    StoreInconsistent,
    TieredStore,
    Wait,
)
from prefix_index.store import IndexLookup
from prefix_index.testing import sample_identity, sample_payload
from tests.prefix_index.tiered_stores import SOON, CatalogStore, FarStore, fill_of, memory, opened, put_elsewhere


def test_put_writes_to_both_and_get_reads_the_fast_one(folder: Path) -> None:
    fast, slow = memory(), FileStore(folder, create=True)
    with opened(fast, slow) as store:
        entry = store.put(sample_payload(fill=7))
        assert entry == slow.list()[0]
        assert entry.path == str(slow.path_of(entry.digest))
        assert [e.digest for e in fast.list()] == [entry.digest]
        index = store.get(entry.identity)
        assert index.path is None
        assert fill_of(index) == 7
        assert store.counters._asdict() == dict.fromkeys(store.counters._fields, 0) | {"hits_fast": 1}


def test_delete_takes_the_copy_along(folder: Path) -> None:
    with opened(memory(), FileStore(folder, create=True)) as store:
        store.put(sample_payload())
        assert store.delete(sample_identity())
        assert not store.delete(sample_identity())
        assert not store.fast.contains(sample_identity())
        assert store.counters.stale_dropped == 0


def test_what_does_not_fit_in_fast_is_stored_and_served_and_not_read_again_at_each_get(folder: Path) -> None:
    with opened(MemoryStore(4096), FarStore(folder, create=True)) as store:
        store.put(sample_payload(fill=7))
        assert not store.promotion(sample_identity(), SOON)
        failures = store.counters.promotion_failures
        assert failures == 2
        for wait in Wait:
            store._wait = wait
            assert fill_of(store.get(sample_identity())) == 7
        time.sleep(0.05)
        assert store.counters.promotion_failures == failures
        assert (store.counters.hits_fast, store.counters.hits_slow, store.counters.promotions) == (0, 3, 0)


def test_a_put_that_does_not_fit_takes_the_old_copy_away(folder: Path) -> None:
    fast = MemoryStore(64 << 10)
    with opened(fast, FileStore(folder, create=True)) as store:
        store.put(sample_payload(fill=1))
        assert len(fast.list()) == 1
        store.put(sample_payload(fill=2, values_per_array=1 << 20))
        assert list(fast.list()) == []
        assert fill_of(store.get(sample_identity())) == 2


def test_a_replacement_by_another_process_is_served_though_size_and_times_are_equal(folder: Path) -> None:
    with opened(memory(), FileStore(folder, create=True)) as store:
        store.put(sample_payload(fill=1))
        assert fill_of(store.get(sample_identity())) == 1
        put_elsewhere(folder, fill=2)
        assert fill_of(store.get(sample_identity())) == 2
        assert store.counters.stale_dropped == 1
        assert store.promotion(sample_identity(), SOON)
        index = store.get(sample_identity())
        assert index.path is None
        assert fill_of(index) == 2


def test_what_another_process_deleted_or_let_expire_is_a_miss(folder: Path) -> None:
    gone, expired = sample_identity(), sample_identity(range(48))
    with opened(memory(), FileStore(folder, create=True)) as store, FileStore(folder) as other:
        for identity in (gone, expired):
            store.put(sample_payload(identity))
            assert store.fast.contains(identity)
        other.rescan()
        assert other.delete(gone)
        other.retain(expired, Retention(expires=1.0))
        store.slow.rescan()
        for identity in (gone, expired):
            with pytest.raises(IndexNotFound):
                store.get(identity)
            assert not store.contains(identity)
            assert not store.promotion(identity, SOON)
            assert not store.fast.contains(identity)


def test_rescan_drops_what_slow_no_longer_has_and_full_compares_checksums(folder: Path) -> None:
    fast = memory()
    with opened(fast, FileStore(folder, create=True)) as store:
        kept, gone = sample_identity(), sample_identity(range(48))
        store.put(sample_payload(kept, fill=1))
        store.put(sample_payload(gone, fill=1))
        with FileStore(folder) as other:
            other.delete(gone)
            other.put(sample_payload(kept, fill=2))
        store.rescan()
        assert [e.digest for e in fast.list()] == [kept.digest]
        store.rescan(full=True)
        assert list(fast.list()) == []
        assert store.counters.stale_dropped == 2


def test_a_fast_folder_from_an_earlier_life_is_not_trusted(folder: Path) -> None:
    fast = FileStore(folder.parent / "fast", create=True)
    with opened(fast, FileStore(folder, create=True)) as store:
        store.put(sample_payload(fill=1))
        store.put(sample_payload(sample_identity(range(48)), fill=1))
    with FileStore(folder) as other:
        other.put(sample_payload(fill=2))
        other.delete(sample_identity(range(48)))
    with opened(fast, FileStore(folder)) as store:
        assert [e.digest for e in fast.list()] == [sample_identity().digest]
        assert fill_of(store.get(sample_identity())) == 2


@pytest.mark.parametrize("by_put", [False, True], ids=["promotion", "put"])
def test_an_index_deleted_while_it_is_copied_leaves_no_copy(folder: Path, by_put: bool) -> None:
    class Late(MemoryStore):
        """Between its own put and anything after it, the index is deleted."""

        def put(self, payload: IndexPayload, *, retention: Retention | None = None) -> IndexEntry:
            entry = super().put(payload, retention=retention)
            assert other.delete(entry.digest)
            return entry

    fast = Late(1 << 20)
    with FileStore(folder, create=True) as other, opened(fast, FileStore(folder)) as store:
        if by_put:
            store.put(sample_payload())
        else:
            other.put(sample_payload())
            assert not store.promotion(sample_identity(), SOON)
        assert list(fast.list()) == []
        assert store.counters.promotions == 0


def test_a_store_that_knows_its_checksums_is_not_read_at_a_hit(folder: Path) -> None:
    slow = CatalogStore(folder)
    with opened(memory(), slow) as store:
        store.put(sample_payload(fill=1))
        asked = slow.asked
        assert fill_of(store.get(sample_identity())) == 1
        put_elsewhere(folder, fill=2)
        assert fill_of(store.get(sample_identity())) == 1
        assert slow.asked == asked
        store.rescan()
        assert fill_of(store.get(sample_identity())) == 2


def test_retention_is_that_of_both(folder: Path) -> None:
    fast = memory()
    pinned = Retention(pinned=True)
    with opened(fast, FileStore(folder, create=True)) as store:
        store.put(sample_payload(), retention=pinned)
        assert [e.retention for e in fast.list()] == [pinned]
        fast.delete(sample_identity())
        assert store.promotion(sample_identity(), SOON)
        assert [e.retention for e in fast.list()] == [pinned]
        store.retain(sample_identity(), Retention())
        assert [e.retention for e in fast.list()] == [e.retention for e in store.list()] == [Retention()]


def test_collect_takes_the_copies_along(folder: Path) -> None:
    fast = memory()
    with opened(fast, FileStore(folder, create=True)) as store:
        store.put(sample_payload(sample_identity(range(48))))
        store.put(sample_payload())
        store.slow.retain(sample_identity(), Retention(expires=1.0))
        assert [e.identity for e in store.collect()] == [sample_identity()]
        assert [e.identity for e in fast.list()] == [sample_identity(range(48))]


def test_books_that_do_not_balance_are_told(folder: Path) -> None:
    class Clinging(MemoryStore):
        def delete(self, key: IndexLookup) -> bool:
            return False

    with TieredStore(Clinging(1 << 20), FileStore(folder, create=True)) as store:
        store.put(sample_payload())
        store.delete(sample_identity())
        with pytest.raises(IndexNotFound):
            store.get(sample_identity())
        with pytest.raises(StoreInconsistent, match="copy in the fast tier: expected an index of the slow one, found"):
            store.check_integrity()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wait": "forever"}, "wait: expected best_effort or wait_complete or timeout, found 'forever'"),
        ({"timeout_s": -1.0}, "timeout_s: expected finite seconds, 0 or more, found -1.0"),
        ({"timeout_s": float("nan")}, "timeout_s: expected finite seconds, 0 or more, found nan"),
        ({"workers": 0}, "workers: expected 1 or more, found 0"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPayload, match=message):
        TieredStore(memory(), memory(), **options)


@pytest.mark.parametrize("wait", list(Wait))
def test_threads_never_see_an_older_index_than_the_last_that_was_put(folder: Path, wait: Wait) -> None:
    """One writer counts up, or deletes; what a reader gets was current at some time during its get."""
    latest, stop = [0], threading.Event()
    errors: list[BaseException] = []
    room_for_two = 100 << 10
    with opened(MemoryStore(room_for_two), FileStore(folder, create=True), wait=wait, workers=2) as store:
        payloads = [sample_payload(fill=fill) for fill in range(1, 60)]
        crowd = [sample_payload(sample_identity(range(100 * i, 100 * i + 32))) for i in range(1, 4)]
        for payload in crowd:
            store.put(payload)

        def guard(work: Callable[[], None]) -> None:
            try:
                while not stop.is_set():
                    work()
            except BaseException as err:
                errors.append(err)

        def read() -> None:
            least = latest[0]
            with contextlib.suppress(IndexNotFound):
                assert fill_of(store.get(sample_identity())) >= least

        def crowd_out() -> None:
            for payload in crowd:
                with store.get(payload.identity) as index:
                    assert np.array_equal(index.array("channels"), payload.arrays[index.keys[0]])
            store.prefetch(sample_identity())
            store.rescan()

        threads = [threading.Thread(target=guard, args=(work,)) for work in (read, read, read, crowd_out)]
        for thread in threads:
            thread.start()
        for fill, payload in enumerate(payloads, 1):
            if fill % 7 == 0:
                store.delete(sample_identity())
            store.put(payload)
            latest[0] = fill
            time.sleep(0.005)
        stop.set()
        for thread in threads:
            thread.join(SOON)
        assert errors == []
        assert fill_of(store.get(sample_identity())) == 59
