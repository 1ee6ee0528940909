"""Bytes that an index takes and that one decode step reads of it, counted on the arrays themselves.

A step reads an index once for the whole group, whatever its size; only CSAttention's lists are more for more rows,
as each query row fetches the lists of its own nearest centroids (a list that two rows want is read once). Figures
are those of one KV head, the mean over the heads that the arrays hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sglang_ext.methods.ab_sparse import ABSparseSpec
from sglang_ext.methods.base import IndexSpec, require_arrays
from sglang_ext.methods.combined import TwoLevelSpec, UnionSpec, part_arrays
from sglang_ext.methods.csattention import CSAttentionSpec, subspace_channels
from sglang_ext.methods.exact import ExactSpec
from sglang_ext.methods.heads import ROW_INDPTR, is_ragged
from sglang_ext.methods.token_index import TokenIndexSpec

KV_ELEMENT_BYTES = 2
"""Of a bf16 key or value element."""

_LIST_ARRAYS = ("places", "counts", "codes", "scale", "zero", "positions", "scores")
_BUILD_ONLY = ("baseline",)
"""Arrays that search does not read: kept for streaming inserts."""


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that one decode step of one group reads for one KV head of one layer.

    Attributes:
        index: of the index.
        kv: of the selected keys and values.
    """

    index: float
    kv: float

    @property
    def total(self) -> float:
        """Bytes of both."""
        return self.index + self.kv


def kv_bytes(num_tokens: float, head_dim: int, v_head_dim: int | None = None) -> float:
    """Bytes of the bf16 keys and values of some tokens of one KV head; dense attention reads the whole prefix's."""
    return num_tokens * (head_dim + (head_dim if v_head_dim is None else v_head_dim)) * KV_ELEMENT_BYTES


def stored_bytes(arrays: Mapping[str, Tensor]) -> float:
    """Bytes of one KV head's index: all arrays of a layer, divided by its KV heads; 0 without arrays."""
    return _nbytes(arrays) / num_heads(arrays) if arrays else 0.0


def step_traffic(
    spec: IndexSpec, arrays: Mapping[str, Tensor], q: Tensor, *, prefix_len: int, budget: int
) -> StepTraffic:
    """What a step with that budget reads.

    Args:
        spec: of the index.
        arrays: of one layer, or of some of its KV heads.
        q: [num_rows, num_qo_heads, head_dim] queries of the group's rows; their heads are those of `arrays`. Only
            CSAttention reads them.
        prefix_len: tokens of the prefix.
        budget: tokens per KV head that are attended.

    Raises:
        ValueError: an array is missing, or a method whose reads are not known here.
    """
    selected = min(budget, prefix_len)
    return StepTraffic(index_read_bytes(spec, arrays, q, prefix_len, selected), kv_bytes(selected, q.shape[2]))


def index_read_bytes(spec: IndexSpec, arrays: Mapping[str, Tensor], q: Tensor, prefix_len: int, budget: int) -> float:
    """Bytes of the index alone, see `step_traffic`."""
    if isinstance(spec, TwoLevelSpec):
        candidates = spec.num_candidates(prefix_len, budget)
        first = index_read_bytes(spec.first, part_arrays(arrays, "first"), q, prefix_len, candidates)
        return first + _candidates_read(spec.second, part_arrays(arrays, "second"), q, prefix_len, candidates)
    if isinstance(spec, UnionSpec):
        parts = (("first", spec.first), ("second", spec.second))
        return sum(index_read_bytes(part, part_arrays(arrays, name), q, prefix_len, budget) for name, part in parts)
    if isinstance(spec, CSAttentionSpec):
        return _csa_read(spec, arrays, q)
    if isinstance(spec, ABSparseSpec | TokenIndexSpec | ExactSpec):
        return stored_bytes(arrays)
    raise ValueError(f"expected a method whose reads are known, got {spec.method!r}; add it to methods.traffic")


def _candidates_read(
    spec: IndexSpec, arrays: Mapping[str, Tensor], q: Tensor, prefix_len: int, candidates: int
) -> float:
    """Bytes when only some tokens are scored. Where tokens cannot be addressed one by one, the upper bound."""
    if isinstance(spec, TokenIndexSpec | ExactSpec):
        rows = {name: array for name, array in arrays.items() if array.dim() == 3 and array.shape[1] == prefix_len}
        rest = _nbytes(arrays) - _nbytes(rows)
        return (rest + _nbytes(rows) * candidates / prefix_len) / num_heads(arrays)
    return index_read_bytes(spec, arrays, q, prefix_len, candidates)


def csa_lists_read(spec: CSAttentionSpec, centroids: Tensor, q: Tensor) -> float:
    """Different lists that one step fetches for one KV head, over all subspaces; mean over the KV heads.

    Args:
        spec: its layout of the subspaces.
        centroids: [num_kv_heads, num_subspaces, num_centroids, subspace_dim].
        q: [num_rows, num_qo_heads, head_dim].

    Raises:
        ValueError: query heads that are no multiple of the KV heads.
    """
    num_kv_heads, num_subspaces, num_centroids, _ = centroids.shape
    num_rows, num_qo_heads, head_dim = q.shape
    if num_qo_heads % num_kv_heads:
        raise ValueError(
            f"expected query heads as a multiple of num_kv_heads={num_kv_heads}, got {num_qo_heads}; pass the queries "
            "of the heads that the arrays hold"
        )
    channels = subspace_channels(head_dim, num_subspaces, spec.layout).to(q.device)
    tile = q.float().view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
    parts = tile[:, :, channels].transpose(1, 2)
    nearest = (parts @ centroids.float().transpose(2, 3)).argmax(dim=3)
    wanted = parts.new_zeros(num_kv_heads, num_subspaces, num_centroids).scatter_(2, nearest, 1.0)
    return float(wanted.sum()) / num_kv_heads


def _csa_read(spec: CSAttentionSpec, arrays: Mapping[str, Tensor], q: Tensor) -> float:
    """All centroids and weights, and the lists of the nearest centroids."""
    (centroids,) = require_arrays(arrays, ("centroids",), spec.method)
    lists = {name: array for name, array in arrays.items() if name in _LIST_ARRAYS}
    rest = {name: array for name, array in arrays.items() if name not in (*_LIST_ARRAYS, *_BUILD_ONLY)}
    num_kv_heads, num_subspaces, num_centroids, _ = centroids.shape
    one = _nbytes(lists) / (num_kv_heads * num_subspaces * num_centroids)
    return _nbytes(rest) / num_kv_heads + one * csa_lists_read(spec, centroids, q)


def num_heads(arrays: Mapping[str, Tensor]) -> int:
    """KV heads that the arrays of a layer hold.

    Raises:
        ValueError: only ragged arrays or none, which do not tell.
    """
    for name, array in arrays.items():
        if not is_ragged(name):
            return array.shape[0] - (name.rpartition(".")[2] == ROW_INDPTR)
    raise ValueError(f"expected arrays of a layer, got {sorted(arrays) or 'none'}; pass all arrays that were built")


def _nbytes(arrays: Mapping[str, Tensor]) -> int:
    return sum(array.nbytes for array in arrays.values())
