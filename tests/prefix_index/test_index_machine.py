"""The local stores, and a second process's view of a folder, against a plain dictionary."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from prefix_index import FileStore, IndexStore, IndexWriter
from prefix_index.testing import sample_payload
from tests.examples import examples
from tests.prefix_index.machine import PAGES, STEPS, TENANT, Clock, TwoStores, identity_of


def nbytes_of_one() -> int:
    return IndexWriter(sample_payload()).nbytes


class FileMachine(TwoStores):
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
        shutil.rmtree(self.folder)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def get_elsewhere(self, data: st.DataObject) -> None:
        self.pass_time(10)
        if self.model:
            key = data.draw(st.sampled_from(sorted(self.model, key=repr)))
            self.other.get(identity_of(*key)).close()
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
