"""AB-Sparse with one block size for all heads: block representations, selection by block.

Source: AB-Sparse, 2.2 (estimation), 3.3 (INT4 asymmetric per-channel centroids), 3.4 (fixed token budget).
The min/max representation and its upper bound are Quest's (2406.10774, 3.2). Block sizes per head come with
the calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from prefix_kernels.block_scores import block_scores_mean, block_scores_minmax
from prefix_kernels.int4 import Int4Tensor, dequantize_int4, quantize_int4
from prefix_kernels.pooling import Pooling, pool_scores
from prefix_kernels.top_k_selection import top_k_selection
from prefix_kernels.types import Selection
from sglang_ext.indexing.base import IndexSpec, check_choice, check_keys, require_arrays, to_half

BLOCK_SIZES = (16, 32, 64)


@dataclass(frozen=True)
class ABSparseSpec(IndexSpec):
    """Parameters of the block index.

    Attributes:
        block_size: tokens per block: 16, 32 or 64. The last block of a prefix may be shorter.
        representation: "mean" (mean key) or "minmax" (minimum and maximum per channel, Quest).
        quantization: "int4" (asymmetric per channel) or "none" (fp16).

    Raises:
        ValueError: a value outside its choices.
    """

    method: ClassVar[str] = "ab_sparse"
    block_size: int = 16
    representation: str = "mean"
    quantization: str = "int4"

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(
                f"expected ab_sparse.block_size to be one of {', '.join(map(str, BLOCK_SIZES))} tokens, got "
                f"{self.block_size}; choose one of them"
            )
        check_choice("ab_sparse.representation", self.representation, ("mean", "minmax"))
        check_choice("ab_sparse.quantization", self.quantization, ("int4", "none"))

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the representations that one block has."""
        return ("mean",) if self.representation == "mean" else ("min", "max")


@dataclass(frozen=True)
class ABSparseBuilder:
    """Builds block representations.

    Arrays, for each part p of `mean` or of `min` and `max`, with num_blocks = ceil(prefix_len / block_size):
    int4: `p_packed` [num_kv_heads, num_blocks, head_dim / 2] uint8, `p_scale` and `p_zero` [num_kv_heads,
    head_dim] fp32; none: `p` [num_kv_heads, num_blocks, head_dim] fp16.
    """

    spec: ABSparseSpec
    needs_queries: ClassVar[bool] = False

    def build_layer(self, keys: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        """See `IndexBuilder.build_layer`."""
        check_keys(keys)
        blocks = block_representation(keys, self.spec.block_size, self.spec.representation)
        arrays: dict[str, Tensor] = {}
        for part, block in zip(self.spec.parts, blocks, strict=True):
            if self.spec.quantization == "none":
                arrays[part] = to_half(block, f"ab_sparse {part}")
                continue
            quantized = quantize_int4(block)
            arrays.update({f"{part}_{name}": array for name, array in quantized._asdict().items()})
        return arrays


@dataclass(frozen=True)
class ABSparseSelector:
    """Scores blocks, pools after the softmax over blocks, takes the best blocks within the token budget."""

    spec: ABSparseSpec

    def select(
        self,
        arrays: Mapping[str, Tensor],
        q: Tensor,
        *,
        prefix_len: int,
        budget: int,
        num_sink: int,
        num_recent: int,
        sm_scale: float,
        pooling: Pooling,
    ) -> Selection:
        """See `Selector.select`."""
        blocks = [self._read(arrays, part) for part in self.spec.parts]
        block_size = self.spec.block_size
        num_blocks = -(-prefix_len // block_size)
        if blocks[0].shape[1] != num_blocks:
            raise ValueError(
                f"expected {num_blocks} blocks of {block_size} tokens for prefix_len={prefix_len}, got "
                f"{blocks[0].shape[1]}; is the index of another prefix or block size?"
            )
        if self.spec.representation == "mean":
            raw = block_scores_mean(q, blocks[0])
        else:
            raw = block_scores_minmax(q, blocks[0], blocks[1])
        scores = pool_scores(raw, sm_scale, pooling)
        return top_k_selection(scores, budget, num_sink, num_recent, block_size, prefix_len)

    def _read(self, arrays: Mapping[str, Tensor], part: str) -> Tensor:
        if self.spec.quantization == "none":
            return require_arrays(arrays, (part,), self.spec.method)[0]
        names = tuple(f"{part}_{name}" for name in Int4Tensor._fields)
        return dequantize_int4(Int4Tensor(*require_arrays(arrays, names, self.spec.method)))


def block_representation(keys: Tensor, block_size: int, representation: str) -> tuple[Tensor, ...]:
    """Per block the mean key, or the minimum and the maximum of each channel; a short last one as it is.

    Args:
        keys: [prefix_len >= 1, num_kv_heads, head_dim] floating.
        block_size: tokens per block.
        representation: "mean" or "minmax".

    Returns:
        One or two tensors [num_kv_heads, ceil(prefix_len / block_size), head_dim] fp32.
    """
    prefix_len, num_kv_heads, head_dim = keys.shape
    num_blocks = -(-prefix_len // block_size)
    rows = keys.transpose(0, 1).float()
    missing = num_blocks * block_size - prefix_len
    if missing:
        # Repeating the last key changes neither minimum nor maximum; the mean is corrected below.
        rows = torch.cat([rows, rows[:, -1:].expand(-1, missing, -1)], dim=1)
    blocks = rows.reshape(num_kv_heads, num_blocks, block_size, head_dim)
    if representation == "minmax":
        low, high = blocks.aminmax(dim=2)
        return low, high
    mean = blocks.mean(dim=2)
    mean[:, -1] = blocks[:, -1, : block_size - missing].mean(dim=1)
    return (mean,)
