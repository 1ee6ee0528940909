"""What operations of methods made of two others have in common."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import cast
from weakref import WeakKeyDictionary

from sglang_ext.decode.select_op import SelectOp
from sglang_ext.decode.types import Index
from sglang_ext.methods.combined import part_arrays


class PartIndex:
    """One part of an index, to the part's own operation an index. Arrays are the index's own."""

    def __init__(self, index: Index, part: str) -> None:
        self.prefix_len = index.prefix_len
        self.layers = [part_arrays(layer, part) for layer in index.layers]


class CombinedOp(SelectOp):
    """An operation made of two methods' own."""

    def __init__(self, first: SelectOp, second: SelectOp) -> None:
        self._both = first, second
        self._known: WeakKeyDictionary[Index, list[Index]] = WeakKeyDictionary()

    def parts(self, indexes: Sequence[Index]) -> tuple[list[Index], list[Index]]:
        """Of indexes, of each the same that `number_of` made."""
        found = [self._known[index] for index in indexes]
        return [of[0] for of in found], [of[1] for of in found]

    def number_of(self, index: Index) -> int:
        if index not in self._known:
            self._known[index] = [cast(Index, PartIndex(index, part)) for part in ("first", "second")]
        return [op.number_of(part) for op, part in zip(self._both, self._known[index], strict=True)][-1]

    def fits(self, lengths: Sequence[int], budgets: Sequence[int]) -> bool:
        return all(op.fits(lengths, budgets) for op in self._both)

    def tile(self, size: int) -> Hashable:
        return tuple(op.tile(size) for op in self._both)
