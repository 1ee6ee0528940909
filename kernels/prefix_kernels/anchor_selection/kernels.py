"""Triton kernels of an anchor layer's selection: from queries to scores, and from scores to lists of positions.

Programs that share a group and a KV head go through two phases of scores, and wait for each other in between:

1. the sums of exponentials of every row over their stretch of candidates;
2. pooled scores of their stretch, and how many of its tokens have which key.

The same kernel can be launched once for each phase, where nobody waits: on a GPU that does not hold all programs at a
time, and in Triton's interpreter, where they run one after the other. Lists are a launch of their own, in which nobody
waits: how many tokens each stretch has of each key is known by then.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefix_kernels.kernels import (
    ALIGNED,
    COARSE,
    FINE,
    NUM_BINS,
    ROW,
    WINDOW_KEY,
    add_counts,
    begin_counts,
    bits_of,
    end_counts,
    keys_of,
    least_place,
    load_row,
    load_scores,
    lowest_bits,
    meet,
    num_bits,
    stage_row,
    staged,
    staging,
    wait_for_the_kernel_before,
    window_levels,
)
from prefix_kernels.pooled_scores.kernels import (
    LISTED,
    MEAN,
    addresses,
    listed_token,
    num_summed,
    score_stretch,
    stretch_of,
    sum_step,
)


@triton.jit
def item_at(fields):
    """Of an item: group, chunk, the group's chunks, prefix_len, tokens that are selected, num_sink, recent_begin."""
    return (
        tl.load(fields),
        tl.load(fields + 1).to(tl.int32),
        tl.load(fields + 2).to(tl.int32),
        tl.load(fields + 3).to(tl.int32),
        tl.load(fields + 4).to(tl.int32),
        tl.load(fields + 5).to(tl.int32),
        tl.load(fields + 6).to(tl.int32),
    )


@triton.jit
def tokens_of(begin, end, shift, prefix_len, BLOCKS: tl.constexpr):
    """Which tokens the candidates `begin` to `end` are: themselves, or with BLOCKS 2^shift of each."""
    if BLOCKS:
        return tl.minimum(begin << shift, prefix_len), tl.minimum(end << shift, prefix_len)
    return begin, end


@triton.jit
def count_keys(
    out_ptr,  # int32 [COARSE + NUM_BINS], written: first every FINE-th of them, then all
    scores, begin, end, shift, num_sink, recent_begin, TILE: tl.constexpr, PLAIN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """How many tokens of a stretch have a key of NUM_BINS - 1 - i or above, at place i."""
    counts, at = begin_counts(PLAIN)
    for start in range(begin, end, TILE):
        tile = load_scores(scores, start, end, shift, TILE, BLOCKS)
        keys = keys_of(window_levels(tile, start, num_sink, recent_begin, TILE))
        counts = add_counts(counts, at, keys ^ (NUM_BINS - 1), start + tl.arange(0, TILE) < end, PLAIN)
    at_least = end_counts(counts, at, end - begin, PLAIN)
    place = tl.arange(0, NUM_BINS)
    tl.store(out_ptr + COARSE + place, at_least)
    tl.store(out_ptr + place // FINE, at_least, mask=place % FINE == FINE - 1)


@triton.jit
def _counted(
    at_least, stride, chunk, num_chunks, need, above, above_before, WIDTH: tl.constexpr, BLOCK_CHUNKS: tl.constexpr
):
    """Of bins that follow each other, or of every so many: which is the first that `need` tokens or more are in, or in
    one before it; and how many of all chunks are before it, how many of the first `chunk` ones, and how many of either
    are in it or before. `above`, `above_before`: those before all of these bins."""
    total = tl.zeros([WIDTH], tl.int32)
    before = tl.zeros([WIDTH], tl.int32)
    for first in range(0, num_chunks, BLOCK_CHUNKS):
        one = first + tl.arange(0, BLOCK_CHUNKS)[:, None]
        # The launch before has written them, see `load_scores`.
        where = at_least + one * stride + tl.arange(0, WIDTH)[None, :]
        counts = tl.load(where, mask=one < num_chunks, other=0, cache_modifier=".cg")
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where(one < chunk, counts, 0), axis=0)
    few = total < need
    above = tl.maximum(above, tl.max(tl.where(few, total, 0), axis=0))
    above_before = tl.maximum(above_before, tl.max(tl.where(few, before, 0), axis=0))
    upto = tl.min(tl.where(few, 2147483647, total), axis=0)
    upto_before = tl.min(tl.where(few, 2147483647, before), axis=0)
    return tl.sum(few.to(tl.int32), axis=0), above, above_before, upto, upto_before


@triton.jit
def score_kernel(
    q_ptr,  # [batch, num_qo_heads, head_dim]
    rows_ptr,  # int32 [batch], batch rows by group
    groups_ptr,  # int32 [num_groups, 4]: first of `rows`, requests, most candidates, 0
    heads_ptr,  # int64 [num_groups, num_kv_heads, 4]: see `ScoredGroup.heads`
    arrays_ptr,  # int64 [num_groups, 5], see `addresses`
    candidates_ptr,  # int32, lists of LISTED candidates, ENTRY tokens an entry
    peak_ptr,  # fp32 [num_kv_heads, max_items, max_rows], base 2
    total_ptr,  # the same
    scores_ptr,  # fp32 arena, natural log, written
    items_ptr,  # int64 [max_items, ITEM_FIELDS], see `programs.py`
    at_least_ptr,  # int32 [max_items, num_kv_heads, COARSE + NUM_BINS], written
    arrived_ptr,  # int64 [num_groups, num_kv_heads], at first 0, then whole meetings
    sm_scale, q_stride_row, q_stride_head, max_rows, max_items,
    ITEM_FIELDS: tl.constexpr, GQA: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_K: tl.constexpr,
    ROW_UNITS: tl.constexpr, BITS: tl.constexpr, LISTED_CHANNELS: tl.constexpr, SUM_EVERY: tl.constexpr,
    POOL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, LANES: tl.constexpr,
    STAGES: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
    FIRST_PHASE: tl.constexpr, LAST_PHASE: tl.constexpr, TILE: tl.constexpr, FORM: tl.constexpr, ENTRY: tl.constexpr,
):  # fmt: skip
    """Program (place, KV head): its items, each alone or with the programs that have the group's others."""
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    # There is a row of the table for every program, be there an item or not.
    num_items = tl.load(items_ptr + tl.program_id(0) * ITEM_FIELDS + ITEM_FIELDS - 1).to(tl.int32)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        fields = items_ptr + item * ITEM_FIELDS
        group, chunk, num_chunks, prefix_len, selected, num_sink, recent_begin = item_at(fields)
        row = group * num_heads + head
        # All tables are asked for before what is in them is looked at.
        row_begin = tl.load(groups_ptr + group * 4)
        num_rows = tl.load(groups_ptr + group * 4 + 1)
        arrays = addresses(arrays_ptr + group * 5)
        count = tl.load(heads_ptr + row * 4).to(tl.int32)
        shift = tl.load(heads_ptr + row * 4 + 2).to(tl.int32)
        if FORM == LISTED:
            arrays = (arrays[0], arrays[1], arrays[2], candidates_ptr + shift, arrays[4])
        first_row = tl.load(heads_ptr + row * 4 + 1)
        scores = scores_ptr + tl.load(heads_ptr + row * 4 + 3) // ALIGNED * ALIGNED
        begin, end = stretch_of(chunk, num_chunks, count, BLOCK_N)
        if selected < prefix_len:
            stats = (head * max_items + item - chunk) * max_rows
            if FIRST_PHASE == 1:
                step = 1
                summed_begin, summed_end = begin, end
                if SUM_EVERY > 1:
                    step = sum_step(count, SUM_EVERY)
                    summed_begin, summed_end = stretch_of(chunk, num_chunks, num_summed(count, step), BLOCK_N)
                score_stretch(
                    summed_begin, summed_end, q_ptr, rows_ptr, row_begin, num_rows, head, arrays, first_row, shift,
                    step, scores, peak_ptr, total_ptr, stats, chunk, num_chunks, sm_scale, q_stride_row, q_stride_head,
                    max_rows, GQA, CHANNELS, BLOCK_K, ROW_UNITS, BITS, LISTED_CHANNELS, SUM_EVERY, 0, BLOCK_M, BLOCK_N,
                    BLOCK_CHUNKS, LANES, STAGES, COMPUTE, PRECISION, ASSEMBLY, FORM, ENTRY,
                )  # fmt: skip
            if FIRST_PHASE == 1 and LAST_PHASE == 2:
                meet(arrived_ptr + row, chunk, num_chunks)
            if LAST_PHASE == 2:
                score_stretch(
                    begin, end, q_ptr, rows_ptr, row_begin, num_rows, head, arrays, first_row, shift, 1, scores,
                    peak_ptr, total_ptr, stats, chunk, num_chunks, sm_scale, q_stride_row, q_stride_head, max_rows,
                    GQA, CHANNELS, BLOCK_K, ROW_UNITS, BITS, LISTED_CHANNELS, SUM_EVERY, POOL, BLOCK_M, BLOCK_N,
                    BLOCK_CHUNKS, LANES, STAGES, COMPUTE, PRECISION, ASSEMBLY, FORM, ENTRY,
                )  # fmt: skip
                # A barrier ends each tile of scores: all of the program's are there.
                # Wide rows of codes, and fp32, need most of what shared memory a launch has unless it asks for more.
                PLAIN: tl.constexpr = COMPUTE == tl.float32 or CHANNELS * BITS > 512
                BLOCKS: tl.constexpr = FORM >= MEAN
                begin, end = tokens_of(begin, end, shift, prefix_len, BLOCKS)
                counts = at_least_ptr + (item * num_heads + head) * (COARSE + NUM_BINS)
                count_keys(counts, scores, begin, end, shift, num_sink, recent_begin, TILE, PLAIN, BLOCKS)


@triton.jit
def _without_first(bits, count, some):
    """The bits that are set but for the first `count` of each word. Not `some`: none is left."""
    left = bits
    if some:
        for number in range(ROW):
            left = tl.where(number < count, left & (left - 1), left)
    else:
        left = tl.zeros_like(bits)
    return left


@triton.jit
def _list_stretch(
    scores, begin, end, shift, among, wanted, into, BLOCK_CHUNKS: tl.constexpr, TILE: tl.constexpr,
    HAS_SLOTS: tl.constexpr, FORM: tl.constexpr, ENTRY: tl.constexpr,
):  # fmt: skip
    """List what was selected of a stretch, tile by tile."""
    counts, stride, chunk, num_chunks = among
    prefix_len, selected, num_sink, recent_begin = wanted
    positions, slots, slot_table, candidates_ptr = into
    BLOCKS: tl.constexpr = FORM >= MEAN
    # A whole prefix, of which no score was written, is a window. All tokens of the chunks before are listed before.
    num_sink = tl.where(selected < prefix_len, num_sink, prefix_len)
    threshold = 0
    above_before = begin
    ties_before = 0
    # On their way while it is found out which of them count.
    row = tl.arange(0, TILE // ROW) * ROW
    scored = load_row(scores, begin + row, end, shift, BLOCKS)
    if selected < prefix_len:
        coarse, above, above_before, _, _ = _counted(
            counts, stride, chunk, num_chunks, selected, 0, 0, COARSE, BLOCK_CHUNKS
        )
        counts += COARSE + coarse * FINE
        fine, above, above_before, upto, upto_before = _counted(
            counts, stride, chunk, num_chunks, selected, above, above_before, FINE, BLOCK_CHUNKS
        )
        # The last ties are taken. Those that are skipped count below zero.
        ties_before = upto_before - above_before - (upto - selected)
        threshold = (coarse * FINE + fine) ^ (NUM_BINS - 1)
    room = staging(TILE)
    AT_ONCE: tl.constexpr = TILE // 4
    above_from = least_place(threshold)
    ties_from = least_place(threshold - 1)
    for start in range(begin, end, TILE):
        first = start + row
        higher, ties = bits_of(scored, threshold, above_from, ties_from)
        scored = load_row(scores, first + TILE, end, shift, BLOCKS)
        there = lowest_bits(end - first)
        windows = (lowest_bits(num_sink - first) | ~lowest_bits(recent_begin - first)) & there
        ties = tl.where(threshold < WINDOW_KEY, ties & there, windows)
        higher = tl.where(threshold < WINDOW_KEY, higher & there | windows, 0)
        ties &= ~higher
        # One scan for both counts: a tile has fewer than 2^15 tokens.
        both = num_bits(higher) + (num_bits(ties) << 16)
        before = tl.cumsum(both, axis=0) - both
        total = tl.sum(both, axis=0)
        own = ties_before + (before >> 16)
        if ties_before < 0:
            ties = _without_first(ties, -own, ties_before + (total >> 16) > 0)
        taken = tl.maximum(ties_before, 0)
        listed = above_before + taken
        place = (before & 65535) + tl.maximum(own, 0) - taken
        stage_row(room, positions + listed, first, higher | ties, place)
        above_before += total & 65535
        ties_before += total >> 16
        # What all threads have listed; the scan of the next tile stands before they list again.
        tl.debug_barrier()
        count = above_before + tl.maximum(ties_before, 0) - listed
        for begun in range(0, count, AT_ONCE):
            at = begun + tl.arange(0, AT_ONCE)
            token = staged(room, positions + listed, at, at < count)
            if FORM == LISTED:
                token = listed_token(candidates_ptr + shift, token, at < count, ENTRY)
            tl.store(positions + listed + at, token, mask=at < count)
            if HAS_SLOTS:
                slot = tl.load(slot_table + token, mask=at < count, other=0)
                tl.store(slots + listed + at, slot.to(tl.int32), mask=at < count)


@triton.jit
def list_kernel(
    heads_ptr,  # int64 [num_groups, num_kv_heads, 4]: see `ScoredGroup.heads`
    scores_ptr,  # fp32 arena, natural log
    items_ptr,  # int64 [max_items, ITEM_FIELDS], see `programs.py`
    at_least_ptr,  # int32 [max_items, num_kv_heads, COARSE + NUM_BINS]
    slot_table_ptr,  # int32 or int64 [arena]
    positions_ptr,  # int32 arena of lists, written
    slots_ptr,  # int32 arena of lists, written with HAS_SLOTS
    candidates_ptr,  # int32, lists of LISTED candidates, ENTRY tokens an entry
    counts_ptr,  # int32 [num_groups, num_kv_heads], written
    ITEM_FIELDS: tl.constexpr, STRETCH: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, TILE: tl.constexpr,
    HAS_SLOTS: tl.constexpr, FORM: tl.constexpr, ENTRY: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Program (place, KV head): lists what was selected of the stretches of its items.

    Tables are read before the launch of scores has ended, which writes none of them; all else after it.
    """
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    # There is a row of the table for every program, be there an item or not.
    num_items = tl.load(items_ptr + tl.program_id(0) * ITEM_FIELDS + ITEM_FIELDS - 1).to(tl.int32)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        fields = items_ptr + item * ITEM_FIELDS
        group, chunk, num_chunks, prefix_len, selected, num_sink, recent_begin = item_at(fields)
        slot_table = slot_table_ptr + tl.load(fields + 7)
        list_begin = tl.load(fields + 8) + head * tl.load(fields + 9)
        row = group * num_heads + head
        scores = scores_ptr + tl.load(heads_ptr + row * 4 + 3) // ALIGNED * ALIGNED
        BLOCKS: tl.constexpr = FORM >= MEAN
        count = prefix_len
        shift = 0
        if FORM:
            count = tl.load(heads_ptr + row * 4).to(tl.int32)
            shift = tl.load(heads_ptr + row * 4 + 2).to(tl.int32)
        begin, end = stretch_of(chunk, num_chunks, count, STRETCH)
        begin, end = tokens_of(begin, end, shift, prefix_len, BLOCKS)
        wait_for_the_kernel_before(OVERLAPPED)

        stride = num_heads * (COARSE + NUM_BINS)
        counts = at_least_ptr + ((item - chunk) * num_heads + head) * (COARSE + NUM_BINS)
        among = (counts, stride, chunk, num_chunks)
        wanted = (prefix_len, selected, num_sink, recent_begin)
        into = (positions_ptr + list_begin, slots_ptr + list_begin, slot_table, candidates_ptr)
        _list_stretch(scores, begin, end, shift, among, wanted, into, BLOCK_CHUNKS, TILE, HAS_SLOTS, FORM, ENTRY)
        if chunk == 0:
            tl.store(counts_ptr + row, selected)
    # Whoever has no item, too: this kernel's end says that the one before has ended.
    wait_for_the_kernel_before(OVERLAPPED)
