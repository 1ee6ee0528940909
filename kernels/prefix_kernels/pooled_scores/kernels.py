"""Triton kernels of pooled scores: how much of its group's attention a candidate has, in two passes over an index.

The first pass sums every row's exponentials over a stretch of candidates, the second one computes the scores again,
turns them into log-probabilities and pools them over the rows: a product is cheaper than a write and a read of scores
for every row. Products have candidates as rows and queries as columns, so that codes of few bits are unpacked in
registers and go into the tensor cores from there.

A sum over channels that is the same for all candidates of a row (the zero points of quantized channels) leaves the
softmax as it is, and is left out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefix_kernels.dependent_launch import wait_for_the_kernel_before
from prefix_kernels.pooled_scores.stretch_kernels import addresses, num_summed, score_stretch, stretch_of, sum_step


@triton.jit
def pooled_scores_kernel(
    q_ptr,  # [batch, num_qo_heads, head_dim]
    rows_ptr,  # int32 [batch], batch rows by group
    groups_ptr,  # int32 [num_groups, 4]: first of `rows`, requests, most candidates, stride of rows of raw scores
    heads_ptr,  # int64 [num_groups, num_kv_heads, 4]: candidates, first row, first list entry or raw score, first score
    arrays_ptr,  # int64 [num_groups, 5], addresses: channels, packed, scale, second packed, second scale
    k_ptr,  # [num_slots, num_kv_heads, head_dim], where SOURCE is KEYS
    lists_ptr,  # int32 or int64 arena: slots (KEYS), or rows that are candidates; where LISTED_ROWS
    raw_ptr,  # fp32, raw scores: read where SOURCE is RAW, written where STORE_RAW; an arena with RAW_ARENA
    peak_ptr,  # fp32 [num_groups, num_kv_heads, num_chunks, max_rows], base 2
    total_ptr,  # the same
    scores_ptr,  # fp32 arena, natural log
    sm_scale,
    q_stride_row,
    q_stride_head,
    k_stride_slot,
    k_stride_head,
    raw_stride_group,
    raw_stride_head,
    raw_stride_row,
    raw_stride_candidate,
    max_rows,
    GQA: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_UNITS: tl.constexpr,
    BITS: tl.constexpr,
    SOURCE: tl.constexpr,
    LISTED_ROWS: tl.constexpr,
    LISTED_CHANNELS: tl.constexpr,
    STORE_RAW: tl.constexpr,
    RAW_ARENA: tl.constexpr,
    SUM_EVERY: tl.constexpr,
    POOL: tl.constexpr,  # 0: the pass of sums; 1: pool by the maximum; 2: by the mean
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Program (chunk, KV head, group): one stretch of candidates against all rows of the group, tile by tile."""
    wait_for_the_kernel_before(OVERLAPPED)
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    group = tl.program_id(2).to(tl.int64)
    num_chunks = tl.num_programs(0)
    num_heads = tl.num_programs(1)
    row_begin = tl.load(groups_ptr + group * 4)
    num_rows = tl.load(groups_ptr + group * 4 + 1)
    fields = heads_ptr + (group * num_heads + head) * 4
    count = tl.load(fields).to(tl.int32)
    first_row = tl.load(fields + 1)
    list_ptr = lists_ptr + tl.load(fields + 2)
    out_ptr = scores_ptr + tl.load(fields + 3)
    channels_at, packed_at, scale_at, packed2_at, scale2_at = addresses(arrays_ptr + group * 5)
    raw_base = raw_ptr + group * raw_stride_group + head * raw_stride_head
    if RAW_ARENA:
        raw_base = raw_ptr + tl.load(fields + 2)
        raw_stride_row = tl.load(groups_ptr + group * 4 + 3)
    # Where not all candidates are summed, stretches are of those that are.
    step = 1
    if SUM_EVERY > 1 and POOL == 0:
        step = sum_step(count, SUM_EVERY)
        count = num_summed(count, step)
    begin, end = stretch_of(chunk, num_chunks, count, BLOCK_N)
    score_stretch(
        begin, end, q_ptr, rows_ptr, row_begin, num_rows, head, channels_at, packed_at, scale_at, packed2_at, scale2_at,
        first_row, step, list_ptr, raw_base, out_ptr, k_ptr + head * k_stride_head, peak_ptr,
        total_ptr, (group * num_heads + head) * num_chunks * max_rows, chunk, num_chunks, sm_scale, q_stride_row,
        q_stride_head, k_stride_slot, raw_stride_row, raw_stride_candidate, max_rows, GQA, CHANNELS, BLOCK_K, ROW_UNITS,
        BITS, SOURCE, LISTED_ROWS, LISTED_CHANNELS, STORE_RAW, SUM_EVERY, POOL, BLOCK_M, BLOCK_N, BLOCK_CHUNKS, LANES,
        STAGES, COMPUTE, PRECISION, ASSEMBLY,
    )  # fmt: skip
