"""Public `copy_slot_lists` and `common_slots`: validation and dispatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from prefix_kernels.dispatch import resolve
from prefix_kernels.slot_lists.reference import common_slots_reference, copy_slot_lists_reference

LIST_FIELDS = 5

_COPY: Mapping[str, Callable[..., None] | str] = {
    "reference": copy_slot_lists_reference,
    "triton": "prefix_kernels.slot_lists.triton:copy_slot_lists_triton",
}
_COMMON: Mapping[str, Callable[..., None] | str] = {
    "reference": common_slots_reference,
    "triton": "prefix_kernels.slot_lists.triton:common_slots_triton",
}


def copy_slot_lists(
    table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    lists: Tensor,
    slots: Tensor,
    counts: Tensor,
    *,
    implementation: str = "reference",
) -> None:
    """Copy stretches of some requests' rows of the table into an arena, and say how long each became.

    A stretch that ends with its request's sequence is as long as the device says: the host need not know. Nothing is
    allocated and nothing waits.

    Args:
        table: [num_table_rows, max_len] int32, slot of each position of each request. Read only.
        rows: [batch_size] int32 or int64, row of the table of each request of the batch.
        seq_lens: [batch_size] int32 or int64, tokens of each request.
        lists: [num_lists, 5] int32: batch row; first position; end position, or -1 for the request's `seq_lens`; where
            in `slots` the list begins; entries that it may have there.
        slots: [arena_size] int32, written.
        counts: [num_lists or more, num_kv_heads] int32, contiguous; row i is written with the entries of list i. Not
            negative, and at most what it may have.
        implementation: "reference" or "triton" (on a GPU, or in Triton's interpreter).

    Raises:
        ValueError: tensors of another shape or dtype, or an unknown implementation. What `lists` holds is not checked:
            that would wait for the device.
    """
    run = resolve("copy_slot_lists", implementation, _COPY)
    _check_table(table, rows, seq_lens)
    if lists.dim() != 2 or lists.shape[1] != LIST_FIELDS or lists.dtype is not torch.int32:
        raise ValueError(f"expected lists [num_lists, {LIST_FIELDS}] int32, got {tuple(lists.shape)} {lists.dtype}")
    if slots.dim() != 1 or slots.dtype is not torch.int32:
        raise ValueError(f"expected slots [arena_size] int32, got {tuple(slots.shape)} {slots.dtype}")
    if (
        counts.dim() != 2
        or counts.shape[0] < lists.shape[0]
        or counts.dtype is not torch.int32
        or not counts.is_contiguous()
    ):
        raise ValueError(
            f"expected counts [{lists.shape[0]} or more, num_kv_heads] int32 contiguous, got {tuple(counts.shape)} "
            f"{counts.dtype}"
        )
    run(table, rows, seq_lens, lists, slots, counts)


def common_slots(
    table: Tensor, rows: Tensor, seq_lens: Tensor, which: int, out: Tensor, *, implementation: str = "reference"
) -> None:
    """Leading positions at which a request of the batch has the very slots of each other one.

    Slots, not tokens: equal tokens may lie at different slots, and then nothing is shared.

    Args:
        table, rows, seq_lens: as for `copy_slot_lists`.
        which: batch row that is compared with all of them.
        out: [batch_size] int32, written: at most the shorter one's tokens. Its own entry is its own length.
        implementation: "reference" or "triton".

    Raises:
        ValueError: tensors of another shape or dtype, `which` out of range, or an unknown implementation.
    """
    run = resolve("common_slots", implementation, _COMMON)
    _check_table(table, rows, seq_lens)
    if not 0 <= which < len(rows):
        raise ValueError(f"expected a batch row below {len(rows)}, got {which}")
    if out.shape != rows.shape or out.dtype is not torch.int32 or not out.is_contiguous():
        raise ValueError(f"expected out {tuple(rows.shape)} int32 contiguous, got {tuple(out.shape)} {out.dtype}")
    run(table, rows, seq_lens, which, out)


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
