"""Who leaves a store in memory, and what it holds while arrays are copied in."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from prefix_index import ArrayKey, IndexIdentity, IndexPayload, LazyArray, MemoryStore, Retention
from prefix_index.testing import sample_payload
from tests.prefix_index.machine import Clock
from tests.prefix_index.small_stores import IDS, ONE, PINNED, built_in, held


def test_memory_follows_the_same_order(clock: Clock) -> None:
    with MemoryStore(3 * ONE, clock=clock) as store:
        store.put(sample_payload(IDS[0]), retention=PINNED)
        store.put(sample_payload(IDS[1]))
        store.put(sample_payload(IDS[2]), retention=Retention(expires=clock.now + 5))
        clock.now += 10
        store.put(sample_payload(IDS[3]))
        assert held(store) == {0, 1, 3}
        store.put(sample_payload(IDS[4]))
        assert held(store) == {0, 3, 4}
        clock.now -= 1_000_000
        store.get(IDS[3])
        store.put(sample_payload(IDS[5]))
        assert held(store) == {0, 3, 5}
        store.check_integrity()


def test_memory_by_cost(clock: Clock) -> None:
    with MemoryStore(2 * ONE, eviction="cost_aware", clock=clock) as store:
        for i, seconds in enumerate((60.0, 1.0, 1.0)):
            clock.now += 10
            store.put(built_in(seconds, IDS[i]))
        assert held(store) == {0, 2}


class Gate:
    """A payload whose array is made only when the gate opens."""

    def __init__(self, identity: IndexIdentity) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        lazy = LazyArray("uint8", (ONE,), self._load)
        self.payload = IndexPayload(identity, {ArrayKey("kv"): lazy})
        self.errors: list[BaseException] = []

    def _load(self) -> Any:
        self.entered.set()
        assert self.open.wait(60)
        return np.zeros(ONE, "uint8")

    def put(self, store: MemoryStore) -> threading.Thread:
        def run() -> None:
            try:
                store.put(self.payload)
            except BaseException as err:
                self.errors.append(err)

        thread = threading.Thread(target=run)
        thread.start()
        assert self.entered.wait(60)
        return thread


def test_memory_is_usable_while_arrays_are_copied_in() -> None:
    gate = Gate(IDS[0])
    with MemoryStore(6 * ONE) as store:
        store.put(sample_payload(IDS[1]))
        thread = gate.put(store)
        store.get(IDS[1]).verify()
        store.put(sample_payload(IDS[2]))
        assert held(store) == {1, 2}
        store.check_integrity()
        gate.open.set()
        thread.join()
        assert gate.errors == []
        assert held(store) == {0, 1, 2}
        store.check_integrity()


def test_memory_keeps_its_budget_while_puts_are_under_way() -> None:
    gate = Gate(IDS[0])
    with MemoryStore(3 * ONE) as store:  # the gated one takes a little more than ONE
        store.put(sample_payload(IDS[1]))
        thread = gate.put(store)
        store.put(sample_payload(IDS[2]))
        assert held(store) == {2}
        waiting = threading.Thread(target=store.put, args=(sample_payload(IDS[3], values_per_array=1 << 12),))
        waiting.start()
        time.sleep(0.05)
        assert waiting.is_alive()
        gate.open.set()
        thread.join()
        waiting.join()
        assert held(store) == {3}
        assert store.used_bytes <= 3 * ONE
        store.check_integrity()


def test_memory_closed_during_a_put_stays_empty() -> None:
    gate = Gate(IDS[0])
    store = MemoryStore(3 * ONE)
    store.open()
    thread = gate.put(store)
    store.close()
    gate.open.set()
    thread.join()
    assert [type(e).__name__ for e in gate.errors] == ["StoreClosed"]
    store.open()
    assert store.used_bytes == 0
    store.put(sample_payload(IDS[1], values_per_array=1 << 12))
    store.check_integrity()
