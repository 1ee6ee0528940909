"""What `offload.py swap` measures: residents of one layer, whose steps replace a given share of the tokens.

KV of the prefixes lies in pinned host memory, one behind the other, as serving has it. Each KV head of each group wants
as many tokens as its budget says, and the residents have a multiple of that many cells. From one step to the next a
share of these tokens, the churn, gives way to others, in turns so long that all of the turn before have left their
cells.

The gate looks at a replay that follows another: the residents count what sets say, and each slot of the last step's
lists holds the very bytes that the host has for its position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kernel_problem import Gate
from torch import Tensor

from prefix_kernels import PagedKV
from prefix_kernels.residents import PAGE_TOKENS, ResidentGroup, Residents, ResidentShape
from prefix_kernels.top_k_selection.plan import SelectionGroup, pack_lists
from prefix_kernels.types import SelectedLists, new_lists

LINK_RATE = 51e9
"""Bytes a second that a kernel reads of pinned memory, in pieces of 16 KiB (PCIe 5.0 x16)."""


@dataclass(frozen=True)
class SwapSizes:
    """One row's sizes.

    Attributes:
        context: tokens of a prefix.
        groups: prefixes.
        budget: tokens of a list.
        churn: share of the wanted tokens that the step before did not want.
        room: cells of the residents for each token that a step wants.
        heads, dim: KV heads and their width.
        dtype: of the KV.
        steps: in one graph.
    """

    context: int
    groups: int
    budget: int
    churn: float
    room: float
    heads: int
    dim: int
    dtype: torch.dtype
    steps: int

    @property
    def fresh(self) -> int:
        """Of a list's tokens so many are new."""
        return round(self.churn * self.budget)

    @property
    def cells(self) -> int:
        """Of the residents."""
        return self.groups * round(self.budget * self.room)

    @property
    def nbytes(self) -> int:
        """That a step moves."""
        return self.groups * self.heads * self.fresh * 2 * self.dim * self.dtype.itemsize


def pinned(pages: int, heads: int, dim: int, dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    """A layer of prefixes of any values in pinned memory: [pages, heads, PAGE_TOKENS, 2 * dim]."""
    on_gpu = gen.device.type == "cuda"
    kv = torch.empty(pages, heads, PAGE_TOKENS, 2 * dim, dtype=dtype, pin_memory=on_gpu)
    for part in kv.split(1 << 12):
        part.copy_(torch.randn(part.shape, generator=gen, device=gen.device).to(dtype))
    return kv


class Host:
    """Prefixes of a layer; made once for all rows of the same sizes."""

    def __init__(self, sizes: SwapSizes, device: torch.device, seed: int) -> None:
        pages = sizes.groups * sizes.context // PAGE_TOKENS
        gen = torch.Generator(device).manual_seed(seed)
        self.kv = pinned(pages, sizes.heads, sizes.dim, sizes.dtype, gen)
        self.tables = torch.arange(pages, dtype=torch.int32, device=device)


class Swap:
    """A case: `steps` runs of a set, each with lists of its own.

    Args:
        sizes: see there.
        part: "exact": the run of a layer that selects, all that its attention waits for; "reuse": the copy alone, of a
            layer that reuses its selection.
        host: the prefixes.
        device: of the residents.
        seed: of the lists.
    """

    def __init__(self, sizes: SwapSizes, part: str, host: Host, device: torch.device, seed: int) -> None:
        self.sizes, self._host, self._device, self._part = sizes, host, device, part
        cells = sizes.cells
        pages = len(host.tables)
        self._shape = ResidentShape(1, sizes.heads, cells, pages, PAGE_TOKENS)
        pool = torch.empty(PAGE_TOKENS + cells, sizes.heads, sizes.dim, dtype=sizes.dtype, device=device)
        self.pool = PagedKV(pool, torch.empty_like(pool))
        packed = pack_lists([SelectionGroup(sizes.context, sizes.budget)] * sizes.groups, sizes.heads)
        self._groups = [ResidentGroup(n, group, n * sizes.context // PAGE_TOKENS) for n, group in enumerate(packed)]
        self._entries = self._groups[-1].group.lists_end(sizes.heads)
        self._lists = _lists(sizes, self._groups, self._entries, device, seed)
        self.residents = Residents(self._shape, sizes.groups, self._entries, device, implementation="triton")
        self.residents.plan(self._groups)
        self.config = {"cells": cells, "part": part}
        self.layers, self.nbytes = sizes.steps, sizes.nbytes

    def run(self) -> None:
        """All steps."""
        for lists in self._lists:
            if self._part == "reuse":
                self.residents.fetch(0, self._host.kv, self.pool)
            else:
                self._select(lists)

    def _select(self, lists: SelectedLists) -> None:
        self.residents.run(0, self._host.tables, lists, self._host.kv, self.pool)

    def poison(self) -> None:
        """Residents hold nothing, and what they hold is NaN; then each step has been once."""
        state = self.residents.state
        for tensor, value in ((state.row_of_cell, -1), (state.cell_of_row, -1), (state.counters, 0)):
            tensor.fill_(value)
        self._forget()
        for lists in self._lists:
            self._select(lists)
        if self._part == "reuse":
            self._forget()
        self._before = self.residents.counters[0].tolist()

    def _forget(self) -> None:
        for cache in (self.pool.k_cache, self.pool.v_cache):
            cache.fill_(torch.nan)

    def check(self) -> Gate:
        """Counts, and bytes, behind a run."""
        sizes = self.sizes
        self.residents.state.check_integrity()
        found = [now - before for now, before in zip(self.residents.counters[0].tolist(), self._before, strict=True)]
        each = sizes.steps * sizes.groups * sizes.heads
        expected = [0, 0] if self._part == "reuse" else [each * sizes.budget, each * sizes.fresh]
        figures = {
            "wrong_counts": float(sum(one != other for one, other in zip(found, expected, strict=True))),
            "wrong_rows": float(self._check_bytes()),
        }
        return Gate(0.0 if not any(figures.values()) else torch.inf, figures)

    def _check_bytes(self) -> int:
        """Listed rows of the last step that differ from the host's; of a copy alone those of what was copied."""
        state, wrong = self.residents.state, 0
        if self._part == "reuse":
            for head in range(self.sizes.heads):
                count = int(state.num_fetched[0, head])
                rows, cells = (one[0, head, :count].long() for one in (state.fetched_rows, state.fetched_cells))
                wrong += self._differing(head, rows, PAGE_TOKENS + cells)
            return wrong
        lists = self._lists[-1]
        for one in self._groups:
            positions, slots = (one.group.lists_in(arena, self.sizes.heads) for arena in (lists.positions, lists.slots))
            for head, (of_head, at) in enumerate(zip(positions.long(), slots.long(), strict=True)):
                page = self._host.tables[one.table_begin + of_head // PAGE_TOKENS].long()
                wrong += self._differing(head, page * PAGE_TOKENS + of_head % PAGE_TOKENS, at)
        return wrong

    def _differing(self, head: int, rows: Tensor, slots: Tensor) -> int:
        rows = rows.cpu()
        held = torch.cat([cache[slots, head] for cache in (self.pool.k_cache, self.pool.v_cache)], dim=1)
        there = self._host.kv[rows // PAGE_TOKENS, head, rows % PAGE_TOKENS].to(self._device)
        return int((held != there).any(dim=1).sum())


def _lists(
    sizes: SwapSizes, groups: list[ResidentGroup], entries: int, device: torch.device, seed: int
) -> list[SelectedLists]:
    """Of each step: tokens that all steps want, and others in turns, as many turns as the prefix has tokens for."""
    gen = torch.Generator().manual_seed(seed)
    fixed, fresh, tokens = sizes.budget - sizes.fresh, sizes.fresh, sizes.context
    turns = min(sizes.steps, (tokens - fixed) // fresh) if fresh else 1
    if fresh and (turns < 2 or sizes.steps % turns):
        turns = max((n for n in range(2, turns + 1) if sizes.steps % n == 0), default=0)
    if not turns:
        raise ValueError(f"expected tokens for two turns of {fresh} and {fixed} others, got {tokens}; lower the budget")
    if fresh and fixed + (turns - 1) * fresh < sizes.budget * sizes.room:
        raise ValueError(f"expected turns that fill {sizes.room} cells a token, got {turns} of {fresh}; more --steps")
    found = [
        new_lists(entries, (sizes.groups, sizes.heads), torch.device("cpu"), with_slots=True)
        for _ in range(sizes.steps)
    ]
    for one in groups:
        for head in range(sizes.heads):
            order = torch.randperm(tokens, generator=gen)
            for step, lists in enumerate(found):
                begin = fixed + step % turns * fresh
                wanted = torch.cat([order[:fixed], order[begin : begin + fresh]]).sort().values.int()
                one.group.lists_in(lists.positions, sizes.heads)[head] = wanted
                lists.counts[one.number, head] = len(wanted)
    return [
        SelectedLists(lists.positions.to(device), lists.counts.to(device), lists.slots.to(device)) for lists in found
    ]
