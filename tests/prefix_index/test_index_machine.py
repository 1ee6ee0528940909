"""The local stores, and a second process's view of a folder, against a plain dictionary."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from prefix_index import FileStore, IndexNotFound, IndexStore, IndexWriter
from prefix_index.testing import sample_payload
from tests.examples import examples
from tests.prefix_index.machine import DEFAULT, FILL, PAGES, RETENTION, STEPS, TENANT, Clock, StoreMachine, identity_of


def nbytes_of_one() -> int:
    return IndexWriter(sample_payload()).nbytes


class FileMachine(StoreMachine):
    """Two stores in one folder; the second one's changes are known to the first after a rescan."""

    max_bytes: int | None = None

    def make(self) -> IndexStore:
        self.clock = Clock()
        self.folder = Path(tempfile.mkdtemp())
        self.other = FileStore(self.folder, max_bytes=self.max_bytes, clock=self.clock)
        self.other.open()
        return FileStore(self.folder, max_bytes=self.max_bytes, clock=self.clock)

    def teardown(self) -> None:
        super().teardown()
        self.other.close()
        shutil.rmtree(self.folder)

    @rule(pages=PAGES, tenant=TENANT, fill=FILL)
    def put_elsewhere(self, pages: int, tenant: str | None, fill: int) -> None:
        self.pass_time(10)
        key = (pages, tenant)
        entry = self.other.put(sample_payload(identity_of(pages, tenant), fill=fill))
        kept = key in self.model or (key in self.reported and not self.is_over(self.retention[key]))
        assert entry.retention == (self.retention[key] if kept else DEFAULT)
        self.store.rescan()
        self.holds(key, fill, entry.retention)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), name=RETENTION)
    def retain_elsewhere(self, data: st.DataObject, name: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.model, key=repr)))
        self.retention[key] = self.retention_of(name)
        self.other.retain(identity_of(*key), self.retention[key])
        self.store.rescan()
        self.pass_time(0)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def get_elsewhere(self, data: st.DataObject) -> None:
        self.pass_time(10)
        if self.model:
            key = data.draw(st.sampled_from(sorted(self.model, key=repr)))
            self.other.get(identity_of(*key)).close()
            self.use(key)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete_elsewhere(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model, key=repr)))
        assert self.other.delete(identity_of(*key))
        self.drop(key)
        if data.draw(st.booleans()):
            self.store.rescan()
        else:
            with pytest.raises(IndexNotFound):
                self.store.get(identity_of(*key))

    @rule(pages=PAGES, tenant=TENANT)
    def lease_elsewhere(self, pages: int, tenant: str | None) -> None:
        lease = self.other.lease(identity_of(pages, tenant))
        assert (lease is None) == ((pages, tenant) in self.leases)
        if lease is not None:
            self.leases[pages, tenant] = lease

    @rule()
    def reopen(self) -> None:
        """Everything is still there, and what was only reported is offered again."""
        self.store.close()
        self.store.open()
        for key in tuple(self.reported):
            self.reported.discard(key)
            if self.is_over(self.retention[key]):
                self.expired.add(key)
                continue
            with self.store.get(identity_of(*key)) as index:
                self.model[key] = int(index.array("channels")[0])
                self.use(key)


class SmallFileMachine(FileMachine):
    """Room for three indexes in the folder, whichever of the two stores writes or reads them."""

    max_entries = 3

    def make(self) -> IndexStore:
        self.max_bytes = 3 * nbytes_of_one()
        return super().make()

    @rule(pages=PAGES, tenant=TENANT)
    def report(self, pages: int, tenant: str | None) -> None:
        """A reported file keeps its place, and only its replacement frees it: too much for this model."""


MORE_STEPS = settings(STEPS, max_examples=examples(40, day=8), stateful_step_count=60)  # a full store needs many puts
TestFileMachine = FileMachine.TestCase
TestFileMachine.settings = STEPS
TestSmallFileMachine = SmallFileMachine.TestCase
TestSmallFileMachine.settings = MORE_STEPS
