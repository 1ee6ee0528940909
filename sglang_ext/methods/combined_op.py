"""What operations of methods made of two others have in common: each part's view of an index."""

from __future__ import annotations

import weakref
from typing import cast
from weakref import WeakKeyDictionary

from sglang_ext.decode.types import Index
from sglang_ext.methods.combined import part_arrays
from sglang_ext.prefix.residency import LayerArrays


class PartIndex:
    """One part of an index, to the part's own operation an index. Arrays are the index's own, and gone with them."""

    def __init__(self, index: Index, part: str) -> None:
        self._index, self._part = weakref.ref(index), part
        self.prefix_len = index.prefix_len

    @property
    def layers(self) -> list[LayerArrays]:
        """By layer, the part's arrays."""
        index = self._index()
        assert index is not None, "an index that this step uses was let go"
        return [part_arrays(layer, self._part) for layer in index.layers]


class PartIndexes:
    """The parts of indexes: the same for the same index."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Index, tuple[Index, Index]] = WeakKeyDictionary()

    def of(self, index: Index) -> tuple[Index, Index]:
        """Of one index."""
        if index not in self._known:
            first, second = PartIndex(index, "first"), PartIndex(index, "second")
            self._known[index] = cast(Index, first), cast(Index, second)
        return self._known[index]
