"""A hypothesis machine that drives any store against a plain dictionary; a tier's tests subclass it."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefix_index import (
    Ask,
    BuildLease,
    IndexCorrupt,
    IndexFile,
    IndexIdentity,
    IndexNotFound,
    IndexStore,
    Retention,
    namespace_digest,
    page_hashes,
)
from tests.examples import examples
from tests.prefix_index.balance import balanced
from tests.prefix_index.samples import sample_identity, sample_model, sample_payload
from tests.prefix_index.small_stores import Clock

PROMPT = tuple(range(64))
TENANTS = (None, "", "t")
PAGES = st.integers(1, 4)
TENANT = st.sampled_from(TENANTS)
FILL = st.integers(0, 200)


def prefix_of(pages: int, tenant: str | None) -> IndexIdentity:
    return sample_identity(PROMPT[: 16 * pages], extra_key=tenant)


Key = tuple[int, str | None]
DEFAULT = Retention()
RETENTION = st.sampled_from(("default", "pinned", "an hour", "pinned an hour", "expired"))


class StoreMachine(RuleBasedStateMachine):
    """The store against ``model``: (pages, tenant) -> fill.

    ``expired`` are indexes that the store may still hold but must not show: they are back if the clock is set back. A
    subclass whose store takes a ``clock`` sets ``self.clock`` in ``make()``: then time passes, and jumps. Rules of a
    subclass that change the store behind its back tell the model by ``holds()`` and ``drop()``. ``max_entries`` is the
    store's room, for one that evicts in the order of least recent use.
    """

    max_entries = 1000

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[Key, int] = {}
        self.retention: dict[Key, Retention] = {}
        self.expired: dict[Key, int] = {}
        self.used: dict[Key, int] = {}
        self.reported: dict[Key, int] = {}
        self.read: dict[Key, tuple[IndexFile, int]] = {}
        """What was read last of an index, and how many versions there were then."""
        self.versions: Counter[Key] = Counter()
        self.leases: dict[Key, BuildLease] = {}
        self.clock: Clock | None = None
        self.was_set_back = False
        self.uses = 0
        self.store = self.make()
        self.store.open()

    def make(self) -> IndexStore:
        raise NotImplementedError

    def teardown(self) -> None:
        for lease in self.leases.values():
            lease.release()
        self.store.close()

    def now(self) -> float:
        return time.time() if self.clock is None else self.clock()

    def retention_of(self, name: str) -> Retention:
        expires = {"an hour": self.now() + 3600, "expired": self.now() - 3600}.get(name.removeprefix("pinned "))
        return Retention(pinned=name.startswith("pinned"), expires=expires, name=name if expires is None else None)

    def pass_time(self, seconds: float) -> None:
        if self.clock is not None:
            self.clock.now = max(self.clock.now + seconds, 1e6)
        for key, fill in (self.model | self.expired).items():
            over, there = (
                (self.expired, self.model) if self.is_over(self.retention[key]) else (self.model, self.expired)
            )
            there.pop(key, None)
            over[key] = fill

    def is_over(self, retention: Retention) -> bool:
        return retention.expires is not None and retention.expires <= self.now()

    def use(self, key: Key) -> None:
        self.uses += 1
        self.used[key] = self.uses

    def holds(self, key: Key, fill: int, retention: Retention) -> None:
        """The store has it now; older ones may have had to leave."""
        self.versions[key] += 1
        self.drop(key)
        while len(self.model) + len(self.expired) >= self.max_entries:
            self.drop(min((*self.model, *self.expired), key=self.leaving_order))
        self.model[key] = fill
        self.retention[key] = retention
        self.use(key)
        self.pass_time(0)

    def leaving_order(self, key: Key) -> tuple[bool, bool, int]:
        """What has expired leaves first, whether it was pinned or not."""
        there = key not in self.expired
        return there, there and self.retention[key].pinned, self.used[key]

    def drop(self, key: Key) -> None:
        self.model.pop(key, None)
        self.expired.pop(key, None)
        self.reported.pop(key, None)
        self.retention.pop(key, None)

    @rule(pages=PAGES, tenant=TENANT, fill=FILL, name=st.none() | RETENTION)
    def put(self, pages: int, tenant: str | None, fill: int, name: str | None) -> None:
        self.pass_time(10)
        key = (pages, tenant)
        retention = None if name is None else self.retention_of(name)
        entry = self.store.put(sample_payload(prefix_of(pages, tenant), fill=fill), retention=retention)
        if retention is None:
            retention = self.retention.get(key, DEFAULT) if key in self.model else DEFAULT
            if key in self.reported:  # a store may, or may not, remember that of an index that went bad
                retention = entry.retention
        assert entry.retention == retention
        self.holds(key, fill, retention)

    @rule(pages=PAGES, tenant=TENANT, name=RETENTION)
    def retain(self, pages: int, tenant: str | None, name: str) -> None:
        key, identity = (pages, tenant), prefix_of(pages, tenant)
        retention = self.retention_of(name)
        if key in self.model:
            assert self.store.retain(identity, retention).retention == retention
            self.retention[key] = retention
            self.pass_time(0)
        elif key not in self.reported:
            with pytest.raises(IndexNotFound):
                self.store.retain(identity, retention)

    @precondition(lambda self: self.clock is not None)
    @rule(seconds=st.sampled_from((1.5, 1800.0, 3601.0, 3e8, -1.5, -3601.0, -3e8)))
    def later(self, seconds: float) -> None:
        self.was_set_back |= seconds < 0
        self.pass_time(seconds)

    @rule()
    def collect(self) -> None:
        assert {e.digest for e in self.store.collect()} == {prefix_of(*key).digest for key in self.expired}
        for key in tuple(self.expired):
            self.drop(key)

    @rule(pages=PAGES, tenant=TENANT)
    def lease(self, pages: int, tenant: str | None) -> None:
        lease = self.store.lease(prefix_of(pages, tenant))
        assert (lease is None) == ((pages, tenant) in self.leases)
        if lease is not None:
            self.leases[pages, tenant] = lease

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.leases.pop(data.draw(st.sampled_from(sorted(self.leases, key=repr)))).release()

    @rule(pages=PAGES, tenant=TENANT)
    def get(self, pages: int, tenant: str | None) -> None:
        self.pass_time(10)
        identity = prefix_of(pages, tenant)
        if (pages, tenant) not in self.model:
            assert not self.store.contains(identity)
            with pytest.raises(IndexCorrupt if (pages, tenant) in self.reported else IndexNotFound):
                self.store.get(identity)
            return
        assert self.store.contains(identity)
        with self.store.get(identity.digest) as index:
            self.use((pages, tenant))
            assert index.identity == identity
            assert index.array("channels")[0] == self.model[pages, tenant]
            index.verify()
        self.read[pages, tenant] = index, self.versions[pages, tenant]

    @rule(pages=PAGES, tenant=TENANT)
    def delete(self, pages: int, tenant: str | None) -> None:
        key = (pages, tenant)
        deleted = self.store.delete(prefix_of(pages, tenant))
        assert deleted == (key in self.model or key in self.reported) or key in self.expired
        self.drop(key)

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        """About what was read, which may be an older version by now."""
        key = data.draw(st.sampled_from(sorted(self.read, key=repr)))
        index, version = self.read[key]
        there = key in self.model and version == self.versions[key]
        told = self.store.report(index, IndexCorrupt("a test", expected="a", found="b", remedy="none"))
        assert told == there or key not in self.model
        if there:
            self.reported[key] = self.model.pop(key)

    @rule(num_tokens=st.integers(0, 64), tenant=TENANT)
    def longest(self, num_tokens: int, tenant: str | None) -> None:
        namespace = namespace_digest({"extra_key": tenant})
        found = self.store.longest(Ask(namespace, page_hashes(PROMPT[:num_tokens]), sample_model(), "profile-1"))
        lengths = [pages * 16 for pages, owner in self.model if owner == tenant and pages * 16 <= num_tokens]
        assert (found.identity.num_tokens if found else 0) == max(lengths, default=0)

    @rule()
    def rescan(self) -> None:
        self.store.rescan()

    @rule()
    def reopen(self) -> None:
        """A store that outlives nothing: all is gone. One that does overrides this."""
        self.release_all()
        self.store.close()
        self.store.open()
        for key in (*self.model, *self.expired, *self.reported):
            self.drop(key)

    def open_again(self) -> None:
        """Of a store that outlives this: everything is still there, and what was only reported is offered again."""
        self.store.close()
        self.store.open()
        for key, fill in self.reported.items():
            self.expired[key] = fill
        self.reported.clear()
        self.pass_time(0)

    def release_all(self) -> None:
        while self.leases:
            self.leases.popitem()[1].release()

    @invariant()
    def listing_is_the_model(self) -> None:
        assert {e.digest: e.retention for e in self.store.list()} == {
            prefix_of(*key).digest: self.retention.get(key, DEFAULT) for key in self.model
        }
        assert len(self.store.problems()) == len(self.reported)

    @invariant()
    def books_balance(self) -> None:
        balanced(self.store)


STEPS = settings(max_examples=examples(25, day=6), stateful_step_count=25, deadline=None)
