"""Parts of a selection by bins in Triton: scores as ordered keys, and the compaction of what was chosen.

Scores become keys of 11 bits in the same order, each of which is a bin. `anchor_selection.kernels` counts bins, and so
finds the threshold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefix_kernels import top_k_selection

ALIGNED = tl.constexpr(4)
BEGINS = tl.constexpr(16)
"""Tiles begin at multiples of this."""
WINDOW_KEY = tl.constexpr(top_k_selection.NUM_KEYS - 1)
"""Of sink and recent window: above all others."""
LOWEST_LOG = tl.constexpr(top_k_selection.LOWEST_LOG)
BINS_PER_LOG = tl.constexpr((top_k_selection.NUM_KEYS - 3) / -top_k_selection.LOWEST_LOG)


@triton.jit
def load_scores(scores, begin, end, shift, TILE: tl.constexpr, BLOCKS: tl.constexpr):
    """Scores [TILE] of the tokens from `begin` on, a multiple of 16; those from `end` on are not looked at.

    BLOCKS: 2^shift tokens, 16 or more, have one score.
    Past the first level of caches, as all that another launch has written that may still have been running.
    """
    token = begin // BEGINS * BEGINS + tl.arange(0, TILE)
    if BLOCKS:
        return tl.load(scores + (token >> shift), mask=token < end, other=0.0, cache_modifier=".cg")
    # Whole vectors: rows of scores are padded to such.
    end = (end + ALIGNED - 1) // ALIGNED * ALIGNED
    return tl.load(scores + token, mask=token < end, other=0.0, cache_modifier=".cg")


@triton.jit
def ordered_levels(scores):
    """fp32 of at least -1: a log-probability's key is the whole part plus 1. A key is above k where its level is k or
    more."""
    real = scores > float("-inf")
    place = tl.minimum(tl.maximum(tl.where(real, scores, 0.0), LOWEST_LOG), 0.0) - LOWEST_LOG
    return tl.where(real, place * BINS_PER_LOG, -1.0)


@triton.jit
def keys_of(levels):
    """int32 keys of levels, see `top_k_selection.rank_by_keys`."""
    return levels.to(tl.int32) + 1


@triton.jit
def ordered_keys(scores):
    """int32 keys of fp32 log-probabilities; none is `WINDOW_KEY`."""
    return keys_of(ordered_levels(scores))


@triton.jit
def window_levels(scores, begin, num_sink, recent_begin, TILE: tl.constexpr):
    """Levels [TILE] of the tokens from `begin` on, those of the windows above all others."""
    token = begin + tl.arange(0, TILE)
    in_window = (token < num_sink) | (token >= recent_begin)
    return tl.where(in_window, tl.full([TILE], WINDOW_KEY - 1.0, tl.float32), ordered_levels(scores))


@triton.jit
def placed(levels, there, threshold, above_before, ties_before):
    """Where each token of a tile is listed, whether it is (0 or more) or not (-1), and its counts: 1 where its key is
    above the threshold, 65536 at it."""
    # One scan for both counts: a tile has fewer than 2^15 tokens.
    both = tl.where(levels >= threshold, 1, tl.where(levels >= threshold - 1.0, 65536, 0))
    both = tl.where(there, both, 0)
    before = tl.cumsum(both, axis=0) - both
    ties = ties_before + (before >> 16)
    # The first ties are skipped. A number says what is listed, as a thread has few predicates.
    chosen = tl.where(both == 65536, ties, both - 1)
    return above_before + (before & 65535) + tl.maximum(ties, 0), chosen, both
