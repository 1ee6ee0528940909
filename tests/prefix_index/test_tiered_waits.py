"""Two stores as one: waits for a copy that end, arrays that are loaded once, and closing with copies under way."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefix_index import (
    FileStore,
    IndexEntry,
    IndexNotFound,
    IndexPayload,
    IndexStoreError,
    LazyArray,
    MemoryStore,
    Retention,
    TieredStore,
    Wait,
)
from prefix_index import tiered as tiered_module
from prefix_index.prefetch import MAX_PENDING, Promoter
from prefix_index.testing import sample_identity, sample_payload
from tests.prefix_index.tiered_stores import (
    SOON,
    GatedStore,
    eventually,
    fill_of,
    in_memory,
    memory,
    opened,
    put_elsewhere,
)


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
        assert time.monotonic() - started < SOON
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
        assert 0.19 < time.monotonic() - started < SOON
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
    assert time.monotonic() - started < SOON
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


def test_close_stops_a_copy_between_two_arrays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast tier that is at an array when the store is closed: what it got by then is no index."""
    monkeypatch.setattr(tiered_module, "_CLOSE_S", SOON)
    started = threading.Event()

    class Leisurely(FileStore):
        def put(self, payload: IndexPayload, *, retention: Retention | None = None) -> IndexEntry:
            def slowly(array: LazyArray) -> Any:
                started.set()
                eventually(lambda: store._promoter._closed)
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
        atexit.register(lambda: print(any(t.is_alive() for t in threads)))  # runs after those of what is imported now
        from prefix_index import FileStore, MemoryStore, prefetch
        from prefix_index.testing import sample_payload, sample_identity
        from prefix_index.tiered import TieredStore
        if not {stuck}:
            prefetch._EXIT_S = 60.0  # a copy that can end does, however late its thread is

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
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{stuck}\n", "")
    assert time.monotonic() - started < 120
