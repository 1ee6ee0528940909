"""Scores of an anchor layer's selection on Hopper, from codes of 4 bits: both passes in one launch.

The scores of `pooled_scores.stretch_kernels` for INT4 tokens, for sm_90. What Triton makes of them moves every code
through shared memory, between two barriers. Here a thread loads the very codes that it feeds to the matrix
instructions, some steps ahead, and takes part in no exchange: warps drift apart, so that one loads while another
multiplies. In Gluon, since Triton chooses the layout of a load itself.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper

from prefix_kernels.dependent_launch import wait_for_the_kernel_before

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
FEW_ROWS = gl.constexpr(32)
"""Up to so many query rows a warp multiplies on its own, with the queries in its registers: a warp group's
instructions take as long for 8 columns as for 64."""
UNIT = gl.constexpr(16777216.0)
"""What a code is too small by where its bits are taken for those of a half."""
ARRIVALS = gl.constexpr(2**20)
"""What a counter grows by when all programs of a group and a KV head have arrived, however many they are."""
LARGEST = gl.constexpr(2.0**100)
"""Sums of exponentials above it might leave fp32 when they are added up."""
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Renamed after Triton 3.6."""
_wait_for_the_kernel_before = gluon.jit(wait_for_the_kernel_before.fn)


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
def _wait_for_the_others(arrived_ptr, chunk, num_chunks):
    """As the kernel for all GPUs waits, and on the same counters."""
    _barrier()
    if num_chunks > 1:
        own = gl.where(chunk == 0, ARRIVALS + 1 - num_chunks, 1).to(gl.int64)
        before = gl.atomic_add(arrived_ptr, own, sem="acq_rel", scope="gpu")
        target = (before // ARRIVALS + 1) * ARRIVALS
        seen = before + own
        while seen < target:
            seen = gl.atomic_add(arrived_ptr, 0, sem="acquire", scope="gpu")
        _barrier()


@gluon.jit
def _queries(q_smem, q_ptr, rows_ptr, channels_ptr, scale_ptr, of_group, tile, strides, sizes: gl.constexpr):
    """Put a tile of the group's queries in shared memory, times the channels' steps, in the order of the codes.

    Piece p of a row's codes is 4 words of 8 channels each, in their bits one after the other. Every second one comes at
    16 times its size, see `_codes`.
    """
    GQA: gl.constexpr = sizes[0]
    BLOCK_M: gl.constexpr = sizes[1]
    PIECES: gl.constexpr = sizes[3]
    LISTED: gl.constexpr = sizes[5]
    row_begin, num_rows, head = of_group
    q_stride_row, q_stride_head = strides
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [sizes[4], 1], [1, 0])
    m = tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    k = gl.arange(0, 32, gl.SliceLayout(0, layout))
    of_word = k // 16 + 2 * (k % 16 // 8) + 4 * (k % 2)
    live = m < num_rows * GQA
    row = gl.load(rows_ptr + row_begin + m // GQA, mask=live, other=0).to(gl.int64)
    base = q_ptr + row * q_stride_row + (head * GQA + m % GQA) * q_stride_head
    for piece in gl.static_range(PIECES):
        column = piece * 32 + k % 8 // 2 * 8 + of_word
        channel = gl.load(channels_ptr + column).to(gl.int32) if LISTED else column
        step = gl.load(scale_ptr + column)
        q = gl.load(base[:, None] + channel[None, :], mask=live[:, None], other=0.0).to(gl.float32)
        q = q * (gl.where(of_word % 2 == 1, 0.0625, 1.0) * step)[None, :]
        q = gl.minimum(gl.maximum(q, -65504.0), 65504.0)
        q_smem.index(piece).store(q.to(gl.float16))
    hopper.fence_async_shared()
    _barrier()


@gluon.jit
def _words(packed_ptr, row, last, sizes: gl.constexpr):
    """A step's codes: of every piece 4 words of 32 bits a row. Past the end the last row is read again."""
    BLOCK_N: gl.constexpr = sizes[2]
    PIECES: gl.constexpr = sizes[3]
    layout: gl.constexpr = sizes[6]
    n = gl.minimum(row + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout)), last)
    ptrs = packed_ptr + n.to(gl.int64)[:, None] * (PIECES * 4) + gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]
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
def _right(q_smem, sizes: gl.constexpr):
    """The queries of each piece as the right side of a product: few of them in registers, more where they are."""
    BLOCK_M: gl.constexpr = sizes[1]
    PIECES: gl.constexpr = sizes[3]
    right: gl.constexpr = gl.DotOperandLayout(1, sizes[7], 2)
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
    codes = _codes(words, sizes[7])
    if sizes[1] <= FEW_ROWS:
        acc = ampere.mma_v2(codes, queries, acc)
    else:
        right = queries.index(PIECE).permute((1, 0))
        acc = hopper.warpgroup_mma(codes, right, acc, use_acc=PIECE > 0, is_async=True)
    return acc


@gluon.jit
def _product(words, queries, sizes: gl.constexpr):
    """[BLOCK_N, BLOCK_M] scores of a step in units of 2^-24, before any factor."""
    PIECES: gl.constexpr = sizes[3]
    w0, w1, w2, w3 = words
    q0, q1, q2, q3 = queries
    acc = gl.zeros([sizes[2], sizes[1]], gl.float32, sizes[7])
    acc = _add_product(acc, w0, q0, 0, sizes)
    if PIECES > 1:
        acc = _add_product(acc, w1, q1, 1, sizes)
    if PIECES > 2:
        acc = _add_product(acc, w2, q2, 2, sizes)
    if PIECES > 3:
        acc = _add_product(acc, w3, q3, 3, sizes)
    if sizes[1] > FEW_ROWS:
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    return acc


@gluon.jit
def _per_thread(scores, sizes: gl.constexpr):
    """[rows of a thread's tiles, warps, halves, 8, BLOCK_M]: axes 0 and 2 lie within a thread."""
    return gl.reshape(scores, [sizes[2] // (16 * sizes[4]), sizes[4], 2, 8, sizes[1]])


@gluon.jit
def _before(scores, start, end, sizes: gl.constexpr):
    """Scores of a step, -inf from the end on."""
    n = start + gl.arange(0, sizes[2], gl.SliceLayout(1, scores.type.layout))
    return gl.where((n < end)[:, None], scores, float("-inf"))


@gluon.jit
def _sums(scores, factor, reference, sizes: gl.constexpr):
    """[warps, 8, BLOCK_M]: a thread's sums of exponentials of one step."""
    weight = gl.exp2(_per_thread(scores, sizes) * factor - reference[None, :, None, :, :])
    return gl.sum(gl.sum(weight, axis=2), axis=0)


@gluon.jit
def _highest(words, queries, start, end, sizes: gl.constexpr):
    """[warps, 8, BLOCK_M]: the highest of a thread's scores of a step; finite also where there is none."""
    scores = _before(_product(words, queries, sizes), start, end, sizes)
    return gl.maximum(gl.max(gl.max(_per_thread(scores, sizes), axis=2), axis=0), -1e20)


@gluon.jit
def _sum_steps(words, ahead, packed_ptr, first_row, begin, end, queries, factor, reference, sizes: gl.constexpr):
    """[warps, 8, BLOCK_M]: sums of all steps of a stretch, of which the first two are there."""
    BLOCK_N: gl.constexpr = sizes[2]
    last = first_row + end - 1
    total = reference * 0.0
    whole = begin + (end - begin) // (2 * BLOCK_N) * (2 * BLOCK_N)
    # Two steps a turn, each into the registers that it came from: nothing is moved.
    for start in range(begin, whole, 2 * BLOCK_N):
        scores = _product(words, queries, sizes)
        words = _words(packed_ptr, first_row + start + 2 * BLOCK_N, last, sizes)
        total += _sums(scores, factor, reference, sizes)
        scores = _product(ahead, queries, sizes)
        ahead = _words(packed_ptr, first_row + start + 3 * BLOCK_N, last, sizes)
        total += _sums(scores, factor, reference, sizes)
    for start in range(whole, end, BLOCK_N):
        total += _sums(_before(_product(words, queries, sizes), start, end, sizes), factor, reference, sizes)
        words = ahead
    return total


@gluon.jit
def _sum_stretch(words, ahead, packed_ptr, first_row, begin, end, q_smem, factor, sizes: gl.constexpr):
    """([warps, 8, BLOCK_M] exponents to base 2 that sums are relative to, the sums) of a stretch.

    A thread's exponent is the highest score of its first step, not of all steps: then nothing is compared in the loop.
    Where another score is so much higher that a sum might leave fp32, the stretch is read for its highest scores, and
    summed again.
    """
    BLOCK_N: gl.constexpr = sizes[2]
    last = first_row + end - 1
    queries = _right(q_smem, sizes)
    peak = _highest(words, queries, begin, end, sizes)
    total = _sum_steps(words, ahead, packed_ptr, first_row, begin, end, queries, factor, peak * factor, sizes)
    if gl.max(gl.max(gl.max(total, axis=0), axis=0), axis=0) > LARGEST:
        for start in range(begin, end, BLOCK_N):
            words = _words(packed_ptr, first_row + start, last, sizes)
            peak = gl.maximum(peak, _highest(words, queries, start, end, sizes))
        words = _words(packed_ptr, first_row + begin, last, sizes)
        ahead = _words(packed_ptr, first_row + begin + BLOCK_N, last, sizes)
        total = _sum_steps(words, ahead, packed_ptr, first_row, begin, end, queries, factor, peak * factor, sizes)
    return peak * factor, total


@gluon.jit
def _row_lse(peak_ptr, total_ptr, stats, num_chunks, max_rows, m, live, layout: gl.constexpr, AT_ONCE: gl.constexpr):
    """[BLOCK_M] base 2, from the sums of all chunks; +inf for a row that has no score at all, or is none."""
    highest = gl.full([m.shape[0]], -1e30, gl.float32, gl.SliceLayout(0, layout))
    total = gl.zeros([m.shape[0]], gl.float32, gl.SliceLayout(0, layout))
    for begin in range(0, num_chunks, AT_ONCE):
        parts = begin + gl.arange(0, AT_ONCE, gl.SliceLayout(1, layout))
        where = stats + parts[:, None] * max_rows + m[None, :]
        there = (parts < num_chunks)[:, None] & live[None, :]
        # Other programs of the same launch have written them: past the first level of caches.
        peaks = gl.load(peak_ptr + where, mask=there, other=-1e30, cache_modifier=".cg")
        totals = gl.load(total_ptr + where, mask=there, other=0.0, cache_modifier=".cg")
        higher = gl.maximum(highest, gl.max(peaks, axis=0))
        total = total * gl.exp2(highest - higher) + gl.sum(gl.exp2(peaks - higher[None, :]) * totals, axis=0)
        highest = higher
    return gl.where(total == 0.0, float("inf"), highest + gl.log2(gl.where(total == 0.0, 1.0, total)))


@gluon.jit
def _pool(scores, factor, lse, tile, scores_ptr, start, end, sizes: gl.constexpr):
    """Write the natural log of the largest share of attention of each candidate of a step."""
    pooled = gl.max(scores * factor - lse[None, :], axis=1) * LN2
    n = start + gl.arange(0, sizes[2], gl.SliceLayout(1, scores.type.layout))
    if tile > 0:
        pooled = gl.maximum(pooled, gl.load(scores_ptr + n, mask=n < end, other=0.0))
    gl.store(scores_ptr + n, pooled, mask=n < end)


@gluon.jit
def _pool_stretch(
    words, ahead, packed_ptr, first_row, begin, end, q_smem, factor, lse, tile, scores_ptr, sizes: gl.constexpr
):
    """Pooled scores of all candidates of a stretch, of which the first two steps are there."""
    BLOCK_N: gl.constexpr = sizes[2]
    last = first_row + end - 1
    queries = _right(q_smem, sizes)
    for start in range(begin, end, 2 * BLOCK_N):
        scores = _product(words, queries, sizes)
        words = _words(packed_ptr, first_row + start + 2 * BLOCK_N, last, sizes)
        _pool(scores, factor, lse, tile, scores_ptr, start, end, sizes)
        scores = _product(ahead, queries, sizes)
        ahead = _words(packed_ptr, first_row + start + 3 * BLOCK_N, last, sizes)
        _pool(scores, factor, lse, tile, scores_ptr, start + BLOCK_N, end, sizes)


@gluon.jit
def score_items_hopper_kernel(
    q_ptr,  # [batch, num_qo_heads, head_dim]
    rows_ptr,  # int32 [batch], batch rows by group
    groups_ptr,  # int32 [num_groups, 4]: first of `rows`, requests, most candidates, 0
    heads_ptr,  # int64 [num_groups, num_kv_heads, 4]: candidates, first row, first list entry, first score
    arrays_ptr,  # int64 [num_groups, 5], addresses: channels, packed, scale, 0, 0
    peak_ptr,  # fp32 [num_kv_heads, max_items, max_rows], base 2
    total_ptr,  # the same
    scores_ptr,  # fp32 arena, natural log, written
    items_ptr,  # int64 [max_items, ITEM_FIELDS], see `items.py`
    all_at_least_ptr,  # int32 [2, num_groups, num_kv_heads, 256], set to 0 for the launch that counts
    arrived_ptr,  # int64 [num_groups, num_kv_heads], at first 0, then whole meetings
    sm_scale,
    q_stride_row,
    q_stride_head,
    max_rows,
    max_items,
    num_totals,  # num_groups * num_kv_heads
    ITEM_FIELDS: gl.constexpr,
    GQA: gl.constexpr,
    CHANNELS: gl.constexpr,
    LISTED_CHANNELS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_CHUNKS: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    LAYOUT: gl.constexpr,
    FIRST_PHASE: gl.constexpr,
    LAST_PHASE: gl.constexpr,
    OVERLAPPED: gl.constexpr,
):
    """Program (place, KV head): the first two phases of its items, of which only the first may be shared."""
    _wait_for_the_kernel_before(OVERLAPPED)
    head = gl.program_id(1).to(gl.int64)
    num_heads = gl.num_programs(1)
    PIECES: gl.constexpr = CHANNELS // 32
    if BLOCK_M <= FEW_ROWS:
        mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NUM_WARPS, 1], [16, 8])
    else:
        mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_M, 16])
    sizes: gl.constexpr = (GQA, BLOCK_M, BLOCK_N, PIECES, NUM_WARPS, LISTED_CHANNELS, LAYOUT, mma)
    shared: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    q_smem = gl.allocate_shared_memory(gl.float16, [PIECES, BLOCK_M, 32], shared)
    parts: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [NUM_WARPS, 1], [1, 0])
    factor = sm_scale * LOG2E * UNIT
    for item in range(gl.program_id(0), max_items, gl.num_programs(0)):
        fields = items_ptr + item * ITEM_FIELDS
        group = gl.load(fields)
        if group >= 0:
            chunk = gl.load(fields + 1).to(gl.int32)
            num_chunks = gl.load(fields + 2).to(gl.int32)
            prefix_len = gl.load(fields + 3).to(gl.int32)
            selected = gl.load(fields + 4).to(gl.int32)
            row = group * num_heads + head
            row_begin = gl.load(groups_ptr + group * 4)
            num_rows = gl.load(groups_ptr + group * 4 + 1)
            count = gl.load(heads_ptr + row * 4).to(gl.int32)
            first_row = gl.load(heads_ptr + row * 4 + 1).to(gl.int32)
            scores = scores_ptr + gl.load(heads_ptr + row * 4 + 3)
            channels_ptr = gl.load(arrays_ptr + group * 5).to(gl.pointer_type(gl.int16)) + head * CHANNELS
            packed_ptr = gl.multiple_of(gl.load(arrays_ptr + group * 5 + 1).to(gl.pointer_type(gl.int32)), 16)
            scale_ptr = gl.load(arrays_ptr + group * 5 + 2).to(gl.pointer_type(gl.float32)) + head * CHANNELS
            stretch = gl.cdiv(gl.cdiv(count, num_chunks), BLOCK_N) * BLOCK_N
            begin = gl.minimum(chunk * stretch, count)
            end = gl.minimum(begin + stretch, count)
            stats = (head * max_items + item - chunk) * max_rows
            if selected < prefix_len:
                of_group = (row_begin, num_rows, head)
                strides = (q_stride_row, q_stride_head)
                tiles = gl.cdiv(num_rows * GQA, BLOCK_M)
                # The first codes are asked for before the queries and, for the second phase, before the others are
                # waited for.
                words = _words(packed_ptr, first_row + begin, first_row + end - 1, sizes)
                ahead = _words(packed_ptr, first_row + begin + BLOCK_N, first_row + end - 1, sizes)
                if FIRST_PHASE == 1:
                    if chunk == 0:
                        digit = gl.arange(0, 256, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
                        gl.store(all_at_least_ptr + row * 256 + digit, 0)
                        gl.store(all_at_least_ptr + (row + num_totals) * 256 + digit, 0)
                    for tile in range(tiles):
                        _queries(q_smem, q_ptr, rows_ptr, channels_ptr, scale_ptr, of_group, tile, strides, sizes)
                        peak, total = _sum_stretch(
                            words, ahead, packed_ptr, first_row, begin, end, q_smem, factor, sizes
                        )
                        words = _words(packed_ptr, first_row + begin, first_row + end - 1, sizes)
                        ahead = _words(packed_ptr, first_row + begin + BLOCK_N, first_row + end - 1, sizes)
                        highest = gl.max(gl.max(peak, axis=0), axis=0)
                        # Where there is nothing, `total` is 0.
                        mass = gl.sum(gl.sum(total * gl.exp2(peak - highest[None, :][None, :, :]), axis=0), axis=0)
                        m = tile * BLOCK_M + gl.arange(0, BLOCK_M, highest.type.layout)
                        own = stats + chunk * max_rows + m
                        gl.store(peak_ptr + own, highest, mask=m < num_rows * GQA)
                        gl.store(total_ptr + own, mass, mask=m < num_rows * GQA)
                        # The next tile's queries take the place of these.
                        _barrier()
                if FIRST_PHASE == 1 and LAST_PHASE > 1:
                    _wait_for_the_others(arrived_ptr + row, chunk, num_chunks)
                if LAST_PHASE >= 2:
                    for tile in range(tiles):
                        if FIRST_PHASE == 2 or tiles > 1:
                            _queries(q_smem, q_ptr, rows_ptr, channels_ptr, scale_ptr, of_group, tile, strides, sizes)
                        m = tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, parts))
                        lse = _row_lse(
                            peak_ptr, total_ptr, stats, num_chunks, max_rows, m, m < num_rows * GQA, parts, BLOCK_CHUNKS
                        )
                        lse = gl.convert_layout(lse, gl.SliceLayout(0, mma))
                        _pool_stretch(
                            words, ahead, packed_ptr, first_row, begin, end, q_smem, factor, lse, tile, scores, sizes
                        )
                        if tile + 1 < tiles:
                            words = _words(packed_ptr, first_row + begin, first_row + end - 1, sizes)
                            ahead = _words(packed_ptr, first_row + begin + BLOCK_N, first_row + end - 1, sizes)
                        _barrier()
