"""Top-k selection in one launch, for as many scores as one program holds in registers: blocks of a long prefix.

The threshold is found two bits at a time, by the tokens that reach each of three keys. Then the program lists its
tokens. The positions are those of `kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefix_kernels.dependent_launch import wait_for_the_kernel_before
from prefix_kernels.top_k_selection.kernels import ordered_keys

COUNT_BITS = tl.constexpr(21)
"""Of a count of tokens: three of them are added up as one number."""
COUNTS = tl.constexpr(2**21 - 1)
TWO_COUNTS = tl.constexpr(42)


@triton.jit
def _threshold(keys, tokens, need, KEY_BITS: tl.constexpr):
    """The highest key that `need` tokens or more reach; with a `need` of 0, the highest there is."""
    found = tl.full([], 0, tl.uint32)
    tokens = tokens.to(tl.int64)
    for step in tl.static_range(KEY_BITS // 2):
        reached = tl.where(keys >= found + (1 << (KEY_BITS - 2 - 2 * step)), tokens, 0)
        reached += tl.where(keys >= found + (2 << (KEY_BITS - 2 - 2 * step)), tokens << COUNT_BITS, 0)
        reached += tl.where(keys >= found + (3 << (KEY_BITS - 2 - 2 * step)), tokens << TWO_COUNTS, 0)
        counts = tl.sum(reached, axis=0)
        more = tl.full([], 0, tl.uint32)
        for _ in tl.static_range(3):
            more += ((counts & COUNTS) >= need).to(tl.uint32)
            counts = counts >> COUNT_BITS
        found += more << (KEY_BITS - 2 - 2 * step)
    return found


@triton.jit
def _tokens(block, block_shift, prefix_len, num_sink, recent_begin):
    """Of each block: where it begins, its tokens that no window takes (they compete), where these and it end."""
    begin = block << block_shift
    end = tl.minimum(begin + (1 << block_shift), prefix_len)
    free_end = tl.minimum(end, recent_begin)
    return begin, tl.maximum(free_end - tl.maximum(begin, num_sink), 0), free_end, end


@triton.jit
def select_blocks_kernel(
    scores_ptr,  # fp32 [arena]
    items_ptr,  # int64 [max_groups, NUM_FIELDS], see `plan.py`: one item a group
    block_shifts_ptr,  # int32 [max_groups, num_kv_heads], log2 of the tokens of a block
    candidates_ptr,  # int32 [max_groups, num_kv_heads, candidates] by its strides: positions, ascending; where LISTED
    slot_table_ptr,  # int32 or int64 [arena]
    positions_ptr,  # int32 [max_groups, num_kv_heads, max_budget], written
    slots_ptr,  # int32 [max_groups, num_kv_heads, max_budget], written with HAS_SLOTS
    counts_ptr,  # int32 [max_groups, num_kv_heads], written
    max_budget,
    candidates_stride_group,
    candidates_stride_head,
    NUM_FIELDS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LISTED: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    PAD: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Program (KV head, group): all of its blocks; with LISTED all of its candidates, as blocks of one token."""
    wait_for_the_kernel_before(OVERLAPPED)
    head = tl.program_id(0)
    group = tl.program_id(1)
    fields = items_ptr + group * NUM_FIELDS
    prefix_len = tl.load(fields + 5).to(tl.int32)
    count = tl.load(fields + 6).to(tl.int32)
    num_sink = tl.load(fields + 7).to(tl.int32)
    recent_begin = tl.load(fields + 8).to(tl.int32)
    scores = scores_ptr + tl.load(fields + 9) + head * tl.load(fields + 10)
    slot_table = slot_table_ptr + tl.load(fields + 11)
    row = group * tl.num_programs(0) + head
    block_shift = tl.load(block_shifts_ptr + row)

    block = tl.arange(0, BLOCKS)
    _, free, _, _ = _tokens(block, block_shift, prefix_len, num_sink, recent_begin)
    keys = ordered_keys(tl.load(scores + block, mask=block << block_shift < prefix_len, other=0.0), KEY_BITS)
    need = count - (prefix_len - tl.sum(free, axis=0))
    threshold = _threshold(keys, free, need, KEY_BITS)
    # Read again, so that what follows from it takes no registers until here.
    block_shift = tl.load(block_shifts_ptr + row, volatile=True)
    begin, free, free_end, end = _tokens(block, block_shift, prefix_len, num_sink, recent_begin)
    above = keys > threshold
    ties = tl.where(keys == threshold, free, 0)
    # The last ties are taken, in a block that is cut too.
    left = need - tl.sum(tl.where(above, free, 0), axis=0)
    behind = tl.sum(ties, axis=0) - tl.cumsum(ties, axis=0)
    taken = tl.where(above, free, tl.minimum(tl.maximum(left - behind, 0), ties))
    chosen_begin = free_end - taken
    in_sink = tl.maximum(tl.minimum(end, num_sink) - begin, 0)
    # Windows that meet: a token of both is a sink's.
    in_recent = tl.maximum(end - tl.maximum(tl.maximum(begin, recent_begin), num_sink), 0)
    listed = in_sink + taken + in_recent
    place = tl.cumsum(listed, axis=0) - listed

    positions = positions_ptr + row.to(tl.int64) * max_budget
    slots = slots_ptr + row.to(tl.int64) * max_budget
    candidates = candidates_ptr + group.to(tl.int64) * candidates_stride_group + head * candidates_stride_head
    for step in range(1 << block_shift):
        token = begin + step
        chosen = (token < num_sink) | (token >= recent_begin) | ((token >= chosen_begin) & (token < free_end))
        chosen = chosen & (token < end)
        position = token
        if LISTED:
            position = tl.load(candidates + token, mask=chosen, other=0)
        tl.store(positions + place, position, mask=chosen)
        if HAS_SLOTS:
            slot = tl.load(slot_table + position, mask=chosen, other=0)
            tl.store(slots + place, slot.to(tl.int32), mask=chosen)
        place += chosen.to(tl.int32)
    tl.store(counts_ptr + row, count)
    if PAD:
        for first in range(count, max_budget, BLOCKS):
            entry = first + tl.arange(0, BLOCKS)
            nothing = tl.full([BLOCKS], -1, tl.int32)
            tl.store(positions + entry, nothing, mask=entry < max_budget)
            if HAS_SLOTS:
                tl.store(slots + entry, nothing, mask=entry < max_budget)
