"""What is asked of a pool of host memory; `compat.host_pool` makes one of SGLang's own class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from prefix_kernels.residents import from_pages
from sglang_ext.config import PAGE_TOKENS


class RowsBehind(NamedTuple):
    """Rows of the device pool's tensors behind those that SGLang's allocator knows, of all layers.

    Attributes:
        staging: a piece of a prefix is attended there; whole pages.
        residents: cells of `decode.swap`.
    """

    staging: range
    residents: range


Run = tuple[int, int, int]
"""Consecutive pages among others: (place of the first one, its number, how many)."""


class HostPool(Protocol):
    """K and V of all layers in pages of `PAGE_TOKENS` rows of host memory, and their ways to and from the device.

    Copies are queued on the current stream, so what is queued behind them there sees them.

    Attributes:
        num_pages: of the pool.
        free_pages: that nobody has.
        nbytes: of host memory.
        dense_begin: row of the device pool at which layers that attend all have page 0, too, and all others behind it;
            None: there is no such layer.
    """

    num_pages: int
    nbytes: int
    dense_begin: int | None

    @property
    def free_pages(self) -> int: ...

    def alloc(self, num_pages: int) -> Tensor | None:
        """[num_pages] int64 on the host, numbers of pages that are now the caller's; None: fewer are free."""

    def free(self, pages: Tensor) -> None:
        """Give pages back; [num_pages] int64."""

    def layer(self, layer: int) -> Tensor:
        """[num_pages, num_kv_heads, PAGE_TOKENS, k_dim + v_dim] in the device pool's stored dtype, contiguous: of each
        token its key and behind it its value.
        """

    def backup(self, slots: Tensor, pages: Tensor) -> None:
        """Copy K and V of all layers from the device pool.

        Args:
            slots: [num_tokens] int64 on the device, whole pages of tokens.
            pages: [num_tokens / PAGE_TOKENS] int64 on the host.
        """

    def restore(self, pages: Tensor) -> None:
        """Copy to the rows of layers that attend all what pages hold that were not filled by `backup`."""


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


def stage(host: Tensor, pages: Sequence[Run], device: tuple[Tensor, Tensor], begin: int) -> None:
    """Copy K and V of pages to consecutive rows, on the current stream and without a wait: a copy for a run.

    Args:
        host: of a layer, as `HostPool.layer`, pinned on CUDA.
        pages: of it.
        device: K and V of any layer on the device; their bytes are copied, whatever dtype says.
        begin: first row.
    """
    count = sum(count for _, _, count in pages)
    taken = torch.empty((count, *host.shape[1:]), dtype=host.dtype, device=device[0].device)
    for place, page, number in pages:
        taken[place : place + number].copy_(host[page : page + number], non_blocking=True)
    keys, values = (one.view(host.dtype)[begin:][: count * PAGE_TOKENS] for one in device)
    from_pages(taken, keys, values)
