"""Grouped attention on Hopper: warps that fetch keys and values apart from warps that multiply.

The same items as `kernels.attend_items_kernel`, for sm_90: one warp group fetches listed keys and values into a ring in
shared memory; one or two others, of 64 query rows each, multiply with Hopper's matrix instructions and never wait for
an address. In Gluon, since Triton's own pipelining keeps a single block of a gathered list on its way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from prefix_kernels.kernels import wait_for_the_kernel_before

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)
_copy_to_shared = getattr(hopper.async_copy, "async_load", None) or hopper.async_copy.async_copy_global_to_shared
"""Renamed after Triton 3.6."""
_wait_for_the_kernel_before = gluon.jit(wait_for_the_kernel_before.fn)


@gluon.jit
def _fields(items_ptr, item):
    """Of one item: first of its requests, how many, list_begin, head_stride, list_id, begin, end, first partial row;
    list_begin, length and list_id of the suffix joined to it."""
    at = items_ptr + item.to(gl.int64) * 11
    return (
        gl.load(at),
        gl.load(at + 1),
        gl.load(at + 2),
        gl.load(at + 3),
        gl.load(at + 4),
        gl.load(at + 5),
        gl.load(at + 6),
        gl.load(at + 7),
        gl.load(at + 8),
        gl.load(at + 9),
        gl.load(at + 10),
    )


@gluon.jit
def _counted(end, list_id, counts_ptr, source, num_heads):
    """Where a list ends whose count is on the device: past the first level of caches, as the launch before may be
    writing others of them."""
    if list_id >= 0:
        end = gl.minimum(end, gl.load(counts_ptr + list_id * num_heads + source, cache_modifier=".cg"))
    return end


@gluon.jit
def _wait_for_lists(head_stride, AFTER_LISTS: gl.constexpr):
    """Until lists are there that the launch before writes: those of each KV head, and their counts."""
    if AFTER_LISTS:
        if head_stride > 0:
            _wait_for_the_kernel_before(True, False)


@gluon.jit
def _fetch(queue, ring, pool, sizes: gl.constexpr):
    """The fetching warps: block after block of listed keys and values, as places of the ring become free. Those of a
    joined suffix come first: they are there before the lists are."""
    HEAD_DIM: gl.constexpr = sizes[1]
    V_DIM: gl.constexpr = sizes[2]
    BLOCK_N: gl.constexpr = sizes[4]
    RING: gl.constexpr = sizes[5]
    items_ptr, first, num_items, counts_ptr, source, head, num_heads = queue
    k_ring, v_ring, k_full, k_free, v_full, v_free = ring
    k_ptr, v_ptr, slots_ptr, head_slots_ptr, k_stride_slot, k_stride_head, v_stride_slot, v_stride_head = pool
    k_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    v_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V_DIM, V_DIM // 8], [4, 1], [1, 0])
    CHUNK: gl.constexpr = BLOCK_N if BLOCK_N < 64 else 64  # of which the slots fit the registers
    k_row = gl.arange(0, CHUNK, gl.SliceLayout(1, k_layout))
    v_row = gl.arange(0, CHUNK, gl.SliceLayout(1, v_layout))
    k_column = k_ptr + head * k_stride_head + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, k_layout))
    v_column = v_ptr + head * v_stride_head + gl.arange(0, V_DIM, gl.SliceLayout(0, v_layout))
    place = 0
    phase = 1
    _, _, list_begin, head_stride, list_id, begin, listed, _, suffix_begin, joined, suffix_id = first
    for item in range(gl.program_id(1), num_items, gl.num_programs(1)):
        for stretch in range(gl.where(joined > 0, 0, 1), 2):
            of_list = stretch > 0
            stride = gl.where(of_list, head_stride, 0)
            bounded_by = gl.where(of_list, list_id, suffix_id)
            room = gl.where(of_list, listed, joined)
            entry = gl.where(of_list, begin, 0)
            arena_ptr = slots_ptr
            if stride > 0:
                arena_ptr = head_slots_ptr
            list_ptr = arena_ptr + gl.where(of_list, list_begin, suffix_begin).to(gl.int64)
            list_ptr += source * stride.to(gl.int64)
            _wait_for_lists(stride, sizes[6])
            # The first slots are asked for before the count on the device is known, and again where there are fewer:
            # what stands behind the count is read, never used. Past the end the last key is copied once more, so no
            # copy is predicated and no key is read that is not listed.
            last = gl.maximum(room, entry + 1) - 1
            k_slot = gl.load(list_ptr + gl.minimum(entry + k_row, last))
            v_slot = gl.load(list_ptr + gl.minimum(entry + v_row, last))
            end = _counted(room, bounded_by, counts_ptr, source, num_heads)
            last = gl.maximum(end, entry + 1) - 1
            if end < entry + CHUNK:
                k_slot = gl.load(list_ptr + gl.minimum(entry + k_row, last))
                v_slot = gl.load(list_ptr + gl.minimum(entry + v_row, last))
            for start in range(entry, end, BLOCK_N):
                for chunk in gl.static_range(BLOCK_N // CHUNK):
                    # The next slots are on their way while these keys are asked for.
                    ahead = start + (chunk + 1) * CHUNK
                    k_ahead = gl.load(list_ptr + gl.minimum(ahead + k_row, last))
                    v_ahead = gl.load(list_ptr + gl.minimum(ahead + v_row, last))
                    if chunk == 0:
                        hopper.mbarrier.wait(k_free.index(place), phase)
                    k_at = k_slot.to(gl.int64) * k_stride_slot
                    k_place = k_ring.index(place).slice(chunk * CHUNK, CHUNK, 0)
                    _copy_to_shared(k_place, k_column[None, :] + k_at[:, None])
                    if chunk == BLOCK_N // CHUNK - 1:
                        hopper.async_copy.mbarrier_arrive(k_full.index(place), increment_count=False)
                    if chunk == 0:
                        hopper.mbarrier.wait(v_free.index(place), phase)
                    v_at = v_slot.to(gl.int64) * v_stride_slot
                    v_place = v_ring.index(place).slice(chunk * CHUNK, CHUNK, 0)
                    _copy_to_shared(v_place, v_column[None, :] + v_at[:, None])
                    if chunk == BLOCK_N // CHUNK - 1:
                        hopper.async_copy.mbarrier_arrive(v_full.index(place), increment_count=False)
                    k_slot = k_ahead
                    v_slot = v_ahead
                wrap = place == RING - 1
                place = gl.where(wrap, 0, place + 1)
                phase = gl.where(wrap, phase ^ 1, phase)
        following = gl.minimum(item + gl.num_programs(1), num_items - 1)
        fields = _fields(items_ptr, following)
        _, _, list_begin, head_stride, list_id, begin, listed, _, suffix_begin, joined, suffix_id = fields


@gluon.jit
def _weights(scores, peak, total, qk_scale, start, joined, stop, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Softmax of one block, to base 2: (weights, new peak, new total, what the older sums shrink by).

    Of the columns of a joined suffix, which begin at 0, or of those of the list, which end at `stop`.
    """
    end = gl.where(start < joined, joined, stop)
    if start + BLOCK_N > end:
        column = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        scores = gl.where((column < end)[None, :], scores, float("-inf"))
    higher = gl.maximum(peak, gl.max(scores, axis=1) * qk_scale)
    weights = gl.exp2(scores * qk_scale - higher[:, None])
    shrink = gl.exp2(peak - higher)
    return weights, higher, total * shrink + gl.sum(weights, axis=1), shrink


@gluon.jit
def _attend(HALF: gl.constexpr, queue, ring, query, result, sizes: gl.constexpr):
    """One warp group: 64 rows of each item's tile over all its blocks; writes that part's state, or the result."""
    GQA: gl.constexpr = sizes[0]
    HEAD_DIM: gl.constexpr = sizes[1]
    V_DIM: gl.constexpr = sizes[2]
    BLOCK_M: gl.constexpr = sizes[3]
    BLOCK_N: gl.constexpr = sizes[4]
    RING: gl.constexpr = sizes[5]
    items_ptr, first, num_items, counts_ptr, source, head, num_heads = queue
    k_ring, v_ring, k_full, k_free, v_full, v_free = ring
    q_ptr, rows_ptr, batch, q_stride_row, q_stride_head, q_tile, qk_scale = query
    partial_out_ptr, partial_lse_ptr, out_ptr, lse_ptr, out_stride_row, out_stride_head, v_scale = result
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
    row_begin, num_rows, _, head_stride, list_id, begin, listed, first_partial, _, joined, suffix_id = first
    for item in range(gl.program_id(1), num_items, gl.num_programs(1)):
        q_live = q_m < num_rows * GQA
        q_row = gl.load(rows_ptr + row_begin + q_m // GQA, mask=q_live, other=0).to(gl.int64)
        q_ptrs = q_ptr + q_row[:, None] * q_stride_row + (head * GQA + q_m % GQA)[:, None] * q_stride_head + d[None, :]
        q = gl.load(q_ptrs, mask=(q_live & (q_row < batch))[:, None], other=0.0)
        joined = _counted(joined, suffix_id, counts_ptr, source, num_heads)
        _wait_for_lists(head_stride, sizes[6])
        end = _counted(listed, list_id, counts_ptr, source, num_heads)
        # Columns: the joined suffix in whole blocks, then the list.
        stop = (joined + BLOCK_N - 1) // BLOCK_N * BLOCK_N + gl.maximum(end - begin, 0)
        q_own.store(q)
        hopper.fence_async_shared()

        acc = gl.zeros([ROWS, V_DIM], gl.float32, layout)
        total = gl.zeros([ROWS], gl.float32, of_rows)
        peak = gl.full([ROWS], float("-inf"), gl.float32, of_rows)
        if stop > 0:
            hopper.mbarrier.wait(k_full.index(place), phase)
            hopper.fence_async_shared()
            keys = k_ring.index(place).permute((1, 0))
            scores = hopper.warpgroup_mma(q_own, keys, none, use_acc=False, is_async=True)
            scores = hopper.warpgroup_mma_wait(0, deps=[scores])
            hopper.mbarrier.arrive(k_free.index(place), count=1)
            weights, peak, total, shrink = _weights(scores, peak, total, qk_scale, 0, joined, stop, BLOCK_N, layout)
            weights = gl.convert_layout(weights.to(q_ptr.dtype.element_ty), weight_layout)
            for start in range(BLOCK_N, stop, BLOCK_N):
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
                fresh, peak, total, shrink = _weights(
                    scores, peak, total, qk_scale, start, joined, stop, BLOCK_N, layout
                )
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
        if first_partial >= 0:
            partial = first_partial.to(gl.int64) + head * BLOCK_M + m
            gl.store(partial_out_ptr + partial[:, None] * V_DIM + e[None, :], out, mask=live[:, None])
            gl.store(partial_lse_ptr + partial, lse, mask=live)
        else:
            row = gl.load(rows_ptr + row_begin + m // GQA, mask=live, other=0).to(gl.int64)
            live = live & (row < batch)
            qo_head = head * GQA + m % GQA
            out_ptrs = out_ptr + (row * out_stride_row + qo_head * out_stride_head)[:, None] + e[None, :]
            gl.store(out_ptrs, (out * v_scale).to(out_ptr.dtype.element_ty), mask=live[:, None])
            gl.store(lse_ptr + row * (num_heads * GQA) + qo_head, lse * LN2, mask=live)
        following = gl.minimum(item + gl.num_programs(1), num_items - 1)
        fields = _fields(items_ptr, following)
        row_begin, num_rows, _, head_stride, list_id, begin, listed, first_partial, _, joined, suffix_id = fields
    # Whoever had no list of the layer, too: this kernel's end says that the one before has ended. Only now the merge's
    # programs come: those that come earlier crowd the multiprocessors that have no program of this kernel.
    _wait_for_the_kernel_before(sizes[7])


@gluon.jit(do_not_specialize=["batch"])
def attend_items_sm90_kernel(
    q_ptr,  # [batch, num_qo_heads, HEAD_DIM]
    k_ptr,  # [num_slots, num_kv_heads, HEAD_DIM]
    v_ptr,  # [num_slots, num_kv_heads, V_DIM]
    slots_ptr,  # int32 or int64 [arena]
    head_slots_ptr,  # the same, of lists that are not those of all KV heads: with a head_stride
    rows_ptr,  # int32 [num_tile_requests], batch rows
    counts_ptr,  # int32 [num_lists, num_kv_heads]
    head_map_ptr,  # int32 [num_kv_heads], whose list a KV head reads
    items_ptr,  # int32 [max_items, 11], see `items.py`
    num_items_ptr,  # int32 [1]
    partial_out_ptr,  # fp32 [num_partials, V_DIM]
    partial_lse_ptr,  # fp32 [num_partials], base 2
    out_ptr,  # [batch, num_qo_heads, V_DIM], of direct tiles
    lse_ptr,  # fp32 [batch, num_qo_heads], of direct tiles
    sm_scale,  # fp32, times the scale of K; positive
    v_scale,  # fp32, scale of V, of direct tiles
    batch,  # rows of q, out and lse
    q_stride_row, q_stride_head, k_stride_slot, k_stride_head, v_stride_slot, v_stride_head, out_stride_row,
    out_stride_head, GQA: gl.constexpr, HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, RING: gl.constexpr, OVERLAPPED: gl.constexpr, AFTER_LISTS: gl.constexpr,
):  # fmt: skip
    """Program (KV head, p): the items p, p + programs, ... of that KV head, one after the other.

    Tables of the plan are read before the kernel before has ended, which writes none of them; all else after it.
    AFTER_LISTS: that one writes a layer's lists and nothing else, so only these are read after it.
    """
    head = gl.program_id(0).to(gl.int64)
    num_heads = gl.num_programs(0)
    # On their way while the barriers are made. There is a first item for every program, be it an empty one.
    num_items = gl.load(num_items_ptr)
    source = gl.load(head_map_ptr + head)
    first = _fields(items_ptr, gl.program_id(1))
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
    # The fetching warps begin after it.
    if not AFTER_LISTS:
        _wait_for_the_kernel_before(OVERLAPPED, False)
    queue = (items_ptr, first, num_items, counts_ptr, source, head, num_heads)
    ring = (k_ring, v_ring, k_full, k_free, v_full, v_free)
    pool = (k_ptr, v_ptr, slots_ptr, head_slots_ptr, k_stride_slot, k_stride_head, v_stride_slot, v_stride_head)
    query = (q_ptr, rows_ptr, batch, q_stride_row, q_stride_head, q_tile, qk_scale)
    result = (partial_out_ptr, partial_lse_ptr, out_ptr, lse_ptr, out_stride_row, out_stride_head, v_scale)
    # Registers: 65,536 of a multiprocessor, or as many as `maxnreg` says; what the others leave is the first group's.
    sizes: gl.constexpr = (GQA, HEAD_DIM, V_DIM, BLOCK_M, BLOCK_N, RING, AFTER_LISTS, OVERLAPPED)
    if HALVES == 2:
        gl.warp_specialize(
            [
                (_attend, (gl.constexpr(0), queue, ring, query, result, sizes)),
                (_attend, (gl.constexpr(1), queue, ring, query, result, sizes)),
                (_fetch, (queue, ring, pool, sizes)),
            ],
            [4, 4],
            [216, 72],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (gl.constexpr(0), queue, ring, query, result, sizes)),
                (_fetch, (queue, ring, pool, sizes)),
            ],
            [4],
            [72],
        )
