"""The conformance suite's other half: how long an index stays in a store, and leases to build one."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest

from prefix_index import IndexCorrupt, IndexNotFound, IndexStore, Retention
from prefix_index.testing import sample_identity, sample_model, sample_payload
from tests.prefix_index.conformance import PINNED, PROMPT, find, miss, same_arrays


def in_a_year(*, pinned: bool = False) -> Retention:
    """Parameters are made when tests are collected, which may be hours before they run."""
    return Retention(pinned=pinned, expires=time.time() + 365 * 86_400)


def long_ago(*, pinned: bool = False) -> Retention:
    return Retention(pinned=pinned, expires=time.time() - 3600)


def test_an_index_stays_by_default(store: IndexStore) -> None:
    assert store.put(sample_payload()).retention == Retention()
    assert [e.retention for e in store.list()] == [Retention()]


@pytest.mark.parametrize("retention", [PINNED, in_a_year(), in_a_year(pinned=True)], ids=["pin", "ttl", "both"])
def test_retention_is_shown_and_kept_when_the_index_is_replaced(store: IndexStore, retention: Retention) -> None:
    assert store.put(sample_payload(fill=1), retention=retention).retention == retention
    store.rescan()
    assert [e.retention for e in store.list()] == [retention]
    assert store.put(sample_payload(fill=2)).retention == retention
    store.rescan(full=True)
    found = find(store, range(32))
    assert found is not None
    assert found.retention == retention
    assert same_arrays(store, sample_payload(fill=2))
    assert store.put(sample_payload(fill=3), retention=Retention()).retention == Retention()
    store.rescan()
    assert [e.retention for e in store.list()] == [Retention()]


def test_retain_changes_only_how_long_it_stays(store: IndexStore) -> None:
    entry = store.put(sample_payload(fill=1))
    other = store.put(sample_payload(sample_identity(PROMPT)))
    for key, retention in ((entry.identity, PINNED), (entry.digest, in_a_year()), (entry.digest, Retention())):
        assert store.retain(key, retention) == msgspec.structs.replace(entry, retention=retention)
        store.rescan()
        assert {e.digest: e.retention for e in store.list()} == {entry.digest: retention, other.digest: Retention()}
        assert same_arrays(store, sample_payload(fill=1))


def test_retain_of_nothing(store: IndexStore) -> None:
    with pytest.raises(IndexNotFound, match="index: expected"):
        store.retain(sample_identity(), PINNED)
    store.put(sample_payload())
    assert [e.retention for e in store.list()] == [Retention()]


def test_what_was_deleted_leaves_no_retention_behind(store: IndexStore) -> None:
    store.put(sample_payload(), retention=PINNED)
    assert store.delete(sample_identity())
    assert store.put(sample_payload()).retention == Retention()


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("how", ["put", "retain"])
def test_an_expired_index_is_a_miss_everywhere(store: IndexStore, how: str, pinned: bool) -> None:
    identity = sample_identity(PROMPT)
    held = None
    if how == "put":
        store.put(sample_payload(identity), retention=long_ago(pinned=pinned))
    else:
        store.put(sample_payload(identity))
        held = store.get(identity)
        store.retain(identity, long_ago(pinned=pinned))
    for _ in range(2):
        assert not store.contains(identity)
        with pytest.raises(IndexNotFound, match="index: expected"):
            store.get(identity)
        with pytest.raises(IndexNotFound, match="index: expected"):
            store.retain(identity, Retention())
        assert list(store.list()) == []
        assert list(store.problems()) == []
        assert find(store) is None
        assert miss(store, model=sample_model(kv_dtype="float32")) is None
        store.rescan()
    if held is not None:
        held.verify()
        held.close()


def test_a_report_of_an_expired_index_changes_nothing(store: IndexStore) -> None:
    identity = sample_identity(PROMPT)
    store.put(sample_payload(identity))
    store.get(identity).close()
    store.retain(identity, long_ago())
    store.report(identity, IndexCorrupt("checksum", expected="a", found="b", remedy="build again"))
    assert list(store.problems()) == []
    store.put(sample_payload(identity, fill=1))
    assert same_arrays(store, sample_payload(identity, fill=1))


def test_an_index_expires_when_its_time_comes(store: IndexStore) -> None:
    expires = time.time() + 0.4
    store.put(sample_payload(sample_identity(PROMPT)), retention=Retention(expires=expires))
    if store.contains(sample_identity(PROMPT)):
        assert find(store) is not None or time.time() >= expires
    while time.time() <= expires:
        time.sleep(0.05)
    assert not store.contains(sample_identity(PROMPT))
    assert find(store) is None
    assert [e.identity for e in store.collect()] == [sample_identity(PROMPT)]


def test_longest_falls_to_a_shorter_index_that_has_not_expired(store: IndexStore) -> None:
    store.put(sample_payload(sample_identity(PROMPT)), retention=long_ago())
    store.put(sample_payload(sample_identity(PROMPT[:64])), retention=in_a_year())
    found = find(store)
    assert found is not None
    assert found.identity.num_tokens == 64


def test_an_index_built_again_after_it_expired_stays(store: IndexStore) -> None:
    store.put(sample_payload(fill=1), retention=long_ago(pinned=True))
    assert store.put(sample_payload(fill=2)).retention == Retention()
    assert list(store.collect()) == []
    assert same_arrays(store, sample_payload(fill=2))


def test_delete_takes_an_expired_index_too(store: IndexStore) -> None:
    store.put(sample_payload(), retention=long_ago())
    store.delete(sample_identity())
    assert list(store.collect()) == []


def test_collect_removes_what_has_expired_and_nothing_else(store: IndexStore) -> None:
    assert list(store.collect()) == []
    retentions = [Retention(), PINNED, in_a_year(), long_ago(), long_ago(pinned=True)]
    ids = [sample_identity(PROMPT[: 16 * n]) for n in range(1, 6)]
    for identity, retention in zip(ids, retentions, strict=True):
        store.put(sample_payload(identity), retention=retention)
    assert {e.digest for e in store.collect()} == {i.digest for i in ids[3:]}
    assert list(store.collect()) == []
    assert {e.digest: e.retention for e in store.list()} == {
        i.digest: r for i, r in zip(ids[:3], retentions[:3], strict=True)
    }
    for identity in ids:
        assert store.contains(identity) == (identity in ids[:3])


def test_one_lease_per_index(store: IndexStore) -> None:
    first = store.lease(sample_identity())
    assert first is not None
    assert first.digest == sample_identity().digest
    assert store.lease(sample_identity()) is None
    assert store.lease(sample_identity().digest) is None
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


def test_a_lease_ends_with_its_block(store: IndexStore) -> None:
    lease = store.lease(sample_identity())
    assert lease is not None

    def build() -> None:
        with lease:
            assert store.lease(sample_identity()) is None
            raise RuntimeError("the build failed")

    with pytest.raises(RuntimeError, match="the build failed"):
        build()
    with store.lease(sample_identity()) or pytest.fail("still held") as again:
        assert again.digest == sample_identity().digest


def test_of_many_threads_one_gets_the_lease(store: IndexStore) -> None:
    start = threading.Barrier(6)
    building: list[int] = []
    built: list[int] = []
    errors: list[BaseException] = []

    def work(me: int) -> None:
        try:
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
        except BaseException as err:
            errors.append(err)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(built) == 1
