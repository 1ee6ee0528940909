"""Triton form of `suffix_attention`: one segment of grouped attention per request."""

from __future__ import annotations

import itertools

from torch import Tensor

from prefix_kernels.grouped_attention import Segment, block_m_for
from prefix_kernels.grouped_attention.runner import attend_segments
from prefix_kernels.suffix_attention.reference import check_indptr
from prefix_kernels.types import AttnState, PagedKV


def suffix_attention_triton(
    q: Tensor, kv: PagedKV, kv_indptr: Tensor, kv_indices: Tensor, sm_scale: float
) -> AttnState:
    """As the reference; waits for the device to read kv_indptr, which `GroupedAttention.plan` has on the host."""
    indptr = kv_indptr.cpu().long()
    check_indptr(indptr, kv_indices)
    bounds = indptr.tolist()
    segments = [
        Segment((row,), end - begin, list_begin=begin) for row, (begin, end) in enumerate(itertools.pairwise(bounds))
    ]
    return attend_segments(q, kv, kv_indices, segments, sm_scale, block_m_for(1, q.shape[1] // kv.num_kv_heads))
