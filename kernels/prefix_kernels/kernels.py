"""Device functions that kernels share: their start, counts of digits in shared memory, and programs that meet.

*Start.* Hopper's programmatic dependent launch (`launching.launch_behind`) puts a kernel's programs on the GPU before
the kernel before them ends. What that one wrote may only be read after `wait_for_the_kernel_before`, which therefore
stands before the first read or write of that memory (a test looks for it in what is compiled).

*Counts.* `tl.histogram` finds the lanes of each bin by votes: about 20 instructions for each value of a thread. An
add to shared memory takes one, and adds of 1 to one place by several lanes are one add. Triton has no such add, so it
is assembly. What it counts in lies beside Triton's own shared memory, and Triton asks for more than 48 KiB by its own
alone: so what needs little less than that counts by `tl.histogram`, as Triton's interpreter does.

*Meetings.* Programs of one launch wait for each other on a counter in device memory. All of them run at the same time
(a cooperative launch), and one that waits has nothing else to do before: so waiting cannot last.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from prefix_kernels.top_k_selection import NUM_KEYS

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
