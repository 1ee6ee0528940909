"""The lists that a selection writes: their buffers, and what must hold of them before a launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SelectedLists:
    """The lists of all groups, in fixed device buffers. Owned by the receiver, written by `TopKSelection.run`.

    Attributes:
        positions: [max_groups, num_kv_heads, max_budget] int32, ascending within `counts`, then -1.
        counts: [max_groups, num_kv_heads] int32.
        slots: of the shape of `positions`, int32: the slots of those positions, then -1. None: not wanted.
    """

    positions: Tensor
    counts: Tensor
    slots: Tensor | None


def new_lists(shape: tuple[int, int, int], device: torch.device, *, with_slots: bool) -> SelectedLists:
    """Buffers [max_groups, num_kv_heads, max_budget] that hold no selection."""
    return SelectedLists(
        torch.full(shape, -1, dtype=torch.int32, device=device),
        torch.zeros(shape[:2], dtype=torch.int32, device=device),
        torch.full(shape, -1, dtype=torch.int32, device=device) if with_slots else None,
    )


def check_lists(lists: SelectedLists, shape: tuple[int, int, int], slot_table: Tensor | None, slots_end: int) -> None:
    """Raise unless the lists have this shape, and the table of slots reaches `slots_end`; slots both or none.

    Raises:
        ValueError: as said.
    """
    for name, tensor, wanted in (
        ("positions", lists.positions, shape),
        ("counts", lists.counts, shape[:2]),
        ("slots", lists.slots, shape),
    ):
        if tensor is None:
            continue
        if tuple(tensor.shape) != wanted or tensor.dtype is not torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"expected {name} {wanted} int32 contiguous, got {tuple(tensor.shape)} {tensor.dtype}; use new_lists()"
            )
    if (lists.slots is None) != (slot_table is None):
        raise ValueError("expected slots and slot_table both or none of them, got one; use new_lists(with_slots=...)")
    if slot_table is None:
        return
    good = slot_table.dim() == 1 and slot_table.dtype in (torch.int32, torch.int64)
    if not good or not slot_table.is_contiguous():
        raise ValueError(
            f"expected slot_table [arena] int32 or int64 contiguous, got {tuple(slot_table.shape)} "
            f"{slot_table.dtype} of strides {slot_table.stride()}"
        )
    if slot_table.shape[0] < slots_end:
        raise ValueError(f"expected a slot_table of {slots_end} entries, got {slot_table.shape[0]}")
