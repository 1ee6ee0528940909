"""Token scores from the query-centric tables of CSAttention, in torch. `compact` has the form of their lists."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.block_scores import ELEMENTS_PER_CHUNK, check_queries, to_tile
from prefix_kernels.csa_scores.compact import (
    BLOCK_POSITIONS,
    CompactLists,
    check_entries,
    check_lists,
    decode_lists,
    encode_lists,
    encode_positions,
)


def csa_scores_compact(
    q: Tensor, centroids: Tensor, lists: CompactLists, list_len: int, bits: int, prefix_len: int
) -> Tensor:
    """Approximate q.k of every listed prefix position. Source: CSAttention, 3.3 (1)-(3).

    Nearest centroid per subspace: j_b = argmax_j q_b . c_bj (the cosine's argmax: centroids are unit and |q_b| does not
    depend on j). score(i) = sum_b [i in list(b, j_b)] * w_b * list_score(b, j_b, i).

    w_b = q_b . c_b,j_b = |q_b| cos(q_b, c), the length of q_b's projection on the centroid: it restores each subspace's
    share of q.k, which the paper's "importance deviation" (2.3) asks for, and trusts a subspace less the worse its
    centroid fits. The paper's sum has w_b = 1.

    Only the lists that are fetched are decoded, in chunks of rows so that they stay bounded.

    Args:
        q: [num_rows, num_qo_heads, head_dim] post-RoPE queries, fp32, fp16 or bf16.
        centroids: [num_kv_heads, num_subspaces, num_centroids, subspace_dim], unit vectors, any floating dtype. A
            subspace is `subspace_dim` neighbouring channels.
        lists: leading dims [num_kv_heads, num_subspaces, num_centroids]. Scores: partial score of a position for the
            unit centroid, up to a constant per list (one constant per query row leaves the order and the softmax as
            they are).
        list_len: entries of a list.
        bits: of a list's scores, 4 or 8.
        prefix_len: tokens of the prefix.

    Returns:
        [num_kv_heads, num_rows, gqa, prefix_len] fp32, before sm_scale and softmax; -inf for a position that none of
        the fetched lists holds.

    Raises:
        ValueError: shapes do not fit.
    """
    if centroids.dim() != 4:
        raise ValueError(
            "expected centroids [num_kv_heads, num_subspaces, num_centroids, subspace_dim], got "
            f"{tuple(centroids.shape)}"
        )
    num_kv_heads, num_subspaces, _, subspace_dim = centroids.shape
    check_queries(q, num_kv_heads, num_subspaces * subspace_dim)
    check_lists(lists, tuple(centroids.shape[:3]), list_len, prefix_len, bits)
    tile = to_tile(q, num_kv_heads)
    num_tile_rows = tile.shape[1]
    q_sub = tile.view(num_kv_heads, num_tile_rows, num_subspaces, subspace_dim).transpose(1, 2)
    weight, nearest = (q_sub @ centroids.float().transpose(2, 3)).max(dim=3)
    head = torch.arange(num_kv_heads, device=q.device)[:, None, None]
    subspace = torch.arange(num_subspaces, device=q.device)[:, None]
    scores = tile.new_full((num_kv_heads, num_tile_rows, prefix_len), -torch.inf)
    step = max(1, ELEMENTS_PER_CHUNK // (num_kv_heads * num_subspaces * list_len))
    for first in range(0, num_tile_rows, step):
        rows = slice(first, first + step)
        picked = CompactLists(*(part[head, subspace, nearest[:, :, rows]] for part in lists))
        positions, list_scores = decode_lists(picked, list_len, bits)
        weighted = list_scores * weight[:, :, rows, None]
        index = positions.transpose(1, 2).flatten(2)
        # Listed positions start from 0, all others stay at -inf.
        scores[:, rows].scatter_(2, index, 0.0).scatter_add_(2, index, weighted.transpose(1, 2).flatten(2))
    return scores.view(num_kv_heads, q.shape[0], q.shape[1] // num_kv_heads, prefix_len)
