"""Triton kernels of the CSA scores on compact lists: which list each query row fetches, and the sum of those lists.

A program owns a tile of positions of one query row and adds the lists in the order of their subspaces, straight in the
output (which its multiprocessor caches). Positions are unique within a list, so nothing but a barrier between two lists
is needed: no atomics, and the same bits in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefix_kernels.kernels import wait_for_the_kernel_before

BLOCK = tl.constexpr(256)
"""Positions whose offset fits one byte: `compact.BLOCK_POSITIONS`."""
FIELDS = tl.constexpr(12)
"""Columns of the table of groups: the ones below, then spare."""
PLACES = tl.constexpr(0)
COUNTS = tl.constexpr(1)
CODES = tl.constexpr(2)
SCALE = tl.constexpr(3)
ZERO = tl.constexpr(4)
CENTROIDS = tl.constexpr(5)
WEIGHTS = tl.constexpr(6)
PREFIX_LEN = tl.constexpr(7)
LIST_LEN = tl.constexpr(8)
NUM_ROWS = tl.constexpr(9)
OUT_BEGIN = tl.constexpr(10)


@triton.jit
def pick_lists_kernel(
    q_ptr,  # [batch, num_qo_heads, HEAD_DIM]
    rows_ptr,  # int32 [max_rows, 4]: group or -1, batch row, row within the group, spare
    groups_ptr,  # int64 [max_groups, FIELDS]: addresses and sizes
    dims_ptr,  # int64 [NUM_SUBSPACES, SUB], channels of a subspace
    centroids_ptr,  # not read: of the dtype of the groups' centroids
    lists_ptr,  # int32 [max_rows * GQA, num_kv_heads, NUM_SUBSPACES], out: list among all the group's lists
    factors_ptr,  # fp32 [max_rows * GQA, num_kv_heads, NUM_SUBSPACES, 2], out: score = code * first + second
    starts_ptr,  # int32 [max_rows * GQA, num_kv_heads, NUM_SUBSPACES, starts_stride], out: entries before each block
    q_stride_row, q_stride_head, starts_stride, GQA: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    NUM_SUBSPACES: tl.constexpr, SUB: tl.constexpr, BLOCK_SUB: tl.constexpr, NUM_CENTROIDS: tl.constexpr,
    BLOCK_C: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_N: tl.constexpr, BITMAP_N: tl.constexpr, BITMAP: tl.constexpr,
    OFFSETS: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Program (subspace, KV head, tile row): nearest centroid, factors of its list, prefix sums of its counts."""
    wait_for_the_kernel_before(OVERLAPPED)
    subspace = tl.program_id(0)
    head = tl.program_id(1)
    tile_row = tl.program_id(2)
    row_fields = rows_ptr + tile_row // GQA * 4
    group = tl.load(row_fields)
    if group >= 0:
        fields = groups_ptr + group * FIELDS
        d = tl.arange(0, BLOCK_SUB)
        c = tl.arange(0, BLOCK_C)
        q_row = q_ptr + tl.load(row_fields + 1).to(tl.int64) * q_stride_row
        q_row += (head * GQA + tile_row % GQA).to(tl.int64) * q_stride_head
        channel = tl.load(dims_ptr + subspace * SUB + d, mask=d < SUB, other=0)
        q = tl.load(q_row + channel, mask=d < SUB, other=0.0).to(tl.float32)
        of_head = head * NUM_SUBSPACES + subspace
        centroids = tl.load(fields + CENTROIDS).to(tl.pointer_type(centroids_ptr.dtype.element_ty))
        centroid = tl.load(
            centroids + (of_head * NUM_CENTROIDS + c)[:, None] * SUB + d[None, :],
            mask=(c < NUM_CENTROIDS)[:, None] & (d < SUB)[None, :],
            other=0.0,
        ).to(tl.float32)
        likeness = tl.where(c < NUM_CENTROIDS, tl.sum(centroid * q[None, :], axis=1), float("-inf"))
        weight, nearest = tl.max(likeness, axis=0, return_indices=True)
        if WEIGHTED:
            e = tl.arange(0, BLOCK_D)
            whole = tl.load(q_row + e, mask=e < HEAD_DIM, other=0.0).to(tl.float32)
            share = tl.load(tl.load(fields + WEIGHTS).to(tl.pointer_type(tl.float32)) + of_head)
            weight = share * tl.sqrt(tl.sum(whole * whole, axis=0))
        # A query of NaN is nearest to anything, also to the padding.
        one = of_head * NUM_CENTROIDS + tl.minimum(nearest, NUM_CENTROIDS - 1)
        scale = tl.load(tl.load(fields + SCALE).to(tl.pointer_type(tl.float16)) + one).to(tl.float32)
        zero = tl.load(tl.load(fields + ZERO).to(tl.pointer_type(tl.float16)) + one).to(tl.float32)
        pick = (tile_row * tl.num_programs(1) + head).to(tl.int64) * NUM_SUBSPACES + subspace
        tl.store(lists_ptr + pick, one)
        tl.store(factors_ptr + pick * 2, weight * scale)
        tl.store(factors_ptr + pick * 2 + 1, weight * zero)

        starts = starts_ptr + pick * starts_stride
        prefix_len = tl.load(fields + PREFIX_LEN).to(tl.int32)
        counts_at = tl.load(fields + COUNTS)
        tl.store(starts, 0)
        if OFFSETS:
            if counts_at != 0:
                _sum_counts(starts, counts_at, one, prefix_len, starts_stride, BLOCK_N)
        if BITMAP:
            if counts_at == 0:
                _sum_bits(starts, tl.load(fields + PLACES), one, prefix_len, starts_stride, BITMAP_N)


@triton.jit
def _sum_counts(starts, counts_at, one, prefix_len, starts_stride, BLOCK_N: tl.constexpr):
    """Entries before each block, from the list's counts; past the last block, to the end of its tile, all entries."""
    num_blocks = tl.cdiv(prefix_len, BLOCK)
    counts_ptr = counts_at.to(tl.pointer_type(tl.int16)) + one.to(tl.int64) * num_blocks
    before = 0
    for begin in range(0, num_blocks, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        count = tl.load(counts_ptr + n, mask=n < num_blocks, other=0).to(tl.int32)
        tl.store(starts + 1 + n, before + tl.cumsum(count, axis=0), mask=n + 1 < starts_stride)
        before += tl.sum(count, axis=0)


@triton.jit
def _sum_bits(starts, places_at, one, prefix_len, starts_stride, BITMAP_N: tl.constexpr):
    """As `_sum_counts`, from the list's bitmap."""
    num_blocks = tl.cdiv(prefix_len, BLOCK)
    num_bytes = tl.cdiv(prefix_len, 8)
    places_ptr = places_at.to(tl.pointer_type(tl.uint8)) + one.to(tl.int64) * num_bytes
    before = 0
    for begin in range(0, num_blocks, BITMAP_N):
        n = begin + tl.arange(0, BITMAP_N)
        byte = n[:, None] * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
        bits = tl.load(places_ptr + byte, mask=byte < num_bytes, other=0).to(tl.int32)
        bits = bits - ((bits >> 1) & 0x55)
        bits = (bits & 0x33) + ((bits >> 2) & 0x33)
        count = tl.sum((bits + (bits >> 4)) & 0x0F, axis=1)
        tl.store(starts + 1 + n, before + tl.cumsum(count, axis=0), mask=n + 1 < starts_stride)
        before += tl.sum(count, axis=0)


@triton.jit
def score_tiles_kernel(
    rows_ptr,  # int32 [max_rows, 4], as above
    groups_ptr,  # int64 [max_groups, FIELDS]
    lists_ptr,  # int32 [max_rows * GQA, num_kv_heads, NUM_SUBSPACES]
    factors_ptr,  # fp32 [max_rows * GQA, num_kv_heads, NUM_SUBSPACES, 2]
    starts_ptr,  # int32 [max_rows * GQA, num_kv_heads, NUM_SUBSPACES, starts_stride]
    out_ptr,  # fp32, each group [num_kv_heads, num_rows * GQA, prefix_len] from its OUT_BEGIN on
    starts_stride, GQA: tl.constexpr, NUM_SUBSPACES: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr, BITMAP: tl.constexpr, OFFSETS: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Program (tile of positions, KV head, tile row): the sum of that row's lists in that tile, -inf where none is."""
    wait_for_the_kernel_before(OVERLAPPED)
    tile = tl.program_id(0)
    head = tl.program_id(1)
    tile_row = tl.program_id(2)
    row_fields = rows_ptr + tile_row // GQA * 4
    group = tl.load(row_fields)
    if group >= 0:
        fields = groups_ptr + group * FIELDS
        prefix_len = tl.load(fields + PREFIX_LEN)
        if tile * TILE < prefix_len:
            size = prefix_len.to(tl.int32)
            num_rows = tl.load(fields + NUM_ROWS)
            row = head * num_rows * GQA + tl.load(row_fields + 2) * GQA + tile_row % GQA
            out = out_ptr + tl.load(fields + OUT_BEGIN) + row * prefix_len + tile * TILE
            pick = (tile_row * tl.num_programs(1) + head).to(tl.int64) * NUM_SUBSPACES
            if OFFSETS:
                if tl.load(fields + COUNTS) != 0:
                    _add_offsets(
                        fields, lists_ptr + pick, factors_ptr + pick * 2,
                        starts_ptr + pick * starts_stride + tile * (TILE // BLOCK), out, tile, size, starts_stride,
                        NUM_SUBSPACES, BITS, TILE, STEP,
                    )  # fmt: skip
            if BITMAP:
                if tl.load(fields + COUNTS) == 0:
                    _add_bitmaps(
                        fields, lists_ptr + pick, factors_ptr + pick * 2,
                        starts_ptr + pick * starts_stride + tile * (TILE // BLOCK), out, tile, size, starts_stride,
                        NUM_SUBSPACES, BITS, TILE,
                    )  # fmt: skip


@triton.jit
def _span(lists, starts, starts_stride, subspace, BLOCKS: tl.constexpr):
    """(list, first entry in the tile, entry past its last) of a row's subspace."""
    at = starts + subspace * starts_stride
    return tl.load(lists + subspace), tl.load(at), tl.load(at + BLOCKS)


@triton.jit
def _entries(places, codes, list_len, one, begin, end, BITS: tl.constexpr, STEP: tl.constexpr):
    """Places and bytes of codes of entries [begin, begin + STEP) of a list: raw, so that nothing waits for them yet."""
    entry = begin + tl.arange(0, STEP)
    there = entry < end
    one = one.to(tl.int64)
    place = tl.load(places + one * list_len + entry, mask=there, other=0)
    code_bytes = (list_len * BITS + 7) // 8
    code = tl.load(codes + one * code_bytes + (entry >> (1 if BITS == 4 else 0)), mask=there, other=0)
    return place, code


@triton.jit
def _add_entries(
    out, starts, place, code, begin, end, scale, zero, BITS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Add entries [begin, begin + STEP) of a list to the tile at `out`; -inf is replaced."""
    entry = begin + tl.arange(0, STEP)
    there = entry < end
    offset = place.to(tl.int32)
    for n in tl.static_range(1, TILE // BLOCK):
        bound = tl.load(starts + n)
        offset = tl.where(entry >= bound, place.to(tl.int32) + n * BLOCK, offset)
    code = code.to(tl.int32)
    if BITS == 4:
        code = (code >> ((entry & 1) * 4)) & 15
    value = code.to(tl.float32) * scale + zero
    at = out + offset
    before = tl.load(at, mask=there, other=0.0)
    tl.store(at, tl.where(before == float("-inf"), value, before + value), mask=there)


@triton.jit
def _add_offsets(
    fields, lists, factors, starts, out, tile, prefix_len, starts_stride, NUM_SUBSPACES: tl.constexpr,
    BITS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Lists with offsets: read, add, write back; one list after the other.

    Reads run ahead, as each depends on the one before: spans by two lists, entries by one.
    """
    places = tl.load(fields + PLACES).to(tl.pointer_type(tl.uint8))
    codes = tl.load(fields + CODES).to(tl.pointer_type(tl.uint8))
    list_len = tl.load(fields + LIST_LEN)
    one, begin, end = _span(lists, starts, starts_stride, 0, TILE // BLOCK)
    next_one, next_begin, next_end = _span(lists, starts, starts_stride, 1 if NUM_SUBSPACES > 1 else 0, TILE // BLOCK)
    place, code = _entries(places, codes, list_len, one, begin, end, BITS, STEP)
    scale = tl.load(factors)
    zero = tl.load(factors + 1)
    for first in range(0, TILE, BLOCK):
        p = first + tl.arange(0, BLOCK)
        tl.store(out + p, tl.full([BLOCK], float("-inf"), tl.float32), mask=tile * TILE + p < prefix_len)
    for subspace in range(NUM_SUBSPACES):
        # All threads' writes of the list before are seen from here on.
        tl.debug_barrier()
        after = tl.minimum(subspace + 1, NUM_SUBSPACES - 1)
        far_one, far_begin, far_end = _span(
            lists, starts, starts_stride, tl.minimum(subspace + 2, NUM_SUBSPACES - 1), TILE // BLOCK
        )
        next_place, next_code = _entries(places, codes, list_len, next_one, next_begin, next_end, BITS, STEP)
        next_scale = tl.load(factors + after * 2)
        next_zero = tl.load(factors + after * 2 + 1)
        bounds = starts + subspace * starts_stride
        _add_entries(out, bounds, place, code, begin, end, scale, zero, BITS, TILE, STEP)
        for more in range(begin + STEP, end, STEP):
            place, code = _entries(places, codes, list_len, one, more, end, BITS, STEP)
            _add_entries(out, bounds, place, code, more, end, scale, zero, BITS, TILE, STEP)
        place, code, scale, zero = next_place, next_code, next_scale, next_zero
        one, begin, end = next_one, next_begin, next_end
        next_one, next_begin, next_end = far_one, far_begin, far_end


@triton.jit
def _add_bitmaps(
    fields, lists, factors, starts, out, tile, prefix_len, starts_stride, NUM_SUBSPACES: tl.constexpr,
    BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Lists with bitmaps: each position finds its entry by counting the bits before it; sums stay in registers."""
    places = tl.load(fields + PLACES).to(tl.pointer_type(tl.uint8))
    codes = tl.load(fields + CODES).to(tl.pointer_type(tl.uint8))
    code_bytes = (tl.load(fields + LIST_LEN) * BITS + 7) // 8
    num_bytes = tl.cdiv(prefix_len, 8)
    byte = tl.arange(0, TILE // 8)
    bit = tl.arange(0, 8)
    position = byte[:, None] * 8 + bit[None, :]
    acc = tl.zeros([TILE // 8, 8], tl.float32)
    seen = tl.zeros([TILE // 8], tl.int32)
    for subspace in range(NUM_SUBSPACES):
        one = tl.load(lists + subspace).to(tl.int64)
        begin = tl.load(starts + subspace * starts_stride)
        scale = tl.load(factors + subspace * 2)
        zero = tl.load(factors + subspace * 2 + 1)
        at = tile * (TILE // 8) + byte
        marks = tl.load(places + one * num_bytes + at, mask=at < num_bytes, other=0).to(tl.int32)
        # A byte's bits in nibbles of their own; the product's nibbles are how many of them stand before each.
        marks = (marks | (marks << 12)) & 0x000F000F
        marks = (marks | (marks << 6)) & 0x03030303
        marks = (marks | (marks << 3)) & 0x11111111
        ranks = marks * 0x11111110
        count = (ranks >> 28) + (marks >> 28)
        first = begin + tl.cumsum(count, axis=0) - count
        listed = ((marks[:, None] >> (bit * 4)[None, :]) & 1) != 0
        entry = first[:, None] + ((ranks[:, None] >> (bit * 4)[None, :]) & 15)
        code = tl.load(codes + one * code_bytes + (entry >> (1 if BITS == 4 else 0)), mask=listed, other=0)
        code = code.to(tl.int32)
        if BITS == 4:
            code = (code >> ((entry & 1) * 4)) & 15
        acc += tl.where(listed, code.to(tl.float32) * scale + zero, 0.0)
        seen |= marks
    seen_bit = ((seen[:, None] >> (bit * 4)[None, :]) & 1) != 0
    tl.store(out + position, tl.where(seen_bit, acc, float("-inf")), mask=tile * TILE + position < prefix_len)
