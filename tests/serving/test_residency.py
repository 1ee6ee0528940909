"""Indexes on the device: shared, loaded in the background, kept within their budget; their content is looked at."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from prefix_index import ArrayKey, FileStore, IndexCorrupt, IndexFile, IndexStoreError, IndexUnreadable
from prefix_index.remote import RemoteStore
from prefix_index.shared import SharedStore
from sglang_ext.methods import METHODS, method_specs
from sglang_ext.prefix import residency as module
from sglang_ext.prefix.residency import Residency, ResidentIndex, State
from tests.index_faults import replaced
from tests.prefix_index.remote_stores import Shaky
from tests.serving.admitting import check_books

PROMPT = list(range(64))
#: Bytes of an index of 64 tokens: layers, tokens, KV heads, head_dim, fp32.
ONE = 3 * 64 * 2 * 16 * 4


@pytest.fixture
def reside() -> Iterator[Callable[..., Residency]]:
    """`reside(bench, budget=..., ...)`; closed in the end, when all adds up."""
    made: list[Residency] = []

    def make(bench: Any, budget: int = 1 << 30, spec: Any = None, heads: int = 2, first: int = 0) -> Residency:
        spec = spec or METHODS["exact"].spec()
        made.append(Residency(bench.store, spec, 3, heads, torch.device("cpu"), budget, first))
        return made[-1]

    yield make
    for one in made:
        check_books(one)
        one.close()


def load(residency: Residency, entry: Any) -> ResidentIndex:
    """In use, once it is there or has failed."""
    index = residency.acquire(entry)
    index.loaded.result(30)
    return index


def prompt(number: int, length: int = 64) -> list[int]:
    return list(range(number * 1000, number * 1000 + length))


@pytest.mark.parametrize("staging", [1, 40_000, 1 << 30], ids=["layer by layer", "some layers", "all at once"])
@pytest.mark.parametrize(("first", "heads"), [(0, 2), (1, 1)], ids=["all heads", "a rank's"])
def test_what_is_loaded_is_what_was_stored(
    bench: Any, reside: Any, staging: int, first: int, heads: int, monkeypatch: Any
) -> None:
    """It comes in by batches of layers, which do not show. Of a rank's own heads there is no more than fits."""
    monkeypatch.setattr(module, "STAGING_BYTES", staging)
    residency = reside(bench, heads * ONE // 2, heads=heads, first=first)
    index = load(residency, bench.put(PROMPT))
    assert (index.state, index.prefix_len, len(index.layers)) == (State.READY, 64, 3)
    for layer in range(3):
        assert torch.equal(index.layers[layer]["keys"], bench.keys(PROMPT, layer).transpose(0, 1)[first:])
    assert index.nbytes == residency.resident_bytes() == heads * ONE // 2


def test_a_system_that_gives_no_more_threads_stops_no_load(bench: Any, reside: Any) -> None:
    """Else the request is an error in the log, and the index stays loading."""
    residency, entry = reside(bench), bench.put(PROMPT)
    before = threading.stack_size(1 << 46)  # no thread has that much
    try:
        index = load(residency, entry)
    finally:
        threading.stack_size(before)
    assert index.state is State.READY


def test_the_least_recently_used_index_without_users_leaves(bench: Any, reside: Any) -> None:
    entries = [bench.put(prompt(n)) for n in range(4)]
    residency = reside(bench, 2 * ONE)
    a, b = (load(residency, entry) for entry in entries[:2])
    residency.release(a)
    residency.release(b)
    residency.release(residency.acquire(entries[0]))  # a is now the more recent one
    assert load(residency, entries[2]).state is State.READY
    assert residency.acquire(entries[0]) is a
    assert residency.acquire(entries[1]) is not b
    assert residency.resident_bytes() <= 2 * ONE


def test_an_index_in_use_is_never_evicted_and_the_newcomer_fails_with_a_reason(bench: Any, reside: Any) -> None:
    entries = [bench.put(prompt(n)) for n in range(2)]
    residency = reside(bench, ONE)
    held, refused = (load(residency, entry) for entry in entries)
    assert (held.state, refused.state) == (State.READY, State.FAILED)
    assert "raise index_gpu_bytes" in refused.detail
    residency.release(held)
    residency.release(refused)
    again = load(residency, entries[1])
    assert (again is refused, again.state) == (False, State.READY), "a failed one is tried again"


def test_who_waits_evicts_nothing_and_who_has_a_slot_does(bench: Any, reside: Any) -> None:
    entries = [bench.put(prompt(n)) for n in range(2)]
    residency = reside(bench, ONE)
    idle = load(residency, entries[0])
    residency.release(idle)
    residency.prefetch(entries[1])
    residency._worker.submit(int).result(30)  # behind that load
    assert residency.acquire(entries[0], retry=False) is idle
    # What was short when it was fetched ahead may be there now.
    failed = load(residency, entries[1])
    assert (failed.state, failed.reason) == (State.FAILED, "index_memory")
    for index in (idle, failed):
        residency.release(index)
    loaded = residency.acquire(entries[1], retry=False)
    loaded.loaded.result(30)
    assert loaded.state is State.READY


def test_what_would_be_evicted_in_vain_stays(bench: Any, reside: Any) -> None:
    entries = [bench.put(prompt(0)), bench.put(prompt(1)), bench.put(prompt(2, 128))]
    residency = reside(bench, 2 * ONE)
    used, idle = load(residency, entries[0]), load(residency, entries[1])
    residency.release(idle)
    large = load(residency, entries[2])
    assert (used.state, large.state, large.reason) == (State.READY, State.FAILED, "index_memory")
    assert residency.resident_bytes() == 2 * ONE
    assert residency.acquire(entries[1], retry=False) is idle


def test_an_index_larger_than_the_budget_fails_with_both_sizes(bench: Any, reside: Any) -> None:
    index = load(reside(bench, 1000), bench.put(PROMPT))
    assert (index.state, index.reason) == (State.FAILED, "index_memory")
    assert "1000" in index.detail
    assert str(ONE) in index.detail


@pytest.mark.parametrize("error", [None, OSError("a defect of the store")])
def test_a_damaged_index_is_reported_before_requests_are_told(
    bench: Any, reside: Any, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Who is told asks anew: it must not be offered the same index. A store that fails then changes nothing."""
    entry, residency, seen = bench.put(PROMPT), reside(bench), []

    def failing(error: Exception | None) -> None:
        if error is not None:
            raise error

    def report(file: Any, damage: Any) -> None:
        seen.append(residency.acquire(entry, retry=False).state)
        failing(error)

    damage = IndexCorrupt("checksum", expected="a", found="b", remedy="c")
    monkeypatch.setattr(IndexFile, "read_many", lambda *_: failing(damage))
    monkeypatch.setattr(bench.store, "report", report)
    index = load(residency, entry)
    assert seen == [State.LOADING]
    assert (index.state, index.reason) == (State.FAILED, "index_corrupt")
    assert residency.figures()["corrupt"] == {"bytes": 1}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (IndexUnreadable("index", expected="bytes", found="Input/output error", remedy="check"), "index_corrupt"),
        (MemoryError("Unable to allocate 1 TiB"), "index_memory"),
    ],
    ids=["disk", "memory"],
)
def test_what_cannot_be_read_now_is_not_reported_as_damaged(
    bench: Any, reside: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def failing(*_: Any) -> Any:
        raise error

    entry, residency = bench.put(PROMPT), reside(bench)
    monkeypatch.setattr("prefix_index.reader.fresh_buffer", failing)
    index = load(residency, entry)
    assert (index.state, index.reason) == (State.FAILED, reason)
    assert bench.store.problems() == ()
    found = residency.figures()
    assert (found["load_failures"], found["corrupt"]) == ({reason: 1}, {}), "nothing is known to be damaged"
    monkeypatch.undo()
    assert load(residency, entry).state is State.READY


def test_an_index_that_has_gone_or_is_of_another_method_fails_by_name(bench: Any, reside: Any) -> None:
    entry = bench.put(PROMPT)
    index = load(reside(bench, spec=METHODS["csattention"].spec()), entry)
    assert (index.state, index.reason) == (State.FAILED, "index_mismatch")
    assert "csattention" in index.detail
    assert "exact" in index.detail, "what it holds"
    bench.store.path_of(entry.digest).unlink()
    index = load(reside(bench), entry)
    assert (index.state, index.reason) == (State.FAILED, "no_index")


def test_indexes_that_failed_and_left_the_store_are_forgotten_when_another_is_loaded(bench: Any, reside: Any) -> None:
    large, *gone, other = (bench.put(prompt(n, 128 if n == 0 else 64)) for n in range(5))
    residency = reside(bench, ONE)
    for entry in gone:
        bench.store.delete(entry.digest)
    failed = [load(residency, entry) for entry in (large, *gone)]
    assert {index.state for index in failed} == {State.FAILED}
    for index in failed[:-1]:
        residency.release(index)
    load(residency, other)
    assert [*residency.resident()] == [large.digest, gone[-1].digest, other.digest], "in the store, in use, loaded"


def test_acquire_does_not_wait_for_the_disk(bench: Any, reside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, residency = bench.put(PROMPT), reside(bench)
    gate, real = threading.Event(), bench.store.get
    monkeypatch.setattr(bench.store, "get", lambda key: (gate.wait(30), real(key))[1])
    index = residency.acquire(entry)
    assert index.state is State.LOADING
    residency.release(index)  # its request ended before the load did
    gate.set()
    index.loaded.result(30)
    assert (index.state, index.users) == (State.READY, 0)


def test_an_index_that_is_being_fetched_holds_up_none_of_this_machine(bench: Any, reside: Any, tmp_path: Path) -> None:
    here, there = (bench.put(prompt(n)) for n in range(2))
    blobs = Shaky()
    remote = RemoteStore(blobs, timeout_s=30)
    with SharedStore(FileStore(tmp_path / "mine", create=True), [remote], timeout_s=30) as store:
        for entry, source in ((here, store), (there, remote)):
            with bench.store.get(entry.digest) as file:
                source.put(file.payload())
        assert store.flush(30)
        blobs.gate.clear()
        residency = reside(SimpleNamespace(store=store))
        fetched = residency.acquire(there)
        try:
            assert blobs.reading.wait(30)
            loaded = residency.acquire(here)
            loaded.loaded.result(5)
            assert (loaded.state, fetched.state) == (State.READY, State.LOADING)
        finally:
            blobs.gate.set()
        fetched.loaded.result(30)
        assert fetched.state is State.READY


def test_the_store_is_told_now_and_then_of_an_index_in_use(bench: Any, reside: Any, monkeypatch: Any) -> None:
    entry, residency = bench.put(PROMPT), reside(bench)
    load(residency, entry)
    for told_s, used in ((3600.0, False), (0.0, True)):
        monkeypatch.setattr(module, "TELL_S", told_s)
        os.utime(entry.path, (1e9, Path(entry.path).stat().st_mtime))
        load(residency, entry)
        residency._worker.submit(int).result(30)  # behind what was asked of it
        assert (Path(entry.path).stat().st_atime > 1e9) is used
    bench.store.delete(entry.digest)
    assert load(residency, entry).state is State.READY, "that the store does not find it is no matter"
    residency._worker.submit(int).result(30)


def test_concurrent_acquire_and_release_balance(bench: Any, reside: Any) -> None:
    entries = [bench.put(prompt(n)) for n in range(4)]
    residency = reside(bench, 2 * ONE + 100)

    def work(seed: int) -> None:
        for n in range(60):
            index = load(residency, entries[(seed + n * 7) % 4])
            assert index.state is not State.READY or len(index.layers) == 3
            check_books(residency)
            residency.release(index)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert residency.num_users() == 0
    assert residency.resident_bytes() <= 2 * ONE + 100


def of_32767(arrays: dict[ArrayKey, Any]) -> None:
    arrays[ArrayKey("token_index.channels", 1, 1)][-1] = 32767


def halved(arrays: dict[ArrayKey, Any]) -> None:
    key = ArrayKey("token_index.keys_packed", 1, 1)
    arrays[key] = arrays[key][: len(arrays[key]) // 2]


@pytest.fixture
def tokens(make_bench: Any) -> Any:
    """A bench whose indexes are of tokens."""
    return make_bench(method="token_index")


@pytest.fixture
def reading(tokens: Any, reside: Any) -> Any:
    """Residencies of these indexes, of all KV heads or of some."""
    return lambda **heads: reside(tokens, spec=method_specs(tokens.config)["token_index"], **heads)


@pytest.fixture
def reports(tokens: Any, monkeypatch: pytest.MonkeyPatch) -> list[IndexStoreError]:
    found, report = list[IndexStoreError](), tokens.store.report
    monkeypatch.setattr(tokens.store, "report", lambda key, error: (found.append(error), report(key, error)))
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            of_32767,
            r"channels of layer 1 in index [0-9a-f]{12}: expected values of 0 to 15, found \d+ to 32767; remove",
        ),
        (halved, r"keys_packed of layer 1, KV head 1 .*: expected uint8 \[64, 4\]"),
    ],
)
def test_wrong_content_is_index_corrupt_and_reported(
    tokens: Any, reading: Any, reports: list[IndexStoreError], change: Any, message: str
) -> None:
    """One that values show, one that is seen before arrays are read. All others: tests/methods/test_contents.py."""
    entry = replaced(tokens.store, tokens.put(PROMPT).digest, change, created=5.0)
    with tokens.store.get(entry.digest) as index:
        index.verify()  # nothing is wrong with its bytes
    failed = load(reading(), entry)
    assert (failed.state, failed.reason, failed.nbytes) == (State.FAILED, "index_corrupt", 0)
    assert len(reports) == 1
    with pytest.raises(IndexStoreError, match=message):
        raise reports[0]


def test_the_report_of_a_damaged_index_keeps_none_of_its_layers(
    bench: Any, reside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would lie on the device, beyond the budget, for as long as the index is a problem."""
    entry, loaded, real = bench.put(PROMPT), list[Any](), module.check_layer

    def check(spec: Any, arrays: Any, size: Any, where: str) -> None:
        loaded.append(weakref.ref(arrays["keys"]))
        if where == "layer 2":
            raise IndexCorrupt("checksum", expected="a", found="b", remedy="c")
        real(spec, arrays, size, where)

    monkeypatch.setattr(module, "check_layer", check)
    assert load(reside(bench), entry).state is State.FAILED
    assert len(bench.store.problems()) == 1
    gc.collect()
    assert [one() for one in loaded] == [None] * 3


def test_it_is_loaded_once_and_another_build_of_it_again(tokens: Any, reading: Any, reports: Any) -> None:
    """The store may offer it again: its checksums are right, and who reads it may have had an older one."""
    entry = replaced(tokens.store, tokens.put(PROMPT).digest, of_32767, created=5.0)
    residency = reading()
    failed = load(residency, entry)
    residency.release(failed)
    assert failed.state is State.FAILED
    assert residency.acquire(entry) is failed, "not read again for each request"
    assert residency.acquire(msgspec.structs.replace(entry, path="elsewhere")) is failed, "nor another copy"
    assert len(reports) == 1
    assert residency.figures()["corrupt"] == {"content": 1}
    mended = tokens.put(PROMPT)
    assert load(residency, mended).state is State.READY
