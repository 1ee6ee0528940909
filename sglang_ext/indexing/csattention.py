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
0.83 with RoPE, 0.82 by the sub-query's length. `weighting="uniform"` is the paper's w_b = 1.

Lists are kept in a compact codec by default (`csa_codec`), whose bytes are nearly proportional to m * C * alpha. At
equal bytes many subspaces and long lists beat many centroids: on the shipped model (head_dim 64, 8K tokens, 5%
kept, two tasks, oracle 0.80) recall is 0.716 for m=16, C=16, alpha=0.08, 0.704 for m=16, C=32, alpha=0.035 and 0.686
for m=8, C=64, alpha=0.035, each at 12.4% to 12.9% of the KV bytes; the planted data agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from prefix_kernels.csa_scores import csa_scores, csa_scores_compact
from prefix_kernels.pooling import Pooling
from prefix_kernels.top_k_selection import top_k_selection
from prefix_kernels.types import Selection
from sglang_ext.indexing.base import (
    NO_PROFILE,
    IndexSpec,
    LayerProfile,
    check_choice,
    check_keys,
    check_range,
    check_samples,
    pool_candidates,
    require_arrays,
    to_half,
)
from sglang_ext.indexing.csa_codec import (
    CODECS,
    SCORE_BITS,
    compact_lists,
    encode_tables,
    entries_bytes_per_token,
    table_bytes,
)
from sglang_ext.indexing.kmeans import cosine_kmeans
from sglang_ext.indexing.top_lists import top_lists

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
        weighting: of the subspaces in the sum. "projection": length of the query's projection on the nearest
            centroid; "contribution": |q| times the mean share |q_b| / |q| that the subspace has in the prefix's
            queries (the fixed weights by importance that the paper's 2.3 and 3.3 (3) suggest); "uniform": equal
            weights (the paper's best settings).
        codec: "compact" or "paper", see `csa_codec`.
        score_bits: of the compact codec's scores, 4 or 8.
        seed: of thinning and k-means.

    Raises:
        ValueError: a value out of range.
    """

    method: ClassVar[str] = "csattention"
    num_subspaces: int = 16
    num_centroids: int = 16
    list_ratio: float = 0.08
    iterations: int = 10
    max_samples: int = 4096
    layout: str = "contiguous"
    baseline: str = "tail_mean"
    weighting: str = "projection"
    codec: str = "compact"
    score_bits: int = 4
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
        check_choice("csattention.weighting", self.weighting, ("projection", "contribution", "uniform"))
        check_choice("csattention.codec", self.codec, CODECS)
        if self.score_bits not in SCORE_BITS:
            raise ValueError(f"expected csattention.score_bits to be 4 or 8, got {self.score_bits}; choose one of them")
        check_range("csattention.seed", self.seed, 0, 2**63 - 1)

    def list_len(self, prefix_len: int) -> int:
        """L = ceil(alpha * prefix_len), robust against alpha's binary rounding."""
        return min(prefix_len, max(1, math.ceil(round(self.list_ratio * prefix_len, 6))))

    def index_bytes(self, head_dim: int, prefix_len: int) -> int:
        """Bytes of one KV head's lists and centroids."""
        m, c, length = self.num_subspaces, self.num_centroids, self.list_len(prefix_len)
        return table_bytes(m, c, length, prefix_len, head_dim, self.codec, self.score_bits)


def bytes_per_token(spec: CSAttentionSpec, head_dim: int, prefix_len: int | None = None) -> float:
    """Bytes of the tables per token and KV head; the bf16 KV itself has 2 * head_dim * 2.

    Args:
        spec: parameters.
        head_dim: channels of a key.
        prefix_len: tokens over which centroids, scales and roundings are spread; None for the limit of long prefixes.
    """
    if prefix_len is not None:
        return spec.index_bytes(head_dim, prefix_len) / prefix_len
    entries = entries_bytes_per_token(spec.list_ratio, spec.codec, spec.score_bits)
    return spec.num_subspaces * spec.num_centroids * entries


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

    Arrays: `centroids` [num_kv_heads, m, C, head_dim / m] fp16 of unit length. With codec "paper" `positions`
    [num_kv_heads, m, C, L] int32, ascending and unique within a list; `scores` same shape fp16, centroid . key less
    the list's baseline; `baseline` [num_kv_heads, m, C] fp32. With codec "compact" the fields of `CompactLists` with
    leading dims [num_kv_heads, m, C], `counts` only where offsets are smaller than a bitmap. With weighting
    "contribution" also `weights` [num_kv_heads, m] fp32.
    """

    spec: CSAttentionSpec
    layer: LayerProfile = NO_PROFILE
    needs_queries: ClassVar[bool] = True

    def build_layer(self, keys: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        """See `IndexBuilder.build_layer`."""
        check_keys(keys)
        spec = self.spec
        samples = self._thinned(check_samples(queries, keys, spec.method))
        prefix_len, num_kv_heads, head_dim = keys.shape
        m, num_centroids = spec.num_subspaces, spec.num_centroids
        channels = subspace_channels(head_dim, m, spec.layout).to(keys.device)
        parts = samples.float()[:, :, channels].transpose(1, 2)
        centroids = cosine_kmeans(parts.flatten(0, 1), num_centroids, iterations=spec.iterations, seed=spec.seed).half()
        key_parts = keys.float()[:, :, channels].permute(1, 2, 3, 0).flatten(0, 1)
        positions, scores, baseline = self._lists(centroids, key_parts)
        shape = (num_kv_heads, m, num_centroids)
        arrays = {"centroids": centroids.view(*shape, -1)}
        lists = (positions.view(*shape, -1), scores.view(*shape, -1))
        arrays.update(encode_tables(*lists, prefix_len, spec.codec, spec.score_bits))
        if spec.codec == "paper":
            arrays["baseline"] = baseline.view(shape)
        if spec.weighting == "contribution":
            length = parts.norm(dim=3)
            share = length / length.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            arrays["weights"] = share.mean(dim=2)
        return arrays

    def _thinned(self, samples: Tensor) -> Tensor:
        if samples.shape[1] <= self.spec.max_samples:
            return samples
        generator = torch.Generator().manual_seed(self.spec.seed)
        kept = torch.randperm(samples.shape[1], generator=generator)[: self.spec.max_samples]
        return samples[:, kept.sort().values.to(samples.device)]

    def _lists(self, centroids: Tensor, key_parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Top-L positions and scores of every centroid, in chunks of groups.

        Args:
            centroids: [num_groups, C, subspace_dim]; num_groups = num_kv_heads * m.
            key_parts: [num_groups, subspace_dim, prefix_len] fp32.

        Returns:
            positions [num_groups, C, L] int32, scores [num_groups, C, L] fp16, baseline [num_groups, C] fp32.
        """
        num_groups, num_centroids, _ = centroids.shape
        prefix_len = key_parts.shape[2]
        list_len = self.spec.list_len(prefix_len)
        positions = torch.empty(num_groups, num_centroids, list_len, dtype=torch.int32, device=centroids.device)
        scores = torch.empty_like(positions, dtype=torch.float16)
        baseline = torch.zeros(num_groups, num_centroids, device=centroids.device)
        step = max(1, SCORES_PER_CHUNK // (num_centroids * prefix_len))
        for first in range(0, num_groups, step):
            groups = slice(first, first + step)
            partial = torch.bmm(centroids[groups].float(), key_parts[groups])
            positions[groups], top = top_lists(partial, list_len)
            if self.spec.baseline == "tail_mean" and list_len < prefix_len:
                baseline[groups] = (partial.sum(dim=2) - top.sum(dim=2)) / (prefix_len - list_len)
            scores[groups] = to_half(top - baseline[groups, :, None], "csattention partial score")
        return positions, scores, baseline


def insert_keys(
    spec: CSAttentionSpec, arrays: Mapping[str, Tensor], new_keys: Tensor, first_position: int
) -> dict[str, Tensor]:
    """Lists of the same length after new keys were tried in each: every one that exceeds the minimum replaces it.

    Source: CSAttention, 3.3 (5). Centroids and baselines stay those of the build, so with `baseline="tail_mean"` a
    list's baseline is the mean of the positions that it lacked then. Inserting keys at once is inserting them one by
    one; of equal scores the earlier position stays.

    Args:
        spec: of the index; codec "paper".
        arrays: of one layer, as built or as an earlier call returned them. Not written.
        new_keys: [num_new, num_kv_heads, head_dim] post-RoPE keys at positions first_position and on.
        first_position: one more than the last position that the lists could hold.

    Returns:
        Arrays as in `arrays`; those that change are new.

    Raises:
        ValueError: another codec, an array is missing, or the keys do not fit.
    """
    if spec.codec != "paper":
        raise ValueError(
            f"expected csattention.codec paper for streaming insert, got {spec.codec}; a compact list has no room to "
            "change in place, build with codec paper"
        )
    names = ("centroids", "positions", "scores", "baseline")
    centroids, positions, scores, baseline = require_arrays(arrays, names, spec.method)
    check_keys(new_keys)
    num_kv_heads, m, _, subspace_dim = centroids.shape
    if tuple(new_keys.shape[1:]) != (num_kv_heads, m * subspace_dim):
        raise ValueError(
            f"expected new keys [num_new, num_kv_heads={num_kv_heads}, head_dim={m * subspace_dim}], got "
            f"{tuple(new_keys.shape)}"
        )
    channels = subspace_channels(m * subspace_dim, m, spec.layout).to(new_keys.device)
    key_parts = new_keys.float()[:, :, channels].permute(1, 2, 3, 0)
    partial = torch.matmul(centroids.float(), key_parts) - baseline[..., None]
    fresh = to_half(partial, "csattention partial score")
    number = torch.arange(first_position, first_position + new_keys.shape[0], device=positions.device)
    all_positions = torch.cat([positions, number.int().expand(*positions.shape[:3], -1)], dim=3)
    kept, best = top_lists(torch.cat([scores, fresh], dim=3), positions.shape[3])
    return {**arrays, "positions": all_positions.gather(3, kept.long()), "scores": best}


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
        scores = self.token_scores(arrays, q, prefix_len=prefix_len, sm_scale=sm_scale, pooling=pooling)
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
        """See `Selector.token_scores`: -inf for a position that no fetched list holds."""
        spec = self.spec
        (centroids,) = require_arrays(arrays, ("centroids",), spec.method)
        if tuple(centroids.shape[1:3]) != (spec.num_subspaces, spec.num_centroids):
            raise ValueError(
                "expected centroids [num_kv_heads, num_subspaces, num_centroids, subspace_dim] = [*, "
                f"{spec.num_subspaces}, {spec.num_centroids}, *], got {tuple(centroids.shape)}; is the index of "
                "another spec?"
            )
        channels = subspace_channels(q.shape[-1], spec.num_subspaces, spec.layout).to(q.device)
        list_len = spec.list_len(prefix_len)
        weights = self._weights(arrays, centroids)
        if spec.codec == "compact":
            lists = compact_lists(arrays, spec.method)
            raw = csa_scores_compact(
                q, centroids, lists, list_len, spec.score_bits, channels, prefix_len, subspace_weights=weights
            )
            return pool_candidates(raw, sm_scale, pooling, candidates)
        positions, scores = require_arrays(arrays, ("positions", "scores"), spec.method)
        if positions.shape[3] != list_len:
            raise ValueError(
                f"expected lists of {list_len} entries for prefix_len={prefix_len}, got {positions.shape[3]}; is the "
                "index of another prefix or spec?"
            )
        raw = csa_scores(q, centroids, positions, scores, channels, prefix_len, weights)
        return pool_candidates(raw, sm_scale, pooling, candidates)

    def _weights(self, arrays: Mapping[str, Tensor], centroids: Tensor) -> Tensor | None:
        """The w_b of the sum, times |q|; equal ones have the length of a unit query's equal parts."""
        if self.spec.weighting == "projection":
            return None
        if self.spec.weighting == "contribution":
            return require_arrays(arrays, ("weights",), self.spec.method)[0]
        num_kv_heads, m = centroids.shape[:2]
        return torch.full((num_kv_heads, m), m**-0.5, device=centroids.device)
