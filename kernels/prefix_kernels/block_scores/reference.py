"""References of the block scores."""

from __future__ import annotations

from torch import Tensor

from prefix_kernels._tile import to_tile


def block_scores_mean_reference(q: Tensor, centroids: Tensor) -> Tensor:
    """score[h, r, g, j] = q[r, h * gqa + g] . centroid[h, j], one matmul per KV head, in fp32."""
    scores = to_tile(q, centroids.shape[0]) @ centroids.float().transpose(1, 2)
    num_kv_heads, num_blocks = centroids.shape[:2]
    return scores.view(num_kv_heads, q.shape[0], q.shape[1] // num_kv_heads, num_blocks)


def block_scores_minmax_reference(q: Tensor, block_min: Tensor, block_max: Tensor) -> Tensor:
    """score = max(q, 0) . block_max + min(q, 0) . block_min: Quest's bound as two matmuls, in fp32.

    For each channel the larger of q * min and q * max is q * max when q >= 0 and q * min otherwise.
    """
    tile = to_tile(q, block_min.shape[0])
    scores = tile.clamp_min(0.0) @ block_max.float().transpose(1, 2)
    scores += tile.clamp_max(0.0) @ block_min.float().transpose(1, 2)
    num_kv_heads, num_blocks = block_min.shape[:2]
    return scores.view(num_kv_heads, q.shape[0], q.shape[1] // num_kv_heads, num_blocks)


def block_scores_ball_reference(q: Tensor, centers: Tensor, radii: Tensor) -> Tensor:
    """score = q . center + |q| * radius, in fp32."""
    lengths = to_tile(q, centers.shape[0]).norm(dim=2).view(centers.shape[0], q.shape[0], -1, 1)
    scores = block_scores_mean_reference(q, centers)
    return scores.add_(lengths * radii.float()[:, None, None])
