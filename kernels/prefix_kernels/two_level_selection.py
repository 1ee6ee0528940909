"""An anchor layer's selection in two levels: one index names candidates, another one ranks them.

Source: AsyncTLS (coarse, then tokens). `TwoLevelSelection` names candidates by CSAttention's lists and puts planned
stages one after the other. `JoinedTwoLevelSelection` names them by blocks, in two selections that score and choose in
one launch each. `two_level_selection_reference` does the same in torch.

The stages are made by the caller, for the same groups and KV heads, and belong to the selection from then on: it plans
and runs them. Scratch is shared by the layers, which run one after the other. A `run()` can be captured in a CUDA graph
and replayed after another `plan()`. Scores lie in fp32 arenas of natural logs, group g's KV head h from (g *
num_kv_heads + h) * stride on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefix_kernels.anchor_selection.runner import AnchorSelection
from prefix_kernels.block_scores import token_scores
from prefix_kernels.csa_scores.runner import CsaGroup, CsaScores, CsaTables
from prefix_kernels.launching import send
from prefix_kernels.low_bit import LowBitTensor
from prefix_kernels.pooled_scores.runner import (
    ARRAYS,
    PooledScores,
    ScoredGroup,
    ScoreInputs,
    Source,
    array_addresses,
)
from prefix_kernels.pooling import Pooling
from prefix_kernels.top_k_selection import top_k_selection
from prefix_kernels.top_k_selection.plan import SelectionGroup
from prefix_kernels.top_k_selection.runner import TopKSelection
from prefix_kernels.types import SelectedLists, Selection

Arrays = tuple[Tensor | None, ...]
"""Those of a `ScoredGroup`."""
ALIGNED = 4
"""Scores of a KV head begin at multiples of this, as a selection of tokens reads them."""


@dataclass(frozen=True, eq=False)
class LayerIndex:
    """Both levels' indexes of one prefix in one layer. Read in place: they must stay where they are.

    Attributes:
        first: names the candidates: CSAttention's tables, or the arrays of a `ScoredGroup` of blocks, with rows of all
            KV heads one after the other, ceil(prefix_len / block_size) of each.
        second: ranks them: channels (int16 [num_kv_heads, channels]) or None, codes (uint8 [num_kv_heads, prefix_len,
            bytes of a token]), scale (fp32 [num_kv_heads, channels]).
    """

    first: CsaTables | Arrays
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


def two_level_selection_reference(
    first_scores: Tensor,
    second_scores: Callable[[Tensor], Tensor],
    num_candidates: int,
    budget: int,
    num_sink: int,
    num_recent: int,
    block_size: int,
    prefix_len: int,
) -> Selection:
    """The best `budget` of the best `num_candidates` positions; both hold sink and recent window.

    Candidates ascend, so that the windows are the ends of the list, and the second choice is one among places in it.

    Args:
        first_scores: [num_kv_heads, ceil(prefix_len / block_size)], higher is better.
        second_scores: from candidates [num_kv_heads, min(num_candidates, prefix_len)] int32 to scores of that shape.
        num_candidates, budget, num_sink, num_recent, block_size, prefix_len: as in `TwoLevelGroup`.
    """
    named = top_k_selection(first_scores, num_candidates, num_sink, num_recent, block_size, prefix_len)
    best = top_k_selection(second_scores(named.positions), budget, num_sink, num_recent, 1, named.max_count)
    return Selection(named.positions.gather(1, best.positions.long()), best.counts)


def listed_token_scores_reference(
    q: Tensor, keys: LowBitTensor, channels: Tensor | None, positions: Tensor, sm_scale: float, pooling: Pooling
) -> Tensor:
    """`token_scores` of the listed `positions` [num_kv_heads, n] alone, of that shape: the softmax is over these."""
    index = positions.long()[:, :, None].expand(-1, -1, keys.packed.shape[2])
    listed = LowBitTensor(keys.packed.gather(1, index), keys.scale, keys.zero)
    return token_scores(q, listed, channels, sm_scale, pooling)


class TwoLevelSelection:
    """From queries to the lists of an anchor layer: score all, choose candidates, score those, choose the budget.

    Everything is scored from CSAttention's compact lists, pooled over the rows of a group. How ties break is said by
    `TopKSelection`, for both choices.

    Args:
        csa: sums the lists of a layer's first index.
        pooling: of these raw scores: a `PooledScores` with `Source.RAW`.
        nominate: chooses the candidates. Its `max_budget` is the most candidates of a KV head.
        second: scores the candidates: a listed `PooledScores` with `Source.LOW_BIT`.
        select: chooses the budget among the candidates. Its `max_prefix_len` is at least `nominate.max_budget`.

    Raises:
        ValueError: stages of other sizes or sources.

    Attributes:
        candidates: what `nominate` chose in the last run; the windows are the ends of each list.
        first_scores, second_scores: arenas, of all positions and of the candidates, `first_stride` and `second_stride`
            apart.
        num_layers: of `csa`.
    """

    def __init__(
        self,
        csa: CsaScores,
        pooling: PooledScores,
        nominate: TopKSelection,
        second: PooledScores,
        select: TopKSelection,
    ) -> None:
        heads = (csa.shape.num_qo_heads, csa.shape.num_kv_heads)
        if pooling.shape.source is not Source.RAW or heads != (pooling.shape.num_qo_heads, pooling.shape.num_kv_heads):
            raise ValueError(
                f"expected a pooling of RAW scores of {heads[0]} query and {heads[1]} KV heads, got {pooling.shape}"
            )
        sizes = [(one.max_groups, one.shape.num_kv_heads) for one in (pooling, second)]
        _check_stages([*sizes, *((one.max_groups, one.num_kv_heads) for one in (nominate, select))], second)
        _check_room(nominate, select)
        self.nominate, self.second, self.select, self.num_layers = nominate, second, select, csa.num_layers
        self.candidates = nominate.new_lists()
        self.first_stride, self.second_stride = _aligned(csa.max_prefix_len), _aligned(nominate.max_budget)
        self.first_scores, self.second_scores = _arena(pooling, self.first_stride), _arena(second, self.second_stride)
        self._csa, self._pooling, self._heads = csa, pooling, heads[1]
        self._arrays = _LayerArrays(second, csa.num_layers)
        # Of the layer that runs: [KV head, row, position] of each group, one after the other.
        raw = csa.max_rows * heads[0] * csa.max_prefix_len
        self._raw = torch.empty(raw, dtype=torch.float32, device=pooling.device)

    def new_lists(self, *, with_slots: bool = False) -> SelectedLists:
        """Buffers for `run()`, see `TopKSelection.new_lists`."""
        return self.select.new_lists(with_slots=with_slots)

    def plan(self, groups: Sequence[TwoLevelGroup]) -> None:
        """Write the tables of all stages and layers. Copies to the device, without a wait.

        Args:
            groups: row g of the lists is that of the group at place g; rows behind the last get counts of 0. A layer's
                first index is `CsaTables`.

        Raises:
            ValueError: more groups, rows, tokens or candidates than the stages have room for, or indexes of another
                shape. Stages may be planned for different groups then: plan again before the next run.
        """
        heads = self._heads
        _check_layers(groups, self.num_layers, heads)
        tables = [[_tables_of(group, layer) for group in groups] for layer in range(self.num_layers)]
        for layer, of_layer in enumerate(tables):
            self._csa.plan([CsaGroup(one, group.rows) for one, group in zip(of_layer, groups, strict=True)], layer)
        scored = []
        for number, (group, raw) in enumerate(zip(groups, self._csa.views(self._raw), strict=True)):
            raw_begins = tuple(int(raw[head].storage_offset()) for head in range(heads))
            counts, begins = (group.prefix_len,) * heads, _begins_of(number, heads, self.first_stride)
            scored.append(ScoredGroup(group.rows, counts, (0,) * heads, raw_begins, begins, raw_stride=raw.stride(1)))
        self._pooling.plan(scored)
        self.nominate.plan(_nominated(groups, heads, self.first_stride))
        self.second.plan(_scored_candidates(groups, heads, self.nominate.max_budget, self.second_stride))
        chosen = [
            SelectionGroup(
                *(group.prefix_len, group.budget, number * heads * self.second_stride, self.second_stride),
                slot_start=group.slot_start,
                num_candidates=group.count,
                **group.windows,
            )
            for number, group in enumerate(groups)
        ]
        self.select.plan(chosen)
        self._arrays.plan([[layer.second for layer in group.layers] for group in groups])

    def run(
        self, q: Tensor, lists: SelectedLists, sm_scale: float, *, slot_table: Tensor | None = None, layer: int = 0
    ) -> None:
        """Select as planned: two launches for each of three scorings, and those of two selections.

        Args:
            q: [batch, num_qo_heads, head_dim] post-RoPE queries.
            lists: written, as by `TopKSelection.run`: the selected positions of the prefix and their slots.
            sm_scale: multiplies q.k before the softmax, in both levels.
            slot_table: as in `TopKSelection.run`.
            layer: whose indexes are read.

        Raises:
            ValueError: tensors of another shape or dtype than planned for.
        """
        self._csa.run(q, self._raw, layer)
        self._pooling.run(q, self.first_scores, sm_scale, raw=self._raw)
        self.nominate.run(self.first_scores, self.candidates, pad=False)
        positions = self.candidates.positions
        self.second.run(q, self.second_scores, sm_scale, lists=positions, arrays=self._arrays.of(layer))
        self.select.run(self.second_scores, lists, slot_table=slot_table, candidates=positions)


class JoinedTwoLevelSelection:
    """Candidates by the scores of blocks, and the best of these, by keys of 16 bits: two selections in turn.

    Args:
        first: chooses the candidates from all blocks or tokens (`Source.MINMAX` or `Source.LOW_BIT`). Its `max_budget`
            is the most candidates of a KV head.
        second: chooses the budget among the candidates: listed, `Source.LOW_BIT`. Its `max_prefix_len` is at least
            `first.max_budget`.
        max_blocks: of one KV head in the first level, at most.
        num_layers: layers, each with indexes of its own.

    Raises:
        ValueError: stages of other sizes, a first level that does not read all of its index, or a second one that does
            not score what is listed.

    Attributes:
        candidates: what `first` chose in the last run; the windows are the ends of each list.
        first_scores, second_scores: arenas, of the blocks and of the candidates, `first_stride` and `second_stride`
            apart. Not written where all are chosen.
    """

    def __init__(
        self, first: AnchorSelection, second: AnchorSelection, max_blocks: int, *, num_layers: int = 1
    ) -> None:
        _check_stages([(one.max_groups, one.shape.num_kv_heads) for one in (first, second)], second)
        _check_room(first, second)
        if first.listed:
            raise ValueError("expected a first level of all rows, got listed=True; it names the candidates")
        self.first, self.second, self.num_layers = first, second, num_layers
        self.candidates = first.new_lists()
        self.first_stride, self.second_stride = _aligned(max_blocks), _aligned(first.max_budget)
        self.first_scores, self.second_scores = _arena(first, self.first_stride), _arena(second, self.second_stride)
        self._first_arrays, self._second_arrays = (_LayerArrays(one, num_layers) for one in (first, second))
        self._slots_end = 0

    def new_lists(self, *, with_slots: bool = False) -> SelectedLists:
        """Buffers for `run()`, see `AnchorSelection.new_lists`."""
        return self.second.new_lists(with_slots=with_slots)

    def plan(self, groups: Sequence[TwoLevelGroup]) -> None:
        """As `TwoLevelSelection.plan`; a layer's first index is the arrays of its blocks. Also raises ValueError where
        there are more blocks than room, or fewer in an index."""
        heads, width = self.first.shape.num_kv_heads, self.first.max_budget
        _check_layers(groups, self.num_layers, heads)
        self.first.plan(_scored_blocks(groups, heads, self.first_stride), _nominated(groups, heads, self.first_stride))
        # To the second selection the candidates are all there is.
        chosen = [
            SelectionGroup(group.count, group.budget, slot_start=group.slot_start, **group.windows) for group in groups
        ]
        self.second.plan(_scored_candidates(groups, heads, width, self.second_stride), chosen)
        self._first_arrays.plan([[_arrays_of(layer) for layer in group.layers] for group in groups])
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
        """As `TwoLevelSelection.run`: one launch for each level, or four (`AnchorSelection`'s `form`).

        Args:
            q, lists, sm_scale, slot_table, layer: as there.
            raw: room for the raw scores of each level, as in `PooledScores.run`.
        """
        if slot_table is not None and slot_table.shape[0] < self._slots_end:
            raise ValueError(f"expected a slot_table of {self._slots_end} entries, got {slot_table.shape[0]}")
        positions = self.candidates.positions
        first = ScoreInputs(q, sm_scale, raw=raw[0], arrays=self._first_arrays.of(layer))
        second = ScoreInputs(q, sm_scale, lists=positions, raw=raw[1], arrays=self._second_arrays.of(layer))
        self.first.run(first, self.first_scores, self.candidates, pad=False)
        self.second.run(second, self.second_scores, lists, slot_table=slot_table)


class _LayerArrays:
    """Addresses of every layer's arrays, for runs of `scoring`."""

    def __init__(self, scoring: PooledScores | AnchorSelection, num_layers: int) -> None:
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


def _arena(scoring: PooledScores | AnchorSelection, stride: int) -> Tensor:
    """Uninitialised scores of all groups and KV heads, `stride` apart."""
    size = scoring.max_groups * scoring.shape.num_kv_heads * stride
    return torch.empty(size, dtype=torch.float32, device=scoring.device)


def _begins_of(number: int, num_kv_heads: int, stride: int) -> tuple[int, ...]:
    """Where the scores, or lists, of a group's KV heads begin: one after the other, `stride` apart."""
    return tuple((number * num_kv_heads + head) * stride for head in range(num_kv_heads))


def _check_stages(sizes: Sequence[tuple[int, int]], second: PooledScores | AnchorSelection) -> None:
    if len(set(sizes)) > 1:
        raise ValueError(f"expected stages of the same max_groups and num_kv_heads, got {sizes}")
    if second.shape.source is not Source.LOW_BIT or not second.listed:
        raise ValueError(
            f"expected a second level with listed=True and Source.LOW_BIT, got listed={second.listed} and "
            f"{second.shape.source.name}; it scores the candidates alone"
        )


def _check_room(nominate: TopKSelection | AnchorSelection, select: TopKSelection | AnchorSelection) -> None:
    if select.max_prefix_len < nominate.max_budget:
        raise ValueError(
            f"expected a selection among {nominate.max_budget} candidates, got one among {select.max_prefix_len}; "
            "raise its max_prefix_len"
        )


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


def _tables_of(group: TwoLevelGroup, layer: int) -> CsaTables:
    tables = group.layers[layer].first
    if not isinstance(tables, CsaTables) or tables.prefix_len != group.prefix_len:
        raise ValueError(
            f"expected tables of a prefix of {group.prefix_len} tokens, got "
            f"{tables.prefix_len if isinstance(tables, CsaTables) else 'arrays'}; is the index of another prefix?"
        )
    return tables


def _arrays_of(layer: LayerIndex) -> Arrays:
    if isinstance(layer.first, CsaTables):
        raise ValueError("expected arrays of blocks as a layer's first index, got CsaTables; use TwoLevelSelection")
    return layer.first


def _nominated(groups: Sequence[TwoLevelGroup], num_kv_heads: int, score_stride: int) -> list[SelectionGroup]:
    """The choice of candidates, by scores that lie `score_stride` apart."""
    return [
        SelectionGroup(
            *(group.prefix_len, group.num_candidates, number * num_kv_heads * score_stride, score_stride),
            block_size=group.block_size,
            **group.windows,
        )
        for number, group in enumerate(groups)
    ]


def _scored_blocks(groups: Sequence[TwoLevelGroup], num_kv_heads: int, score_stride: int) -> list[ScoredGroup]:
    """All blocks of the groups, as scores are planned. Raises ValueError where they do not fit."""
    scored = []
    for number, group in enumerate(groups):
        sizes = (group.block_size,) * num_kv_heads if isinstance(group.block_size, int) else group.block_size
        counts = tuple(-(-group.prefix_len // size) for size in sizes)
        codes = (_arrays_of(layer)[1] for layer in group.layers)
        rows = {one.shape[:-1].numel() for one in codes if one is not None}
        if max(counts) > score_stride or min(rows, default=0) < sum(counts):
            raise ValueError(
                f"expected at most {score_stride} blocks a head and {sum(counts)} in each layer's index, got "
                f"{max(counts)} and {sorted(rows)}; raise max_blocks, or correct block_size"
            )
        first_rows = tuple(sum(counts[:head]) for head in range(len(counts)))
        nothing, begins = (0,) * len(counts), _begins_of(number, num_kv_heads, score_stride)
        scored.append(ScoredGroup(group.rows, counts, first_rows, nothing, begins, _arrays_of(group.layers[0])))
    return scored


def _scored_candidates(
    groups: Sequence[TwoLevelGroup], num_kv_heads: int, list_stride: int, score_stride: int
) -> list[ScoredGroup]:
    """The candidates, as scores are planned: lists and scores lie so far apart."""
    return [
        ScoredGroup(
            group.rows,
            (group.count,) * num_kv_heads,
            tuple(group.prefix_len * head for head in range(num_kv_heads)),
            _begins_of(number, num_kv_heads, list_stride),
            _begins_of(number, num_kv_heads, score_stride),
            group.layers[0].second,
        )
        for number, group in enumerate(groups)
    ]
