"""Triton kernels of slot lists: one that copies stretches of the table, one that compares its rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_slot_lists_kernel(
    table_ptr,  # int32 [num_table_rows, max_len]
    rows_ptr,  # [batch_size]
    seq_lens_ptr,  # [batch_size]
    lists_ptr,  # int32 [num_lists, 5]: batch row, first position, end position or -1, where it begins, capacity
    slots_ptr,  # int32 [arena_size]
    counts_ptr,  # int32 [num_lists, num_kv_heads]
    table_stride, num_kv_heads, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Program (list, part): every num_programs(1)-th block of the list."""
    index = tl.program_id(0)
    part = tl.program_id(1)
    fields = lists_ptr + index * 5
    row = tl.load(fields)
    first = tl.load(fields + 1)
    end = tl.load(fields + 2)
    capacity = tl.load(fields + 4)
    if end < 0:
        end = tl.load(seq_lens_ptr + row).to(tl.int32)
    count = tl.maximum(tl.minimum(end - first, capacity), 0)
    source = table_ptr + tl.load(rows_ptr + row).to(tl.int64) * table_stride + first
    target = slots_ptr + tl.load(fields + 3).to(tl.int64)
    for begin in range(part * BLOCK, count, tl.num_programs(1) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)
    if part == 0:
        head = tl.arange(0, BLOCK_H)
        tl.store(counts_ptr + index * num_kv_heads + head, head * 0 + count, mask=head < num_kv_heads)


@triton.jit(do_not_specialize=["which"])
def common_slots_kernel(
    table_ptr,  # int32 [num_table_rows, max_len]
    rows_ptr,  # [batch_size]
    seq_lens_ptr,  # [batch_size]
    out_ptr,  # int32 [batch_size], at least every sequence's length before
    which, table_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (request, part): the first difference of its stretch, by atomic minimum. Stretches come in order, so a
    program stops where an earlier one has found a difference.
    """
    index = tl.program_id(0)
    part = tl.program_id(1)
    own_len = tl.load(seq_lens_ptr + which).to(tl.int32)
    length = tl.minimum(own_len, tl.load(seq_lens_ptr + index).to(tl.int32))
    own = table_ptr + tl.load(rows_ptr + which).to(tl.int64) * table_stride
    other = table_ptr + tl.load(rows_ptr + index).to(tl.int64) * table_stride
    least = length
    for begin in range(part * BLOCK, length, tl.num_programs(1) * BLOCK):
        if least >= begin:
            at = begin + tl.arange(0, BLOCK)
            mask = at < length
            differs = tl.load(own + at, mask=mask, other=0) != tl.load(other + at, mask=mask, other=0)
            least = tl.minimum(least, tl.min(tl.where(differs, at, length), axis=0))
    tl.atomic_min(out_ptr + index, least)
