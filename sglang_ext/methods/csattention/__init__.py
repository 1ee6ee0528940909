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
for m=8, C=64, alpha=0.035, each at 12.4% to 12.9% of the KV bytes; the planted data agree. alpha=0.078 keeps the tables
below 13% from 4,096 tokens on.
"""

from __future__ import annotations

import dataclasses
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
from sglang_ext.methods.base import (
    NO_PROFILE,
    IndexSpec,
    LayerProfile,
    check_choice,
    check_range,
    pool_candidates,
    require_arrays,
)
from sglang_ext.methods.contents import Form, IndexSize
from sglang_ext.methods.csattention.codec import (
    CODECS,
    SCORE_BITS,
    check_tables,
    compact_lists,
    encode_tables,
    entries_bytes_per_token,
    table_bytes,
    table_forms,
)
from sglang_ext.methods.csattention.inputs import check_layer, check_layers
from sglang_ext.methods.csattention.kmeans import cosine_kmeans
from sglang_ext.methods.csattention.lists import centroid_lists
from sglang_ext.methods.preparation import Prepared

_UNIT = 1.01
"""Bound of what has unit length, or is a share of it, rounded to fp16."""


@dataclass(frozen=True)
class CSAttentionSpec(IndexSpec):
    """Parameters of the tables.

    Attributes:
        num_subspaces: m; divides head_dim.
        num_centroids: C per subspace.
        list_ratio: alpha; every centroid lists L = ceil(alpha * prefix_len) positions.
        list_entries: L itself, whatever the prefix's length; 0 for that by list_ratio. See `fixed`.
        iterations: of k-means, after seeding.
        batch_size: queries of a k-means iteration; 0 for all.
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
    list_ratio: float = 0.078
    list_entries: int = 0
    iterations: int = 5
    batch_size: int = 0
    max_samples: int = 1024
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
        check_range("csattention.list_entries", self.list_entries, 0, 2**31 - 1)
        check_range("csattention.iterations", self.iterations, 0, 1000)
        check_range("csattention.batch_size", self.batch_size, 0, 1 << 20)
        check_range("csattention.max_samples", self.max_samples, 1, 1 << 20)
        check_choice("csattention.layout", self.layout, ("contiguous", "rope_pairs", "strided"))
        check_choice("csattention.baseline", self.baseline, ("tail_mean", "none"))
        check_choice("csattention.weighting", self.weighting, ("projection", "contribution", "uniform"))
        check_choice("csattention.codec", self.codec, CODECS)
        if self.score_bits not in SCORE_BITS:
            raise ValueError(f"expected csattention.score_bits to be 4 or 8, got {self.score_bits}; choose one of them")
        check_range("csattention.seed", self.seed, 0, 2**63 - 1)

    def list_len(self, prefix_len: int) -> int:
        """L = ceil(alpha * prefix_len), robust against alpha's binary rounding; or list_entries."""
        entries = self.list_entries or math.ceil(round(self.list_ratio * prefix_len, 6))
        return min(prefix_len, max(1, entries))

    def fixed(self, prefix_len: int) -> CSAttentionSpec:
        """The same for an index that is built at `prefix_len` and then grows: its lists keep their length."""
        return dataclasses.replace(self, list_entries=self.list_len(prefix_len))

    def index_bytes(self, head_dim: int, prefix_len: int) -> int:
        """Bytes of one KV head's lists and centroids."""
        m, c, length = self.num_subspaces, self.num_centroids, self.list_len(prefix_len)
        return table_bytes(m, c, length, prefix_len, head_dim, self.codec, self.score_bits)

    def forms(self, size: IndexSize) -> dict[str, Form]:
        """See `IndexSpec.forms`."""
        lead, n = (self.num_subspaces, self.num_centroids), size.prefix_len
        forms = {
            "centroids": Form("float16", (*lead, size.head_dim // self.num_subspaces), -_UNIT, _UNIT),
            **table_forms(lead, self.list_len(n), n, self.codec, self.score_bits),
        }
        if self.weighting == "contribution":
            forms["weights"] = Form("float32", (self.num_subspaces,), 0.0, _UNIT)
        return forms

    def check(self, arrays: Mapping[str, Tensor], size: IndexSize) -> None:
        """See `IndexSpec.check`."""
        n = size.prefix_len
        check_tables(arrays, self.list_len(n), n, self.codec)


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


def channel_order(head_dim: int, num_subspaces: int, layout: str, device: torch.device) -> Tensor | None:
    """Channels in the order of `subspace_channels` [head_dim] int64; None where that is their own order.

    Raises:
        ValueError: as `subspace_channels`.
    """
    channels = subspace_channels(head_dim, num_subspaces, layout)
    return None if layout == "contiguous" else channels.flatten().to(device)


@dataclass(frozen=True)
class CSAttentionBuilder:
    """Builds the tables of a layer.

    Arrays: `centroids` [num_kv_heads, m, C, head_dim / m] fp16 of unit length. With codec "paper" `positions`
    [num_kv_heads, m, C, L] int32, ascending and unique within a list; `scores` same shape fp16, centroid . key less
    the list's baseline; `baseline` [num_kv_heads, m, C] fp32. With codec "compact" the fields of `CompactLists` with
    leading dims [num_kv_heads, m, C], `counts` only where offsets are smaller than a bitmap, and `baseline`. With
    weighting "contribution" also `weights` [num_kv_heads, m] fp32.
    """

    spec: CSAttentionSpec
    layer: LayerProfile = NO_PROFILE
    needs_queries: ClassVar[bool] = True

    def prepare(self, queries: Tensor | None) -> Prepared:
        """Centroids of all layers in one go, see `preparation.prepare`.

        Returns:
            `centroids` [num_layers, num_kv_heads, m, C, head_dim / m] fp16; nothing without queries.
        """
        if queries is None:
            return {}
        check_layers(queries)
        return {"centroids": self._clustered(queries)}

    def build_layer(
        self, keys: Tensor, queries: Tensor | None, prepared: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """See `IndexBuilder.build_layer` and `preparation.build_layer`; waits for the device once."""
        spec = self.spec
        samples, largest = check_layer(keys, queries, spec.method)
        prefix_len, num_kv_heads, head_dim = keys.shape
        shape = (num_kv_heads, spec.num_subspaces, spec.num_centroids, head_dim // spec.num_subspaces)
        channels = channel_order(head_dim, spec.num_subspaces, spec.layout, keys.device)
        if prepared is None:
            centroids = self._clustered(samples)
        else:
            centroids = require_arrays(prepared, ("centroids",), spec.method)[0].to(keys.device)
        if tuple(centroids.shape) != shape:
            raise ValueError(
                f"expected prepared centroids {shape}, got {tuple(centroids.shape)}; are they of this spec?"
            )
        lists = centroid_lists(
            centroids, keys, channels, spec.list_len(prefix_len), spec.baseline == "tail_mean", largest
        )
        arrays = {"centroids": centroids, **encode_tables(lists, prefix_len, spec.codec, spec.score_bits)}
        if spec.weighting == "contribution":
            length = self._parts(samples).float().norm(dim=3)
            share = length / length.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            arrays["weights"] = share.mean(dim=2)
        return arrays

    def _clustered(self, queries: Tensor) -> Tensor:
        """[..., num_kv_heads, num_samples, head_dim] -> [..., num_kv_heads, m, C, head_dim / m] fp16."""
        spec = self.spec
        points = self._parts(queries)
        return cosine_kmeans(
            points, spec.num_centroids, iterations=spec.iterations, batch_size=spec.batch_size, seed=spec.seed
        ).half()

    def _parts(self, queries: Tensor) -> Tensor:
        """At most `max_samples` queries by subspace: [..., num_kv_heads, m, num_samples, head_dim / m]."""
        spec = self.spec
        num_samples, head_dim = queries.shape[-2:]
        if num_samples > spec.max_samples:
            generator = torch.Generator().manual_seed(spec.seed)
            kept = torch.randperm(num_samples, generator=generator)[: spec.max_samples]
            queries = queries[..., kept.sort().values.to(queries.device), :]
        channels = channel_order(head_dim, spec.num_subspaces, spec.layout, queries.device)
        if channels is not None:
            queries = queries[..., channels]
        return queries.view(*queries.shape[:-1], spec.num_subspaces, -1).transpose(-3, -2)


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
