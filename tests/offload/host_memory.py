"""A `HostPool` of plain tensors beside a KV pool of plain tensors, whose padding page holds NaN."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from prefix_kernels.residents import to_pages
from prefix_kernels.types import PagedKV
from sglang_ext.config import PAGE_TOKENS


class PlainPools:
    """Both pools; with two layers unless said otherwise.

    Args:
        slots: of the device pool.
        num_pages: of host memory; pinned where the device is CUDA's.
        of: device and dtype.
    """

    def __init__(self, slots: int, num_pages: int, layers: int = 2, heads: int = 2, dim: int = 8, **of: Any) -> None:
        self.num_pages, self.dense_begin = num_pages, None
        self.device = [torch.randn(2, slots, heads, dim, **of) for _ in range(layers)]
        shape, pinned = (num_pages, heads, PAGE_TOKENS, 2 * dim), self.device[0].is_cuda
        dtype = self.device[0].dtype
        self.host = [_aligned(shape, dtype, pinned).fill_(float("nan")) for _ in range(layers)]
        for layer in self.device:
            layer[:, :PAGE_TOKENS] = float("nan")
        self.nbytes = sum(layer.nbytes for layer in self.host)
        self._free = torch.randperm(num_pages).tolist()

    def kv(self, layer: int, *scales: float) -> PagedKV:
        return PagedKV(*self.device[layer], *scales)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def alloc(self, num_pages: int) -> Tensor | None:
        if num_pages > len(self._free):
            return None
        taken, self._free = self._free[:num_pages], self._free[num_pages:]
        return torch.tensor(taken)

    def free(self, pages: Tensor) -> None:
        assert not set(pages.tolist()) & set(self._free)
        self._free += pages.tolist()

    def layer(self, layer: int) -> Tensor:
        return self.host[layer]

    def backup(self, slots: Tensor, pages: Tensor) -> None:
        for device, host in zip(self.device, self.host, strict=True):
            host[pages] = to_pages(*device[:, slots]).to(host.device)

    def restore(self, pages: Tensor) -> None:
        """No layer has them in rows of its own."""


def _aligned(shape: tuple[int, ...], dtype: torch.dtype, pinned: bool) -> Tensor:
    """Memory that begins at a block of a disk, as SGLang's does behind `SGLangHostPool`."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = torch.empty(nbytes + 4096, dtype=torch.uint8, pin_memory=pinned)
    begin = -memory.data_ptr() % 4096
    return memory[begin : begin + nbytes].view(dtype).view(shape)
