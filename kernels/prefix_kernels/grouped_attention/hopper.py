"""Grouped attention on Hopper: warps that fetch keys and values apart from warps that multiply.

The same items, the same results as `kernels.attend_items_kernel`, for sm_90: one warp group fetches listed keys and
values into a ring in shared memory, one or two others (64 query rows each) multiply with Hopper's matrix instructions
and never wait for an address. Written in Gluon, as Triton's own pipelining keeps one block of a gathered list on its way
at a time.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from prefix_kernels.dependent_launch import wait_for_the_kernel_before

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)
_copy_to_shared = getattr(hopper.async_copy, "async_load", None) or hopper.async_copy.async_copy_global_to_shared
"""Renamed after Triton 3.6."""
_wait_for_the_kernel_before = gluon.jit(wait_for_the_kernel_before.fn)


@gluon.jit
def _item(
    items_ptr, item, counts_ptr, head_map_ptr, head, num_heads
):
    """Of one item: (its fields, first of its requests, how many, list's offset in the arena, begin, end)."""
    fields = items_ptr + item.to(gl.int64) * 8
    source = gl.load(head_map_ptr + head)
    row_begin = gl.load(fields)
    num_rows = gl.load(fields + 1)
    list_begin = gl.load(fields + 2).to(gl.int64)
    head_stride = gl.load(fields + 3).to(gl.int64)
    list_id = gl.load(fields + 4)
    begin = gl.load(fields + 5)
    end = gl.load(fields + 6)
    if list_id >= 0:
        end = gl.minimum(end, gl.load(counts_ptr + list_id * num_heads + source))
    return fields, row_begin, num_rows, list_begin + source * head_stride, begin, end


@gluon.jit
def _fetch(
    k_ptr,
    v_ptr,
    slots_ptr,
    counts_ptr,
    head_map_ptr,
    items_ptr,
    num_items_ptr,
    head,
    num_heads,
    k_stride_slot,
    k_stride_head,
    v_stride_slot,
    v_stride_head,
    k_ring,
    v_ring,
    k_full,
    k_free,
    v_full,
    v_free,
    HEAD_DIM: gl.constexpr,
    V_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    RING: gl.constexpr,
):
    """The fetching warps: block after block of listed keys and values, as places of the ring become free."""
    k_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    v_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V_DIM, V_DIM // 8], [4, 1], [1, 0])
    k_row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, k_layout))
    v_row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, v_layout))
    k_column = k_ptr + head * k_stride_head + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, k_layout))
    v_column = v_ptr + head * v_stride_head + gl.arange(0, V_DIM, gl.SliceLayout(0, v_layout))
    place = 0
    phase = 1
    for item in range(gl.program_id(1), gl.load(num_items_ptr), gl.num_programs(1)):
        _, _, _, offset, begin, end = _item(items_ptr, item, counts_ptr, head_map_ptr, head, num_heads)
        list_ptr = slots_ptr + offset
        last = gl.maximum(end, begin + 1) - 1
        k_slot = gl.load(list_ptr + gl.minimum(begin + k_row, last))
        v_slot = gl.load(list_ptr + gl.minimum(begin + v_row, last))
        for start in range(begin, end, BLOCK_N):
            # The next block's slots are on their way while this block's keys are asked for. Places past the end read
            # the last slot again: no copy is predicated, and nothing is read that is not listed.
            k_ahead = gl.load(list_ptr + gl.minimum(start + BLOCK_N + k_row, last))
            v_ahead = gl.load(list_ptr + gl.minimum(start + BLOCK_N + v_row, last))
            hopper.mbarrier.wait(k_free.index(place), phase)
            k_at = k_slot.to(gl.int64) * k_stride_slot
            _copy_to_shared(k_ring.index(place), k_column[None, :] + k_at[:, None])
            hopper.async_copy.mbarrier_arrive(k_full.index(place), increment_count=False)
            hopper.mbarrier.wait(v_free.index(place), phase)
            v_at = v_slot.to(gl.int64) * v_stride_slot
            _copy_to_shared(v_ring.index(place), v_column[None, :] + v_at[:, None])
            hopper.async_copy.mbarrier_arrive(v_full.index(place), increment_count=False)
            k_slot = k_ahead
            v_slot = v_ahead
            wrap = place == RING - 1
            place = gl.where(wrap, 0, place + 1)
            phase = gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def _weights(scores, peak, total, qk_scale, start, end, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Softmax of one block, to base 2: (weights, new peak, new total, what the older sums shrink by)."""
    if start + BLOCK_N > end:
        column = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        scores = gl.where((column < end)[None, :], scores, float("-inf"))
    higher = gl.maximum(peak, gl.max(scores, axis=1) * qk_scale)
    weights = gl.exp2(scores * qk_scale - higher[:, None])
    shrink = gl.exp2(peak - higher)
    return weights, higher, total * shrink + gl.sum(weights, axis=1), shrink


@gluon.jit
def _attend(
    HALF: gl.constexpr,
    q_ptr,
    rows_ptr,
    counts_ptr,
    head_map_ptr,
    items_ptr,
    num_items_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    head,
    num_heads,
    qk_scale,
    v_scale,
    batch,
    q_stride_row,
    q_stride_head,
    out_stride_row,
    out_stride_head,
    q_tile,
    k_ring,
    v_ring,
    k_full,
    k_free,
    v_full,
    v_free,
    GQA: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    V_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    RING: gl.constexpr,
):
    """One warp group: 64 rows of each item's tile over all its blocks; writes that part's state, or the result."""
    # One layout of rows for scores and output: no exchange between them.
    COLUMNS: gl.constexpr = BLOCK_N if BLOCK_N < V_DIM else V_DIM
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    q_own = q_tile.index(HALF)
    none = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    q_m = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, q_layout))
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, q_layout))
    m = HALF * ROWS + gl.arange(0, ROWS, of_rows)
    e = gl.arange(0, V_DIM, gl.SliceLayout(0, layout))
    place = 0
    phase = 0
    for item in range(gl.program_id(1), gl.load(num_items_ptr), gl.num_programs(1)):
        fields, row_begin, num_rows, _, begin, end = _item(
            items_ptr, item, counts_ptr, head_map_ptr, head, num_heads
        )
        q_live = q_m < num_rows * GQA
        q_row = gl.load(rows_ptr + row_begin + q_m // GQA, mask=q_live, other=0).to(gl.int64)
        q_ptrs = q_ptr + q_row[:, None] * q_stride_row + (head * GQA + q_m % GQA)[:, None] * q_stride_head + d[None, :]
        q = gl.load(q_ptrs, mask=(q_live & (q_row < batch))[:, None], other=0.0)
        q_own.store(q)
        hopper.fence_async_shared()

        acc = gl.zeros([ROWS, V_DIM], gl.float32, layout)
        total = gl.zeros([ROWS], gl.float32, of_rows)
        peak = gl.full([ROWS], float("-inf"), gl.float32, of_rows)
        if begin < end:
            hopper.mbarrier.wait(k_full.index(place), phase)
            hopper.fence_async_shared()
            keys = k_ring.index(place).permute((1, 0))
            scores = hopper.warpgroup_mma(q_own, keys, none, use_acc=False, is_async=True)
            scores = hopper.warpgroup_mma_wait(0, deps=[scores])
            hopper.mbarrier.arrive(k_free.index(place), count=1)
            weights, peak, total, shrink = _weights(scores, peak, total, qk_scale, begin, end, BLOCK_N, layout)
            weights = gl.convert_layout(weights.to(q_ptr.dtype.element_ty), weight_layout)
            for start in range(begin + BLOCK_N, end, BLOCK_N):
                # Scores of this block, and the sum of the one before: softmax of these while that is multiplied.
                wrap = place == RING - 1
                next_place = gl.where(wrap, 0, place + 1)
                next_phase = gl.where(wrap, phase ^ 1, phase)
                hopper.mbarrier.wait(k_full.index(next_place), next_phase)
                hopper.fence_async_shared()
                keys = k_ring.index(next_place).permute((1, 0))
                scores_to_come = hopper.warpgroup_mma(q_own, keys, none, use_acc=False, is_async=True)
                hopper.mbarrier.wait(v_full.index(place), phase)
                hopper.fence_async_shared()
                acc_to_come = hopper.warpgroup_mma(weights, v_ring.index(place), acc, is_async=True)
                scores = hopper.warpgroup_mma_wait(1, deps=[scores_to_come])
                hopper.mbarrier.arrive(k_free.index(next_place), count=1)
                fresh, peak, total, shrink = _weights(scores, peak, total, qk_scale, start, end, BLOCK_N, layout)
                acc = hopper.warpgroup_mma_wait(0, deps=[acc_to_come])
                hopper.mbarrier.arrive(v_free.index(place), count=1)
                acc = acc * shrink[:, None]
                weights = gl.convert_layout(fresh.to(q_ptr.dtype.element_ty), weight_layout)
                place = next_place
                phase = next_phase
            hopper.mbarrier.wait(v_full.index(place), phase)
            hopper.fence_async_shared()
            acc = hopper.warpgroup_mma(weights, v_ring.index(place), acc, is_async=True)
            acc = hopper.warpgroup_mma_wait(0, deps=[acc])
            hopper.mbarrier.arrive(v_free.index(place), count=1)
            wrap = place == RING - 1
            place = gl.where(wrap, 0, place + 1)
            phase = gl.where(wrap, phase ^ 1, phase)

        empty = total == 0.0
        out = acc / gl.where(empty, 1.0, total)[:, None]
        lse = gl.where(empty, float("-inf"), peak + gl.log2(gl.where(empty, 1.0, total)))
        live = m < num_rows * GQA
        first_partial = gl.load(fields + 7).to(gl.int64)
        if first_partial >= 0:
            partial = first_partial + head * BLOCK_M + m
            gl.store(partial_out_ptr + partial[:, None] * V_DIM + e[None, :], out, mask=live[:, None])
            gl.store(partial_lse_ptr + partial, lse, mask=live)
        else:
            row = gl.load(rows_ptr + row_begin + m // GQA, mask=live, other=0).to(gl.int64)
            live = live & (row < batch)
            qo_head = head * GQA + m % GQA
            out_ptrs = out_ptr + (row * out_stride_row + qo_head * out_stride_head)[:, None] + e[None, :]
            gl.store(out_ptrs, (out * v_scale).to(out_ptr.dtype.element_ty), mask=live[:, None])
            gl.store(lse_ptr + row * (num_heads * GQA) + qo_head, lse * LN2, mask=live)


@gluon.jit(do_not_specialize=["batch"])
def attend_items_hopper_kernel(
    q_ptr,  # [batch, num_qo_heads, HEAD_DIM]
    k_ptr,  # [num_slots, num_kv_heads, HEAD_DIM]
    v_ptr,  # [num_slots, num_kv_heads, V_DIM]
    slots_ptr,  # int32 or int64 [arena]
    rows_ptr,  # int32 [num_tile_requests], batch rows
    counts_ptr,  # int32 [num_lists, num_kv_heads]
    head_map_ptr,  # int32 [num_kv_heads], whose list a KV head reads
    items_ptr,  # int32 [max_items, 8], see `items.py`
    num_items_ptr,  # int32 [1]
    partial_out_ptr,  # fp32 [num_partials, V_DIM]
    partial_lse_ptr,  # fp32 [num_partials], base 2
    out_ptr,  # [batch, num_qo_heads, V_DIM], of direct tiles
    lse_ptr,  # fp32 [batch, num_qo_heads], of direct tiles
    sm_scale,  # fp32, times the scale of K; positive
    v_scale,  # fp32, scale of V, of direct tiles
    batch,  # rows of q, out and lse
    q_stride_row,
    q_stride_head,
    k_stride_slot,
    k_stride_head,
    v_stride_slot,
    v_stride_head,
    out_stride_row,
    out_stride_head,
    GQA: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    V_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    RING: gl.constexpr,
    OVERLAPPED: gl.constexpr,
):
    """Program (KV head, p): the items p, p + programs, ... of that KV head, one after the other."""
    _wait_for_the_kernel_before(OVERLAPPED)
    head = gl.program_id(0).to(gl.int64)
    num_heads = gl.num_programs(0)
    qk_scale = sm_scale * LOG2E
    HALVES: gl.constexpr = BLOCK_M // ROWS
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    k_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    v_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, V_DIM], dtype)
    q_tile = gl.allocate_shared_memory(dtype, [HALVES, ROWS, HEAD_DIM], q_shared)
    k_ring = gl.allocate_shared_memory(dtype, [RING, BLOCK_N, HEAD_DIM], k_shared)
    v_ring = gl.allocate_shared_memory(dtype, [RING, BLOCK_N, V_DIM], v_shared)
    barrier: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [RING, 1], barrier)
    k_free = gl.allocate_shared_memory(gl.int64, [RING, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [RING, 1], barrier)
    v_free = gl.allocate_shared_memory(gl.int64, [RING, 1], barrier)
    for place in gl.static_range(RING):
        hopper.mbarrier.init(k_full.index(place), count=128)
        hopper.mbarrier.init(v_full.index(place), count=128)
        hopper.mbarrier.init(k_free.index(place), count=HALVES)
        hopper.mbarrier.init(v_free.index(place), count=HALVES)
    if HALVES == 2:
        gl.warp_specialize(
            [
                (_attend, (gl.constexpr(0), q_ptr, rows_ptr, counts_ptr, head_map_ptr, items_ptr, num_items_ptr, partial_out_ptr, partial_lse_ptr, out_ptr, lse_ptr, head, num_heads, qk_scale, v_scale, batch, q_stride_row, q_stride_head, out_stride_row, out_stride_head, q_tile, k_ring, v_ring, k_full, k_free, v_full, v_free, GQA, HEAD_DIM, V_DIM, BLOCK_M, BLOCK_N, RING)),
                (_attend, (gl.constexpr(1), q_ptr, rows_ptr, counts_ptr, head_map_ptr, items_ptr, num_items_ptr, partial_out_ptr, partial_lse_ptr, out_ptr, lse_ptr, head, num_heads, qk_scale, v_scale, batch, q_stride_row, q_stride_head, out_stride_row, out_stride_head, q_tile, k_ring, v_ring, k_full, k_free, v_full, v_free, GQA, HEAD_DIM, V_DIM, BLOCK_M, BLOCK_N, RING)),
                (_fetch, (k_ptr, v_ptr, slots_ptr, counts_ptr, head_map_ptr, items_ptr, num_items_ptr, head, num_heads, k_stride_slot, k_stride_head, v_stride_slot, v_stride_head, k_ring, v_ring, k_full, k_free, v_full, v_free, HEAD_DIM, V_DIM, BLOCK_N, RING)),
            ],
            [4, 4],
            [224, 56],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (gl.constexpr(0), q_ptr, rows_ptr, counts_ptr, head_map_ptr, items_ptr, num_items_ptr, partial_out_ptr, partial_lse_ptr, out_ptr, lse_ptr, head, num_heads, qk_scale, v_scale, batch, q_stride_row, q_stride_head, out_stride_row, out_stride_head, q_tile, k_ring, v_ring, k_full, k_free, v_full, v_free, GQA, HEAD_DIM, V_DIM, BLOCK_M, BLOCK_N, RING)),
                (_fetch, (k_ptr, v_ptr, slots_ptr, counts_ptr, head_map_ptr, items_ptr, num_items_ptr, head, num_heads, k_stride_slot, k_stride_head, v_stride_slot, v_stride_head, k_ring, v_ring, k_full, k_free, v_full, v_free, HEAD_DIM, V_DIM, BLOCK_N, RING)),
            ],
            [4],
            [56],
        )
