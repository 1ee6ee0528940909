"""CSAttention: query-centric tables per subspace, token scores by sparse accumulation.

Source: CSAttention, 3.2 (build) and 3.3 (search). Two departures, both measured on planted data
(`prefix_kernels.testing`, 8K tokens, m=8, C=64, alpha=0.2, 2% kept, one request; the oracle recalls 0.92
without and 0.89 with RoPE):

*Baseline.* The paper's sum gives a position that a list lacks 0 for that subspace. Where a subspace's partial
scores are mostly negative (queries and keys shifted apart, the very case of the paper's 2.4), a listed
position then scores *below* one that is not listed, and recall collapses. With `baseline="tail_mean"` each
list stores its scores minus the mean score of the positions it lacks: a lacking position then counts as an
average one. Search does not change, since the subtracted constant is the same for all positions. Recall 0.90
instead of 0.07 without RoPE, 0.82 instead of 0.56 with it; `baseline="none"` is the paper's form.

*Weight.* Partial scores are weighted by the query's projection on the centroid (see `csa_scores`): recall
0.83 with RoPE, 0.82 by the sub-query's length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from prefix_kernels.csa_scores import csa_scores
from prefix_kernels.pooling import Pooling, pool_scores
from prefix_kernels.top_k_selection import top_k_selection
from prefix_kernels.types import Selection
from sglang_ext.indexing.base import (
    IndexSpec,
    check_choice,
    check_keys,
    check_range,
    check_samples,
    require_arrays,
    to_half,
)
from sglang_ext.indexing.kmeans import cosine_kmeans

SCORES_PER_CHUNK = 1 << 26
"""Centroid-key scores made at once while building (256 MiB in fp32)."""


@dataclass(frozen=True)
class CSAttentionSpec(IndexSpec):
    """Parameters of the tables.

    Attributes:
        num_subspaces: m; divides head_dim.
        num_centroids: C per subspace.
        list_ratio: alpha; every centroid lists L = ceil(alpha * prefix_len) positions.
        iterations: of k-means, after seeding.
        max_samples: queries per KV head that are clustered; more are thinned out evenly at random by `seed`.
        layout: channels of a subspace. "contiguous": neighbours (the paper); "rope_pairs": channels i and
            i + head_dim / 2, which neox RoPE turns together, stay together; "strided": channel i to subspace
            i mod m.
        baseline: what a position missing in a list counts as: "tail_mean" or "none" (the paper: 0). See the
            module.
        seed: of thinning and k-means.

    Raises:
        ValueError: a value out of range.
    """

    method: ClassVar[str] = "csattention"
    num_subspaces: int = 8
    num_centroids: int = 32
    list_ratio: float = 0.1
    iterations: int = 10
    max_samples: int = 4096
    layout: str = "contiguous"
    baseline: str = "tail_mean"
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("csattention.num_subspaces", self.num_subspaces, 1, 1024)
        check_range("csattention.num_centroids", self.num_centroids, 1, 65536)
        if not 0.0 < self.list_ratio <= 1.0:
            raise ValueError(
                f"expected csattention.list_ratio above 0 and at most 1, got {self.list_ratio}; 0.02 to 0.4 is usual"
            )
        check_range("csattention.iterations", self.iterations, 0, 1000)
        check_range("csattention.max_samples", self.max_samples, 1, 1 << 20)
        check_choice("csattention.layout", self.layout, ("contiguous", "rope_pairs", "strided"))
        check_choice("csattention.baseline", self.baseline, ("tail_mean", "none"))
        check_range("csattention.seed", self.seed, 0, 2**63 - 1)

    def list_len(self, prefix_len: int) -> int:
        """L = ceil(alpha * prefix_len), robust against alpha's binary rounding."""
        return min(prefix_len, max(1, math.ceil(round(self.list_ratio * prefix_len, 6))))


def subspace_channels(head_dim: int, num_subspaces: int, layout: str) -> Tensor:
    """Channels of each subspace: [num_subspaces, head_dim / num_subspaces] int64, together all channels.

    Raises:
        ValueError: the head does not divide into that many subspaces of that layout.
    """
    unit = 2 * num_subspaces if layout == "rope_pairs" else num_subspaces
    if head_dim % unit:
        raise ValueError(
            f"expected head_dim to be a multiple of {unit} for {num_subspaces} subspaces in layout "
            f"{layout}, got head_dim={head_dim}; lower num_subspaces"
        )
    channels = torch.arange(head_dim)
    if layout == "contiguous":
        return channels.view(num_subspaces, -1)
    if layout == "strided":
        return channels.view(-1, num_subspaces).T.contiguous()
    first = channels[: head_dim // 2].view(num_subspaces, -1)
    return torch.cat([first, first + head_dim // 2], dim=1)


@dataclass(frozen=True)
class CSAttentionBuilder:
    """Builds the tables of a layer.

    Arrays: `centroids` [num_kv_heads, m, C, head_dim / m] fp16 of unit length; `positions` [num_kv_heads, m,
    C, L] int32, unique within a list, in no order; `scores` same shape fp16, centroid . key less the list's
    baseline.
    """

    spec: CSAttentionSpec
    needs_queries: ClassVar[bool] = True

    def build_layer(self, keys: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        """See `IndexBuilder.build_layer`."""
        check_keys(keys)
        samples = self._thinned(check_samples(queries, keys, self.spec.method))
        _, num_kv_heads, head_dim = keys.shape
        m, num_centroids = self.spec.num_subspaces, self.spec.num_centroids
        channels = subspace_channels(head_dim, m, self.spec.layout).to(keys.device)
        points = samples.float()[:, :, channels].transpose(1, 2).flatten(0, 1)
        centroids = cosine_kmeans(points, num_centroids, iterations=self.spec.iterations, seed=self.spec.seed).half()
        key_parts = keys.float()[:, :, channels].permute(1, 2, 3, 0).flatten(0, 1)
        positions, scores = self._lists(centroids, key_parts)
        shape = (num_kv_heads, m, num_centroids, -1)
        return {
            "centroids": centroids.view(shape),
            "positions": positions.view(shape),
            "scores": scores.view(shape),
        }

    def _thinned(self, samples: Tensor) -> Tensor:
        if samples.shape[1] <= self.spec.max_samples:
            return samples
        generator = torch.Generator().manual_seed(self.spec.seed)
        kept = torch.randperm(samples.shape[1], generator=generator)[: self.spec.max_samples]
        return samples[:, kept.sort().values.to(samples.device)]

    def _lists(self, centroids: Tensor, key_parts: Tensor) -> tuple[Tensor, Tensor]:
        """Top-L positions and scores of every centroid, in chunks of groups.

        Args:
            centroids: [num_groups, C, subspace_dim]; num_groups = num_kv_heads * m.
            key_parts: [num_groups, subspace_dim, prefix_len] fp32.

        Returns:
            positions [num_groups, C, L] int32 and scores [num_groups, C, L] fp16.
        """
        num_groups, num_centroids, _ = centroids.shape
        prefix_len = key_parts.shape[2]
        list_len = self.spec.list_len(prefix_len)
        positions = torch.empty(num_groups, num_centroids, list_len, dtype=torch.int32, device=centroids.device)
        scores = torch.empty_like(positions, dtype=torch.float16)
        step = max(1, SCORES_PER_CHUNK // (num_centroids * prefix_len))
        for first in range(0, num_groups, step):
            groups = slice(first, first + step)
            partial = torch.bmm(centroids[groups].float(), key_parts[groups])
            top, index = partial.topk(list_len, dim=2, sorted=False)
            if self.spec.baseline == "tail_mean" and list_len < prefix_len:
                tail = (partial.sum(dim=2) - top.sum(dim=2)) / (prefix_len - list_len)
                top = top - tail[:, :, None]
            positions[groups] = index.int()
            scores[groups] = to_half(top, "csattention partial score")
        return positions, scores


@dataclass(frozen=True)
class CSAttentionSelector:
    """Token scores from the tables, pooled after the softmax."""

    spec: CSAttentionSpec

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
        """See `Selector.select`."""
        names = ("centroids", "positions", "scores")
        centroids, positions, scores = require_arrays(arrays, names, self.spec.method)
        list_len = self.spec.list_len(prefix_len)
        expected = (self.spec.num_subspaces, self.spec.num_centroids, list_len)
        if tuple(positions.shape[1:]) != expected:
            raise ValueError(
                "expected lists [num_kv_heads, num_subspaces, num_centroids, list_len] = [*, "
                f"{', '.join(map(str, expected))}] for prefix_len={prefix_len}, got "
                f"{tuple(positions.shape)}; is the index of another prefix or spec?"
            )
        channels = subspace_channels(q.shape[-1], self.spec.num_subspaces, self.spec.layout).to(q.device)
        raw = csa_scores(q, centroids, positions, scores, channels, prefix_len)
        pooled = pool_scores(raw, sm_scale, pooling)
        return top_k_selection(pooled, budget, num_sink, num_recent, 1, prefix_len)
