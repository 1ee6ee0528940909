"""Scores of blocks and of tokens in torch: raw ones of representations, and pooled ones as `PooledScores` has them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from prefix_kernels.low_bit import LowBitTensor, dequantize
from prefix_kernels.pooling import Pooling, pool_scores

ELEMENTS_PER_CHUNK = 1 << 24
"""Upper bound, in elements, of the largest temporary a reference makes (64 MiB in fp32)."""


def block_scores_mean(q: Tensor, centroids: Tensor) -> Tensor:
    """Inner product of every query row with every block's centroid. Source: AB-Sparse, 2.2.

    score[h, r, g, j] = q[r, h * gqa + g] . centroid[h, j], one matmul per KV head.

    Args:
        q: [num_rows, num_qo_heads, head_dim] post-RoPE queries, fp32, fp16 or bf16.
        centroids: [num_kv_heads, num_blocks, head_dim] mean key of each block, any floating dtype.

    Returns:
        [num_kv_heads, num_rows, gqa, num_blocks] fp32, before sm_scale and softmax (see `pooling.pool_scores`).

    Raises:
        ValueError: shapes do not fit.
    """
    _check(q, centroids, "centroids")
    return _by_row(to_tile(q, centroids.shape[0]) @ centroids.float().transpose(1, 2), q)


def block_scores_minmax(q: Tensor, block_min: Tensor, block_max: Tensor) -> Tensor:
    """Upper bound of q.k over every block: sum_c max(q_c * min_c, q_c * max_c). Source: Quest (2406.10774), 3.2.

    Two matmuls: for each channel the larger product is q * max where q >= 0, and q * min otherwise.

    Args:
        q: as in `block_scores_mean`.
        block_min: [num_kv_heads, num_blocks, head_dim] minimum of each channel over the block's keys.
        block_max: same shape, the maximum.

    Returns:
        As `block_scores_mean`.

    Raises:
        ValueError: shapes do not fit.
    """
    _check(q, block_min, "block_min")
    if block_max.shape != block_min.shape:
        raise ValueError(
            f"expected block_max of block_min's shape {tuple(block_min.shape)}, got {tuple(block_max.shape)}"
        )
    tile = to_tile(q, block_min.shape[0])
    scores = tile.clamp_min(0.0) @ block_max.float().transpose(1, 2)
    scores += tile.clamp_max(0.0) @ block_min.float().transpose(1, 2)
    return _by_row(scores, q)


def block_scores_ball(q: Tensor, centers: Tensor, radii: Tensor) -> Tensor:
    """Upper bound of q.k over every block whose keys lie in a ball: q . center + |q| * radius.

    Source: ArkVale (the sphere among its bounding volumes; AB-Sparse, 4.1, uses it as a block representation). The
    bound is Cauchy's: q.k = q.c + q.(k - c) <= q.c + |q| |k - c|.

    Args:
        q: as in `block_scores_mean`.
        centers: [num_kv_heads, num_blocks, head_dim], any floating dtype.
        radii: [num_kv_heads, num_blocks] floating, greatest distance of a key of the block from its center.

    Returns:
        As `block_scores_mean`.

    Raises:
        ValueError: shapes do not fit.
    """
    _check(q, centers, "centers")
    if radii.shape != centers.shape[:2] or not radii.dtype.is_floating_point:
        raise ValueError(
            f"expected radii [num_kv_heads, num_blocks] = {tuple(centers.shape[:2])} in a floating dtype, got "
            f"{tuple(radii.shape)} {radii.dtype}"
        )
    lengths = to_tile(q, centers.shape[0]).norm(dim=2).view(centers.shape[0], q.shape[0], -1, 1)
    return block_scores_mean(q, centers).add_(lengths * radii.float()[:, None, None])


def token_scores(
    q: Tensor, keys: LowBitTensor, channels: Tensor | None, sm_scale: float, pooling: Pooling = Pooling.MAX
) -> Tensor:
    """Pooled share of attention of every token of a prefix, by its low-bit key. Source: AsyncTLS, token selection.

    s[r, i] = sum over kept channels c of q[r, c] * dequantized key[i, c]; softmax over i, then pooling over r.

    Args:
        q: [num_rows, num_qo_heads, head_dim] post-RoPE queries, fp32, fp16 or bf16; num_rows >= 1.
        keys: of `quantize`, [num_kv_heads, prefix_len, num_channels]; prefix_len >= 1.
        channels: [num_kv_heads, num_channels] integer, the channels that the codes keep; None for all of them.
        sm_scale: multiplies q.k before the softmax.
        pooling: over the rows and query heads, after the softmax.

    Returns:
        [num_kv_heads, prefix_len] fp32, natural log of the largest or mean share.

    Raises:
        ValueError: shapes do not fit.
    """
    if channels is not None:
        num_rows, num_qo_heads, head_dim = q.shape
        num_kv_heads, kept = channels.shape
        check_queries(q, num_kv_heads, head_dim)
        grouped = q.view(num_rows, num_kv_heads, -1, head_dim)
        index = channels.long()[None, :, None].expand(num_rows, -1, grouped.shape[2], -1)
        q = grouped.gather(3, index).reshape(num_rows, num_qo_heads, kept)
    return pool_scores(block_scores_mean(q, dequantize(keys)), sm_scale, pooling)


def exact_scores(q: Tensor, k_cache: Tensor, slots: Tensor, sm_scale: float, pooling: Pooling = Pooling.MAX) -> Tensor:
    """As `token_scores`, by keys in the pool: an anchor layer's pass. Source: Kascade, 3.4.

    Args:
        q, sm_scale, pooling: as in `token_scores`.
        k_cache: [num_slots, num_kv_heads, head_dim]; only listed slots are read.
        slots: [prefix_len] integer, prefix position -> token slot; prefix_len >= 1.
    """
    return pool_scores(block_scores_mean(q, k_cache[slots.long()].transpose(0, 1)), sm_scale, pooling)


def low_bit_block_scores(
    q: Tensor, parts: tuple[LowBitTensor, ...], row_indptr: Tensor, sm_scale: float, pooling: Pooling = Pooling.MAX
) -> Tensor:
    """Pooled share of attention of every block, from its codes, heads of different length without padding.

    Source: AB-Sparse, 3.4 (kernel 1: fused dequantization and scoring over a ragged layout). The kernel's bound of two
    parts takes the maximum for positive and the minimum for negative channels of a query: where quantization let them
    cross, it is lower than Quest's by less than a step.

    Args:
        q, sm_scale, pooling: as in `token_scores`.
        parts: one for mean keys, or the maximum and the minimum of each channel, in this order: packed [num_rows,
            head_dim * bits / 8] uint8, the blocks of all heads one after the other; scale and zero [num_kv_heads,
            head_dim] fp32.
        row_indptr: [num_kv_heads + 1] integer, where each head's blocks begin, from 0 to at most num_rows; each has one
            block or more.

    Returns:
        [num_kv_heads, most blocks of a head] fp32, natural log; -inf behind a head's own blocks.
    """
    gqa = q.shape[1] // (row_indptr.shape[0] - 1)
    bounds = list(itertools.pairwise(row_indptr.tolist()))
    most = max(end - begin for begin, end in bounds)
    scores = torch.full((len(bounds), most), -torch.inf, device=q.device)
    for head, (begin, end) in enumerate(bounds):
        own = q[:, head * gqa : (head + 1) * gqa]
        blocks = [
            dequantize(LowBitTensor(part.packed[None, begin:end], part.scale[head, None], part.zero[head, None]))
            for part in parts
        ]
        raw = block_scores_mean(own, *blocks) if len(blocks) == 1 else block_scores_minmax(own, blocks[1], blocks[0])
        scores[head, : end - begin] = pool_scores(raw, sm_scale, pooling)[0]
    return scores


def check_queries(q: Tensor, num_kv_heads: int, head_dim: int) -> None:
    """Raise ValueError unless `q` is [num_rows, num_qo_heads, head_dim], with whole groups of heads per KV head."""
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] == 0 or q.shape[1] % num_kv_heads:
        raise ValueError(
            f"expected q [num_rows, num_qo_heads, head_dim={head_dim}] with num_qo_heads a multiple of "
            f"num_kv_heads={num_kv_heads}, got {tuple(q.shape)}"
        )
    if not q.dtype.is_floating_point:
        raise ValueError(f"expected q in a floating dtype, got {q.dtype}")


def to_tile(q: Tensor, num_kv_heads: int) -> Tensor:
    """[num_rows, num_qo_heads, head_dim] -> fp32 [num_kv_heads, num_rows * gqa, head_dim]."""
    num_rows, num_qo_heads, head_dim = q.shape
    gqa = num_qo_heads // num_kv_heads
    tile = q.float().view(num_rows, num_kv_heads, gqa, head_dim).transpose(0, 1)
    return tile.reshape(num_kv_heads, num_rows * gqa, head_dim)


def _by_row(scores: Tensor, q: Tensor) -> Tensor:
    """[num_kv_heads, num_rows * gqa, num_blocks] -> [num_kv_heads, num_rows, gqa, num_blocks]."""
    return scores.view(scores.shape[0], q.shape[0], q.shape[1] // scores.shape[0], scores.shape[2])


def _check(q: Tensor, blocks: Tensor, name: str) -> None:
    if blocks.dim() != 3 or not blocks.dtype.is_floating_point:
        raise ValueError(
            f"expected {name} [num_kv_heads, num_blocks, head_dim] in a floating dtype (dequantized), got "
            f"{tuple(blocks.shape)} {blocks.dtype}"
        )
    check_queries(q, blocks.shape[0], blocks.shape[2])
