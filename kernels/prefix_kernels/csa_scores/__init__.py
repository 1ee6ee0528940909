"""Token scores from the query-centric tables of CSAttention, in the paper's layout and in the compact one.

In torch. `compact` has the compact lists.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from prefix_kernels.block_scores import ELEMENTS_PER_CHUNK, check_queries, to_tile
from prefix_kernels.csa_scores.compact import (
    BLOCK_POSITIONS,
    CompactLists,
    bitmap_is_smaller,
    check_entries,
    check_lists,
    decode_lists,
    encode_lists,
    encode_offsets,
)

__all__ = [
    "BLOCK_POSITIONS",
    "CompactLists",
    "bitmap_is_smaller",
    "check_entries",
    "check_lists",
    "csa_scores",
    "csa_scores_compact",
    "decode_lists",
    "encode_lists",
    "encode_offsets",
]

_Picked = tuple[Tensor, Tensor, Tensor]
"""Indices of (KV head, subspace, centroid) that broadcast to [num_kv_heads, num_subspaces, num_tile_rows]."""


def csa_scores(
    q: Tensor,
    centroids: Tensor,
    list_positions: Tensor,
    list_scores: Tensor,
    subspace_dims: Tensor,
    prefix_len: int,
    subspace_weights: Tensor | None = None,
) -> Tensor:
    """Approximate q.k of every listed prefix position. Source: CSAttention, 3.3 (1)-(3).

    Nearest centroid per subspace: j_b = argmax_j q_b . c_bj (the cosine's argmax: centroids are unit and |q_b| does not
    depend on j). score(i) = sum_b [i in list(b, j_b)] * w_b * list_score(b, j_b, i).

    Without `subspace_weights` w_b = q_b . c_b,j_b = |q_b| cos(q_b, c), the length of q_b's projection on the centroid:
    it restores each subspace's share of q.k, which the paper's "importance deviation" (2.3) asks for, and trusts a
    subspace less the worse its centroid fits. With them w_b = |q| * weight_b; equal weights are the paper's sum.

    Args:
        q: [num_rows, num_qo_heads, head_dim] post-RoPE queries, fp32, fp16 or bf16.
        centroids: [num_kv_heads, num_subspaces, num_centroids, subspace_dim], unit vectors, any floating dtype.
        list_positions: [num_kv_heads, num_subspaces, num_centroids, list_len] int32, unique within a list, all in
            [0, prefix_len).
        list_scores: same shape, floating: partial score of that position for the unit centroid, up to a constant per
            list (one constant per query row leaves the order and the softmax as they are).
        subspace_dims: [num_subspaces, subspace_dim] int64, the channels of each subspace; together a permutation of
            range(head_dim).
        prefix_len: tokens of the prefix.
        subspace_weights: [num_kv_heads, num_subspaces] floating, or None.

    Returns:
        [num_kv_heads, num_rows, gqa, prefix_len] fp32, before sm_scale and softmax; -inf for a position that none of
        the fetched lists holds.

    Raises:
        ValueError: shapes do not fit.
    """
    _check(q, centroids, subspace_dims, subspace_weights)
    if list_positions.dim() != 4 or list_positions.shape[:3] != centroids.shape[:3]:
        raise ValueError(
            f"expected list_positions [{', '.join(str(n) for n in centroids.shape[:3])}, list_len], got "
            f"{tuple(list_positions.shape)}"
        )
    if list_scores.shape != list_positions.shape:
        raise ValueError(
            f"expected list_scores of list_positions' shape {tuple(list_positions.shape)}, got "
            f"{tuple(list_scores.shape)}"
        )

    def fetch(picked: _Picked) -> tuple[Tensor, Tensor]:
        return list_positions[picked].long(), list_scores[picked].float()

    return _accumulate(q, centroids, fetch, list_positions.shape[3], subspace_dims, prefix_len, subspace_weights)


def csa_scores_compact(
    q: Tensor,
    centroids: Tensor,
    lists: CompactLists,
    list_len: int,
    bits: int,
    subspace_dims: Tensor,
    prefix_len: int,
    subspace_weights: Tensor | None = None,
) -> Tensor:
    """`csa_scores` on compact lists, of which only those that are fetched are decoded.

    Args:
        q, centroids, subspace_dims, prefix_len, subspace_weights: as in `csa_scores`.
        lists: leading dims [num_kv_heads, num_subspaces, num_centroids], see `CompactLists`.
        list_len: entries of a list.
        bits: of a score, 4 or 8.

    Returns:
        As `csa_scores` of the decoded lists.

    Raises:
        ValueError: shapes do not fit.
    """
    _check(q, centroids, subspace_dims, subspace_weights)
    check_lists(lists, tuple(centroids.shape[:3]), list_len, prefix_len, bits)

    def fetch(picked: _Picked) -> tuple[Tensor, Tensor]:
        places, counts, *scores = (None if part is None else part[picked] for part in lists)
        assert places is not None
        return decode_lists(CompactLists(places, counts, *scores), list_len, bits)  # type: ignore[arg-type]

    return _accumulate(q, centroids, fetch, list_len, subspace_dims, prefix_len, subspace_weights)


def _accumulate(
    q: Tensor,
    centroids: Tensor,
    fetch: Callable[[_Picked], tuple[Tensor, Tensor]],
    list_len: int,
    subspace_dims: Tensor,
    prefix_len: int,
    subspace_weights: Tensor | None,
) -> Tensor:
    """Rows are taken in chunks so that the fetched lists stay bounded."""
    if prefix_len < list_len:
        raise ValueError(
            f"expected prefix_len >= list_len={list_len}, got {prefix_len}; is the table of another prefix?"
        )
    num_kv_heads, num_subspaces = centroids.shape[:2]
    tile = to_tile(q, num_kv_heads)
    num_tile_rows = tile.shape[1]
    q_sub = tile[:, :, subspace_dims].transpose(1, 2)
    weight, nearest = (q_sub @ centroids.float().transpose(2, 3)).max(dim=3)
    if subspace_weights is not None:
        weight = subspace_weights.float()[:, :, None] * tile.norm(dim=2)[:, None]
    head = torch.arange(num_kv_heads, device=q.device)[:, None, None]
    subspace = torch.arange(num_subspaces, device=q.device)[:, None]
    scores = tile.new_full((num_kv_heads, num_tile_rows, prefix_len), -torch.inf)
    step = max(1, ELEMENTS_PER_CHUNK // (num_kv_heads * num_subspaces * max(list_len, 1)))
    for first in range(0, num_tile_rows, step):
        rows = slice(first, first + step)
        positions, list_scores = fetch((head, subspace, nearest[:, :, rows]))
        weighted = list_scores * weight[:, :, rows, None]
        index = positions.transpose(1, 2).flatten(2)
        # Listed positions start from 0, all others stay at -inf.
        scores[:, rows].scatter_(2, index, 0.0).scatter_add_(2, index, weighted.transpose(1, 2).flatten(2))
    return scores.view(num_kv_heads, q.shape[0], q.shape[1] // num_kv_heads, prefix_len)


def _check(q: Tensor, centroids: Tensor, subspace_dims: Tensor, subspace_weights: Tensor | None) -> None:
    if centroids.dim() != 4 or subspace_dims.shape != (centroids.shape[1], centroids.shape[3]):
        raise ValueError(
            "expected centroids [num_kv_heads, num_subspaces, num_centroids, subspace_dim] and subspace_dims "
            f"[num_subspaces, subspace_dim], got {tuple(centroids.shape)} and {tuple(subspace_dims.shape)}"
        )
    if subspace_weights is not None and subspace_weights.shape != centroids.shape[:2]:
        raise ValueError(
            f"expected subspace_weights [num_kv_heads, num_subspaces] = {tuple(centroids.shape[:2])}, got "
            f"{tuple(subspace_weights.shape)}"
        )
    check_queries(q, centroids.shape[0], subspace_dims.numel())
