"""Raw scores of blocks and of tokens in torch, by their representations."""

from __future__ import annotations

from torch import Tensor

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
