"""Two stores as one: copies that are never wrong, waits that end, loads that happen once."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from prefix_index import (
    FileStore,
    IndexCorrupt,
    IndexEntry,
    IndexFile,
    IndexNotFound,
    IndexPayload,
    IndexStore,
    IndexStoreError,
    InvalidPayload,
    LazyArray,
    MemoryStore,
    Retention,
    StoreFolderError,
    StoreInconsistent,
    StoreUnavailable,
)
from prefix_index import tiered as tiered_module
from prefix_index.prefetch import MAX_PENDING, Promoter
from prefix_index.store import IndexLookup
from prefix_index.testing import sample_identity, sample_payload
from prefix_index.tiered import TieredStore, Wait
from tests.prefix_index.machine import FILL, PAGES, STEPS, TENANT, identity_of
from tests.prefix_index.test_index_machine import FileMachine

SOON = 20.0


class GatedStore(FileStore):
    """A folder on a disk that answers the promoter's threads only while ``gate`` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, create=True)
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.background_reads = 0

    def get(self, key: IndexLookup) -> IndexFile:
        if threading.current_thread().name.startswith("prefix_index-promoter"):
            self.background_reads += 1
            self.entered.set()
            self.gate.wait()
        return super().get(key)


class FarStore(FileStore):
    """A folder behind a line that can be cut; counts how often it is asked for an index."""

    cut = False
    asked = 0

    def get(self, key: IndexLookup) -> IndexFile:
        self.asked += 1
        self._check_line()
        return super().get(key)

    def contains(self, key: IndexLookup) -> bool:
        self._check_line()
        return super().contains(key)

    def _check_line(self) -> None:
        if self.cut:
            raise StoreUnavailable("far store", expected="an answer", found="none", remedy="ask again later")


class CatalogStore(FarStore):
    """A far store that knows its checksums, as of the last put or ``rescan()``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, create=True)
        self.sums: dict[str, str] = {}

    def put(self, payload: IndexPayload, *, retention: Retention | None = None) -> IndexEntry:
        entry = super().put(payload, retention=retention)
        self._learn_sums()
        return entry

    def rescan(self, *, full: bool = False) -> None:
        super().rescan(full=full)
        self._learn_sums()

    def checksum(self, key: IndexLookup) -> str | None:
        return self.sums.get(key if isinstance(key, str) else key.digest)

    def _learn_sums(self) -> None:
        self.sums = {}
        for entry in self.list():
            with FileStore.get(self, entry.digest) as index:
                self.sums[entry.digest] = index.checksum


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "slow"


@contextlib.contextmanager
def opened(fast: IndexStore, slow: IndexStore, **options: Any) -> Iterator[TieredStore]:
    with TieredStore(fast, slow, **options) as store:
        try:
            yield store
        finally:
            if isinstance(slow, GatedStore):
                slow.gate.set()
        store.check_integrity()


def memory() -> MemoryStore:
    return MemoryStore(64 << 20)


def fill_of(index: IndexFile) -> int:
    with index:
        index.verify()
        return int(index.array("channels")[0])


def in_memory(index: IndexFile) -> bool:
    with index:
        return index.path is None


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


def put_elsewhere(folder: Path, **changes: Any) -> None:
    with FileStore(folder, create=True) as other:
        other.put(sample_payload(**changes))


def flip(path: Path, offset: int) -> None:
    """Flips a bit in place, as a bad disk would; readers that have it mapped see it too."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes((byte ^ 1,)))


def array_offset(path: Path, name: str = "channels") -> int:
    """Where in the file the values of an array lie: sought by its bytes."""
    with IndexFile.open(path) as index:
        record = next(index.record(k) for k in index.keys if k.name == name)
        last = max(index.record(k).offset + 4096 for k in index.keys if index.record(k).nbytes)
        return index.nbytes - 4096 - last + record.offset


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


def test_a_lazy_array_is_loaded_once(folder: Path) -> None:
    loads: dict[Any, int] = {}

    def load(key: Any, array: Any) -> Any:
        loads[key] = loads.get(key, 0) + 1
        return array

    plain = sample_payload(fill=9)
    arrays: dict[Any, Any] = {
        key: LazyArray(plain.dtypes.get(key, array.dtype.name), array.shape, lambda k=key, a=array: load(k, a))
        for key, array in plain.arrays.items()
        if not isinstance(array, LazyArray)
    }
    fast, middle = memory(), FileStore(folder.parent / "middle", create=True)
    with opened(fast, TieredStore(middle, FileStore(folder, create=True))) as store:
        store.put(IndexPayload(plain.identity, arrays, spec=plain.spec, stats=plain.stats, info=plain.info))
        assert store.promotion(plain.identity, SOON)
        assert fill_of(fast.get(plain.identity)) == 9
        eventually(lambda: middle.contains(plain.identity))
        assert loads == dict.fromkeys(arrays, 1)


def test_best_effort_serves_slow_now_and_fast_later(folder: Path) -> None:
    put_elsewhere(folder, fill=3)
    slow = GatedStore(folder)
    with opened(memory(), slow) as store:
        started = time.monotonic()
        assert not in_memory(store.get(sample_identity()))
        assert time.monotonic() - started < 2
        assert slow.entered.wait(SOON)
        assert not in_memory(store.get(sample_identity()))
        slow.gate.set()
        assert store.promotion(sample_identity(), SOON)
        assert in_memory(store.get(sample_identity()))
        assert (store.counters.hits_slow, store.counters.hits_fast, store.counters.promotions) == (2, 1, 1)


def test_wait_complete_serves_the_copy_and_slow_only_where_copying_fails(folder: Path) -> None:
    put_elsewhere(folder, fill=3)
    slow = GatedStore(folder)
    found: list[bool] = []
    with opened(memory(), slow, wait="wait_complete") as store:
        getting = threading.Thread(target=lambda: found.append(in_memory(store.get(sample_identity()))))
        getting.start()
        assert slow.entered.wait(SOON)
        getting.join(0.1)
        assert getting.is_alive()
        slow.gate.set()
        getting.join(SOON)
        assert found == [True]
        assert store.counters.promotions == 1
        with pytest.raises(IndexNotFound):
            store.get(sample_identity(range(16)))
    with opened(MemoryStore(4096), FileStore(folder), wait=Wait.WAIT_COMPLETE) as store:
        assert not in_memory(store.get(sample_identity()))
        assert store.counters.promotion_failures == 1


def test_timeout_waits_that_long_and_then_serves_slow(folder: Path) -> None:
    put_elsewhere(folder, fill=3)
    slow = GatedStore(folder)
    with opened(memory(), slow, wait="timeout", timeout_s=0.2) as store:
        started = time.monotonic()
        assert not in_memory(store.get(sample_identity()))
        assert 0.2 <= time.monotonic() - started < 5
        slow.gate.set()
        assert store.promotion(sample_identity(), SOON)
        assert in_memory(store.get(sample_identity()))
    with opened(memory(), FileStore(folder), wait="timeout", timeout_s=SOON) as store:
        assert in_memory(store.get(sample_identity()))


def test_one_copy_for_all_that_want_it(folder: Path) -> None:
    put_elsewhere(folder, fill=3)
    slow = GatedStore(folder)
    found: list[bool] = []
    with opened(memory(), slow, wait="wait_complete", workers=4) as store:
        store.prefetch(sample_identity())
        assert slow.entered.wait(SOON)
        reads = slow.background_reads
        threads = [
            threading.Thread(target=lambda: found.append(in_memory(store.get(sample_identity())))) for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        for _ in range(100):
            store.prefetch(sample_identity())
        assert slow.background_reads == reads == 1
        slow.gate.set()
        for thread in threads:
            thread.join(SOON)
        assert found == [True] * 5
        assert store.counters.promotions == 1


def test_the_oldest_request_leaves_a_full_queue(folder: Path) -> None:
    slow = GatedStore(folder)
    ids = [sample_identity(range(16 * i, 16 * i + 16)) for i in range(MAX_PENDING + 6)]
    with opened(memory(), slow) as store:
        store.put(sample_payload(ids[-1], fill=5))
        store.put(sample_payload(ids[1], fill=6))
        store.fast.delete(ids[-1])
        store.fast.delete(ids[1])
        for identity in ids:
            store.prefetch(identity)
            assert slow.entered.wait(SOON)
        assert store.counters.prefetch_dropped == 5
        slow.gate.set()
        eventually(lambda: store.fast.contains(ids[-1]))
        assert not store.fast.contains(ids[1])


def test_who_waits_goes_before_who_does_not() -> None:
    gate, order = threading.Event(), []

    def work(digest: str, check: Callable[[], None]) -> None:
        order.append(digest)
        gate.wait(SOON)

    promoter = Promoter(work)
    promoter.request("running")
    eventually(lambda: promoter.busy() == {"running"})
    for name in ("a", "b"):
        promoter.request(name)
    last = promoter.request("urgent", urgent=True)
    promoter.request("b", urgent=True)
    gate.set()
    assert last.wait(SOON)
    eventually(lambda: len(order) == 4)
    assert order == ["running", "b", "urgent", "a"]
    assert promoter.close(SOON)
    assert not promoter.request("late").wait(SOON)


def test_close_ends_while_a_copy_is_stuck_and_the_copy_never_arrives(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered_module, "_CLOSE_S", 0.2)
    put_elsewhere(folder, fill=3)
    slow = GatedStore(folder)
    store = TieredStore(memory(), slow, wait="wait_complete")
    store.open()
    ended: list[object] = []

    def wait_for_it() -> None:
        try:
            ended.append(store.get(sample_identity()))
        except IndexStoreError as err:
            ended.append(str(err))

    waiting = threading.Thread(target=wait_for_it)
    waiting.start()
    assert slow.entered.wait(SOON)
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 3
    waiting.join(SOON)
    assert ended == ["tiered store: expected open, found closed; call open() first"]
    store.open()
    slow.gate.set()
    stuck = [t for t in threading.enumerate() if t.name.startswith("prefix_index-promoter")]
    for thread in stuck:
        thread.join(SOON)
    assert list(store.fast.list()) == []
    assert store.counters.promotions == 0
    assert in_memory(store.get(sample_identity()))
    store.close()


def test_close_stops_a_copy_between_two_arrays(folder: Path) -> None:
    """A fast tier that takes its time with each array: what it got by then is no index."""
    started = threading.Event()

    class Leisurely(FileStore):
        def put(self, payload: IndexPayload, *, retention: Retention | None = None) -> IndexEntry:
            def slowly(array: LazyArray) -> Any:
                started.set()
                time.sleep(0.2)
                return array.load()

            arrays = {
                k: dataclasses.replace(a, load=lambda a=a: slowly(a)) if isinstance(a, LazyArray) else a
                for k, a in payload.arrays.items()
            }
            return super().put(dataclasses.replace(payload, arrays=arrays), retention=retention)

    put_elsewhere(folder, fill=3)
    fast = Leisurely(folder.parent / "fast", create=True)
    with TieredStore(fast, FileStore(folder)) as store:
        store.prefetch(sample_identity())
        assert started.wait(SOON)
    assert store.counters[:4] == (0, 0, 0, 0)
    assert [p for p in fast.folder.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("stuck", [True, False], ids=["stuck", "copying"])
def test_the_process_ends_in_time_with_a_copy_under_way(tmp_path: Path, stuck: bool) -> None:
    code = f"""
        import atexit, threading
        from pathlib import Path
        atexit.register(lambda: print([t.is_alive() for t in threads]))  # runs after those of what is imported now
        from prefix_index import FileStore, MemoryStore
        from prefix_index.testing import sample_payload, sample_identity
        from prefix_index.tiered import TieredStore

        class Slow(FileStore):
            def get(self, key):
                entered.set()
                if {stuck}:
                    threading.Event().wait()
                return super().get(key)

        entered = threading.Event()
        with FileStore(Path({str(tmp_path)!r}), create=True) as other:
            other.put(sample_payload(values_per_array=1 << 21))
        store = TieredStore(MemoryStore(1 << 30), Slow(Path({str(tmp_path)!r})))
        store.open()
        store.prefetch(sample_identity())
        entered.wait()
        threads = [t for t in threading.enumerate() if t is not threading.main_thread()]
        """
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"[{stuck}]\n", "")
    assert time.monotonic() - started < 20


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


@pytest.mark.parametrize("where", ["magic", "footer", "cut"])
def test_a_damaged_header_of_a_copy_costs_only_time(folder: Path, where: str) -> None:
    fast = FileStore(folder.parent / "fast", create=True)
    with opened(fast, FileStore(folder, create=True)) as store:
        store.put(sample_payload(fill=4))
        path = fast.path_of(sample_identity())
        if where == "cut":
            path.write_bytes(path.read_bytes()[:5000])
        else:
            flip(path, 2 if where == "magic" else path.stat().st_size - 3)
        index = store.get(sample_identity())
        assert index.path != str(path)
        assert fill_of(index) == 4
        assert store.counters.damaged_dropped == 1
        assert list(store.problems()) == []
        assert store.promotion(sample_identity(), SOON)
        index = store.get(sample_identity())
        assert index.path == str(path)
        assert fill_of(index) == 4


def test_damage_in_a_copy_is_never_held_against_the_index(folder: Path) -> None:
    fast = FileStore(folder.parent / "fast", create=True)
    with opened(fast, FileStore(folder, create=True)) as store:
        store.put(sample_payload(fill=4))
        path = fast.path_of(sample_identity())
        flip(path, array_offset(path))
        readers = [store.get(sample_identity()) for _ in range(3)]
        for reader in readers:
            assert reader.path == str(path)
            with pytest.raises(IndexCorrupt, match="checksum of") as caught:
                reader.verify()
            reader.close()
            store.report(sample_identity(), caught.value)
            assert list(store.problems()) == []
            assert fill_of(store.get(sample_identity())) == 4
            assert store.promotion(sample_identity(), SOON)
        assert store.counters.damaged_dropped == 1


def test_damage_in_slow_found_while_copying_takes_the_index_out_of_the_offer(folder: Path) -> None:
    put_elsewhere(folder, fill=4)
    slow = FileStore(folder)
    path = slow.path_of(sample_identity())
    flip(path, array_offset(path))
    with opened(memory(), slow) as store:
        assert not store.promotion(sample_identity(), SOON)
        assert list(store.list()) == []
        assert [type(p.error) for p in store.problems()] == [IndexCorrupt]
        store.put(sample_payload(fill=5))
        assert fill_of(store.get(sample_identity())) == 5
        assert list(store.problems()) == []


def test_a_copy_that_slow_confirmed_is_served_while_slow_is_away(folder: Path) -> None:
    slow = FarStore(folder, create=True)
    other = sample_identity(range(48))
    with opened(memory(), slow) as store:
        store.put(sample_payload(fill=4))
        slow.cut = True
        asked = slow.asked
        for _ in range(50):
            assert fill_of(store.get(sample_identity())) == 4
        assert slow.asked - asked <= 2
        assert store.contains(sample_identity())
        assert not store.contains(other)
        with pytest.raises(StoreUnavailable, match="far store: expected an answer, found none; ask again later"):
            store.get(other)
        store.fast.put(sample_payload(fill=5))
        with pytest.raises(StoreUnavailable):
            store.get(sample_identity())
        slow.cut = False
        assert fill_of(store.get(sample_identity())) == 4


def test_a_copy_is_not_served_beyond_its_expiry_while_slow_is_away(folder: Path) -> None:
    slow = FarStore(folder, create=True)
    with opened(memory(), slow) as store:
        store.put(sample_payload())
        store.retain(sample_identity(), Retention(expires=time.time() + 0.3))
        slow.cut = True
        time.sleep(0.35)
        with pytest.raises(StoreUnavailable):
            store.get(sample_identity())
        slow.cut = False


def test_what_slow_confirmed_in_an_earlier_life_does_not_count(folder: Path) -> None:
    slow = FarStore(folder, create=True)
    with opened(FileStore(folder.parent / "fast", create=True), slow) as store:
        store.put(sample_payload())
        store.close()
        store.open()
        slow.cut = True
        with pytest.raises(StoreUnavailable):
            store.get(sample_identity())
        slow.cut = False
        assert fill_of(store.get(sample_identity())) == 0


def test_what_this_store_replaced_is_not_served_while_slow_is_away(folder: Path) -> None:
    class Both(GatedStore, FarStore):
        """The new index cannot be copied before the line is cut."""

    slow = Both(folder)
    with opened(memory(), slow) as store:
        store.put(sample_payload(fill=1))
        with MemoryStore(1 << 20) as other:
            other.put(sample_payload(fill=2))
            store.put(other.get(sample_identity()).payload())
        slow.cut = True
        with pytest.raises(StoreUnavailable):
            store.get(sample_identity())
        slow.cut = False
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


def test_the_fast_folder_may_go(folder: Path) -> None:
    fast = FileStore(folder.parent / "fast", create=True)
    with TieredStore(fast, FileStore(folder, create=True)) as store:
        store.put(sample_payload(fill=4))
        shutil.rmtree(fast.folder)
        assert fill_of(store.get(sample_identity())) == 4
        store.put(sample_payload(fill=5))
        assert fill_of(store.get(sample_identity())) == 5
        store.rescan()
        assert [type(p.error) for p in store.problems()] == [StoreFolderError]
        assert store.delete(sample_identity())
        fast.folder.mkdir()
        store.rescan()
        assert list(store.problems()) == []
        store.check_integrity()


def test_a_fast_folder_that_cannot_be_opened_is_an_error_at_once(folder: Path) -> None:
    slow = FileStore(folder, create=True)
    store = TieredStore(FileStore(folder.parent / "missing"), slow)
    with pytest.raises(StoreFolderError, match="expected an existing folder, found nothing"):
        store.open()
    with pytest.raises(IndexStoreError, match="expected open, found closed"):
        slow.list()


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


class TieredMachine(FileMachine):
    """Copies of two in memory, all in a folder that another store changes behind this one's back."""

    def make(self) -> IndexStore:
        slow = super().make()
        return TieredStore(self.make_fast(), slow, wait=self.wait())

    def make_fast(self) -> IndexStore:
        return MemoryStore(100 << 10, clock=self.now)

    def wait(self) -> Wait:
        return Wait.BEST_EFFORT

    @rule(pages=PAGES, tenant=TENANT, fill=FILL)
    def replace_elsewhere(self, pages: int, tenant: str | None, fill: int) -> None:
        """What the first store serves is new without a rescan."""
        self.pass_time(10)
        if (pages, tenant) in self.model:
            self.other.rescan()
            self.other.put(sample_payload(identity_of(pages, tenant), fill=fill))
            self.model[pages, tenant] = fill
            self.get(pages, tenant)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model, key=repr)))
        assert isinstance(self.store, TieredStore)
        assert self.store.promotion(identity_of(*key), SOON)


class TwoFoldersMachine(TieredMachine):
    """Copies in a second folder, where bits flip."""

    def make(self) -> IndexStore:
        self.fast_folder = Path(tempfile.mkdtemp())
        return super().make()

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.fast_folder)

    def make_fast(self) -> IndexStore:
        return FileStore(self.fast_folder, create=True, clock=self.now)

    def wait(self) -> Wait:
        return Wait.WAIT_COMPLETE

    @rule(data=st.data())
    def damage_a_copy(self, data: st.DataObject) -> None:
        paths = sorted(self.fast_folder.glob("*/*.pfxindex"))
        if paths:
            path = data.draw(st.sampled_from(paths))
            raw = bytearray(path.read_bytes())
            raw[data.draw(st.integers(0, 63))] ^= 1 << data.draw(st.integers(0, 7))
            path.unlink()
            path.write_bytes(raw)


class ThreeTiersMachine(TwoFoldersMachine):
    def make(self) -> IndexStore:
        below = super().make()
        return TieredStore(MemoryStore(100 << 10, clock=self.now), below, wait=Wait.TIMEOUT)


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = STEPS
TestTwoFoldersMachine = TwoFoldersMachine.TestCase
TestTwoFoldersMachine.settings = STEPS
TestThreeTiersMachine = ThreeTiersMachine.TestCase
TestThreeTiersMachine.settings = STEPS
