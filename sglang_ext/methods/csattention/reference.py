"""Selection by CSAttention's tables, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.csa_scores import csa_scores, csa_scores_compact
from sglang_ext.methods.base import Arrays, SelectArgs, Selector, pool_candidates, require_arrays
from sglang_ext.methods.csattention.lists import compact_lists
from sglang_ext.methods.csattention.spec import CSAttentionSpec


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
        channels = torch.arange(q.shape[-1], device=q.device).view(-1, spec.subspace_dim(q.shape[-1]))
        list_len = spec.list_len(prefix_len)
        if spec.codec == "compact":
            lists = compact_lists(arrays)
            raw = csa_scores_compact(q, centroids, lists, list_len, spec.score_bits, channels, prefix_len)
            return pool_candidates(raw, args, candidates)
        positions, scores = require_arrays(arrays, ("positions", "scores"), spec.method)
        if positions.shape[3] != list_len:
            raise ValueError(
                f"expected lists of {list_len} entries for prefix_len={prefix_len}, got {positions.shape[3]}; is the "
                "index of another prefix or spec?"
            )
        raw = csa_scores(q, centroids, positions, scores, channels, prefix_len)
        return pool_candidates(raw, args, candidates)
