"""Selection by the token index, in plain torch: the reference of `decode_op`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from prefix_kernels.block_scores import block_scores_mean
from prefix_kernels.low_bit import LowBitTensor, dequantize
from sglang_ext.methods.base import Arrays, SelectArgs, Selector, pool_candidates
from sglang_ext.methods.channels import queries_on
from sglang_ext.methods.token_index.build import ARRAYS
from sglang_ext.methods.token_index.spec import TokenIndexSpec


@dataclass(frozen=True)
class TokenIndexSelector(Selector[TokenIndexSpec]):
    """Token scores q.k over the kept channels, pooled after the softmax.

    Attributes:
        sum_every: how few tokens, or candidates, enter the sums of that softmax, see `pooling.pool_scores`.
    """

    sum_every: int = 1

    def token_scores(self, arrays: Arrays, q: Tensor, args: SelectArgs, candidates: Tensor | None = None) -> Tensor:
        channels, *parts = (arrays[name] for name in ARRAYS)
        raw = block_scores_mean(queries_on(channels, q), dequantize(LowBitTensor(*parts)))
        return pool_candidates(raw, args, candidates, self.sum_every)
