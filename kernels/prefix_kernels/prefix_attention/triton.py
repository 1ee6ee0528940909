"""Triton form of `prefix_attention`: one segment of grouped attention."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.grouped_attention import Segment, block_m_for
from prefix_kernels.grouped_attention.runner import attend_segments
from prefix_kernels.types import AttnState, PagedKV, Selection


def prefix_attention_triton(q: Tensor, kv: PagedKV, slots: Tensor, selection: Selection, sm_scale: float) -> AttnState:
    """As the reference. The selection is turned into slots first; a serving path keeps it in that form."""
    num_rows, max_count = q.shape[0], selection.max_count
    if max_count == 0 or num_rows == 0:
        out = q.new_zeros(num_rows, q.shape[1], kv.v_cache.shape[2], dtype=torch.float32)
        return AttnState(out, q.new_full((num_rows, q.shape[1]), -torch.inf, dtype=torch.float32))
    arena = slots[selection.positions.clamp_min(0).long()].flatten()
    segment = Segment(tuple(range(num_rows)), max_count, head_stride=max_count, list_id=0)
    block_m = block_m_for(num_rows, q.shape[1] // kv.num_kv_heads)
    return attend_segments(q, kv, arena, [segment], sm_scale, block_m, counts=selection.counts[None])
