"""Tiers of two and three stores against a plain dictionary, with another store and bad disks behind their back."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from prefix_index import FileStore, IndexStore, MemoryStore, TieredStore, Wait
from prefix_index.testing import sample_payload
from tests.prefix_index.machine import FILL, PAGES, STEPS, TENANT, identity_of
from tests.prefix_index.test_index_machine import FileMachine
from tests.prefix_index.tiered_stores import SOON


class TieredMachine(FileMachine):
    """Copies of two in memory, all in a folder that another store changes behind this one's back."""

    def make(self) -> IndexStore:
        slow = super().make()
        return TieredStore(self.make_fast(), slow, wait=self.wait())

    def make_fast(self) -> IndexStore:
        return MemoryStore(100 << 10, clock=self.now)

    def wait(self) -> Wait:
        return Wait.BEST_EFFORT

    @rule(pages=PAGES, tenant=TENANT, fill=FILL)
    def replace_elsewhere(self, pages: int, tenant: str | None, fill: int) -> None:
        """What the first store serves is new without a rescan."""
        self.pass_time(10)
        if (pages, tenant) in self.model:
            self.other.rescan()
            self.other.put(sample_payload(identity_of(pages, tenant), fill=fill))
            self.model[pages, tenant] = fill
            self.replaced.add((pages, tenant))
            self.get(pages, tenant)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model, key=repr)))
        assert isinstance(self.store, TieredStore)
        assert self.store.promotion(identity_of(*key), SOON)


class TwoFoldersMachine(TieredMachine):
    """Copies in a second folder, where bits flip."""

    def make(self) -> IndexStore:
        self.fast_folder = Path(tempfile.mkdtemp())
        return super().make()

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.fast_folder)

    def make_fast(self) -> IndexStore:
        return FileStore(self.fast_folder, create=True, clock=self.now)

    def wait(self) -> Wait:
        return Wait.WAIT_COMPLETE

    @rule(place=st.integers(0, 255), at=st.integers(0, 63), bit=st.integers(0, 7))
    def damage_a_copy(self, place: int, at: int, bit: int) -> None:
        """Whichever copies there are by now: some are made in the background."""
        paths = sorted(self.fast_folder.glob("*/*.pfxindex"))
        if paths:
            path = paths[place % len(paths)]
            with contextlib.suppress(FileNotFoundError):  # dropped in the background just now
                raw = bytearray(path.read_bytes())
                raw[at] ^= 1 << bit
                path.unlink()
                path.write_bytes(raw)


class ThreeTiersMachine(TwoFoldersMachine):
    def make(self) -> IndexStore:
        below = super().make()
        return TieredStore(MemoryStore(100 << 10, clock=self.now), below, wait=Wait.TIMEOUT)


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = STEPS
TestTwoFoldersMachine = TwoFoldersMachine.TestCase
TestTwoFoldersMachine.settings = STEPS
TestThreeTiersMachine = ThreeTiersMachine.TestCase
TestThreeTiersMachine.settings = STEPS
