"""Triton kernel of a prefill's attention: tiles of query rows over lists of slots, causal, or over pages of the host.

Portable from sm_80 on. Inside, exponents are to base 2 (one instruction); the state's logarithms are natural.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefix_kernels.residents.state import PAGE_TOKENS

PAGE = tl.constexpr(PAGE_TOKENS)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TILE_FIELDS = tl.constexpr(5)
"""int32 fields of a tile: first of its rows in the table of rows, number of query tokens, where their list begins,
entries that the first of them sees, entries that the last one sees."""


@triton.jit
def _attend_keys(
    q, k_base, v_base, list_ptr, start, limit, end, k_stride_slot, v_stride_slot, page_stride, qk_scale,
    acc, total, peak,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, LISTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys: q [BLOCK_M, BLOCK_D], limit, total and peak [BLOCK_M] (base 2), acc [BLOCK_M, BLOCK_V]."""
    column = start + tl.arange(0, BLOCK_N)
    # Columns past the end read the last key again and are masked after the product.
    place = tl.minimum(column, end - 1) if MASKED else column
    if LISTED:
        slot = tl.load(list_ptr + place).to(tl.int64)
        k_at = slot * k_stride_slot
        v_at = slot * v_stride_slot
    else:
        k_at = (place // PAGE).to(tl.int64) * page_stride + place % PAGE * k_stride_slot
        v_at = k_at
    d = tl.arange(0, BLOCK_D)
    k_ptrs = k_base + k_at[None, :] + d[:, None]
    k = tl.load(k_ptrs) if HEAD_DIM == BLOCK_D else tl.load(k_ptrs, mask=d[:, None] < HEAD_DIM, other=0.0)
    scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * qk_scale
    if MASKED:
        scores = tl.where(column[None, :] < limit[:, None], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    weight = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weight, axis=1)
    e = tl.arange(0, BLOCK_V)
    v_ptrs = v_base + v_at[:, None] + e[None, :]
    v = tl.load(v_ptrs) if V_DIM == BLOCK_V else tl.load(v_ptrs, mask=e[None, :] < V_DIM, other=0.0)
    acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, higher


@triton.jit(do_not_specialize=["num_keys"])
def attend_tiles_kernel(
    q_ptr,  # [num_rows, num_qo_heads, HEAD_DIM]
    k_ptr,  # [num_slots, num_kv_heads, HEAD_DIM]; without LISTED [num_pages, num_kv_heads, PAGE, HEAD_DIM]
    v_ptr,  # the same, V_DIM
    slots_ptr,  # int32 or int64 [arena], with LISTED
    rows_ptr,  # int32, rows of q
    tiles_ptr,  # int32 [num_tiles, TILE_FIELDS]
    out_ptr,  # fp32 [num_rows, num_qo_heads, V_DIM], written; without LISTED read, too
    lse_ptr,  # fp32 [num_rows, num_qo_heads], the same
    num_keys,  # of all pages, without LISTED
    sm_scale,  # fp32, times the scale of K
    v_scale,  # fp32, scale of V
    q_stride_row, q_stride_head, k_stride_slot, k_stride_head, v_stride_slot, v_stride_head, page_stride,
    GQA: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head): LISTED, attention over the own slots of the rows; else more keys folded into that.

    Every row has a key of its own, and that is the first thing it attends: no logarithm is -inf.
    """
    fields = tiles_ptr + tl.program_id(0) * TILE_FIELDS
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    row_begin = tl.load(fields)
    count = tl.load(fields + 1)
    seen = num_keys
    end = num_keys
    list_ptr = slots_ptr
    if LISTED:
        list_ptr = slots_ptr + tl.load(fields + 2).to(tl.int64)
        seen = tl.load(fields + 3)
        end = tl.load(fields + 4)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_V)
    live = m < count * GQA
    row = tl.load(rows_ptr + row_begin + m // GQA, mask=live, other=0).to(tl.int64)
    qo_head = head * GQA + m % GQA
    q_ptrs = q_ptr + (row * q_stride_row + qo_head * q_stride_head)[:, None] + d[None, :]
    q = tl.load(q_ptrs, mask=live[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    if LISTED:
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    else:
        at = row * (num_heads * GQA) + qo_head
        out_ptrs = out_ptr + at[:, None] * V_DIM + e[None, :]
        acc = tl.load(out_ptrs, mask=live[:, None] & (e < V_DIM)[None, :], other=0.0) / v_scale
        total = tl.full([BLOCK_M], 1.0, tl.float32)
        peak = tl.load(lse_ptr + at, mask=live, other=0.0) * LOG2E
    k_base = k_ptr + head * k_stride_head
    v_base = v_ptr + head * v_stride_head
    qk_scale = sm_scale * LOG2E
    full = seen // BLOCK_N * BLOCK_N
    for start in tl.range(0, full, BLOCK_N, num_stages=STAGES):
        acc, total, peak = _attend_keys(
            q, k_base, v_base, list_ptr, start, m, end, k_stride_slot, v_stride_slot, page_stride, qk_scale,
            acc, total, peak, HEAD_DIM, BLOCK_D, V_DIM, BLOCK_V, BLOCK_N, False, LISTED, PRECISION,
        )  # fmt: skip
    limit = tl.minimum(seen + m // GQA, end)
    for start in tl.range(full, end, BLOCK_N, num_stages=1):
        acc, total, peak = _attend_keys(
            q, k_base, v_base, list_ptr, start, limit, end, k_stride_slot, v_stride_slot, page_stride, qk_scale,
            acc, total, peak, HEAD_DIM, BLOCK_D, V_DIM, BLOCK_V, BLOCK_N, True, LISTED, PRECISION,
        )  # fmt: skip
    # Read again only now: the compiler would keep rows and places in registers through the loops.
    row = tl.load(rows_ptr + row_begin + m // GQA, mask=live, other=0, volatile=True).to(tl.int64)
    at = row * (num_heads * GQA) + head * GQA + m % GQA
    out_ptrs = out_ptr + at[:, None] * V_DIM + e[None, :]
    tl.store(out_ptrs, acc * (v_scale / total)[:, None], mask=live[:, None] & (e < V_DIM)[None, :])
    tl.store(lse_ptr + at, (peak + tl.log2(total)) * LN2, mask=live)
