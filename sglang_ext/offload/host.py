"""What is asked of a pool of host memory; `compat.host_pool` makes one of SGLang's own class."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from sglang_ext.config import PAGE_TOKENS


class HostPool(Protocol):
    """K and V of all layers in pages of `PAGE_TOKENS` rows of host memory, and their ways to and from the device.

    Copies are queued on the current stream, so what is queued behind them there sees them.

    Attributes:
        num_pages: of the pool.
        free_pages: that nobody has.
        nbytes: of host memory.
    """

    num_pages: int
    nbytes: int

    @property
    def free_pages(self) -> int: ...

    def alloc(self, num_pages: int) -> Tensor | None:
        """[num_pages] int64 on the host, numbers of pages that are now the caller's; None: fewer are free."""

    def free(self, pages: Tensor) -> None:
        """Give pages back; [num_pages] int64."""

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V, each [num_pages * PAGE_TOKENS, num_kv_heads, head_dim] in the device pool's stored dtype."""

    def backup(self, slots: Tensor, pages: Tensor) -> None:
        """Copy K and V of all layers from the device pool.

        Args:
            slots: [num_tokens] int64 on the device, whole pages of tokens.
            pages: [num_tokens / PAGE_TOKENS] int64 on the host.
        """

    def stage(self, layer: int, pages: Tensor, begin: int) -> None:
        """Copy K and V of one layer to consecutive rows of the device pool's tensors.

        Args:
            layer: its number.
            pages: [num_pages] int64 on the host.
            begin: first row.
        """


def runs(pages: Tensor) -> Iterator[tuple[int, int, int]]:
    """Consecutive pages among `pages`: (place of the first one, its number, how many), for copies in one piece."""
    if not len(pages):
        return
    breaks = (torch.diff(pages) != 1).nonzero().flatten() + 1
    bounds = [0, *breaks.tolist(), len(pages)]
    for begin, end in pairwise(bounds):
        yield begin, int(pages[begin]), end - begin


def rows_of(page: int, count: int) -> slice:
    """Rows of so many consecutive pages."""
    return slice(page * PAGE_TOKENS, (page + count) * PAGE_TOKENS)
