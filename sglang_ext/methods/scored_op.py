"""`SelectOp` of methods that score tokens or blocks of them by products: one kernel for each height of a tile."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from prefix_kernels.anchor_selection import AnchorSelection, Form, default_config
from prefix_kernels.launching import send
from prefix_kernels.pooled_scores import ARRAYS, HEAD_FIELDS, ScoredGroup, ScoreInputs, ScoreShape, array_addresses
from prefix_kernels.top_k_selection.plan import SelectionGroup
from prefix_kernels.types import BlockForm, SelectedLists
from sglang_ext.decode.select_op import ListSizes, SelectOp
from sglang_ext.decode.types import Index
from sglang_ext.prefix.residency import LayerArrays

_ALIGNED = 4
"""Scores of a KV head begin at a multiple of this."""
_RAW_ROWS, _RAW_BYTES = 8, 256 << 20
"""Query rows, and device memory, at most, of raw scores that are kept: beyond, codes are scored twice."""

_numbers = itertools.count()


@dataclass(frozen=True)
class LayerCodes:
    """A layer's index as the kernels read it.

    Attributes:
        arrays: as `ScoredGroup.arrays` names them. Not owned.
        first_rows: per KV head, first of its rows among the codes.
        block_sizes: per KV head, tokens of a block; none: tokens.
    """

    arrays: tuple[Tensor | None, ...]
    first_rows: tuple[int, ...]
    block_sizes: tuple[int, ...] = ()

    def group(self, rows: tuple[int, ...], length: int, begins: tuple[int, ...]) -> ScoredGroup:
        """Of so many tokens, whose scores begin there."""
        return ScoredGroup(rows, length, self.first_rows, begins, self.arrays, self.block_sizes)


class _Known(NamedTuple):
    """What is known of an index: its number, layer 0, and of all layers the tables that kernels read."""

    number: int
    first: LayerCodes
    addresses: Tensor
    heads: Tensor


class ScoredOp(SelectOp):
    """What anchor layers select with: in two launches on a GPU.

    A method's own operation says what a layer's arrays are (`codes`, `made_up`).

    Args:
        shape: what is scored.
        num_layers, sizes, device: see `decode.select_op.op_maker`.
        specialized: whether Hopper's own kernel may score, which multiplies in halves.
        alike: whether all layers have blocks of the same sizes.
    """

    def __init__(
        self,
        shape: ScoreShape,
        num_layers: int,
        sizes: ListSizes,
        device: torch.device,
        *,
        specialized: bool,
        alike: bool = True,
    ) -> None:
        self.shape = shape
        self._sizes, self._device, self._specialized = sizes, device, specialized
        self._scores = torch.zeros(shape.num_kv_heads * sizes.room, dtype=torch.float32, device=device)
        tables = (num_layers, sizes.max_groups)
        self._addresses = torch.zeros(*tables, ARRAYS, dtype=torch.int64, device=device)
        heads = (0 if alike else num_layers, sizes.max_groups, shape.num_kv_heads, HEAD_FIELDS)
        self._heads = torch.zeros(heads, dtype=torch.int64, device=device)
        self._raw: dict[int, Tensor] = {}
        self._probed: list[LayerCodes] = []
        self._found: dict[int, AnchorSelection] = {}
        self._known: WeakKeyDictionary[Index, _Known] = WeakKeyDictionary()

    @abstractmethod
    def codes(self, layer: LayerArrays, prefix_len: int) -> LayerCodes:
        """A layer's arrays."""

    @abstractmethod
    def made_up(self, prefix_len: int) -> LayerCodes:
        """Arrays of any values, for `plan_probe`."""

    def number_of(self, index: Index) -> int:
        if index not in self._known:
            layers = [self.codes(layer, index.prefix_len) for layer in index.layers]
            none = (0,) * self.shape.num_kv_heads
            heads = [one.group((0,), index.prefix_len, none).heads for one in layers if len(self._heads)]
            addresses = [array_addresses(self.shape, one.arrays) for one in layers]
            self._known[index] = _Known(
                next(_numbers),
                layers[0],
                torch.tensor(addresses, dtype=torch.int64),
                torch.tensor(heads, dtype=torch.int64),
            )
        return self._known[index].number

    def fits(self, lengths: Sequence[int]) -> bool:
        return max(lengths) <= self._sizes.max_prefix_len and sum(n + _ALIGNED for n in lengths) <= self._sizes.room

    def tile(self, size: int) -> Hashable:
        """See the base: one for each height of the tile."""
        return self._of(size)

    def _of(self, size: int) -> AnchorSelection:
        on_gpu = self._device.type == "cuda"
        capability = torch.cuda.get_device_capability(self._device) if on_gpu else (9, 0)
        config = default_config(self.shape, size, capability, specialized=self._specialized)
        if config.block_m not in self._found:
            sizes = self._sizes
            highest = default_config(self.shape, sizes.max_batch, capability, specialized=self._specialized).block_m
            # A lower tile than the highest holds all rows of its batches.
            requests = sizes.max_batch if config.block_m == highest else config.block_m // self.shape.gqa
            self._found[config.block_m] = AnchorSelection(
                self.shape,
                requests * sizes.groups_of_a_row,
                min(requests * sizes.groups_of_a_row, sizes.max_groups),
                sizes.max_prefix_len,
                sizes.list_entries,
                config,
                self._device,
                form=Form.FUSED if on_gpu else Form.UNFUSED,
                num_programs=None if on_gpu else 2 * self.shape.num_kv_heads,
            )
        return self._found[config.block_m]

    def plan(
        self, size: int, rows: Sequence[tuple[int, ...]], groups: Sequence[SelectionGroup], indexes: Sequence[Index]
    ) -> None:
        selection = self._of(size)
        self._raw_scores(selection, size)  # made before a capture
        if not groups:
            self._probed = []
            selection.plan((), ())
            return
        known = [self._known[index] for index in indexes]
        scored = self._scored(rows, [group.prefix_len for group in groups], [one.first for one in known])
        selection.plan(scored, groups)
        addresses, heads = (torch.zeros(like.shape, dtype=torch.int64) for like in (self._addresses, self._heads))
        for number, (one, group) in enumerate(zip(known, scored, strict=True)):
            addresses[:, number] = one.addresses
            if len(heads):
                heads[:, number] = one.heads
                heads[:, number, :, -1] = torch.tensor(group.score_begins)
        send(addresses, self._addresses)
        if len(heads):
            send(heads, self._heads)

    def plan_probe(self, size: int, rows: Sequence[tuple[int, ...]], groups: Sequence[SelectionGroup]) -> None:
        lengths = [group.prefix_len for group in groups]
        self._probed = [self.made_up(length) for length in lengths]
        self._of(size).plan(self._scored(rows, lengths, self._probed), groups)

    def _scored(
        self, rows: Sequence[tuple[int, ...]], lengths: Sequence[int], layers: Sequence[LayerCodes]
    ) -> list[ScoredGroup]:
        scored, at, heads = [], 0, self.shape.num_kv_heads
        for of_group, length, layer in zip(rows, lengths, layers, strict=True):
            stride = -(-length // _ALIGNED) * _ALIGNED
            scored.append(layer.group(of_group, length, tuple(at + head * stride for head in range(heads))))
            at += heads * stride
        return scored

    def run(
        self, size: int, q: Tensor, sm_scale: float, slot_table: Tensor, layer: int | None, lists: SelectedLists
    ) -> None:
        """See the base; how many launches that are, `AnchorSelection.run` says."""
        selection = self._of(size)
        most = selection.max_groups
        arrays = None if layer is None else self._addresses[layer, :most]
        heads = None if layer is None or not len(self._heads) else self._heads[layer, :most]
        inputs = ScoreInputs(q[:size], sm_scale, self._raw_scores(selection, size), arrays, heads)
        selection.run(inputs, self._scores, lists, slot_table=slot_table)

    def _raw_scores(self, selection: AnchorSelection, size: int) -> Tensor | None:
        """Room for raw scores of so few rows that it pays, where they are kept and fit; made at the first call."""
        rows = size * self.shape.gqa
        tokens = self.shape.form is BlockForm.TOKEN
        if not tokens or rows > _RAW_ROWS or selection.config.specialized or self.shape.sum_every > 1:
            return None
        groups = min(size * self._sizes.groups_of_a_row, self._sizes.max_groups)
        wanted = (groups, self.shape.num_kv_heads, self._sizes.max_prefix_len, rows)
        if 4 * math.prod(wanted) > _RAW_BYTES:
            return None
        if size not in self._raw:
            self._raw[size] = torch.zeros(wanted, dtype=torch.float32, device=self._device).transpose(2, 3)
        return self._raw[size]

    @property
    def nbytes(self) -> int:
        """See the base; scratch of the kernels apart."""
        return sum(one.nbytes for one in (self._scores, self._addresses, self._heads, *self._raw.values()))

