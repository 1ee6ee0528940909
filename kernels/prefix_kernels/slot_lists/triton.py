"""Triton forms of `copy_slot_lists` and `common_slots`."""

from __future__ import annotations

from torch import Tensor

from prefix_kernels.launching import block_of, launch
from prefix_kernels.slot_lists.kernels import common_slots_kernel, copy_slot_lists_kernel

_BLOCK = 1024
_PARTS = 16
"""Programs of a list: 128K entries are eight rounds of blocks."""
_NOT_YET = 2**31 - 1


def copy_slot_lists_triton(
    table: Tensor, rows: Tensor, seq_lens: Tensor, lists: Tensor, slots: Tensor, counts: Tensor
) -> None:
    """As the reference."""
    launch(
        copy_slot_lists_kernel,
        (lists.shape[0], _PARTS),
        {
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
        },
        num_warps=4,
    )


def common_slots_triton(table: Tensor, rows: Tensor, seq_lens: Tensor, which: int, out: Tensor) -> None:
    """As the reference."""
    out.fill_(_NOT_YET)
    launch(
        common_slots_kernel,
        (rows.shape[0], _PARTS),
        {
            "table_ptr": table,
            "rows_ptr": rows,
            "seq_lens_ptr": seq_lens,
            "out_ptr": out,
            "which": which,
            "table_stride": table.stride(0),
            "BLOCK": _BLOCK,
        },
        num_warps=4,
    )
