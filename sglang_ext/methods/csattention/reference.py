"""Selection by CSAttention's tables, in plain torch: the reference of `decode_op`."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.csa_scores import csa_scores, csa_scores_compact
from sglang_ext.methods.base import Arrays, SelectArgs, Selector, pool_candidates
from sglang_ext.methods.csattention.lists import compact_lists
from sglang_ext.methods.csattention.spec import CSAttentionSpec


class CSAttentionSelector(Selector[CSAttentionSpec]):
    """Token scores from the tables, pooled after the softmax."""

    def token_scores(self, arrays: Arrays, q: Tensor, args: SelectArgs, candidates: Tensor | None = None) -> Tensor:
        """See the base: -inf for a position that no fetched list holds."""
        spec, prefix_len, centroids = self.spec, args.prefix_len, arrays["centroids"]
        channels = torch.arange(q.shape[-1], device=q.device).view(-1, spec.subspace_dim(q.shape[-1]))
        if spec.codec == "compact":
            lists = compact_lists(arrays)
            list_len = spec.list_len(prefix_len)
            raw = csa_scores_compact(q, centroids, lists, list_len, spec.score_bits, channels, prefix_len)
        else:
            raw = csa_scores(q, centroids, arrays["positions"], arrays["scores"], channels, prefix_len)
        return pool_candidates(raw, args, candidates)
