"""One conformance suite for every store. A new tier joins by a function in ``tiers.py``."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from prefix_index import (
    ArrayKey,
    FileStore,
    IndexCorrupt,
    IndexFile,
    IndexIdentity,
    IndexNotFound,
    IndexPayload,
    IndexStore,
    InvalidPayload,
    LazyArray,
    Retention,
    SharedStore,
    StoreClosed,
)
from tests.prefix_index.samples import (
    PINNED,
    PROMPT,
    fill_of,
    find,
    miss,
    read_fill,
    sample_identity,
    sample_model,
    sample_payload,
)
from tests.prefix_index.small_stores import SOON, balanced, in_threads
from tests.prefix_index.tiers import eventually

ERROR = IndexCorrupt("checksum", expected="a", found="b", remedy="build again")


def test_put_then_get(store: IndexStore) -> None:
    payload = sample_payload()
    entry = store.put(payload)
    assert (entry.identity, entry.created, entry.build_seconds) == (payload.identity, 1_700_000_000.0, 1.5)
    assert entry.nbytes % 4096 == 0
    assert list(store.list()) == [entry]
    for key in (payload.identity, payload.identity.digest):
        index = store.get(key)
        assert index.identity == payload.identity
        assert index.spec == payload.spec
        assert index.nbytes == entry.nbytes
        assert fill_of(index) == 0
        assert store.contains(key)
        assert store.entry(key) == entry
    store.retain(payload.identity, Retention(expires=1.0))
    assert (store.entry(payload.identity), store.list()) == (None, ())


def test_touch_is_a_use_and_an_index_that_is_not_there_has_none(store: IndexStore, tmp_path: Path) -> None:
    store.put(sample_payload())
    if isinstance(store, SharedStore):
        assert store.flush(SOON)
        store.rescan(full=True)
    files = [path for path in tmp_path.glob("*/??/*.pfxindex") if path.parts[-3] != "dram"]
    assert files
    for path in files:
        os.utime(path, (1e9, path.stat().st_mtime))
    store.touch(sample_identity())
    eventually(lambda: all(path.stat().st_atime > 1.7e9 for path in files))
    assert store.problems() == ()
    assert read_fill(store) == 0
    with pytest.raises(IndexNotFound):
        store.touch(sample_identity(PROMPT[:64]))


def test_asking_for_an_index_that_expired_is_no_use_of_it(tmp_path: Path) -> None:
    with FileStore(tmp_path) as store:
        store.put(sample_payload(), retention=Retention(expires=1.0))
        (path,) = tmp_path.glob("??/*.pfxindex")
        os.utime(path, (1e9, path.stat().st_mtime))
        for ask in (store.get, store.touch):
            with pytest.raises(IndexNotFound, match="expected one in time, found one that expired"):
                ask(sample_identity())
        assert path.stat().st_atime == 1e9


def test_longest_asks_for_the_exact_namespace_model_and_profile(store: IndexStore) -> None:
    store.put(sample_payload(sample_identity(PROMPT, extra_key="tenant")))
    other = sample_model(kv_dtype="float32")
    assert find(store, extra_key="tenant") is not None
    for extra_key in (None, ""):
        assert find(store, extra_key=extra_key) is None
    for change in ({"model": other}, {"profile_digest": "profile-2"}, {"page_tokens": 8}):
        assert find(store, extra_key="tenant", **change) is None


@pytest.mark.parametrize("lie", [{"num_tokens": 112}, {"num_tokens": 144}, {"page_tokens": 8}], ids=str)
def test_longest_never_offers_an_index_whose_length_contradicts_its_hash(
    store: IndexStore, lie: dict[str, int]
) -> None:
    store.put(sample_payload(msgspec.structs.replace(sample_identity(PROMPT), **lie)))
    assert find(store) is None
    assert miss(store, model=sample_model(kv_dtype="float32")) is None


def test_longest_falls_to_a_shorter_index_of_the_right_model_that_has_not_expired(store: IndexStore) -> None:
    store.put(sample_payload(sample_identity(PROMPT, model=sample_model(num_layers=3))))
    store.put(sample_payload(sample_identity(PROMPT)), retention=Retention(expires=1.0))
    store.put(sample_payload(sample_identity(PROMPT[:64])), retention=Retention(expires=4e9))
    found = find(store)
    assert found is not None
    assert found.identity.num_tokens == 64


def test_near_miss_names_the_field_but_never_another_namespace(store: IndexStore) -> None:
    assert miss(store) is None
    store.put(sample_payload(sample_identity(PROMPT, extra_key="tenant")))
    assert miss(store) is None
    assert miss(store, extra_key="tenant") is None
    other = sample_model(kv_dtype="float32")
    assert miss(store, extra_key="tenant", model=other) == "model.kv_dtype: expected float32, found bfloat16"
    said = miss(store, extra_key="tenant", profile_digest="profile-2")
    assert said == "profile_digest: expected profile-2, found profile-1"


def test_two_models_of_one_prefix_live_side_by_side(store: IndexStore) -> None:
    a, b = sample_identity(PROMPT), sample_identity(PROMPT, model=sample_model(kv_dtype="float32"))
    store.put(sample_payload(a, fill=1))
    store.put(sample_payload(b, fill=2))
    assert read_fill(store, a) == 1
    assert read_fill(store, b) == 2
    store.delete(a)
    assert find(store) is None
    assert find(store, model=sample_model(kv_dtype="float32")) is not None


def report(store: IndexStore, identity: IndexIdentity | None = None) -> IndexFile:
    """Reads an index and finds it damaged."""
    with store.get(identity or sample_identity()) as index:
        assert store.report(index, ERROR)
    return index


def test_report_takes_an_index_out_of_the_offer_until_replaced(store: IndexStore) -> None:
    store.put(sample_payload(sample_identity(PROMPT)))
    report(store, sample_identity(PROMPT))
    for full in (False, True):
        store.rescan(full=full)
        assert find(store) is None
        assert not store.contains(sample_identity(PROMPT))
        with pytest.raises(IndexCorrupt, match="checksum: expected a, found b; build again"):
            store.get(sample_identity(PROMPT))
        assert [p.error for p in store.problems()] == [ERROR]
    store.put(sample_payload(sample_identity(PROMPT), fill=3))
    assert find(store) is not None
    assert store.contains(sample_identity(PROMPT))
    assert read_fill(store, sample_identity(PROMPT)) == 3
    assert list(store.problems()) == []


def test_failed_put_leaves_the_old_index(store: IndexStore) -> None:
    store.put(sample_payload(fill=1))

    def fail() -> Any:
        raise RuntimeError("the GPU went away")

    for array in (LazyArray("uint8", (4096,), fail), np.zeros(2, complex)):
        with pytest.raises(RuntimeError if isinstance(array, LazyArray) else InvalidPayload):
            store.put(IndexPayload(sample_identity(), {ArrayKey("kv"): array}))
        assert read_fill(store) == 1
        assert list(store.problems()) == []
        store.rescan()
        assert len(store.list()) == 1


DIGEST = sample_identity().digest
NO_KEYS = ["", "ab", "../" * 20 + "etcd", "A" * 64, "g" * 64, "0" * 63 + "\n", "0" * 1_000_000, None, 7, b"0" * 64]
NO_KEYS += [
    f"../{DIGEST}",
    f"{DIGEST}.pfxindex",
    f".lease-{DIGEST}",
    DIGEST[:-1] + "\0",
    DIGEST.upper(),
    DIGEST.encode(),
]
NO_KEYS += ["\u0660" * 64, "\ud800" * 64, Path(DIGEST), [DIGEST], {"digest": DIGEST}, object(), True]


def test_only_digests_are_keys(store: IndexStore) -> None:
    store.put(sample_payload())
    for key, call in itertools.product(NO_KEYS, keyed(store)):
        with pytest.raises(InvalidPayload, match="index key: expected an IndexIdentity or its digest"):
            call(key)
    assert read_fill(store) == 0


def keyed(store: IndexStore) -> list[Callable[[Any], object]]:
    """What a store does with an index."""
    asking = [store.get, store.contains, store.entry]
    return [*asking, store.delete, store.lease, lambda key: store.retain(key, Retention())]


def test_closed_store_says_so(store: IndexStore) -> None:
    store.put(sample_payload())
    index = store.get(sample_identity())
    store.close()
    store.close()
    index.close()
    calls: list[Callable[[], object]] = [
        *(partial(call, sample_identity()) for call in keyed(store)),
        lambda: store.put(sample_payload()),
        lambda: store.report(index, ERROR),
        lambda: find(store),
        lambda: miss(store),
        store.collect,
        store.list,
        store.problems,
        store.rescan,
    ]
    for call in calls:
        with pytest.raises(StoreClosed, match=r"store: expected open, found closed; call open\(\) first"):
            call()
    store.open()
    store.open()


def test_many_threads(store: IndexStore) -> None:
    payloads = [sample_payload(sample_identity(PROMPT[: 16 * n]), fill=n) for n in range(1, 5)]

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(25):
            payload = payloads[rng.integers(len(payloads))]
            match rng.integers(6):
                case 0:
                    store.put(payload)
                case 1:
                    store.delete(payload.identity)
                case 2:
                    find(store)
                    store.rescan()
                case 3:
                    store.collect()
                case 4:
                    with contextlib.suppress(IndexNotFound):
                        store.retain(payload.identity, PINNED)
                case _:
                    with contextlib.suppress(IndexNotFound):
                        assert read_fill(store, payload.identity) == payload.stats["fill"]

    in_threads(*(partial(work, seed) for seed in range(6)))
    store.rescan()
    assert list(store.problems()) == []


def test_each_lazy_array_is_loaded_once(store: IndexStore) -> None:
    loads: list[int] = []

    def load() -> Any:
        loads.append(1)
        return np.zeros(4096, np.uint8)

    store.put(IndexPayload(sample_identity(), {ArrayKey("kv"): LazyArray("uint8", (4096,), load)}))
    store.get(sample_identity()).close()
    balanced(store)  # once work in the background is done
    assert len(loads) == 1


def test_one_lease_per_index(store: IndexStore) -> None:
    first = store.lease(sample_identity())
    assert first is not None
    assert first.digest == DIGEST
    for key in (sample_identity(), DIGEST):
        assert store.lease(key) is None
    other = store.lease(sample_identity(PROMPT))
    assert other is not None
    store.put(sample_payload())
    assert store.lease(sample_identity()) is None
    first.release()
    again = store.lease(sample_identity())
    assert again is not None
    first.release()  # twice, and long after: takes nothing from the one who holds it now
    assert store.lease(sample_identity()) is None
    again.release()
    other.release()
    assert store.collect() is not None
    assert len(store.list()) == 1


def test_of_many_threads_one_gets_the_lease(store: IndexStore) -> None:
    start = threading.Barrier(6)
    building: list[int] = []
    built: list[int] = []

    def work(me: int) -> None:
        start.wait()
        while not store.contains(sample_identity()):
            lease = store.lease(sample_identity())
            if lease is None:
                time.sleep(0.005)
                continue
            with lease:
                if store.contains(sample_identity()):
                    continue
                building.append(me)
                assert building == [me]
                store.put(sample_payload())
                built.append(me)
                building.remove(me)

    in_threads(*(partial(work, me) for me in range(6)))
    assert len(built) == 1
