"""Lists of slots, out of the table that says at which slot each request's tokens lie.

Each operation has two implementations: `reference` in torch, and `triton`, on a GPU or in Triton's interpreter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.launching import block_of, launch, runs_triton
from prefix_kernels.types import check_table

LIST_FIELDS = 5
_BLOCK = 1024
_PARTS = 16
"""Programs of a list: 128K entries are eight rounds of blocks."""
_NOT_YET = 2**31 - 1


def copy_slot_lists(
    table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    lists: Tensor,
    slots: Tensor,
    counts: Tensor,
    *,
    implementation: str | None = None,
) -> None:
    """Copy stretches of some requests' rows of the table into an arena, and say how long each became.

    slots[at : at + n] = table[rows[r], first : first + n], with n = clamp(end - first, 0, capacity). A stretch that
    ends with its request's sequence is as long as the device says: the host need not know. The Triton form allocates
    nothing and waits for nothing.

    Args:
        table: [num_table_rows, max_len] int32, slot of each position of each request. Read only.
        rows: [batch_size] int32 or int64, row of the table of each request of the batch.
        seq_lens: [batch_size] int32 or int64, tokens of each request.
        lists: [num_lists, 5] int32: batch row r; first position; end position, or -1 for the request's `seq_lens`;
            where in `slots` the list begins (at); entries that it may have there (capacity).
        slots: [arena_size] int32, written.
        counts: [num_lists or more, num_kv_heads] int32, contiguous; row i is written with the entries of list i.
        implementation: "reference" or "triton"; None: Triton on a GPU, else the reference.

    Raises:
        ValueError: tensors of another shape or dtype, or an unknown implementation. What `lists` holds is not checked:
            that would wait for the device.
    """
    triton = runs_triton("copy_slot_lists", implementation, table.device)
    _check_table(table, rows, seq_lens)
    check_table("lists", lists, (len(lists), LIST_FIELDS))
    check_table("slots", slots, (slots.numel(),))
    check_table("counts", counts, (max(len(lists), len(counts)), counts.shape[1]))
    if not triton:
        for i, (row, first, end, at, capacity) in enumerate(lists.tolist()):
            last = int(seq_lens[row]) if end < 0 else end
            n = max(0, min(last - first, capacity))
            slots[at : at + n] = table[int(rows[row]), first : first + n]
            counts[i] = n
        return
    from prefix_kernels.slot_lists.kernels import copy_slot_lists_kernel

    arguments = {
        "table_ptr": table,
        "rows_ptr": rows,
        "seq_lens_ptr": seq_lens,
        "lists_ptr": lists,
        "slots_ptr": slots,
        "counts_ptr": counts,
        "table_stride": table.stride(0),
        "num_kv_heads": counts.shape[1],
        "BLOCK": _BLOCK,
        "BLOCK_H": block_of(counts.shape[1]),
    }
    launch(copy_slot_lists_kernel, (lists.shape[0], _PARTS), arguments, num_warps=4)


def common_slots(
    table: Tensor, rows: Tensor, seq_lens: Tensor, which: int, out: Tensor, *, implementation: str | None = None
) -> None:
    """Leading positions at which a request of the batch has the very slots of each other one.

    out[i] = least p with table[rows[which], p] != table[rows[i], p], at most both lengths. Slots, not tokens: equal
    tokens may lie at different slots, and then nothing is shared.

    Args:
        table, rows, seq_lens: as for `copy_slot_lists`.
        which: batch row that is compared with all of them.
        out: [batch_size] int32, written. Its own entry is its own length.
        implementation: "reference" or "triton"; None: Triton on a GPU, else the reference.

    Raises:
        ValueError: tensors of another shape or dtype, `which` out of range, or an unknown implementation.
    """
    triton = runs_triton("common_slots", implementation, table.device)
    _check_table(table, rows, seq_lens)
    if not 0 <= which < len(rows):
        raise ValueError(f"expected a batch row below {len(rows)}, got {which}")
    check_table("out", out, tuple(rows.shape))
    if not triton:
        own = table[int(rows[which])]
        for i, row in enumerate(rows.tolist()):
            n = min(int(seq_lens[i]), int(seq_lens[which]))
            differs = (own[:n] != table[row, :n]).nonzero()
            out[i] = int(differs[0]) if len(differs) else n
        return
    from prefix_kernels.slot_lists.kernels import common_slots_kernel

    out.fill_(_NOT_YET)
    arguments = {
        "table_ptr": table,
        "rows_ptr": rows,
        "seq_lens_ptr": seq_lens,
        "out_ptr": out,
        "which": which,
        "table_stride": table.stride(0),
        "BLOCK": _BLOCK,
    }
    launch(common_slots_kernel, (rows.shape[0], _PARTS), arguments, num_warps=4)


def _check_table(table: Tensor, rows: Tensor, seq_lens: Tensor) -> None:
    if table.dim() != 2 or table.dtype is not torch.int32 or table.stride(1) != 1:
        raise ValueError(
            f"expected table [num_table_rows, max_len] int32 with adjacent positions, got {tuple(table.shape)} "
            f"{table.dtype}"
        )
    for name, tensor in (("rows", rows), ("seq_lens", seq_lens)):
        good = tensor.dtype in (torch.int32, torch.int64) and tensor.dim() == 1 and tensor.is_contiguous()
        if not good or tensor.shape != rows.shape:
            raise ValueError(
                f"expected {name} [batch_size={len(rows)}] int32 or int64, got {tuple(tensor.shape)} {tensor.dtype}"
            )
