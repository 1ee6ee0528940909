"""The last two phases of a selection on Hopper, for programs that have just scored their candidates.

As `kernels.select_kernel` has them for all GPUs, in Gluon: the lower bytes of keys at the threshold's upper byte are
counted, then what was selected is listed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from prefix_kernels.anchor_selection.hopper_count_kernels import (
    add_counts,
    at_least_of,
    begin_counts,
    places_of_digits,
)
from prefix_kernels.anchor_selection.kernels import KEY_BITS, both_sides
from prefix_kernels.digit_counts import NUM_DIGITS
from prefix_kernels.top_k_selection.kernels import DIGIT_BITS, ordered_keys

TILE = gl.constexpr(2048)
"""Candidates that are listed at once; less than 2^15."""
_ordered_keys = gluon.jit(ordered_keys.fn)
_both_sides = gluon.jit(both_sides.fn)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _keys(scores, start, end, layout: gl.constexpr):
    """uint32 [TILE] keys of the candidates from `start` on; of those from `end` on they say nothing."""
    scores_ptr, num_sink, recent_begin = scores
    token = start + gl.arange(0, TILE, layout)
    keys = _ordered_keys(gl.load(scores_ptr + token, mask=token < end, other=0.0), KEY_BITS)
    return gl.where((token < num_sink) | (token >= recent_begin), 65535, keys)


@gluon.jit
def _choose_digit(all_at_least_ptr, need, NUM_WARPS: gl.constexpr):
    """As `kernels._choose_digit`."""
    at_least = gl.load(all_at_least_ptr + places_of_digits(NUM_WARPS), cache_modifier=".cg")
    few = at_least < need
    chosen, above, upto = gl.reduce(
        (few.to(gl.int32), gl.where(few, at_least, 0), gl.where(few, 2147483647, at_least)), 0, _both_sides
    )
    return chosen, above, upto - above


@gluon.jit
def count_lowers(scores, begin, end, selected, own_ptrs, of_row_ptrs, counts_at, NUM_WARPS: gl.constexpr):
    """Write, for a program's stretch, counts of the keys at the threshold's upper byte by their lower one, and how many
    have a higher upper one; and add the counts to those of all programs. Returns (upper byte, how many are needed of
    it)."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [NUM_WARPS], [0])
    lowers_ptr, higher_ptr = own_ptrs
    of_uppers_ptr, of_lowers_ptr = of_row_ptrs
    place, above, _ = _choose_digit(of_uppers_ptr, selected, NUM_WARPS)
    upper = NUM_DIGITS - 1 - place
    begin_counts(counts_at, NUM_WARPS)
    higher = gl.full([TILE], 0, gl.int32, layout)
    for start in range(begin, end, TILE):
        keys = _keys(scores, start, end, layout).to(gl.int32)
        there = start + gl.arange(0, TILE, layout) < end
        add_counts(counts_at, NUM_DIGITS - 1 - keys % NUM_DIGITS, there & (keys >> DIGIT_BITS == upper))
        higher += (there & (keys >> DIGIT_BITS > upper)).to(gl.int32)
    at_least = at_least_of(counts_at, NUM_WARPS)
    gl.store(lowers_ptr + places_of_digits(NUM_WARPS), at_least)
    gl.store(higher_ptr, gl.sum(higher, axis=0))
    gl.atomic_add(of_lowers_ptr + places_of_digits(NUM_WARPS), at_least, sem="relaxed")
    return upper, selected - above


@gluon.jit
def _before(lowers_ptr, higher_ptr, chunk, place, NUM_WARPS: gl.constexpr):
    """Tokens above the threshold, and those at it, that the programs before count."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    AT_ONCE: gl.constexpr = 32 * NUM_WARPS
    above = gl.full([AT_ONCE], 0, gl.int32, layout)
    ties = gl.full([AT_ONCE], 0, gl.int32, layout)
    for first in range(0, chunk, AT_ONCE):
        other = first + gl.arange(0, AT_ONCE, layout)
        row = lowers_ptr + other * NUM_DIGITS + place
        upto = gl.load(row, mask=other < chunk, other=0, cache_modifier=".cg")
        more = gl.load(row - 1, mask=(other < chunk) & (place > 0), other=0, cache_modifier=".cg")
        above += more + gl.load(higher_ptr + other, mask=other < chunk, other=0, cache_modifier=".cg")
        ties += upto - more
    return gl.sum(above, axis=0), gl.sum(ties, axis=0)


@gluon.jit
def threshold_of(counted, chunk, own_ptrs, of_lowers_ptr, NUM_WARPS: gl.constexpr):
    """(The threshold; how many are listed before this program's; how many ties there are before it, less those that are
    skipped)."""
    upper, need = counted
    lowers_ptr, higher_ptr = own_ptrs
    place, above, ties = _choose_digit(of_lowers_ptr, need, NUM_WARPS)
    above_before, ties_before = _before(lowers_ptr, higher_ptr, chunk, place, NUM_WARPS)
    # The last ties are taken. Those that are skipped count below zero.
    return upper * NUM_DIGITS + NUM_DIGITS - 1 - place, above_before, ties_before - (above + ties - need)


@gluon.jit
def _listed(counted, above_before, ties_before):
    return above_before + (counted & 65535) + gl.maximum(ties_before + (counted >> 16), 0)


@gluon.jit
def list_stretch(
    scores, begin, end, whole, found, lists, slot_table_ptr, HAS_SLOTS: gl.constexpr, NUM_WARPS: gl.constexpr
):
    """List what a program's stretch has above the threshold, and the last ties. `whole`: all of it."""
    loaded: gl.constexpr = gl.BlockedLayout([4], [32], [NUM_WARPS], [0])
    layout: gl.constexpr = gl.BlockedLayout([TILE // (32 * NUM_WARPS)], [32], [NUM_WARPS], [0])
    threshold, above_before, ties_before = found
    positions_ptr, slots_ptr = lists
    for start in range(begin, end, TILE):
        token = start + gl.arange(0, TILE, layout)
        keys = gl.full([TILE], 1, gl.int32, layout)
        if not whole:
            keys = gl.convert_layout(_keys(scores, start, end, loaded).to(gl.int32), layout)
        both = gl.where(keys > threshold, 1, gl.where(keys == threshold, 65536, 0))
        both = gl.where(token < end, both, 0)
        upto = gl.associative_scan(both, 0, _add)
        place = _listed(upto - both, above_before, ties_before)
        # Where listing goes on by one, the token is listed.
        chosen = _listed(upto, above_before, ties_before) > place
        gl.store(positions_ptr + place, token, mask=chosen)
        if HAS_SLOTS:
            slot = gl.load(slot_table_ptr + token, mask=chosen, other=0)
            gl.store(slots_ptr + place, slot.to(gl.int32), mask=chosen)
        if start + TILE < end:
            total = gl.sum(both, axis=0)
            above_before += total & 65535
            ties_before += total >> 16


@gluon.jit
def pad_lists(lists, begin, step, max_budget, HAS_SLOTS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """-1 into every `step`-th tile of entries from `begin` on."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [NUM_WARPS], [0])
    positions_ptr, slots_ptr = lists
    for start in range(begin, max_budget, step):
        entry = start + gl.arange(0, TILE, layout)
        nothing = gl.full([TILE], -1, gl.int32, layout)
        gl.store(positions_ptr + entry, nothing, mask=entry < max_budget)
        if HAS_SLOTS:
            gl.store(slots_ptr + entry, nothing, mask=entry < max_budget)
