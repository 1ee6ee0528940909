"""Parts of a radix select in Triton: scores as ordered keys, and the compaction of what was chosen.

Scores become keys of 16 bits in the same order. `anchor_selection.kernels` counts their digits, the upper byte first,
and so finds the threshold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefix_kernels.kernels import NUM_DIGITS

DIGIT_BITS = tl.constexpr(8)
ALIGNED = tl.constexpr(4)
BEGINS = tl.constexpr(16)
"""Tiles begin at multiples of this."""
LOWEST_LOG = tl.constexpr(-44.0)
"""Natural log of the least probability that a key tells from others: 8e-20."""
LOG_SCALE = tl.constexpr(65533.0 / 44.0)


@triton.jit
def load_scores(scores, begin, end, TILE: tl.constexpr):
    """Scores [TILE] of the tokens from `begin` on, a multiple of 16; those from `end` on are not looked at."""
    token = begin // BEGINS * BEGINS + tl.arange(0, TILE)
    # Whole vectors: rows of scores are padded to such.
    end = (end + ALIGNED - 1) // ALIGNED * ALIGNED
    return tl.load(scores + token, mask=token < end, other=0.0)


@triton.jit
def ordered_keys(scores):
    """uint32 keys of 16 bits in the order of fp32 log-probabilities: -inf and NaN 0, and none is 65535.

    In steps of 6.7e-4 from -44 to 0; what lies outside ties at the ends.
    """
    real = scores > float("-inf")
    place = tl.minimum(tl.maximum(tl.where(real, scores, 0.0), LOWEST_LOG), 0.0) - LOWEST_LOG
    keys = tl.minimum((place * LOG_SCALE).to(tl.int32) + 1, 65534).to(tl.uint32)
    return tl.where(real, keys, 0)


@triton.jit
def window_keys(scores, begin, num_sink, recent_begin, TILE: tl.constexpr):
    """Keys [TILE] of the tokens from `begin` on, those of the windows above all others."""
    token = begin + tl.arange(0, TILE)
    return tl.where((token < num_sink) | (token >= recent_begin), 65535, ordered_keys(scores))


@triton.jit
def counted_at(at_least_ptr, num_chunks, chosen, BLOCK_C: tl.constexpr):
    """Tokens of the first chunks with a higher digit than that at place `chosen`, and with this one."""
    above = tl.zeros([BLOCK_C], tl.int32)
    ties = tl.zeros([BLOCK_C], tl.int32)
    for first in range(0, num_chunks, BLOCK_C):
        chunk = first + tl.arange(0, BLOCK_C)
        there = chunk < num_chunks
        row = at_least_ptr + chunk * NUM_DIGITS
        # Other programs of the same launch may have written them: past the first level of caches.
        higher = tl.load(row + tl.maximum(chosen - 1, 0), mask=there, other=0, cache_modifier=".cg")
        higher = tl.where(chosen > 0, higher, 0)
        same = tl.load(row + chosen, mask=there, other=0, cache_modifier=".cg") - higher
        above += higher
        ties += same
    return tl.sum(above, axis=0), tl.sum(ties, axis=0)


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
