"""References of the CSA scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from prefix_kernels._tile import ELEMENTS_PER_CHUNK, to_tile
from prefix_kernels.csa_scores.compact import CompactLists, decode_lists

Picked = tuple[Tensor, Tensor, Tensor]
"""Indices of (KV head, subspace, centroid) that broadcast to [num_kv_heads, num_subspaces, num_tile_rows]."""


def csa_scores_reference(
    q: Tensor,
    centroids: Tensor,
    list_positions: Tensor,
    list_scores: Tensor,
    subspace_dims: Tensor,
    prefix_len: int,
    subspace_weights: Tensor | None = None,
) -> Tensor:
    """Nearest centroid per subspace, fetch its list, sum w_b * list_score by position.

    j_b = argmax_j q_b . c_bj (the cosine's argmax: centroids are unit and |q_b| does not depend on j);
    score(i) = sum_b [i in list(b, j_b)] * w_b * list_score(b, j_b, i); -inf when no list holds i.
    Without `subspace_weights` w_b = q_b . c_b,j_b = |q_b| cos(q_b, c), the length of q_b's projection on the
    centroid: it restores each subspace's share of q.k, which the paper's "importance deviation" (2.3) asks for, and
    trusts a subspace less the worse its centroid fits. With them w_b = |q| * weight_b; equal weights are the paper's
    sum. Rows are taken in chunks so that the fetched lists stay bounded.
    """

    def fetch(picked: Picked) -> tuple[Tensor, Tensor]:
        return list_positions[picked].long(), list_scores[picked].float()

    list_len = list_positions.shape[3]
    return _accumulate(q, centroids, fetch, list_len, subspace_dims, prefix_len, subspace_weights)


def csa_scores_compact_reference(
    q: Tensor,
    centroids: Tensor,
    lists: CompactLists,
    list_len: int,
    bits: int,
    subspace_dims: Tensor,
    prefix_len: int,
    subspace_weights: Tensor | None = None,
) -> Tensor:
    """As `csa_scores_reference`; only the lists that are fetched are decoded."""

    def fetch(picked: Picked) -> tuple[Tensor, Tensor]:
        places, counts, *scores = (None if part is None else part[picked] for part in lists)
        assert places is not None
        return decode_lists(CompactLists(places, counts, *scores), list_len, bits)  # type: ignore[arg-type]

    return _accumulate(q, centroids, fetch, list_len, subspace_dims, prefix_len, subspace_weights)


def _accumulate(
    q: Tensor,
    centroids: Tensor,
    fetch: Callable[[Picked], tuple[Tensor, Tensor]],
    list_len: int,
    subspace_dims: Tensor,
    prefix_len: int,
    subspace_weights: Tensor | None,
) -> Tensor:
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
