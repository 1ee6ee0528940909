"""Union: the best of two methods, each with half of the budget or more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from prefix_kernels.top_k_selection import log_ranks, rank_by_keys
from prefix_kernels.types import Selection
from sglang_ext.methods.ab_sparse import ABSparseSpec
from sglang_ext.methods.base import Arrays, IndexSpec, SelectArgs, Selector, make_selector
from sglang_ext.methods.combined import CombinedSpec, part_arrays
from sglang_ext.methods.csattention import CSAttentionSpec


@dataclass(frozen=True)
class UnionSpec(CombinedSpec):
    """Parameters of the union.

    Attributes:
        first, second: the two methods; each hands in half of the budget or more.
    """

    method: ClassVar[str] = "union"
    first: IndexSpec = field(default_factory=CSAttentionSpec)
    second: IndexSpec = field(default_factory=ABSparseSpec)


class UnionSelector(Selector[UnionSpec]):
    """The best positions of both methods, from lists that are equally deep, until the budget is full.

    A position that both name takes one place, so each method hands in half of the budget or more.
    """

    def select(self, arrays: Arrays, q: Tensor, args: SelectArgs) -> Selection:
        """See the base. Positions of the windows are not counted as a method's."""
        token = torch.arange(args.prefix_len, device=q.device)
        free = (token >= args.num_sink) & (token < args.prefix_len - args.num_recent)
        return args.top_k(rank_by_keys(self._depths(arrays, q, args, None, free)))

    def token_scores(self, arrays: Arrays, q: Tensor, args: SelectArgs, candidates: Tensor | None = None) -> Tensor:
        """Minus the log of the depth at which a position comes, in place of a probability (`log_ranks`)."""
        return self._depths(arrays, q, args, candidates, None)

    def _depths(
        self, arrays: Arrays, q: Tensor, args: SelectArgs, candidates: Tensor | None, free: Tensor | None
    ) -> Tensor:
        of_parts = [
            log_ranks(make_selector(part).token_scores(part_arrays(arrays, name), q, args, candidates), free)
            for name, part in self.spec.nested.items()
        ]
        return torch.maximum(*of_parts)
