"""A `HostPool` of plain memory beside a KV pool of plain tensors, whose padding page holds NaN."""

from __future__ import annotations

import math
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from prefix_kernels.types import PagedKV
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.offload.host import HostPool


class PlainPools(HostPool):
    """Both pools; with two layers unless said otherwise. Pages are given out in any order.

    Args:
        slots: of the device pool.
        num_pages: of host memory; pinned where the device is CUDA's.
        dense: layers that have what the host has behind their slots.
        of: device and dtype.
    """

    def __init__(
        self,
        slots: int,
        num_pages: int,
        layers: int = 2,
        heads: int = 2,
        dim: int = 8,
        dense: Collection[int] = (),
        **of: Any,
    ) -> None:
        behind = num_pages * PAGE_TOKENS
        self.device = [torch.randn(2, slots + behind * (n in dense), heads, dim, **of) for n in range(layers)]
        for layer in self.device:
            layer[:, :PAGE_TOKENS] = float("nan")
        keys, values = zip(*self.device, strict=True)
        dtype, pinned = keys[0].dtype, keys[0].is_cuda
        memory = _aligned((layers, num_pages, heads, PAGE_TOKENS, 2 * dim), dtype, pinned).fill_(float("nan"))
        super().__init__(memory, SimpleNamespace(k_buffer=keys, v_buffer=values), dtype, dense, slots)
        self._free = torch.randperm(num_pages)

    def kv(self, layer: int, *scales: float) -> PagedKV:
        return PagedKV(*self.device[layer], *scales)

    def free(self, pages: Tensor) -> None:
        assert not set(pages.tolist()) & set(self._free.tolist())
        self._free = torch.cat([self._free, pages])


def _aligned(shape: tuple[int, ...], dtype: torch.dtype, pinned: bool) -> Tensor:
    """Memory that begins at a block of a disk, as SGLang's does."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = torch.empty(nbytes + 4096, dtype=torch.uint8, pin_memory=pinned)
    begin = -memory.data_ptr() % 4096
    return memory[begin : begin + nbytes].view(dtype).view(shape)
