"""Triton kernels of residents: which pages get which cells, and the copy of these, with lists of slots.

What other programs of a launch wrote, or the launch before, which may still have been running, is read past the first
level of caches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prefix_kernels.kernels import wait_for_the_kernel_before
from prefix_kernels.residents import reference, state

PAGE = tl.constexpr(state.PAGE_TOKENS)
FREE = tl.constexpr(reference.FREE)
OLDEST = tl.constexpr(reference.OLDEST)
AGES = tl.constexpr(reference.FREE + 1)
GROUP_FIELDS = tl.constexpr(6)
"""int64 fields of a group: row of the counts, table_begin, list_begin, head_stride, most tokens of a list, number of
all groups (in every row of the table)."""


@triton.jit
def _list_of(groups_ptr, counts_ptr, group, head, num_heads):
    """Of a group and KV head: (where its list begins, tokens, where its table begins, its place among the counts)."""
    fields = groups_ptr + group * GROUP_FIELDS
    count_at = counts_ptr + tl.load(fields) * num_heads + head
    begin = tl.load(fields + 2) + head * tl.load(fields + 3)
    count = tl.minimum(tl.load(count_at, cache_modifier=".cg"), tl.load(fields + 4).to(tl.int32))
    return begin, count, tl.load(fields + 1), count_at


@triton.jit
def _rewrite(positions, slots, count, pages, cell_of_page, resident_begin, TILE: tl.constexpr):
    """Tokens that a list keeps, those of resident pages, as positions and slots in its own place."""
    kept = 0
    for begin in range(0, count, TILE):
        at = begin + tl.arange(0, TILE)
        there = at < count
        position = tl.load(positions + at, mask=there, other=0, cache_modifier=".cg")
        page = tl.load(pages + position // PAGE, mask=there, other=0)
        cell = tl.load(cell_of_page + page, mask=there, other=-1, cache_modifier=".cg")
        resident = cell >= 0
        place = kept + tl.cumsum(resident.to(tl.int32), axis=0) - 1
        # All of the tile has been read before any of it is written over.
        tl.debug_barrier()
        tl.store(positions + place, position, mask=resident)
        tl.store(slots + place, resident_begin + cell * PAGE + position % PAGE, mask=resident)
        kept += tl.sum(resident.to(tl.int32), axis=0)
    return kept


@triton.jit
def _ages(page_of_cell, stamps, cell, num_cells, step):
    """Ages [TILE] of cells, as `reference.ages`; 0 of what is none."""
    inside = cell < num_cells
    page = tl.load(page_of_cell + cell, mask=inside, other=0, cache_modifier=".cg")
    stamp = tl.load(stamps + cell, mask=inside, other=0, cache_modifier=".cg")
    age = step - stamp
    age = tl.where((age < 0) | (age > OLDEST), OLDEST, age)
    return tl.where(inside, tl.where(page < 0, FREE, age), 0), page


@triton.jit
def _assign(
    groups_ptr, group_counts_ptr, missing_ptr, cell_of_page, page_of_cell, stamps, fetched_pages, fetched_cells,
    num_fetched, counters, head, num_heads, num_groups, num_cells, step,
    LAGGED: tl.constexpr, TILE: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Cells of what all groups miss for a KV head."""
    group = tl.arange(0, BLOCK_G)
    counted = group_counts_ptr + (group * num_heads + head) * 3
    wanted = tl.load(counted, mask=group < num_groups, other=0, cache_modifier=".cg")
    missing = tl.load(counted + 1, mask=group < num_groups, other=0, cache_modifier=".cg")
    ends = tl.cumsum(missing, axis=0)
    total = tl.sum(missing, axis=0)
    given = 0
    if total > 0:
        tl.store(counted + 2, ends)
        of_age = tl.zeros([AGES], tl.int32)
        for begin in range(0, num_cells, TILE):
            age, _ = _ages(page_of_cell, stamps, begin + tl.arange(0, TILE), num_cells, step)
            of_age += tl.histogram(age, AGES)
        age_bin = tl.arange(0, AGES)
        of_age = tl.where(age_bin == 0, 0, of_age)
        evictable = tl.sum(of_age, axis=0)
        at_least = evictable - tl.cumsum(of_age, axis=0) + of_age
        # The greatest age such that enough cells have it or a greater one.
        threshold = tl.max(tl.where((at_least >= total) & (age_bin > 0), age_bin, 1), axis=0)
        given = tl.minimum(total, evictable)
        ties_wanted = given - tl.sum(tl.where(age_bin > threshold, of_age, 0), axis=0)
        taken_before = 0
        ties_before = 0
        for begin in range(0, num_cells, TILE):
            cell = begin + tl.arange(0, TILE)
            age, page = _ages(page_of_cell, stamps, cell, num_cells, step)
            tie = (age == threshold).to(tl.int32)
            taken = (age > threshold) | ((tie > 0) & (ties_before + tl.cumsum(tie, axis=0) <= ties_wanted))
            place = taken_before + tl.cumsum(taken.to(tl.int32), axis=0) - 1
            tl.store(cell_of_page + page, -1, mask=taken & (page >= 0))
            tl.store(fetched_cells + place, cell, mask=taken)
            taken_before += tl.sum(taken.to(tl.int32), axis=0)
            ties_before += tl.sum(tie, axis=0)
        tl.debug_barrier()
        for begin in range(0, given, TILE):
            rank = begin + tl.arange(0, TILE)
            there = rank < given
            # Which group's, and which of its missing pages: a search among the groups' ends.
            of = tl.zeros([TILE], tl.int32)
            before = tl.zeros([TILE], tl.int32)
            step_of = BLOCK_G // 2
            while step_of > 0:
                end = tl.load(group_counts_ptr + ((of + step_of - 1) * num_heads + head) * 3 + 2)
                before = tl.where(end <= rank, end, before)
                of += tl.where(end <= rank, step_of, 0)
                step_of //= 2
            fields = groups_ptr + of * GROUP_FIELDS
            list_begin = tl.load(fields + 2, mask=there, other=0) + head * tl.load(fields + 3, mask=there, other=0)
            missed = missing_ptr + list_begin + rank - before
            page = tl.load(missed, mask=there, other=0, cache_modifier=".cg")
            cell = tl.load(fetched_cells + rank, mask=there, other=0)
            tl.store(cell_of_page + page, cell, mask=there)
            tl.store(page_of_cell + cell, page, mask=there)
            tl.store(stamps + cell, step, mask=there)
            tl.store(fetched_pages + rank, page, mask=there)
    tl.store(num_fetched, given)
    missed_pages = total if LAGGED else total - given
    tl.store(counters, tl.load(counters) + tl.sum(wanted, axis=0))
    tl.store(counters + 1, tl.load(counters + 1) + given)
    tl.store(counters + 2, tl.load(counters + 2) + missed_pages)


@triton.jit
def look_up_kernel(
    groups_ptr,  # int64 [max_groups, GROUP_FIELDS]
    host_pages_ptr,  # int32 [arena], the groups' tables
    positions_ptr, slots_ptr,  # int32 arenas of lists; written with LAGGED
    counts_ptr,  # int32 [rows, num_kv_heads]; written with LAGGED
    cell_of_page_ptr,  # int32 [num_kv_heads, num_pages], as all that follows of the set
    page_of_cell_ptr, stamps_ptr,  # int32 [num_kv_heads, num_cells]
    fetched_pages_ptr, fetched_cells_ptr,  # int32 [num_kv_heads, num_cells], written
    num_fetched_ptr, steps_ptr,  # int32 [num_kv_heads]
    counters_ptr,  # int64 [num_kv_heads, 3]
    missing_ptr,  # int32, an arena like the lists': missing pages
    group_counts_ptr,  # int32 [BLOCK_G, num_kv_heads, 3]: wanted and missing pages, and these of all groups up to it
    arrived_ptr,  # int32 [num_kv_heads], 0 before and behind
    num_pages, num_cells, resident_begin,
    LAGGED: tl.constexpr, TILE: tl.constexpr, BLOCK_G: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Program (group, KV head): what the group's list wants and misses. The last one of a KV head assigns cells.

    Nobody waits. Groups that are not there have no program, but one that says so where there are none.
    """
    group = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    wait_for_the_kernel_before(OVERLAPPED)
    num_groups = tl.load(groups_ptr + GROUP_FIELDS - 1).to(tl.int32)
    num_programs = tl.maximum(num_groups, 1)
    if group < num_programs:
        list_begin, count, table_begin, count_at = _list_of(groups_ptr, counts_ptr, group, head, num_heads)
        positions = positions_ptr + list_begin
        pages = host_pages_ptr + table_begin
        missing_pages = missing_ptr + list_begin
        cell_of_page = cell_of_page_ptr + head * num_pages
        stamps = stamps_ptr + head * num_cells
        step = tl.load(steps_ptr + head, cache_modifier=".cg")
        wanted = 0
        missing = 0
        for begin in range(0, count, TILE):
            at = begin + tl.arange(0, TILE)
            there = at < count
            own = tl.load(positions + at, mask=there, other=0, cache_modifier=".cg") // PAGE
            before = tl.load(positions + at - 1, mask=there & (at > 0), other=-PAGE, cache_modifier=".cg") // PAGE
            first = there & (own != before)
            page = tl.load(pages + own, mask=first, other=0)
            cell = tl.load(cell_of_page + page, mask=first, other=0, cache_modifier=".cg")
            tl.store(stamps + cell, step, mask=first & (cell >= 0))
            missed = (first & (cell < 0)).to(tl.int32)
            tl.store(missing_pages + missing + tl.cumsum(missed, axis=0) - 1, page, mask=missed > 0)
            missing += tl.sum(missed, axis=0)
            wanted += tl.sum(first.to(tl.int32), axis=0)
        if LAGGED:
            tl.debug_barrier()
            kept = _rewrite(positions, slots_ptr + list_begin, count, pages, cell_of_page, resident_begin, TILE)
            if num_groups > 0:
                tl.store(count_at, kept)
        counted = group_counts_ptr + (group * num_heads + head) * 3
        tl.store(counted, wanted)
        tl.store(counted + 1, missing)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + head, 1, sem="acq_rel", scope="gpu") == num_programs - 1:
            tl.debug_barrier()
            tl.store(arrived_ptr + head, 0)
            tl.store(steps_ptr + head, step + 1)
            at = head * num_cells
            _assign(
                groups_ptr, group_counts_ptr, missing_ptr, cell_of_page, page_of_cell_ptr + at, stamps,
                fetched_pages_ptr + at, fetched_cells_ptr + at, num_fetched_ptr + head, counters_ptr + head * 3,
                head, num_heads, num_programs, num_cells, step, LAGGED, TILE, BLOCK_G,
            )  # fmt: skip


@triton.jit
def _copy_page(source, target, SOURCE_STRIDE: tl.constexpr, TARGET_STRIDE: tl.constexpr, WORDS: tl.constexpr,
               BLOCK_W: tl.constexpr):  # fmt: skip
    """Load a page of one KV head [PAGE, BLOCK_W]; where it goes, and which words there are."""
    row = tl.arange(0, PAGE)[:, None]
    word = tl.arange(0, BLOCK_W)[None, :]
    there = (row >= 0) & (word < WORDS)
    # Of the host: the first level of caches would not see that it changed.
    words = tl.load(source + row * SOURCE_STRIDE + word, mask=there, cache_modifier=".cg")
    return words, target + row * TARGET_STRIDE + word, there


@triton.jit
def fetch_kernel(
    host_k_ptr, host_v_ptr,  # int32 words [host_rows, num_kv_heads, words]
    pool_k_ptr, pool_v_ptr,  # the same of the pool, rows of cells written
    fetched_pages_ptr, fetched_cells_ptr,  # int32 [num_kv_heads, num_cells]
    num_fetched_ptr,  # int32 [num_kv_heads]
    head_map_ptr,  # int32 [num_kv_heads], with HAS_MAP
    groups_ptr, host_pages_ptr, positions_ptr, slots_ptr, counts_ptr, cell_of_page_ptr,  # of `look_up_kernel`
    num_heads, num_pages, num_cells, resident_begin, num_copying,
    K_WORDS: tl.constexpr, V_WORDS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    HOST_K_STRIDE: tl.constexpr, HOST_V_STRIDE: tl.constexpr, POOL_K_STRIDE: tl.constexpr,
    POOL_V_STRIDE: tl.constexpr, HAS_MAP: tl.constexpr, REWRITES: tl.constexpr, TILE: tl.constexpr,
    BLOCK_H: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """The first `num_copying` programs copy pages in turns; with REWRITES each other one, of (group, KV head), makes
    slots of a list.
    """
    program = tl.program_id(0)
    wait_for_the_kernel_before(OVERLAPPED)
    if program < num_copying:
        heads = tl.arange(0, BLOCK_H)
        of_heads = heads
        if HAS_MAP:
            of_heads = tl.load(head_map_ptr + heads, mask=heads < num_heads, other=0)
        fetched = tl.load(num_fetched_ptr + of_heads, mask=heads < num_heads, other=0, cache_modifier=".cg")
        ends = tl.cumsum(fetched, axis=0)
        for item in range(program, tl.sum(fetched, axis=0), num_copying):
            head = tl.sum((ends <= item).to(tl.int32), axis=0)
            of = tl.sum(tl.where(heads == head, of_heads, 0), axis=0).to(tl.int64)
            rank = item - tl.sum(tl.where(heads < head, fetched, 0), axis=0)
            at = of * num_cells + rank
            page = tl.load(fetched_pages_ptr + at, cache_modifier=".cg").to(tl.int64) * PAGE
            cell = resident_begin + tl.load(fetched_cells_ptr + at, cache_modifier=".cg").to(tl.int64) * PAGE
            k, to_k, k_there = _copy_page(
                host_k_ptr + page * HOST_K_STRIDE + head * K_WORDS, pool_k_ptr + cell * POOL_K_STRIDE + head * K_WORDS,
                HOST_K_STRIDE, POOL_K_STRIDE, K_WORDS, BLOCK_K,
            )  # fmt: skip
            v, to_v, v_there = _copy_page(
                host_v_ptr + page * HOST_V_STRIDE + head * V_WORDS, pool_v_ptr + cell * POOL_V_STRIDE + head * V_WORDS,
                HOST_V_STRIDE, POOL_V_STRIDE, V_WORDS, BLOCK_V,
            )  # fmt: skip
            tl.store(to_k, k, mask=k_there)
            tl.store(to_v, v, mask=v_there)
    elif REWRITES:
        group = (program - num_copying) // num_heads
        head = ((program - num_copying) % num_heads).to(tl.int64)
        if group < tl.load(groups_ptr + GROUP_FIELDS - 1):
            begin, count, table_begin, count_at = _list_of(groups_ptr, counts_ptr, group, head, num_heads)
            kept = _rewrite(
                positions_ptr + begin, slots_ptr + begin, count, host_pages_ptr + table_begin,
                cell_of_page_ptr + head * num_pages, resident_begin, TILE,
            )  # fmt: skip
            tl.store(count_at, kept)
