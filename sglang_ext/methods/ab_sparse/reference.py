"""Selection by block scores, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.block_scores import block_scores_ball, block_scores_mean, block_scores_minmax
from prefix_kernels.low_bit import LowBitTensor, dequantize
from prefix_kernels.pooling import pool_scores
from sglang_ext.methods.ab_sparse.spec import BLOCK_SIZES, CHANNELWISE, ABSparseSpec
from sglang_ext.methods.arrays import RAGGED, ROW_INDPTR, is_ragged
from sglang_ext.methods.base import Arrays, SelectArgs, Selector, pool_candidates
from sglang_ext.methods.channels import CHANNELS, queries_on


class ABSparseSelector(Selector[ABSparseSpec]):
    """Scores blocks, pools after the softmax over blocks. The best blocks' tokens fill the budget; the last is cut."""

    def token_scores(self, arrays: Arrays, q: Tensor, args: SelectArgs, candidates: Tensor | None = None) -> Tensor:
        """See the base. Without candidates the softmax is over blocks. No array's values are read on the host."""
        raw, block = self._blocks(arrays, q, args.prefix_len)
        if candidates is None:
            return pool_scores(raw, args.sm_scale, args.pooling).gather(1, block)
        return pool_candidates(_spread(raw, block), args, candidates)

    def entry_scores(self, arrays: Arrays, q: Tensor, args: SelectArgs, each: int) -> Tensor:
        """See the base. Of means the softmax is over entries: a block counts as often as it has some."""
        if self.spec.representation != "mean":
            return super().entry_scores(arrays, q, args, each)
        raw, block = self._blocks(arrays, q, args.prefix_len)
        return pool_scores(_spread(raw, block[:, ::each]), args.sm_scale, args.pooling)

    def _blocks(self, arrays: Arrays, q: Tensor, prefix_len: int) -> tuple[Tensor, Tensor]:
        """Raw scores [num_kv_heads, num_rows, gqa, most blocks], and [num_kv_heads, prefix_len] which block a token is
        of. With sizes per head a head of fewer blocks has -inf in the rest.
        """
        token = torch.arange(prefix_len, device=q.device)
        if self.spec.sizes == "uniform":
            raw = self._score(q, arrays)
            return raw, (token // self.spec.block_size).expand(raw.shape[0], -1)
        sizes, indptr = arrays["block_sizes"].long(), arrays[ROW_INDPTR].long()
        block = torch.arange(-(-prefix_len // min(BLOCK_SIZES)), device=q.device)
        exists = block < (prefix_len + sizes[:, None] - 1) // sizes[:, None]
        rows = torch.where(exists, indptr[:-1, None] + block, 0)
        padded = {name: array for name, array in arrays.items() if name.endswith(CHANNELWISE)}
        padded |= {name.removeprefix(RAGGED): array[rows] for name, array in arrays.items() if is_ragged(name)}
        return self._score(q, padded).masked_fill(~exists[:, None, None], -torch.inf), token // sizes[:, None]

    def _score(self, q: Tensor, arrays: Arrays) -> Tensor:
        if CHANNELS in arrays:
            q = queries_on(arrays[CHANNELS], q)
        parts = [self._read(arrays, part) for part in self.spec.parts]
        if self.spec.representation == "ball":
            return block_scores_ball(q, parts[0], arrays["radius"])
        if self.spec.representation == "minmax":
            return block_scores_minmax(q, parts[0], parts[1])
        return block_scores_mean(q, parts[0])

    def _read(self, arrays: Arrays, part: str) -> Tensor:
        if self.spec.quantization == "none":
            return arrays[part]
        return dequantize(LowBitTensor(*(arrays[f"{part}_{name}"] for name in LowBitTensor._fields)))


def _spread(raw: Tensor, block: Tensor) -> Tensor:
    """[num_kv_heads, num_rows, gqa, n]: of blocks [num_kv_heads, n]."""
    return raw.gather(3, block[:, None, None].expand(-1, *raw.shape[1:3], -1))
