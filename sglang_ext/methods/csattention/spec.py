"""Parameters and arrays of CSAttention.

Source: CSAttention, 3.2 (build) and 3.3 (search). Two departures, both measured on planted data
(`tests/planted.py`, 8K tokens, m=8, C=64, alpha=0.2, 2% kept, one request; the oracle recalls 0.92
without and 0.89 with RoPE):

*Baseline.* The paper's sum gives a position that a list lacks 0 for that subspace. Where a subspace's partial
scores are mostly negative (queries and keys shifted apart, the very case of the paper's 2.4), a listed
position then scores *below* one that is not listed, and recall collapses. With `baseline="tail_mean"` each
list stores its scores minus the mean score of the positions it lacks: a lacking position then counts as an
average one. Search does not change, since the subtracted constant is the same for all positions. Recall 0.90
instead of 0.07 without RoPE, 0.82 instead of 0.56 with it; `baseline="none"` is the paper's form.

*Weight.* Partial scores are weighted by the query's projection on the centroid (see `csa_scores_compact`), not by the
paper's w_b = 1: recall 0.83 with RoPE, 0.82 by the sub-query's length.

*Lists* are kept in a compact form (`prefix_kernels.csa_scores.compact`): of N positions a list of alpha * N takes
alpha * N * (1 + bits / 8) + N / 128 bytes, and 8 of its own, where the paper's (B.1) takes 6 an entry. Bytes are
nearly proportional to m * C * alpha. At equal bytes many subspaces and long lists beat many centroids: on the shipped
model (head_dim 64, 8K tokens, 5% kept, two tasks, oracle 0.80) recall is 0.716 for m=16, C=16, alpha=0.08, 0.704 for
m=16, C=32, alpha=0.035 and 0.686 for m=8, C=64, alpha=0.035, each at 12.4% to 12.9% of the KV bytes; the planted data
agree. alpha=0.078 keeps the tables below 13% from 4,096 tokens on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from prefix_kernels.csa_scores import BLOCK_POSITIONS, check_entries
from sglang_ext.methods.arrays import LARGEST, ContentError, Form, IndexSize
from sglang_ext.methods.base import Arrays, IndexSpec, check_choice, check_range, check_share

_UNIT = 1.01
"""Bound of what has unit length, rounded to fp16."""


@dataclass(frozen=True)
class CSAttentionSpec(IndexSpec):
    """Parameters of the tables.

    Attributes:
        num_subspaces: m; divides head_dim.
        num_centroids: C per subspace.
        list_ratio: alpha; every centroid lists L = ceil(alpha * prefix_len) positions.
        iterations: of k-means, after seeding.
        max_samples: queries per KV head that are clustered; more are thinned out evenly at random by `seed`.
        baseline: what a position missing in a list counts as: "tail_mean" or "none" (the paper: 0). See the
            module.
        score_bits: of a list's scores, 4 or 8.
        seed: of thinning and k-means.

    Raises:
        ValueError: a value out of range.
    """

    method: ClassVar[str] = "csattention"
    num_subspaces: int = 16
    num_centroids: int = 16
    list_ratio: float = 0.078
    iterations: int = 5
    max_samples: int = 1024
    baseline: str = "tail_mean"
    score_bits: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("csattention.num_subspaces", self.num_subspaces, 1, 1024)
        check_range("csattention.num_centroids", self.num_centroids, 1, 65536)
        check_share("csattention.list_ratio", self.list_ratio, "0.02 to 0.4 is usual")
        check_range("csattention.iterations", self.iterations, 0, 1000)
        check_range("csattention.max_samples", self.max_samples, 1, 1 << 20)
        check_choice("csattention.baseline", self.baseline, ("tail_mean", "none"))
        check_choice("csattention.score_bits", self.score_bits, (4, 8))
        check_range("csattention.seed", self.seed, 0, 2**63 - 1)

    def list_len(self, prefix_len: int) -> int:
        """L = ceil(alpha * prefix_len), robust against alpha's binary rounding."""
        return min(prefix_len, max(1, math.ceil(round(self.list_ratio * prefix_len, 6))))

    def subspace_dim(self, head_dim: int) -> int:
        """Channels of a subspace, neighbours each. Raises ValueError where the head does not divide into them."""
        if head_dim % self.num_subspaces:
            raise ValueError(
                f"expected head_dim to be a multiple of csattention.num_subspaces={self.num_subspaces}, got "
                f"{head_dim}; lower num_subspaces"
            )
        return head_dim // self.num_subspaces

    def forms(self, size: IndexSize) -> dict[str, Form]:
        lead, list_len = (self.num_subspaces, self.num_centroids), self.list_len(size.prefix_len)
        return {
            "centroids": Form("float16", (*lead, size.head_dim // self.num_subspaces), -_UNIT, _UNIT),
            "places": Form("uint8", (*lead, list_len)),
            "counts": Form("int16", (*lead, -(-size.prefix_len // BLOCK_POSITIONS)), 0, BLOCK_POSITIONS),
            "codes": Form("uint8", (*lead, -(-list_len * self.score_bits // 8))),
            "scale": Form("float16", lead, 0.0, LARGEST),
            "zero": Form("float16", lead, -LARGEST, LARGEST),
            "baseline": Form("float32", lead, -LARGEST, LARGEST),
        }

    def check(self, arrays: Arrays, size: IndexSize) -> None:
        list_len = self.list_len(size.prefix_len)
        try:
            check_entries(arrays["places"], arrays["counts"], list_len, size.prefix_len)
        except ValueError as error:
            raise ContentError("lists", f"{list_len} ascending positions in each", error) from None
