"""An anchor layer's selection in two levels: blocks name candidates, tokens rank them. Source: AsyncTLS.

Two selections that score and choose in one launch each. The caller makes them, for the same groups and KV heads, and
they belong to the `TwoLevelSelection` from then on: it plans and runs them. Scratch is shared by the layers, which run
one after the other. A `run()` can be captured in a CUDA graph and replayed after another `plan()`. Scores lie in fp32
arenas of natural logs, group g's KV head h from (g * num_kv_heads + h) * stride on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefix_kernels.anchor_selection.runner import AnchorSelection
from prefix_kernels.launching import send
from prefix_kernels.pooled_scores.runner import (
    ARRAYS,
    ScoredGroup,
    ScoreInputs,
    Source,
    array_addresses,
)
from prefix_kernels.top_k_selection.plan import SelectionGroup, pack_lists
from prefix_kernels.types import SelectedLists

Arrays = tuple[Tensor | None, ...]
"""Those of a `ScoredGroup`."""
ALIGNED = 4
"""Scores of a KV head begin at multiples of this, as a selection of tokens reads them."""


@dataclass(frozen=True, eq=False)
class LayerIndex:
    """Both levels' indexes of one prefix in one layer. Read in place: they must stay where they are.

    Attributes:
        first: names the candidates: the arrays of a `ScoredGroup` of blocks, with rows of all KV heads one after the
            other, ceil(prefix_len / block_size) of each.
        second: ranks them: channels (int16 [num_kv_heads, channels]) or None, codes (uint8 [num_kv_heads, prefix_len,
            bytes of a token]), scale (fp32 [num_kv_heads, channels]).
    """

    first: Arrays
    second: Arrays


@dataclass(frozen=True, eq=False)
class TwoLevelGroup:
    """Requests on one prefix, and what they select from it.

    Attributes:
        rows: batch rows of the requests.
        prefix_len: tokens of the prefix.
        num_candidates: positions that the first level names for each KV head, sink and recent window among them; all
            of a prefix that has no more.
        budget: positions that are selected of those, sink and recent window among them.
        layers: the indexes, of every layer that selects, in the order of the layers.
        block_size: tokens per score of the first level, of all KV heads or one for each, the same in all layers.
        num_sink: leading positions always taken.
        num_recent: trailing positions always taken.
        slot_start: where the prefix's position-to-slot table begins in the arena of slots.
        list_begin, head_stride: where its lists are written, as a `SelectionGroup` says.

    Raises:
        ValueError: fewer candidates than the budget, codes of other sizes than the prefix, blocks below one token, or
            no layer.
    """

    rows: tuple[int, ...]
    prefix_len: int
    num_candidates: int
    budget: int
    layers: tuple[LayerIndex, ...]
    block_size: int | tuple[int, ...] = 1
    num_sink: int = 0
    num_recent: int = 0
    slot_start: int = 0
    list_begin: int = 0
    head_stride: int = 0

    def __post_init__(self) -> None:
        if self.num_candidates < min(self.budget, self.prefix_len) or not self.layers:
            raise ValueError(
                f"expected num_candidates of at least the budget of {min(self.budget, self.prefix_len)} and one layer "
                f"or more, got {self.num_candidates} and {len(self.layers)}; the budget is chosen among the candidates"
            )
        sizes = (self.block_size,) if isinstance(self.block_size, int) else self.block_size
        if min(sizes, default=0) < 1:
            raise ValueError(f"expected blocks of one token or more, got block_size={self.block_size}")
        for number, layer in enumerate(self.layers):
            codes = layer.second[1] if len(layer.second) == 3 else None
            if codes is None or codes.dim() != 3 or codes.shape[1] != self.prefix_len:
                raise ValueError(
                    f"expected channels, codes [num_kv_heads, {self.prefix_len}, bytes of a token] and scale as layer "
                    f"{number}'s second index, got {[None if a is None else tuple(a.shape) for a in layer.second]}; is "
                    "it of another prefix?"
                )

    @property
    def count(self) -> int:
        """Candidates of each KV head."""
        return min(self.num_candidates, self.prefix_len)

    @property
    def windows(self) -> dict[str, int]:
        """Of a `SelectionGroup`."""
        return {"num_sink": self.num_sink, "num_recent": self.num_recent}


class TwoLevelSelection:
    """Candidates by the scores of blocks, and the best of these, by keys of 16 bits: two selections in turn.

    Args:
        first: chooses the candidates from all blocks or tokens (`Source.MINMAX` or `Source.LOW_BIT`). Its
            `list_entries` are those of all candidates.
        second: chooses the budget among the candidates: listed, `Source.LOW_BIT`. Its `max_prefix_len` is the most
            candidates of a KV head.
        max_blocks: of one KV head in the first level, at most.
        num_layers: layers, each with indexes of its own.

    Raises:
        ValueError: stages of other sizes, a first level that does not read all of its index, or a second one that does
            not score what is listed.

    Attributes:
        candidates: what `first` chose in the last run; the windows are the ends of each list.
        first_scores, second_scores: arenas, of the blocks, `first_stride` apart, and of the candidates, at their
            places in `candidates`. Not written where all are chosen.
    """

    def __init__(
        self, first: AnchorSelection, second: AnchorSelection, max_blocks: int, *, num_layers: int = 1
    ) -> None:
        sizes = [(one.max_groups, one.shape.num_kv_heads) for one in (first, second)]
        if len(set(sizes)) > 1:
            raise ValueError(f"expected stages of the same max_groups and num_kv_heads, got {sizes}")
        if second.shape.source is not Source.LOW_BIT or not second.listed:
            raise ValueError(
                f"expected a second level with listed=True and Source.LOW_BIT, got listed={second.listed} and "
                f"{second.shape.source.name}; it scores the candidates alone"
            )
        if first.listed:
            raise ValueError("expected a first level of all rows, got listed=True; it names the candidates")
        self.first, self.second, self.num_layers = first, second, num_layers
        self.candidates = first.new_lists()
        self.first_stride = _aligned(max_blocks)
        num_scores = first.max_groups * first.shape.num_kv_heads * self.first_stride
        self.first_scores, self.second_scores = (
            torch.empty(size, dtype=torch.float32, device=first.device)
            for size in (num_scores, _aligned(first.list_entries))
        )
        self._first_arrays, self._second_arrays = (_LayerArrays(one, num_layers) for one in (first, second))
        self._slots_end = 0

    def new_lists(self, *, with_slots: bool = False) -> SelectedLists:
        """Buffers for `run()`, see `AnchorSelection.new_lists`."""
        return self.second.new_lists(with_slots=with_slots)

    def plan(self, groups: Sequence[TwoLevelGroup]) -> None:
        """Write the tables of both levels and all layers. Copies to the device, without a wait.

        Args:
            groups: row g of the counts is that of the group at place g; rows behind the last are left as they are.

        Raises:
            ValueError: more groups, rows, tokens, blocks or candidates than the stages have room for, or indexes of
                another shape. Stages may be planned for different groups then: plan again before the next run.
        """
        heads = self.first.shape.num_kv_heads
        _check_layers(groups, self.num_layers, heads)
        named = [
            SelectionGroup(group.prefix_len, group.num_candidates, block_size=group.block_size, **group.windows)
            for group in groups
        ]
        named = pack_lists(named, heads)
        self.first.plan(_scored_blocks(groups, heads, self.first_stride), named)
        # To the second selection the candidates are all there is.
        chosen = [
            SelectionGroup(
                group.count, group.budget, slot_start=group.slot_start, list_begin=group.list_begin,
                head_stride=group.head_stride, **group.windows,
            )
            for group in groups
        ]  # fmt: skip
        self.second.plan(_scored_candidates(groups, heads, named), chosen)
        self._first_arrays.plan([[layer.first for layer in group.layers] for group in groups])
        self._second_arrays.plan([[layer.second for layer in group.layers] for group in groups])
        self._slots_end = max((group.slot_start + group.prefix_len for group in groups), default=0)

    def run(
        self,
        q: Tensor,
        lists: SelectedLists,
        sm_scale: float,
        *,
        slot_table: Tensor | None = None,
        layer: int = 0,
        raw: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        """Select as planned: one launch for each level, or four (`AnchorSelection`'s `form`).

        Args:
            q: [batch, num_qo_heads, head_dim] post-RoPE queries.
            lists: written: the selected positions of the prefix and their slots.
            sm_scale: multiplies q.k before the softmax, in both levels.
            slot_table: as in `AnchorSelection.run`.
            layer: whose indexes are read.
            raw: room for the raw scores of each level, as in `PooledScores.run`.

        Raises:
            ValueError: tensors of another shape or dtype than planned for.
        """
        if slot_table is not None and slot_table.shape[0] < self._slots_end:
            raise ValueError(f"expected a slot_table of {self._slots_end} entries, got {slot_table.shape[0]}")
        positions = self.candidates.positions
        first = ScoreInputs(q, sm_scale, raw=raw[0], arrays=self._first_arrays.of(layer))
        second = ScoreInputs(q, sm_scale, lists=positions, raw=raw[1], arrays=self._second_arrays.of(layer))
        self.first.run(first, self.first_scores, self.candidates)
        self.second.run(second, self.second_scores, lists, slot_table=slot_table)


class _LayerArrays:
    """Addresses of every layer's arrays, for runs of `scoring`."""

    def __init__(self, scoring: AnchorSelection, num_layers: int) -> None:
        self._shape = scoring.shape
        self._table = torch.zeros(num_layers, scoring.max_groups, ARRAYS, dtype=torch.int64, device=scoring.device)

    def plan(self, groups: Sequence[Sequence[Arrays]]) -> None:
        """Of each group, the layers' arrays. Copies to the device, without a wait."""
        table = torch.zeros(self._table.shape, dtype=torch.int64)
        for number, layers in enumerate(groups):
            for layer, arrays in enumerate(layers):
                table[layer, number] = torch.tensor(array_addresses(self._shape, arrays), dtype=torch.int64)
        send(table, self._table)

    def of(self, layer: int) -> Tensor:
        """int64 [max_groups, 5]."""
        return self._table[layer]


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def _begins_of(number: int, num_kv_heads: int, stride: int) -> tuple[int, ...]:
    """Where the scores, or lists, of a group's KV heads begin: one after the other, `stride` apart."""
    return tuple((number * num_kv_heads + head) * stride for head in range(num_kv_heads))


def _check_layers(groups: Sequence[TwoLevelGroup], num_layers: int, num_kv_heads: int) -> None:
    """Raise ValueError unless groups name the indexes of so many layers, with codes of so many KV heads."""
    for group in groups:
        if len(group.layers) != num_layers:
            raise ValueError(f"expected indexes of {num_layers} layers, got {len(group.layers)}; name every layer's")
        for number, layer in enumerate(group.layers):
            codes = layer.second[1]
            if codes is None or codes.shape[0] != num_kv_heads:
                raise ValueError(
                    f"expected codes of {num_kv_heads} KV heads as layer {number}'s second index, got "
                    f"{None if codes is None else tuple(codes.shape)}"
                )


def _scored_blocks(groups: Sequence[TwoLevelGroup], num_kv_heads: int, score_stride: int) -> list[ScoredGroup]:
    """All blocks of the groups, as scores are planned. Raises ValueError where they do not fit."""
    scored = []
    for number, group in enumerate(groups):
        sizes = (group.block_size,) * num_kv_heads if isinstance(group.block_size, int) else group.block_size
        counts = tuple(-(-group.prefix_len // size) for size in sizes)
        codes = (layer.first[1] for layer in group.layers)
        rows = {one.shape[:-1].numel() for one in codes if one is not None}
        if max(counts) > score_stride or min(rows, default=0) < sum(counts):
            raise ValueError(
                f"expected at most {score_stride} blocks a head and {sum(counts)} in each layer's index, got "
                f"{max(counts)} and {sorted(rows)}; raise max_blocks, or correct block_size"
            )
        first_rows = tuple(sum(counts[:head]) for head in range(len(counts)))
        nothing, begins = (0,) * len(counts), _begins_of(number, num_kv_heads, score_stride)
        scored.append(ScoredGroup(group.rows, counts, first_rows, nothing, begins, group.layers[0].first))
    return scored


def _scored_candidates(
    groups: Sequence[TwoLevelGroup], num_kv_heads: int, named: Sequence[SelectionGroup]
) -> list[ScoredGroup]:
    """The candidates, as scores are planned: a score lies where its candidate is listed."""
    scored = []
    for group, listed in zip(groups, named, strict=True):
        begins = tuple(listed.list_begin + head * listed.head_stride for head in range(num_kv_heads))
        firsts = tuple(group.prefix_len * head for head in range(num_kv_heads))
        counts = (group.count,) * num_kv_heads
        scored.append(ScoredGroup(group.rows, counts, firsts, begins, begins, group.layers[0].second))
    return scored
