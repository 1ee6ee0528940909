"""Every error says what was expected, what came and what to do, and keeps its place in the tree."""

from __future__ import annotations

import pytest

from prefix_index import errors
from prefix_index.errors import IndexStoreError

ALL = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, IndexStoreError)]
ROOTS = "InvalidPayload IndexNotFound IndexUnreadable IndexFormatError IndexMismatch StoreFolderError StoreFull"
TREE = {
    "IndexStoreError": {*ROOTS.split(), "StoreUnavailable", "StoreClosed"},
    "IndexFormatError": {"IndexForeign", "IndexTooNew", "IndexCorrupt"},
    "IndexUnreadable": {"OutOfMemory"},
}


def test_the_tree_is_the_drawn_one() -> None:
    found = {e.__name__: {sub.__name__ for sub in ALL if sub.__bases__[0] is e} for e in ALL}
    assert {name: below for name, below in found.items() if below} == TREE


@pytest.mark.parametrize("kind", ALL)
def test_message_and_parts(kind: type[IndexStoreError]) -> None:
    error = kind("thing", expected="a", found="b", remedy="do c")
    assert str(error) == "thing: expected a, found b; do c"
    placed = error.at("/store/x")
    assert type(placed) is kind
    assert str(placed) == "/store/x: thing: expected a, found b; do c"
    assert (placed.what, placed.expected, placed.found, placed.remedy, placed.path) == (
        "thing", "a", "b", "do c", "/store/x"
    )  # fmt: skip
    assert kind.reason in {"no_index", "index_mismatch", "index_corrupt", "index_memory", "store_unavailable"}
