"""Prefixes in host memory in a sparse step: residents of each layer that selects, and of those that reuse it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefix_kernels.launching import send
from prefix_kernels.residents import PAGE_TOKENS, Counter, ResidentGroup, Residents, ResidentShape
from prefix_kernels.types import PagedKV, SelectedLists, SelectionGroup
from sglang_ext.decode.buffers import head_maps
from sglang_ext.decode.types import HostPrefix
from sglang_ext.methods.layer_plan import LayerPlan


@dataclass(frozen=True, eq=False)
class HostKV:
    """What steps need to know of the host's pool, and of the room for its pages on the device.

    Attributes:
        num_pages: of the host's pool.
        layer: a layer's KV there, [num_pages, num_kv_heads, 16, k_dim + v_dim], of each token its key and behind it
            its value, pinned where a GPU reads it; at the same addresses as long as the server lives.
        resident_begin: row of every layer's pool on the device from which on `num_cells` rows are nobody else's.
        num_cells: tokens of a layer and KV head, for all prefixes.
        implementation: of `Residents`.
    """

    num_pages: int
    layer: Callable[[int], Tensor]
    resident_begin: int
    num_cells: int
    implementation: str | None = None


class SwapIn:
    """Makes slots of what layers select of such prefixes, and fetches the tokens that are missing.

    Args:
        host: see there.
        layer_plan: role of each layer; one that reuses a selection has its anchor's cells, in its own pool.
        num_kv_heads: KV heads.
        max_groups: of a step, at most.
        list_entries: of the lists of a step.
        device: of the KV pool.
    """

    def __init__(
        self,
        host: HostKV,
        layer_plan: LayerPlan,
        num_kv_heads: int,
        max_groups: int,
        list_entries: int,
        device: torch.device,
    ) -> None:
        anchors = layer_plan.anchor_layers
        sizes = (max(1, len(anchors)), num_kv_heads, host.num_cells, host.num_pages)
        shape = ResidentShape(*sizes, host.resident_begin)
        self._host, self._device = host, device
        self.residents = Residents(shape, max_groups, list_entries, device, implementation=host.implementation)
        # Prefixes of a step have no page in common.
        self._tables = torch.zeros(host.num_pages, dtype=torch.int32, device=device)
        self._head_maps = head_maps(layer_plan, device)
        reused = (layer if layer in anchors else role.anchor_layer for layer, role in enumerate(layer_plan.layers))
        self._set_of = [None if anchor is None else anchors.index(anchor) for anchor in reused]

    def budgets(self, lengths: Sequence[int], wanted: Sequence[int], least: Sequence[int]) -> list[int] | None:
        """Tokens that a step selects of each prefix in host memory; None: it cannot select from all of them.

        Args:
            lengths: tokens of the prefixes.
            wanted: of each; where there are fewer cells, what is beyond `least` shrinks, by the same share for all.
            least: of each, at most as many.
        """
        if sum(lengths) > len(self._tables) * PAGE_TOKENS:
            return None
        cells, more, kept = self._host.num_cells, sum(wanted) - sum(least), sum(least)
        if sum(wanted) <= cells:
            return list(wanted)
        if kept > cells:
            return None
        return [few + (many - few) * (cells - kept) // more for few, many in zip(least, wanted, strict=True)]

    def plan(self, groups: Sequence[SelectionGroup], hosts: Sequence[HostPrefix | None]) -> None:
        """Write the tables of the next steps, without a wait.

        Args:
            groups: all of a step, in the order of the counts of its lists.
            hosts: of each group.
        """
        planned, tables, at = list[ResidentGroup](), list[Tensor](), 0
        for number, (group, host) in enumerate(zip(groups, hosts, strict=True)):
            if host is not None:
                planned.append(ResidentGroup(number, group, at))
                tables.append(host.pages)
                at += len(host.pages)
        self.residents.plan(planned)
        if tables:
            send(torch.cat(tables).int(), self._tables)

    def before(self, layer: int, lists: SelectedLists, kv: PagedKV) -> None:
        """Between a layer's selection, or the one that it reuses, and its attention.

        Args:
            layer: its number.
            lists: that it attends.
            kv: its pool on the device; rows of cells are written.
        """
        number = self._set_of[layer]
        if number is None:
            return
        host = self._host.layer(layer)
        head_map = self._head_maps[layer]
        if head_map is None:
            self.residents.run(number, self._tables, lists, host, kv)
        else:
            self.residents.fetch(number, host, kv, head_map)

    def forget(self, pages: Tensor) -> None:
        """Host pages are given to another prefix: before a step that selects from that one.

        Args:
            pages: [count] int64 on the host.
        """
        self.residents.state.forget(pages.to(self._device, non_blocking=True))

    def counted(self) -> dict[str, int]:
        """Tokens of all layers and KV heads since the start, by the names of `Counter`; waits for the device."""
        totals = self.residents.counters.sum(0).tolist()
        return {one.name.lower(): totals[one] for one in Counter}

    @property
    def nbytes(self) -> int:
        """Device memory, the cells apart."""
        return self.residents.nbytes + self._tables.nbytes
