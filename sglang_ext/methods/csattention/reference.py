"""Selection by CSAttention's tables, in plain torch: the reference of `decode_op`."""

from __future__ import annotations

from torch import Tensor

from prefix_kernels.csa_scores import CompactLists, csa_scores_compact
from sglang_ext.methods.base import Arrays, SelectArgs, Selector, pool_candidates
from sglang_ext.methods.csattention.spec import CSAttentionSpec


class CSAttentionSelector(Selector[CSAttentionSpec]):
    """Token scores from the tables, pooled after the softmax."""

    def token_scores(self, arrays: Arrays, q: Tensor, args: SelectArgs, candidates: Tensor | None = None) -> Tensor:
        """See the base: -inf for a position that no fetched list holds."""
        spec, prefix_len = self.spec, args.prefix_len
        lists = CompactLists(*(arrays[name] for name in CompactLists._fields))
        list_len = spec.list_len(prefix_len)
        raw = csa_scores_compact(q, arrays["centroids"], lists, list_len, spec.score_bits, prefix_len)
        return pool_candidates(raw, args, candidates)
