"""Triton kernels of residents: which tokens get which cells, with lists of slots, and the copy of these.

Three launches: programs look up tokens, count cells, and in the last one place tokens in cells, and copy. Those that
copy wait for those that place, which are put on the GPU before them, and have read their first tokens by then. What the
launch before wrote, which may still have been running, is read past the first level of caches.
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
GROUP_FIELDS = tl.constexpr(7)
"""int64 fields of a group: row of the counts, table_begin, list_begin, head_stride, most tokens of a list; and in
row 0 the number of all groups, and of the parts that each list is cut into."""


@triton.jit
def _part_of(groups_ptr, part, head):
    """Of a part and KV head: (its group's fields, where the list begins in the arena, where the part begins in the
    list, its tokens at most)."""
    parts = tl.load(groups_ptr + GROUP_FIELDS - 1).to(tl.int32)
    fields = groups_ptr + part // parts * GROUP_FIELDS
    list_begin = tl.load(fields + 2) + head * tl.load(fields + 3)
    size = tl.cdiv(tl.load(fields + 4).to(tl.int32), parts)
    return fields, list_begin, part % parts * size, size


@triton.jit
def _num_parts(groups_ptr):
    """Of all groups; of none it is one group's, of no tokens."""
    num_groups = tl.load(groups_ptr + GROUP_FIELDS - 2).to(tl.int32)
    return tl.maximum(num_groups, 1) * tl.load(groups_ptr + GROUP_FIELDS - 1).to(tl.int32)


@triton.jit
def _ages(row_of_cell, stamps, cell, end, step):
    """(Ages [TILE] of cells, as `reference.ages`; 0 of what is none, rows of the host that they hold)."""
    inside = cell < end
    row = tl.load(row_of_cell + cell, mask=inside, other=0, cache_modifier=".cg")
    stamp = tl.load(stamps + cell, mask=inside, other=0, cache_modifier=".cg")
    age = step - stamp
    age = tl.where((age < 0) | (age > OLDEST), OLDEST, age)
    return tl.where(inside, tl.where(row < 0, FREE, age), 0), row


@triton.jit
def look_up_kernel(
    groups_ptr,  # int64 [max_groups, GROUP_FIELDS]
    host_pages_ptr,  # int32 [arena], the groups' tables
    positions_ptr,  # int32 arena of lists
    slots_ptr,  # int32, an arena like it, written
    counts_ptr,  # int32 [rows, num_kv_heads]
    cell_of_row_ptr,  # int32 [num_kv_heads, num_rows] of the set
    stamps_ptr,  # int32 [num_kv_heads, num_cells] of the set
    steps_ptr,  # int32 [num_kv_heads] of the set
    missing_ptr,  # int32, an arena like the lists': from a part's begin on, which entries of the arena it misses
    part_counts_ptr,  # int32 [BLOCK_P, num_kv_heads, 2], written: wanted and missing tokens
    num_heads, num_rows, num_cells, resident_begin,
    TILE: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """What parts of the groups' lists want and miss, each of a KV head. The slot of a missing token is its row yet."""
    wait_for_the_kernel_before(OVERLAPPED)
    for item in range(tl.program_id(0), _num_parts(groups_ptr) * num_heads, tl.num_programs(0)):
        head = (item % num_heads).to(tl.int64)
        part = item // num_heads
        fields, list_begin, first, size = _part_of(groups_ptr, part, head)
        listed = tl.load(counts_ptr + tl.load(fields) * num_heads + head, cache_modifier=".cg")
        end = tl.minimum(first + size, tl.minimum(listed, tl.load(fields + 4).to(tl.int32)))
        pages = host_pages_ptr + tl.load(fields + 1)
        step = tl.load(steps_ptr + head, cache_modifier=".cg")
        missing = 0
        for begin in range(first, end, TILE):
            at = begin + tl.arange(0, TILE)
            there = at < end
            entry = list_begin + at
            position = tl.load(positions_ptr + entry, mask=there, other=0, cache_modifier=".cg")
            row = tl.load(pages + position // PAGE, mask=there, other=0) * PAGE + position % PAGE
            cell = tl.load(cell_of_row_ptr + head * num_rows + row, mask=there, other=0, cache_modifier=".cg")
            resident = there & (cell >= 0)
            missed = there & (cell < 0)
            tl.store(stamps_ptr + head * num_cells + cell, step, mask=resident)
            tl.store(slots_ptr + entry, tl.where(resident, resident_begin + cell, row), mask=there)
            place = list_begin + first + missing + tl.cumsum(missed.to(tl.int32), axis=0) - 1
            tl.store(missing_ptr + place, entry.to(tl.int32), mask=missed)
            missing += tl.sum(missed.to(tl.int32), axis=0)
        counted = part_counts_ptr + (part * num_heads + head) * 2
        tl.store(counted, tl.maximum(end - first, 0))
        tl.store(counted + 1, missing)


@triton.jit
def count_kernel(
    groups_ptr, part_counts_ptr, steps_ptr, missing_ptr, slots_ptr,  # as for `look_up_kernel`
    row_of_cell_ptr, stamps_ptr,  # int32 [num_kv_heads, num_cells] of the set
    ages_ptr,  # int32 [num_kv_heads, programs of a KV head, AGES], written where tokens are missing
    fetched_rows_ptr,  # int32 [num_kv_heads, num_cells] of the set, written
    fetched_entries_ptr,  # int32 [num_kv_heads, num_cells], written: entries of the arena of lists
    num_fetched_ptr,  # int32 [num_kv_heads] of the set, written
    now_ptr,  # int32 [num_kv_heads], written: the step, which ends while others read it
    placed_ptr,  # int32 [num_kv_heads] of the set: programs that have placed, of all steps
    all_placed_ptr,  # int32 [num_kv_heads], written: the same behind this step
    counters_ptr,  # int64 [num_kv_heads, 2] of the set
    num_heads, num_cells,
    TILE: tl.constexpr, CELL_TILE: tl.constexpr, BLOCK_P: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Program (KV head, stretch of its cells): how many cells there are of each age, and which tokens of some parts of
    lists come, by their ranks among all.
    """
    wait_for_the_kernel_before(OVERLAPPED)
    head = tl.program_id(0).to(tl.int64)
    stretch = tl.program_id(1)
    stretches = tl.num_programs(1)
    num_parts = _num_parts(groups_ptr)
    part = tl.arange(0, BLOCK_P)
    counted = part_counts_ptr + (part * num_heads + head) * 2
    wanted = tl.load(counted, mask=part < num_parts, other=0, cache_modifier=".cg")
    missing = tl.load(counted + 1, mask=part < num_parts, other=0, cache_modifier=".cg")
    step = tl.load(steps_ptr + head, cache_modifier=".cg")
    total = tl.sum(missing, axis=0)
    if stretch == 0:
        tl.store(now_ptr + head, step)
        tl.store(all_placed_ptr + head, tl.load(placed_ptr + head, cache_modifier=".cg") + stretches)
        tl.store(num_fetched_ptr + head, total)
        counters = counters_ptr + head * 2
        tl.store(counters, tl.load(counters, cache_modifier=".cg") + tl.sum(wanted, axis=0))
        tl.store(counters + 1, tl.load(counters + 1, cache_modifier=".cg") + total)
    if total > 0:
        size = tl.cdiv(num_cells, stretches)
        end = tl.minimum((stretch + 1) * size, num_cells)
        of_age = tl.zeros([AGES], tl.int32)
        for begin in range(stretch * size, end, CELL_TILE):
            cell = begin + tl.arange(0, CELL_TILE)
            age, _row = _ages(row_of_cell_ptr + head * num_cells, stamps_ptr + head * num_cells, cell, end, step)
            of_age += tl.histogram(age, AGES)
        tl.store(ages_ptr + (head * stretches + stretch) * AGES + tl.arange(0, AGES), of_age)
        for own in range(stretch, num_parts, stretches):
            _fields, list_begin, first, _size = _part_of(groups_ptr, own, head)
            rank_begin = head * num_cells + tl.sum(tl.where(part < own, missing, 0), axis=0)
            count = tl.sum(tl.where(part == own, missing, 0), axis=0)
            for begin in range(0, count, TILE):
                at = begin + tl.arange(0, TILE)
                there = at < count
                entry = tl.load(missing_ptr + list_begin + first + at, mask=there, other=0, cache_modifier=".cg")
                row = tl.load(slots_ptr + entry, mask=there, other=0, cache_modifier=".cg")
                tl.store(fetched_entries_ptr + rank_begin + at, entry, mask=there)
                tl.store(fetched_rows_ptr + rank_begin + at, row, mask=there)


@triton.jit
def _place(
    cell_of_row, row_of_cell, stamps, ages, fetched_cells, num_cells, total, step, stretch, stretches,
    CELL_TILE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Which cells of a stretch of a KV head's are taken: as many as a step can want are there. A cell that is taken and
    its token have the same rank among all.
    """
    other = tl.arange(0, BLOCK_S)[:, None]
    age_bin = tl.arange(0, AGES)
    counted = ages + other * AGES + age_bin[None, :]
    counts = tl.load(counted, mask=other < stretches, other=0, cache_modifier=".cg")
    of_age = tl.sum(counts, axis=0)
    before = tl.sum(tl.where(other < stretch, counts, 0), axis=0)
    at_least = tl.sum(of_age, axis=0) - tl.cumsum(of_age, axis=0) + of_age
    # The greatest age such that enough cells have it or a greater one: above 0, which wanted cells have.
    threshold = tl.max(tl.where(at_least >= total, age_bin, 1), axis=0)
    ties_wanted = total - tl.sum(tl.where(age_bin > threshold, of_age, 0), axis=0)
    ties_before = tl.sum(tl.where(age_bin == threshold, before, 0), axis=0)
    taken_before = tl.sum(tl.where(age_bin > threshold, before, 0), axis=0) + tl.minimum(ties_before, ties_wanted)
    size = tl.cdiv(num_cells, stretches)
    end = tl.minimum((stretch + 1) * size, num_cells)
    for begin in range(stretch * size, end, CELL_TILE):
        cell = begin + tl.arange(0, CELL_TILE)
        age, row = _ages(row_of_cell, stamps, cell, end, step)
        tie = (age == threshold).to(tl.int32)
        taken = (age > threshold) | ((tie > 0) & (ties_before + tl.cumsum(tie, axis=0) <= ties_wanted))
        place = taken_before + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(cell_of_row + row, -1, mask=taken & (row >= 0))
        tl.store(stamps + cell, step, mask=taken)
        tl.store(fetched_cells + place, cell, mask=taken)
        taken_before += tl.sum(taken.to(tl.int32), axis=0)
        ties_before += tl.sum(tie, axis=0)


@triton.jit
def fetch_kernel(
    host_ptr,  # int32 words [num_host_pages, num_kv_heads, PAGE, K_WORDS + V_WORDS]
    pool_k_ptr, pool_v_ptr,  # int32 words [pool_rows, num_kv_heads, words], rows of cells written
    fetched_rows_ptr, fetched_cells_ptr,  # int32 [num_kv_heads, num_cells]; of cells written where this launch places
    num_fetched_ptr,  # int32 [num_kv_heads]
    head_map_ptr,  # int32 [num_kv_heads], with HAS_MAP
    slots_ptr, cell_of_row_ptr, row_of_cell_ptr, stamps_ptr, steps_ptr, ages_ptr, fetched_entries_ptr,  # as above
    now_ptr, placed_ptr, all_placed_ptr,  # as for `count_kernel`
    num_heads, num_rows, num_cells, resident_begin, stretches,
    K_WORDS: tl.constexpr, V_WORDS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    POOL_K_STRIDE: tl.constexpr, POOL_V_STRIDE: tl.constexpr, HAS_MAP: tl.constexpr, PLACES: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_H: tl.constexpr, CELL_TILE: tl.constexpr, BLOCK_S: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Programs copy so many tokens of a KV head at once, in turns. First come those of all KV heads that come first:
    what is read at one time lies near in the host's pool, and addresses are translated faster. PLACES: so many programs
    before them find the cells; those have their tokens from now on, and lists their slots.
    """
    wait_for_the_kernel_before(OVERLAPPED)
    program = tl.program_id(0)
    if program < PLACES:
        placing = (program % num_heads).to(tl.int64)
        total = tl.load(num_fetched_ptr + placing, cache_modifier=".cg")
        step = tl.load(now_ptr + placing, cache_modifier=".cg")
        stretch = program // num_heads
        at_cells = placing * num_cells
        if total > 0:
            _place(
                cell_of_row_ptr + placing * num_rows, row_of_cell_ptr + at_cells, stamps_ptr + at_cells,
                ages_ptr + placing * stretches * AGES, fetched_cells_ptr + at_cells, num_cells, total, step, stretch,
                stretches, CELL_TILE, BLOCK_S,
            )  # fmt: skip
        if stretch == 0:
            tl.store(steps_ptr + placing, step + 1)
        # All threads' writes come before the word of one.
        tl.debug_barrier()
        tl.atomic_add(placed_ptr + placing, 1, sem="acq_rel", scope="gpu")
    else:
        heads = tl.arange(0, BLOCK_H)
        of_heads = heads
        if HAS_MAP:
            of_heads = tl.load(head_map_ptr + heads, mask=heads < num_heads, other=0)
        fetched = tl.load(num_fetched_ptr + of_heads, mask=heads < num_heads, other=0, cache_modifier=".cg")
        word_k = tl.arange(0, BLOCK_K)[None, :]
        word_v = tl.arange(0, BLOCK_V)[None, :]
        num_items = tl.cdiv(tl.max(fetched, axis=0), TOKENS) * num_heads
        for item in range(program - PLACES, num_items, tl.num_programs(0) - PLACES):
            head = item % num_heads
            of = tl.sum(tl.where(heads == head, of_heads, 0), axis=0).to(tl.int64)
            rank = item // num_heads * TOKENS + tl.arange(0, TOKENS)
            there = rank < tl.sum(tl.where(heads == head, fetched, 0), axis=0)
            at = of * num_cells + rank
            row = tl.load(fetched_rows_ptr + at, mask=there, other=0, cache_modifier=".cg").to(tl.int64)
            from_host = host_ptr + ((row // PAGE * num_heads + head) * PAGE + row % PAGE)[:, None] * (K_WORDS + V_WORDS)
            k_there = there[:, None] & (word_k < K_WORDS)
            v_there = there[:, None] & (word_v < V_WORDS)
            # Of the host: the first level of caches would not see that it changed.
            k = tl.load(from_host + word_k, mask=k_there, cache_modifier=".cg")
            v = tl.load(from_host + K_WORDS + word_v, mask=v_there, cache_modifier=".cg")
            if PLACES > 0:
                all_placed = tl.load(all_placed_ptr + of, cache_modifier=".cg")
                while tl.atomic_add(placed_ptr + of, 0, sem="acquire", scope="gpu") != all_placed:
                    pass
                tl.debug_barrier()
            cell = tl.load(fetched_cells_ptr + at, mask=there, other=0, cache_modifier=".cg").to(tl.int64)
            if PLACES > 0:
                entry = tl.load(fetched_entries_ptr + at, mask=there, other=0, cache_modifier=".cg")
                tl.store(slots_ptr + entry, (resident_begin + cell).to(tl.int32), mask=there)
                tl.store(cell_of_row_ptr + of * num_rows + row, cell.to(tl.int32), mask=there)
                tl.store(row_of_cell_ptr + of * num_cells + cell, row.to(tl.int32), mask=there)
            to_cell = (resident_begin + cell)[:, None]
            tl.store(pool_k_ptr + to_cell * POOL_K_STRIDE + head * K_WORDS + word_k, k, mask=k_there)
            tl.store(pool_v_ptr + to_cell * POOL_V_STRIDE + head * V_WORDS + word_v, v, mask=v_there)


@triton.jit
def gather_kernel(
    host_ptr,  # int32 words [num_host_pages, num_heads, PAGE, WORDS]
    host_pages_ptr,  # int32 [pages of the prefix]
    positions_ptr,  # int32 arena of lists
    head_map_ptr,  # int32 [num_heads], with HAS_MAP
    out_ptr,  # int32 words [num_tokens / PAGE or more, num_heads, PAGE, WORDS]
    list_begin, head_stride, num_tokens, num_heads,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, HAS_MAP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid: (KV heads, parts of a list): those of all heads that come first are read first, as by `fetch_kernel`."""
    head = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    word = tl.arange(0, BLOCK)[None, :]
    there = token < num_tokens
    of = head
    if HAS_MAP:
        of = tl.load(head_map_ptr + head)
    position = tl.load(positions_ptr + list_begin + of.to(tl.int64) * head_stride + token, mask=there, other=0)
    page = tl.load(host_pages_ptr + position // PAGE, mask=there, other=0).to(tl.int64)
    rows = ((page * num_heads + head) * PAGE + position % PAGE)[:, None] * WORDS
    to = ((token // PAGE * num_heads + head) * PAGE + token % PAGE)[:, None] * WORDS
    copied = there[:, None] & (word < WORDS)
    # Of the host: the first level of caches would not see that it changed.
    tl.store(out_ptr + to + word, tl.load(host_ptr + rows + word, mask=copied, cache_modifier=".cg"), mask=copied)
