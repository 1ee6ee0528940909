"""The end of attention on Hopper: its programs wait for each other's parts and share the rows to be merged."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LN2 = gl.constexpr(0.6931471805599453)
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Of the warps of one partition. Renamed after Triton 3.6."""


@gluon.jit
def _wait_for_all_parts(arrived_ptr, head, ARRIVALS: gl.constexpr):
    """Until every multiplying group of this KV head has written its parts of this launch.

    The counter only grows, by as much in each launch: no one has to set it back. The programs of a launch run at the
    same time (a cooperative launch), so waiting for each other cannot last.
    """
    expected = gl.num_programs(1) * ARRIVALS
    _barrier()
    before = gl.atomic_add(arrived_ptr + head, 1, sem="acq_rel", scope="gpu")
    target = (before // expected + 1) * expected
    seen = before + 1
    while seen < target:
        seen = gl.atomic_add(arrived_ptr + head, 0, sem="acquire", scope="gpu")


@gluon.jit
def merge_parts(
    HALF: gl.constexpr,
    queue,
    query,
    result,
    merging,
    GQA: gl.constexpr,
    V_DIM: gl.constexpr,
    HALVES: gl.constexpr,
    NUM_SPANS: gl.constexpr,
):
    """This group's share of the rows: the parts of all their spans, as `kernels.merge_items_kernel` merges them."""
    _, _, _, _, _, head, num_heads = queue
    _, _, batch, _, _, _, _ = query
    partial_out_ptr, partial_lse_ptr, out_ptr, lse_ptr, out_stride_row, out_stride_head, v_scale = result
    spans_ptr, arrived_ptr, some_parts = merging
    if some_parts > 0:
        _wait_for_all_parts(arrived_ptr, head, HALVES)

    MERGED_ROWS: gl.constexpr = 2
    AT_ONCE: gl.constexpr = 32
    # Parts within a thread and its neighbours, channels across the warps: sums need no shared memory.
    cube: gl.constexpr = gl.BlockedLayout([1, 8, V_DIM // 32], [1, 4, 8], [1, 1, 4], [2, 1, 0])
    plane: gl.constexpr = gl.SliceLayout(2, cube)  # rows and parts
    of_rows: gl.constexpr = gl.SliceLayout(1, plane)
    written: gl.constexpr = gl.SliceLayout(1, cube)  # rows and channels
    e = gl.arange(0, V_DIM, gl.SliceLayout(0, gl.SliceLayout(1, cube)))
    part = gl.arange(0, AT_ONCE, gl.SliceLayout(0, plane))
    share = gl.program_id(1) * HALVES + HALF
    for begin in range(share * MERGED_ROWS, batch * GQA, gl.num_programs(1) * HALVES * MERGED_ROWS):
        r = begin + gl.arange(0, MERGED_ROWS, of_rows)
        there = r < batch * GQA
        row = r // GQA
        spans = spans_ptr + row * (NUM_SPANS * 4)
        # A row that was written by its only part has -1 parts. The others' parts, of all spans, are one list.
        fewest = gl.full([MERGED_ROWS], 0, gl.int32, of_rows)
        count = gl.full([MERGED_ROWS], 0, gl.int32, of_rows)
        for span in gl.static_range(NUM_SPANS):
            parts = gl.load(spans + span * 4 + 3, mask=there, other=0)
            fewest = gl.minimum(fewest, parts)
            count += parts
        there = there & (fewest >= 0)
        most = gl.max(gl.where(there, count, 0), axis=0)
        acc = gl.full([MERGED_ROWS, V_DIM], 0.0, gl.float32, written)
        total = gl.full([MERGED_ROWS], 0.0, gl.float32, of_rows)
        peak = gl.full([MERGED_ROWS], float("-inf"), gl.float32, of_rows)
        for at in range(0, most, AT_ONCE):
            place = gl.full([MERGED_ROWS, AT_ONCE], 0, gl.int64, plane)
            left = gl.full([MERGED_ROWS], 0, gl.int32, of_rows)
            for span in gl.static_range(NUM_SPANS):
                first = gl.load(spans + span * 4, mask=there, other=0).to(gl.int64) + r % GQA
                part_stride = gl.load(spans + span * 4 + 1, mask=there, other=0).to(gl.int64)
                head_stride = gl.load(spans + span * 4 + 2, mask=there, other=0)
                parts = gl.load(spans + span * 4 + 3, mask=there, other=0)
                own = (at + part)[None, :] - left[:, None]
                where = (first + head * head_stride)[:, None] + own * part_stride[:, None]
                place = gl.where((own >= 0) & (own < parts[:, None]), where, place)
                left += parts
            some = there[:, None] & ((at + part)[None, :] < count[:, None])
            lse = gl.load(partial_lse_ptr + place, mask=some, other=float("-inf"))
            corner = place[:, :, None] * V_DIM
            out = gl.load(partial_out_ptr + corner + e[None, None, :], mask=some[:, :, None], other=0.0)
            out = gl.where((lse > float("-inf"))[:, :, None], out, 0.0)
            higher = gl.maximum(peak, gl.max(lse, axis=1))
            safe = gl.where(higher == float("-inf"), 0.0, higher)
            weight = gl.exp2(lse - safe[:, None])
            shrink = gl.exp2(peak - safe)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, written))[:, None]
            acc += gl.sum(weight[:, :, None] * out, axis=1)
            total = total * shrink + gl.sum(weight, axis=1)
            peak = higher
        empty = total == 0.0
        lse = gl.where(empty, float("-inf"), (peak + gl.log2(gl.where(empty, 1.0, total))) * LN2)
        gl.store(lse_ptr + row.to(gl.int64) * (num_heads * GQA) + head * GQA + r % GQA, lse, mask=there)
        factor = gl.convert_layout(v_scale / gl.where(empty, 1.0, total), gl.SliceLayout(1, written))
        own_r = begin + gl.arange(0, MERGED_ROWS, gl.SliceLayout(1, written))
        own_there = gl.convert_layout(there, gl.SliceLayout(1, written))
        at = (own_r // GQA).to(gl.int64) * out_stride_row + (head * GQA + own_r % GQA) * out_stride_head
        column = gl.arange(0, V_DIM, gl.SliceLayout(0, written))
        ptrs = out_ptr + at[:, None] + column[None, :]
        gl.store(ptrs, (acc * factor[:, None]).to(out_ptr.dtype.element_ty), mask=own_there[:, None])
