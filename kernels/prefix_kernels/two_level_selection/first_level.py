"""First levels: pooled scores of everything that a prefix has, which the first selection chooses candidates by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from prefix_kernels.csa_scores.runner import CsaGroup, CsaScores, CsaTables
from prefix_kernels.launching import send
from prefix_kernels.pooled_scores.runner import PooledScores
from prefix_kernels.pooled_scores.tables import ARRAYS, ScoredGroup, Source, array_addresses
from prefix_kernels.two_level_selection.plan import Index, TwoLevelGroup

if TYPE_CHECKING:
    from prefix_kernels.anchor_selection.runner import AnchorSelection

ALIGNED = 4
"""Scores of a KV head begin at multiples of this, as a selection of tokens reads them."""


class FirstLevel(Protocol[Index]):
    """Scores of all blocks or tokens, planned and run as everything else.

    Attributes:
        num_kv_heads: KV heads.
        max_groups: groups of a batch, at most.
        num_layers: layers, each with indexes of its own.
        scores: fp32 arena, written by `run`: natural logs, group g's KV head h from (g * num_kv_heads + h) *
            score_stride on.
        score_stride: room of one KV head.
    """

    num_kv_heads: int
    max_groups: int
    num_layers: int
    scores: Tensor
    score_stride: int

    def plan(self, groups: Sequence[TwoLevelGroup[Index]]) -> None:
        """Write the tables of all layers. Copies to the device, without a wait."""

    def run(self, q: Tensor, sm_scale: float, layer: int) -> None:
        """Score as planned; neither allocates nor waits."""


class CsaFirstLevel:
    """Scores of all tokens from CSAttention's compact lists (`CsaTables`), pooled over the rows of a group.

    Args:
        csa: sums the lists.
        pooling: of its raw scores: a `PooledScores` with `Source.RAW`.

    Raises:
        ValueError: another source, or other heads.
    """

    def __init__(self, csa: CsaScores, pooling: PooledScores) -> None:
        heads = (csa.shape.num_qo_heads, csa.shape.num_kv_heads)
        if pooling.shape.source is not Source.RAW or heads != (pooling.shape.num_qo_heads, pooling.shape.num_kv_heads):
            raise ValueError(
                f"expected a pooling of RAW scores of {heads[0]} query and {heads[1]} KV heads, got {pooling.shape}"
            )
        self.num_kv_heads, self.max_groups = heads[1], pooling.max_groups
        self.num_layers = csa.num_layers
        self._csa, self._pooling = csa, pooling
        self.score_stride = aligned(csa.max_prefix_len)
        self.scores = arena(pooling, self.score_stride)
        # Of the layer that runs: [KV head, row, position] of each group, one after the other.
        raw = csa.max_rows * heads[0] * csa.max_prefix_len
        self._raw = torch.empty(raw, dtype=torch.float32, device=pooling.device)

    def plan(self, groups: Sequence[TwoLevelGroup[CsaTables]]) -> None:
        """See `FirstLevel`. Raises ValueError where tables are of other prefixes or sizes."""
        for group in groups:
            lengths = {layer.first.prefix_len for layer in group.layers}
            if lengths != {group.prefix_len}:
                raise ValueError(
                    f"expected tables of a prefix of {group.prefix_len} tokens, got {sorted(lengths)}; is the index of "
                    "another prefix?"
                )
        for layer in range(self.num_layers):
            self._csa.plan([CsaGroup(group.layers[layer].first, group.rows) for group in groups], layer)
        scored = []
        for number, (group, raw) in enumerate(zip(groups, self._csa.views(self._raw), strict=True)):
            nothing = (0,) * self.num_kv_heads
            raw_begins = tuple(int(raw[head].storage_offset()) for head in range(self.num_kv_heads))
            counts = (group.prefix_len,) * self.num_kv_heads
            begins = begins_of(number, self.num_kv_heads, self.score_stride)
            scored.append(ScoredGroup(group.rows, counts, nothing, raw_begins, begins, raw_stride=raw.stride(1)))
        self._pooling.plan(scored)

    def run(self, q: Tensor, sm_scale: float, layer: int) -> None:
        """See `FirstLevel`: four launches."""
        self._csa.run(q, self._raw, layer)
        self._pooling.run(q, self.scores, sm_scale, raw=self._raw)


class BlockFirstLevel:
    """Scores of blocks from their minimum and maximum, or of blocks or tokens from their (mean) key, in codes.

    A layer's index is the arrays of a `ScoredGroup`; rows of all KV heads one after the other, ceil(prefix_len /
    block_size) of each.

    Args:
        blocks: a `PooledScores` with `Source.MINMAX` or `Source.LOW_BIT`, of all rows.
        max_blocks: of one KV head, at most.
        num_layers: layers, each with indexes of its own.

    Raises:
        ValueError: another source, or listed rows.
    """

    def __init__(self, blocks: PooledScores, max_blocks: int, *, num_layers: int = 1) -> None:
        if blocks.shape.source not in (Source.MINMAX, Source.LOW_BIT) or blocks.listed:
            raise ValueError(
                f"expected scores of all rows from MINMAX or LOW_BIT, got {'listed ' * blocks.listed}"
                f"{blocks.shape.source.name}; a first level reads all of its index"
            )
        self.num_kv_heads, self.max_groups, self.num_layers = blocks.shape.num_kv_heads, blocks.max_groups, num_layers
        self._blocks = blocks
        self.score_stride = aligned(max_blocks)
        self.scores = arena(blocks, self.score_stride)
        self._arrays = LayerArrays(blocks, num_layers)

    def plan(self, groups: Sequence[TwoLevelGroup[tuple[Tensor | None, ...]]]) -> None:
        """See `FirstLevel`. Raises ValueError where there are more blocks than room, or fewer in an index."""
        self._blocks.plan(scored_blocks(groups, self.num_kv_heads, self.score_stride))
        self._arrays.plan([[layer.first for layer in group.layers] for group in groups])

    def run(self, q: Tensor, sm_scale: float, layer: int) -> None:
        """See `FirstLevel`: two launches."""
        self._blocks.run(q, self.scores, sm_scale, arrays=self._arrays.of(layer))


def scored_blocks(
    groups: Sequence[TwoLevelGroup[tuple[Tensor | None, ...]]], num_kv_heads: int, score_stride: int
) -> list[ScoredGroup]:
    """All blocks of the groups, as scores are planned. Raises ValueError as `BlockFirstLevel.plan`."""
    scored = []
    for number, group in enumerate(groups):
        sizes = (group.block_size,) * num_kv_heads if isinstance(group.block_size, int) else group.block_size
        counts = tuple(-(-group.prefix_len // size) for size in sizes)
        rows = {layer.first[1].shape[:-1].numel() for layer in group.layers if layer.first[1] is not None}
        if max(counts) > score_stride or min(rows, default=0) < sum(counts):
            raise ValueError(
                f"expected at most {score_stride} blocks a head and {sum(counts)} in each layer's index, got "
                f"{max(counts)} and {sorted(rows)}; raise max_blocks, or correct block_size"
            )
        first_rows = tuple(sum(counts[:head]) for head in range(len(counts)))
        nothing, begins = (0,) * len(counts), begins_of(number, num_kv_heads, score_stride)
        scored.append(ScoredGroup(group.rows, counts, first_rows, nothing, begins, group.layers[0].first))
    return scored


class LayerArrays:
    """Addresses of every layer's arrays, for `PooledScores.run` and `AnchorSelection.run`.

    Args:
        scoring: whose arrays these are.
        num_layers: layers.
    """

    def __init__(self, scoring: PooledScores | AnchorSelection, num_layers: int) -> None:
        self._shape = scoring.shape
        self._table = torch.zeros(num_layers, scoring.max_groups, ARRAYS, dtype=torch.int64, device=scoring.device)

    def plan(self, groups: Sequence[Sequence[tuple[Tensor | None, ...]]]) -> None:
        """Of each group, the layers' arrays. Copies to the device, without a wait."""
        table = torch.zeros(self._table.shape, dtype=torch.int64)
        for number, layers in enumerate(groups):
            for layer, arrays in enumerate(layers):
                table[layer, number] = torch.tensor(array_addresses(self._shape, arrays), dtype=torch.int64)
        send(table, self._table)

    def of(self, layer: int) -> Tensor:
        """int64 [max_groups, 5]."""
        return self._table[layer]


def aligned(count: int) -> int:
    """Room for that many scores."""
    return -(-count // ALIGNED) * ALIGNED


def arena(scoring: PooledScores | AnchorSelection, stride: int) -> Tensor:
    """Uninitialised scores of all groups and KV heads, `stride` apart."""
    size = scoring.max_groups * scoring.shape.num_kv_heads * stride
    return torch.empty(size, dtype=torch.float32, device=scoring.device)


def begins_of(number: int, num_kv_heads: int, stride: int) -> tuple[int, ...]:
    """Where the scores, or lists, of a group's KV heads begin: one after the other, `stride` apart."""
    return tuple((number * num_kv_heads + head) * stride for head in range(num_kv_heads))
