"""A hypothesis machine that drives any store against a plain dictionary; a tier's tests subclass it."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefix_index import (
    IndexCorrupt,
    IndexIdentity,
    IndexNotFound,
    IndexStore,
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


STEPS = settings(max_examples=25, stateful_step_count=25, deadline=None)
