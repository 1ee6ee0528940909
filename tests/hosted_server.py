"""`sparse_server.Server` with prefixes in host memory: their device slots, and SGLang's padding page, are NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from prefix_kernels.residents import PAGE_TOKENS, to_pages
from prefix_kernels.types import PagedKV, Selection, SelectionGroup, pack_lists
from sglang_ext.decode.swap import HostKV
from sglang_ext.decode.types import DecodeBatch, HostPrefix
from sglang_ext.methods.layer_plan import LayerMode
from sglang_ext.prefix.residency import ResidentIndex
from tests.sparse_server import KV_HEADS, LAYERS, SLOTS, Server

HOST_PAGES = 128
"""Of the host's pool."""


class HostedServer(Server):
    """The oracle finds the KV of such prefixes where it lay before.

    Args:
        device: see the base.
        num_cells: of residents.
        implementation: of residents.
        changes: see the base.
    """

    def __init__(self, device: torch.device, num_cells: int, implementation: str = "reference", **changes: Any) -> None:
        self.kv_of_host: list[torch.Tensor] = []
        host = HostKV(HOST_PAGES, self.kv_of_host.__getitem__, SLOTS, num_cells, implementation)
        super().__init__(device, host=host, **changes)
        pinned = device.type == "cuda"
        # Behind the cells, layers that attend all have such prefixes in rows of their own.
        self.dense_rows = SLOTS + num_cells
        self.pools = []
        for layer, kv in enumerate(self.caches):
            dense = self.plan.layers[layer].mode is LayerMode.DENSE
            rows = self.dense_rows + (HOST_PAGES * PAGE_TOKENS if dense else 0)
            caches = [one.new_full((rows, *one.shape[1:]), torch.nan) for one in (kv.k_cache, kv.v_cache)]
            for mine, theirs in zip(caches, (kv.k_cache, kv.v_cache), strict=True):
                mine[:SLOTS] = theirs
                mine[:PAGE_TOKENS] = torch.nan
            self.pools.append(replace(kv, k_cache=caches[0], v_cache=caches[1]))
            heads, width = kv.k_cache.shape[1], kv.k_cache.shape[2] + kv.v_cache.shape[2]
            sizes = HOST_PAGES, heads, PAGE_TOKENS, width
            self.kv_of_host.append(torch.full(sizes, torch.nan, dtype=kv.k_cache.dtype, pin_memory=pinned))
        # The padding page is nobody's.
        self.free = self.free[self.free >= PAGE_TOKENS]
        self.pages = torch.randperm(HOST_PAGES, generator=torch.Generator().manual_seed(1))
        self.hosts: dict[int, tuple[HostPrefix, torch.Tensor]] = {}

    def offload(self, slots: torch.Tensor) -> HostPrefix:
        """Copy a prefix out, as long as it is whole pages; nothing of it stays at its slots."""
        count = len(slots) // PAGE_TOKENS
        pages, self.pages = self.pages[:count], self.pages[count:]
        rows = (pages[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()
        for layer in range(LAYERS):
            pool, kv = self.pools[layer], self.caches[layer]
            self.kv_of_host[layer][pages] = to_pages(*(one[slots.long()] for one in _caches(kv))).cpu()
            for here, before in zip(_caches(pool), _caches(kv), strict=True):
                here[slots.long()] = torch.nan
                if len(here) > self.dense_rows:
                    here[self.dense_rows + rows.to(self.device)] = before[slots.long()]
        return HostPrefix(pages, (self.dense_rows + rows).int().to(self.device))

    def give_back(self, host: HostPrefix) -> None:
        """Its pages are another prefix's from now on."""
        self.sparse.swap.forget(host.pages)
        self.pages = torch.cat([host.pages, self.pages])

    def join_behind(self, serial: int, host: HostPrefix, slots: torch.Tensor, index: ResidentIndex, own: int) -> None:
        """A request whose first slots are virtual: those of the padding page, again and again."""
        virtual = torch.arange(len(slots), dtype=torch.int32, device=self.device) % PAGE_TOKENS
        self.join(serial, virtual, index, own)
        self.hosts[serial] = host, slots

    def leave(self, serial: int) -> None:
        super().leave(serial)
        self.hosts.pop(serial, None)

    def slots_of(self, serial: int, begin: int, end: int) -> torch.Tensor:
        if begin == 0 and serial in self.hosts:
            return self.hosts[serial][1][:end].long()
        return super().slots_of(serial, begin, end)

    def listed(self, number: int, own: torch.Tensor, layer: int) -> Selection:
        """Slots of cells say no position; the list of positions does, until the next layer selects."""
        lists, planned = self.sparse._lists.of(layer), self.sparse._planned
        placed = pack_lists([SelectionGroup(budget, budget) for budget in planned.selects.budgets], KV_HEADS)[number]
        counts, positions = lists.counts[number].clone(), placed.lists_in(lists.positions, KV_HEADS)
        there = torch.arange(positions.shape[1], device=self.device) < counts[:, None]
        return Selection(torch.where(there, positions, -1), counts)

    def batch(self, serials: list[int], lens: list[int]) -> DecodeBatch:
        hosts = [self.hosts[serial][0] if serial in self.hosts else None for serial in serials]
        return replace(super().batch(serials, lens), hosts=hosts)


def _caches(kv: PagedKV) -> tuple[torch.Tensor, torch.Tensor]:
    return kv.k_cache, kv.v_cache


def walk_host(server: HostedServer, steps: int = 1) -> None:
    """Two prefixes in host memory, one of which leaves for a third one, beside requests on real slots; so many steps
    more of the first batch, and of the second one.
    """
    prefixes = [server.prefix(length) for length in (304, 208, 128)]
    hosts = [server.offload(slots) for slots, _ in prefixes]
    real = server.prefix(210)
    for serial in (1, 2):
        server.join_behind(serial, hosts[0], *prefixes[0], 5 + serial)
    server.join_behind(3, hosts[1], *prefixes[1], 9)
    server.join(4, *real, 4)
    server.join(5, server.slots(77), None, 3)
    first = server.step([1, 2, 3, 4, 5], padded=1)
    assert [(one.rows, one.prefix_len) for one in first] == [(2, 304), (1, 208), (1, 210)], "its prefix says who shares"
    for _ in range(steps):
        assert server.step([1, 2, 3, 4, 5], padded=1) == first
    server.leave(3)
    server.give_back(hosts[1])
    third = server.prefix(208)
    again = server.offload(third[0])
    assert set(again.pages.tolist()) == set(hosts[1].pages.tolist())
    server.join_behind(6, again, *third, 3)
    server.join_behind(7, hosts[2], *prefixes[2], 3)
    for _ in range(steps):
        found = server.step([6, 1, 4, 7, 2], padded=1)
        assert [(one.rows, one.prefix_len) for one in found] == [(1, 208), (2, 304), (1, 210), (1, 128)]
