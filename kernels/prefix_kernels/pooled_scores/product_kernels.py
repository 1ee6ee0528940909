"""Products of candidates' codes with queries: unpacked in registers, from there into the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _queries(
    q_ptr,
    rows_ptr,
    channels_ptr,
    scale_ptr,
    row_begin,
    num_rows,
    head,
    tile,
    q_stride_row,
    q_stride_head,
    SIGN: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    GQA: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LISTED: tl.constexpr,
    SCALED: tl.constexpr,
    COMPUTE: tl.constexpr,
    TAIL: tl.constexpr = 0,
):
    """[BLOCK_K, BLOCK_M]: every PARTS-th channel of the group's queries, times the channel's step.

    SIGN 1 keeps what is positive, -1 what is negative, 0 all.
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
    if SIGN == 1:
        q = tl.maximum(q, 0.0)
    if SIGN == -1:
        q = tl.minimum(q, 0.0)
    if SCALED:
        q = q.to(tl.float32) * tl.load(scale_ptr + column, mask=used, other=0.0)[:, None]
        # A part's codes come at their place in a byte.
        q = q * (2.0 ** (-(BITS * PART % 8)))
        if COMPUTE == tl.float16:
            q = tl.minimum(tl.maximum(q, -65504.0), 65504.0)
    return q.to(COMPUTE)


@triton.jit
def query_parts(
    q_ptr,
    rows_ptr,
    channels_ptr,
    scale_ptr,
    row_begin,
    num_rows,
    head,
    tile,
    q_stride_row,
    q_stride_head,
    SIGN: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    GQA: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LISTED: tl.constexpr,
    SCALED: tl.constexpr,
    COMPUTE: tl.constexpr,
    TAIL: tl.constexpr,
):
    """The parts of the queries that the codes of a unit (a word of four, or a byte) are multiplied with: 1, 4, or 6.

    With TAIL two more are for the units from that one on, see `_product`.
    """
    q0 = _queries(
        q_ptr, rows_ptr, channels_ptr, scale_ptr, row_begin, num_rows, head, tile, q_stride_row, q_stride_head,
        SIGN, 0, PARTS, BITS, GQA, CHANNELS, BLOCK_K, BLOCK_M, LISTED, SCALED, COMPUTE,
    )  # fmt: skip
    q1, q2, q3, t0, t1 = q0, q0, q0, q0, q0
    if PARTS == 4:
        q1 = _queries(
            q_ptr, rows_ptr, channels_ptr, scale_ptr, row_begin, num_rows, head, tile, q_stride_row, q_stride_head,
            SIGN, 1, PARTS, BITS, GQA, CHANNELS, BLOCK_K, BLOCK_M, LISTED, SCALED, COMPUTE,
        )  # fmt: skip
        q2 = _queries(
            q_ptr, rows_ptr, channels_ptr, scale_ptr, row_begin, num_rows, head, tile, q_stride_row, q_stride_head,
            SIGN, 2, PARTS, BITS, GQA, CHANNELS, BLOCK_K, BLOCK_M, LISTED, SCALED, COMPUTE,
        )  # fmt: skip
        q3 = _queries(
            q_ptr, rows_ptr, channels_ptr, scale_ptr, row_begin, num_rows, head, tile, q_stride_row, q_stride_head,
            SIGN, 3, PARTS, BITS, GQA, CHANNELS, BLOCK_K, BLOCK_M, LISTED, SCALED, COMPUTE,
        )  # fmt: skip
    if TAIL:
        t0 = _queries(
            q_ptr, rows_ptr, channels_ptr, scale_ptr, row_begin, num_rows, head, tile, q_stride_row, q_stride_head,
            SIGN, 0, PARTS, BITS, GQA, CHANNELS, 16, BLOCK_M, LISTED, SCALED, COMPUTE, TAIL,
        )  # fmt: skip
        t1 = _queries(
            q_ptr, rows_ptr, channels_ptr, scale_ptr, row_begin, num_rows, head, tile, q_stride_row, q_stride_head,
            SIGN, 1, PARTS, BITS, GQA, CHANNELS, 16, BLOCK_M, LISTED, SCALED, COMPUTE, TAIL,
        )  # fmt: skip
    return q0, q1, q2, q3, t0, t1


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
def product(
    scores,
    packed_ptr,
    place,
    q0,
    q1,
    q2,
    q3,
    t0,
    t1,
    ROW_UNITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BITS: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    TAIL: tl.constexpr,
):
    """scores [BLOCK_N, BLOCK_M] plus the product of the rows of codes at `place` with the queries' parts.

    With TAIL (words of 4-bit codes) a row has half a block of units more, from that unit on. Two parts of them fill a
    block together: what is multiplied is channels, and not the padding of a block that is twice as wide.
    """
    k = tl.arange(0, BLOCK_K)
    ptrs = packed_ptr + place[:, None] * ROW_UNITS + k[None, :]
    packed = tl.load(ptrs) if ROW_UNITS >= BLOCK_K else tl.load(ptrs, mask=k[None, :] < ROW_UNITS, other=0)
    if BITS == 4:
        c0, c1, c2, c3 = _nibbles(packed, COMPUTE, ASSEMBLY)
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
