"""What only the memory store has: a byte budget."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from prefix_index import IndexNotFound, IndexWriter, MemoryStore, StoreFull
from prefix_index.testing import sample_identity, sample_payload
from tests.prefix_index.faults.tools import fork, reap


def nbytes_of_one() -> int:
    with MemoryStore(1 << 30) as store:
        return store.put(sample_payload()).nbytes


def test_least_recently_used_leaves_first() -> None:
    one = nbytes_of_one()
    ids = [sample_identity(range(i, i + 32)) for i in range(4)]
    with MemoryStore(3 * one) as store:
        for i in ids[:3]:
            store.put(sample_payload(i))
        held = store.get(ids[1])
        store.get(ids[0])
        store.put(sample_payload(ids[3]))
        assert [store.contains(i) for i in ids] == [True, True, False, True]
        store.put(sample_payload(ids[2]))
        assert [store.contains(i) for i in ids] == [True, False, True, True]
        with pytest.raises(IndexNotFound, match="build it, or raise the budget"):
            store.get(ids[1])
        held.verify()
        assert store.used_bytes == 3 * one
        store.check_integrity()


def test_replacing_evicts_nobody() -> None:
    one = nbytes_of_one()
    ids = [sample_identity(range(i, i + 32)) for i in range(2)]
    with MemoryStore(2 * one) as store:
        for i in (*ids, ids[0], ids[1], ids[0]):
            store.put(sample_payload(i))
        assert len(store.list()) == 2
        store.check_integrity()


def test_index_larger_than_the_budget_is_refused_and_evicts_nobody() -> None:
    one = nbytes_of_one()
    with MemoryStore(2 * one) as store:
        store.put(sample_payload())
        with pytest.raises(StoreFull, match=r"expected at most \d+ bytes, found an index of \d+ bytes; raise"):
            store.put(sample_payload(sample_identity(range(1, 33)), values_per_array=1 << 20))
        assert len(store.list()) == 1


def test_close_forgets_everything() -> None:
    store = MemoryStore(1 << 20)
    store.open()
    store.put(sample_payload())
    store.close()
    store.open()
    assert list(store.list()) == []
    assert store.used_bytes == 0


def test_a_system_without_memory_is_a_full_store_that_lost_nothing() -> None:
    """In a child with an address space that ends 60 MB above what it has."""

    def work() -> None:
        with MemoryStore(1 << 34) as store:
            store.put(sample_payload())
            large = sample_payload(sample_identity(range(32, 64)), values_per_array=1 << 22)  # 100 MB
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (60 << 20), resource.RLIM_INFINITY))
            store.budget_bytes = IndexWriter.of(large).nbytes + 1  # so that the other would have to leave
            with pytest.raises(StoreFull, match=r"memory store: expected \d+ bytes of memory, found .*Cannot allocate"):
                store.put(large)
            assert [e.identity for e in store.list()] == [sample_identity()]
            store.check_integrity()

    assert reap(fork(work), 120) == 0
