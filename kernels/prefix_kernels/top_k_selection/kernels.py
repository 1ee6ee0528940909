"""Triton kernels of `top_k_selection`: a radix select over many programs, and the compaction of what it chose.

Scores become unsigned keys in the same order. Each pass fixes 8 bits of the threshold key, the highest first: every
program counts its chunk's digits among the tokens that match the bits fixed so far, and the programs of the next
launch add those counts up and pick the digit. Nothing is added atomically in global memory, so no buffer has to be
cleared. Portable from sm_80 on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefix_kernels.kernels import NUM_DIGITS, add_counts, begin_counts, end_counts, wait_for_the_kernel_before

DIGIT_BITS = tl.constexpr(8)
ALIGNED = tl.constexpr(4)
BEGINS = tl.constexpr(16)
"""Tiles begin at multiples of this."""
LOWEST_LOG = tl.constexpr(-44.0)
"""Natural log of the least probability that a 16-bit key tells from others: 8e-20."""
LOG_SCALE = tl.constexpr(65533.0 / 44.0)


@triton.jit
def load_scores(scores, begin, end, block_shift, TILE: tl.constexpr, TOKENS: tl.constexpr):
    """Scores [TILE] of the tokens from `begin` on, a multiple of 16; those from `end` on are not read."""
    if TOKENS:
        token = begin // BEGINS * BEGINS + tl.arange(0, TILE)
        # Whole vectors: rows of scores are padded to such, and what lies behind `end` is not looked at.
        end = (end + ALIGNED - 1) // ALIGNED * ALIGNED
        return tl.load(scores + token, mask=token < end, other=0.0)
    token = begin + tl.arange(0, TILE)
    return tl.load(scores + (token >> block_shift), mask=token < end, other=0.0)


@triton.jit
def ordered_keys(scores, KEY_BITS: tl.constexpr):
    """uint32 keys, KEY_BITS wide, in the order of fp32 scores: -inf and NaN 0. With 16 bits none is 65535."""
    real = scores > float("-inf")
    if KEY_BITS == 16:
        place = tl.minimum(tl.maximum(tl.where(real, scores, 0.0), LOWEST_LOG), 0.0) - LOWEST_LOG
        keys = tl.minimum((place * LOG_SCALE).to(tl.int32) + 1, 65534).to(tl.uint32)
        return tl.where(real, keys, 0)
    # -0.0 is 0.0. Negative floats order backwards, so all of their bits flip; of others the sign does.
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    keys = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    return tl.where(real, keys, 0) >> (32 - KEY_BITS)


@triton.jit
def window_keys(scores, begin, num_sink, recent_begin, KEY_BITS: tl.constexpr, TILE: tl.constexpr):
    """Keys [TILE] of the tokens from `begin` on, those of the windows above all others."""
    token = begin + tl.arange(0, TILE)
    highest = 65535 if KEY_BITS == 16 else 4294967295 >> (32 - KEY_BITS)
    return tl.where((token < num_sink) | (token >= recent_begin), highest, ordered_keys(scores, KEY_BITS))


@triton.jit
def choose_digit(at_least_ptr, num_chunks, own_chunk, need, BLOCK_C: tl.constexpr):
    """The highest digit d such that `need` tokens or more have a digit >= d.

    Also how many tokens have a higher one and how many this one, over all chunks and over those before `own_chunk`.
    """
    place = tl.arange(0, NUM_DIGITS)
    at_least = tl.zeros([NUM_DIGITS], tl.int32)
    for first in range(0, num_chunks, BLOCK_C):
        chunk = first + tl.arange(0, BLOCK_C)
        rows = at_least_ptr + chunk[:, None] * NUM_DIGITS + place[None, :]
        # Other programs of the same launch may have written them: past the first level of caches.
        at_least += tl.sum(tl.load(rows, mask=(chunk < num_chunks)[:, None], other=0, cache_modifier=".cg"), axis=0)
    chosen = tl.sum((at_least < need).to(tl.int32), axis=0)
    # Read again by chunk: sums over chunks stay within a warp, sums over digits would not.
    above, ties, above_before, ties_before = counted_at(at_least_ptr, num_chunks, own_chunk, chosen, BLOCK_C)
    return chosen ^ (NUM_DIGITS - 1), above, ties, above_before, ties_before


@triton.jit
def counted_at(at_least_ptr, num_chunks, own_chunk, chosen, BLOCK_C: tl.constexpr):
    """Tokens with a higher digit than that at place `chosen`, and with this one: of all chunks, and of those before
    `own_chunk`."""
    above = tl.zeros([BLOCK_C], tl.int32)
    ties = tl.zeros([BLOCK_C], tl.int32)
    above_before = tl.zeros([BLOCK_C], tl.int32)
    ties_before = tl.zeros([BLOCK_C], tl.int32)
    for first in range(0, num_chunks, BLOCK_C):
        chunk = first + tl.arange(0, BLOCK_C)
        there = chunk < num_chunks
        row = at_least_ptr + chunk * NUM_DIGITS
        higher = tl.load(row + tl.maximum(chosen - 1, 0), mask=there, other=0, cache_modifier=".cg")
        higher = tl.where(chosen > 0, higher, 0)
        same = tl.load(row + chosen, mask=there, other=0, cache_modifier=".cg") - higher
        above += higher
        ties += same
        above_before += tl.where(chunk < own_chunk, higher, 0)
        ties_before += tl.where(chunk < own_chunk, same, 0)
    above, ties = tl.sum(above, axis=0), tl.sum(ties, axis=0)
    return above, ties, tl.sum(above_before, axis=0), tl.sum(ties_before, axis=0)


@triton.jit
def _listed(counted, above_before, ties_before):
    """Tokens listed up to a place: all those above the threshold, and the ties that are not skipped."""
    return above_before + (counted & 65535) + tl.maximum(ties_before + (counted >> 16), 0)


@triton.jit
def placed(keys, there, threshold, above_before, ties_before):
    """Where each token of a tile is listed, whether it is, and its counts: 1 above the threshold, 65536 at it."""
    # One scan for both counts: a tile has fewer than 2^15 tokens.
    both = tl.where(keys > threshold, 1, tl.where(keys == threshold, 65536, 0))
    both = tl.where(there, both, 0)
    upto = tl.cumsum(both, axis=0)
    place = _listed(upto - both, above_before, ties_before)
    # Where listing goes on by one, the token is listed.
    return place, _listed(upto, above_before, ties_before) > place, both


@triton.jit
def count_digits_kernel(
    scores_ptr,  # fp32 [arena]
    items_ptr,  # int64 [max_items, NUM_FIELDS], see `plan.py`
    block_shifts_ptr,  # int32 [max_groups, num_kv_heads], log2 of the tokens of a block
    before_ptr,  # int32 [num_kv_heads, max_items, NUM_DIGITS], what the pass before wrote
    at_least_ptr,  # int32 [num_kv_heads, max_items, NUM_DIGITS], written: tokens of digit 255 - i or above at place i
    fixed_before_ptr,  # int32 [max_groups, num_kv_heads, 2]: bits fixed one pass ago, rank wanted below them
    fixed_ptr,  # the same, written from the second pass on
    above_before_ptr,  # int32 [num_kv_heads, max_items]: tokens of a chunk above the threshold, known one pass ago
    above_ptr,  # the same, written from the second pass on
    NUM_FIELDS: tl.constexpr, KEY_BITS: tl.constexpr, PASS: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_C: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Program (KV head, item): counts the next digit of its chunk's tokens that match the bits fixed so far."""
    wait_for_the_kernel_before(OVERLAPPED)
    head = tl.program_id(0)
    item = tl.program_id(1)
    num_heads = tl.num_programs(0)
    max_items = tl.num_programs(1)
    fields = items_ptr + item * NUM_FIELDS
    prefix_len = tl.load(fields + 5).to(tl.int32)
    count = tl.load(fields + 6).to(tl.int32)
    # A whole prefix needs no threshold. Items that no plan uses have sizes of 0.
    if count < prefix_len:
        group = tl.load(fields).to(tl.int32)
        begin = tl.load(fields + 1).to(tl.int32)
        end = tl.load(fields + 2).to(tl.int32)
        first_item = tl.load(fields + 3).to(tl.int32)
        num_sink = tl.load(fields + 7).to(tl.int32)
        recent_begin = tl.load(fields + 8).to(tl.int32)
        scores_begin = tl.load(fields + 9) + head * tl.load(fields + 10)
        scores = scores_ptr + (scores_begin // ALIGNED * ALIGNED if TOKENS else scores_begin)
        row = group * num_heads + head
        chunk = head * max_items + item
        block_shift = tl.load(block_shifts_ptr + row)
        # The first scores are on their way while the digit before is chosen.
        tile = load_scores(scores, begin, end, block_shift, TILE, TOKENS)
        fixed = tl.full([], 0, tl.uint32)
        if PASS > 0:
            need = count
            if PASS > 1:
                fixed = tl.load(fixed_before_ptr + row * 2).to(tl.uint32)
                need = tl.load(fixed_before_ptr + row * 2 + 1)
            num_chunks = tl.load(fields + 4).to(tl.int32)
            first_chunk = (head * max_items + first_item).to(tl.int64)
            chosen, above, _, _, _ = choose_digit(
                before_ptr + first_chunk * NUM_DIGITS, num_chunks, item - first_item, need, BLOCK_C
            )
            need -= above
            fixed = (fixed << DIGIT_BITS) | chosen.to(tl.uint32)
            if item == first_item:
                tl.store(fixed_ptr + row * 2, fixed.to(tl.int32))
                tl.store(fixed_ptr + row * 2 + 1, need)
            higher = (chosen ^ (NUM_DIGITS - 1)) - 1
            above = tl.load(before_ptr + chunk.to(tl.int64) * NUM_DIGITS + tl.maximum(higher, 0))
            above = tl.where(higher >= 0, above, 0)
            if PASS > 1:
                above += tl.load(above_before_ptr + chunk)
            tl.store(above_ptr + chunk, above)
        shift: tl.constexpr = KEY_BITS - DIGIT_BITS * (PASS + 1)
        counts, at = begin_counts()
        for start in range(begin, end, TILE):
            keys = window_keys(tile, start, num_sink, recent_begin, KEY_BITS, TILE) >> shift
            matching = start + tl.arange(0, TILE) < end
            if PASS > 0:
                matching = matching & ((keys >> DIGIT_BITS) == fixed)
            if start + TILE < end:
                tile = load_scores(scores, start + TILE, end, block_shift, TILE, TOKENS)
            counts = add_counts(counts, at, (~keys & (NUM_DIGITS - 1)).to(tl.int32), matching)
        places = at_least_ptr + chunk.to(tl.int64) * NUM_DIGITS + tl.arange(0, NUM_DIGITS)
        tl.store(places, tl.cumsum(end_counts(counts, at), axis=0))


@triton.jit
def list_selected_kernel(
    scores_ptr,  # fp32 [arena]
    items_ptr,  # int64 [max_items, NUM_FIELDS], see `plan.py`
    block_shifts_ptr,  # int32 [max_groups, num_kv_heads], log2 of the tokens of a block
    at_least_ptr,  # int32 [num_kv_heads, max_items, NUM_DIGITS], of the last pass
    fixed_ptr,  # int32 [max_groups, num_kv_heads, 2], after the last pass but one
    above_ptr,  # int32 [num_kv_heads, max_items], after the last pass but one
    candidates_ptr,  # int32 [max_groups, num_kv_heads, candidates] by its strides: positions, ascending; where LISTED
    slot_table_ptr,  # int32 or int64 [arena]
    positions_ptr,  # int32 arena of lists, written
    slots_ptr,  # int32 arena of lists, written with HAS_SLOTS
    counts_ptr,  # int32 [max_groups, num_kv_heads], written
    candidates_stride_group, candidates_stride_head, NUM_FIELDS: tl.constexpr, KEY_BITS: tl.constexpr,
    TILE: tl.constexpr, TOKENS: tl.constexpr, BLOCK_C: tl.constexpr, LISTED: tl.constexpr, HAS_SLOTS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Program (KV head, item): lists its chunk's tokens above the threshold, and the last ones of those at it.

    With LISTED, what is counted as tokens are places in the list of candidates, which names their positions.
    """
    wait_for_the_kernel_before(OVERLAPPED)
    head = tl.program_id(0)
    item = tl.program_id(1)
    num_heads = tl.num_programs(0)
    max_items = tl.num_programs(1)
    fields = items_ptr + item * NUM_FIELDS
    group = tl.load(fields).to(tl.int32)
    if group >= 0:
        begin = tl.load(fields + 1).to(tl.int32)
        end = tl.load(fields + 2).to(tl.int32)
        first_item = tl.load(fields + 3).to(tl.int32)
        num_chunks = tl.load(fields + 4).to(tl.int32)
        prefix_len = tl.load(fields + 5).to(tl.int32)
        count = tl.load(fields + 6).to(tl.int32)
        num_sink = tl.load(fields + 7).to(tl.int32)
        recent_begin = tl.load(fields + 8).to(tl.int32)
        scores_begin = tl.load(fields + 9) + head * tl.load(fields + 10)
        scores = scores_ptr + (scores_begin // ALIGNED * ALIGNED if TOKENS else scores_begin)
        slot_table = slot_table_ptr + tl.load(fields + 11)
        list_begin = tl.load(fields + 12) + head * tl.load(fields + 13)
        row = group * num_heads + head
        block_shift = tl.load(block_shifts_ptr + row)
        tile = load_scores(scores, begin, end, block_shift, TILE, TOKENS)

        # A whole prefix: every key is at least 0, and as many tokens as chunks before have are listed before.
        threshold = tl.full([], 0, tl.uint32)
        above_before = begin
        ties_before = 0
        if count < prefix_len:
            first_chunk = (head * max_items + first_item).to(tl.int64)
            need = tl.load(fixed_ptr + row * 2 + 1)
            own_chunk = item - first_item
            chosen, above, ties, above_before, ties_before = choose_digit(
                at_least_ptr + first_chunk * NUM_DIGITS, num_chunks, own_chunk, need, BLOCK_C
            )
            # The last ties are taken. Those that are skipped count below zero.
            ties_before -= above + ties - need
            threshold = (tl.load(fixed_ptr + row * 2).to(tl.uint32) << DIGIT_BITS) | chosen.to(tl.uint32)
            for first in range(0, own_chunk, BLOCK_C):
                chunk = first + tl.arange(0, BLOCK_C)
                known = tl.load(above_ptr + first_chunk + chunk, mask=chunk < own_chunk, other=0)
                above_before += tl.sum(known, axis=0)
        positions = positions_ptr + list_begin
        slots = slots_ptr + list_begin
        candidates = candidates_ptr + group.to(tl.int64) * candidates_stride_group + head * candidates_stride_head
        for start in range(begin, end, TILE):
            token = start + tl.arange(0, TILE)
            position = token
            if LISTED:
                position = tl.load(candidates + token, mask=token < end, other=0)
            keys = window_keys(tile, start, num_sink, recent_begin, KEY_BITS, TILE)
            if start + TILE < end:
                tile = load_scores(scores, start + TILE, end, block_shift, TILE, TOKENS)
            place, chosen_token, both = placed(keys, token < end, threshold, above_before, ties_before)
            tl.store(positions + place, position, mask=chosen_token)
            if HAS_SLOTS:
                slot = tl.load(slot_table + position, mask=chosen_token, other=0)
                tl.store(slots + place, slot.to(tl.int32), mask=chosen_token)
            tile_total = tl.sum(both, axis=0)
            above_before += tile_total & 65535
            ties_before += tile_total >> 16
        if item == first_item:
            tl.store(counts_ptr + row, count)
