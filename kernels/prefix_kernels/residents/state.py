"""What residents are: their sizes, the groups of a step, and the state on the device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from prefix_kernels.types import SelectionGroup

PAGE_TOKENS = 16
"""Tokens of a page of the host's pool: tables name pages. A cell holds one token."""


def to_pages(keys: Tensor, values: Tensor) -> Tensor:
    """Rows of a pool as pages of the host's: a KV head's part of a page is one piece, a token's key and value adjacent.

    Args:
        keys, values: [num_pages * PAGE_TOKENS, num_kv_heads, k_dim], and v_dim; of one dtype.

    Returns:
        [num_pages, num_kv_heads, PAGE_TOKENS, k_dim + v_dim], new memory.
    """
    whole = torch.cat([keys.view(torch.uint8), values.view(torch.uint8)], dim=2)
    return whole.view(-1, PAGE_TOKENS, *whole.shape[1:]).transpose(1, 2).contiguous().view(keys.dtype)


def from_pages(pages: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write pages to rows of a pool; arguments as of `to_pages`."""
    width = keys.shape[2]
    for rows, part in ((keys, pages[..., :width]), (values, pages[..., width:])):
        rows.view(-1, PAGE_TOKENS, *rows.shape[1:]).copy_(part.transpose(1, 2))


class Counter(IntEnum):
    """Columns of `ResidentState.counters`; each counts a token once for each KV head."""

    WANTED = 0
    """|M_t|: tokens of the lists."""
    TRANSFERRED = 1
    """|T_t|: wanted tokens that were not resident, and are copied."""


@dataclass(frozen=True)
class ResidentShape:
    """Sizes of the state.

    Attributes:
        num_sets: layers that select; those that reuse a selection have the cells of its layer, in their own pools.
        num_kv_heads: of a layer; each has cells of its own.
        num_cells: of a set and KV head, shared by all prefixes.
        num_host_pages: pages of the host's pool.
        resident_begin: row of the GPU's pool at which cell 0 begins.

    Raises:
        ValueError: a size below 1 or rows beyond int32.
    """

    num_sets: int
    num_kv_heads: int
    num_cells: int
    num_host_pages: int
    resident_begin: int

    def __post_init__(self) -> None:
        sizes = (self.num_sets, self.num_kv_heads, self.num_cells, self.num_host_pages)
        if min(sizes) < 1 or self.resident_begin < 0 or self.pool_rows >= 2**31 or self.host_rows >= 2**31:
            raise ValueError(
                "expected sets, KV heads, cells and host pages of at least 1 and rows below 2^31, got "
                f"{self}; correct the sizes"
            )

    @property
    def pool_rows(self) -> int:
        """Rows that the GPU's pool has at least."""
        return self.resident_begin + self.num_cells

    @property
    def host_rows(self) -> int:
        """Rows that the host's pool has."""
        return PAGE_TOKENS * self.num_host_pages


@dataclass(frozen=True)
class ResidentGroup:
    """A group of a selection whose prefix lies in host memory.

    Attributes:
        number: its row of the lists' counts.
        group: as the selection was planned. Its prefix is whole pages; `slot_start` says nothing.
        table_begin: where its table of host pages begins in the arena of tables.

    Raises:
        ValueError: numbers below 0, or a prefix that ends within a page.
    """

    number: int
    group: SelectionGroup
    table_begin: int = 0

    def __post_init__(self) -> None:
        if self.number < 0 or self.table_begin < 0:
            raise ValueError(f"expected number and table_begin of at least 0, got {self}")
        if self.group.prefix_len % PAGE_TOKENS:
            raise ValueError(
                f"expected a prefix of whole pages of {PAGE_TOKENS} tokens, got {self.group.prefix_len}; offload as "
                "many tokens as its index has"
            )

    @property
    def num_pages(self) -> int:
        """Of its prefix."""
        return self.group.prefix_len // PAGE_TOKENS


@dataclass(frozen=True, eq=False)
class ResidentState:
    """What lies where, on the device. Written by `reference.look_up` and its kernel.

    Attributes:
        cell_of_row: [num_sets, num_kv_heads, host_rows] int32; -1: not resident.
        row_of_cell: [num_sets, num_kv_heads, num_cells] int32, its inverse; -1: a free cell.
        stamps: like `row_of_cell`, the step at which the cell's token was last wanted.
        steps: [num_sets, num_kv_heads] int32, the number of the next run, from 1; it may wrap.
        num_fetched: [num_sets, num_kv_heads] int32: tokens that the last run of the set gave a cell.
        fetched_rows, fetched_cells: [num_sets, num_kv_heads, num_cells] int32, which rows of the host, and where to.
        counters: [num_sets, num_kv_heads, 2] int64, see `Counter`; they only grow.
    """

    cell_of_row: Tensor
    row_of_cell: Tensor
    stamps: Tensor
    steps: Tensor
    num_fetched: Tensor
    fetched_rows: Tensor
    fetched_cells: Tensor
    counters: Tensor

    @classmethod
    def empty(cls, shape: ResidentShape, device: torch.device) -> ResidentState:
        """Nothing is resident."""
        sets = (shape.num_sets, shape.num_kv_heads)
        cells = (*sets, shape.num_cells)

        def full(sizes: tuple[int, ...], value: int) -> Tensor:
            return torch.full(sizes, value, dtype=torch.int32, device=device)

        return cls(
            full((*sets, shape.host_rows), -1),
            full(cells, -1),
            full(cells, 0),
            full(sets, 1),
            full(sets, 0),
            full(cells, 0),
            full(cells, 0),
            torch.zeros(*sets, len(Counter), dtype=torch.int64, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Device memory."""
        return sum(tensor.nbytes for tensor in vars(self).values())

    def forget(self, pages: Tensor) -> None:
        """Free the cells of some host pages, in all sets. Neither waits nor reads a value on the host.

        Args:
            pages: int64 [count], on the state's device.
        """
        # -1, of a free cell, finds the last entry.
        rows = (pages[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=pages.device)).flatten()
        gone = torch.zeros(self.cell_of_row.shape[2] + 1, dtype=torch.bool, device=pages.device)
        gone.index_fill_(0, rows, True)
        self.row_of_cell.masked_fill_(gone[self.row_of_cell], -1)
        self.cell_of_row.index_fill_(2, rows, -1)
