"""Scores of an anchor layer's selection on Hopper, from codes of 4 bits: both passes in one launch.

The scores of `pooled_scores.kernels` for INT4 tokens, for sm_90. No warp waits for another in a loop.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from prefix_kernels.anchor_selection.sm90_codes_kernels import (
    STEPS_AHEAD,
    ask,
    ask_first,
    next_slot,
    ring_address,
    step_of,
    take,
)
from prefix_kernels.anchor_selection.sm90_exchange_kernels import (
    add_counts,
    barrier,
    begin_counts,
    bins,
    counts_address,
    end_counts,
    highest_of_columns,
    highest_of_two_steps,
)
from prefix_kernels.anchor_selection.sm90_product_kernels import (
    FEW_ROWS,
    LEAST_ROWS,
    product,
    put_queries,
    right_sides,
    sum_item,
    sum_sample_item,
)
from prefix_kernels.kernels import COARSE, FINE, NUM_BINS, let_the_next_kernel_come, meet, ordered_keys
from prefix_kernels.pooled_scores.kernels import HEADROOM, LISTED, LN2, LOG2E, num_summed, stretch_of, sum_step

NEVER = gl.constexpr(2.0**30)
"""Units of scores: a row whose logarithm it is has no share in anything."""
_let_the_next_kernel_come = gluon.jit(let_the_next_kernel_come.fn)
# What is summed is the same as in the kernel for all GPUs.
_sum_step = gluon.jit(sum_step.fn)
_num_summed = gluon.jit(num_summed.fn)
_stretch_of = gluon.jit(stretch_of.fn)
_ordered_keys = gluon.jit(ordered_keys.fn)
_meet = gluon.jit(meet.fn)


@gluon.jit
def _row_lse(peak_ptr, total_ptr, stats, num_chunks, max_rows, m, live, layout: gl.constexpr, AT_ONCE: gl.constexpr):
    """[BLOCK_M] base 2, from the sums of all chunks; +inf for a row that has no score at all, or is none."""
    highest = gl.full([m.shape[0]], -1e30, gl.float32, gl.SliceLayout(0, layout))
    total = gl.zeros([m.shape[0]], gl.float32, gl.SliceLayout(0, layout))
    for begin in range(0, num_chunks, AT_ONCE):
        parts = begin + gl.arange(0, AT_ONCE, gl.SliceLayout(1, layout))
        where = stats + parts[:, None] * max_rows + m[None, :]
        there = (parts < num_chunks)[:, None] & live[None, :]
        # Other programs of the same launch have written them: past the first level of caches.
        peaks = gl.load(peak_ptr + where, mask=there, other=-1e30, cache_modifier=".cg")
        totals = gl.load(total_ptr + where, mask=there, other=0.0, cache_modifier=".cg")
        higher = gl.maximum(highest, gl.max(peaks, axis=0))
        total = total * gl.exp2(highest - higher) + gl.sum(gl.exp2(peaks - higher[None, :]) * totals, axis=0)
        highest = higher
    return gl.where(total == 0.0, float("inf"), highest + gl.log2(gl.where(total == 0.0, 1.0, total)))


@gluon.jit
def _put_scores(pooled, n, end, tile, put):
    """Write pooled scores of two steps, natural log, and after the last tile count their keys."""
    scores_ptr, num_sink, recent_begin, last_tile, counts_at = put
    if tile > 0:
        pooled = gl.maximum(pooled, gl.load(scores_ptr + n, mask=n < end, other=0.0))
    gl.store(scores_ptr + n, pooled, mask=n < end)
    in_window = (n < num_sink) | (n >= recent_begin)
    place = gl.where(in_window, 0, _ordered_keys(pooled) ^ (NUM_BINS - 1))
    add_counts(counts_at, place, (n < end) & (tile == last_tile))


@gluon.jit
def _ask_first_pooled(codes, sizes: gl.constexpr):
    """`ask_first` for pooled scores, and its limit: behind an even number of steps."""
    BLOCK_N: gl.constexpr = sizes[2]
    _, _, _, begin, end, _, _ = codes
    limit = begin + gl.cdiv(end - begin, 2 * BLOCK_N) * (2 * BLOCK_N)
    return ask_first(codes, limit, sizes), limit


@gluon.jit
def _highest_of_step(codes, entries, start, limit, slot, queries, base, sizes: gl.constexpr):
    """(`highest_of_columns` of a step; of the step after the one that is asked for next, its `step_of`; next slot)."""
    BLOCK_N: gl.constexpr = sizes[2]
    _, _, _, _, _, at, _ = codes
    highest = highest_of_columns(product(take(at, slot, sizes), queries, base, sizes), sizes)
    ask(codes, entries, start + STEPS_AHEAD * BLOCK_N, limit, slot, sizes)
    return highest, step_of(codes, start + (STEPS_AHEAD + 2) * BLOCK_N, sizes), next_slot(slot, sizes)


@gluon.jit
def _pool_stretch(asked, codes, q_smem, unit, below, tile, scores, sizes: gl.constexpr):
    """Pooled scores of all candidates of a stretch, whose first steps were asked for: the natural log of the largest
    share of attention."""
    BLOCK_M: gl.constexpr = sizes[1]
    BLOCK_N: gl.constexpr = sizes[2]
    MMA: gl.constexpr = sizes[7]
    _, _, _, begin, end, _, _ = codes
    queries = right_sides(q_smem, sizes)
    base = below[None, :] + gl.zeros([BLOCK_N, BLOCK_M], gl.int32, MMA)
    entries, limit = asked
    this, other = entries
    slot = gl.to_tensor(0)
    for start in range(begin, limit, 2 * BLOCK_N):
        highest, this, slot = _highest_of_step(codes, this, start, limit, slot, queries, base, sizes)
        more, other, slot = _highest_of_step(codes, other, start + BLOCK_N, limit, slot, queries, base, sizes)
        highest, place = highest_of_two_steps(highest, more, sizes)
        _put_scores(highest.to(gl.float32) * (unit * LN2), start + place, end, tile, scores)


@gluon.jit
def _pool_item(
    asked, codes, query, put, stats, num_chunks, factor, unit, scores, counts, AGAIN: gl.constexpr,
    SUM_EVERY: gl.constexpr, BLOCK_CHUNKS: gl.constexpr, sizes: gl.constexpr,
):  # fmt: skip
    """The second phase of an item: write the pooled scores of its stretch, and how many have which key. AGAIN: no
    queries are there."""
    GQA: gl.constexpr = sizes[0]
    BLOCK_M: gl.constexpr = sizes[1]
    NUM_WARPS: gl.constexpr = sizes[4]
    MMA: gl.constexpr = sizes[7]
    if BLOCK_M < 64:
        parts: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [NUM_WARPS, 1], [1, 0])
    else:
        parts: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BLOCK_M, BLOCK_M // 4], [NUM_WARPS, 1], [1, 0])
    q_smem, _, _, _, _, of_group, _ = query
    peak_ptr, total_ptr, max_rows = put
    _, num_rows, _ = of_group
    tiles = gl.cdiv(num_rows * GQA, BLOCK_M)
    scores_ptr, num_sink, recent_begin = scores
    counts_ptr, counts_at = counts
    begin_counts(counts_at, NUM_WARPS)
    for tile in range(tiles):
        if AGAIN or tiles > 1:
            unit = put_queries(query, tile, factor, sizes)
        m = tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, parts))
        live = m < num_rows * GQA
        lse = _row_lse(peak_ptr, total_ptr, stats, num_chunks, max_rows, m, live, parts, BLOCK_CHUNKS)
        if SUM_EVERY > 1:
            lse += HEADROOM * LOG2E
        # What is above a row's logarithm is an integer, too.
        below = gl.floor(0.5 - gl.minimum(gl.maximum(lse / unit, -NEVER), NEVER)).to(gl.int32)
        below = gl.convert_layout(below, gl.SliceLayout(0, MMA))
        where = (scores_ptr, num_sink, recent_begin, tiles - 1, counts_at)
        _pool_stretch(asked, codes, q_smem, unit, below, tile, where, sizes)
        if tile + 1 < tiles:
            asked = _ask_first_pooled(codes, sizes)
        barrier()
    at_least, place = end_counts(counts_at, NUM_WARPS), bins(1, NUM_WARPS)
    gl.store(counts_ptr + COARSE + place, at_least)
    gl.store(counts_ptr + place // FINE, at_least, mask=place % FINE == FINE - 1)


@gluon.jit
def _score_item(
    codes, q_smem, query, put, meeting, factor, SUM_EVERY: gl.constexpr, FIRST_PHASE: gl.constexpr,
    LAST_PHASE: gl.constexpr, BLOCK_CHUNKS: gl.constexpr, sizes: gl.constexpr,
):  # fmt: skip
    """The phases of one item, by tiles of the size that its group's rows want."""
    BLOCK_N: gl.constexpr = sizes[2]
    q_ptr, rows_ptr, channels_ptr, scale_ptr, of_group, strides = query
    query = (q_smem, q_ptr, rows_ptr, channels_ptr, scale_ptr, of_group, strides)
    peak_ptr, total_ptr, max_rows, stats, scores, counts = put
    arrived_ptr, chunk, num_chunks, count = meeting
    put = (peak_ptr, total_ptr, max_rows)
    own = stats + chunk * max_rows
    unit = factor
    if FIRST_PHASE == 1 and SUM_EVERY > 1:
        step = _sum_step(count, SUM_EVERY)
        first, last = _stretch_of(chunk, num_chunks, _num_summed(count, step), BLOCK_N)
        summed = (codes, first, last, step)
        unit = sum_sample_item(summed, query, put, own, factor, sizes)
    if FIRST_PHASE == 1 and SUM_EVERY == 1:
        unit = sum_item(codes, query, put, own, factor, sizes)
    if LAST_PHASE >= 2:
        # What comes first is asked for before the others are waited for.
        asked = _ask_first_pooled(codes, sizes)
    if FIRST_PHASE == 1 and LAST_PHASE > 1:
        _meet(arrived_ptr, chunk, num_chunks)
    if LAST_PHASE > FIRST_PHASE:
        # All programs of this launch are on the GPU: none waits for one that the next launch keeps away.
        _let_the_next_kernel_come()
    if LAST_PHASE >= 2:
        _pool_item(
            asked, codes, query, put, stats, num_chunks, factor, unit, scores, counts, FIRST_PHASE == 2, SUM_EVERY,
            BLOCK_CHUNKS, sizes,
        )  # fmt: skip


@gluon.jit
def score_items_sm90_kernel(
    q_ptr,  # [batch, num_qo_heads, head_dim]
    rows_ptr,  # int32 [batch], batch rows by group
    groups_ptr,  # int32 [num_groups, 4]: first of `rows`, requests, most candidates, 0
    heads_ptr,  # int64 [num_groups, num_kv_heads, 4]: see `ScoredGroup.heads`
    arrays_ptr,  # int64 [num_groups, 5], addresses: channels, packed, scale, 0, 0
    candidates_ptr,  # int32, lists of LISTED candidates, ENTRY tokens an entry
    peak_ptr,  # fp32 [num_kv_heads, max_items, max_rows], base 2
    total_ptr,  # the same
    scores_ptr,  # fp32 arena, natural log, written
    items_ptr,  # int64 [max_items, ITEM_FIELDS], see `programs.py`
    at_least_ptr,  # int32 [max_items, num_kv_heads, COARSE + NUM_BINS], written
    arrived_ptr,  # int64 [num_groups, num_kv_heads], at first 0, then whole meetings
    sm_scale, q_stride_row, q_stride_head, max_rows, max_items,
    ITEM_FIELDS: gl.constexpr, GQA: gl.constexpr, CHANNELS: gl.constexpr, LISTED_CHANNELS: gl.constexpr,
    SUM_EVERY: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_CHUNKS: gl.constexpr,
    NUM_WARPS: gl.constexpr, LAYOUT: gl.constexpr, FEW_LAYOUT: gl.constexpr, STRETCH: gl.constexpr,
    LEAST_LAYOUT: gl.constexpr, LEAST_BLOCK_N: gl.constexpr,
    FIRST_PHASE: gl.constexpr, LAST_PHASE: gl.constexpr, FORM: gl.constexpr, ENTRY: gl.constexpr,
    SHARED_ROWS: gl.constexpr,
):  # fmt: skip
    """Program (place, KV head): the phases of scores of its items."""
    head = gl.program_id(1).to(gl.int64)
    num_heads = gl.num_programs(1)
    PIECES: gl.constexpr = CHANNELS // 32
    LIST_ENTRY: gl.constexpr = ENTRY if FORM == LISTED else 0
    few_mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NUM_WARPS, 1], [16, 8])
    few: gl.constexpr = (GQA, FEW_ROWS, STRETCH, PIECES, NUM_WARPS, LISTED_CHANNELS, FEW_LAYOUT, few_mma, LIST_ENTRY)
    if BLOCK_M <= FEW_ROWS:
        mma: gl.constexpr = few_mma
    else:
        mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_M, 32])
    least: gl.constexpr = (
        GQA, LEAST_ROWS, LEAST_BLOCK_N, PIECES, NUM_WARPS, LISTED_CHANNELS, LEAST_LAYOUT, few_mma, LIST_ENTRY,
    )  # fmt: skip
    sizes: gl.constexpr = (GQA, BLOCK_M, BLOCK_N, PIECES, NUM_WARPS, LISTED_CHANNELS, LAYOUT, mma, LIST_ENTRY)
    shared: gl.constexpr = gl.NVMMASharedLayout(32, 8, 2)
    # Beside counts and ring, CUDA grants more than 48 KiB in all only where Triton asks for as much by itself.
    WIDE: gl.constexpr = BLOCK_M > FEW_ROWS and (PIECES > 3 or SUM_EVERY == 1)
    ROOM: gl.constexpr = (48 << 10) // (32 * BLOCK_M) + 1 if WIDE else PIECES
    q_smem = gl.allocate_shared_memory(gl.int8, [ROOM, BLOCK_M, 32], shared)
    few_smem, least_smem = q_smem, q_smem
    if BLOCK_M > FEW_ROWS:
        few_smem = gl.allocate_shared_memory(gl.int8, [PIECES, FEW_ROWS, 32], shared)
    # More channels and lists were not timed.
    HAS_LEAST: gl.constexpr = BLOCK_M > LEAST_ROWS and PIECES <= 2 and LIST_ENTRY == 0
    if HAS_LEAST:
        least_smem = gl.allocate_shared_memory(gl.int8, [PIECES, LEAST_ROWS, 32], shared)
    counts_at = counts_address()
    ring_at = ring_address(max(BLOCK_N, STRETCH, LEAST_BLOCK_N if HAS_LEAST else 0), PIECES)
    factor = sm_scale * LOG2E
    # There is a row of the table for every program, be there an item or not.
    num_items = gl.load(items_ptr + gl.program_id(0) * ITEM_FIELDS + ITEM_FIELDS - 1).to(gl.int32)
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        fields = items_ptr + item * ITEM_FIELDS
        group = gl.load(fields)
        chunk = gl.load(fields + 1).to(gl.int32)
        num_chunks = gl.load(fields + 2).to(gl.int32)
        prefix_len = gl.load(fields + 3).to(gl.int32)
        selected = gl.load(fields + 4).to(gl.int32)
        num_sink = gl.load(fields + 5).to(gl.int32)
        recent_begin = gl.load(fields + 6).to(gl.int32)
        row = group * num_heads + head
        row_begin = gl.load(groups_ptr + group * 4)
        num_rows = gl.load(groups_ptr + group * 4 + 1)
        count = gl.load(heads_ptr + row * 4).to(gl.int32)
        first_row = gl.load(heads_ptr + row * 4 + 1).to(gl.int32)
        score_begin = gl.load(heads_ptr + row * 4 + 3)
        scores = (scores_ptr + score_begin, num_sink, recent_begin)
        channels_ptr = gl.load(arrays_ptr + group * 5).to(gl.pointer_type(gl.int16)) + head * CHANNELS
        packed_ptr = gl.multiple_of(gl.load(arrays_ptr + group * 5 + 1).to(gl.pointer_type(gl.int32)), 16)
        scale_ptr = gl.load(arrays_ptr + group * 5 + 2).to(gl.pointer_type(gl.float32)) + head * CHANNELS
        listed_ptr, shift = candidates_ptr, 0
        if LIST_ENTRY > 0:
            listed_ptr += gl.load(heads_ptr + row * 4 + 2)
        if SHARED_ROWS:
            shift = gl.load(heads_ptr + row * 4 + 2).to(gl.int32)
        begin, end = _stretch_of(chunk, num_chunks, count, STRETCH)
        stats = (head * max_items + item - chunk) * max_rows
        if selected < prefix_len:
            codes = (packed_ptr, first_row, listed_ptr, begin, end, ring_at, shift)
            of_group = (row_begin, num_rows, head)
            query = (q_ptr, rows_ptr, channels_ptr, scale_ptr, of_group, (q_stride_row, q_stride_head))
            counts = (at_least_ptr + (item * num_heads + head) * (COARSE + NUM_BINS), counts_at)
            put = (peak_ptr, total_ptr, max_rows, stats, scores, counts)
            meeting = (arrived_ptr + row, chunk, num_chunks, count)
            # Groups of few rows in a batch of more have tiles of their own.
            if HAS_LEAST and num_rows * GQA <= LEAST_ROWS:
                _score_item(
                    codes, least_smem, query, put, meeting, factor, SUM_EVERY, FIRST_PHASE, LAST_PHASE, BLOCK_CHUNKS,
                    least,
                )  # fmt: skip
            elif BLOCK_M > FEW_ROWS and num_rows * GQA <= FEW_ROWS:
                _score_item(
                    codes, few_smem, query, put, meeting, factor, SUM_EVERY, FIRST_PHASE, LAST_PHASE, BLOCK_CHUNKS, few
                )
            else:
                _score_item(
                    codes, q_smem, query, put, meeting, factor, SUM_EVERY, FIRST_PHASE, LAST_PHASE, BLOCK_CHUNKS, sizes
                )
