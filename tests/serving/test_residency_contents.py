"""An index of right checksums and wrong content: refused by the loader, reported, and not loaded again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from prefix_index import ArrayKey, IndexEntry, IndexPayload, IndexStoreError
from sglang_ext.methods import method_specs
from sglang_ext.prefix.residency import Residency, ResidentIndex, State

PROMPT = list(range(64))
Change = Callable[[dict[ArrayKey, Any]], None]


def set_in(name: str, layer: int, head: int, at: Any, value: float) -> Change:
    def change(arrays: dict[ArrayKey, Any]) -> None:
        arrays[ArrayKey(name, layer, head)][at] = value

    return change


def halved(arrays: dict[ArrayKey, Any]) -> None:
    key = ArrayKey("token_index.keys_packed", 1, 1)
    arrays[key] = arrays[key][: len(arrays[key]) // 2]


def halved_everywhere(arrays: dict[ArrayKey, Any]) -> None:
    for key in arrays:
        if key.name == "token_index.keys_packed":
            arrays[key] = arrays[key][: len(arrays[key]) // 2]


def lacking(arrays: dict[ArrayKey, Any]) -> None:
    del arrays[ArrayKey("token_index.channels", 2, 1)]


CHANGES: dict[str, tuple[Change, str]] = {
    "a channel of 32767": (
        set_in("token_index.channels", 1, 1, -1, 32767),
        r"channels of layer 1 in index [0-9a-f]{12}: expected values of 0 to 15, found \d+ to 32767; remove the index",
    ),
    "a channel of -1": (set_in("token_index.channels", 0, 0, 0, -1), "channels of layer 0"),
    "a scale of NaN": (set_in("token_index.keys_scale", 2, 1, 3, np.nan), "keys_scale of layer 2"),
    "keys of half the length": (halved, r"keys_packed of layer 1, KV head 1 .*: expected uint8 \[64, 6\]"),
    "keys of half the length everywhere": (halved_everywhere, "keys_packed of layer 0, KV head 0"),
    "an array that a head lacks": (lacking, "arrays of layer 2, KV head 1"),
}


def replaced(bench: Any, entry: IndexEntry, change: Change, created: float) -> IndexEntry:
    """The index, built by somebody else."""
    with bench.store.get(entry.digest) as index:
        arrays = {key: array.copy() for key, array in index.read_many().items()}
        whole = index.payload()
    change(arrays)
    info = msgspec.structs.replace(whole.info, created=created)
    return bench.store.put(IndexPayload(whole.identity, arrays, spec=whole.spec, stats=whole.stats, info=info))


def residency_of(bench: Any, heads: int = 2, first: int = 0) -> Residency:
    spec = method_specs(bench.config)["token_index"]
    return Residency(bench.store, spec, 3, heads, torch.device("cpu"), 1 << 30, first)


def load(residency: Residency, entry: IndexEntry) -> ResidentIndex:
    index = residency.acquire(entry)
    assert index.loaded is not None
    index.loaded.result(30)
    residency.release(index)
    return index


@pytest.fixture
def bench(make_bench: Any) -> Any:
    return make_bench(method="token_index")


@pytest.fixture
def reports(bench: Any, monkeypatch: pytest.MonkeyPatch) -> list[IndexStoreError]:
    found: list[IndexStoreError] = []
    report = bench.store.report

    def counted(key: Any, error: IndexStoreError) -> None:
        found.append(error)
        report(key, error)

    monkeypatch.setattr(bench.store, "report", counted)
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_wrong_content_is_index_corrupt_and_reported(bench: Any, reports: list[IndexStoreError], name: str) -> None:
    change, message = CHANGES[name]
    entry = bench.put(PROMPT)
    entry = replaced(bench, entry, change, 5.0)
    with bench.store.get(entry.digest) as index:
        index.verify()  # nothing is wrong with its bytes
    residency = residency_of(bench)
    failed = load(residency, entry)
    assert (failed.state, failed.reason, failed.nbytes) == (State.FAILED, "index_corrupt", 0)
    assert len(reports) == 1
    with pytest.raises(IndexStoreError, match=message):
        raise reports[0]
    residency.close()


def test_it_is_loaded_once_and_another_build_of_it_again(bench: Any, reports: list[IndexStoreError]) -> None:
    """The store may offer it again: its checksums are right, and who reads it may have had an older one."""
    good = bench.put(PROMPT)
    entry = replaced(bench, good, CHANGES["a channel of -1"][0], 5.0)
    residency = residency_of(bench)
    failed = load(residency, entry)
    assert failed.state is State.FAILED
    assert residency.acquire(entry) is failed, "not read again for each request"
    assert residency.acquire(msgspec.structs.replace(entry, path="elsewhere")) is failed, "nor another copy"
    assert len(reports) == 1
    mended = bench.put(PROMPT)
    assert load(residency, mended).state is State.READY
    residency.close()


def test_a_report_takes_it_out_of_the_offer(bench: Any) -> None:
    entry = bench.put(PROMPT)
    entry = replaced(bench, entry, CHANGES["a channel of 32767"][0], 5.0)
    store = type(bench.store)(bench.store.folder)
    store.open()
    residency = Residency(store, method_specs(bench.config)["token_index"], 3, 2, torch.device("cpu"), 1 << 30)
    assert load(residency, entry).state is State.FAILED
    assert list(store.list()) == []
    (problem,) = store.problems()
    assert "channels of layer 1" in str(problem.error)
    residency.close()
    store.close()


def test_a_rank_looks_at_its_own_heads(bench: Any) -> None:
    entry = bench.put(PROMPT)
    entry = replaced(bench, entry, CHANGES["a channel of 32767"][0], 5.0)
    for first, state in ((0, State.READY), (1, State.FAILED)):
        residency = residency_of(bench, 1, first)
        assert load(residency, entry).state is state
        residency.close()


def test_no_memory_is_not_damage(bench: Any, reports: list[IndexStoreError], monkeypatch: pytest.MonkeyPatch) -> None:
    entry = bench.put(PROMPT)

    def none_left(*_: Any) -> Any:
        raise MemoryError("Unable to allocate 1 TiB")

    monkeypatch.setattr("prefix_index.reader.fresh_buffer", none_left)
    residency = residency_of(bench)
    failed = load(residency, entry)
    assert (failed.state, failed.reason, reports) == (State.FAILED, "index_memory", [])
    monkeypatch.undo()
    assert load(residency, entry).state is State.READY
    residency.close()
