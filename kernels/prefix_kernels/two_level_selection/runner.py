"""Two-level selection of a batch of groups: planned on the host, then run without a wait or an allocation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from torch import Tensor

from prefix_kernels.pooled_scores.runner import PooledScores
from prefix_kernels.pooled_scores.tables import ScoredGroup, Source
from prefix_kernels.top_k_selection.lists import SelectedLists
from prefix_kernels.top_k_selection.plan import SelectionGroup
from prefix_kernels.top_k_selection.runner import TopKSelection
from prefix_kernels.two_level_selection.first_level import FirstLevel, LayerArrays, aligned, arena, begins_of
from prefix_kernels.two_level_selection.plan import Index, TwoLevelGroup


class TwoLevelSelection(Generic[Index]):
    """From queries to the lists of an anchor layer: score all, choose candidates, score those, choose the budget.

    The stages are made by the caller, for the same groups and KV heads, and belong to this object from then on: it
    plans and runs them. Its scratch is shared by the layers, which run one after the other. `run()` can be captured in
    a CUDA graph and replayed after another `plan()`; how ties break is said by `TopKSelection`, for both choices.

    Args:
        first: scores everything.
        nominate: chooses the candidates by these scores. Its `max_budget` is the most candidates of a KV head.
        second: scores the candidates: a listed `PooledScores` with `Source.LOW_BIT`.
        select: chooses the budget among the candidates. Its `max_prefix_len` is at least `nominate.max_budget`.

    Raises:
        ValueError: stages of other sizes, or a second level that does not score what is listed.

    Attributes:
        candidates: what `nominate` chose in the last run; the windows are the ends of each list.
        scores: fp32 arena, natural logs of the candidates' pooled shares, group g's KV head h from (g * num_kv_heads +
            h) * score_stride on.
        num_layers: of the first level.

    Example, for CSAttention's lists and a token index on some channels:
        first = CsaFirstLevel(CsaScores(...), PooledScores(ScoreShape(32, 8, Source.RAW), ...))
        nominate = TopKSelection(max_groups, 8, max_prefix_len, max_candidates, device, key_bits=16, max_block_size=1)
        second = PooledScores(ScoreShape(32, 8, Source.LOW_BIT, 96, 4, True), ..., listed=True)
        select = TopKSelection(max_groups, 8, max_candidates, max_budget, device, key_bits=16, max_block_size=1)
        selection = TwoLevelSelection(first, nominate, second, select)
        lists = selection.new_lists(with_slots=True)
        selection.plan(groups)
        selection.run(q, lists, sm_scale, slot_table=slot_table)
    """

    def __init__(
        self, first: FirstLevel[Index], nominate: TopKSelection, second: PooledScores, select: TopKSelection
    ) -> None:
        sizes = [
            (first.max_groups, first.num_kv_heads),
            (nominate.max_groups, nominate.num_kv_heads),
            (second.max_groups, second.shape.num_kv_heads),
            (select.max_groups, select.num_kv_heads),
        ]
        if len(set(sizes)) > 1:
            raise ValueError(f"expected stages of the same max_groups and num_kv_heads, got {sizes}")
        if second.shape.source is not Source.LOW_BIT or not second.listed:
            raise ValueError(
                "expected a second level with listed=True and Source.LOW_BIT, got "
                f"listed={second.listed} and {second.shape.source.name}; it scores the candidates alone"
            )
        if select.max_prefix_len < nominate.max_budget:
            raise ValueError(
                f"expected a selection among {nominate.max_budget} candidates, got one among {select.max_prefix_len}; "
                "raise its max_prefix_len"
            )
        self.first, self.nominate, self.second, self.select = first, nominate, second, select
        self.num_layers = first.num_layers
        self.candidates = nominate.new_lists()
        self.score_stride = aligned(nominate.max_budget)
        self.scores = arena(second, self.score_stride)
        self._arrays = LayerArrays(second, first.num_layers)

    def new_lists(self, *, with_slots: bool = False) -> SelectedLists:
        """Buffers for `run()`, see `TopKSelection.new_lists`."""
        return self.select.new_lists(with_slots=with_slots)

    def plan(self, groups: Sequence[TwoLevelGroup[Index]]) -> None:
        """Write the tables of all stages and layers. Copies to the device, without a wait.

        Args:
            groups: row g of the lists is that of the group at place g; rows behind the last get counts of 0.

        Raises:
            ValueError: more groups, rows, tokens or candidates than the stages have room for, or indexes of another
                shape. Stages may be planned for different groups then: plan again before the next run.
        """
        check_layers(groups, self.num_layers, self.first.num_kv_heads)
        heads = self.first.num_kv_heads
        self.first.plan(groups)
        self.nominate.plan(nominated(groups, heads, self.first.score_stride))
        self.second.plan(scored_candidates(groups, heads, self.nominate.max_budget, self.score_stride))
        self.select.plan([self._selected(number, group) for number, group in enumerate(groups)])
        self._arrays.plan([[layer.second for layer in group.layers] for group in groups])

    def run(
        self,
        q: Tensor,
        lists: SelectedLists,
        sm_scale: float,
        *,
        slot_table: Tensor | None = None,
        layer: int = 0,
        pad: bool = True,
    ) -> None:
        """Select as planned. The launches of the first level, of two selections, and two for the candidates' scores.

        Args:
            q: [batch, num_qo_heads, head_dim] post-RoPE queries.
            lists: written, as by `TopKSelection.run`: the selected positions of the prefix and their slots.
            sm_scale: multiplies q.k before the softmax, in both levels.
            slot_table, pad: as in `TopKSelection.run`.
            layer: whose indexes are read.

        Raises:
            ValueError: tensors of another shape or dtype than planned for.
        """
        self.first.run(q, sm_scale, layer)
        self.nominate.run(self.first.scores, self.candidates, pad=False)
        positions = self.candidates.positions
        self.second.run(q, self.scores, sm_scale, lists=positions, arrays=self._arrays.of(layer))
        self.select.run(self.scores, lists, slot_table=slot_table, candidates=positions, pad=pad)

    def _selected(self, number: int, group: TwoLevelGroup[Index]) -> SelectionGroup:
        return SelectionGroup(
            group.prefix_len,
            group.budget,
            number * self.first.num_kv_heads * self.score_stride,
            self.score_stride,
            num_sink=group.num_sink,
            num_recent=group.num_recent,
            slot_start=group.slot_start,
            num_candidates=group.count,
        )


def check_layers(groups: Sequence[TwoLevelGroup[Index]], num_layers: int, num_kv_heads: int) -> None:
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


def nominated(groups: Sequence[TwoLevelGroup[Index]], num_kv_heads: int, score_stride: int) -> list[SelectionGroup]:
    """The choice of candidates, by scores that lie `score_stride` apart."""
    return [
        SelectionGroup(
            group.prefix_len,
            group.num_candidates,
            number * num_kv_heads * score_stride,
            score_stride,
            group.block_size,
            group.num_sink,
            group.num_recent,
        )
        for number, group in enumerate(groups)
    ]


def scored_candidates(
    groups: Sequence[TwoLevelGroup[Index]], num_kv_heads: int, list_stride: int, score_stride: int
) -> list[ScoredGroup]:
    """The candidates, as scores are planned: lists and scores lie so far apart."""
    return [
        ScoredGroup(
            group.rows,
            (group.count,) * num_kv_heads,
            tuple(group.prefix_len * head for head in range(num_kv_heads)),
            begins_of(number, num_kv_heads, list_stride),
            begins_of(number, num_kv_heads, score_stride),
            group.layers[0].second,
        )
        for number, group in enumerate(groups)
    ]
