"""Reference of `csa_scores`."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels._tile import ELEMENTS_PER_CHUNK, to_tile


def csa_scores_reference(
    q: Tensor,
    centroids: Tensor,
    list_positions: Tensor,
    list_scores: Tensor,
    subspace_dims: Tensor,
    prefix_len: int,
) -> Tensor:
    """Nearest centroid per subspace, fetch its list, sum (q_b . c_b) * score by position.

    j_b = argmax_j q_b . c_bj (the cosine's argmax: centroids are unit and |q_b| does not depend on j);
    score(i) = sum_b [i in list(b, j_b)] * (q_b . c_b,j_b) * list_score(b, j_b, i); -inf when no list holds i.
    The paper sums with equal weights over unit queries. q_b . c = |q_b| cos(q_b, c) is the length of q_b's
    projection on the centroid: it restores each subspace's share of q.k, which the paper's "importance
    deviation" (2.3) asks for, and trusts a subspace less the worse its centroid fits. Rows are taken in
    chunks so that the fetched lists stay bounded.
    """
    num_kv_heads, num_subspaces, _, list_len = list_positions.shape
    tile = to_tile(q, num_kv_heads)
    num_tile_rows = tile.shape[1]
    q_sub = tile[:, :, subspace_dims].transpose(1, 2)
    projection, nearest = (q_sub @ centroids.float().transpose(2, 3)).max(dim=3)
    head = torch.arange(num_kv_heads, device=q.device)[:, None, None]
    subspace = torch.arange(num_subspaces, device=q.device)[:, None]
    scores = tile.new_full((num_kv_heads, num_tile_rows, prefix_len), -torch.inf)
    step = max(1, ELEMENTS_PER_CHUNK // (num_kv_heads * num_subspaces * max(list_len, 1)))
    for first in range(0, num_tile_rows, step):
        rows = slice(first, first + step)
        picked = (head, subspace, nearest[:, :, rows])
        weighted = list_scores[picked].float() * projection[:, :, rows, None]
        index = list_positions[picked].long().transpose(1, 2).flatten(2)
        # Listed positions start from 0, all others stay at -inf.
        scores[:, rows].scatter_(2, index, 0.0).scatter_add_(2, index, weighted.transpose(1, 2).flatten(2))
    return scores.view(num_kv_heads, q.shape[0], q.shape[1] // num_kv_heads, prefix_len)
