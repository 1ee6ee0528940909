"""Public block scores: validation and dispatch."""

from __future__ import annotations

from torch import Tensor

from prefix_kernels._tile import check_queries
from prefix_kernels.block_scores.reference import (
    block_scores_ball_reference,
    block_scores_mean_reference,
    block_scores_minmax_reference,
)
from prefix_kernels.dispatch import resolve

_MEAN = {"reference": block_scores_mean_reference}
_MINMAX = {"reference": block_scores_minmax_reference}
_BALL = {"reference": block_scores_ball_reference}


def block_scores_mean(q: Tensor, centroids: Tensor, *, implementation: str = "reference") -> Tensor:
    """Inner product of every query row with every block centroid. Source: AB-Sparse, 2.2.

    Args:
        q: [num_rows, num_qo_heads, head_dim] post-RoPE queries, fp32, fp16 or bf16.
        centroids: [num_kv_heads, num_blocks, head_dim] mean key of each block, any floating dtype.
        implementation: "reference".

    Returns:
        [num_kv_heads, num_rows, gqa, num_blocks] fp32, before sm_scale and softmax (see
        `pooling.pool_scores`).

    Raises:
        ValueError: shapes do not fit, or an unknown implementation.
    """
    run = resolve("block_scores_mean", implementation, _MEAN)
    _check(q, centroids, "centroids")
    return run(q, centroids)


def block_scores_minmax(
    q: Tensor, block_min: Tensor, block_max: Tensor, *, implementation: str = "reference"
) -> Tensor:
    """Upper bound of q.k over every block: sum_c max(q_c * min_c, q_c * max_c).

    Source: Quest (2406.10774), 3.2.

    Args:
        q: [num_rows, num_qo_heads, head_dim] post-RoPE queries, fp32, fp16 or bf16.
        block_min: [num_kv_heads, num_blocks, head_dim] minimum of each channel over the block's keys.
        block_max: same shape, the maximum.
        implementation: "reference".

    Returns:
        [num_kv_heads, num_rows, gqa, num_blocks] fp32, before sm_scale and softmax.

    Raises:
        ValueError: shapes do not fit, or an unknown implementation.
    """
    run = resolve("block_scores_minmax", implementation, _MINMAX)
    _check(q, block_min, "block_min")
    if block_max.shape != block_min.shape:
        raise ValueError(
            f"expected block_max of block_min's shape {tuple(block_min.shape)}, got {tuple(block_max.shape)}"
        )
    return run(q, block_min, block_max)


def block_scores_ball(q: Tensor, centers: Tensor, radii: Tensor, *, implementation: str = "reference") -> Tensor:
    """Upper bound of q.k over every block whose keys lie in a ball: q . center + |q| * radius.

    Source: ArkVale (the sphere among its bounding volumes; AB-Sparse, 4.1, uses it as a block representation). The
    bound is Cauchy's: q.k = q.c + q.(k - c) <= q.c + |q| |k - c|.

    Args:
        q: [num_rows, num_qo_heads, head_dim] post-RoPE queries, fp32, fp16 or bf16.
        centers: [num_kv_heads, num_blocks, head_dim], any floating dtype.
        radii: [num_kv_heads, num_blocks] floating, greatest distance of a key of the block from its center.
        implementation: "reference".

    Returns:
        [num_kv_heads, num_rows, gqa, num_blocks] fp32, before sm_scale and softmax.

    Raises:
        ValueError: shapes do not fit, or an unknown implementation.
    """
    run = resolve("block_scores_ball", implementation, _BALL)
    _check(q, centers, "centers")
    if radii.shape != centers.shape[:2] or not radii.dtype.is_floating_point:
        raise ValueError(
            f"expected radii [num_kv_heads, num_blocks] = {tuple(centers.shape[:2])} in a floating dtype, got "
            f"{tuple(radii.shape)} {radii.dtype}"
        )
    return run(q, centers, radii)


def _check(q: Tensor, blocks: Tensor, name: str) -> None:
    if blocks.dim() != 3 or not blocks.dtype.is_floating_point:
        raise ValueError(
            f"expected {name} [num_kv_heads, num_blocks, head_dim] in a floating dtype (dequantized), got "
            f"{tuple(blocks.shape)} {blocks.dtype}"
        )
    check_queries(q, blocks.shape[0], blocks.shape[2])
