"""Public `csa_scores`: validation and dispatch."""

from __future__ import annotations

from torch import Tensor

from prefix_kernels._tile import check_queries
from prefix_kernels.csa_scores.reference import csa_scores_reference
from prefix_kernels.dispatch import resolve

_IMPLEMENTATIONS = {"reference": csa_scores_reference}


def csa_scores(
    q: Tensor,
    centroids: Tensor,
    list_positions: Tensor,
    list_scores: Tensor,
    subspace_dims: Tensor,
    prefix_len: int,
    *,
    implementation: str = "reference",
) -> Tensor:
    """Approximate q.k of every listed prefix position. Source: CSAttention, 3.3 (1)-(3).

    Args:
        q: [num_rows, num_qo_heads, head_dim] post-RoPE queries, fp32, fp16 or bf16.
        centroids: [num_kv_heads, num_subspaces, num_centroids, subspace_dim], unit vectors, any floating
            dtype.
        list_positions: [num_kv_heads, num_subspaces, num_centroids, list_len] int32, unique within a list,
            all in [0, prefix_len).
        list_scores: same shape, floating: partial score of that position for the unit centroid, up to a
            constant per list (one constant per query row leaves the order and the softmax as they are).
        subspace_dims: [num_subspaces, subspace_dim] int64, the channels of each subspace; together a
            permutation of range(head_dim).
        prefix_len: tokens of the prefix.
        implementation: "reference".

    Returns:
        [num_kv_heads, num_rows, gqa, prefix_len] fp32, before sm_scale and softmax; -inf for a position that
        none of the fetched lists holds.

    Raises:
        ValueError: shapes do not fit, or an unknown implementation.
    """
    run = resolve("csa_scores", implementation, _IMPLEMENTATIONS)
    if centroids.dim() != 4 or subspace_dims.shape != (centroids.shape[1], centroids.shape[3]):
        raise ValueError(
            "expected centroids [num_kv_heads, num_subspaces, num_centroids, subspace_dim] and subspace_dims "
            f"[num_subspaces, subspace_dim], got {tuple(centroids.shape)} and {tuple(subspace_dims.shape)}"
        )
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
    if prefix_len < list_positions.shape[3]:
        raise ValueError(
            f"expected prefix_len >= list_len={list_positions.shape[3]}, got {prefix_len}; is the table of "
            "another prefix?"
        )
    check_queries(q, centroids.shape[0], subspace_dims.numel())
    return run(q, centroids, list_positions, list_scores, subspace_dims, prefix_len)
