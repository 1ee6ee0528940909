"""Every kind of store against a plain dictionary, driven by hypothesis."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefix_index import FileStore, IndexNotFound, IndexStore, SharedStore, link
from prefix_index.remote import Blobs, ObjectBlobs, RemoteStore
from tests.examples import examples
from tests.prefix_index import s3_server
from tests.prefix_index.balance import balanced
from tests.prefix_index.machine import DEFAULT, FILL, PAGES, RETENTION, STEPS, TENANT, Key, StoreMachine, prefix_of
from tests.prefix_index.remote_stores import CHUNK_NBYTES, Shaky, flushed, machine
from tests.prefix_index.samples import read_fill, sample_payload
from tests.prefix_index.small_stores import ONE, SOON, Clock
from tests.prefix_index.tiers import TIERS

MOMENTS = (None, 0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32)


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
        kept = key in self.model or (key in self.reported and not self.is_over(self.retention[key]))
        assert entry.retention == (self.retention[key] if kept else DEFAULT)
        for place in (self.folder, *self.folder.iterdir()) if moment is not None else ():
            os.utime(place, ns=(0, moment * 10**9 + next(self.ticks)))
        self.store.rescan()
        self.holds(key, fill, entry.retention)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), name=RETENTION)
    def retain_elsewhere(self, data: st.DataObject, name: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.model, key=repr)))
        self.retention[key] = self.retention_of(name)
        self.other.retain(prefix_of(*key), self.retention[key])
        self.store.rescan()
        self.pass_time(0)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete_elsewhere(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model, key=repr)))
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
            key = data.draw(st.sampled_from(sorted(self.model, key=repr)))
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


class RemoteS3Machine(RemoteMachine):
    def blobs(self) -> Blobs:
        return s3_server.new_bucket()


TestRemoteMachine = RemoteMachine.TestCase
TestRemoteMachine.settings = STEPS
TestRemoteS3Machine = pytest.mark.full(RemoteS3Machine.TestCase)
TestRemoteS3Machine.settings = settings(STEPS, max_examples=examples(3, day=4), stateful_step_count=12)


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

    def is_here(self, key: Key) -> bool:
        return self.shared.local.contains(prefix_of(*key))

    def is_known_bad(self, key: Key) -> bool:
        """Reported, and still there: local keeps it out of sight until it is opened again, whatever remote loses."""
        return any(prefix_of(*key).digest in str(problem.path) for problem in self.shared.local.problems())

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
            for key in (*self.model, *self.reported):
                if not self.is_here(key) and not self.shared.contains(prefix_of(*key)) and not self.is_known_bad(key):
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
        deleted = self.store.delete(prefix_of(pages, tenant))
        assert deleted or (pages, tenant) not in self.model
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
