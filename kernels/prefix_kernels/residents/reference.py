"""Residents in torch: what a step does with them. Waits and allocates as it likes; serves CPUs, and tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prefix_kernels.residents.state import PAGE_TOKENS, Counter, ResidentGroup, ResidentShape, ResidentState
from prefix_kernels.types import PagedKV, SelectedLists

FREE, OLDEST = 255, 254
"""Ages of a free cell, and of the oldest ones that are told apart: older ones tie with them."""


def look_up(
    shape: ResidentShape,
    state: ResidentState,
    number: int,
    groups: Sequence[ResidentGroup],
    host_pages: Tensor,
    lists: SelectedLists,
) -> None:
    """Give missing tokens cells, and lists slots.

    For each KV head, with M_t the rows of the host's pool that the groups' lists name, and C_t the resident ones:

    1. Cells of M_t & C_t are stamped with this step: none of them is taken.
    2. T_t = M_t - C_t in the order of groups and positions take the cells that were not wanted for the longest time,
       free ones first; those cells in ascending order. Ages above `OLDEST` steps tie, ties go to the lowest cell.
    3. Tokens become slots: resident_begin + cell.

    AsyncTLS has blocks in place of tokens, and C_{t+1} = M_t; cells beyond |M_t| keep older tokens here.

    Args:
        shape: of the state.
        state: written.
        number: of the set.
        groups: of the step; no two of them have a host page in common, and together their lists are no longer than
            there are cells.
        host_pages: [arena] int32, the groups' tables: page of the host's pool of each page of the prefix.
        lists: of the selection, each position once; slots are written.
    """
    assert lists.slots is not None
    for head in range(shape.num_kv_heads):
        wanted = [_rows(one, head, host_pages, lists) for one in groups]
        _assign(state, number, head, torch.cat([*wanted, host_pages[:0].long()]))
        for one, rows in zip(groups, wanted, strict=True):
            cells = state.cell_of_row[number, head, rows]
            _listed(one, head, lists.slots, lists.counts)[:] = shape.resident_begin + cells


def fetch(
    shape: ResidentShape,
    state: ResidentState,
    number: int,
    host: Tensor,
    pool: PagedKV,
    head_map: Tensor | None = None,
) -> None:
    """Copy the tokens that the last `look_up` of a set gave cells.

    Args:
        shape: of the state.
        state: read only.
        number: of the set.
        host: a layer's KV in host memory [num_host_pages, num_kv_heads, PAGE_TOKENS, k_dim + v_dim], of each token its
            key and behind it its value; read only.
        pool: the layer's pool on the GPU; rows of cells are written.
        head_map: [num_kv_heads] int32: KV head h has the cells of KV head head_map[h] of the set; None: of its own.
    """
    for head in range(shape.num_kv_heads):
        of = head if head_map is None else int(head_map[head])
        count = int(state.num_fetched[number, of])
        source, cells = (one[number, of, :count].long() for one in (state.fetched_rows, state.fetched_cells))
        target = (shape.resident_begin + cells).to(pool.k_cache.device)
        # As bytes: not every release of torch writes fp8 by index.
        source = source.to(host.device)
        rows = host.view(torch.uint8)[source // PAGE_TOKENS, head, source % PAGE_TOKENS].to(target.device)
        keys = pool.k_cache[:, head].view(torch.uint8)
        keys[target] = rows[:, : keys.shape[1]]
        pool.v_cache[:, head].view(torch.uint8)[target] = rows[:, keys.shape[1] :]


def ages(state: ResidentState, number: int, head: int) -> Tensor:
    """Of each cell [num_cells] how many steps ago its token was wanted: 0 in this one; `FREE` without one."""
    age = state.steps[number, head] - state.stamps[number, head]
    age = torch.where((age < 0) | (age > OLDEST), OLDEST, age)
    return torch.where(state.row_of_cell[number, head] < 0, FREE, age)


def _rows(one: ResidentGroup, head: int, host_pages: Tensor, lists: SelectedLists) -> Tensor:
    """Row of the host's pool of each token of a list, int64."""
    positions = _listed(one, head, lists.positions, lists.counts).long()
    return host_pages[one.table_begin + positions // PAGE_TOKENS].long() * PAGE_TOKENS + positions % PAGE_TOKENS


def _listed(one: ResidentGroup, head: int, arena: Tensor, counts: Tensor) -> Tensor:
    """A group's list of a KV head, a view."""
    begin = one.group.list_begin + head * one.group.head_stride
    return arena[begin : begin + min(int(counts[one.number, head]), one.group.count)]


def _assign(state: ResidentState, number: int, head: int, wanted: Tensor) -> None:
    """Cells of the wanted tokens, each named once."""
    cell_of_row, row_of_cell = state.cell_of_row[number, head], state.row_of_cell[number, head]
    step, stamps = state.steps[number, head], state.stamps[number, head]
    cells = cell_of_row[wanted].long()
    stamps[cells[cells >= 0]] = step
    missing = wanted[cells < 0]
    age = ages(state, number, head)
    taken = age.sort(descending=True, stable=True).indices[: len(missing)].sort().values
    left = row_of_cell[taken].long()
    cell_of_row[left[left >= 0]] = -1
    cell_of_row[missing] = taken.int()
    row_of_cell[taken] = missing.int()
    stamps[taken] = step
    state.num_fetched[number, head] = len(taken)
    state.fetched_rows[number, head, : len(taken)] = missing.int()
    state.fetched_cells[number, head, : len(taken)] = taken.int()
    counters = state.counters[number, head]
    counters[Counter.WANTED] += len(wanted)
    counters[Counter.TRANSFERRED] += len(taken)
    state.steps[number, head] += 1
