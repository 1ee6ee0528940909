"""Triton kernels of residents: which tokens get which cells, with lists of slots, and the copy of these.

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
    """Of a group and KV head: (where its list begins, tokens, where its table begins)."""
    fields = groups_ptr + group * GROUP_FIELDS
    begin = tl.load(fields + 2) + head * tl.load(fields + 3)
    listed = tl.load(counts_ptr + tl.load(fields) * num_heads + head, cache_modifier=".cg")
    return begin, tl.minimum(listed, tl.load(fields + 4).to(tl.int32)), tl.load(fields + 1)


@triton.jit
def _row_of(position, pages, there):
    """Rows of the host's pool of positions."""
    return tl.load(pages + position // PAGE, mask=there, other=0) * PAGE + position % PAGE


@triton.jit
def _ages(row_of_cell, stamps, cell, num_cells, step):
    """Ages [TILE] of cells, as `reference.ages`; 0 of what is none."""
    inside = cell < num_cells
    row = tl.load(row_of_cell + cell, mask=inside, other=0, cache_modifier=".cg")
    stamp = tl.load(stamps + cell, mask=inside, other=0, cache_modifier=".cg")
    age = step - stamp
    age = tl.where((age < 0) | (age > OLDEST), OLDEST, age)
    return tl.where(inside, tl.where(row < 0, FREE, age), 0), row


@triton.jit
def _assign(
    groups_ptr, group_counts_ptr, missing_ptr, slots_ptr, cell_of_row, row_of_cell, stamps, fetched_rows,
    fetched_cells, num_fetched, counters, head, num_heads, num_groups, num_cells, resident_begin, step,
    TILE: tl.constexpr, CELL_TILE: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Cells, and slots, of what all groups miss for a KV head. There are as many cells as a step can want."""
    group = tl.arange(0, BLOCK_G)
    counted = group_counts_ptr + (group * num_heads + head) * 3
    wanted = tl.load(counted, mask=group < num_groups, other=0, cache_modifier=".cg")
    missing = tl.load(counted + 1, mask=group < num_groups, other=0, cache_modifier=".cg")
    ends = tl.cumsum(missing, axis=0)
    total = tl.sum(missing, axis=0)
    if total > 0:
        tl.store(counted + 2, ends)
        of_age = tl.zeros([AGES], tl.int32)
        for begin in range(0, num_cells, CELL_TILE):
            age, _ = _ages(row_of_cell, stamps, begin + tl.arange(0, CELL_TILE), num_cells, step)
            of_age += tl.histogram(age, AGES)
        age_bin = tl.arange(0, AGES)
        at_least = tl.sum(of_age, axis=0) - tl.cumsum(of_age, axis=0) + of_age
        # The greatest age such that enough cells have it or a greater one: above 0, which wanted cells have.
        threshold = tl.max(tl.where(at_least >= total, age_bin, 1), axis=0)
        ties_wanted = total - tl.sum(tl.where(age_bin > threshold, of_age, 0), axis=0)
        taken_before = 0
        ties_before = 0
        begin = 0
        while (taken_before < total) & (begin < num_cells):
            cell = begin + tl.arange(0, CELL_TILE)
            age, row = _ages(row_of_cell, stamps, cell, num_cells, step)
            tie = (age == threshold).to(tl.int32)
            taken = (age > threshold) | ((tie > 0) & (ties_before + tl.cumsum(tie, axis=0) <= ties_wanted))
            place = taken_before + tl.cumsum(taken.to(tl.int32), axis=0) - 1
            tl.store(cell_of_row + row, -1, mask=taken & (row >= 0))
            tl.store(fetched_cells + place, cell, mask=taken)
            taken_before += tl.sum(taken.to(tl.int32), axis=0)
            ties_before += tl.sum(tie, axis=0)
            begin += CELL_TILE
        tl.debug_barrier()
        for begin in range(0, total, TILE):
            rank = begin + tl.arange(0, TILE)
            there = rank < total
            # Which group's, and which of its missing tokens: a search among the groups' ends.
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
            entry = tl.load(missing_ptr + list_begin + rank - before, mask=there, other=0, cache_modifier=".cg")
            slot = slots_ptr + list_begin + entry
            row = tl.load(slot, mask=there, other=0, cache_modifier=".cg")
            cell = tl.load(fetched_cells + rank, mask=there, other=0)
            tl.store(slot, resident_begin + cell, mask=there)
            tl.store(cell_of_row + row, cell, mask=there)
            tl.store(row_of_cell + cell, row, mask=there)
            tl.store(stamps + cell, step, mask=there)
            tl.store(fetched_rows + rank, row, mask=there)
    tl.store(num_fetched, total)
    tl.store(counters, tl.load(counters) + tl.sum(wanted, axis=0))
    tl.store(counters + 1, tl.load(counters + 1) + total)


@triton.jit
def look_up_kernel(
    groups_ptr,  # int64 [max_groups, GROUP_FIELDS]
    host_pages_ptr,  # int32 [arena], the groups' tables
    positions_ptr,  # int32 arena of lists
    slots_ptr,  # int32, an arena like it, written
    counts_ptr,  # int32 [rows, num_kv_heads]
    cell_of_row_ptr,  # int32 [num_kv_heads, num_rows], as all that follows of the set
    row_of_cell_ptr, stamps_ptr,  # int32 [num_kv_heads, num_cells]
    fetched_rows_ptr, fetched_cells_ptr,  # int32 [num_kv_heads, num_cells], written
    num_fetched_ptr, steps_ptr,  # int32 [num_kv_heads]
    counters_ptr,  # int64 [num_kv_heads, 2]
    missing_ptr,  # int32, an arena like the lists': which entries of a list are missing
    group_counts_ptr,  # int32 [BLOCK_G, num_kv_heads, 3]: wanted and missing tokens, and these of all groups up to it
    arrived_ptr,  # int32 [num_kv_heads], 0 before and behind
    num_rows, num_cells, resident_begin,
    TILE: tl.constexpr, CELL_TILE: tl.constexpr, BLOCK_G: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Program (group, KV head): what the group's list wants and misses. The last one of a KV head assigns cells.

    Nobody waits. Groups that are not there have no program, but one that says so where there are none. Until it has a
    cell, the slot of a missing token is its row.
    """
    group = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    wait_for_the_kernel_before(OVERLAPPED)
    num_groups = tl.load(groups_ptr + GROUP_FIELDS - 1).to(tl.int32)
    num_programs = tl.maximum(num_groups, 1)
    if group < num_programs:
        list_begin, count, table_begin = _list_of(groups_ptr, counts_ptr, group, head, num_heads)
        positions = positions_ptr + list_begin
        slots = slots_ptr + list_begin
        pages = host_pages_ptr + table_begin
        missing_entries = missing_ptr + list_begin
        cell_of_row = cell_of_row_ptr + head * num_rows
        stamps = stamps_ptr + head * num_cells
        step = tl.load(steps_ptr + head, cache_modifier=".cg")
        missing = 0
        for begin in range(0, count, TILE):
            at = begin + tl.arange(0, TILE)
            there = at < count
            row = _row_of(tl.load(positions + at, mask=there, other=0, cache_modifier=".cg"), pages, there)
            cell = tl.load(cell_of_row + row, mask=there, other=0, cache_modifier=".cg")
            resident = there & (cell >= 0)
            tl.store(stamps + cell, step, mask=resident)
            missed = there & (cell < 0)
            tl.store(missing_entries + missing + tl.cumsum(missed.to(tl.int32), axis=0) - 1, at, mask=missed)
            missing += tl.sum(missed.to(tl.int32), axis=0)
            tl.store(slots + at, tl.where(resident, resident_begin + cell, row), mask=there)
        counted = group_counts_ptr + (group * num_heads + head) * 3
        tl.store(counted, count)
        tl.store(counted + 1, missing)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + head, 1, sem="acq_rel", scope="gpu") == num_programs - 1:
            tl.debug_barrier()
            tl.store(arrived_ptr + head, 0)
            tl.store(steps_ptr + head, step + 1)
            at_cells = head * num_cells
            _assign(
                groups_ptr, group_counts_ptr, missing_ptr, slots_ptr, cell_of_row, row_of_cell_ptr + at_cells, stamps,
                fetched_rows_ptr + at_cells, fetched_cells_ptr + at_cells, num_fetched_ptr + head,
                counters_ptr + head * 2, head, num_heads, num_programs, num_cells, resident_begin, step,
                TILE, CELL_TILE, BLOCK_G,
            )  # fmt: skip


@triton.jit
def fetch_kernel(
    host_ptr,  # int32 words [num_host_pages, num_kv_heads, PAGE, K_WORDS + V_WORDS]
    pool_k_ptr, pool_v_ptr,  # int32 words [pool_rows, num_kv_heads, words], rows of cells written
    fetched_rows_ptr, fetched_cells_ptr,  # int32 [num_kv_heads, num_cells]
    num_fetched_ptr,  # int32 [num_kv_heads]
    head_map_ptr,  # int32 [num_kv_heads], with HAS_MAP
    num_heads, num_cells, resident_begin,
    K_WORDS: tl.constexpr, V_WORDS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    POOL_K_STRIDE: tl.constexpr, POOL_V_STRIDE: tl.constexpr, HAS_MAP: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Programs copy so many tokens of a KV head at once, in turns."""
    wait_for_the_kernel_before(OVERLAPPED)
    heads = tl.arange(0, BLOCK_H)
    of_heads = heads
    if HAS_MAP:
        of_heads = tl.load(head_map_ptr + heads, mask=heads < num_heads, other=0)
    fetched = tl.load(num_fetched_ptr + of_heads, mask=heads < num_heads, other=0, cache_modifier=".cg")
    items = tl.cdiv(fetched, TOKENS)
    ends = tl.cumsum(items, axis=0)
    word_k = tl.arange(0, BLOCK_K)[None, :]
    word_v = tl.arange(0, BLOCK_V)[None, :]
    for item in range(tl.program_id(0), tl.sum(items, axis=0), tl.num_programs(0)):
        head = tl.sum((ends <= item).to(tl.int32), axis=0)
        of = tl.sum(tl.where(heads == head, of_heads, 0), axis=0).to(tl.int64)
        rank = (item - tl.sum(tl.where(heads < head, items, 0), axis=0)) * TOKENS + tl.arange(0, TOKENS)
        there = rank < tl.sum(tl.where(heads == head, fetched, 0), axis=0)
        at = of * num_cells + rank
        row = tl.load(fetched_rows_ptr + at, mask=there, other=0, cache_modifier=".cg").to(tl.int64)[:, None]
        cell = tl.load(fetched_cells_ptr + at, mask=there, other=0, cache_modifier=".cg").to(tl.int64)[:, None]
        cell += resident_begin
        from_host = host_ptr + ((row // PAGE * num_heads + head) * PAGE + row % PAGE) * (K_WORDS + V_WORDS)
        k_there = there[:, None] & (word_k < K_WORDS)
        v_there = there[:, None] & (word_v < V_WORDS)
        # Of the host: the first level of caches would not see that it changed.
        k = tl.load(from_host + word_k, mask=k_there, cache_modifier=".cg")
        v = tl.load(from_host + K_WORDS + word_v, mask=v_there, cache_modifier=".cg")
        tl.store(pool_k_ptr + cell * POOL_K_STRIDE + head * K_WORDS + word_k, k, mask=k_there)
        tl.store(pool_v_ptr + cell * POOL_V_STRIDE + head * V_WORDS + word_v, v, mask=v_there)
