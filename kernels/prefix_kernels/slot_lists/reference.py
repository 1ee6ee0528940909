"""References of `copy_slot_lists` and `common_slots`: list by list, pair by pair."""

from __future__ import annotations

from torch import Tensor


def copy_slot_lists_reference(
    table: Tensor, rows: Tensor, seq_lens: Tensor, lists: Tensor, slots: Tensor, counts: Tensor
) -> None:
    """slots[at : at + n] = table[rows[r], first : first + n], with n = clamp(end - first, 0, capacity)."""
    for i, (row, first, end, at, capacity) in enumerate(lists.tolist()):
        last = int(seq_lens[row]) if end < 0 else end
        n = max(0, min(last - first, capacity))
        slots[at : at + n] = table[int(rows[row]), first : first + n]
        counts[i] = n


def common_slots_reference(table: Tensor, rows: Tensor, seq_lens: Tensor, which: int, out: Tensor) -> None:
    """out[i] = least p with table[rows[which], p] != table[rows[i], p], at most both lengths."""
    own = table[int(rows[which])]
    for i, row in enumerate(rows.tolist()):
        n = min(int(seq_lens[i]), int(seq_lens[which]))
        differs = (own[:n] != table[row, :n]).nonzero()
        out[i] = int(differs[0]) if len(differs) else n
