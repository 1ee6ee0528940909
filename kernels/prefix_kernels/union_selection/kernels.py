"""Triton kernels of a union: depths of keys, and the scores that they give tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from prefix_kernels.anchor_selection.kernels import count_keys, item_at
from prefix_kernels.kernels import ALIGNED, COARSE, NUM_BINS, load_scores, ordered_keys
from prefix_kernels.pooled_scores.kernels import stretch_of


@triton.jit
def depth_kernel(
    stretches_ptr,  # int64 [max_groups, 4]: first item and items by the first method, by the second; windows in 1 and 3
    windows_ptr,  # int32 [max_groups], tokens of the windows; -1: nothing was scored
    first_ptr,  # int32 [max_items, num_kv_heads, COARSE + NUM_BINS]: `ScoredTokens.at_least`
    second_ptr,  # the same, of the second method
    depths_ptr,  # fp32 [2, max_groups, num_kv_heads, NUM_BINS], written: minus the natural log
    max_groups, BINS: tl.constexpr,
):  # fmt: skip
    """Program (group and bins, KV head, method): at which depth tokens of each key come."""
    parts: tl.constexpr = NUM_BINS // BINS
    group, head, method = tl.program_id(0) // parts, tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    windows = tl.load(windows_ptr + group)
    if windows >= 0:
        place = tl.program_id(0) % parts * BINS + tl.arange(0, BINS)
        first = tl.load(stretches_ptr + group * 4 + 2 * method)
        count = tl.load(stretches_ptr + group * 4 + 2 * method + 1).to(tl.int32)
        at_least = tl.where(method == 0, first_ptr.to(tl.int64), second_ptr.to(tl.int64)).to(tl.pointer_type(tl.int32))
        total = tl.zeros([BINS], tl.int32)
        for chunk in range(count):
            total += tl.load(
                at_least + ((first + chunk) * num_heads + head) * (COARSE + NUM_BINS) + COARSE + place,
                cache_modifier=".cg",
            )
        depth = tl.maximum(total - windows, 1).to(tl.float32)
        out = depths_ptr + ((method * max_groups + group) * num_heads + head) * NUM_BINS
        tl.store(out + place, -tl.log(depth))


@triton.jit
def _depths(scores, start, end, shift, depths, TILE: tl.constexpr, BLOCKS: tl.constexpr):
    """Minus the natural log of the depths of a tile's tokens; -inf without a score."""
    keys = ordered_keys(load_scores(scores, start, end, shift, TILE, BLOCKS))
    return tl.where(keys == 0, float("-inf"), tl.load(depths + (keys ^ (NUM_BINS - 1)), cache_modifier=".cg"))


@triton.jit
def merge_kernel(
    heads_ptr,  # int64 [max_groups, num_kv_heads, 4]: prefix_len, 0, 0, first score
    first_heads_ptr,  # `ScoredTokens.heads` of the first method
    second_heads_ptr,
    first_scores_ptr,  # fp32 arenas, natural log
    second_scores_ptr,
    depths_ptr,  # fp32 [2, max_groups, num_kv_heads, NUM_BINS]
    scores_ptr,  # fp32 arena, written
    items_ptr,  # int64 [max_items, ITEM_FIELDS]
    at_least_ptr,  # int32 [max_items, num_kv_heads, COARSE + NUM_BINS], written
    max_groups, ITEM_FIELDS: tl.constexpr, FIRST_BLOCKS: tl.constexpr, SECOND_BLOCKS: tl.constexpr,
    STRETCH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (place, KV head): its items' scores, and how many tokens have which key."""
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    num_items = tl.load(items_ptr + tl.program_id(0) * ITEM_FIELDS + ITEM_FIELDS - 1).to(tl.int32)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        group, chunk, num_chunks, prefix_len, selected, num_sink, recent_begin = item_at(items_ptr + item * ITEM_FIELDS)
        if selected < prefix_len:
            row = group * num_heads + head
            scores = scores_ptr + tl.load(heads_ptr + row * 4 + 3) // ALIGNED * ALIGNED
            first_scores = first_scores_ptr + tl.load(first_heads_ptr + row * 4 + 3) // ALIGNED * ALIGNED
            second_scores = second_scores_ptr + tl.load(second_heads_ptr + row * 4 + 3) // ALIGNED * ALIGNED
            first_shift = tl.load(first_heads_ptr + row * 4 + 2).to(tl.int32)
            second_shift = tl.load(second_heads_ptr + row * 4 + 2).to(tl.int32)
            first_depths = depths_ptr + row * NUM_BINS
            second_depths = first_depths + max_groups * num_heads * NUM_BINS
            begin, end = stretch_of(chunk, num_chunks, prefix_len, STRETCH)
            for start in range(begin, end, TILE):
                one = _depths(first_scores, start, end, first_shift, first_depths, TILE, FIRST_BLOCKS)
                other = _depths(second_scores, start, end, second_shift, second_depths, TILE, SECOND_BLOCKS)
                token = start + tl.arange(0, TILE)
                tl.store(scores + token, tl.maximum(one, other), mask=token < end)
            # Keys are counted of what other threads of this program wrote.
            tl.debug_barrier()
            counts = at_least_ptr + (item * num_heads + head) * (COARSE + NUM_BINS)
            count_keys(counts, scores, begin, end, 0, num_sink, recent_begin, TILE, False, False)
