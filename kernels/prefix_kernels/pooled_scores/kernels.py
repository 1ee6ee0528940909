"""Pooled scores in Triton: how much of its group's attention a token has, in two passes over an index of its key.

The first pass sums every row's exponentials over a stretch of candidates. The second one computes the scores again,
turns them into log-probabilities and pools them over the rows: a product is cheaper than a write and a read of scores
for every row. Candidates are tokens or blocks of them (`types.CandidateForm`). Products have candidates as rows and
queries as columns, so that codes of few bits are unpacked in registers and go into the tensor cores from there.

A sum over channels that is the same for all candidates of a row (the zero points of quantized channels) leaves the
softmax as it is, and is left out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefix_kernels import pooling
from prefix_kernels.types import CandidateForm

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FIRST_SUMMED = tl.constexpr(pooling.FIRST_SUMMED)
LEAST_SUMMED = tl.constexpr(pooling.LEAST_SUMMED)
GOLDEN = tl.constexpr(pooling.GOLDEN)
HEADROOM = tl.constexpr(pooling.HEADROOM)
TOKEN = tl.constexpr(CandidateForm.TOKEN.value)
LISTED = tl.constexpr(CandidateForm.LISTED.value)
MEAN = tl.constexpr(CandidateForm.MEAN.value)
MINMAX = tl.constexpr(CandidateForm.MINMAX.value)
BALL = tl.constexpr(CandidateForm.BALL.value)


@triton.jit
def _queries(
    q_ptr, rows_ptr, channels_ptr, scale_ptr, row_begin, num_rows, head, tile, q_stride_row, q_stride_head,
    PART: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, GQA: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, LISTED: tl.constexpr, COMPUTE: tl.constexpr, SIGN: tl.constexpr,
    TAIL: tl.constexpr = 0,
):  # fmt: skip
    """[BLOCK_K, BLOCK_M]: every PARTS-th channel of the group's queries, times the channel's step.

    SIGN 1, -1: what is positive, or negative, of them; 0: all.
    """
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    live = m < num_rows * GQA
    # A tail has its units twice, see `_product`.
    column = (TAIL + k % (BLOCK_K // 2)) * PARTS + PART + 2 * (k // (BLOCK_K // 2)) if TAIL else k * PARTS + PART
    used = column < CHANNELS
    row = tl.load(rows_ptr + row_begin + m // GQA, mask=live, other=0).to(tl.int64)
    channel = tl.load(channels_ptr + column, mask=used, other=0).to(tl.int32) if LISTED else column
    q_ptrs = q_ptr + (row * q_stride_row + (head * GQA + m % GQA) * q_stride_head)[None, :] + channel[:, None]
    q = tl.load(q_ptrs, mask=used[:, None] & live[None, :], other=0.0)
    q = q.to(tl.float32)
    if SIGN == 1:
        q = tl.maximum(q, 0.0)
    elif SIGN == -1:
        q = tl.minimum(q, 0.0)
    if BITS < 16:
        q = q * tl.load(scale_ptr + column, mask=used, other=0.0)[:, None]
        # A part's codes come at their place in a byte.
        q = q * (2.0 ** (-(BITS * PART % 8)))
    if COMPUTE == tl.float16:
        q = tl.minimum(tl.maximum(q, -65504.0), 65504.0)
    return q.to(COMPUTE)


@triton.jit
def _query_parts(
    q_ptr, rows_ptr, channels_ptr, scale_ptr, row_begin, num_rows, head, tile, q_stride_row, q_stride_head,
    PARTS: tl.constexpr, BITS: tl.constexpr, GQA: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr, LISTED: tl.constexpr, COMPUTE: tl.constexpr, TAIL: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """The parts of the queries that the codes of a unit (a word of four, or a byte) are multiplied with: 1, 4, or 6.

    With TAIL two more are for the units from that one on, see `_product`. SIGN: see `_queries`.
    """
    q0 = _queries(
        q_ptr, rows_ptr, channels_ptr, scale_ptr, row_begin, num_rows, head, tile, q_stride_row, q_stride_head,
        0, PARTS, BITS, GQA, CHANNELS, BLOCK_K, BLOCK_M, LISTED, COMPUTE, SIGN,
    )  # fmt: skip
    q1, q2, q3, t0, t1 = q0, q0, q0, q0, q0
    if PARTS == 4:
        q1 = _queries(
            q_ptr, rows_ptr, channels_ptr, scale_ptr, row_begin, num_rows, head, tile, q_stride_row, q_stride_head,
            1, PARTS, BITS, GQA, CHANNELS, BLOCK_K, BLOCK_M, LISTED, COMPUTE, SIGN,
        )  # fmt: skip
        q2 = _queries(
            q_ptr, rows_ptr, channels_ptr, scale_ptr, row_begin, num_rows, head, tile, q_stride_row, q_stride_head,
            2, PARTS, BITS, GQA, CHANNELS, BLOCK_K, BLOCK_M, LISTED, COMPUTE, SIGN,
        )  # fmt: skip
        q3 = _queries(
            q_ptr, rows_ptr, channels_ptr, scale_ptr, row_begin, num_rows, head, tile, q_stride_row, q_stride_head,
            3, PARTS, BITS, GQA, CHANNELS, BLOCK_K, BLOCK_M, LISTED, COMPUTE, SIGN,
        )  # fmt: skip
    if TAIL:
        t0 = _queries(
            q_ptr, rows_ptr, channels_ptr, scale_ptr, row_begin, num_rows, head, tile, q_stride_row, q_stride_head,
            0, PARTS, BITS, GQA, CHANNELS, 16, BLOCK_M, LISTED, COMPUTE, SIGN, TAIL,
        )  # fmt: skip
        t1 = _queries(
            q_ptr, rows_ptr, channels_ptr, scale_ptr, row_begin, num_rows, head, tile, q_stride_row, q_stride_head,
            1, PARTS, BITS, GQA, CHANNELS, 16, BLOCK_M, LISTED, COMPUTE, SIGN, TAIL,
        )  # fmt: skip
    return q0, q1, q2, q3, t0, t1


@triton.jit
def _query_norms(
    q_ptr, rows_ptr, channels_ptr, row_begin, num_rows, head, tile, q_stride_row, q_stride_head, GQA: tl.constexpr,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M] fp32: lengths of the queries on the kept channels."""
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, WIDTH)
    live = m < num_rows * GQA
    row = tl.load(rows_ptr + row_begin + m // GQA, mask=live, other=0).to(tl.int64)
    channel = tl.load(channels_ptr + k, mask=k < CHANNELS, other=0).to(tl.int32) if LISTED else k
    q_ptrs = q_ptr + (row * q_stride_row + (head * GQA + m % GQA) * q_stride_head)[None, :] + channel[:, None]
    q = tl.load(q_ptrs, mask=(k < CHANNELS)[:, None] & live[None, :], other=0.0).to(tl.float32)
    return tl.sqrt(tl.sum(q * q, axis=0))


@triton.jit
def _codes(packed, PART: tl.constexpr, BITS: tl.constexpr, COMPUTE: tl.constexpr):
    """Codes of a part of each byte, at their place in it: code * 2^(PART * BITS), times 2^-24 in fp16.

    The bits of a code are a subnormal half as they stand, which tensor cores multiply as any other: nothing is
    converted.
    """
    code = packed & (((1 << BITS) - 1) << (PART * BITS))
    if COMPUTE == tl.float16:
        return code.to(tl.uint16).to(tl.float16, bitcast=True)
    return code.to(COMPUTE)


@triton.jit
def _nibbles(words, COMPUTE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The four 4-bit codes of each word, as `_codes`: parts 0 and 2 as they are, 1 and 3 times 16.

    As assembly, since a register holds two words and 5 instructions then do for 8 codes.
    """
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 upper;
            shr.b32 upper, $4, 8;
            and.b32 $0, $4, 0x000F000F;
            and.b32 $1, $4, 0x00F000F0;
            and.b32 $2, upper, 0x000F000F;
            and.b32 $3, upper, 0x00F000F0;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    words = words.to(tl.uint16, bitcast=True)
    return (
        _codes(words, 0, 4, COMPUTE),
        _codes(words, 1, 4, COMPUTE),
        _codes(words >> 8, 0, 4, COMPUTE),
        _codes(words >> 8, 1, 4, COMPUTE),
    )


@triton.jit
def _product(
    scores, packed_ptr, place, queries, ROW_UNITS: tl.constexpr, BLOCK_K: tl.constexpr, BITS: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """scores [BLOCK_N, BLOCK_M] plus the product of the rows of codes at `place` with the queries' parts.

    With TAIL (words of 4-bit codes) a row has half a block of units more, from that unit on. Two parts of them fill a
    block together: what is multiplied is channels, and not the padding of a block that is twice as wide.
    """
    q0, q1, q2, q3, t0, t1 = queries
    k = tl.arange(0, BLOCK_K)
    ptrs = packed_ptr + place[:, None] * ROW_UNITS + k[None, :]
    packed = tl.load(ptrs) if ROW_UNITS >= BLOCK_K else tl.load(ptrs, mask=k[None, :] < ROW_UNITS, other=0)
    if BITS == 4:
        c0, c1, c2, c3 = _nibbles(packed, COMPUTE, ASSEMBLY)
    elif BITS == 16:
        c0 = packed.to(COMPUTE)
    else:
        c0 = _codes(packed, 0, BITS, COMPUTE)
    scores = tl.dot(c0, q0, scores, input_precision=PRECISION)
    if BITS == 2:
        c1, c2, c3 = _codes(packed, 1, 2, COMPUTE), _codes(packed, 2, 2, COMPUTE), _codes(packed, 3, 2, COMPUTE)
    if BITS < 8:
        scores = tl.dot(c1, q1, scores, input_precision=PRECISION)
        scores = tl.dot(c2, q2, scores, input_precision=PRECISION)
        scores = tl.dot(c3, q3, scores, input_precision=PRECISION)
    if TAIL:
        words = tl.load(packed_ptr + place[:, None] * ROW_UNITS + TAIL + tl.arange(0, BLOCK_K // 2)[None, :])
        c0, c1, c2, c3 = _nibbles(words, COMPUTE, ASSEMBLY)
        scores = tl.dot(_side_by_side(c0, c2), t0, scores, input_precision=PRECISION)
        scores = tl.dot(_side_by_side(c1, c3), t1, scores, input_precision=PRECISION)
    return scores


@triton.jit
def _side_by_side(left, right):
    """[BLOCK_N, 2 * units]."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), [left.shape[0], 2 * left.shape[1]])


@triton.jit
def sum_step(count, SUM_EVERY: tl.constexpr):
    """As `pooling.sum_step`."""
    return tl.maximum(tl.minimum(count // LEAST_SUMMED, SUM_EVERY), 1)


@triton.jit
def num_summed(count, step):
    """How many of `count` candidates are summed."""
    return tl.minimum(count, FIRST_SUMMED) + tl.maximum(count - FIRST_SUMMED, 0) // step


@triton.jit
def summed_candidate(place, step):
    """Which candidate has a place among those that are summed, see `pooling.sampled`."""
    stretch = place - FIRST_SUMMED
    turn = ((stretch.to(tl.uint32) * GOLDEN) & 0xFFFF).to(tl.int32)
    behind = FIRST_SUMMED + stretch * step + (turn * step >> 16)
    return tl.where(place < FIRST_SUMMED, place, behind)


@triton.jit
def summed_weight(place, step):
    """Base 2: how many candidates it stands for."""
    return tl.where(place < FIRST_SUMMED, 0.0, tl.log2(step.to(tl.float32)))


@triton.jit
def row_lse(peak_ptr, total_ptr, stats, num_chunks, max_rows, m, live, BLOCK_CHUNKS: tl.constexpr):
    """[BLOCK_M] base 2, from the sums of all chunks; +inf for a row that has no score at all, or is none."""
    highest = tl.full([m.shape[0]], -1e30, tl.float32)
    total = tl.zeros([m.shape[0]], tl.float32)
    for begin in range(0, num_chunks, BLOCK_CHUNKS):
        parts = begin + tl.arange(0, BLOCK_CHUNKS)
        where = stats + parts[:, None] * max_rows + m[None, :]
        there = (parts < num_chunks)[:, None] & live[None, :]
        # Other programs of the same launch may have written them: past the first level of caches.
        peaks = tl.load(peak_ptr + where, mask=there, other=-1e30, cache_modifier=".cg")
        totals = tl.load(total_ptr + where, mask=there, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(highest, tl.max(peaks, axis=0))
        # Rounded before they are added, not with the sum: else threads that add the same two in turns differ.
        scaled = tl.where(totals == 0.0, 0.0, tl.exp2(peaks - higher[None, :]) * totals)
        total = total * tl.exp2(highest - higher) + tl.sum(scaled, axis=0)
        highest = higher
    # Such a row says nothing: everything is less than +inf.
    return tl.where(total == 0.0, float("inf"), highest + tl.log2(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def listed_token(list_ptr, candidate, there, ENTRY: tl.constexpr):
    """Which token a candidate of a list is, of whose entries each stands for ENTRY tokens that follow each other.

    there: of which candidates; None: of all.
    """
    # By bits: numbers may be negative to the compiler, whose quotients take three instructions more.
    SHIFT: tl.constexpr = 4 if ENTRY == 16 else 0
    return (tl.load(list_ptr + (candidate >> SHIFT), mask=there) << SHIFT) + (candidate & (ENTRY - 1))


@triton.jit
def _pool(scores, lse, weight, POOL: tl.constexpr):
    """[BLOCK_N] natural log of the largest, or of `weight` times the summed, share of attention of a candidate.

    A row of NaN says nothing: the maximum passes it over.
    """
    scores = scores - lse[None, :]
    if POOL == 2:
        scores = tl.where(scores == scores, scores, float("-inf"))
    pooled = tl.max(scores, axis=1)
    if POOL == 2:
        level = tl.where(pooled == float("-inf"), 0.0, pooled)
        mass = tl.sum(tl.exp2(scores - level[:, None]), axis=1) * weight
        pooled = tl.where(mass == 0.0, float("-inf"), level + tl.log2(tl.where(mass == 0.0, 1.0, mass)))
    return pooled * LN2


@triton.jit
def pool_tiles(first, second, POOL: tl.constexpr):
    """Both natural logs; of the mean's parts the sum."""
    highest = tl.maximum(first, second)
    if POOL == 1:
        return highest
    level = tl.where(highest == float("-inf"), 0.0, highest)
    mass = tl.exp(first - level) + tl.exp(second - level)
    return tl.where(mass == 0.0, float("-inf"), level + tl.log(tl.where(mass == 0.0, 1.0, mass)))


@triton.jit
def _step(
    start, end, tile, num_rows, lse, peak, total, queries, more, out_ptr, packed_ptr, first_row, shift, step, factor,
    GQA: tl.constexpr, BLOCK_K: tl.constexpr, ROW_UNITS: tl.constexpr, BITS: tl.constexpr,
    SAMPLED: tl.constexpr, POOL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr, TAIL: tl.constexpr, FORM: tl.constexpr,
    ENTRY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of candidates against a tile of rows: sums, or pooled scores that are written."""
    n = start + tl.arange(0, BLOCK_N)
    # Candidates past the end read the last one again, and are masked after the product.
    entry = tl.minimum(n, end - 1) if MASKED else n
    if SAMPLED:
        entry = summed_candidate(entry, step)
    more_ptr, more_queries, lengths = more
    place = entry
    if FORM == LISTED:
        place = listed_token(more_ptr, entry, None, ENTRY)
    elif FORM == TOKEN:
        place = entry >> shift
    place = first_row + place.to(tl.int64)
    scores = _product(
        tl.zeros([BLOCK_N, BLOCK_M], tl.float32), packed_ptr, place, queries, ROW_UNITS, BLOCK_K, BITS, COMPUTE,
        PRECISION, ASSEMBLY, TAIL,
    )  # fmt: skip
    if FORM == MINMAX:
        scores = _product(
            scores, more_ptr, place, more_queries, ROW_UNITS, BLOCK_K, BITS, COMPUTE, PRECISION, ASSEMBLY, TAIL
        )
    elif FORM == BALL:
        scores += tl.load(more_ptr + place).to(tl.float32)[:, None] * lengths[None, :]
    if POOL == 0:
        if MASKED:
            scores = tl.where((n < end)[:, None], scores, float("-inf"))
        if SAMPLED:
            scores = scores * factor + summed_weight(n, step)[:, None]
            factor = 1.0
        # In the tensor cores' layout a thread owns whole sets of axes 0 and 2: its sums need no other thread until
        # the stretch is over.
        scores = tl.reshape(scores, [BLOCK_N // (16 * LANES), LANES, 2, 8, BLOCK_M])
        higher = tl.maximum(peak, tl.max(tl.max(scores, axis=2), axis=0) * factor)
        weight = tl.exp2(scores * factor - higher[None, :, None, :, :])
        total = total * tl.exp2(peak - higher) + tl.sum(tl.sum(weight, axis=2), axis=0)
        peak = higher
    else:
        pooled = _pool(scores * factor, lse, 1.0 / (num_rows * GQA), POOL)
        if tile > 0:
            pooled = pool_tiles(pooled, tl.load(out_ptr + entry), POOL)
        tl.store(out_ptr + n, pooled, mask=n < end)
    return peak, total


@triton.jit
def addresses(arrays):
    """Of a group's channels, codes, scale, and what a form has beside: see `tables.ScoredGroup`."""
    return tl.load(arrays), tl.load(arrays + 1), tl.load(arrays + 2), tl.load(arrays + 3), tl.load(arrays + 4)


@triton.jit
def stretch_of(chunk, num_chunks, count, BLOCK_N: tl.constexpr):
    """Where a chunk of `count` candidates begins and ends: whole blocks, but for the last one; or nothing."""
    stretch = tl.cdiv(tl.cdiv(count, num_chunks), BLOCK_N) * BLOCK_N
    begin = tl.minimum(chunk * stretch, count)
    return begin, tl.minimum(begin + stretch, count)


@triton.jit
def score_stretch(
    begin, end, q_ptr, rows_ptr, row_begin, num_rows, head,
    arrays,  # `addresses`; LISTED: in the fourth place a pointer to the positions of the head's candidates
    first_row,
    shift,  # tokens: log2 of those of a row
    step, out_ptr, peak_ptr, total_ptr,
    stats,  # where the sums of this group and head begin
    chunk, num_chunks, sm_scale, q_stride_row, q_stride_head, max_rows,
    GQA: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_K: tl.constexpr, ROW_UNITS: tl.constexpr, BITS: tl.constexpr,
    LISTED_CHANNELS: tl.constexpr, SUM_EVERY: tl.constexpr,
    POOL: tl.constexpr,  # 0: the pass of sums; 1: pool by the maximum; 2: by the mean
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr, FORM: tl.constexpr, ENTRY: tl.constexpr,
):  # fmt: skip
    """Candidates `begin` to `end` of a head against all rows of the group: their sums (POOL 0), or pooled scores.

    With SUM_EVERY above 1 sums are of a sample: places among the candidates that are summed, one of each `step`.
    """
    SAMPLED: tl.constexpr = SUM_EVERY > 1 and POOL == 0
    PARTS: tl.constexpr = 1 if BITS >= 8 else 4
    TAIL: tl.constexpr = BLOCK_K if ROW_UNITS > BLOCK_K else 0
    UNITS: tl.constexpr = tl.float16 if BITS == 16 else tl.uint16 if BITS == 4 else tl.uint8
    channels_at, packed_at, scale_at, more_at, more_scale_at = arrays
    channels_ptr = channels_at.to(tl.pointer_type(tl.int16)) + head * CHANNELS
    packed_ptr = tl.multiple_of(packed_at.to(tl.pointer_type(UNITS)), 16)
    scale_ptr = scale_at.to(tl.pointer_type(tl.float32)) + head * CHANNELS
    more_scale_ptr = more_scale_at.to(tl.pointer_type(tl.float32)) + head * CHANNELS
    if FORM == LISTED:
        more_ptr = more_at
    elif FORM == BALL:
        more_ptr = more_at.to(tl.pointer_type(tl.float16))
    else:
        more_ptr = tl.multiple_of(more_at.to(tl.pointer_type(UNITS)), 16)

    # What a code in fp16 is too small by, see `_codes`.
    UNIT: tl.constexpr = 16777216.0 if COMPUTE == tl.float16 and BITS < 16 else 1.0
    factor = sm_scale * LOG2E * UNIT

    for tile in range(tl.cdiv(num_rows * GQA, BLOCK_M)):
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        live = m < num_rows * GQA
        queries = _query_parts(
            q_ptr, rows_ptr, channels_ptr, scale_ptr, row_begin, num_rows, head, tile, q_stride_row, q_stride_head,
            PARTS, BITS, GQA, CHANNELS, BLOCK_K, BLOCK_M, LISTED_CHANNELS, COMPUTE, TAIL,
            -1 if FORM == MINMAX else 0,
        )  # fmt: skip
        more = (more_ptr, queries, m)
        if FORM == MINMAX:
            # The largest product with a block's keys is at most that of the positive part with the maxima plus that of
            # the negative part with the minima.
            positive = _query_parts(
                q_ptr, rows_ptr, channels_ptr, more_scale_ptr, row_begin, num_rows, head, tile, q_stride_row,
                q_stride_head, PARTS, BITS, GQA, CHANNELS, BLOCK_K, BLOCK_M, LISTED_CHANNELS, COMPUTE, TAIL, 1,
            )  # fmt: skip
            more = (more_ptr, positive, m)
        elif FORM == BALL:
            lengths = _query_norms(
                q_ptr, rows_ptr, channels_ptr, row_begin, num_rows, head, tile, q_stride_row, q_stride_head, GQA,
                CHANNELS, BLOCK_K * PARTS * (2 if TAIL else 1), BLOCK_M, LISTED_CHANNELS,
            )  # fmt: skip
            more = (more_ptr, queries, lengths / UNIT)

        lse = tl.zeros([BLOCK_M], tl.float32)
        if POOL:
            lse = row_lse(peak_ptr, total_ptr, stats, num_chunks, max_rows, m, live, BLOCK_CHUNKS)
            if SUM_EVERY > 1:
                lse += HEADROOM * LOG2E
        # Below every score, and finite: less -inf than this is -inf, and not NaN.
        peak = tl.full([LANES, 8, BLOCK_M], -1e30, tl.float32)
        total = tl.zeros([LANES, 8, BLOCK_M], tl.float32)
        full = begin + tl.maximum(end - begin, 0) // BLOCK_N * BLOCK_N
        for start in tl.range(begin, full, BLOCK_N, num_stages=STAGES):
            peak, total = _step(
                start, end, tile, num_rows, lse, peak, total, queries, more, out_ptr, packed_ptr, first_row, shift,
                step, factor, GQA, BLOCK_K, ROW_UNITS, BITS, SAMPLED, POOL, BLOCK_M, BLOCK_N, LANES, COMPUTE, PRECISION,
                ASSEMBLY, TAIL, FORM, ENTRY, False,
            )  # fmt: skip
        if full < end:
            peak, total = _step(
                full, end, tile, num_rows, lse, peak, total, queries, more, out_ptr, packed_ptr, first_row, shift,
                step, factor, GQA, BLOCK_K, ROW_UNITS, BITS, SAMPLED, POOL, BLOCK_M, BLOCK_N, LANES, COMPUTE, PRECISION,
                ASSEMBLY, TAIL, FORM, ENTRY, True,
            )  # fmt: skip
        if POOL == 0:
            highest = tl.max(tl.max(peak, axis=0), axis=0)
            # Rounded before they are added, as in `row_lse`.
            mass = tl.where(total == 0.0, 0.0, total * tl.exp2(peak - highest[None, None, :]))
            mass = tl.sum(tl.sum(mass, axis=0), axis=0)
            tl.store(peak_ptr + stats + chunk * max_rows + m, highest, mask=live)
            tl.store(total_ptr + stats + chunk * max_rows + m, mass, mask=live)
        # The next tile reads what other threads of this program wrote.
        tl.debug_barrier()
