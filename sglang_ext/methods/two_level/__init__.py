"""Two levels: candidates from one method and their order from another.

AsyncTLS's scheme (coarse blocks, then tokens) for any two methods: the first one's index is read for the whole prefix,
the second one's for the candidates only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from prefix_kernels.top_k_selection import rank_by_keys
from prefix_kernels.types import Selection, SelectionGroup
from sglang_ext.methods.ab_sparse import ABSparseSpec
from sglang_ext.methods.base import (
    METHODS,
    Arrays,
    IndexSpec,
    LeveledSelector,
    SelectArgs,
    Selector,
    check_share,
    make_selector,
)
from sglang_ext.methods.combined import CombinedSpec, part_arrays
from sglang_ext.methods.token_index import TokenIndexSpec

UNSCORED_CANDIDATE = -1e38
"""Score of a candidate that the second level says nothing about: its key is the lowest, that of no candidate none."""


@dataclass(frozen=True)
class TwoLevelSpec(CombinedSpec):
    """Parameters of the two-level selection.

    Attributes:
        first: method that chooses the candidates; blocks by their mean keys keep more answers than CSAttention's
            lists, in less time (docs/selection.md).
        second: method that ranks them.
        candidate_ratio: candidates as a fraction of the prefix, at least.
        candidate_factor: candidates per token of the budget, at least.

    Raises:
        ValueError: a value out of range.
    """

    method: ClassVar[str] = "two_level"
    first: IndexSpec = field(default_factory=ABSparseSpec)
    second: IndexSpec = field(default_factory=TokenIndexSpec)
    candidate_ratio: float = 0.25
    candidate_factor: float = 4.0

    def __post_init__(self) -> None:
        check_share("two_level.candidate_ratio", self.candidate_ratio)
        if not 1.0 <= self.candidate_factor <= 1e6:
            raise ValueError(
                f"expected two_level.candidate_factor of at least 1, got {self.candidate_factor}; the budget is chosen "
                "among the candidates"
            )

    def num_candidates(self, prefix_len: int, budget: int = 0) -> int:
        """The greater of candidate_ratio * prefix_len and candidate_factor * budget, rounded up; at most the prefix.

        Robust against the ratios' binary rounding.
        """
        wanted = max(self.candidate_ratio * prefix_len, self.candidate_factor * budget)
        return min(prefix_len, max(1, math.ceil(round(wanted, 6))))

    @property
    def entry_tokens(self) -> int:
        """Tokens of an entry of the candidates' lists: those that the first level cannot tell apart."""
        return self.first.scored_together

    def first_level(self, group: SelectionGroup) -> SelectionGroup:
        """What the first level selects, in entries of so many tokens: a group's `num_candidates`, windows included.

        An entry is named whole. The last one, which may be short of tokens, is always named then.
        """
        each, length = self.entry_tokens, group.prefix_len
        entries = -(-length // each)
        recent = max(group.num_recent, 1) if length % each else group.num_recent
        windows = -(-group.num_sink // each), entries - max(length - recent, 0) // each
        candidates = self.num_candidates(length, group.budget) + -length % each  # what the last one lacks
        wanted = max(sum(windows), -(-candidates // each))
        return replace(
            group, prefix_len=entries, budget=max(1, min(entries, wanted)), num_sink=windows[0], num_recent=windows[1]
        )

    def tokens_of(self, first: SelectionGroup, prefix_len: int) -> int:
        """How many tokens of a prefix the first level names, by what `first_level` tells."""
        return first.count * self.entry_tokens - (-prefix_len % self.entry_tokens)


@dataclass(frozen=True)
class TwoLevelSelector(LeveledSelector[TwoLevelSpec]):
    """The first method's best positions, ranked by the second one's scores among them.

    Attributes:
        sum_every: of a level that can take it: how few of its candidates enter the sums, see `pooling.pool_scores`.
    """

    sum_every: int = 1

    def select_among(self, arrays: Arrays, q: Tensor, args: SelectArgs, candidates: Tensor) -> Selection:
        return args.top_k(rank_by_keys(self._ranked(arrays, q, args, candidates)))

    def token_scores(self, arrays: Arrays, q: Tensor, args: SelectArgs, candidates: Tensor | None = None) -> Tensor:
        """See the base: the second method's scores, -inf outside the first one's candidates."""
        chosen = self.candidates(arrays, q, replace(args, budget=1, num_sink=0, num_recent=0))
        return self._ranked(arrays, q, args, chosen if candidates is None else chosen & candidates)

    def _level(self, spec: IndexSpec) -> Selector[IndexSpec]:
        return make_selector(spec, self.sum_every if METHODS[spec.method].samples_sums else 1)

    def candidates(self, arrays: Arrays, q: Tensor, args: SelectArgs) -> Tensor:
        """See the base: what the first method selects."""
        group = self.spec.first_level(SelectionGroup(args.prefix_len, args.budget, args.num_sink, args.num_recent))
        level, own, each = self._level(self.spec.first), part_arrays(arrays, "first"), self.spec.entry_tokens
        args = replace(args, budget=group.budget, num_sink=group.num_sink, num_recent=group.num_recent)
        if each == 1:
            chosen = level.select(own, q, args)
        else:
            chosen = args.top_k(rank_by_keys(level.entry_scores(own, q, args, each)))
        mask = torch.zeros(chosen.num_kv_heads, group.prefix_len + 1, dtype=torch.bool, device=q.device)
        # Padding (-1) goes to a column of its own.
        index = torch.where(chosen.positions < 0, group.prefix_len, chosen.positions).long()
        named = mask.scatter_(1, index, True)[:, :-1]
        return named.repeat_interleave(each, dim=1)[:, : args.prefix_len]

    def _ranked(self, arrays: Arrays, q: Tensor, args: SelectArgs, candidates: Tensor) -> Tensor:
        """[num_kv_heads, prefix_len] fp32: the second method's scores of the candidates."""
        second = self._level(self.spec.second)
        scores = second.token_scores(part_arrays(arrays, "second"), q, args, candidates)
        return scores.masked_fill(candidates & (scores == -torch.inf), UNSCORED_CANDIDATE)
