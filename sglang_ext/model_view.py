"""What all rooms ask of SGLang's model runner: plain numbers and tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from prefix_index import ModelFingerprint
from prefix_kernels.types import PagedKV


class ModelView(Protocol):
    """`compat.runner.RunnerView` is the one implementation.

    Heads are those of this tensor-parallel rank; the fingerprint speaks of the whole model. The KV pool was sized from
    `kv_bytes` of the device, the same on all ranks; it may have less (`--max-total-tokens`).
    """

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_slots: int
    kv_bytes: int
    max_requests: int
    decode_graphs: bool
    device: torch.device
    tp_rank: int
    tp_size: int

    @property
    def req_to_token(self) -> Tensor: ...
    @property
    def has_kv_scales(self) -> bool: ...
    def kv(self, layer: int) -> PagedKV: ...
    def write_kv(self, layer: Any, forward_batch: Any, k: Tensor, v: Tensor) -> None: ...
    def fingerprint(self) -> ModelFingerprint: ...
    def absorption(self, layer: Any) -> Callable[[Tensor], Tensor] | None:
        """Of the RadixAttention that runs: [rows, num_qo_heads, any] queries, as it got them, to [rows, num_qo_heads,
        head_dim], by which the KV pool's keys are scored. None: it got such.
        """
        ...


def on_host(forward_batch: Any, name: str) -> list[int]:
    """A batch's numbers: from SGLang's copy on the host (`name`_cpu), where this release has one."""
    found = getattr(forward_batch, f"{name}_cpu", None)
    found = getattr(forward_batch, name) if found is None else found
    return [int(one) for one in (found if isinstance(found, list) else found.tolist())]
