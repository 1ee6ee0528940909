"""What is asked of a pool of host memory; `compat.host_pool` makes one of SGLang's own class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from sglang_ext.config import PAGE_TOKENS

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


def copy_runs(host: Tensor, pages: Sequence[Run], target: Tensor) -> None:
    """Copy pages on the current stream, without a wait: a copy for each run.

    Args:
        host: of a layer, as `HostPool.layer`, pinned on CUDA.
        pages: of it.
        target: [their places or more, ...], as `host`.
    """
    for place, page, number in pages:
        target[place : place + number].copy_(host[page : page + number], non_blocking=True)
