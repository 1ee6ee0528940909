"""References of the pooled scores: scores of every row, then `pool_scores`."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from prefix_kernels.block_scores import block_scores_mean, block_scores_minmax
from prefix_kernels.low_bit import LowBitTensor, dequantize
from prefix_kernels.pooling import Pooling, pool_scores


def token_scores_reference(
    q: Tensor, keys: LowBitTensor, channels: Tensor | None, sm_scale: float, pooling: Pooling
) -> Tensor:
    """s[r, i] = sum over kept channels c of q[r, c] * dequantized key[i, c]; softmax over i, then pooling over r."""
    if channels is not None:
        num_rows, num_qo_heads, head_dim = q.shape
        num_kv_heads, kept = channels.shape
        grouped = q.view(num_rows, num_kv_heads, -1, head_dim)
        index = channels.long()[None, :, None].expand(num_rows, -1, grouped.shape[2], -1)
        q = grouped.gather(3, index).reshape(num_rows, num_qo_heads, kept)
    return pool_scores(block_scores_mean(q, dequantize(keys)), sm_scale, pooling)


def exact_scores_reference(q: Tensor, k_cache: Tensor, slots: Tensor, sm_scale: float, pooling: Pooling) -> Tensor:
    """s[r, i] = q[r] . k[slots[i]]; then softmax over i, then pooling over r (Kascade, 3.4)."""
    return pool_scores(block_scores_mean(q, k_cache[slots.long()].transpose(0, 1)), sm_scale, pooling)


def block_scores_reference(
    q: Tensor, parts: tuple[LowBitTensor, ...], row_indptr: Tensor, sm_scale: float, pooling: Pooling
) -> Tensor:
    """Per KV head the blocks of its own rows: mean (one part) or bound (maximum and minimum); softmax over blocks."""
    num_kv_heads = row_indptr.shape[0] - 1
    gqa = q.shape[1] // num_kv_heads
    bounds = list(itertools.pairwise(row_indptr.tolist()))
    most = max(end - begin for begin, end in bounds)
    scores = torch.full((num_kv_heads, most), -torch.inf, device=q.device)
    for head, (begin, end) in enumerate(bounds):
        own = q[:, head * gqa : (head + 1) * gqa]
        blocks = [
            dequantize(LowBitTensor(part.packed[None, begin:end], part.scale[head, None], part.zero[head, None]))
            for part in parts
        ]
        raw = block_scores_mean(own, *blocks) if len(blocks) == 1 else block_scores_minmax(own, blocks[1], blocks[0])
        scores[head, : end - begin] = pool_scores(raw, sm_scale, pooling)[0]
    return scores
