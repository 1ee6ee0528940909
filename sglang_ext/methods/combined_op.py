"""What operations of methods made of two others have in common."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import cast
from weakref import WeakKeyDictionary

from sglang_ext.decode.select_op import SelectOp
from sglang_ext.decode.types import Index
from sglang_ext.methods.combined import part_arrays
from sglang_ext.prefix.residency import LayerArrays


class _PartLayers:
    """By layer, the arrays of one part: looked up when asked for."""

    def __init__(self, layers: Callable[[], Sequence[LayerArrays]], part: str) -> None:
        self._layers, self._part = layers, part

    def __len__(self) -> int:
        return len(self._layers())

    def __iter__(self) -> Iterator[LayerArrays]:
        return (part_arrays(layer, self._part) for layer in self._layers())

    def __getitem__(self, number: int) -> LayerArrays:
        return part_arrays(self._layers()[number], self._part)


class PartIndex:
    """One part of an index, to the part's own operation an index. Arrays are the index's own, and gone with them."""

    def __init__(self, index: Index, part: str) -> None:
        self.prefix_len = index.prefix_len
        self.layers = _PartLayers(lambda: _there(held()).layers, part)
        held = weakref.ref(index)


def _there(index: Index | None) -> Index:
    assert index is not None, "an index that this step uses was let go"
    return index


class CombinedOp(SelectOp):
    """An operation made of two methods' own."""

    def __init__(self, first: SelectOp, second: SelectOp) -> None:
        self._both = first, second
        self._known: WeakKeyDictionary[Index, tuple[Index, Index]] = WeakKeyDictionary()

    def parts(self, index: Index) -> tuple[Index, Index]:
        """Of an index: the same for the same one."""
        if index not in self._known:
            first, second = PartIndex(index, "first"), PartIndex(index, "second")
            self._known[index] = cast(Index, first), cast(Index, second)
        return self._known[index]

    def number_of(self, index: Index) -> int:
        found = [op.number_of(part) for op, part in zip(self._both, self.parts(index), strict=True)]
        return found[-1]

    def fits(self, lengths: Sequence[int], budgets: Sequence[int]) -> bool:
        return all(op.fits(lengths, budgets) for op in self._both)

    def tile(self, size: int) -> Hashable:
        return tuple(op.tile(size) for op in self._both)
