"""The local stores, and a second process's view of a folder, against a plain dictionary."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from prefix_index import FileStore, IndexNotFound, IndexStore, MemoryStore
from prefix_index.testing import sample_payload
from tests.prefix_index.machine import FILL, PAGES, STEPS, TENANT, StoreMachine, identity_of


class MemoryMachine(StoreMachine):
    def make(self) -> IndexStore:
        return MemoryStore(1 << 30)


class SmallMemoryMachine(StoreMachine):
    """Room for three indexes: the model forgets as the store evicts."""

    max_entries = 3

    def make(self) -> IndexStore:
        with MemoryStore(1 << 30) as store:
            one = store.put(sample_payload()).nbytes
        return MemoryStore(3 * one)


class FileMachine(StoreMachine):
    """Two stores in one folder; the second one's writes are known to the first after a rescan."""

    def make(self) -> IndexStore:
        self.folder = Path(tempfile.mkdtemp())
        self.other = FileStore(self.folder)
        self.other.open()
        return FileStore(self.folder)

    def teardown(self) -> None:
        super().teardown()
        self.other.close()
        shutil.rmtree(self.folder)

    @rule(pages=PAGES, tenant=TENANT, fill=FILL)
    def put_elsewhere(self, pages: int, tenant: str | None, fill: int) -> None:
        self.other.put(sample_payload(identity_of(pages, tenant), fill=fill))
        self.store.rescan()
        self.model[pages, tenant] = fill
        self.reported.discard((pages, tenant))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete_elsewhere(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model, key=repr)))
        assert self.other.delete(identity_of(*key))
        del self.model[key]
        if data.draw(st.booleans()):
            self.store.rescan()
        else:
            with pytest.raises(IndexNotFound):
                self.store.get(identity_of(*key))

    @rule()
    def reopen(self) -> None:
        """Everything is still there, and what was only reported is offered again."""
        for key in self.reported:
            with self.store.get(identity_of(*key)) as index:
                self.model[key] = int(index.array("channels")[0])
        self.reported.clear()
        self.store.close()
        self.store.open()


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = STEPS
TestSmallMemoryMachine = SmallMemoryMachine.TestCase
TestSmallMemoryMachine.settings = STEPS
TestFileMachine = FileMachine.TestCase
TestFileMachine.settings = STEPS
