"""Public `csa_scores` and `csa_scores_compact`: validation and dispatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from prefix_kernels._tile import check_queries
from prefix_kernels.csa_scores.compact import CompactLists, check_lists
from prefix_kernels.csa_scores.reference import csa_scores_compact_reference, csa_scores_reference
from prefix_kernels.dispatch import resolve

_IMPLEMENTATIONS = {"reference": csa_scores_reference}
_COMPACT: Mapping[str, Callable[..., Tensor] | str] = {
    "reference": csa_scores_compact_reference,
    "triton": "prefix_kernels.csa_scores.triton:csa_scores_compact_triton",
}


def csa_scores(
    q: Tensor,
    centroids: Tensor,
    list_positions: Tensor,
    list_scores: Tensor,
    subspace_dims: Tensor,
    prefix_len: int,
    subspace_weights: Tensor | None = None,
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
        subspace_weights: [num_kv_heads, num_subspaces] floating, the paper's w_b times |q|; None for the length of
            the query's projection on each nearest centroid.
        implementation: "reference".

    Returns:
        [num_kv_heads, num_rows, gqa, prefix_len] fp32, before sm_scale and softmax; -inf for a position that
        none of the fetched lists holds.

    Raises:
        ValueError: shapes do not fit, or an unknown implementation.
    """
    run = resolve("csa_scores", implementation, _IMPLEMENTATIONS)
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
    _check_len(list_positions.shape[3], prefix_len)
    return run(q, centroids, list_positions, list_scores, subspace_dims, prefix_len, subspace_weights)


def csa_scores_compact(
    q: Tensor,
    centroids: Tensor,
    lists: CompactLists,
    list_len: int,
    bits: int,
    subspace_dims: Tensor,
    prefix_len: int,
    subspace_weights: Tensor | None = None,
    *,
    implementation: str = "reference",
) -> Tensor:
    """`csa_scores` on compact lists.

    Args:
        q, centroids, subspace_dims, prefix_len, subspace_weights: as in `csa_scores`.
        lists: leading dims [num_kv_heads, num_subspaces, num_centroids], see `CompactLists`.
        list_len: entries of a list.
        bits: of a score, 4 or 8.
        implementation: "reference" or "triton" (on a GPU, or in Triton's interpreter).

    Returns:
        As `csa_scores` of the decoded lists.

    Raises:
        ValueError: shapes do not fit, or an unknown implementation.
    """
    run = resolve("csa_scores_compact", implementation, _COMPACT)
    _check(q, centroids, subspace_dims, subspace_weights)
    _check_len(list_len, prefix_len)
    check_lists(lists, tuple(centroids.shape[:3]), list_len, prefix_len, bits)
    return run(q, centroids, lists, list_len, bits, subspace_dims, prefix_len, subspace_weights)


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


def _check_len(list_len: int, prefix_len: int) -> None:
    if prefix_len < list_len:
        raise ValueError(
            f"expected prefix_len >= list_len={list_len}, got {prefix_len}; is the table of another prefix?"
        )
