"""`SelectOp` of the token index: one kernel for each height of a tile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from prefix_kernels.anchor_selection import AnchorSelection, Form, default_config
from prefix_kernels.grouped_attention import AttentionShape
from prefix_kernels.launching import send
from prefix_kernels.pooled_scores import ScoredGroup, ScoreInputs, ScoreShape, array_addresses
from prefix_kernels.pooling import Pooling
from prefix_kernels.top_k_selection.plan import SelectionGroup
from prefix_kernels.types import SelectedLists
from sglang_ext.config import SparseAttnConfig
from sglang_ext.decode.select_op import ListSizes, SelectOp
from sglang_ext.decode.types import Index
from sglang_ext.methods.token_index.spec import TokenIndexSpec
from sglang_ext.prefix.residency import LayerArrays

_ALIGNED = 4
"""Scores of a KV head begin at a multiple of this."""
_RAW_ROWS, _RAW_BYTES = 8, 256 << 20
"""Query rows, and device memory, at most, of raw scores that are kept: beyond, codes are scored twice."""

_numbers = itertools.count()


class TokenIndexOp(SelectOp):
    """What anchor layers select with: in two launches on a GPU.

    Args:
        shape, config, spec, num_layers, sizes, device: see `decode.select_op.op_maker`.
    """

    def __init__(
        self,
        shape: AttentionShape,
        config: SparseAttnConfig,
        spec: TokenIndexSpec,
        num_layers: int,
        sizes: ListSizes,
        device: torch.device,
    ) -> None:
        self.shape = ScoreShape(
            shape.num_qo_heads,
            shape.num_kv_heads,
            channels=spec.kept_channels(shape.head_dim),
            bits=spec.bits,
            listed_channels=True,
            pooling=Pooling(config.pooling),
            sum_every=config.summed_every,
        )
        self._sizes, self._device = sizes, device
        # Hopper's own kernel multiplies in halves.
        self._specialized = device.type == "cuda" and shape.dtype is not torch.float32
        self._scores = torch.zeros(shape.num_kv_heads * sizes.room, dtype=torch.float32, device=device)
        self._addresses = torch.zeros(num_layers, sizes.max_groups, 5, dtype=torch.int64, device=device)
        self._raw: dict[int, Tensor] = {}
        self._probed: list[tuple[Tensor, ...]] = []
        self._found: dict[int, AnchorSelection] = {}
        self._known: WeakKeyDictionary[Index, tuple[int, Tensor]] = WeakKeyDictionary()

    def number_of(self, index: Index) -> int:
        if index not in self._known:
            found = [array_addresses(self.shape, arrays_of(layer)) for layer in index.layers]
            self._known[index] = (next(_numbers), torch.tensor(found, dtype=torch.int64))
        return self._known[index][0]

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
        arrays = [arrays_of(index.layers[0]) for index in indexes]
        selection.plan(self._scored(rows, [group.prefix_len for group in groups], arrays), groups)
        addresses = torch.zeros(self._addresses.shape, dtype=torch.int64)
        for number, index in enumerate(indexes):
            addresses[:, number] = self._known[index][1]
        send(addresses, self._addresses)

    def plan_probe(self, size: int, rows: Sequence[tuple[int, ...]], groups: Sequence[SelectionGroup]) -> None:
        shape, lengths, device = self.shape, [group.prefix_len for group in groups], self._device
        row_bytes = shape.channels * shape.bits // 8
        channels = torch.arange(shape.channels, dtype=torch.int16, device=device)
        channels = channels.expand(shape.num_kv_heads, -1).contiguous()
        scale = torch.ones(shape.num_kv_heads, shape.channels, dtype=torch.float32, device=device)
        self._probed = [
            (channels, torch.randint(256, (shape.num_kv_heads, n, row_bytes), dtype=torch.uint8, device=device), scale)
            for n in lengths
        ]
        self._of(size).plan(self._scored(rows, lengths, self._probed), groups)

    def _scored(
        self, rows: Sequence[tuple[int, ...]], lengths: Sequence[int], arrays: Sequence[tuple[Tensor, ...]]
    ) -> list[ScoredGroup]:
        scored, at, heads = [], 0, self.shape.num_kv_heads
        for of_group, length, own in zip(rows, lengths, arrays, strict=True):
            stride = -(-length // _ALIGNED) * _ALIGNED
            first = tuple(head * length for head in range(heads))
            begins = tuple(at + head * stride for head in range(heads))
            scored.append(ScoredGroup(of_group, length, first, begins, own))
            at += heads * stride
        return scored

    def run(
        self, size: int, q: Tensor, sm_scale: float, slot_table: Tensor, layer: int | None, lists: SelectedLists
    ) -> None:
        """See the base; how many launches that are, `AnchorSelection.run` says."""
        selection = self._of(size)
        arrays = None if layer is None else self._addresses[layer, : selection.max_groups]
        inputs = ScoreInputs(q[:size], sm_scale, raw=self._raw_scores(selection, size), arrays=arrays)
        selection.run(inputs, self._scores, lists, slot_table=slot_table)

    def _raw_scores(self, selection: AnchorSelection, size: int) -> Tensor | None:
        """Room for raw scores of so few rows that it pays, where they are kept and fit; made at the first call."""
        rows = size * self.shape.gqa
        if rows > _RAW_ROWS or selection.config.specialized or self.shape.sum_every > 1:
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
        return self._scores.nbytes + self._addresses.nbytes + sum(one.nbytes for one in self._raw.values())


def arrays_of(layer: LayerArrays) -> tuple[Tensor, ...]:
    """Of a layer's token index, as `ScoredGroup.arrays` names them."""
    return layer["channels"], layer["keys_packed"], layer["keys_scale"]
