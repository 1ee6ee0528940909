"""Programs of one launch that wait for each other, on a counter in device memory.

All programs of the launch run at the same time (a cooperative launch), and one that waits has nothing else to do
before: so waiting cannot last.
"""

from __future__ import annotations

import triton
import triton.language as tl

ARRIVALS = tl.constexpr(2**20)
"""What a counter grows by when all have arrived, however many they are."""


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
