"""Device functions that kernels share: their start, counts of digits in shared memory, programs that meet, and parts of
a selection by bins.

*Start.* Hopper's programmatic dependent launch (`launching.launch_behind`) puts a kernel's programs on the GPU before
the kernel before them ends. What that one wrote may only be read after `wait_for_the_kernel_before`, which therefore
stands before the first read or write of that memory (a test looks for it in what is compiled).

*Counts.* `tl.histogram` finds the lanes of each bin by votes: about 20 instructions for each value of a thread. An
add to shared memory takes one, and adds of 1 to one place by several lanes are one add. Triton has no such add, so it
is assembly. What it counts in lies beside Triton's own shared memory, and Triton asks for more than 48 KiB by its own
alone: so what needs little less than that counts by `tl.histogram`, as Triton's interpreter does.

*Meetings.* Programs of one launch wait for each other on a counter in device memory. All of them run at the same time
(a cooperative launch), and one that waits has nothing else to do before: so waiting cannot last.

*Bins.* Scores become keys of 11 bits in the same order, each of which is a bin. `anchor_selection.kernels` counts bins,
and so finds the threshold.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from prefix_kernels import top_k_selection, types

ALIGNED = tl.constexpr(types.ALIGNED)
BEGINS = tl.constexpr(16)
"""Tiles of scores begin at multiples of this."""
NUM_KEYS = top_k_selection.NUM_KEYS
WINDOW_KEY = tl.constexpr(NUM_KEYS - 1)
"""Of sink and recent window: above all others."""
LOWEST_LOG = tl.constexpr(top_k_selection.LOWEST_LOG)
BINS_PER_LOG = tl.constexpr((NUM_KEYS - 3) / -top_k_selection.LOWEST_LOG)
NUM_BINS = tl.constexpr(NUM_KEYS)
FINE = tl.constexpr(32)
COARSE = tl.constexpr(NUM_KEYS // 32)
"""Of so many bins each how many are counted up to their last: what is looked at first."""
COUNTS = tl.constexpr("{ .shared .align 1024 .b32 bin_counts[2048]; mov.u32 $0, bin_counts; }")
"""The address of NUM_BINS numbers. What Triton itself has in shared memory comes behind them, and matrix instructions
want that at a multiple of 1,024 bytes."""
RESET = tl.constexpr("st.shared.b32 [$1], 0; mov.b32 $0, 0;")
ADD = tl.constexpr("red.shared.add.u32 [$1], $2; mov.b32 $0, 0;")
"""0 or 1: a predicate would be a branch."""
READ = tl.constexpr("ld.shared.b32 $0, [$1];")
SCATTER = tl.constexpr("{ .reg .pred there; setp.ge.s32 there, $3, 0; @there st.global.b32 [$1], $2; mov.b32 $0, 0; }")
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
ARRIVALS = tl.constexpr(2**20)
"""What a counter grows by when all have arrived, however many they are."""


@triton.jit
def wait_for_the_kernel_before(OVERLAPPED: tl.constexpr):
    """Wait until it has ended and all that it wrote can be read, then let the next kernel's programs come."""
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def let_the_next_kernel_come():
    """Its programs may be put on the GPU from now on, where there is room. They wait for this kernel's end."""
    gdc_launch_dependents()


@triton.jit
def scatter(ptr, values, there):
    """Store int32 values at addresses in no order, where `there` is 0 or more. By `tl.store` threads would first
    exchange all of them."""
    if _INTERPRETED:
        tl.store(ptr, values, mask=there >= 0)
    else:
        tl.inline_asm_elementwise(
            SCATTER, "=r,l,r,r", [ptr.to(tl.int64), values, there], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _places():
    """Byte offsets of all counts, a few to a thread."""
    return tl.arange(0, NUM_BINS) * 4


@triton.jit
def begin_counts(PLAIN: tl.constexpr):
    """(int32 [NUM_BINS], 0; where they are counted in shared memory: its address there).

    Each place in the source has counts of its own, which live as long as the program. PLAIN: by `tl.histogram`.
    """
    counts = tl.zeros([NUM_BINS], tl.int32)
    at = 0
    if not (_INTERPRETED or PLAIN):
        at = tl.inline_asm_elementwise(COUNTS, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        # Threads that still read what was counted here before.
        tl.debug_barrier()
        tl.inline_asm_elementwise(RESET, "=r,r", [_places() + at], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
    return counts, at


@triton.jit
def add_counts(counts, at, bins, mask, PLAIN: tl.constexpr):
    """Count bins where `mask` is set; the counts so far.

    Of as many values as the program has threads, or more: of fewer some threads would hold copies, and count them, too.
    """
    if _INTERPRETED or PLAIN:
        # What is not counted goes to the last place, see `end_counts`.
        counts += tl.histogram(tl.where(mask, bins, NUM_BINS - 1), NUM_BINS)
    else:
        tl.inline_asm_elementwise(
            ADD,
            "=r,r,r",
            [bins * 4 + at, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return counts


@triton.jit
def end_counts(counts, at, count, PLAIN: tl.constexpr):
    """int32 [NUM_BINS]: how many of `count` values, all that were counted, are in bin i or a lower one."""
    if not (_INTERPRETED or PLAIN):
        tl.debug_barrier()
        counts = tl.inline_asm_elementwise(READ, "=r,r", [_places() + at], dtype=tl.int32, is_pure=False, pack=1)
    return tl.minimum(tl.cumsum(counts, axis=0), count)


@triton.jit
def meet(arrived_ptr, place, num_programs):
    """Wait until all programs of a meeting are here, and what they wrote can be read.

    The counter only grows, by as much at each meeting, so no one has to set it back: the first program adds what the
    others leave. One thread looks, by atomic reads: where each looked for itself by `ld.acquire`, selections took
    longer on an H200 (docs/kernels.md).

    Args:
        arrived_ptr: int64, at first 0; the meeting's own.
        place: of this program among all, from 0.
        num_programs: that meet. Nobody waits for one program.
    """
    # All threads' writes come before the arrival, which one thread tells; and before what this program reads itself.
    tl.debug_barrier()
    if num_programs > 1:
        own = tl.where(place == 0, ARRIVALS + 1 - num_programs, 1).to(tl.int64)
        before = tl.atomic_add(arrived_ptr, own, sem="acq_rel", scope="gpu")
        target = (before // ARRIVALS + 1) * ARRIVALS
        seen = before + own
        while seen < target:
            seen = tl.atomic_add(arrived_ptr, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()


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
