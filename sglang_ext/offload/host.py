"""A pool of host memory; `compat.host_pool` makes it of SGLang's own class for such memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from prefix_kernels.residents import from_pages, to_pages
from sglang_ext.config import PAGE_TOKENS

_RESTORED = 512
"""Pages that `restore` copies at once, at most."""

Run = tuple[int, int, int]
"""Consecutive pages among others: (place of the first one, its number, how many)."""


class HostPool:
    """K and V of all layers in pages of `PAGE_TOKENS` rows of host memory, and their ways to and from the device.

    Copies are queued on the current stream, so what is queued behind them there sees them.

    Attributes:
        num_pages: of the pool.
        dense_layers: that attend all.
        dense_begin: row of the device pool at which these have page 0, too, and all others behind it; None: there is no
            such layer.

    Args:
        memory: [num_layers, num_pages, num_kv_heads, PAGE_TOKENS, k_dim + v_dim], of each token its key and behind it
            its value; pinned on CUDA.
        device: SGLang's KV pool: `k_buffer` and `v_buffer` by layer, each [num_slots, num_kv_heads, dim].
        dtype: of what is stored: memory and buffers may have it as bytes.
        dense_layers, dense_begin: see the attributes.
        owner: of the memory; is kept.
    """

    def __init__(
        self,
        memory: Tensor,
        device: Any,
        dtype: torch.dtype,
        dense_layers: Collection[int] = (),
        dense_begin: int = 0,
        owner: Any = None,
    ) -> None:
        self.memory, self._device, self._dtype, self._owner = memory, device, dtype, owner
        self.num_pages, self.nbytes = memory.shape[1], memory.nbytes
        self._free = torch.arange(self.num_pages)
        self.dense_layers, self.dense_begin = frozenset(dense_layers), dense_begin if dense_layers else None

    @property
    def free_pages(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    def alloc(self, num_pages: int) -> Tensor | None:
        """[num_pages] int64 on the host, numbers of pages that are now the caller's; None: fewer are free."""
        if num_pages > len(self._free):
            return None
        taken, self._free = self._free[:num_pages], self._free[num_pages:]
        return taken

    def free(self, pages: Tensor) -> None:
        """Give pages back; [num_pages] int64."""
        # In order: SGLang's own allocator hands pages out as they came back, and a prefix falls into ever more runs.
        self._free = torch.cat([self._free, pages]).sort().values

    def layer(self, layer: int) -> Tensor:
        """[num_pages, num_kv_heads, PAGE_TOKENS, k_dim + v_dim] in the device pool's stored dtype, contiguous."""
        return self.memory[layer].view(self._dtype)

    def backup(self, slots: Tensor, pages: Tensor) -> None:
        """Copy K and V of all layers from the device pool.

        Args:
            slots: [num_tokens] int64 on the device, whole pages of tokens.
            pages: [num_tokens / PAGE_TOKENS] int64 on the host.
        """
        for layer, host in enumerate(self.memory):
            buffers = self._device.k_buffer[layer], self._device.v_buffer[layer]
            keys, values = (one.index_select(0, slots) for one in buffers)
            taken = to_pages(keys, values)
            for place, page, count in runs(pages):
                host[page : page + count].copy_(taken[place : place + count], non_blocking=True)
                if layer in self.dense_layers and self.dense_begin is not None:
                    for buffer, rows in zip(buffers, (keys, values), strict=True):
                        buffer[self.dense_begin :][rows_of(page, count)] = rows[rows_of(place, count)]

    def restore(self, pages: Tensor) -> None:
        """Copy to the rows of layers that attend all what pages hold that were not filled by `backup`."""
        for layer in self.dense_layers:
            buffers = self._device.k_buffer[layer], self._device.v_buffer[layer]
            for part in torch.split(pages, _RESTORED):
                for _, page, count in runs(part):
                    taken = self.memory[layer][page : page + count].to(buffers[0].device, non_blocking=True)
                    from_pages(taken, *(buffer[self.dense_begin :][rows_of(page, count)] for buffer in buffers))


def runs(pages: Tensor) -> Iterator[Run]:
    """Consecutive pages among `pages`, for copies in one piece."""
    if not len(pages):
        return
    breaks = (torch.diff(pages) != 1).nonzero().flatten() + 1
    bounds = [0, *breaks.tolist(), len(pages)]
    for begin, end in pairwise(bounds):
        yield begin, int(pages[begin]), end - begin


def rows_of(page: int, count: int) -> slice:
    """Rows of so many consecutive pages."""
    return slice(page * PAGE_TOKENS, (page + count) * PAGE_TOKENS)
