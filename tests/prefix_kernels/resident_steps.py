"""Steps of residents for tests: KV of some prefixes in a host's pool, and lists of what a step wants of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefix_kernels import PagedKV
from prefix_kernels.residents import PAGE_TOKENS, ResidentGroup, Residents, ResidentShape
from prefix_kernels.types import SelectedLists, SelectionGroup, list_stride, new_lists

Wanted = Mapping[int, Sequence[Sequence[int]]]
"""Of a step: by prefix, for each KV head, positions, ascending."""
BEFORE = 3
"""Rows of the GPU's pool before the first cell."""


@dataclass
class Prefixes:
    """Prefixes of so many pages each, in host pages of a random order, every other one unused.

    Attributes:
        host: KV as residents read it, NaN in unused pages.
        tables: [arena] int32, host pages of one prefix after the other.
        begins: where each prefix's table begins.
    """

    host: Tensor
    widths: tuple[int, int]
    tables: Tensor
    begins: list[int]
    pages: list[int]

    @classmethod
    def of(cls, pages: Sequence[int], heads: int, dtype: torch.dtype, dims: tuple[int, int] = (4, 2)) -> Prefixes:
        gen = torch.Generator().manual_seed(sum(pages))
        used = sum(pages)
        tables = torch.randperm(2 * used + 1, generator=gen)[:used]
        host = torch.full((2 * used + 1, heads, PAGE_TOKENS, sum(dims)), torch.nan)
        host[tables] = torch.randn(used, heads, PAGE_TOKENS, sum(dims), generator=gen)
        begins = [sum(pages[:n]) for n in range(len(pages))]
        return cls(host.to(dtype), dims, tables.int(), begins, list(pages))

    @property
    def num_host_pages(self) -> int:
        return self.host.shape[0]

    def rows(self, prefix: int, positions: Tensor) -> Tensor:
        """Rows of the host of a prefix's positions."""
        page = self.tables[self.begins[prefix] + positions.long() // PAGE_TOKENS].long()
        return page * PAGE_TOKENS + positions.long() % PAGE_TOKENS

    def pool(self, num_cells: int) -> PagedKV:
        """A pool of nothing but NaN."""
        sizes = BEFORE + num_cells, self.host.shape[1]
        return PagedKV(*(self.host.new_full((*sizes, width), torch.nan) for width in self.widths))

    def kv(self, rows: Tensor, head: int) -> list[Tensor]:
        """Keys, and values, of rows of the host, for one KV head."""
        return list(self.host[rows // PAGE_TOKENS, head, rows % PAGE_TOKENS].split(self.widths, dim=1))


class Steps:
    """Residents of two sets, each with a pool of its own, and the lists of their steps.

    Args:
        prefixes: whose pages are wanted.
        num_cells: of a KV head.
        implementation: of `Residents`.
        device: of all but the host's pool.
    """

    def __init__(
        self, prefixes: Prefixes, num_cells: int, implementation: str, device: torch.device | None = None
    ) -> None:
        self.device = device or torch.device("cpu")
        self.prefixes, self.heads = prefixes, prefixes.host.shape[1]
        self.shape = ResidentShape(2, self.heads, num_cells, prefixes.num_host_pages, BEFORE)
        self.tables = prefixes.tables.to(self.device)
        self.max_groups = len(prefixes.pages) + 1
        strides = [list_stride(PAGE_TOKENS * n) for n in prefixes.pages]
        self.entries = 8 + self.heads * sum(strides)
        self.residents = Residents(
            self.shape, self.max_groups, self.entries, self.device, implementation=implementation
        )
        pools = [prefixes.pool(num_cells) for _ in range(self.shape.num_sets)]
        self.pools = [PagedKV(one.k_cache.to(self.device), one.v_cache.to(self.device)) for one in pools]
        self.groups: list[ResidentGroup] = []

    def begin(self, wanted: Wanted) -> SelectedLists:
        """Plan a step; the lists as a selection leaves them. Rows of the counts are one behind the group's place."""
        lists = new_lists(self.entries, (self.max_groups + 1, self.heads), torch.device("cpu"), with_slots=True)
        self.groups, at = [], 8
        for place, (prefix, by_head) in enumerate(wanted.items()):
            pages = self.prefixes.pages[prefix]
            longest = max(1, *map(len, by_head))
            stride = list_stride(longest)
            group = SelectionGroup(pages * PAGE_TOKENS, longest, list_begin=at, head_stride=stride)
            self.groups.append(ResidentGroup(place + 1, group, self.prefixes.begins[prefix]))
            for head, positions in enumerate(by_head):
                begin = at + head * stride
                lists.positions[begin : begin + len(positions)] = torch.tensor(positions, dtype=torch.int32)
                lists.counts[place + 1, head] = len(positions)
            at += self.heads * stride
        self.residents.plan(self.groups)
        assert lists.slots is not None
        return SelectedLists(*(one.to(self.device) for one in (lists.positions, lists.counts, lists.slots)))

    def run(self, wanted: Wanted, number: int = 0) -> SelectedLists:
        """A step of a set, up to its attention."""
        lists = self.begin(wanted)
        self.residents.run(number, self.tables, lists, self.prefixes.host, self.pools[number])
        return lists

    def listed(self, lists: SelectedLists, place: int, head: int) -> tuple[Tensor, Tensor]:
        """Positions and slots of a group's list."""
        one = self.groups[place]
        begin, count = one.group.list_begin + head * one.group.head_stride, int(lists.counts[one.number, head])
        return lists.positions[begin : begin + count].cpu(), lists.slots[begin : begin + count].cpu()

    def check_state(self) -> None:
        """Each resident token lies in one cell, which says so."""
        state = self.residents.state
        held, rows = state.row_of_cell >= 0, state.row_of_cell.clamp(min=0).long()
        cells = torch.arange(held.shape[2], dtype=torch.int32, device=self.device).expand_as(held)
        assert torch.equal(state.cell_of_row.gather(2, rows)[held], cells[held])
        assert int((state.cell_of_row >= 0).sum()) == int(held.sum())

    def check(self, lists: SelectedLists, wanted: Wanted, number: int = 0) -> None:
        """Each listed slot of a set holds what the host has for its position; residents hold each token once."""
        pool = self.pools[number]
        self.check_state()
        for place, prefix in enumerate(wanted):
            for head in range(self.heads):
                positions, slots = self.listed(lists, place, head)
                assert bool((slots >= BEFORE).all())
                kv = self.prefixes.kv(self.prefixes.rows(prefix, positions), head)
                for of_pool, of_host in zip((pool.k_cache, pool.v_cache), kv, strict=True):
                    # NaN is equal to nothing.
                    assert torch.equal(of_pool.cpu()[slots.long(), head], of_host)
