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

*Lists.* A thread has ROW neighbouring tokens, each a bit of a word, and compares their scores themselves with the least
ones of a bin: a level for each token would cost more. What a tile lists goes through shared memory, so that neighbours
are written together.
"""

from __future__ import annotations

import struct

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
ROW = tl.constexpr(32)
"""Tokens of a tile that a thread lists, each a bit of a word."""


def _load_row() -> str:
    """PTX: 32 numbers from the address $32 on, four at a time, of which $33 are there."""
    loads = (
        f"setp.gt.s32 there, $33, {first}; "
        f"@there ld.global.cg.v4.f32 {{{', '.join(f'${first + i}' for i in range(4))}}}, [$32 + {4 * first}];"
        for first in range(0, 32, 4)
    )
    return f"{{ .reg .pred there; {' '.join(loads)} }}"


def _load_row_of_blocks() -> str:
    """PTX: of the tokens from $34 on, of which $33 are there, the numbers of their blocks of 2^$35, which begin at the
    address $32."""
    loads = (
        f"setp.gt.s32 there, $33, {number}; add.u32 at, $34, {number}; shr.u32 at, at, $35; mul.wide.u32 to, at, 4; "
        f"add.u64 to, to, $32; @there ld.global.cg.f32 ${number}, [to];"
        for number in range(32)
    )
    return f"{{ .reg .pred there; .reg .b32 at; .reg .b64 to; {' '.join(loads)} }}"


def _compare_row() -> str:
    """PTX: which of 32 numbers less the lowest logarithm are at least the one bound, and which the other."""
    lowest = struct.pack(">f", -top_k_selection.LOWEST_LOG).hex().upper()
    steps = (
        f"add.f32 place, ${first + 2}, 0f{lowest}; "
        "setp.ge.f32 above, place, $34; setp.ge.f32 tie, place, $35; "
        f"@above or.b32 $0, $0, {1 << first:#x}; @tie or.b32 $1, $1, {1 << first:#x};"
        for first in range(32)
    )
    return f"{{ .reg .pred above, tie; .reg .f32 place; mov.b32 $0, 0; mov.b32 $1, 0; {' '.join(steps)} }}"


LOAD_ROW = tl.constexpr(_load_row())
LOADED_ROW = tl.constexpr(",".join(32 * ["=&f"] + ["l", "r"]))
LOAD_ROW_OF_BLOCKS = tl.constexpr(_load_row_of_blocks())
LOADED_ROW_OF_BLOCKS = tl.constexpr(",".join(32 * ["=&f"] + ["l", "r", "r", "r"]))
LOADED_TYPES = tl.constexpr((tl.float32,) * 32)
COMPARE_ROW = tl.constexpr(_compare_row())
COMPARED_ROW = tl.constexpr(",".join(["=&r", "=&r"] + 34 * ["f"]))


@triton.constexpr_function
def _staging(tile: int) -> str:
    """PTX: the address of what a tile lists. A word behind each 32: threads that write 32 words each write to different
    banks."""
    words = -(-(tile + tile // 32) // 256) * 256
    return f"{{ .shared .align 1024 .b32 staged[{words}]; mov.u32 $0, staged; }}"


def _stage_row() -> str:
    """PTX: of a word's bits that are set, the numbers from $2 on, one behind the other from the place $1 on."""
    steps = (
        f"and.b32 at, $3, {1 << bit:#x}; setp.ne.u32 some, at, 0; shr.u32 at, place, 5; add.u32 at, at, place; "
        f"shl.b32 at, at, 2; add.u32 at, at, $4; add.u32 token, $2, {bit}; @some st.shared.b32 [at], token; "
        "@some add.u32 place, place, 1;"
        for bit in range(32)
    )
    return "{ .reg .pred some; .reg .b32 at, place, token; mov.b32 place, $1; " + " ".join(steps) + " mov.b32 $0, 0; }"


STAGE_ROW = tl.constexpr(_stage_row())
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
ARRIVALS = tl.constexpr(2**20)
"""What a counter grows by when all have arrived, however many they are."""


@triton.jit
def wait_for_the_kernel_before(OVERLAPPED: tl.constexpr, LET_THE_NEXT_COME: tl.constexpr = True):
    """Wait until it has ended and all that it wrote can be read; then let the next one's programs come, if wanted."""
    if OVERLAPPED:
        gdc_wait()
        if LET_THE_NEXT_COME:
            gdc_launch_dependents()


@triton.jit
def let_the_next_kernel_come():
    """Its programs may be put on the GPU from now on, where there is room. They wait for this kernel's end."""
    gdc_launch_dependents()


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

    BLOCKS: 2^shift tokens have one score.
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
def load_row(scores, first, end, shift, BLOCKS: tl.constexpr):
    """Scores of ROW tokens from `first` on, for each thread; those from `end` on are not looked at (`load_scores`).

    A tuple for `bits_of`: a tensor for each token, or in the interpreter one of all.
    """
    if _INTERPRETED:
        token = first[:, None] + tl.arange(0, ROW)[None, :]
        row = (tl.load(scores + (token >> shift if BLOCKS else token), mask=token < end, other=0.0),)
    elif BLOCKS:
        inputs = [scores.to(tl.int64), end - first, first, shift]
        row = tl.inline_asm_elementwise(
            LOAD_ROW_OF_BLOCKS, LOADED_ROW_OF_BLOCKS, inputs, dtype=LOADED_TYPES, is_pure=False, pack=1
        )
    else:
        inputs = [(scores + first).to(tl.int64), end - first]
        row = tl.inline_asm_elementwise(LOAD_ROW, LOADED_ROW, inputs, dtype=LOADED_TYPES, is_pure=False, pack=1)
    return row


@triton.jit
def least_place(level):
    """The least fp32 place, a log-probability less the lowest, that is of this level or a higher one; no number where
    none is. A level is rounded, so that it is looked for among neighbours."""
    near = (level.to(tl.float32) / BINS_PER_LOG).to(tl.int32, bitcast=True) - 8
    place = (near + tl.arange(0, 16)).to(tl.float32, bitcast=True)
    few = tl.sum((tl.minimum(place, -LOWEST_LOG) * BINS_PER_LOG < level.to(tl.float32)).to(tl.int32), axis=0)
    found = tl.where(few == 16, 0x7FC00000, near + few).to(tl.float32, bitcast=True)
    # Whatever has a score.
    return tl.where(level > 0, found, -3.4028234663852886e38)


@triton.jit
def bits_of(row, threshold, above_from, ties_from):
    """uint32 of a `load_row`: which tokens have a key above the threshold, and which have it or one above.

    `above_from`, `ties_from`: `least_place` of the levels from which on keys are so.
    """
    if _INTERPRETED:
        place = row[0] - LOWEST_LOG
        bit = (1 << tl.arange(0, ROW).to(tl.uint32))[None, :]
        above = tl.sum(tl.where(place >= above_from, bit, 0), axis=1)
        ties = tl.sum(tl.where(place >= ties_from, bit, 0), axis=1)
    else:
        inputs = row + (above_from, ties_from)  # noqa: RUF005 - Triton unpacks no tuple in another
        above, ties = tl.inline_asm_elementwise(
            COMPARE_ROW, COMPARED_ROW, inputs, dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1
        )
    # What has no score has key 0.
    return above.to(tl.uint32), tl.where(threshold == 0, 0xFFFFFFFF, ties).to(tl.uint32)


@triton.jit
def staging(TILE: tl.constexpr):
    """Address in shared memory for `stage_row` and `staged` of a tile; a place of its own wherever it stands."""
    if _INTERPRETED:
        return 0
    return tl.inline_asm_elementwise(_staging(TILE), "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def stage_row(at, ptr, first, bits, place):
    """Keep the int32 numbers of the bits that are set, from `first` on, one behind the other from `place` on: in shared
    memory or, in the interpreter, from `ptr` on. `staged` wants a barrier before and behind it."""
    if _INTERPRETED:
        bit = (1 << tl.arange(0, ROW).to(tl.uint32))[None, :]
        before = num_bits(bits[:, None] & (bit - 1))
        token = first[:, None] + tl.arange(0, ROW)[None, :]
        tl.store(ptr + place[:, None] + before, token, mask=(bits[:, None] & bit) != 0)
    else:
        tl.inline_asm_elementwise(
            STAGE_ROW, "=r,r,r,r,r", [place, first, bits, at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def staged(at, ptr, place, there):
    """What was kept at places, where `there`."""
    if _INTERPRETED:
        token = tl.load(ptr + place, mask=there, other=0)
    else:
        place = tl.where(there, place, 0)
        token = tl.inline_asm_elementwise(
            READ, "=r,r", [(place + (place >> 5)) * 4 + at], dtype=tl.int32, is_pure=False, pack=1
        )
    return token


@triton.jit
def num_bits(word):
    """How many are set, of uint32."""
    word -= word >> 1 & 0x55555555
    word = (word & 0x33333333) + (word >> 2 & 0x33333333)
    return ((word + (word >> 4) & 0x0F0F0F0F) * 0x01010101 >> 24).to(tl.int32)


@triton.jit
def lowest_bits(count):
    """uint32 with the lowest `count` bits set: none of 0 or less, all of 32 or more."""
    some = (1 << tl.minimum(tl.maximum(count, 0), 31).to(tl.uint32)) - 1
    return tl.where(count >= ROW, 0xFFFFFFFF, some).to(tl.uint32)
