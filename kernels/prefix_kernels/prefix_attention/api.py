"""Public `prefix_attention`: validation and dispatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from prefix_kernels._tile import check_queries
from prefix_kernels.dispatch import resolve
from prefix_kernels.prefix_attention.reference import prefix_attention_reference
from prefix_kernels.types import AttnState, PagedKV, Selection

_IMPLEMENTATIONS: Mapping[str, Callable[..., AttnState] | str] = {
    "reference": prefix_attention_reference,
    "triton": "prefix_kernels.prefix_attention.triton:prefix_attention_triton",
}


def prefix_attention(
    q: Tensor,
    kv: PagedKV,
    slots: Tensor,
    selection: Selection,
    sm_scale: float,
    *,
    implementation: str = "reference",
) -> AttnState:
    """Attention over the selected positions of one prefix, for all query rows of its group at once.

    Each KV head reads its own positions, once for the whole group (docs/architecture.md, "Groups"). With
    `Selection.all` this is dense attention over the prefix. No causal mask: the prefix precedes every query.

    Args:
        q: [num_rows, num_qo_heads, head_dim] post-RoPE queries, fp32, fp16 or bf16. Query head h reads KV
            head h // gqa.
        kv: the layer's pool buffers; only selected slots are read.
        slots: [prefix_len] int64, prefix position -> token slot.
        selection: positions per KV head, all below prefix_len (not checked: that would wait for the device).
        sm_scale: multiplies q.k before the softmax.
        implementation: "reference" or "triton" (on a GPU, or in Triton's interpreter).

    Returns:
        out [num_rows, num_qo_heads, v_head_dim] fp32 and lse (natural log); out 0 and lse -inf where a KV
        head selects nothing.

    Raises:
        ValueError: shapes or dtypes do not fit, or an unknown implementation.

    Example:
        >>> import torch
        >>> from prefix_kernels.types import PagedKV, Selection
        >>> q, k, v = torch.randn(1, 2, 8), torch.randn(5, 1, 8), torch.randn(5, 1, 8)
        >>> state = prefix_attention(q, PagedKV(k, v), torch.arange(5), Selection.all(5, 1), 1.0)
        >>> dense = (q[0] @ k[:, 0].T).softmax(-1) @ v[:, 0]
        >>> torch.allclose(state.out[0], dense, atol=1e-5)
        True
    """
    run = resolve("prefix_attention", implementation, _IMPLEMENTATIONS)
    check_queries(q, kv.num_kv_heads, kv.head_dim)
    if slots.dim() != 1 or slots.dtype.is_floating_point:
        raise ValueError(f"expected slots [prefix_len] int64, got {tuple(slots.shape)} {slots.dtype}")
    if selection.num_kv_heads != kv.num_kv_heads or selection.max_count > slots.shape[0]:
        raise ValueError(
            f"expected a selection of num_kv_heads={kv.num_kv_heads} and at most prefix_len={slots.shape[0]} "
            f"positions, got {tuple(selection.positions.shape)}; is it of another prefix?"
        )
    return run(q, kv, slots, selection, sm_scale)
