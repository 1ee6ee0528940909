"""Selection by the token index for captured graphs: one kernel for each height of a tile, tables of fixed place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from prefix_kernels.anchor_selection import AnchorSelection, Form, default_config
from prefix_kernels.launching import send
from prefix_kernels.pooled_scores import ScoreShape, Source
from prefix_kernels.pooled_scores.tables import ScoredGroup, ScoreInputs, array_addresses
from prefix_kernels.pooling import Pooling
from prefix_kernels.top_k_selection.lists import SelectedLists
from prefix_kernels.top_k_selection.plan import SelectionGroup
from sglang_ext.attention.attentions import LayerShape
from sglang_ext.attention.private_index import PrivateIndex
from sglang_ext.indexing.token_index import TokenIndexSpec
from sglang_ext.prefix.residency import LayerArrays, ResidentIndex

_ALIGNED = 4
"""Scores of a KV head begin at a multiple of this."""
_RAW_ROWS = 8
"""Query rows, at most, whose raw scores are kept: beyond, codes that are scored twice are read faster."""

_numbers = itertools.count()


class TokenSelections:
    """What anchor layers select with. The selected slots go to the caller's lists.

    Args:
        shape: of a layer.
        spec: of the token index.
        pooling: over the rows and query heads of a group.
        sum_every: how few tokens enter the sums of its softmax, see `pooling.pool_scores`.
        num_layers: of the model.
        lists: where selections go unless a run says otherwise: [max_groups, num_kv_heads, max_budget], with slots.
        max_batch: requests of a batch, at most.
        max_prefix_len: tokens of a prefix, at most.
        room: tokens of all prefixes of a batch, at most.
        form: how selections are launched.
        device: of the indexes.
        groups_of_a_row: that a request may stand in, each with other tokens.
    """

    def __init__(
        self,
        shape: LayerShape,
        spec: TokenIndexSpec,
        pooling: Pooling,
        sum_every: int,
        num_layers: int,
        lists: SelectedLists,
        *,
        max_batch: int,
        max_prefix_len: int,
        room: int,
        form: Form,
        device: torch.device,
        groups_of_a_row: int = 1,
    ) -> None:
        self.shape = ScoreShape(
            shape.num_qo_heads,
            shape.num_kv_heads,
            Source.LOW_BIT,
            channels=spec.kept_channels(shape.head_dim),
            bits=spec.bits,
            listed_channels=True,
            pooling=pooling,
            sum_every=sum_every,
        )
        self.lists = lists
        self.max_batch, self.max_prefix_len, self.room = max_batch, max_prefix_len, room
        self._groups_of_a_row = groups_of_a_row
        # Hopper's own kernel multiplies in halves.
        self._specialized = device.type == "cuda" and shape.dtype is not torch.float32
        self._form, self._device = form, device
        max_groups = lists.positions.shape[0]
        self._scores = torch.zeros(shape.num_kv_heads * room, dtype=torch.float32, device=device)
        self._addresses = torch.zeros(num_layers, max_groups, 5, dtype=torch.int64, device=device)
        self._raw: dict[int, Tensor] = {}
        self._found: dict[int, AnchorSelection] = {}
        self._known: WeakKeyDictionary[ResidentIndex | PrivateIndex, tuple[int, Tensor]] = WeakKeyDictionary()

    def number_of(self, index: ResidentIndex | PrivateIndex) -> int:
        """A number that no other index has.

        Raises:
            ValueError: arrays that the kernels cannot read; what residency has loaded they can.
        """
        if index not in self._known:
            found = [array_addresses(self.shape, arrays_of(layer)) for layer in index.layers]
            self._known[index] = (next(_numbers), torch.tensor(found, dtype=torch.int64))
        return self._known[index][0]

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether prefixes of these lengths can be selected from in one step."""
        few = len(lengths) <= self.lists.positions.shape[0]
        return few and max(lengths) <= self.max_prefix_len and sum(n + _ALIGNED for n in lengths) <= self.room

    def of(self, size: int) -> AnchorSelection:
        """For batches of that size: one for each height of the tile."""
        on_gpu = self._device.type == "cuda"
        capability = torch.cuda.get_device_capability(self._device) if on_gpu else (9, 0)
        config = default_config(self.shape, size, capability, specialized=self._specialized)
        if config.block_m not in self._found:
            max_groups, heads, max_budget = self.lists.positions.shape
            self._found[config.block_m] = AnchorSelection(
                self.shape,
                self.max_batch * self._groups_of_a_row,
                max_groups,
                self.max_prefix_len,
                max_budget,
                config,
                self._device,
                max_block_size=1,
                form=self._form,
                num_programs=None if on_gpu else 2 * heads,
            )
        return self._found[config.block_m]

    def plan(
        self,
        selection: AnchorSelection,
        rows: Sequence[tuple[int, ...]],
        groups: Sequence[SelectionGroup],
        indexes: Sequence[ResidentIndex | PrivateIndex],
    ) -> None:
        """Write the tables of the next runs, without a wait.

        Args:
            selection: from `of`.
            rows: batch rows of each group.
            groups: lengths, windows, budgets and tables of slots.
            indexes: that `number_of` was asked for.
        """
        arrays = [arrays_of(index.layers[0]) for index in indexes]
        selection.plan(self._scored(rows, [group.prefix_len for group in groups], arrays), groups)
        addresses = torch.zeros(self._addresses.shape, dtype=torch.int64)
        for number, index in enumerate(indexes):
            addresses[:, number] = self._known[index][1]
        send(addresses, self._addresses)

    def plan_one(
        self, selection: AnchorSelection, rows: tuple[int, ...], group: SelectionGroup, arrays: tuple[Tensor, ...]
    ) -> None:
        """One group on arrays that are no index's, for runs without a layer; see `arrays_of`."""
        selection.plan(self._scored([rows], [group.prefix_len], [arrays]), [group])

    def _scored(
        self, rows: Sequence[tuple[int, ...]], lengths: Sequence[int], arrays: Sequence[tuple[Tensor, ...]]
    ) -> list[ScoredGroup]:
        scored, at, heads = [], 0, self.shape.num_kv_heads
        for of_group, length, own in zip(rows, lengths, arrays, strict=True):
            stride = -(-length // _ALIGNED) * _ALIGNED
            first = tuple(head * length for head in range(heads))
            begins = tuple(at + head * stride for head in range(heads))
            scored.append(ScoredGroup(of_group, (length,) * heads, first, (0,) * heads, begins, own))
            at += heads * stride
        return scored

    def run(
        self,
        selection: AnchorSelection,
        q: Tensor,
        sm_scale: float,
        slot_table: Tensor,
        layer: int | None,
        size: int,
        lists: SelectedLists | None = None,
    ) -> None:
        """Select as planned; how many launches that are, `AnchorSelection.run` says.

        Args:
            selection: from `of`.
            q: [size or more, num_qo_heads, head_dim].
            sm_scale: attention scale.
            slot_table: arena in which the groups' tables of slots lie.
            layer: whose arrays; None: those that were planned with.
            size: of the batch, as captured.
            lists: where the selection goes, of the shape of `self.lists`; None: there.
        """
        arrays = None if layer is None else self._addresses[layer]
        inputs = ScoreInputs(q, sm_scale, raw=self.raw(selection, size), arrays=arrays)
        selection.run(inputs, self._scores, lists or self.lists, slot_table=slot_table, pad=False)

    def raw(self, selection: AnchorSelection, size: int) -> Tensor | None:
        """Room for raw scores of so few rows that it pays, where they are kept at all; made at the first call."""
        rows = size * self.shape.gqa
        if rows > _RAW_ROWS or selection.config.specialized or self.shape.sum_every > 1:
            return None
        if size not in self._raw:
            groups = min(size * self._groups_of_a_row, self.lists.positions.shape[0])
            wanted = (groups, self.shape.num_kv_heads, self.max_prefix_len, rows)
            self._raw[size] = torch.zeros(wanted, dtype=torch.float32, device=self._device).transpose(2, 3)
        return self._raw[size]


def arrays_of(layer: LayerArrays) -> tuple[Tensor, ...]:
    """Of a layer's token index, as `ScoredGroup.arrays` names them."""
    return layer["channels"], layer["keys_packed"], layer["keys_scale"]
