"""Builds CSAttention's tables."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.csa_scores import encode_lists
from sglang_ext.methods.base import IndexBuilder, check_samples
from sglang_ext.methods.csattention.kmeans import cosine_kmeans
from sglang_ext.methods.csattention.lists import centroid_lists
from sglang_ext.methods.csattention.spec import CSAttentionSpec


class CSAttentionBuilder(IndexBuilder[CSAttentionSpec]):
    """Builds the tables of a layer.

    Arrays: `centroids` [num_kv_heads, m, C, head_dim / m] fp16 of unit length; the fields of `CompactLists` with
    leading dims [num_kv_heads, m, C], whose scores are centroid . key less the list's baseline; `baseline`
    [num_kv_heads, m, C] fp32, which searches do not read.
    """

    def needs_queries(self, head_dim: int) -> bool:
        """For the centroids."""
        return True

    def build_layer(self, keys: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        """See the base; waits for the device once."""
        spec = self.spec
        samples, largest = check_samples(queries, keys, spec.method)
        centroids = cosine_kmeans(
            self._parts(samples), spec.num_centroids, iterations=spec.iterations, seed=spec.seed
        ).half()
        prefix_len = keys.shape[0]
        lists = centroid_lists(centroids, keys, spec.list_len(prefix_len), spec.baseline == "tail_mean", largest)
        encoded = encode_lists(lists.positions, lists.scores, prefix_len, spec.score_bits)
        return {"centroids": centroids, **encoded._asdict(), "baseline": lists.baseline}

    def _parts(self, queries: Tensor) -> Tensor:
        """At most `max_samples` queries by subspace: [num_kv_heads, m, num_samples, head_dim / m]."""
        spec = self.spec
        num_kv_heads, num_samples, head_dim = queries.shape
        if num_samples > spec.max_samples:
            generator = torch.Generator().manual_seed(spec.seed)
            kept = torch.randperm(num_samples, generator=generator)[: spec.max_samples]
            queries = queries[:, kept.sort().values.to(queries.device)]
        return queries.view(num_kv_heads, -1, spec.num_subspaces, spec.subspace_dim(head_dim)).transpose(1, 2)
