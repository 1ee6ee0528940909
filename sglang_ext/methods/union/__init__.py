"""Union: the best of two methods, each with half of the budget or more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from prefix_kernels.types import Selection
from sglang_ext.methods.ab_sparse import ABSparseSpec
from sglang_ext.methods.base import Arrays, IndexSpec, SelectArgs, Selector, make_selector
from sglang_ext.methods.combined import CombinedSpec, part_arrays
from sglang_ext.methods.csattention import CSAttentionSpec


@dataclass(frozen=True)
class UnionSpec(CombinedSpec):
    """Parameters of the union.

    Attributes:
        first, second: the two methods; each hands in half of the budget.
    """

    method: ClassVar[str] = "union"
    first: IndexSpec = field(default_factory=CSAttentionSpec)
    second: IndexSpec = field(default_factory=ABSparseSpec)


class UnionSelector(Selector[UnionSpec]):
    """The best positions of both methods, in turns, until the budget is full.

    A position that both name takes one place, so each method hands in half of the budget or more, equally deep.
    """

    def select(self, arrays: Arrays, q: Tensor, args: SelectArgs) -> Selection:
        """See the base. Positions of the windows are not counted as a method's."""
        token = torch.arange(args.prefix_len, device=q.device)
        free = (token >= args.num_sink) & (token < args.prefix_len - args.num_recent)
        return args.top_k(self._turns(arrays, q, args, None, free))

    def token_scores(self, arrays: Arrays, q: Tensor, args: SelectArgs, candidates: Tensor | None = None) -> Tensor:
        """The turn at which a position comes, negated, instead of a probability; -inf where neither method has it."""
        return self._turns(arrays, q, args, candidates, None)

    def _turns(
        self,
        arrays: Arrays,
        q: Tensor,
        args: SelectArgs,
        candidates: Tensor | None,
        free: Tensor | None,
    ) -> Tensor:
        ranks = []
        for turn, (name, part) in enumerate(self.spec.nested.items()):
            scores = make_selector(part).token_scores(part_arrays(arrays, name), q, args, candidates)
            if free is not None:
                scores = scores.masked_fill(~free, -torch.inf)
            order = scores.argsort(dim=1, descending=True, stable=True)
            place = torch.arange(args.prefix_len, device=q.device, dtype=scores.dtype)
            rank = torch.empty_like(scores).scatter_(1, order, (-2.0 * place - turn).expand_as(scores))
            ranks.append(rank.masked_fill(scores == -torch.inf, -torch.inf))
        return torch.maximum(*ranks)
