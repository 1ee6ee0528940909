"""Recipes of two methods: candidates from one and their order from the other, or the best of both.

`two_level` is AsyncTLS's scheme (coarse blocks, then tokens) for any two methods: the first one's index is read for
the whole prefix, the second one's for the candidates only. `union` gives each method half of the budget. Arrays of
the parts are kept under `first.` and `second.`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from prefix_kernels.pooling import Pooling
from prefix_kernels.top_k_selection import top_k_selection
from prefix_kernels.types import Selection
from sglang_ext.methods import preparation
from sglang_ext.methods.ab_sparse import ABSparseSpec
from sglang_ext.methods.base import METHODS, NO_PROFILE, IndexSpec, LayerProfile
from sglang_ext.methods.contents import Form, IndexSize
from sglang_ext.methods.csattention import CSAttentionSpec
from sglang_ext.methods.preparation import Prepared
from sglang_ext.methods.token_index import TokenIndexSpec

PARTS = ("first", "second")

UNSCORED_CANDIDATE = -1e38
"""Score of a candidate that the second level says nothing about: below every score, above all that is no candidate
(`top_k_selection` puts those at -1.7e38 and less)."""


@dataclass(frozen=True)
class CombinedSpec(IndexSpec):
    """Of a method made of two others: their arrays are its own."""

    def forms(self, size: IndexSize) -> dict[str, Form]:
        """See `IndexSpec.forms`."""
        return {f"{name}.{key}": form for name, part in _parts(self) for key, form in part.forms(size).items()}

    def check(self, arrays: Mapping[str, Tensor], size: IndexSize) -> None:
        """See `IndexSpec.check`."""
        for name, part in _parts(self):
            part.check(part_arrays(arrays, name), size)


@dataclass(frozen=True)
class TwoLevelSpec(CombinedSpec):
    """Parameters of the two-level selection.

    Attributes:
        first: method that chooses the candidates.
        second: method that ranks them.
        candidate_ratio: candidates as a fraction of the prefix, at least.
        candidate_factor: candidates per token of the budget, at least.

    Raises:
        ValueError: a value out of range.
    """

    method: ClassVar[str] = "two_level"
    first: IndexSpec = field(default_factory=lambda: CSAttentionSpec(list_ratio=0.02))
    second: IndexSpec = field(default_factory=TokenIndexSpec)
    candidate_ratio: float = 0.25
    candidate_factor: float = 4.0

    def __post_init__(self) -> None:
        if not 0.0 < self.candidate_ratio <= 1.0:
            raise ValueError(
                f"expected two_level.candidate_ratio above 0 and at most 1, got {self.candidate_ratio}; choose one"
            )

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


@dataclass(frozen=True)
class UnionSpec(CombinedSpec):
    """Parameters of the union.

    Attributes:
        first, second: the two methods; each hands in half of the budget.
    """

    method: ClassVar[str] = "union"
    first: IndexSpec = field(default_factory=CSAttentionSpec)
    second: IndexSpec = field(default_factory=ABSparseSpec)


@dataclass(frozen=True)
class CombinedBuilder:
    """Builds both parts. Arrays: those of the parts, named `first.<name>` and `second.<name>`."""

    spec: CombinedSpec
    layer: LayerProfile = NO_PROFILE

    @property
    def needs_queries(self) -> bool:
        """Whether a part needs them."""
        return any(METHODS[part.method].builder(part, self.layer).needs_queries for _, part in _parts(self.spec))

    def prepare(self, queries: Tensor | None) -> Prepared:
        """See `preparation.prepare`: the parts' results under the parts' names, as with the arrays."""
        prepared: Prepared = {}
        for name, part in _parts(self.spec):
            of_part = preparation.prepare(METHODS[part.method].builder(part, self.layer), queries)
            prepared.update({f"{name}.{key}": tensor for key, tensor in of_part.items()})
        return prepared

    def build_layer(
        self, keys: Tensor, queries: Tensor | None, prepared: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """See `IndexBuilder.build_layer` and `preparation.build_layer`."""
        arrays: dict[str, Tensor] = {}
        for name, part in _parts(self.spec):
            builder = METHODS[part.method].builder(part, self.layer)
            built = preparation.build_layer(builder, keys, queries, part_arrays(prepared or {}, name))
            arrays.update({f"{name}.{array}": tensor for array, tensor in built.items()})
        return arrays


@dataclass(frozen=True)
class TwoLevelSelector:
    """The first method's best positions, ranked by the second one's scores among them."""

    spec: TwoLevelSpec

    def select(
        self,
        arrays: Mapping[str, Tensor],
        q: Tensor,
        *,
        prefix_len: int,
        budget: int,
        num_sink: int,
        num_recent: int,
        sm_scale: float,
        pooling: Pooling,
    ) -> Selection:
        """See `Selector.select`. Sink and recent window are candidates."""
        candidates = self._candidates(
            arrays,
            q,
            prefix_len,
            self.spec.num_candidates(prefix_len, budget),
            num_sink,
            num_recent,
            sm_scale,
            pooling,
        )
        scores = self._ranked(arrays, q, prefix_len, sm_scale, pooling, candidates)
        return top_k_selection(scores, budget, num_sink, num_recent, 1, prefix_len)

    def token_scores(
        self,
        arrays: Mapping[str, Tensor],
        q: Tensor,
        *,
        prefix_len: int,
        sm_scale: float,
        pooling: Pooling,
        candidates: Tensor | None = None,
    ) -> Tensor:
        """See `Selector.token_scores`: the second method's scores, -inf outside the first one's candidates."""
        chosen = self._candidates(arrays, q, prefix_len, self.spec.num_candidates(prefix_len), 0, 0, sm_scale, pooling)
        if candidates is not None:
            chosen = chosen & candidates
        return self._ranked(arrays, q, prefix_len, sm_scale, pooling, chosen)

    def _candidates(
        self,
        arrays: Mapping[str, Tensor],
        q: Tensor,
        prefix_len: int,
        count: int,
        num_sink: int,
        num_recent: int,
        sm_scale: float,
        pooling: Pooling,
    ) -> Tensor:
        """bool [num_kv_heads, prefix_len]."""
        chosen = (
            METHODS[self.spec.first.method]
            .selector(self.spec.first)
            .select(
                part_arrays(arrays, "first"),
                q,
                prefix_len=prefix_len,
                budget=count,
                num_sink=num_sink,
                num_recent=num_recent,
                sm_scale=sm_scale,
                pooling=pooling,
            )
        )
        mask = torch.zeros(chosen.num_kv_heads, prefix_len + 1, dtype=torch.bool, device=q.device)
        # Padding (-1) goes to a column of its own.
        index = torch.where(chosen.positions < 0, prefix_len, chosen.positions).long()
        return mask.scatter_(1, index, True)[:, :-1]

    def _ranked(
        self,
        arrays: Mapping[str, Tensor],
        q: Tensor,
        prefix_len: int,
        sm_scale: float,
        pooling: Pooling,
        candidates: Tensor,
    ) -> Tensor:
        scores = (
            METHODS[self.spec.second.method]
            .selector(self.spec.second)
            .token_scores(
                part_arrays(arrays, "second"),
                q,
                prefix_len=prefix_len,
                sm_scale=sm_scale,
                pooling=pooling,
                candidates=candidates,
            )
        )
        unscored = candidates & (scores == -torch.inf)
        return scores.masked_fill(unscored, UNSCORED_CANDIDATE)


@dataclass(frozen=True)
class UnionSelector:
    """The best positions of both methods, in turns, until the budget is full.

    A position that both name takes one place, so each method hands in half of the budget or more, equally deep.
    """

    spec: UnionSpec

    def select(
        self,
        arrays: Mapping[str, Tensor],
        q: Tensor,
        *,
        prefix_len: int,
        budget: int,
        num_sink: int,
        num_recent: int,
        sm_scale: float,
        pooling: Pooling,
    ) -> Selection:
        """See `Selector.select`. Positions of the windows are not counted as a method's."""
        windows = torch.arange(prefix_len, device=q.device)
        free = (windows >= num_sink) & (windows < prefix_len - num_recent)
        turns = self._turns(arrays, q, prefix_len, sm_scale, pooling, None, free)
        return top_k_selection(turns, budget, num_sink, num_recent, 1, prefix_len)

    def token_scores(
        self,
        arrays: Mapping[str, Tensor],
        q: Tensor,
        *,
        prefix_len: int,
        sm_scale: float,
        pooling: Pooling,
        candidates: Tensor | None = None,
    ) -> Tensor:
        """The turn at which a position comes, negated, instead of a probability; -inf where neither method has it."""
        return self._turns(arrays, q, prefix_len, sm_scale, pooling, candidates, None)

    def _turns(
        self,
        arrays: Mapping[str, Tensor],
        q: Tensor,
        prefix_len: int,
        sm_scale: float,
        pooling: Pooling,
        candidates: Tensor | None,
        free: Tensor | None,
    ) -> Tensor:
        best: Tensor | None = None
        for turn, (name, part) in enumerate(_parts(self.spec)):
            scores = (
                METHODS[part.method]
                .selector(part)
                .token_scores(
                    part_arrays(arrays, name),
                    q,
                    prefix_len=prefix_len,
                    sm_scale=sm_scale,
                    pooling=pooling,
                    candidates=candidates,
                )
            )
            if free is not None:
                scores = scores.masked_fill(~free, -torch.inf)
            order = scores.argsort(dim=1, descending=True, stable=True)
            rank = torch.empty_like(scores)
            place = torch.arange(prefix_len, device=q.device, dtype=scores.dtype)
            rank.scatter_(1, order, (-2.0 * place - turn).expand_as(scores))
            rank = rank.masked_fill(scores == -torch.inf, -torch.inf)
            best = rank if best is None else torch.maximum(best, rank)
        assert best is not None
        return best


def part_arrays(arrays: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """The arrays of one part under their own names."""
    prefix = f"{part}."
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _parts(spec: CombinedSpec) -> tuple[tuple[str, IndexSpec], ...]:
    return tuple((name, getattr(spec, name)) for name in PARTS)
