"""Triton form of `merge_state`: the merge of grouped attention, on stacked states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prefix_kernels.grouped_attention.kernels import merge_items_kernel
from prefix_kernels.launching import block_of, launch
from prefix_kernels.types import AttnState


def merge_state_triton(states: Sequence[AttnState]) -> AttnState:
    """As the reference. Stacks the states first; `GroupedAttention` writes its parts in one place to begin with."""
    outs = torch.stack([state.out.float() for state in states])
    lses = torch.stack([state.lse for state in states])
    num_rows, num_heads, dim = outs.shape[1:]
    # Every head as a KV head of its own: part s of (row, head) is partial row (s * num_rows + row) * num_heads + head.
    first = torch.arange(num_rows, dtype=torch.int32) * num_heads
    fields = [first, *(torch.full_like(first, n) for n in (num_rows * num_heads, 1, len(states)))]
    spans = torch.stack(fields, dim=1).to(outs.device)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    launch(
        merge_items_kernel,
        (num_heads, num_rows),
        {
            "partial_out_ptr": outs,
            "partial_lse_ptr": lses,
            "spans_ptr": spans,
            "out_ptr": out,
            "lse_ptr": lse,
            "v_scale": 1.0,
            "out_stride_row": out.stride(0),
            "out_stride_head": out.stride(1),
            "GQA": 1,
            "V_DIM": dim,
            "BLOCK_V": block_of(dim, 16),
            "NATURAL": True,
            "NUM_SPANS": 1,
            "BLOCK_S": min(64, block_of(len(states), 16)),
        },
        num_warps=4,
    )
    return AttnState(out, lse)
