"""Indexes on the device: shared, loaded in the background, kept within their budget."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from prefix_index import IndexCorrupt, IndexUnreadable
from sglang_ext.methods import METHODS
from sglang_ext.prefix.residency import Residency, ResidentIndex, State


def _residency(bench: Any, budget: int = 1 << 30, method: str = "exact") -> Residency:
    return Residency(bench.store, METHODS[method].spec(), 3, 2, torch.device("cpu"), budget)


def _load(residency: Residency, entry: Any) -> ResidentIndex:
    index = residency.acquire(entry)
    assert index.loaded is not None
    index.loaded.result(30)
    return index


def _prompt(number: int, length: int = 64) -> list[int]:
    return list(range(number * 1000, number * 1000 + length))


def test_what_is_loaded_is_what_was_stored(bench: Any) -> None:
    prompt = _prompt(1)
    residency = _residency(bench)
    index = _load(residency, bench.put(prompt))
    assert (index.state, index.prefix_len, len(index.layers)) == (State.READY, 64, 3)
    for layer in range(3):
        expected = bench.keys(prompt, layer).transpose(0, 1)
        assert torch.equal(index.layers[layer]["keys"], expected)
    assert index.nbytes == residency.resident_bytes() == 3 * 64 * 2 * 16 * 4
    residency.check_integrity()
    residency.close()


def test_one_index_is_loaded_once_for_all_its_users(bench: Any) -> None:
    residency = _residency(bench)
    entry = bench.put(_prompt(1))
    first, second = residency.acquire(entry), residency.acquire(entry)
    assert first is second
    assert (first.users, residency.num_users()) == (2, 2)
    residency.release(first)
    residency.release(second)
    assert residency.num_users() == 0
    residency.close()


def test_the_least_recently_used_index_without_users_leaves(bench: Any) -> None:
    entries = [bench.put(_prompt(n)) for n in range(4)]
    one = 3 * 64 * 2 * 16 * 4
    residency = _residency(bench, budget=2 * one)
    a, b = _load(residency, entries[0]), _load(residency, entries[1])
    residency.release(a)
    residency.release(b)
    residency.release(residency.acquire(entries[0]))  # a is now the more recent one
    c = _load(residency, entries[2])
    assert c.state is State.READY
    assert residency.acquire(entries[0]) is a
    assert residency.acquire(entries[1]) is not b
    assert residency.resident_bytes() <= 2 * one
    residency.check_integrity()
    residency.close()


def test_an_index_in_use_is_never_evicted_and_the_newcomer_fails_with_a_reason(bench: Any) -> None:
    entries = [bench.put(_prompt(n)) for n in range(2)]
    one = 3 * 64 * 2 * 16 * 4
    residency = _residency(bench, budget=one)
    held = _load(residency, entries[0])
    refused = _load(residency, entries[1])
    assert (held.state, refused.state) == (State.READY, State.FAILED)
    assert "raise index_gpu_bytes" in refused.detail
    residency.release(held)
    residency.release(refused)
    again = _load(residency, entries[1])
    assert (again is refused, again.state) == (False, State.READY), "a failed one is tried again"
    residency.close()


def test_who_waits_evicts_nothing_and_who_has_a_slot_does(bench: Any) -> None:
    entries = [bench.put(_prompt(n)) for n in range(2)]
    residency = _residency(bench, budget=3 * 64 * 2 * 16 * 4)
    idle = _load(residency, entries[0])
    residency.release(idle)
    residency.prefetch(entries[1])
    residency._worker.submit(int).result(30)  # behind that load
    assert residency.acquire(entries[0], retry=False) is idle
    # What was short when it was fetched ahead may be there now.
    failed = _load(residency, entries[1])
    assert (failed.state, failed.reason) == (State.FAILED, "index_memory")
    for index in (idle, failed):
        residency.release(index)
    loaded = residency.acquire(entries[1], retry=False)
    assert loaded.loaded is not None
    loaded.loaded.result(30)
    assert loaded.state is State.READY
    residency.check_integrity()
    residency.close()


def test_what_would_be_evicted_in_vain_stays(bench: Any) -> None:
    one = 3 * 64 * 2 * 16 * 4
    entries = [bench.put(_prompt(0)), bench.put(_prompt(1)), bench.put(_prompt(2, 128))]
    residency = _residency(bench, budget=2 * one)
    used, idle = _load(residency, entries[0]), _load(residency, entries[1])
    residency.release(idle)
    large = _load(residency, entries[2])
    assert (used.state, large.state, large.reason) == (State.READY, State.FAILED, "index_memory")
    assert residency.resident_bytes() == 2 * one
    assert residency.acquire(entries[1], retry=False) is idle
    residency.close()


def test_an_index_larger_than_the_budget_fails_with_both_sizes(bench: Any) -> None:
    residency = _residency(bench, budget=1000)
    index = _load(residency, bench.put(_prompt(1)))
    assert index.state is State.FAILED
    assert "1000" in index.detail
    assert "24576" in index.detail
    assert index.reason == "index_memory"
    residency.close()


def test_a_corrupted_array_fails_as_index_corrupt_and_is_reported_to_the_store(bench: Any) -> None:
    entry = bench.put(_prompt(1))
    path = bench.store.path_of(entry.digest)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)
    residency = _residency(bench)
    index = _load(residency, entry)
    assert (index.state, index.reason) == (State.FAILED, "index_corrupt")
    assert str(path) in index.detail
    assert [str(path)] == [problem.path for problem in bench.store.problems()]
    assert bench.store.list() == ()
    residency.close()


@pytest.mark.parametrize("error", [None, OSError("a defect of the store")])
def test_a_damaged_index_is_reported_before_requests_are_told(
    bench: Any, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Who is told asks anew: it must not be offered the same index. A store that fails then changes nothing."""
    entry, seen = bench.put(_prompt(1)), []

    def damaged(key: Any) -> Any:
        raise IndexCorrupt("checksum", expected="a", found="b", remedy="c")

    def report(key: Any, damage: Any) -> None:
        seen.append(residency.acquire(entry).state)
        if error is not None:
            raise error

    monkeypatch.setattr(bench.store, "get", damaged)
    monkeypatch.setattr(bench.store, "report", report)
    residency = _residency(bench)
    index = _load(residency, entry)
    assert seen == [State.LOADING]
    assert (index.state, index.reason) == (State.FAILED, "index_corrupt")
    residency.close()


def test_an_index_that_the_disk_does_not_give_now_is_not_reported(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = bench.put(_prompt(1))

    def unreadable(key: Any) -> Any:
        raise IndexUnreadable("index", expected="readable bytes", found="Input/output error", remedy="check the disk")

    monkeypatch.setattr(bench.store, "get", unreadable)
    residency = _residency(bench)
    index = _load(residency, entry)
    assert (index.state, index.reason) == (State.FAILED, "index_corrupt")
    assert bench.store.problems() == ()
    monkeypatch.undo()
    assert _load(residency, entry).state is State.READY
    residency.close()


def test_a_file_that_has_gone_fails_as_no_index(bench: Any) -> None:
    entry = bench.put(_prompt(1))
    bench.store.path_of(entry.digest).unlink()
    residency = _residency(bench)
    index = _load(residency, entry)
    assert (index.state, index.reason) == (State.FAILED, "no_index")
    residency.close()


def test_an_index_without_the_method_fails_and_says_what_it_holds(bench: Any) -> None:
    residency = _residency(bench, method="csattention")
    index = _load(residency, bench.put(_prompt(1)))
    assert (index.state, index.reason) == (State.FAILED, "index_mismatch")
    assert "csattention" in index.detail
    assert "exact" in index.detail
    residency.close()


def test_acquire_does_not_wait_for_the_disk(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = bench.put(_prompt(1))
    gate, real = threading.Event(), bench.store.get

    def slow(key: Any) -> Any:
        assert gate.wait(30)
        return real(key)

    monkeypatch.setattr(bench.store, "get", slow)
    residency = _residency(bench)
    index = residency.acquire(entry)
    assert index.state is State.LOADING
    residency.release(index)  # its request ended before the load did
    gate.set()
    assert index.loaded is not None
    index.loaded.result(30)
    assert (index.state, index.users) == (State.READY, 0)
    residency.close()


def test_concurrent_acquire_and_release_balance(bench: Any) -> None:
    entries = [bench.put(_prompt(n)) for n in range(4)]
    one = 3 * 64 * 2 * 16 * 4
    residency = _residency(bench, budget=2 * one + 100)
    errors: list[Exception] = []

    def work(seed: int) -> None:
        try:
            for n in range(60):
                index = residency.acquire(entries[(seed + n * 7) % 4])
                assert index.loaded is not None
                index.loaded.result(30)
                if index.state is State.READY:
                    assert len(index.layers) == 3
                residency.check_integrity()
                residency.release(index)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert residency.num_users() == 0
    assert residency.resident_bytes() <= 2 * one + 100
    residency.check_integrity()
    residency.close()
