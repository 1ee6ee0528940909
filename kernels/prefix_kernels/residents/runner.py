"""Residents of offloaded prefixes, planned on the host, then decided and copied on the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prefix_kernels.launching import block_of, launch_behind, runs_triton, send
from prefix_kernels.residents import reference
from prefix_kernels.residents.state import PAGE_TOKENS, ResidentGroup, ResidentShape, ResidentState
from prefix_kernels.types import PagedKV, SelectedLists, check_table

_FIELDS = 7
"""int64 fields of a group, see `kernels.GROUP_FIELDS`."""
_LOOK_UP_WARPS, _LOOK_UP_TILE, _CELL_TILE = 8, 1024, 2048
_STRETCHES = 16
"""Programs of a KV head that look up, count and place; each has parts of lists, or a stretch of cells."""
_FETCH_WARPS, _FETCH_TOKENS = 4, 16
_LEAST_BLOCK = 2
"""Triton 3.6 does not compile a search in one entry."""
_WORD = torch.int32
"""What is copied; four are loaded at a time."""
_COPYING = 64
"""Programs that copy: 16 tokens of K and of V each are on their way, 8 KiB of heads of 128 in 16 bits."""


class Residents:
    """Cells of the GPU's pool that hold tokens of prefixes in host memory, each of one KV head.

    `reference.look_up` and `reference.fetch` say what is computed, `ResidentState` what is kept. Source: AsyncTLS, 4.2.
    For each set (a layer that selects) `run` follows the selection; a layer's attention follows `run`, or `fetch` of a
    layer that reuses the selection. A layer that leaves out a fetch holds other tokens than its cells are said to:
    fetch for all layers of a set after each of its runs.

    Args:
        shape: sizes of the state.
        max_groups: groups of a step, at most.
        list_entries: of the lists of all groups and KV heads together, at most.
        device: of the GPU's pool.
        implementation: "reference" or "triton"; None: Triton on a GPU, else the reference.

    Attributes:
        state: may be read, and told of what is gone (`ResidentState.forget`).

    Raises:
        ValueError: sizes below 1, or an unknown implementation.
    """

    def __init__(
        self,
        shape: ResidentShape,
        max_groups: int,
        list_entries: int,
        device: torch.device,
        *,
        implementation: str | None = None,
    ) -> None:
        if min(max_groups, list_entries) < 1:
            raise ValueError(f"expected max_groups and list_entries of at least 1, got {max_groups} and {list_entries}")
        self.shape, self.max_groups, self.list_entries, self.device = shape, max_groups, list_entries, device
        self.state = ResidentState.empty(shape, device)
        self._triton = runs_triton("residents", implementation, device)

        integers = partial(torch.zeros, dtype=torch.int32, device=device)
        self._table = integers(max_groups, _FIELDS, dtype=torch.int64)
        self._missing = integers(list_entries)
        self._part_counts = integers(block_of(max(max_groups, _STRETCHES), _LEAST_BLOCK), shape.num_kv_heads, 2)
        self._ages = integers(shape.num_kv_heads, _STRETCHES, reference.FREE + 1)
        self._entries = integers(shape.num_kv_heads, shape.num_cells)
        self._now, self._all_placed = integers(shape.num_kv_heads), integers(shape.num_kv_heads)
        self._placed = integers(shape.num_sets, shape.num_kv_heads)
        self._groups: tuple[ResidentGroup, ...] = ()
        self.plan(())

    def plan(self, groups: Sequence[ResidentGroup]) -> None:
        """Write the table of the next runs. Copies to the device, without a wait, on the stream of the runs.

        Args:
            groups: of the step's selections whose prefixes lie in host memory; their lists may be anywhere among those
                of other groups. No two of them have a host page in common.

        Raises:
            ValueError: more groups or lists than there is room for; two groups of one table; or fewer cells than a
                step can want. The plan before stays.
        """
        heads = self.shape.num_kv_heads
        lists_end = max((one.group.lists_end(heads) for one in groups), default=0)
        if len(groups) > self.max_groups or lists_end > self.list_entries:
            raise ValueError(
                f"expected at most {self.max_groups} groups and {self.list_entries} entries of lists, got "
                f"{len(groups)} and {lists_end}; raise the limits"
            )
        tables = sorted((one.table_begin, one.table_begin + one.num_pages) for one in groups)
        if any(begin < end for (_, end), (begin, _) in itertools.pairwise(tables)):
            raise ValueError(
                f"expected tables of host pages that do not overlap, got {tables}; make one group of all requests on "
                "a prefix"
            )
        needed = sum(one.group.count for one in groups)
        if needed > self.shape.num_cells:
            raise ValueError(
                f"expected as many cells as a step can want, {needed} for {len(groups)} groups, got "
                f"{self.shape.num_cells}; keep fewer tokens, or make more cells"
            )
        self._groups = tuple(groups)
        self._tables_end = max((end for _, end in tables), default=0)
        self._counts_end = max((one.number + 1 for one in groups), default=0)
        of_all = len(groups), max(1, _STRETCHES // max(1, len(groups)))
        rows = [
            (one.number, one.table_begin, one.group.list_begin, one.group.head_stride, one.group.count, *of_all)
            for one in groups
        ]
        send(torch.tensor(rows or [(0, 0, 0, 0, 0, *of_all)], dtype=torch.int64), self._table)
        self._lists_end = lists_end

    def run(self, number: int, host_pages: Tensor, lists: SelectedLists, host: Tensor, pool: PagedKV) -> None:
        """Make slots of the lists of a set, and copy the tokens that are not there; in three launches.

        Args:
            number: of the set.
            host_pages: [arena] int32 on the pool's device, the groups' tables: page of the host's pool of each page of
                a prefix, in order; below `num_host_pages`, which is not checked.
            lists: as the selection wrote them; slots of the planned groups are written.
            host: KV of the selecting layer in host memory [num_host_pages, num_kv_heads, PAGE_TOKENS, k_dim + v_dim],
                of each token its key and behind it its value, so that a page of a KV head is one piece of memory; in
                the pool's dtype, pinned, read only.
            pool: its pool on the GPU, of which rows of cells are written.

        Raises:
            ValueError: tensors of another shape, dtype or place.
        """
        self._check(number, host, pool)
        self._check_lists(host_pages, lists)
        if not self._triton:
            reference.look_up(self.shape, self.state, number, self._groups, host_pages, lists)
            reference.fetch(self.shape, self.state, number, host, pool)
            return
        from prefix_kernels.residents.kernels import count_kernel, look_up_kernel

        arguments = self._arguments(number) | {
            "groups_ptr": self._table,
            "host_pages_ptr": host_pages,
            "positions_ptr": lists.positions,
            "slots_ptr": lists.slots,
            "counts_ptr": lists.counts,
            "counters_ptr": self.state.counters[number],
            "missing_ptr": self._missing,
            "part_counts_ptr": self._part_counts,
            "TILE": _LOOK_UP_TILE,
            "BLOCK_P": self._part_counts.shape[0],
        }
        heads = self.shape.num_kv_heads
        for kernel, grid in (look_up_kernel, (heads * _STRETCHES,)), (count_kernel, (heads, _STRETCHES)):
            launch_behind(kernel, grid, arguments, num_warps=_LOOK_UP_WARPS)
        self._fetch(number, host, pool, None, lists.slots)

    def fetch(self, number: int, host: Tensor, pool: PagedKV, head_map: Tensor | None = None) -> None:
        """Copy what the last run of a set decided, for one layer, in one launch.

        Args:
            number: of the set.
            host, pool: of the layer, as for `run`.
            head_map: [num_kv_heads] int32 on the pool's device: the set's KV head of each one of the layer; None: the
                same.

        Raises:
            ValueError: tensors of another shape, dtype or place.
        """
        self._check(number, host, pool)
        if head_map is not None:
            check_table("head_map", head_map, (self.shape.num_kv_heads,))
        if self._triton:
            self._fetch(number, host, pool, head_map, None)
        else:
            reference.fetch(self.shape, self.state, number, host, pool, head_map)

    @property
    def counters(self) -> Tensor:
        """[num_sets, 2] int64 on the device, see `Counter`: sums over KV heads since the beginning; new memory."""
        return self.state.counters.sum(dim=1)

    @property
    def nbytes(self) -> int:
        """Device memory, the cells apart."""
        own = (self._table, self._missing, self._part_counts, self._ages, self._entries, self._placed)
        return self.state.nbytes + sum(tensor.nbytes for tensor in own)

    def _arguments(self, number: int) -> dict[str, Any]:
        """What kernels are told of a set, by parameter name."""
        shape, state = self.shape, self.state
        return {
            "cell_of_row_ptr": state.cell_of_row[number],
            "row_of_cell_ptr": state.row_of_cell[number],
            "stamps_ptr": state.stamps[number],
            "steps_ptr": state.steps[number],
            "num_fetched_ptr": state.num_fetched[number],
            "fetched_rows_ptr": state.fetched_rows[number],
            "fetched_cells_ptr": state.fetched_cells[number],
            "fetched_entries_ptr": self._entries,
            "ages_ptr": self._ages,
            "now_ptr": self._now,
            "placed_ptr": self._placed[number],
            "all_placed_ptr": self._all_placed,
            "num_heads": shape.num_kv_heads,
            "num_rows": shape.host_rows,
            "num_cells": shape.num_cells,
            "resident_begin": shape.resident_begin,
            "stretches": _STRETCHES,
            "CELL_TILE": min(_CELL_TILE, block_of(-(-shape.num_cells // _STRETCHES), _LEAST_BLOCK)),
            "BLOCK_S": block_of(_STRETCHES, _LEAST_BLOCK),
        }

    def _fetch(self, number: int, host: Tensor, pool: PagedKV, head_map: Tensor | None, slots: Tensor | None) -> None:
        """Launch; with slots of lists, which are written, cells are placed, too."""
        from prefix_kernels.residents.kernels import fetch_kernel

        heads = self.shape.num_kv_heads
        placing = 0 if slots is None else heads * _STRETCHES
        arguments = self._arguments(number) | {
            "host_ptr": host.view(_WORD),
            "head_map_ptr": self._entries if head_map is None else head_map,
            "slots_ptr": self._entries if slots is None else slots,
            "HAS_MAP": head_map is not None,
            "PLACES": placing,
            "TOKENS": _FETCH_TOKENS,
            "BLOCK_H": block_of(heads, _LEAST_BLOCK),
        }
        for name, cache in (("K", pool.k_cache), ("V", pool.v_cache)):
            words = cache.view(_WORD)
            arguments |= {f"pool_{name.lower()}_ptr": words, f"POOL_{name}_STRIDE": words.stride(0)}
            arguments |= {f"{name}_WORDS": words.shape[2], f"BLOCK_{name}": block_of(words.shape[2])}
        launch_behind(fetch_kernel, (placing + _COPYING,), arguments, num_warps=_FETCH_WARPS)

    def _check(self, number: int, host: Tensor, pool: PagedKV) -> None:
        shape = self.shape
        if not 0 <= number < shape.num_sets:
            raise ValueError(f"expected a set below {shape.num_sets}, got {number}")
        for cache in (pool.k_cache, pool.v_cache):
            if cache.shape[0] < shape.pool_rows or cache.shape[1] != shape.num_kv_heads:
                raise ValueError(
                    f"expected pool [{shape.pool_rows} rows or more, {shape.num_kv_heads}, width], got "
                    f"{tuple(cache.shape)}; are the sizes those of the pool?"
                )
            dense = cache.stride(2) == 1 and cache.stride(1) == cache.shape[2]
            if not dense or any(n * cache.dtype.itemsize % _WORD.itemsize for n in (cache.shape[2], cache.stride(0))):
                raise ValueError(
                    f"expected pool with adjacent heads of whole words of 4 bytes, got {tuple(cache.shape)} of "
                    f"{cache.dtype} with strides {cache.stride()}"
                )
        width = pool.k_cache.shape[2] + pool.v_cache.shape[2]
        wanted = (shape.num_host_pages, shape.num_kv_heads, PAGE_TOKENS, width)
        if host.shape != wanted or host.dtype != pool.k_cache.dtype or not host.is_contiguous():
            raise ValueError(
                f"expected host {wanted} {pool.k_cache.dtype}, contiguous, got {tuple(host.shape)} {host.dtype}; are "
                "both of one layer, and the sizes those of the pools?"
            )
        if self.device.type == "cuda" and host.device.type == "cpu" and not host.is_pinned():
            raise ValueError("expected host in pinned memory, which a kernel can read; got pageable memory")

    def _check_lists(self, host_pages: Tensor, lists: SelectedLists) -> None:
        if lists.slots is None:
            raise ValueError("expected lists with slots, got none; use new_lists(with_slots=True)")
        entries, rows = max(lists.positions.shape[0], self._lists_end), max(lists.counts.shape[0], self._counts_end)
        check_table("positions", lists.positions, (entries,))
        check_table("slots", lists.slots, (entries,))
        check_table("counts", lists.counts, (rows, self.shape.num_kv_heads))
        check_table("host_pages", host_pages, (max(host_pages.shape[0], self._tables_end),))
