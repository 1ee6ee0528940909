"""How many of a program's values have which digit, counted in shared memory.

`tl.histogram` finds the lanes of each digit by votes: about 20 instructions for each value of a thread. An add to
shared memory takes one, and adds of 1 to one place by several lanes are one add. Triton has no such add, so it is
assembly here. In Triton's interpreter the same counts come from `tl.histogram`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

NUM_DIGITS = tl.constexpr(256)
COUNTS = tl.constexpr("{ .shared .align 1024 .b32 digit_counts[512]; mov.u32 $0, digit_counts; }")
"""The address of 257 numbers. What Triton itself has in shared memory comes behind them, and matrix instructions want
that at a multiple of 1,024 bytes."""
RESET = tl.constexpr("st.shared.b32 [$1], 0; mov.b32 $0, 0;")
ADD = tl.constexpr("red.shared.add.u32 [$1], 1; mov.b32 $0, 0;")
READ = tl.constexpr("ld.shared.b32 $0, [$1];")
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def _places():
    """Byte offsets of all counts, one to a thread or a few."""
    return tl.arange(0, NUM_DIGITS) * 4


@triton.jit
def begin_counts():
    """(int32 [NUM_DIGITS], 0; where they are counted in shared memory: its address there).

    Each place in the source has counts of its own, which live as long as the program.
    """
    counts = tl.zeros([NUM_DIGITS], tl.int32)
    at = 0
    if not _INTERPRETED:
        at = tl.inline_asm_elementwise(COUNTS, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        # Threads that still read what was counted here before.
        tl.debug_barrier()
        tl.inline_asm_elementwise(RESET, "=r,r", [_places() + at], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
    return counts, at


@triton.jit
def add_counts(counts, at, digits, mask):
    """Count digits from 0 to 255 where `mask` is set; the counts so far.

    Of as many digits as the program has threads, or more: of fewer some threads would hold copies, and count them, too.
    """
    if _INTERPRETED:
        counts += tl.histogram(digits, NUM_DIGITS, mask=mask)
    else:
        tl.inline_asm_elementwise(
            ADD,
            "=r,r",
            # What is not counted goes to a place that nobody reads: a predicate would be a branch.
            [tl.where(mask, digits, NUM_DIGITS) * 4 + at],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return counts


@triton.jit
def end_counts(counts, at):
    """int32 [NUM_DIGITS]: what all threads of the program have counted."""
    if not _INTERPRETED:
        tl.debug_barrier()
        counts = tl.inline_asm_elementwise(READ, "=r,r", [_places() + at], dtype=tl.int32, is_pure=False, pack=1)
    return counts
