"""Selection by CSAttention's tables, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.csa_scores import csa_scores, csa_scores_compact
from sglang_ext.methods.base import Arrays, SelectArgs, Selector, pool_candidates, require_arrays
from sglang_ext.methods.csattention.lists import compact_lists
from sglang_ext.methods.csattention.spec import CSAttentionSpec, subspace_channels


class CSAttentionSelector(Selector[CSAttentionSpec]):
    """Token scores from the tables, pooled after the softmax."""

    def token_scores(self, arrays: Arrays, q: Tensor, args: SelectArgs, candidates: Tensor | None = None) -> Tensor:
        """See the base: -inf for a position that no fetched list holds."""
        spec, prefix_len = self.spec, args.prefix_len
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
            lists = compact_lists(arrays)
            raw = csa_scores_compact(
                q, centroids, lists, list_len, spec.score_bits, channels, prefix_len, subspace_weights=weights
            )
            return pool_candidates(raw, args, candidates)
        positions, scores = require_arrays(arrays, ("positions", "scores"), spec.method)
        if positions.shape[3] != list_len:
            raise ValueError(
                f"expected lists of {list_len} entries for prefix_len={prefix_len}, got {positions.shape[3]}; is the "
                "index of another prefix or spec?"
            )
        raw = csa_scores(q, centroids, positions, scores, channels, prefix_len, weights)
        return pool_candidates(raw, args, candidates)

    def _weights(self, arrays: Arrays, centroids: Tensor) -> Tensor | None:
        """The w_b of the sum, times |q|; equal ones have the length of a unit query's equal parts."""
        if self.spec.weighting == "projection":
            return None
        if self.spec.weighting == "contribution":
            return require_arrays(arrays, ("weights",), self.spec.method)[0]
        num_kv_heads, m = centroids.shape[:2]
        return torch.full((num_kv_heads, m), m**-0.5, device=centroids.device)
