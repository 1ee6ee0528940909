"""Products of codes of 4 bits with queries on Hopper, and the sums of their exponentials: a selection's first phase.

In Gluon, since what Triton makes of products moves every code through shared memory, between two barriers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper

from prefix_kernels.anchor_selection.sm90_codes_kernels import (
    STEPS_AHEAD,
    ask,
    ask_first,
    ask_rows,
    asked,
    next_slot,
    rows_at,
    step_of,
    take,
)
from prefix_kernels.anchor_selection.sm90_exchange_kernels import barrier, sums_of_threads
from prefix_kernels.pooled_scores.kernels import summed_candidate, summed_weight

FEW_ROWS = gl.constexpr(32)
"""Up to so many query rows a warp multiplies on its own, with the queries in its registers: a warp group's
instructions take nearly as long for 8 columns as for 64."""
LEAST_ROWS = gl.constexpr(8)
"""Columns of the least product: query rows of a request alone, as a rule."""
WHOLE = gl.constexpr(12582912.0)
"""1.5 * 2^23: an fp32 number of this size counts whole ones in its last bits. WHOLE plus a whole number, and the sum of
WHOLE's bits and of the number as integers, are the same bits: neither way a conversion."""
WHOLE_BITS = gl.constexpr(0x4B400000)
LEAST_UNIT = gl.constexpr(2.0**-24)
"""Of exponents to base 2. Even in it any sum's logarithm (below 2^6) is less than 2^30 units."""
LOWEST = gl.constexpr(8388608.0)
"""WHOLE and a score that none is as low as."""
LARGEST = gl.constexpr(2.0**100)
"""Sums of exponentials above it might leave fp32 when they are added up."""
# What is summed is the same as in the kernel for all GPUs.
_summed_candidate = gluon.jit(summed_candidate.fn)
_summed_weight = gluon.jit(summed_weight.fn)


@gluon.jit
def _piece_of_queries(base, live, of_piece, channels_ptr, scale_ptr, PIECE: gl.constexpr, sizes: gl.constexpr):
    """fp32 [BLOCK_M, 32]: a piece of the queries, times the channels' steps.

    What fp16 could not hold, or is no number, is 0, lest one broken query take away all others' precision.
    """
    LISTED: gl.constexpr = sizes[5]
    PIECES: gl.constexpr = sizes[3]
    column = (of_piece // 8 * PIECES + PIECE) * 8 + of_piece % 8
    channel = gl.load(channels_ptr + column).to(gl.int32) if LISTED else column
    step = gl.load(scale_ptr + column)
    q = gl.load(base[:, None] + channel[None, :], mask=live[:, None], other=0.0).to(gl.float32)
    q *= step[None, :]
    return gl.where(gl.maximum(q, -q) <= 65504.0, q, 0.0)


@gluon.jit
def _in_units(q, units):
    """int8, rounded: WHOLE plus it has it in its last bits."""
    zeros = gl.full(q.shape, 0.0, gl.float32, q.type.layout)
    return gl.fma(q, zeros + units, zeros + WHOLE).to(gl.int32, bitcast=True).to(gl.int8)


@gluon.jit
def put_queries(query, tile, factor, sizes: gl.constexpr):
    """Put a tile of the group's queries in shared memory, times the channels' steps, as INT8 in the order of the codes.

    All of a tile are in the same unit: scores of its rows can be compared as the integers that they are. `_codes` says
    which channel has which place.

    Returns:
        What a score's unit is in an exponent to base 2: the queries' unit times `factor`.
    """
    GQA: gl.constexpr = sizes[0]
    BLOCK_M: gl.constexpr = sizes[1]
    PIECES: gl.constexpr = sizes[3]
    NUM_WARPS: gl.constexpr = sizes[4]
    q_smem, q_ptr, rows_ptr, channels_ptr, scale_ptr, of_group, strides = query
    row_begin, num_rows, head = of_group
    q_stride_row, q_stride_head = strides
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [NUM_WARPS, 1], [1, 0])
    m = tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    k = gl.arange(0, 32, gl.SliceLayout(0, layout))
    of_piece = k % 16 // 4 * 8 + k % 4 * 2 + k // 16
    live = m < num_rows * GQA
    row = gl.load(rows_ptr + row_begin + m // GQA, mask=live, other=0).to(gl.int64)
    base = q_ptr + row * q_stride_row + (head * GQA + m % GQA) * q_stride_head
    # All pieces are loaded before any is stored: between stores there are barriers.
    q0 = _piece_of_queries(base, live, of_piece, channels_ptr, scale_ptr, 0, sizes)
    largest = gl.maximum(q0, -q0)
    q1, q2, q3 = q0, q0, q0
    if PIECES > 1:
        q1 = _piece_of_queries(base, live, of_piece, channels_ptr, scale_ptr, 1, sizes)
        largest = gl.maximum(largest, gl.maximum(q1, -q1))
    if PIECES > 2:
        q2 = _piece_of_queries(base, live, of_piece, channels_ptr, scale_ptr, 2, sizes)
        largest = gl.maximum(largest, gl.maximum(q2, -q2))
    if PIECES > 3:
        q3 = _piece_of_queries(base, live, of_piece, channels_ptr, scale_ptr, 3, sizes)
        largest = gl.maximum(largest, gl.maximum(q3, -q3))
    unit = gl.maximum(gl.max(gl.max(largest, axis=0), axis=0) * (1.0 / 127), LEAST_UNIT / factor)
    units = gl.div_rn(1.0, unit)  # as everybody divides: an oracle rounds the same way
    q_smem.index(0).store(_in_units(q0, units))
    if PIECES > 1:
        q_smem.index(1).store(_in_units(q1, units))
    if PIECES > 2:
        q_smem.index(2).store(_in_units(q2, units))
    if PIECES > 3:
        q_smem.index(3).store(_in_units(q3, units))
    hopper.fence_async_shared()
    barrier()
    return unit * factor


@gluon.jit
def _codes(words, mma: gl.constexpr):
    """The codes of a piece as the left side of a product: INT8, nothing moves between threads.

    Of word t the codes 2 * j are places 4 * t + j, the codes 2 * j + 1 are 16 places further: one mask makes four of
    them. A thread of the matrix instructions has just these places, in two registers.
    """
    twice = gl.join(words, words)
    # One register four times, for as many codes at once: [rows, t, j // 2, j % 2].
    even, odd = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 upper;
        shr.b32 upper, $2, 4;
        and.b32 $0, $2, 0x0F0F0F0F;
        and.b32 $1, upper, 0x0F0F0F0F;
        }
        """,
        "=r,=r,r,r,r,r",
        [gl.join(twice, twice)],
        dtype=(gl.int8,) * 2,
        is_pure=True,
        pack=4,
    )
    both = gl.permute(gl.join(even, odd), (0, 4, 1, 2, 3))
    return gl.convert_layout(gl.reshape(both, [words.shape[0], 32]), gl.DotOperandLayout(0, mma, 4))


@gluon.jit
def right_sides(q_smem, sizes: gl.constexpr):
    """The queries of each piece as the right side of a product: few of them in registers, more where they are."""
    BLOCK_M: gl.constexpr = sizes[1]
    PIECES: gl.constexpr = sizes[3]
    MMA: gl.constexpr = sizes[7]
    right: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    q0, q1, q2, q3 = q_smem, q_smem, q_smem, q_smem
    if BLOCK_M <= FEW_ROWS:
        q0 = q_smem.index(0).permute((1, 0)).load(right)
        q1, q2, q3 = q0, q0, q0
        if PIECES > 1:
            q1 = q_smem.index(1).permute((1, 0)).load(right)
        if PIECES > 2:
            q2 = q_smem.index(2).permute((1, 0)).load(right)
        if PIECES > 3:
            q3 = q_smem.index(3).permute((1, 0)).load(right)
    return q0, q1, q2, q3


@gluon.jit
def _add_product(acc, words, queries, PIECE: gl.constexpr, sizes: gl.constexpr):
    """`acc` plus the product of one piece; of a warp group's instructions the result is not there yet."""
    BLOCK_M: gl.constexpr = sizes[1]
    MMA: gl.constexpr = sizes[7]
    codes = _codes(words, MMA)
    if BLOCK_M <= FEW_ROWS:
        acc = ampere.mma_v2(codes, queries, acc)
    else:
        right = queries.index(PIECE).permute((1, 0))
        acc = hopper.warpgroup_mma(codes, right, acc, use_acc=PIECE > 0, is_async=True)
    return acc


@gluon.jit
def product(words, queries, base, sizes: gl.constexpr):
    """int32 [BLOCK_N, BLOCK_M]: `base` plus the scores of a step, in the unit that `put_queries` tells.

    A score is less than 2^18.
    """
    BLOCK_M: gl.constexpr = sizes[1]
    BLOCK_N: gl.constexpr = sizes[2]
    PIECES: gl.constexpr = sizes[3]
    MMA: gl.constexpr = sizes[7]
    w0, w1, w2, w3 = words
    q0, q1, q2, q3 = queries
    acc = base
    if BLOCK_M > FEW_ROWS:
        acc = gl.zeros([BLOCK_N, BLOCK_M], gl.int32, MMA)
    acc = _add_product(acc, w0, q0, 0, sizes)
    if PIECES > 1:
        acc = _add_product(acc, w1, q1, 1, sizes)
    if PIECES > 2:
        acc = _add_product(acc, w2, q2, 2, sizes)
    if PIECES > 3:
        acc = _add_product(acc, w3, q3, 3, sizes)
    if BLOCK_M > FEW_ROWS:
        acc = hopper.warpgroup_mma_wait(0, deps=[acc]) + base
    return acc


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
def _ask_first_summed(codes, sizes: gl.constexpr):
    """`ask_first` for sums, which read a stretch's first step even if there is none."""
    _, _, _, begin, end, _, _ = codes
    return ask_first(codes, gl.maximum(end, begin + 1), sizes)


@gluon.jit
def _sum_steps(entries, codes, queries, unit, reference, sizes: gl.constexpr):
    """[warps, 8, BLOCK_M]: sums of all steps of a stretch, whose first ones were asked for."""
    BLOCK_N: gl.constexpr = sizes[2]
    _, _, _, begin, end, at, _ = codes
    total = reference * 0.0
    this, other = entries
    slot = gl.to_tensor(0)
    for start in range(begin, end, BLOCK_N):
        scores = _before(_whole(take(at, slot, sizes), queries, sizes), start, end, sizes)
        total += _sums(scores, unit, reference, sizes)
        ask(codes, this, start + STEPS_AHEAD * BLOCK_N, end, slot, sizes)
        this, other = other, step_of(codes, start + (STEPS_AHEAD + 2) * BLOCK_N, sizes)
        slot = next_slot(slot, sizes)
    return total


@gluon.jit
def _sum_stretch(entries, codes, q_smem, unit, sizes: gl.constexpr):
    """([warps, 8, BLOCK_M] exponents to base 2 that sums are relative to, the sums) of a stretch, whose first steps
    were asked for.

    A thread's exponent is the highest score of its first step, not of all steps: then nothing is compared in the loop.
    Where another score is so much higher that a sum might leave fp32, the stretch is read for its highest scores, and
    summed again.
    """
    BLOCK_N: gl.constexpr = sizes[2]
    _, _, _, begin, end, at, _ = codes
    queries = right_sides(q_smem, sizes)
    slot = gl.to_tensor(0)
    peak = _highest(take(at, slot, sizes), queries, begin, end, sizes)
    total = _sum_steps(entries, codes, queries, unit, peak * unit, sizes)
    if gl.max(gl.max(gl.max(total, axis=0), axis=0), axis=0) > LARGEST:
        this, other = _ask_first_summed(codes, sizes)
        for start in range(begin, end, BLOCK_N):
            peak = gl.maximum(peak, _highest(take(at, slot, sizes), queries, start, end, sizes))
            ask(codes, this, start + STEPS_AHEAD * BLOCK_N, end, slot, sizes)
            this, other = other, step_of(codes, start + (STEPS_AHEAD + 2) * BLOCK_N, sizes)
            slot = next_slot(slot, sizes)
        total = _sum_steps(_ask_first_summed(codes, sizes), codes, queries, unit, peak * unit, sizes)
    # Rounded, the reference is not the peak itself: what it is of WHOLE is taken off exactly.
    return gl.fma(gl.full(peak.shape, -WHOLE, gl.float32, peak.type.layout), unit, peak * unit), total


@gluon.jit
def _ask_summed(summed, start, slot, sizes: gl.constexpr):
    """`ask` for a step of the candidates that are summed."""
    BLOCK_N: gl.constexpr = sizes[2]
    LAYOUT: gl.constexpr = sizes[6]
    codes, _, end, step = summed
    packed_ptr, _, _, _, _, at, _ = codes
    if start < end:
        place = gl.minimum(start + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT)), end - 1)
        ask_rows(packed_ptr, rows_at(codes, _summed_candidate(place, step), sizes), at + slot, False, sizes)
    asked()


@gluon.jit
def _summed_exponents(words, queries, start, end, step, unit, sizes: gl.constexpr):
    """As `_per_thread` has them, to base 2: of a step of candidates that are summed, with what each stands for."""
    BLOCK_N: gl.constexpr = sizes[2]
    scores = _before(_whole(words, queries, sizes), start, end, sizes)
    place = start + gl.arange(0, BLOCK_N, gl.SliceLayout(1, scores.type.layout))
    return _per_thread((scores - WHOLE) * unit + _summed_weight(place, step)[:, None], sizes)


@gluon.jit
def _sum_sample(summed, q_smem, unit, sizes: gl.constexpr):
    """As `_sum_stretch`, of the candidates that are summed, whose first steps were asked for. These few may compare."""
    BLOCK_N: gl.constexpr = sizes[2]
    BLOCK_M: gl.constexpr = sizes[1]
    MMA: gl.constexpr = sizes[7]
    codes, begin, end, step = summed
    _, _, _, _, _, at, _ = codes
    queries = right_sides(q_smem, sizes)
    slot = gl.to_tensor(0)
    # Nothing yet, as a thread's sums are laid out.
    blank = _per_thread(gl.full([BLOCK_N, BLOCK_M], -1e30, gl.float32, MMA), sizes)
    peak = gl.max(gl.max(blank, axis=2), axis=0)
    total = peak * 0.0
    for start in range(begin, end, BLOCK_N):
        scores = _summed_exponents(take(at, slot, sizes), queries, start, end, step, unit, sizes)
        _ask_summed(summed, start + STEPS_AHEAD * BLOCK_N, slot, sizes)
        slot = next_slot(slot, sizes)
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
    BLOCK_N: gl.constexpr = sizes[2]
    q_smem, _, _, _, _, of_group, _ = query
    _, begin, _, _ = summed
    _, num_rows, _ = of_group
    unit = factor
    for tile in range(gl.cdiv(num_rows * GQA, BLOCK_M)):
        # The first codes are asked for before the queries.
        slot = gl.to_tensor(0)
        for start in range(begin, begin + STEPS_AHEAD * BLOCK_N, BLOCK_N):
            _ask_summed(summed, start, slot, sizes)
            slot = next_slot(slot, sizes)
        unit = put_queries(query, tile, factor, sizes)
        peak, total = _sum_sample(summed, q_smem, unit, sizes)
        _put_sums(peak, total, put, own, tile, num_rows * GQA, sizes)
    return unit


@gluon.jit
def sum_item(codes, query, put, own, factor, sizes: gl.constexpr):
    """The first phase of an item: write the sums of its stretch for all rows of the group. Returns the unit of the last
    tile's scores."""
    GQA: gl.constexpr = sizes[0]
    BLOCK_M: gl.constexpr = sizes[1]
    q_smem, _, _, _, _, of_group, _ = query
    _, num_rows, _ = of_group
    unit = factor
    for tile in range(gl.cdiv(num_rows * GQA, BLOCK_M)):
        entries = _ask_first_summed(codes, sizes)
        unit = put_queries(query, tile, factor, sizes)
        peak, total = _sum_stretch(entries, codes, q_smem, unit, sizes)
        _put_sums(peak, total, put, own, tile, num_rows * GQA, sizes)
    return unit
