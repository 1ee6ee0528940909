"""Programs of one launch that wait for each other, on a counter in device memory.

All programs of the launch run at the same time (a cooperative launch), and one that waits has nothing else to do
before: so waiting cannot last. A counter only grows, by as much at each meeting, so no one has to set it back.
"""

from __future__ import annotations

import triton
import triton.language as tl

ARRIVALS = tl.constexpr(2**20)
"""What a counter grows by when all have arrived, however many they are."""
_SEEN = tl.constexpr("ld.acquire.gpu.global.b64 $0, [$1];")


@triton.jit
def meetings_before(arrived_ptr):
    """How many meetings there have been. Asked before a program arrives itself: without it the next one is none."""
    return tl.load(arrived_ptr, cache_modifier=".cg") // ARRIVALS


@triton.jit
def meet(arrived_ptr, meeting, place, num_programs):
    """Wait until all programs of a meeting are here, and what they wrote can be read.

    Nobody reads what its own arrival makes of the counter: it is added, and then each thread looks for itself, without
    a word to the others.

    Args:
        arrived_ptr: int64, at first 0; the meeting's own.
        meeting: its number on this counter, from 1.
        place: of this program among all, from 0.
        num_programs: that meet. Nobody waits for one program.
    """
    # All threads' writes come before the arrival, which one thread tells; and before what this program reads itself.
    tl.debug_barrier()
    if num_programs > 1:
        # The first program adds what the others leave.
        own = tl.where(place == 0, ARRIVALS + 1 - num_programs, 1).to(tl.int64)
        tl.atomic_add(arrived_ptr, own, sem="release", scope="gpu")
        seen = tl.inline_asm_elementwise(_SEEN, "=l,l", [arrived_ptr], dtype=tl.int64, is_pure=False, pack=1)
        while seen < meeting * ARRIVALS:
            seen = tl.inline_asm_elementwise(_SEEN, "=l,l", [arrived_ptr], dtype=tl.int64, is_pure=False, pack=1)
        tl.debug_barrier()
