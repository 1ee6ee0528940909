"""Triton kernel of an anchor layer's selection: from queries to lists of positions in one launch.

Programs that share a group and a KV head go through four phases, and wait for each other after the first three:

1. the sums of exponentials of every row over their stretch of candidates;
2. pooled scores of their stretch, and how many of its tokens have which upper byte of the key;
3. how many of the tokens at the threshold's upper byte have which lower byte;
4. the list of what was selected.

The same kernel can be launched once for each phase, where nobody waits: on a GPU that does not hold all programs at a
time, and in Triton's interpreter, where they run one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefix_kernels.kernels import NUM_DIGITS, add_counts, begin_counts, end_counts, meet, wait_for_the_kernel_before
from prefix_kernels.pooled_scores.kernels import addresses, num_summed, score_stretch, stretch_of, sum_step
from prefix_kernels.top_k_selection.kernels import ALIGNED, DIGIT_BITS, counted_at, load_scores, placed, window_keys


@triton.jit
def _place_of_digit(keys, upper, LOWER: tl.constexpr):
    """255 less a key's upper byte; or with LOWER less its lower one, and whether its upper byte is `upper`."""
    if LOWER:
        return (~keys & (NUM_DIGITS - 1)).to(tl.int32), (keys >> DIGIT_BITS) == upper.to(tl.uint32)
    return (~(keys >> DIGIT_BITS) & (NUM_DIGITS - 1)).to(tl.int32), keys == keys


@triton.jit
def _count_digits(tile, scores, begin, end, num_sink, recent_begin, upper, LOWER: tl.constexpr, TILE: tl.constexpr):
    """int32 [NUM_DIGITS]: how many tokens of a stretch have a digit of 255 - i or above, at place i: of their upper
    byte, or with LOWER of the lower one, of those whose upper byte is `upper`. Then also how many have a higher one.

    Scores of the first tile are there.
    """
    counts, at = begin_counts()
    higher = tl.zeros([TILE], tl.int32)
    for start in range(begin, end, TILE):
        keys = window_keys(tile, start, num_sink, recent_begin, TILE)
        place, matching = _place_of_digit(keys, upper, LOWER)
        there = start + tl.arange(0, TILE) < end
        counts = add_counts(counts, at, place, matching & there)
        if LOWER:
            higher += (((keys >> DIGIT_BITS) > upper.to(tl.uint32)) & there).to(tl.int32)
        # The first tile may have been asked for before it was known what to count.
        if start + TILE < end:
            tile = load_scores(scores, start + TILE, end, TILE)
    counts = end_counts(counts, at)
    above = tl.sum(higher, axis=0) if LOWER else 0
    return tl.cumsum(counts, axis=0), above


@triton.jit
def _both_sides(chosen, above, upto, chosen2, above2, upto2):
    return chosen + chosen2, tl.maximum(above, above2), tl.minimum(upto, upto2)


@triton.jit
def _choose_digit(all_at_least_ptr, need):
    """The place of the highest digit d such that `need` tokens or more have a digit >= d; and how many have a higher
    one, and how many this one."""
    # Other programs of the same launch have added to them: past the first level of caches.
    at_least = tl.load(all_at_least_ptr + tl.arange(0, NUM_DIGITS), cache_modifier=".cg")
    few = at_least < need
    chosen, above, upto = tl.reduce(
        (few.to(tl.int32), tl.where(few, at_least, 0), tl.where(few, 2147483647, at_least)), 0, _both_sides
    )
    return chosen, above, upto - above


@triton.jit
def _sum_of(counts_ptr, num_chunks, BLOCK_C: tl.constexpr):
    """What the first chunks counted, together."""
    total = tl.zeros([BLOCK_C], tl.int32)
    for first in range(0, num_chunks, BLOCK_C):
        chunk = first + tl.arange(0, BLOCK_C)
        # Other programs of the same launch have written them: past the first level of caches.
        total += tl.load(counts_ptr + chunk, mask=chunk < num_chunks, other=0, cache_modifier=".cg")
    return tl.sum(total, axis=0)


@triton.jit
def select_kernel(
    q_ptr,  # [batch, num_qo_heads, head_dim]
    rows_ptr,  # int32 [batch], batch rows by group
    groups_ptr,  # int32 [num_groups, 4]: first of `rows`, requests, most candidates, 0
    heads_ptr,  # int64 [num_groups, num_kv_heads, 4]: candidates, first row, 0, first score
    arrays_ptr,  # int64 [num_groups, 5], addresses: channels, packed, scale, 0, 0
    raw_ptr,  # fp32, raw scores, kept for the second phase where REREAD
    peak_ptr,  # fp32 [num_kv_heads, max_items, max_rows], base 2
    total_ptr,  # the same
    scores_ptr,  # fp32 arena, natural log, written
    items_ptr,  # int64 [max_items, ITEM_FIELDS], see `runner.py`
    at_least_ptr,  # int32 [num_kv_heads, max_items, NUM_DIGITS], by lower bytes, at the threshold's upper one
    higher_ptr,  # int32 [num_kv_heads, max_items], tokens of a higher upper byte
    all_at_least_ptr,  # int32 [2, num_groups, num_kv_heads, NUM_DIGITS], of all stretches, by upper and by lower bytes
    arrived_ptr,  # int64 [num_groups, num_kv_heads], at first 0, then whole meetings
    slot_table_ptr,  # int32 or int64 [arena]
    positions_ptr,  # int32 arena of lists, written
    slots_ptr,  # int32 arena of lists, written with HAS_SLOTS
    counts_ptr,  # int32 [num_groups, num_kv_heads], written
    sm_scale, q_stride_row, q_stride_head, raw_stride_group, raw_stride_head, raw_stride_row, raw_stride_candidate,
    max_rows, max_items,
    num_totals,  # num_groups * num_kv_heads
    ITEM_FIELDS: tl.constexpr, GQA: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_K: tl.constexpr,
    ROW_UNITS: tl.constexpr, BITS: tl.constexpr, LISTED_CHANNELS: tl.constexpr, SUM_EVERY: tl.constexpr,
    REREAD: tl.constexpr, RAW_M: tl.constexpr, RAW_N: tl.constexpr, POOL: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr, FIRST_PHASE: tl.constexpr, LAST_PHASE: tl.constexpr,
    TILE: tl.constexpr, HAS_SLOTS: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Program (place, KV head): its items, of which only the first may be shared with other programs."""
    # Behind a launch of scores alone: tables are read before that has ended, which writes none of them.
    LATE: tl.constexpr = FIRST_PHASE == 3 and LAST_PHASE == 4
    if not LATE:
        wait_for_the_kernel_before(OVERLAPPED)
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    # There is a row of the table for every program, be there an item or not.
    num_items = tl.load(items_ptr + tl.program_id(0) * ITEM_FIELDS + ITEM_FIELDS - 1).to(tl.int32)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        fields = items_ptr + item * ITEM_FIELDS
        group = tl.load(fields)
        chunk = tl.load(fields + 1).to(tl.int32)
        num_chunks = tl.load(fields + 2).to(tl.int32)
        prefix_len = tl.load(fields + 3).to(tl.int32)
        selected = tl.load(fields + 4).to(tl.int32)
        num_sink = tl.load(fields + 5).to(tl.int32)
        recent_begin = tl.load(fields + 6).to(tl.int32)
        slot_table = slot_table_ptr + tl.load(fields + 7)
        list_begin = tl.load(fields + 8) + head * tl.load(fields + 9)
        row = group * num_heads + head
        if FIRST_PHASE <= 2:
            # All tables are asked for before what is in them is looked at.
            row_begin = tl.load(groups_ptr + group * 4)
            num_rows = tl.load(groups_ptr + group * 4 + 1)
            channels_at, packed_at, scale_at = addresses(arrays_ptr + group * 5)
        count = tl.load(heads_ptr + row * 4).to(tl.int32)
        first_row = tl.load(heads_ptr + row * 4 + 1)
        scores_begin = tl.load(heads_ptr + row * 4 + 3)
        scores = scores_ptr + scores_begin // ALIGNED * ALIGNED
        begin, end = stretch_of(chunk, num_chunks, count, BLOCK_N)
        token_begin = tl.minimum(begin, prefix_len)
        token_end = tl.minimum(end, prefix_len)
        first_item = head * max_items + item - chunk
        if LATE:
            wait_for_the_kernel_before(OVERLAPPED)

        # A whole prefix: every key is at least 0, and as many tokens as chunks before have are listed before.
        threshold = tl.full([], 0, tl.uint32)
        tile = tl.zeros([TILE], tl.float32)
        above_before = token_begin
        ties_before = 0
        if selected < prefix_len:
            if FIRST_PHASE <= 2:
                raw_base = raw_ptr + group * raw_stride_group + head * raw_stride_head
                stats = first_item * max_rows
            lowers = at_least_ptr + first_item * NUM_DIGITS
            of_uppers = all_at_least_ptr + row * NUM_DIGITS
            of_lowers = of_uppers + num_totals * NUM_DIGITS
            if FIRST_PHASE > 2:
                # On their way while it is found out which of them count.
                tile = load_scores(scores, token_begin, token_end, TILE)
            if FIRST_PHASE == 1:
                if chunk == 0:
                    tl.store(of_uppers + tl.arange(0, NUM_DIGITS), 0)
                    tl.store(of_lowers + tl.arange(0, NUM_DIGITS), 0)
                step = 1
                summed_begin, summed_end = begin, end
                if SUM_EVERY > 1:
                    step = sum_step(count, SUM_EVERY)
                    summed_begin, summed_end = stretch_of(chunk, num_chunks, num_summed(count, step), BLOCK_N)
                score_stretch(
                    summed_begin, summed_end, q_ptr, rows_ptr, row_begin, num_rows, head, channels_at, packed_at,
                    scale_at, first_row, step, raw_base, scores, peak_ptr, total_ptr, stats, chunk, num_chunks,
                    sm_scale, q_stride_row, q_stride_head, raw_stride_row, raw_stride_candidate, max_rows, GQA,
                    CHANNELS, BLOCK_K, ROW_UNITS, BITS, LISTED_CHANNELS, False, REREAD, SUM_EVERY, 0, BLOCK_M, BLOCK_N,
                    BLOCK_CHUNKS, LANES, STAGES, COMPUTE, PRECISION, ASSEMBLY,
                )  # fmt: skip
            if FIRST_PHASE == 1 and LAST_PHASE > 1:
                meet(arrived_ptr + row, chunk, num_chunks)
            if FIRST_PHASE <= 2 and LAST_PHASE >= 2:
                score_stretch(
                    begin, end, q_ptr, rows_ptr, row_begin, num_rows, head, channels_at, packed_at, scale_at, first_row,
                    1, raw_base, scores, peak_ptr, total_ptr, stats, chunk, num_chunks, sm_scale, q_stride_row,
                    q_stride_head, raw_stride_row, raw_stride_candidate, max_rows, GQA, CHANNELS, BLOCK_K, ROW_UNITS,
                    BITS, LISTED_CHANNELS, REREAD, False, SUM_EVERY, POOL, RAW_M if REREAD else BLOCK_M,
                    RAW_N if REREAD else BLOCK_N, BLOCK_CHUNKS, LANES, STAGES, COMPUTE, PRECISION, ASSEMBLY,
                )  # fmt: skip
                # A barrier ends each tile of scores: all of the program's are there.
                tile = load_scores(scores, token_begin, token_end, TILE)
                at_least, _ = _count_digits(
                    tile, scores, token_begin, token_end, num_sink, recent_begin, token_begin, False, TILE
                )
                # Integers: the order says nothing.
                tl.atomic_add(of_uppers + tl.arange(0, NUM_DIGITS), at_least, sem="relaxed")
            if FIRST_PHASE <= 2 and LAST_PHASE > 2:
                meet(arrived_ptr + row, chunk, num_chunks)
            if LAST_PHASE >= 3:
                upper_place, above, _ = _choose_digit(of_uppers, selected)
                upper = upper_place ^ (NUM_DIGITS - 1)
                need = selected - above
            if FIRST_PHASE <= 3 and LAST_PHASE >= 3:
                at_least, higher = _count_digits(
                    tile, scores, token_begin, token_end, num_sink, recent_begin, upper, True, TILE
                )
                tl.store(lowers + chunk * NUM_DIGITS + tl.arange(0, NUM_DIGITS), at_least)
                tl.store(higher_ptr + first_item + chunk, higher)
                tl.atomic_add(of_lowers + tl.arange(0, NUM_DIGITS), at_least, sem="relaxed")
            if FIRST_PHASE <= 3 and LAST_PHASE > 3:
                meet(arrived_ptr + row, chunk, num_chunks)
            if LAST_PHASE == 4:
                above_before = _sum_of(higher_ptr + first_item, chunk, BLOCK_CHUNKS)
                lower_place, above, ties = _choose_digit(of_lowers, need)
                lower = lower_place ^ (NUM_DIGITS - 1)
                more_before, ties_before = counted_at(lowers, chunk, lower_place, BLOCK_CHUNKS)
                above_before += more_before
                # The last ties are taken. Those that are skipped count below zero.
                ties_before -= above + ties - need
                threshold = (upper.to(tl.uint32) << DIGIT_BITS) | lower.to(tl.uint32)
        if LAST_PHASE == 4:
            positions = positions_ptr + list_begin
            slots = slots_ptr + list_begin
            for start in range(token_begin, token_end, TILE):
                token = start + tl.arange(0, TILE)
                keys = window_keys(load_scores(scores, start, token_end, TILE), start, num_sink, recent_begin, TILE)
                # Of a whole prefix no score was written, and any key will do.
                keys = tl.where(selected < prefix_len, keys, 1)
                place, chosen, both = placed(keys, token < token_end, threshold, above_before, ties_before)
                tl.store(positions + place, token, mask=chosen)
                if HAS_SLOTS:
                    slot = tl.load(slot_table + token, mask=chosen, other=0)
                    tl.store(slots + place, slot.to(tl.int32), mask=chosen)
                if start + TILE < token_end:
                    tile_total = tl.sum(both, axis=0)
                    above_before += tile_total & 65535
                    ties_before += tile_total >> 16
            if chunk == 0:
                tl.store(counts_ptr + row, selected)
    if LATE:
        # Whoever has no item, too: this kernel's end says that the one before has ended.
        wait_for_the_kernel_before(OVERLAPPED)
