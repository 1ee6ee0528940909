"""What the threads of a warp have of the same rows or columns, brought together in fewer shuffles.

Where 4 or 8 threads each have a value for each of several results, a sum over threads by itself moves every value
several times and leaves each result with all of them. Here a thread gives half of what it has for the other half, and
goes on with that: in the end each thread has results of its own. Tensors then hold, at the place of a thread, what that
thread has; which of the results it is, follows from the place.

And keys counted in shared memory, as `kernels.begin_counts` and the next ones do it, with layouts written out.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from prefix_kernels.kernels import ADD, COUNTS, NUM_BINS, READ, RESET

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Renamed after Triton 3.6."""


def _exchange(lanes: int) -> gl.constexpr:
    """Keep one of two, and give the other to the thread so many lanes further, for the same of its."""
    return gl.constexpr(
        "{ .reg .pred second; .reg .b32 give; setp.ne.s32 second, $4, 0; selp.b32 $0, $3, $2, second; "
        f"selp.b32 give, $2, $3, second; shfl.sync.bfly.b32 $1, give, {lanes}, 31, -1; }}"
    )


_EXCHANGE_1 = _exchange(1)
_EXCHANGE_2 = _exchange(2)
_EXCHANGE_4 = _exchange(4)
_EXCHANGE_8 = _exchange(8)
_EXCHANGE_16 = _exchange(16)


@gluon.jit
def _kept_and_given(first, second, side, EXCHANGE: gl.constexpr):
    """Of thread and partner: `first` where `side` is 0, `second` where it is 1."""
    return gl.inline_asm_elementwise(
        EXCHANGE, "=&r,=&r,r,r,r", [first, second, side], dtype=(first.dtype, first.dtype), is_pure=False, pack=1
    )


@gluon.jit
def highest_of_columns(scores, sizes: gl.constexpr):
    """[steps of 16 * warps rows, warps, 8, 4, 2]: over a thread's columns, of its rows; axis 3 are the 4 threads that
    share rows, axis 4 are the halves of 16 rows."""
    BLOCK_M: gl.constexpr = sizes[1]
    BLOCK_N: gl.constexpr = sizes[2]
    NUM_WARPS: gl.constexpr = sizes[4]
    own = gl.reshape(scores, [BLOCK_N // (16 * NUM_WARPS), NUM_WARPS, 2, 8, BLOCK_M // 8, 4, 2])
    return gl.permute(gl.max(gl.max(own, axis=4), axis=5), (0, 1, 3, 4, 2))


@gluon.jit
def highest_of_two_steps(scores, more, sizes: gl.constexpr):
    """(int32 [rows / 16 / warps, warps, 8, 4], each of another thread; the places of their rows in the two steps): the
    highest scores over all columns, of what `highest_of_columns` tells of a step and of the one after it."""
    BLOCK_N: gl.constexpr = sizes[2]
    NUM_WARPS: gl.constexpr = sizes[4]
    whole: gl.constexpr = scores.type.layout
    of_thread: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, whole))))
    thread = gl.arange(0, 4, of_thread)[None, None, None, :, None]
    kept, given = _kept_and_given(scores, more, gl.full(scores.shape, 0, gl.int32, whole) + thread // 2, _EXCHANGE_2)
    first, second = gl.split(gl.maximum(kept, given))
    out: gl.constexpr = first.type.layout
    thread = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, out))))[None, None, None, :]
    kept, given = _kept_and_given(first, second, gl.full(first.shape, 0, gl.int32, out) + thread % 2, _EXCHANGE_1)
    tile = gl.arange(0, first.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, out))))
    warp = gl.arange(0, NUM_WARPS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, out))))
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, out))))
    place = tile[:, None, None, None] * (16 * NUM_WARPS) + warp[None, :, None, None] * 16 + row[None, None, :, None]
    return gl.maximum(kept, given), place + thread % 2 * 8 + thread // 2 * BLOCK_N


@gluon.jit
def _merged(peak, total, thread, place: gl.constexpr, EXCHANGE: gl.constexpr):
    """Sums [..., 2] of thread and partner: each of the two goes on with one place of the last axis."""
    first, second = gl.split(peak)
    side = gl.full(first.shape, 0, gl.int32, first.type.layout) + ((thread >> place) & 1)
    peak, other = _kept_and_given(first, second, side, EXCHANGE)
    first, second = gl.split(total)
    total, more = _kept_and_given(first, second, side, EXCHANGE)
    highest = gl.maximum(peak, other)
    return highest, total * gl.exp2(peak - highest) + more * gl.exp2(other - highest)


@gluon.jit
def _pairs_last(x):
    """[a, b, c, d] -> [a, b, c / 2, d, 2]."""
    return gl.permute(gl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2, x.shape[3]]), (0, 1, 2, 4, 3))


@gluon.jit
def _threads_of_rows(like):
    """The numbers of axis 1, for a tensor of 4 axes."""
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, like.type.layout)))
    return gl.arange(0, like.shape[1], layout)[None, :, None, None]


@gluon.jit
def sums_of_threads(peak, total, sizes: gl.constexpr):
    """Sums of exponentials over the 8 threads of a warp that have the same rows, each going on with an eighth of them.

    Args:
        peak: [warps, 8, BLOCK_M] exponents to base 2 that sums are relative to.
        total: the sums, as they lie.
        sizes: of the kernel; BLOCK_M at least 32.

    Returns:
        ([warps, 8, BLOCK_M / 32, 4] exponents, sums, and [8, BLOCK_M / 32, 4] the rows that they are of).
    """
    BLOCK_M: gl.constexpr = sizes[1]
    NUM_WARPS: gl.constexpr = sizes[4]
    peak = gl.reshape(peak, [NUM_WARPS, 8, BLOCK_M // 8, 4, 2])
    total = gl.reshape(total, [NUM_WARPS, 8, BLOCK_M // 8, 4, 2])
    like, _ = gl.split(peak)
    peak, total = _merged(peak, total, _threads_of_rows(like), 0, _EXCHANGE_4)
    peak, total = _pairs_last(peak), _pairs_last(total)
    like, _ = gl.split(peak)
    peak, total = _merged(peak, total, _threads_of_rows(like), 1, _EXCHANGE_8)
    peak, total = _pairs_last(peak), _pairs_last(total)
    like, _ = gl.split(peak)
    peak, total = _merged(peak, total, _threads_of_rows(like), 2, _EXCHANGE_16)
    out: gl.constexpr = gl.SliceLayout(0, peak.type.layout)
    thread = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, out)))[:, None, None]
    eight = gl.arange(0, BLOCK_M // 32, gl.SliceLayout(0, gl.SliceLayout(2, out)))[None, :, None] * 4
    eight += (thread >> 2) * 2 + ((thread >> 1) & 1)
    pair = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, out)))[None, None, :]
    return peak, total, eight * 8 + pair * 2 + (thread & 1)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def bins(AT_ONCE: gl.constexpr, NUM_WARPS: gl.constexpr):
    """[NUM_BINS] the numbers of all bins; so many that follow each other to a thread."""
    return gl.arange(0, NUM_BINS, gl.BlockedLayout([AT_ONCE], [32], [NUM_WARPS], [0]))


@gluon.jit
def counts_address():
    """Where a program counts keys. Each place in the source that asks has one of its own."""
    return gl.inline_asm_elementwise(COUNTS, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def begin_counts(at, NUM_WARPS: gl.constexpr):
    """Count from 0 on."""
    # Threads that still read what was counted here before.
    barrier()
    places = bins(1, NUM_WARPS) * 4 + at
    gl.inline_asm_elementwise(RESET, "=r,r", [places], dtype=gl.int32, is_pure=False, pack=1)
    barrier()


@gluon.jit
def add_counts(at, bin_, mask):
    """Count bins where `mask` is set. Each thread counts what it holds, copies, too."""
    gl.inline_asm_elementwise(ADD, "=r,r,r", [bin_ * 4 + at, mask.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def end_counts(at, NUM_WARPS: gl.constexpr):
    """int32 [NUM_BINS], as `bins(1)`: how many are in bin i or a lower one."""
    barrier()
    counts = gl.inline_asm_elementwise(
        READ, "=r,r", [bins(4, NUM_WARPS) * 4 + at], dtype=gl.int32, is_pure=False, pack=1
    )
    summed = gl.associative_scan(counts, 0, _add)
    return gl.convert_layout(summed, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
