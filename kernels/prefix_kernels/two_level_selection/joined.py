"""Two-level selection in two launches: each level is a selection that scores and chooses at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from prefix_kernels.anchor_selection.runner import AnchorSelection
from prefix_kernels.pooled_scores.tables import ScoreInputs, Source
from prefix_kernels.top_k_selection.lists import SelectedLists
from prefix_kernels.top_k_selection.plan import SelectionGroup
from prefix_kernels.two_level_selection.first_level import LayerArrays, aligned, arena, scored_blocks
from prefix_kernels.two_level_selection.plan import TwoLevelGroup
from prefix_kernels.two_level_selection.runner import check_layers, nominated, scored_candidates


class JoinedTwoLevelSelection:
    """`TwoLevelSelection` with a `BlockFirstLevel` and keys of 16 bits, as two selections one after the other.

    The stages are made by the caller, for the same groups and KV heads, and belong to this object from then on: it
    plans and runs them. Its scratch is shared by the layers, which run one after the other. `run()` can be captured in
    a CUDA graph and replayed after another `plan()`.

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
        first_scores, second_scores: fp32 arenas, natural logs of the blocks' and the candidates' pooled shares, group
            g's KV head h from (g * num_kv_heads + h) * (first_stride or second_stride) on. Not written where all are
            chosen.

    Example, for blocks of 16 and a token index on some channels:
        blocks, tokens = ScoreShape(32, 8, Source.MINMAX, 128), ScoreShape(32, 8, Source.LOW_BIT, 96, 4, True)
        first = AnchorSelection(blocks, ..., max_prefix_len, max_candidates, config, device, max_block_size=16)
        second = AnchorSelection(tokens, ..., max_candidates, max_budget, config, device, listed=True, max_block_size=1)
        selection = JoinedTwoLevelSelection(first, second, max_prefix_len // 16)
        lists = selection.new_lists(with_slots=True)
        selection.plan(groups)
        selection.run(q, lists, sm_scale, slot_table=slot_table)
    """

    def __init__(
        self, first: AnchorSelection, second: AnchorSelection, max_blocks: int, *, num_layers: int = 1
    ) -> None:
        sizes = [(stage.max_groups, stage.shape.num_kv_heads) for stage in (first, second)]
        if len(set(sizes)) > 1:
            raise ValueError(f"expected stages of the same max_groups and num_kv_heads, got {sizes}")
        if first.listed or second.shape.source is not Source.LOW_BIT or not second.listed:
            raise ValueError(
                "expected a first level of all rows, and a second one with listed=True and Source.LOW_BIT, got "
                f"listed={first.listed}, and listed={second.listed} and {second.shape.source.name}; the second level "
                "scores the candidates alone"
            )
        if second.max_prefix_len < first.max_budget:
            raise ValueError(
                f"expected a selection among {first.max_budget} candidates, got one among {second.max_prefix_len}; "
                "raise its max_prefix_len"
            )
        self.first, self.second, self.num_layers = first, second, num_layers
        self.candidates = first.new_lists()
        self.first_stride, self.second_stride = aligned(max_blocks), aligned(first.max_budget)
        self.first_scores, self.second_scores = arena(first, self.first_stride), arena(second, self.second_stride)
        self._first_arrays, self._second_arrays = LayerArrays(first, num_layers), LayerArrays(second, num_layers)
        self._slots_end = 0

    def new_lists(self, *, with_slots: bool = False) -> SelectedLists:
        """Buffers for `run()`, see `AnchorSelection.new_lists`."""
        return self.second.new_lists(with_slots=with_slots)

    def plan(self, groups: Sequence[TwoLevelGroup[tuple[Tensor | None, ...]]]) -> None:
        """Write the tables of both levels and all layers. Copies to the device, without a wait.

        Args:
            groups: row g of the lists is that of the group at place g; rows behind the last get counts of 0. A layer's
                first index is as `BlockFirstLevel` says.

        Raises:
            ValueError: more groups, rows, tokens or candidates than the stages have room for, or indexes of another
                shape. Stages may be planned for different groups then: plan again before the next run.
        """
        heads, width = self.first.shape.num_kv_heads, self.first.max_budget
        check_layers(groups, self.num_layers, heads)
        self.first.plan(scored_blocks(groups, heads, self.first_stride), nominated(groups, heads, self.first_stride))
        # To the second selection the candidates are all there is.
        chosen = [
            SelectionGroup(
                group.count,
                group.budget,
                num_sink=group.num_sink,
                num_recent=group.num_recent,
                slot_start=group.slot_start,
            )
            for group in groups
        ]
        self.second.plan(scored_candidates(groups, heads, width, self.second_stride), chosen)
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
        pad: bool = True,
    ) -> None:
        """Select as planned: one launch for each level, or four (`AnchorSelection`'s `form`).

        Args:
            q: [batch, num_qo_heads, head_dim] post-RoPE queries.
            lists: written: the selected positions of the prefix and their slots.
            sm_scale: multiplies q.k before the softmax, in both levels.
            slot_table, pad: as in `AnchorSelection.run`.
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
        self.first.run(first, self.first_scores, self.candidates, pad=False)
        self.second.run(second, self.second_scores, lists, slot_table=slot_table, pad=pad)
