"""Products of codes of 4 bits with queries on Hopper: from memory to the matrix instructions without a detour.

What Triton makes of them moves every code through shared memory, between two barriers. Here a thread loads the very
codes that it feeds to the matrix instructions and takes part in no exchange. In Gluon, since Triton chooses the layout
of a load itself.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper

FEW_ROWS = gl.constexpr(32)
"""Up to so many query rows a warp multiplies on its own, with the queries in its registers: a warp group's
instructions take nearly as long for 8 columns as for 64."""
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Renamed after Triton 3.6."""


def words_layout(block_n: int, num_warps: int) -> gl.DistributedLinearLayout:
    """Of [block_n, 4] words of a piece: as the matrix instructions want their left side, a word to a thread."""
    rows = [[row, 0] for row in _powers(16 * num_warps, block_n)]
    warps = [[row, 0] for row in _powers(16, 16 * num_warps)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0], *rows], lanes, warps, [], [block_n, 4])


def _powers(first: int, limit: int) -> list[int]:
    """`first` and its doubles below the limit."""
    return [first << shift for shift in range((max(limit // first, 1)).bit_length() - 1)]


@gluon.jit
def _piece_of_queries(base, live, of_word, channels_ptr, scale_ptr, PIECE: gl.constexpr, sizes: gl.constexpr):
    """fp16 [BLOCK_M, 32]: a piece of the queries, times the channels' steps."""
    LISTED: gl.constexpr = sizes[5]
    layout: gl.constexpr = of_word.type.layout.parent
    column = PIECE * 32 + gl.arange(0, 32, gl.SliceLayout(0, layout)) % 8 // 2 * 8 + of_word
    channel = gl.load(channels_ptr + column).to(gl.int32) if LISTED else column
    step = gl.load(scale_ptr + column)
    q = gl.load(base[:, None] + channel[None, :], mask=live[:, None], other=0.0).to(gl.float32)
    q = q * (gl.where(of_word % 2 == 1, 0.0625, 1.0) * step)[None, :]
    return gl.minimum(gl.maximum(q, -65504.0), 65504.0).to(gl.float16)


@gluon.jit
def put_queries(query, tile, sizes: gl.constexpr):
    """Put a tile of the group's queries in shared memory, times the channels' steps, in the order of the codes.

    Piece p of a row's codes is 4 words of 8 channels each, in their bits one after the other. Every second one comes at
    16 times its size, see `_codes`.
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
    of_word = k // 16 + 2 * (k % 16 // 8) + 4 * (k % 2)
    live = m < num_rows * GQA
    row = gl.load(rows_ptr + row_begin + m // GQA, mask=live, other=0).to(gl.int64)
    base = q_ptr + row * q_stride_row + (head * GQA + m % GQA) * q_stride_head
    # All pieces are loaded before any is stored: between stores there are barriers.
    q0 = _piece_of_queries(base, live, of_word, channels_ptr, scale_ptr, 0, sizes)
    q1, q2, q3 = q0, q0, q0
    if PIECES > 1:
        q1 = _piece_of_queries(base, live, of_word, channels_ptr, scale_ptr, 1, sizes)
    if PIECES > 2:
        q2 = _piece_of_queries(base, live, of_word, channels_ptr, scale_ptr, 2, sizes)
    if PIECES > 3:
        q3 = _piece_of_queries(base, live, of_word, channels_ptr, scale_ptr, 3, sizes)
    q_smem.index(0).store(q0)
    if PIECES > 1:
        q_smem.index(1).store(q1)
    if PIECES > 2:
        q_smem.index(2).store(q2)
    if PIECES > 3:
        q_smem.index(3).store(q3)
    hopper.fence_async_shared()
    barrier()


@gluon.jit
def load_words(packed_ptr, row, last, sizes: gl.constexpr):
    """A step's codes, see `load_rows`. Past the end the last row is read again."""
    BLOCK_N: gl.constexpr = sizes[2]
    LAYOUT: gl.constexpr = sizes[6]
    return load_rows(packed_ptr, gl.minimum(row + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT)), last), sizes)


@gluon.jit
def load_rows(packed_ptr, n, sizes: gl.constexpr):
    """Codes of rows [BLOCK_N]: of every piece 4 words of 32 bits a row."""
    PIECES: gl.constexpr = sizes[3]
    LAYOUT: gl.constexpr = sizes[6]
    ptrs = packed_ptr + n.to(gl.int64)[:, None] * (PIECES * 4) + gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))[None, :]
    w0 = gl.load(ptrs)
    w1, w2, w3 = w0, w0, w0
    if PIECES > 1:
        w1 = gl.load(ptrs + 4)
    if PIECES > 2:
        w2 = gl.load(ptrs + 8)
    if PIECES > 3:
        w3 = gl.load(ptrs + 12)
    return w0, w1, w2, w3


@gluon.jit
def _codes(words, mma: gl.constexpr):
    """The codes of a piece as the left side of a product: halves whose bits they are, nothing is converted.

    A word's codes i and i + 4 lie 16 bits apart: one mask makes two halves of them.
    """
    c0, c4, c1, c5, c2, c6, c3, c7 = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 upper, pair;
        shr.b32 upper, $8, 8;
        and.b32 pair, $8, 0x000F000F;
        mov.b32 {$0, $1}, pair;
        and.b32 pair, $8, 0x00F000F0;
        mov.b32 {$2, $3}, pair;
        and.b32 pair, upper, 0x000F000F;
        mov.b32 {$4, $5}, pair;
        and.b32 pair, upper, 0x00F000F0;
        mov.b32 {$6, $7}, pair;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [words],
        dtype=(gl.float16,) * 8,
        is_pure=True,
        pack=1,
    )
    # [rows, word, i // 4, i % 4 // 2, i % 2] to [rows, i % 2 * 16 + i % 4 // 2 * 8 + 2 * word + i // 4].
    even = gl.join(gl.join(c0, c4), gl.join(c2, c6))
    odd = gl.join(gl.join(c1, c5), gl.join(c3, c7))
    both = gl.permute(gl.join(even, odd), (0, 4, 3, 1, 2))
    return gl.convert_layout(gl.reshape(both, [words.shape[0], 32]), gl.DotOperandLayout(0, mma, 2))


@gluon.jit
def right_sides(q_smem, sizes: gl.constexpr):
    """The queries of each piece as the right side of a product: few of them in registers, more where they are."""
    BLOCK_M: gl.constexpr = sizes[1]
    PIECES: gl.constexpr = sizes[3]
    MMA: gl.constexpr = sizes[7]
    right: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
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
def product(words, queries, sizes: gl.constexpr):
    """[BLOCK_N, BLOCK_M] scores of a step in units of 2^-24, before any factor."""
    BLOCK_M: gl.constexpr = sizes[1]
    BLOCK_N: gl.constexpr = sizes[2]
    PIECES: gl.constexpr = sizes[3]
    MMA: gl.constexpr = sizes[7]
    w0, w1, w2, w3 = words
    q0, q1, q2, q3 = queries
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
    acc = _add_product(acc, w0, q0, 0, sizes)
    if PIECES > 1:
        acc = _add_product(acc, w1, q1, 1, sizes)
    if PIECES > 2:
        acc = _add_product(acc, w2, q2, 2, sizes)
    if PIECES > 3:
        acc = _add_product(acc, w3, q3, 3, sizes)
    if BLOCK_M > FEW_ROWS:
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    return acc
