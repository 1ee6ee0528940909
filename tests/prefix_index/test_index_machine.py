"""Hypothesis drives each store, and a second process's view of a folder, against a plain dictionary."""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefix_index import (
    FileStore,
    IndexCorrupt,
    IndexIdentity,
    IndexNotFound,
    IndexStore,
    MemoryStore,
    namespace_digest,
    page_hashes,
)
from prefix_index.testing import sample_identity, sample_model, sample_payload

PROMPT = tuple(range(64))
TENANTS = (None, "", "t")
PAGES = st.integers(1, 4)
TENANT = st.sampled_from(TENANTS)
FILL = st.integers(0, 200)


def identity_of(pages: int, tenant: str | None) -> IndexIdentity:
    return sample_identity(PROMPT[: 16 * pages], extra_key=tenant)


class StoreMachine(RuleBasedStateMachine):
    """The store against ``model``: (pages, tenant) -> fill, in order of use."""

    max_entries = 1000

    def __init__(self) -> None:
        super().__init__()
        self.model: OrderedDict[tuple[int, str | None], int] = OrderedDict()
        self.reported: set[tuple[int, str | None]] = set()
        self.store = self.make()
        self.store.open()

    def make(self) -> IndexStore:
        raise NotImplementedError

    def teardown(self) -> None:
        self.store.close()

    @rule(pages=PAGES, tenant=TENANT, fill=FILL)
    def put(self, pages: int, tenant: str | None, fill: int) -> None:
        self.store.put(sample_payload(identity_of(pages, tenant), fill=fill))
        self.model.pop((pages, tenant), None)
        self.reported.discard((pages, tenant))
        while len(self.model) >= self.max_entries:
            self.model.popitem(last=False)
        self.model[pages, tenant] = fill

    @rule(pages=PAGES, tenant=TENANT)
    def get(self, pages: int, tenant: str | None) -> None:
        identity = identity_of(pages, tenant)
        if (pages, tenant) not in self.model:
            if (pages, tenant) in self.reported:
                return
            assert not self.store.contains(identity)
            with pytest.raises(IndexNotFound):
                self.store.get(identity)
            return
        assert self.store.contains(identity)
        with self.store.get(identity.digest) as index:
            self.model.move_to_end((pages, tenant))
            assert index.identity == identity
            assert index.array("channels")[0] == self.model[pages, tenant]
            index.verify()

    @rule(pages=PAGES, tenant=TENANT)
    def delete(self, pages: int, tenant: str | None) -> None:
        there = self.model.pop((pages, tenant), None) is not None
        deleted = self.store.delete(identity_of(pages, tenant))
        assert deleted == there or (pages, tenant) in self.reported
        self.reported.discard((pages, tenant))

    @rule(pages=PAGES, tenant=TENANT)
    def report(self, pages: int, tenant: str | None) -> None:
        if (pages, tenant) in self.model:
            error = IndexCorrupt("a test", expected="a", found="b", remedy="none")
            self.store.report(identity_of(pages, tenant), error)
            del self.model[pages, tenant]
            self.reported.add((pages, tenant))

    @rule(num_tokens=st.integers(0, 64), tenant=TENANT)
    def longest(self, num_tokens: int, tenant: str | None) -> None:
        namespace = namespace_digest({"extra_key": tenant})
        found = self.store.longest(namespace, page_hashes(PROMPT[:num_tokens]), sample_model(), "profile-1")
        lengths = [pages * 16 for pages, owner in self.model if owner == tenant and pages * 16 <= num_tokens]
        assert (found.identity.num_tokens if found else 0) == max(lengths, default=0)

    @rule()
    def rescan(self) -> None:
        self.store.rescan()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store.open()
        self.model.clear()
        self.reported.clear()

    @invariant()
    def listing_is_the_model(self) -> None:
        assert {e.digest for e in self.store.list()} == {identity_of(*key).digest for key in self.model}
        assert len(self.store.problems()) == len(self.reported)

    @invariant()
    def books_balance(self) -> None:
        self.store.check_integrity()


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


STEPS = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = STEPS
TestSmallMemoryMachine = SmallMemoryMachine.TestCase
TestSmallMemoryMachine.settings = STEPS
TestFileMachine = FileMachine.TestCase
TestFileMachine.settings = STEPS
