"""Triton kernels of grouped attention: tiles of query rows over lists of slots, and the merge of the parts.

Both are portable from sm_80 on. Inside, exponents are to base 2 (one instruction) and turned into natural logarithms
when they leave.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefix_kernels.kernels import wait_for_the_kernel_before

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _values(v_ptrs, e, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr):
    return tl.load(v_ptrs) if V_DIM == BLOCK_V else tl.load(v_ptrs, mask=e[None, :] < V_DIM, other=0.0)


@triton.jit
def _attend_block(
    q, rest, k_base, v_base, list_ptr, start, end, k_stride_slot, v_stride_slot, qk_scale, acc, total, peak,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    LATENT: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys: q [BLOCK_M, BLOCK_D], acc [BLOCK_M, BLOCK_V], total and peak [BLOCK_M] (base 2).

    LATENT: q [BLOCK_M, BLOCK_V] of the channels that are the value's, too, and rest [BLOCK_M, BLOCK_D] of the others.
    """
    column = start + tl.arange(0, BLOCK_N)
    # Columns past the end read the last key again and are masked after the product: no load is predicated, and no
    # row is read that is not listed.
    place = tl.minimum(column, end - 1) if MASKED else column
    slot = tl.load(list_ptr + place).to(tl.int64)
    first = V_DIM if LATENT else 0
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_V)
    k_ptrs = k_base + first + slot[None, :] * k_stride_slot + d[:, None]
    k = tl.load(k_ptrs) if HEAD_DIM - first == BLOCK_D else tl.load(k_ptrs, d[:, None] < HEAD_DIM - first, other=0.0)
    v_ptrs = v_base + slot[:, None] * v_stride_slot + e[None, :]
    if LATENT:
        v = _values(v_ptrs, e, V_DIM, BLOCK_V)
        scores = tl.dot(q, tl.trans(v.to(q.dtype)), input_precision=PRECISION)
        scores = tl.dot(rest, k.to(q.dtype), scores, input_precision=PRECISION) * qk_scale
    else:
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * qk_scale
    if MASKED:
        scores = tl.where((column < end)[None, :], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    weight = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weight, axis=1)
    if not LATENT:
        v = _values(v_ptrs, e, V_DIM, BLOCK_V)
    acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, higher


@triton.jit(do_not_specialize=["batch"])
def attend_items_kernel(
    q_ptr,  # [batch, num_qo_heads, HEAD_DIM]
    k_ptr,  # [num_slots, num_kv_heads, HEAD_DIM]
    v_ptr,  # [num_slots, num_kv_heads, V_DIM]
    slots_ptr,  # int32 or int64 [arena]
    head_slots_ptr,  # the same, of lists that are not those of all KV heads: with a head_stride
    rows_ptr,  # int32 [num_tile_requests], batch rows
    counts_ptr,  # int32 [num_lists, num_kv_heads]
    head_map_ptr,  # int32 [num_kv_heads], whose list a KV head reads
    items_ptr,  # int32 [max_items, 11], see `items.py`; of launches of one pass, in which nothing is joined
    partial_out_ptr,  # fp32 [num_partials, V_DIM]
    partial_lse_ptr,  # fp32 [num_partials], base 2
    out_ptr,  # [batch, num_qo_heads, V_DIM], of direct tiles
    lse_ptr,  # fp32 [batch, num_qo_heads], of direct tiles
    sm_scale,  # fp32, times the scale of K
    v_scale,  # fp32, scale of V, of direct tiles
    batch,  # rows of q, out and lse: a plan for more of them reads and writes nothing there
    q_stride_row, q_stride_head, k_stride_slot, k_stride_head, v_stride_slot, v_stride_head, out_stride_row,
    out_stride_head, GQA: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, LATENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (KV head, item): one tile of rows over one stretch of one list; writes that part's state.

    Of a direct tile, whose rows have no other part, that is the result. LATENT: values are keys' first V_DIM channels,
    read once for both; BLOCK_D is for the others.
    """
    head = tl.program_id(0).to(tl.int64)
    fields = items_ptr + tl.program_id(1).to(tl.int64) * 11
    num_rows = tl.load(fields + 1)
    if num_rows > 0:
        row_begin = tl.load(fields)
        list_begin = tl.load(fields + 2).to(tl.int64)
        head_stride = tl.load(fields + 3).to(tl.int64)
        list_id = tl.load(fields + 4)
        begin = tl.load(fields + 5)
        end = tl.load(fields + 6)
        source = tl.load(head_map_ptr + head)
        if list_id >= 0:
            end = tl.minimum(end, tl.load(counts_ptr + list_id * tl.num_programs(0) + source))
        arena_ptr = slots_ptr
        if head_stride > 0:
            arena_ptr = head_slots_ptr
        list_ptr = arena_ptr + list_begin + source * head_stride

        m = tl.arange(0, BLOCK_M)
        live = m < num_rows * GQA
        row = tl.load(rows_ptr + row_begin + m // GQA, mask=live, other=0).to(tl.int64)
        q_ptrs = q_ptr + row[:, None] * q_stride_row + (head * GQA + m % GQA)[:, None] * q_stride_head
        there = (live & (row < batch))[:, None]
        d = tl.arange(0, BLOCK_V if LATENT else BLOCK_D)[None, :]
        q = tl.load(q_ptrs + d, mask=there & (d < (V_DIM if LATENT else HEAD_DIM)), other=0.0)
        rest = q
        if LATENT:
            d = V_DIM + tl.arange(0, BLOCK_D)[None, :]
            rest = tl.load(q_ptrs + d, mask=there & (d < HEAD_DIM), other=0.0)

        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        k_base = k_ptr + head * k_stride_head
        v_base = v_ptr + head * v_stride_head
        qk_scale = sm_scale * LOG2E
        full = begin + tl.maximum(end - begin, 0) // BLOCK_N * BLOCK_N
        for start in tl.range(begin, full, BLOCK_N, num_stages=STAGES):
            acc, total, peak = _attend_block(
                q, rest, k_base, v_base, list_ptr, start, end, k_stride_slot, v_stride_slot, qk_scale, acc, total, peak,
                HEAD_DIM, BLOCK_D, V_DIM, BLOCK_V, BLOCK_N, LATENT, False, PRECISION,
            )  # fmt: skip
        if full < end:
            acc, total, peak = _attend_block(
                q, rest, k_base, v_base, list_ptr, full, end, k_stride_slot, v_stride_slot, qk_scale, acc, total, peak,
                HEAD_DIM, BLOCK_D, V_DIM, BLOCK_V, BLOCK_N, LATENT, True, PRECISION,
            )  # fmt: skip
        empty = total == 0.0
        e = tl.arange(0, BLOCK_V)
        out = acc / tl.where(empty, 1.0, total)[:, None]
        lse = tl.where(empty, float("-inf"), peak + tl.log2(tl.where(empty, 1.0, total)))
        # Read only now, and rows again: the compiler would keep them in registers through the loop.
        first_partial = tl.load(fields + 7, volatile=True).to(tl.int64)
        if first_partial >= 0:
            partial = first_partial + head * BLOCK_M + m
            tl.store(
                partial_out_ptr + partial[:, None] * V_DIM + e[None, :], out, mask=live[:, None] & (e < V_DIM)[None, :]
            )
            tl.store(partial_lse_ptr + partial, lse, mask=live)
        else:
            row = tl.load(rows_ptr + row_begin + m // GQA, mask=live, other=0, volatile=True).to(tl.int64)
            live = live & (row < batch)
            qo_head = head * GQA + m % GQA
            out_ptrs = out_ptr + (row * out_stride_row + qo_head * out_stride_head)[:, None] + e[None, :]
            tl.store(out_ptrs, (out * v_scale).to(out_ptr.dtype.element_ty), mask=live[:, None] & (e < V_DIM)[None, :])
            tl.store(lse_ptr + row * (tl.num_programs(0) * GQA) + qo_head, lse * LN2, mask=live)


@triton.jit
def _places(spans_ptr, qo_head, part, GQA: tl.constexpr, NUM_SPANS: tl.constexpr):
    """Of a row's parts, those of all its spans as one list: how many there are, and where some of them are among the
    partial rows, [query heads, parts]. Less than 0: the row was written by its only part."""
    count = 0
    fewest = 0
    place = tl.zeros([qo_head.shape[0], part.shape[0]], tl.int64)
    for span in tl.static_range(NUM_SPANS):
        first = tl.load(spans_ptr + span * 4).to(tl.int64)
        part_stride = tl.load(spans_ptr + span * 4 + 1).to(tl.int64)
        head_stride = tl.load(spans_ptr + span * 4 + 2)
        parts = tl.load(spans_ptr + span * 4 + 3)
        own = (part - count)[None, :]
        of_head = first + qo_head // GQA * head_stride + qo_head % GQA
        place = tl.where((own >= 0) & (own < parts), of_head[:, None] + own * part_stride, place)
        fewest = tl.minimum(fewest, parts)
        count += parts
    return tl.where(fewest < 0, fewest, count), place


@triton.jit
def merge_items_kernel(
    partial_out_ptr,  # fp32 [num_partials, V_DIM]
    partial_lse_ptr,  # fp32 [num_partials], base 2
    spans_ptr,  # int32 [batch, NUM_SPANS, 4], see `items.py`
    out_ptr,  # [batch, num_qo_heads, V_DIM]
    lse_ptr,  # fp32 [batch, num_qo_heads]
    v_scale,  # fp32, scale of V
    num_qo_heads,
    out_stride_row, out_stride_head, GQA: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    NUM_SPANS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_H query heads, batch row): merges the parts of that row's spans; an empty row gets 0 and -inf.

    Spans are read before the kernel before has ended, which writes none of them; all else after it. A row of one part
    leaves with the bits that a direct tile would have written: its weight is 2^0. So no factor may stand at the
    logarithms of parts, which the compiler would fuse into the difference.
    """
    qo_head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = tl.program_id(1).to(tl.int64)
    live = qo_head < num_qo_heads
    e = tl.arange(0, BLOCK_V)
    part = tl.arange(0, BLOCK_S)
    spans_ptr += row * NUM_SPANS * 4
    count, place = _places(spans_ptr, qo_head, part, GQA, NUM_SPANS)
    wait_for_the_kernel_before(OVERLAPPED)
    if count >= 0:
        acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
        for begin in tl.range(0, count, BLOCK_S):
            there = live[:, None] & (begin + part < count)[None, :]
            # Past the first level of caches: those that wrote them ran while these programs had begun.
            lse = tl.load(partial_lse_ptr + place, mask=there, other=float("-inf"), cache_modifier=".cg")
            # Asked for together with its logarithm. An empty part may hold anything: a weight of 0 would not silence
            # a NaN.
            out = tl.load(
                partial_out_ptr + place[:, :, None] * V_DIM + e[None, None, :],
                mask=there[:, :, None] & (e < V_DIM)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            out = tl.where((lse > float("-inf"))[:, :, None], out, 0.0)
            higher = tl.maximum(peak, tl.max(lse, axis=1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(lse - safe[:, None])
            shrink = tl.exp2(peak - safe)
            acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * out, axis=1)
            total = total * shrink + tl.sum(weight, axis=1)
            peak = higher
            if begin + BLOCK_S < count:
                _, place = _places(spans_ptr, qo_head, begin + BLOCK_S + part, GQA, NUM_SPANS)
        empty = total == 0.0
        out = acc * (v_scale / tl.where(empty, 1.0, total))[:, None]
        out_ptrs = out_ptr + row * out_stride_row + qo_head[:, None] * out_stride_head + e[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (e < V_DIM)[None, :])
        lse = tl.where(empty, float("-inf"), (peak + tl.log2(tl.where(empty, 1.0, total))) * LN2)
        tl.store(lse_ptr + row * num_qo_heads + qo_head, lse, mask=live)
