"""Public `suffix_attention`: validation and dispatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from prefix_kernels._tile import check_queries
from prefix_kernels.dispatch import resolve
from prefix_kernels.suffix_attention.reference import suffix_attention_reference
from prefix_kernels.types import AttnState, PagedKV

_IMPLEMENTATIONS: Mapping[str, Callable[..., AttnState] | str] = {
    "reference": suffix_attention_reference,
    "triton": "prefix_kernels.suffix_attention.triton:suffix_attention_triton",
}


def suffix_attention(
    q: Tensor,
    kv: PagedKV,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    sm_scale: float,
    *,
    implementation: str = "reference",
) -> AttnState:
    """Dense decode attention, one query row per request, each over its own slots.

    For a grouped request the slots are those from the prefix's end to seq_len; for any other request all of
    them.

    Args:
        q: [batch, num_qo_heads, head_dim] post-RoPE queries, fp32, fp16 or bf16.
        kv: the layer's pool buffers; only listed slots are read.
        kv_indptr: [batch + 1] int32 or int64, ascending, from 0: request b owns
            kv_indices[kv_indptr[b]:kv_indptr[b + 1]]. Equal neighbours make an empty suffix.
        kv_indices: [>= kv_indptr[-1]] int32 or int64 token slots; entries past kv_indptr[-1] are ignored.
        sm_scale: multiplies q.k before the softmax.
        implementation: "reference" or "triton" (on a GPU, or in Triton's interpreter). Both wait for the device to
            read kv_indptr.

    Returns:
        out [batch, num_qo_heads, v_head_dim] fp32 and lse (natural log); out 0 and lse -inf where the suffix
        is empty.

    Raises:
        ValueError: shapes or dtypes do not fit, kv_indptr does not ascend from 0 or runs past kv_indices, or
            an unknown implementation.
    """
    run = resolve("suffix_attention", implementation, _IMPLEMENTATIONS)
    check_queries(q, kv.num_kv_heads, kv.head_dim)
    if kv_indptr.shape != (q.shape[0] + 1,) or kv_indptr.dtype.is_floating_point:
        raise ValueError(
            f"expected kv_indptr [batch + 1 = {q.shape[0] + 1}] int32, got {tuple(kv_indptr.shape)} {kv_indptr.dtype}"
        )
    if kv_indices.dim() != 1 or kv_indices.dtype.is_floating_point:
        raise ValueError(f"expected kv_indices [nnz] int32, got {tuple(kv_indices.shape)} {kv_indices.dtype}")
    return run(q, kv, kv_indptr, kv_indices, sm_scale)
