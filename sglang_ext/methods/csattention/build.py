"""Builds CSAttention's tables."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.methods.base import IndexBuilder, check_samples
from sglang_ext.methods.csattention.kmeans import cosine_kmeans
from sglang_ext.methods.csattention.lists import centroid_lists
from sglang_ext.methods.csattention.spec import CSAttentionSpec, subspace_channels


class CSAttentionBuilder(IndexBuilder[CSAttentionSpec]):
    """Builds the tables of a layer.

    Arrays: `centroids` [num_kv_heads, m, C, head_dim / m] fp16 of unit length. With codec "paper" `positions`
    [num_kv_heads, m, C, L] int32, ascending and unique within a list; `scores` same shape fp16, centroid . key less
    the list's baseline; `baseline` [num_kv_heads, m, C] fp32. With codec "compact" the fields of `CompactLists` with
    leading dims [num_kv_heads, m, C], `counts` only where offsets are smaller than a bitmap, and `baseline`. With
    weighting "contribution" also `weights` [num_kv_heads, m] fp32.
    """

    @property
    def needs_queries(self) -> bool:
        """For the centroids."""
        return True

    def build_layer(self, keys: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        """See the base; waits for the device once."""
        spec = self.spec
        samples, largest = check_samples(queries, keys, spec.method)
        prefix_len, _, head_dim = keys.shape
        channels = _channel_order(head_dim, spec.num_subspaces, spec.layout, keys.device)
        parts = self._parts(samples)
        centroids = cosine_kmeans(
            parts, spec.num_centroids, iterations=spec.iterations, batch_size=spec.batch_size, seed=spec.seed
        ).half()
        lists = centroid_lists(
            centroids, keys, channels, spec.list_len(prefix_len), spec.baseline == "tail_mean", largest
        )
        arrays = {"centroids": centroids, **spec.tables(prefix_len).encode(lists)}
        if spec.weighting == "contribution":
            length = parts.float().norm(dim=3)
            share = length / length.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            arrays["weights"] = share.mean(dim=2)
        return arrays

    def _parts(self, queries: Tensor) -> Tensor:
        """At most `max_samples` queries by subspace: [..., num_kv_heads, m, num_samples, head_dim / m]."""
        spec = self.spec
        num_samples, head_dim = queries.shape[-2:]
        if num_samples > spec.max_samples:
            generator = torch.Generator().manual_seed(spec.seed)
            kept = torch.randperm(num_samples, generator=generator)[: spec.max_samples]
            queries = queries[..., kept.sort().values.to(queries.device), :]
        channels = _channel_order(head_dim, spec.num_subspaces, spec.layout, queries.device)
        if channels is not None:
            queries = queries[..., channels]
        return queries.view(*queries.shape[:-1], spec.num_subspaces, -1).transpose(-3, -2)


def _channel_order(head_dim: int, num_subspaces: int, layout: str, device: torch.device) -> Tensor | None:
    """Channels in the order of `subspace_channels` [head_dim] int64; None where that is their own order."""
    channels = subspace_channels(head_dim, num_subspaces, layout)
    return None if layout == "contiguous" else channels.flatten().to(device)
