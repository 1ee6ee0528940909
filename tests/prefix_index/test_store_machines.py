"""Every kind of store against a plain dictionary, driven by hypothesis."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefix_index import (
    Ask,
    BuildLease,
    FileStore,
    IndexCorrupt,
    IndexFile,
    IndexIdentity,
    IndexNotFound,
    IndexStore,
    Retention,
    SharedStore,
    link,
    namespace_digest,
    page_hashes,
)
from prefix_index.remote import Blobs, ObjectBlobs, RemoteStore
from prefix_index.store import has_expired
from tests.examples import examples
from tests.prefix_index.remote_stores import CHUNK_NBYTES, Shaky, flushed, machine
from tests.prefix_index.samples import read_fill, sample_identity, sample_model, sample_payload
from tests.prefix_index.small_stores import ONE, SOON, Clock, balanced
from tests.prefix_index.tiers import TIERS

PROMPT = tuple(range(64))
TENANTS = (None, "", "t")
PAGES = st.integers(1, 4)
TENANT = st.sampled_from(TENANTS)
FILL = st.integers(0, 200)
MOMENTS = (None, 0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32)


def prefix_of(pages: int, tenant: str | None) -> IndexIdentity:
    return sample_identity(PROMPT[: 16 * pages], extra_key=tenant)


Key = tuple[int, str | None]


def one_of(data: st.DataObject, some: Iterable[Key]) -> Key:
    return data.draw(st.sampled_from(sorted(some, key=repr)))


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
        everything = self.model | self.expired
        self.expired = {key: fill for key, fill in everything.items() if self.is_over(key)}
        self.model = {key: fill for key, fill in everything.items() if key not in self.expired}

    def is_over(self, key: Key) -> bool:
        return has_expired(self.retention[key], self.now())

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
        self.leases.pop(one_of(data, self.leases)).release()

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
        key = one_of(data, self.read)
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


class FileMachine(StoreMachine):
    """Two stores in one folder; the second one's changes are known to the first after a rescan."""

    max_bytes: int | None = None

    def make(self) -> IndexStore:
        self.clock, self.ticks = Clock(), itertools.count()
        self.folder = Path(tempfile.mkdtemp())
        self.other = FileStore(self.folder, max_bytes=self.max_bytes, clock=self.clock)
        self.other.open()
        return FileStore(self.folder, max_bytes=self.max_bytes, clock=self.clock)

    def teardown(self) -> None:
        super().teardown()
        self.other.close()
        shutil.rmtree(self.folder)

    @rule(pages=PAGES, tenant=TENANT, fill=FILL, moment=st.sampled_from(MOMENTS))
    def put_elsewhere(self, pages: int, tenant: str | None, fill: int, moment: int | None) -> None:
        """And somebody sets the folders' times: the store learns of the change all the same."""
        if self.was_set_back:  # then uses come behind the last one that is known
            self.other.rescan(full=True)
        self.pass_time(10)
        key = (pages, tenant)
        entry = self.other.put(sample_payload(prefix_of(pages, tenant), fill=fill))
        kept = key in self.model or (key in self.reported and not self.is_over(key))
        assert entry.retention == (self.retention[key] if kept else DEFAULT)
        for place in (self.folder, *self.folder.iterdir()) if moment is not None else ():
            os.utime(place, ns=(0, moment * 10**9 + next(self.ticks)))
        self.store.rescan()
        self.holds(key, fill, entry.retention)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), name=RETENTION)
    def retain_elsewhere(self, data: st.DataObject, name: str) -> None:
        key = one_of(data, self.model)
        self.retention[key] = self.retention_of(name)
        self.other.retain(prefix_of(*key), self.retention[key])
        self.store.rescan()
        self.pass_time(0)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete_elsewhere(self, data: st.DataObject) -> None:
        key = one_of(data, self.model)
        assert self.other.delete(prefix_of(*key))
        self.drop(key)
        if data.draw(st.booleans()):
            self.store.rescan()
        else:
            with pytest.raises(IndexNotFound):
                self.store.get(prefix_of(*key))

    @rule(pages=PAGES, tenant=TENANT)
    def lease_elsewhere(self, pages: int, tenant: str | None) -> None:
        lease = self.other.lease(prefix_of(pages, tenant))
        assert (lease is None) == ((pages, tenant) in self.leases)
        if lease is not None:
            self.leases[pages, tenant] = lease

    @rule()
    def reopen(self) -> None:
        self.open_again()

    @precondition(lambda self: self.model and not self.was_set_back)
    @rule(data=st.data())
    def get_elsewhere(self, data: st.DataObject) -> None:
        self.pass_time(10)
        if self.model:
            key = one_of(data, self.model)
            self.other.get(prefix_of(*key)).close()
            self.use(key)


class SmallFileMachine(FileMachine):
    """Room for three indexes in the folder, whichever of the two stores writes or reads them."""

    max_entries = 3

    def make(self) -> IndexStore:
        self.max_bytes = 3 * ONE
        return super().make()

    @precondition(lambda self: False)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        """A reported file keeps its place, and only its replacement frees it: too much for this model."""


MORE_STEPS = settings(STEPS, max_examples=examples(40, day=8), stateful_step_count=60)  # a full store needs many puts
TestFileMachine = FileMachine.TestCase
TestFileMachine.settings = STEPS
TestSmallFileMachine = SmallFileMachine.TestCase
TestSmallFileMachine.settings = MORE_STEPS


class TierMachine(StoreMachine):
    """A store of the conformance suite."""

    tier: str

    def make(self) -> IndexStore:
        self.stack = contextlib.ExitStack()
        folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        return self.stack.enter_context(TIERS[self.tier](Path(folder)))

    def teardown(self) -> None:
        super().teardown()
        self.stack.close()

    def reopen(self) -> None:
        """What was reported would be offered again: another machine's."""


class CopiedMachine(TierMachine):
    tier = "copied"


class ServiceMachine(TierMachine):
    tier = "service"


TestCopiedMachine = CopiedMachine.TestCase
TestCopiedMachine.settings = settings(STEPS, max_examples=examples(20, day=4))
TestServiceMachine = ServiceMachine.TestCase
TestServiceMachine.settings = settings(STEPS, max_examples=examples(10, day=4))


class RemoteMachine(RuleBasedStateMachine):
    """Two machines on one object store: what one put the other gets, until either deletes it."""

    def blobs(self) -> Blobs:
        return ObjectBlobs("memory:///")

    def __init__(self) -> None:
        super().__init__()
        folder, blobs = f"machine-{secrets.token_hex(8)}", self.blobs()
        self.stores = [machine(blobs, folder=folder), machine(blobs, folder=folder)]
        for store in self.stores:
            store.open()
        self.model: dict[Key, int] = {}

    def teardown(self) -> None:
        for store in self.stores:
            store.close()

    @rule(at=st.integers(0, 1), pages=PAGES, tenant=TENANT, fill=FILL)
    def put(self, at: int, pages: int, tenant: str | None, fill: int) -> None:
        done = self.stores[at].put(sample_payload(prefix_of(pages, tenant), fill=fill))
        assert done == ((pages, tenant) not in self.model)
        self.model.setdefault((pages, tenant), fill)

    @rule(at=st.integers(0, 1), pages=PAGES, tenant=TENANT)
    def get(self, at: int, pages: int, tenant: str | None) -> None:
        store, identity = self.stores[at], prefix_of(pages, tenant)
        assert store.contains(identity) == ((pages, tenant) in self.model)
        if (pages, tenant) in self.model:
            assert read_fill(store, identity) == self.model[pages, tenant]
        else:
            with pytest.raises(IndexNotFound):
                store.get(identity)

    @rule(at=st.integers(0, 1), pages=PAGES, tenant=TENANT)
    def delete(self, at: int, pages: int, tenant: str | None) -> None:
        assert self.stores[at].delete(prefix_of(pages, tenant)) == (self.model.pop((pages, tenant), None) is not None)

    @rule(at=st.integers(0, 1), full=st.booleans())
    def look(self, at: int, full: bool) -> None:
        self.stores[at].rescan(full=full)
        self.stores[at].sweep()
        assert {entry.digest for entry in self.stores[at].list()} == {prefix_of(*key).digest for key in self.model}
        assert list(self.stores[at].problems()) == []
        balanced(self.stores[at])

    @rule(at=st.integers(0, 1))
    def reopen(self, at: int) -> None:
        self.stores[at].close()
        self.stores[at].open()


TestRemoteMachine = RemoteMachine.TestCase
TestRemoteMachine.settings = STEPS


class SharedMachine(StoreMachine):
    """One machine whose remote store loses values at random and goes away. What is local is what the base machine's
    store would be, whatever happens there; what is evicted from local is what remote has, maybe an older build.
    """

    def make(self) -> SharedStore:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(link, "FIRST_AWAY_S", 0.0)
        self.clock = Clock()
        self.folder = Path(tempfile.mkdtemp())
        self.blobs = Shaky()
        local = FileStore(self.folder, create=True, clock=self.clock)
        over = RemoteStore(self.blobs, chunk_nbytes=CHUNK_NBYTES, timeout_s=SOON)
        self.shared = SharedStore(local, [over], timeout_s=SOON, rescan_s=0.0)
        return self.shared

    def teardown(self) -> None:
        super().teardown()
        self.patch.undo()
        shutil.rmtree(self.folder)

    @precondition(lambda self: not self.blobs.fails)
    @rule(pages=PAGES, tenant=TENANT)
    def evict(self, pages: int, tenant: str | None) -> None:
        """Behind the store's back; remote may have lost it before."""
        key, identity = (pages, tenant), prefix_of(pages, tenant)
        self.release_all()  # what could not be sent is sent by who has the lease
        assert flushed(self.shared)
        if key in self.model:
            self.shared.local.delete(identity)
            self.shared.rescan(full=True)
            if self.shared.remotes[0].contains(identity):
                self.holds(key, read_fill(self.shared.remotes[0], identity), DEFAULT)
            else:
                self.drop(key)

    @precondition(lambda self: not self.blobs.fails)
    @rule(places=st.lists(st.integers(0, 255), min_size=1, max_size=4))
    def lose(self, places: list[int]) -> None:
        """Some of the values, by place: how many there are depends on how far removals in the background came."""
        names = sorted(name for name in self.blobs.names("prefix_index") if not name.endswith(".lease"))
        if names:
            for name in {names[place % len(names)] for place in places}:
                self.blobs.delete(name)
            self.release_all()
            assert flushed(self.shared)
            self.shared.rescan(full=True)
            # Reported, and still there: local keeps it out of sight until it is opened again, whatever remote loses.
            known_bad = {Path(problem.path).stem for problem in self.shared.local.problems()}
            for key in (*self.model, *self.reported):
                if not self.shared.contains(prefix_of(*key)) and prefix_of(*key).digest not in known_bad:
                    self.drop(key)

    @rule()
    def go_away(self) -> None:
        """With all that is only there fetched before: what else is a miss is another test's."""
        for key in tuple(self.model):
            read_fill(self.shared, prefix_of(*key).digest)
        self.blobs.fails = True

    @rule()
    def come_back(self) -> None:
        self.blobs.fails = False
        for name in self.blobs.names("prefix_index"):
            if name.endswith(".lease"):  # as if the time of those that nobody could give back were over
                self.blobs.delete(name)
        self.shared.rescan(full=True)

    @rule(pages=PAGES, tenant=TENANT)
    def delete(self, pages: int, tenant: str | None) -> None:
        assert self.store.delete(prefix_of(pages, tenant)) or (pages, tenant) not in self.model
        self.drop((pages, tenant))

    @precondition(lambda self: not self.shared._links[0].deleted)
    @rule()
    def reopen(self) -> None:
        """What a remote store could not be told yet is told by nobody then."""
        self.release_all()
        self.open_again()

    @invariant()
    def listing_is_the_model(self) -> None:
        assert {e.digest: e.retention for e in self.store.list()} == {
            prefix_of(*key).digest: self.retention.get(key, DEFAULT) for key in self.model
        }
        for key in self.model:
            assert self.shared.local.contains(prefix_of(*key)) or not self.blobs.fails


TestSharedMachine = SharedMachine.TestCase
TestSharedMachine.settings = STEPS
