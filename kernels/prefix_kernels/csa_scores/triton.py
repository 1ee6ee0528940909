"""Triton form of `csa_scores_compact`: one group, planned and run once."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.csa_scores.compact import CompactLists
from prefix_kernels.csa_scores.runner import CsaGroup, CsaScores, CsaShape, CsaTables, default_config


def csa_scores_compact_triton(
    q: Tensor,
    centroids: Tensor,
    lists: CompactLists,
    list_len: int,
    bits: int,
    subspace_dims: Tensor,
    prefix_len: int,
    subspace_weights: Tensor | None = None,
) -> Tensor:
    """As the reference. Tables that are not contiguous are copied; a serving path holds them as `CsaTables`."""
    num_rows, num_qo_heads, head_dim = q.shape
    num_kv_heads, num_subspaces, num_centroids = centroids.shape[:3]
    shape = CsaShape(
        num_qo_heads,
        num_kv_heads,
        head_dim,
        num_subspaces,
        num_centroids,
        bits,
        subspace_weights is not None,
        centroids.dtype,
    )
    out = torch.empty(
        num_kv_heads, num_rows, num_qo_heads // num_kv_heads, prefix_len, dtype=torch.float32, device=q.device
    )
    if num_rows == 0:
        return out
    tables = CsaTables(
        centroids.contiguous(),
        CompactLists(*(None if part is None else part.contiguous() for part in lists)),  # type: ignore[arg-type]
        list_len,
        prefix_len,
        None if subspace_weights is None else subspace_weights.float().contiguous(),
    )
    scores = CsaScores(
        shape,
        subspace_dims,
        num_rows,
        prefix_len,
        default_config(list_len / prefix_len),
        bitmap=lists.counts is None,
    )
    scores.plan([CsaGroup(tables, tuple(range(num_rows)))])
    scores.run(q.contiguous(), out)
    return out
