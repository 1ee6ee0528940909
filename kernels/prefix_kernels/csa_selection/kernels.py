"""Triton kernels of a selection on CSAttention's compact lists: from queries to the pooled scores of a group.

One launch picks: per query row and subspace the nearest centroid, what the codes of its list stand for, and where the
entries of each chunk of positions begin. The next one scores in two phases, as `anchor_selection.kernels` does, whose
kernel then makes the lists of what is selected: the sums of exponentials of every row over a program's stretch of
positions, and, once all programs of a group and KV head have met, pooled scores.

A row's scores of a tile of positions are added up in shared memory, list by list, as whole numbers: the order of adds
then does not matter, and a sum has the same bits in every run. A word holds two sums. Its low `FLAG` bits count the
lists that hold the position, so that one without a score is told from one whose score is 0; the bits above are the
score in the row's own unit, of which the largest score that its lists can give is 2^(30 - FLAG). What a step and the
zero of a list's codes are is rounded to whole units before: an entry costs one product and sum of integers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from prefix_kernels.anchor_selection.kernels import count_keys, item_at
from prefix_kernels.csa_scores import compact
from prefix_kernels.kernels import ADD, ALIGNED, COARSE, NUM_BINS, RESET, meet
from prefix_kernels.pooled_scores.kernels import LN2, LOG2E, pool_tiles, row_lse, stretch_of

BLOCK = tl.constexpr(compact.BLOCK_POSITIONS)
STEP_POSITIONS = 1024
TILE = tl.constexpr(STEP_POSITIONS)
"""Positions of a step: four blocks. The stretch of a program is a multiple of it."""
SUMS = tl.constexpr("{ .shared .align 1024 .b32 score_sums[1024]; mov.u32 $0, score_sums; }")
"""The address of TILE numbers, aligned as `kernels.COUNTS`."""
TAKE = tl.constexpr("ld.shared.b32 $0, [$1]; st.shared.b32 [$1], 0;")
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def pick_kernel(
    q_ptr,  # [batch, num_qo_heads, SUBSPACES * DIM]
    members_ptr,  # int32 [max_members, 2]: group, or -1 where nothing is scored; batch row
    groups_ptr,  # int64 [max_groups, GROUP_FIELDS], see `runner.py`
    arrays_ptr,  # int64 [max_groups, 6], addresses: centroids, places, counts, codes, scale, zero
    lists_ptr,  # int32 [max_rows, num_kv_heads, SUBSPACES], written: which of the KV head's lists
    factors_ptr,  # int32 [max_rows, num_kv_heads, SUBSPACES, 2], written: what is added is code * first + second
    units_ptr,  # fp32 [max_rows, num_kv_heads], written: score of a unit
    begins_ptr,  # int32 [max_rows, num_kv_heads, max_chunks, SUBSPACES], written: entries before each chunk
    q_stride_row, q_stride_head, max_chunks,
    GROUP_FIELDS: tl.constexpr, GQA: tl.constexpr, SUBSPACES: tl.constexpr, BLOCK_B: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, CENTROIDS: tl.constexpr, BLOCK_C: tl.constexpr, BITS: tl.constexpr, FLAG: tl.constexpr,
    BLOCK_COUNTS: tl.constexpr,
):  # fmt: skip
    """Program (query row, KV head); rows are those of a group's first member, of its second one, and so on."""
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    member = members_ptr + row // GQA * 2
    group = tl.load(member)
    if group >= 0:
        fields = groups_ptr + group * GROUP_FIELDS
        prefix_len = tl.load(fields + 2).to(tl.int32)
        num_chunks = tl.load(fields + 3).to(tl.int32)
        arrays = arrays_ptr + group * 6
        b = tl.arange(0, BLOCK_B)
        d = tl.arange(0, BLOCK_D)
        used = b < SUBSPACES
        channels = used[:, None] & (d < DIM)[None, :]
        q = q_ptr + tl.load(member + 1).to(tl.int64) * q_stride_row + (head * GQA + row % GQA) * q_stride_head
        q = tl.load(q + b[:, None] * DIM + d[None, :], mask=channels, other=0.0).to(tl.float32)

        centroids = tl.load(arrays).to(tl.pointer_type(tl.float16))
        first_list = head * SUBSPACES * CENTROIDS + b * CENTROIDS
        weight = tl.full([BLOCK_B], float("-inf"), tl.float32)
        nearest = tl.zeros([BLOCK_B], tl.int32)
        for first in range(0, CENTROIDS, BLOCK_C):
            c = first + tl.arange(0, BLOCK_C)
            there = (c < CENTROIDS)[None, :]
            at = (first_list[:, None] + c[None, :])[:, :, None] * DIM + d[None, None, :]
            centroid = tl.load(centroids + at, mask=there[:, :, None] & channels[:, None, :], other=0.0)
            product = tl.where(there, tl.sum(centroid.to(tl.float32) * q[:, None, :], axis=2), float("-inf"))
            most, place = tl.max(product, axis=1, return_indices=True)
            # A product that is no number is never nearest: no list is named that is not there.
            nearest = tl.where(most > weight, first + place, nearest)
            weight = tl.maximum(most, weight)

        one = first_list + nearest
        scale = tl.load(tl.load(arrays + 4).to(tl.pointer_type(tl.float16)) + one, mask=used, other=0.0).to(tl.float32)
        zero = tl.load(tl.load(arrays + 5).to(tl.pointer_type(tl.float16)) + one, mask=used, other=0.0).to(tl.float32)
        largest = tl.maximum(tl.abs(zero), tl.abs(zero + scale * (2**BITS - 1)))
        unit = tl.sum(tl.where(used, tl.abs(weight) * largest, 0.0), axis=0) * (2.0 ** (FLAG - 30))
        per_score = tl.where(unit > 1e-30, 1.0 / tl.where(unit > 1e-30, unit, 1.0), 0.0)
        pick = row.to(tl.int64) * tl.num_programs(1) + head
        tl.store(lists_ptr + pick * SUBSPACES + b, b * CENTROIDS + nearest, mask=used)
        factors = factors_ptr + (pick * SUBSPACES + b) * 2
        step = tl.floor(weight * scale * per_score + 0.5).to(tl.int32)
        first = tl.floor(weight * zero * per_score + 0.5).to(tl.int32)
        tl.store(factors, step << FLAG, mask=used)
        tl.store(factors + 1, (first << FLAG) + 1, mask=used)
        tl.store(units_ptr + pick, unit)

        num_blocks = tl.cdiv(prefix_len, BLOCK)
        _, stretch = stretch_of(0, num_chunks, prefix_len, TILE)
        counts = tl.load(arrays + 2).to(tl.pointer_type(tl.int16)) + one[:, None] * num_blocks
        begins = begins_ptr + pick * max_chunks * SUBSPACES + b[:, None]
        before = tl.zeros([BLOCK_B], tl.int32)
        for first in range(0, num_blocks, BLOCK_COUNTS):
            block = first + tl.arange(0, BLOCK_COUNTS)[None, :]
            there = used[:, None] & (block < num_blocks)
            count = tl.load(counts + block, mask=there, other=0).to(tl.int32)
            upto = before[:, None] + tl.cumsum(count, axis=1)
            at_begin = there & (block * BLOCK % stretch == 0)
            tl.store(begins + block * BLOCK // stretch * SUBSPACES, upto - count, mask=at_begin)
            before += tl.sum(count, axis=1)


@triton.jit
def _begin_sums(scratch_ptr):
    """Where the sums of a tile are, all 0: an address of shared memory, in the interpreter the program's scratch."""
    if _INTERPRETED:
        at = scratch_ptr + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * TILE
        tl.store(at + tl.arange(0, TILE), tl.zeros([TILE], tl.int32))
    else:
        at = tl.inline_asm_elementwise(SUMS, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        places = tl.arange(0, TILE) * 4 + at
        tl.inline_asm_elementwise(RESET, "=r,r", [places], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
    return at


@triton.jit
def _add_sums(at, position, value):
    if _INTERPRETED:
        tl.atomic_add(at + position, value)
    else:
        tl.inline_asm_elementwise(
            ADD,
            "=r,r,r",
            [position * 4 + at, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _take_sums(at):
    """int32 [TILE], which all threads have added to; 0 from then on."""
    place = tl.arange(0, TILE)
    tl.debug_barrier()
    if _INTERPRETED:
        sums = tl.load(at + place)
        tl.store(at + place, tl.zeros([TILE], tl.int32))
    else:
        sums = tl.inline_asm_elementwise(TAKE, "=&r,r", [place * 4 + at], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    return sums


@triton.jit
def _ends(counts, block, num_blocks):
    """Per list, how many entries the first one, two, three and four blocks from `block` on have together."""
    end0 = tl.load(counts + block, mask=block < num_blocks, other=0).to(tl.int32)
    end1 = end0 + tl.load(counts + block + 1, mask=block + 1 < num_blocks, other=0).to(tl.int32)
    end2 = end1 + tl.load(counts + block + 2, mask=block + 2 < num_blocks, other=0).to(tl.int32)
    end3 = end2 + tl.load(counts + block + 3, mask=block + 3 < num_blocks, other=0).to(tl.int32)
    return end0, end1, end2, end3


@triton.jit
def _score_rows(
    begin, end, chunk, num_chunks, arrays, list_len, num_blocks, first_row, num_rows, head, num_heads, lists_ptr,
    factors_ptr, units_ptr, begins_ptr, sums, out_ptr, peak_ptr, total_ptr,
    stats,  # where the sums of this group and head begin
    sm_scale, max_rows, max_chunks, SUBSPACES: tl.constexpr, BLOCK_B: tl.constexpr, CENTROIDS: tl.constexpr,
    ENTRIES: tl.constexpr, BITS: tl.constexpr, FLAG: tl.constexpr,
    POOL: tl.constexpr,  # 0: the pass of sums; 1: pool by the maximum; 2: by the mean
    BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Positions `begin` to `end` of a head against all rows of the group: their sums (POOL 0), or pooled scores."""
    b = tl.arange(0, BLOCK_B)
    used = b < SUBSPACES
    code_bytes = (list_len * BITS + 7) // 8
    first_list = head * SUBSPACES * CENTROIDS
    places_ptr = tl.load(arrays + 1).to(tl.pointer_type(tl.uint8)) + first_list * list_len
    counts_ptr = tl.load(arrays + 2).to(tl.pointer_type(tl.int16)) + first_list * num_blocks
    codes_ptr = tl.load(arrays + 3).to(tl.pointer_type(tl.uint8)) + first_list * code_bytes
    # A warp has some of the lists, and what is known of each of them; a thread adds entries of a warp's width apart.
    rounds = tl.arange(0, ENTRIES // 32)[:, None, None]
    lanes = tl.arange(0, 32)[None, None, :]
    # Entries of a byte of codes.
    PACKED: tl.constexpr = 8 // BITS
    for m in range(num_rows):
        pick = (first_row + m) * num_heads + head
        one = tl.load(lists_ptr + pick * SUBSPACES + b, mask=used, other=0)
        factors = factors_ptr + (pick * SUBSPACES + b) * 2
        per_code = tl.load(factors, mask=used, other=0)[None, :, None]
        of_zero = tl.load(factors + 1, mask=used, other=0)[None, :, None]
        # Of a chunk that has no positions any begin will do.
        begins = begins_ptr + (pick * max_chunks + tl.minimum(chunk, max_chunks - 1)) * SUBSPACES
        entry = tl.load(begins + b, mask=used, other=0)
        unit = tl.load(units_ptr + pick) * sm_scale * LOG2E
        first_place, first_code = one * list_len, (one * code_bytes)[None, :, None]
        counts = counts_ptr + one * num_blocks
        lse = tl.zeros([1], tl.float32)
        if POOL:
            this = tl.arange(0, 1)
            lse = row_lse(peak_ptr, total_ptr, stats, num_chunks, max_rows, m + this, this == 0, BLOCK_CHUNKS)
        # Below every score, and finite: less -inf than this is -inf, and not NaN.
        peak = tl.full([TILE], -1e30, tl.float32)
        total = tl.zeros([TILE], tl.float32)
        end0, end1, end2, end3 = _ends(counts, begin // BLOCK, tl.where(used, num_blocks, 0))
        for start in range(begin, end, TILE):
            # Rounds differ by what a load adds to an address, and in no code's place in its byte.
            # The hints are for the layout alone (lists are not next to each other): by them every Triton gives lists to
            # warps, and loads a code in the thread that adds it. Loads stay single bytes, as begins may be odd.
            places = places_ptr + tl.max_contiguous((first_place + entry)[None, :, None] + lanes, [1, 2, 32])
            own = entry[None, :, None] + lanes
            codes = codes_ptr + tl.max_contiguous(first_code + own // PACKED, [1, 2, 32])
            place_of_code = own % PACKED * BITS
            # Asked once more: of a carried value Triton 3.6 takes the first step's maximum for that of all steps.
            _, _, _, ends = _ends(counts, start // BLOCK, tl.where(used, num_blocks, 0))
            for first in range(0, tl.max(ends, axis=0), ENTRIES):
                e = first + rounds * 32 + lanes
                listed = e < end3[None, :, None]
                # What is no entry adds 0, each in a place of its own: adds to one place would wait for each other.
                place = tl.load(places + first + rounds * 32, mask=listed, other=lanes).to(tl.int32)
                code = tl.load(codes + first // PACKED + rounds * (32 // PACKED), mask=listed, other=0).to(tl.int32)
                if BITS == 4:
                    code = (code >> place_of_code) & 15
                # By signs: a GPU has few predicates. One that is used behind its load as well makes the next load wait.
                in_first, in_second = e - end0[None, :, None] >> 31, e - end1[None, :, None] >> 31
                block = 3 + in_first + in_second + (e - end2[None, :, None] >> 31)
                in_list = e - end3[None, :, None] >> 31
                _add_sums(sums, block * BLOCK + place, code * per_code + of_zero & in_list)
            entry += end3
            end0, end1, end2, end3 = _ends(counts, (start + TILE) // BLOCK, tl.where(used, num_blocks, 0))
            found = _take_sums(sums)
            scores = (found >> FLAG).to(tl.float32) * unit
            scores = tl.where((found & (2**FLAG - 1)) == 0, float("-inf"), scores)
            if POOL == 0:
                higher = tl.maximum(peak, scores)
                total = total * tl.exp2(peak - higher) + tl.exp2(scores - higher)
                peak = higher
            else:
                n = start + tl.arange(0, TILE)
                share = (scores - lse) * LN2
                if POOL == 2:
                    share = tl.where(share == share, share - tl.log(num_rows.to(tl.float32)), float("-inf"))
                # Of the first row nothing was written before.
                before = tl.load(out_ptr + n, mask=n < end * tl.minimum(m, 1), other=float("-inf"))
                tl.store(out_ptr + n, pool_tiles(before, share, POOL), mask=n < end)
        if POOL == 0:
            highest = tl.max(peak, axis=0)
            # Rounded before they are added, as in `row_lse`.
            mass = tl.sum(tl.where(total == 0.0, 0.0, total * tl.exp2(peak - highest)), axis=0)
            tl.store(peak_ptr + stats + chunk * max_rows + m, highest)
            tl.store(total_ptr + stats + chunk * max_rows + m, mass)


@triton.jit
def score_kernel(
    groups_ptr,  # int64 [max_groups, GROUP_FIELDS], see `runner.py`
    heads_ptr,  # int64 [num_groups, num_kv_heads, 4]: prefix_len, 0, 0, first score
    arrays_ptr,  # int64 [max_groups, 6], as in `pick_kernel`
    lists_ptr,  # int32 [max_rows, num_kv_heads, SUBSPACES]
    factors_ptr,  # int32 [max_rows, num_kv_heads, SUBSPACES, 2]
    units_ptr,  # fp32 [max_rows, num_kv_heads]
    begins_ptr,  # int32 [max_rows, num_kv_heads, max_chunks, SUBSPACES]
    scratch_ptr,  # int32 [programs, TILE], in the interpreter
    peak_ptr,  # fp32 [num_kv_heads, max_items, max_rows], base 2
    total_ptr,  # the same
    scores_ptr,  # fp32 arena, natural log, written
    items_ptr,  # int64 [max_items, ITEM_FIELDS], see `anchor_selection.programs`
    at_least_ptr,  # int32 [max_items, num_kv_heads, COARSE + NUM_BINS], written
    arrived_ptr,  # int64 [max_groups, num_kv_heads], at first 0, then whole meetings
    sm_scale, max_rows, max_items, max_chunks,
    GROUP_FIELDS: tl.constexpr, ITEM_FIELDS: tl.constexpr, GQA: tl.constexpr, SUBSPACES: tl.constexpr,
    BLOCK_B: tl.constexpr, CENTROIDS: tl.constexpr, ENTRIES: tl.constexpr, BITS: tl.constexpr, FLAG: tl.constexpr,
    POOL: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, FIRST_PHASE: tl.constexpr, LAST_PHASE: tl.constexpr,
    KEYS_TILE: tl.constexpr,
):  # fmt: skip
    """Program (place, KV head): its items, each alone or with the programs that have the group's others."""
    sums = _begin_sums(scratch_ptr)
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    # There is a row of the table for every program, be there an item or not.
    num_items = tl.load(items_ptr + tl.program_id(0) * ITEM_FIELDS + ITEM_FIELDS - 1).to(tl.int32)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        group, chunk, num_chunks, prefix_len, selected, num_sink, recent_begin = item_at(items_ptr + item * ITEM_FIELDS)
        if selected < prefix_len:
            row = group * num_heads + head
            fields = groups_ptr + group * GROUP_FIELDS
            first_row = tl.load(fields) * GQA
            num_rows = tl.load(fields + 1).to(tl.int32) * GQA
            list_len = tl.load(fields + 4).to(tl.int32)
            arrays = arrays_ptr + group * 6
            scores = scores_ptr + tl.load(heads_ptr + row * 4 + 3) // ALIGNED * ALIGNED
            num_blocks = tl.cdiv(prefix_len, BLOCK)
            begin, end = stretch_of(chunk, num_chunks, prefix_len, TILE)
            stats = (head * max_items + item - chunk) * max_rows
            if FIRST_PHASE == 1:
                _score_rows(
                    begin, end, chunk, num_chunks, arrays, list_len, num_blocks, first_row, num_rows, head, num_heads,
                    lists_ptr, factors_ptr, units_ptr, begins_ptr, sums, scores, peak_ptr, total_ptr, stats, sm_scale,
                    max_rows, max_chunks, SUBSPACES, BLOCK_B, CENTROIDS, ENTRIES, BITS, FLAG, 0, BLOCK_CHUNKS,
                )  # fmt: skip
            if FIRST_PHASE == 1 and LAST_PHASE == 2:
                meet(arrived_ptr + row, chunk, num_chunks)
            if LAST_PHASE == 2:
                _score_rows(
                    begin, end, chunk, num_chunks, arrays, list_len, num_blocks, first_row, num_rows, head, num_heads,
                    lists_ptr, factors_ptr, units_ptr, begins_ptr, sums, scores, peak_ptr, total_ptr, stats, sm_scale,
                    max_rows, max_chunks, SUBSPACES, BLOCK_B, CENTROIDS, ENTRIES, BITS, FLAG, POOL, BLOCK_CHUNKS,
                )  # fmt: skip
                # Keys are counted of what other threads of this program wrote.
                tl.debug_barrier()
                counts = at_least_ptr + (item * num_heads + head) * (COARSE + NUM_BINS)
                count_keys(counts, scores, begin, end, 0, num_sink, recent_begin, KEYS_TILE, False, False)
