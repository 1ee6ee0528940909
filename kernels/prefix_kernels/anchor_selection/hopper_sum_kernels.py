"""The first phase of a selection on Hopper: sums of exponentials of all candidates, or of a sample of them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from prefix_kernels.anchor_selection.hopper_exchange_kernels import sums_of_threads
from prefix_kernels.anchor_selection.hopper_product_kernels import (
    WHOLE,
    WHOLE_BITS,
    barrier,
    load_rows,
    load_words,
    product,
    put_queries,
    right_sides,
)
from prefix_kernels.pooled_scores.kernels import summed_candidate, summed_weight

LOWEST = gl.constexpr(8388608.0)
"""WHOLE and a score that none is as low as."""
LARGEST = gl.constexpr(2.0**100)
"""Sums of exponentials above it might leave fp32 when they are added up."""
# What is summed is the same as in the kernel for all GPUs.
_summed_candidate = gluon.jit(summed_candidate.fn)
_summed_weight = gluon.jit(summed_weight.fn)


@gluon.jit
def _per_thread(scores, sizes: gl.constexpr):
    """[rows of a thread's tiles, warps, halves, 8, BLOCK_M]: axes 0 and 2 lie within a thread."""
    BLOCK_M: gl.constexpr = sizes[1]
    BLOCK_N: gl.constexpr = sizes[2]
    NUM_WARPS: gl.constexpr = sizes[4]
    return gl.reshape(scores, [BLOCK_N // (16 * NUM_WARPS), NUM_WARPS, 2, 8, BLOCK_M])


@gluon.jit
def _before(scores, start, end, sizes: gl.constexpr):
    """Scores of a step, -inf from the end on."""
    BLOCK_N: gl.constexpr = sizes[2]
    n = start + gl.arange(0, BLOCK_N, gl.SliceLayout(1, scores.type.layout))
    return gl.where((n < end)[:, None], scores, float("-inf"))


@gluon.jit
def _whole(words, queries, sizes: gl.constexpr):
    """fp32 [BLOCK_N, BLOCK_M]: WHOLE plus the scores of a step."""
    BLOCK_M: gl.constexpr = sizes[1]
    BLOCK_N: gl.constexpr = sizes[2]
    MMA: gl.constexpr = sizes[7]
    base = gl.full([BLOCK_N, BLOCK_M], WHOLE_BITS, gl.int32, MMA)
    return product(words, queries, base, sizes).to(gl.float32, bitcast=True)


@gluon.jit
def _sums(scores, unit, reference, sizes: gl.constexpr):
    """[warps, 8, BLOCK_M]: a thread's sums of exponentials of one step. Both scores and reference are above WHOLE."""
    own = _per_thread(scores, sizes)
    zeros = gl.full(own.shape, 0.0, gl.float32, own.type.layout)
    weight = gl.exp2(gl.fma(own, zeros + unit, zeros - reference[None, :, None, :, :]))
    return gl.sum(gl.sum(weight, axis=2), axis=0)


@gluon.jit
def _highest(words, queries, start, end, sizes: gl.constexpr):
    """[warps, 8, BLOCK_M]: WHOLE plus the highest of a thread's scores of a step; LOWEST where there is none."""
    scores = _before(_whole(words, queries, sizes), start, end, sizes)
    return gl.maximum(gl.max(gl.max(_per_thread(scores, sizes), axis=2), axis=0), LOWEST)


@gluon.jit
def _sum_steps(words, ahead, packed_ptr, first_row, begin, end, queries, unit, reference, sizes: gl.constexpr):
    """[warps, 8, BLOCK_M]: sums of all steps of a stretch, of which the first two are there."""
    BLOCK_N: gl.constexpr = sizes[2]
    last = first_row + end - 1
    total = reference * 0.0
    whole = begin + (end - begin) // (2 * BLOCK_N) * (2 * BLOCK_N)
    # Two steps a turn, each into the registers that it came from: nothing is moved.
    for start in range(begin, whole, 2 * BLOCK_N):
        scores = _whole(words, queries, sizes)
        words = load_words(packed_ptr, first_row + start + 2 * BLOCK_N, last, sizes)
        total += _sums(scores, unit, reference, sizes)
        scores = _whole(ahead, queries, sizes)
        ahead = load_words(packed_ptr, first_row + start + 3 * BLOCK_N, last, sizes)
        total += _sums(scores, unit, reference, sizes)
    for start in range(whole, end, BLOCK_N):
        total += _sums(_before(_whole(words, queries, sizes), start, end, sizes), unit, reference, sizes)
        words = ahead
    return total


@gluon.jit
def _sum_stretch(words, ahead, packed_ptr, first_row, begin, end, q_smem, unit, sizes: gl.constexpr):
    """([warps, 8, BLOCK_M] exponents to base 2 that sums are relative to, the sums) of a stretch.

    A thread's exponent is the highest score of its first step, not of all steps: then nothing is compared in the loop.
    Where another score is so much higher that a sum might leave fp32, the stretch is read for its highest scores, and
    summed again.
    """
    BLOCK_N: gl.constexpr = sizes[2]
    last = first_row + end - 1
    queries = right_sides(q_smem, sizes)
    peak = _highest(words, queries, begin, end, sizes)
    total = _sum_steps(words, ahead, packed_ptr, first_row, begin, end, queries, unit, peak * unit, sizes)
    if gl.max(gl.max(gl.max(total, axis=0), axis=0), axis=0) > LARGEST:
        for start in range(begin, end, BLOCK_N):
            words = load_words(packed_ptr, first_row + start, last, sizes)
            peak = gl.maximum(peak, _highest(words, queries, start, end, sizes))
        words = load_words(packed_ptr, first_row + begin, last, sizes)
        ahead = load_words(packed_ptr, first_row + begin + BLOCK_N, last, sizes)
        total = _sum_steps(words, ahead, packed_ptr, first_row, begin, end, queries, unit, peak * unit, sizes)
    # Rounded, the reference is not the peak itself: what it is of WHOLE is taken off exactly.
    return gl.fma(gl.full(peak.shape, -WHOLE, gl.float32, peak.type.layout), unit, peak * unit), total


@gluon.jit
def _summed_words(summed, start, sizes: gl.constexpr):
    """A step's codes of the candidates that are summed. Past the end the last one's are read again."""
    BLOCK_N: gl.constexpr = sizes[2]
    LAYOUT: gl.constexpr = sizes[6]
    packed_ptr, first_row, _, end, step = summed
    place = gl.minimum(start + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT)), end - 1)
    return load_rows(packed_ptr, first_row + _summed_candidate(place, step), sizes)


@gluon.jit
def _summed_exponents(words, queries, start, end, step, unit, sizes: gl.constexpr):
    """As `_per_thread` has them, to base 2: of a step of candidates that are summed, with what each stands for."""
    BLOCK_N: gl.constexpr = sizes[2]
    scores = _before(_whole(words, queries, sizes), start, end, sizes)
    place = start + gl.arange(0, BLOCK_N, gl.SliceLayout(1, scores.type.layout))
    return _per_thread((scores - WHOLE) * unit + _summed_weight(place, step)[:, None], sizes)


@gluon.jit
def _sum_sample(words, summed, q_smem, unit, sizes: gl.constexpr):
    """As `_sum_stretch`, of the candidates that are summed, whose first step is there. So few steps may compare."""
    BLOCK_N: gl.constexpr = sizes[2]
    BLOCK_M: gl.constexpr = sizes[1]
    MMA: gl.constexpr = sizes[7]
    _, _, begin, end, step = summed
    queries = right_sides(q_smem, sizes)
    # Nothing yet, as a thread's sums are laid out.
    blank = _per_thread(gl.full([BLOCK_N, BLOCK_M], -1e30, gl.float32, MMA), sizes)
    peak = gl.max(gl.max(blank, axis=2), axis=0)
    total = peak * 0.0
    for start in range(begin, end, BLOCK_N):
        ahead = _summed_words(summed, start + BLOCK_N, sizes)
        scores = _summed_exponents(words, queries, start, end, step, unit, sizes)
        words = ahead
        higher = gl.maximum(peak, gl.max(gl.max(scores, axis=2), axis=0))
        sums = gl.sum(gl.sum(gl.exp2(scores - higher[None, :, None, :, :]), axis=2), axis=0)
        total = total * gl.exp2(peak - higher) + sums
        peak = higher
    return peak, total


@gluon.jit
def _put_sums(peak, total, put, own, tile, num_entries, sizes: gl.constexpr):
    """Write what all threads summed of a tile of rows."""
    BLOCK_M: gl.constexpr = sizes[1]
    peak_ptr, total_ptr, _ = put
    if BLOCK_M >= 32:
        # Each thread of 8 goes on with an eighth of the rows.
        peak, total, m = sums_of_threads(peak, total, sizes)
    else:
        m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(1, peak.type.layout)))
        highest = gl.max(peak, axis=1)
        total = gl.sum(total * gl.exp2(peak - highest[:, None, :]), axis=1)
        peak = highest
    highest = gl.max(peak, axis=0)
    # Where there is nothing, `total` is 0.
    mass = gl.sum(total * gl.exp2(peak - gl.expand_dims(highest, 0)), axis=0)
    m += tile * BLOCK_M
    gl.store(peak_ptr + own + m, highest, mask=m < num_entries)
    gl.store(total_ptr + own + m, mass, mask=m < num_entries)
    # The next tile's queries take the place of these.
    barrier()


@gluon.jit
def sum_sample_item(summed, query, put, own, factor, sizes: gl.constexpr):
    """The first phase of an item where not all candidates are summed. Returns the unit of the last tile's scores."""
    GQA: gl.constexpr = sizes[0]
    BLOCK_M: gl.constexpr = sizes[1]
    q_smem, _, _, _, _, of_group, _ = query
    _, _, begin, _, _ = summed
    _, num_rows, _ = of_group
    unit = factor
    for tile in range(gl.cdiv(num_rows * GQA, BLOCK_M)):
        words = _summed_words(summed, begin, sizes)
        unit = put_queries(query, tile, factor, sizes)
        peak, total = _sum_sample(words, summed, q_smem, unit, sizes)
        _put_sums(peak, total, put, own, tile, num_rows * GQA, sizes)
    return unit


@gluon.jit
def sum_item(codes, query, put, own, factor, sizes: gl.constexpr):
    """The first phase of an item: write the sums of its stretch for all rows of the group. Returns the unit of the last
    tile's scores."""
    GQA: gl.constexpr = sizes[0]
    BLOCK_M: gl.constexpr = sizes[1]
    BLOCK_N: gl.constexpr = sizes[2]
    packed_ptr, first_row, begin, end = codes
    q_smem, _, _, _, _, of_group, _ = query
    _, num_rows, _ = of_group
    last = first_row + end - 1
    unit = factor
    for tile in range(gl.cdiv(num_rows * GQA, BLOCK_M)):
        # The first codes are asked for before the queries.
        words = load_words(packed_ptr, first_row + begin, last, sizes)
        ahead = load_words(packed_ptr, first_row + begin + BLOCK_N, last, sizes)
        unit = put_queries(query, tile, factor, sizes)
        peak, total = _sum_stretch(words, ahead, packed_ptr, first_row, begin, end, q_smem, unit, sizes)
        _put_sums(peak, total, put, own, tile, num_rows * GQA, sizes)
    return unit
