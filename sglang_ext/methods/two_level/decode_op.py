"""`SelectOp` of two levels: the first method's lists are the second one's candidates."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from prefix_kernels.types import (
    ALIGNED,
    CandidateForm,
    SelectedLists,
    SelectionGroup,
    list_stride,
    new_lists,
    pack_lists,
)
from sglang_ext.decode.select_op import AheadOp, OpContext, Selecting, graph_op, selection_group
from sglang_ext.decode.types import Index
from sglang_ext.methods.combined_op import CombinedOp, PartIndex
from sglang_ext.methods.score_pack import ScorePack
from sglang_ext.methods.scored_op import ScoredOp
from sglang_ext.methods.token_index import TokenIndexSpec
from sglang_ext.methods.token_index.decode_op import TokenIndexOp
from sglang_ext.methods.two_level import TwoLevelSpec

CANDIDATE_BYTES = 256 << 20
"""Of the candidates of all layers that are named a step ahead, at most."""


class TwoLevelOp(CombinedOp, AheadOp):
    """Selects candidates as the first method does, then among them by a token index.

    Candidates of each layer that are named a step ahead lie in lists of its own (`ListSizes.ahead`).

    Raises:
        ValueError: the second method is another one, the first has no operation for decode graphs, or none that names
            candidates ahead; or there is no room for these.
    """

    ends_in_lists = True

    def __init__(self, spec: TwoLevelSpec, context: OpContext) -> None:
        sizes, device = context.sizes, context.device
        if not isinstance(spec.second, TokenIndexSpec):
            raise ValueError(
                f"expected token_index as two_level.second in decode graphs, got {spec.second.method}; name it"
            )
        self._spec, self._heads = spec, context.shape.num_kv_heads
        # Each step asks for all of its groups.
        windows = functools.partial(selection_group, context.config)
        self._first_level = functools.lru_cache(1 << 10)(lambda *of: spec.first_level(windows(*of)))
        # Of each prefix no more candidates than tokens.
        each = spec.entry_tokens
        entries = self._heads * (-(-sizes.room // each) + sizes.max_groups * list_stride(1))
        if sizes.ahead:
            longest = self._first_levels([sizes.max_prefix_len], [context.config.budget(sizes.max_prefix_len)])[0].count
            entries = _entries_of_a_layer(entries, len(sizes.ahead), self._heads * list_stride(longest))
        of_first = replace(sizes, list_entries=entries, entry_tokens=each)
        self._first = graph_op(spec.first, replace(context, sizes=of_first))
        self._second = TokenIndexOp(spec.second, context, CandidateForm.LISTED, each)
        self._entries, count = entries, max(1, len(sizes.ahead))
        self._pack: ScorePack | None = None
        self._lists = new_lists(count * entries, (count * sizes.max_groups, self._heads), device, with_slots=False)
        parts = zip(*(of.view(count, -1) for of in (self._lists.positions, self._lists.counts)), strict=True)
        of_layers = [SelectedLists(positions, counts.view(-1, self._heads), None) for positions, counts in parts]
        self._of_layer: dict[int | None, SelectedLists] = dict(zip(sizes.ahead, of_layers, strict=False))
        self._of_all = of_layers[0]
        if sizes.ahead:
            if not isinstance(self._first, ScoredOp):
                raise ValueError(
                    "expected two_level.first in decode graphs with select_ahead as ab_sparse or token_index, got "
                    f"{spec.first.method}; name one of these, or set select_ahead to false"
                )
            self._pack = ScorePack(self._first, context, entries)
        super().__init__(self._first, self._second)

    def plan(self, step: Selecting, indexes: Sequence[Index]) -> None:
        (first, second), (of_first, of_second) = self._levels(step), self.parts(indexes)
        self._first.plan(first, of_first)
        self._second.plan(second, of_second, listed=first.groups)
        if self._pack is not None:
            self._pack.plan(first, of_first)

    def plan_probe(self, step: Selecting) -> None:
        first, second = self._levels(step)
        self._first.plan_probe(first)
        lengths = [group.prefix_len for group in step.groups]
        self._second.plan_probe(second, listed=first.groups, lengths=lengths)
        if self._pack is not None:
            self._pack.plan_probe(first)

    def plan_ahead(self, step: Selecting, indexes: Sequence[Index]) -> None:
        assert self._pack is not None
        own = [cast(Index, PartIndex(index, "first")) for index in indexes]
        for part in own:
            self._first.number_of(part)
        self._pack.plan(step._replace(groups=self.first_groups(step.groups)), own)

    def first_groups(self, groups: Sequence[SelectionGroup]) -> list[SelectionGroup]:
        return pack_lists([self._spec.first_level(group) for group in groups], self._heads)

    def named_ahead(self) -> list[Tensor]:
        return [self._lists.positions]

    def _levels(self, step: Selecting) -> tuple[Selecting, Selecting]:
        """What each level selects."""
        first = self.first_groups(step.groups)
        return step._replace(groups=first), step._replace(groups=self._second_groups(step.groups, first))

    def _second_groups(self, groups: Sequence[SelectionGroup], first: Sequence[SelectionGroup]) -> list[SelectionGroup]:
        """Windows are candidates, and so as many at either end of their list."""
        counts = [self._spec.tokens_of(of, group.prefix_len) for of, group in zip(first, groups, strict=True)]
        return [replace(group, prefix_len=count) for group, count in zip(groups, counts, strict=True)]

    def run(
        self,
        size: int,
        q: Tensor,
        sm_scale: float,
        slot_table: Tensor | None,
        layer: int | None,
        lists: SelectedLists,
    ) -> None:
        self._first.run(size, q, sm_scale, None, layer, self._of_layer.get(layer, self._of_all))
        self.run_behind(size, q, sm_scale, slot_table, layer, lists)

    def run_behind(
        self,
        size: int,
        q: Tensor,
        sm_scale: float,
        slot_table: Tensor | None,
        layer: int | None,
        lists: SelectedLists,
    ) -> None:
        self._second.candidates = self._of_layer.get(layer, self._of_all).positions
        self._second.run(size, q, sm_scale, slot_table, layer, lists)

    def look_ahead(self, size: int, queries: Sequence[Tensor], sm_scale: float) -> None:
        assert self._pack is not None
        self._pack.run(size, queries, sm_scale, self._lists)

    def candidates_of(self, groups: Sequence[SelectionGroup]) -> list[Tensor]:
        """int32 positions [num_kv_heads, candidates] of each group of the plan: what `run` or `run_behind` read."""
        assert self._second.candidates is not None
        first = self.first_groups(groups)
        second = self._second_groups(groups, first)
        named = [group.lists_in(self._second.candidates, self._heads) for group in first]
        each = torch.arange(self._spec.entry_tokens, dtype=torch.int32, device=self._second.candidates.device)
        tokens = [(of[..., None] * len(each) + each).flatten(1) for of in named]
        return [of[:, : group.prefix_len] for of, group in zip(tokens, second, strict=True)]

    def fits(self, lengths: Sequence[int], budgets: Sequence[int]) -> bool:
        entries = self._heads * sum(list_stride(group.count) for group in self._first_levels(lengths, budgets))
        ahead = self._pack is None or (entries <= self._entries and self._pack.fits(lengths))
        return ahead and super().fits(lengths, budgets)

    def tile(self, size: int) -> Hashable:
        """See the base; queries of several layers lie as many apart as a batch has."""
        return super().tile(size) if self._pack is None else (super().tile(size), size)

    def _first_levels(self, lengths: Sequence[int], budgets: Sequence[int]) -> list[SelectionGroup]:
        """What is named of each prefix, windows included: of entries they may be in more than a budget fills."""
        return [self._first_level(*of) for of in zip(lengths, budgets, strict=True)]

    @property
    def nbytes(self) -> int:
        own = self._lists.positions.nbytes + self._lists.counts.nbytes
        pack = 0 if self._pack is None else self._pack.nbytes
        return self._first.nbytes + self._second.nbytes + pack + own


def _entries_of_a_layer(wanted: int, num_layers: int, least: int) -> int:
    """Entries of a layer's lists: as many as wanted, or what `CANDIDATE_BYTES` hold.

    Raises:
        ValueError: fewer than the longest prefix takes.
    """
    entries = min(wanted, CANDIDATE_BYTES // (4 * num_layers) // ALIGNED * ALIGNED)
    if entries < least:
        raise ValueError(
            f"expected candidates of one prefix and {num_layers} layers in {CANDIDATE_BYTES} bytes, got "
            f"{4 * num_layers * least}; set select_ahead to false, or lower two_level.candidate_ratio, "
            "--context-length or the number of anchor layers"
        )
    return entries
