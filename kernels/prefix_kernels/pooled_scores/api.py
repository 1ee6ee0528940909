"""Public pooled scores straight from an index: validation and dispatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from prefix_kernels._tile import check_queries
from prefix_kernels.dispatch import resolve
from prefix_kernels.low_bit import LowBitTensor
from prefix_kernels.pooled_scores.reference import (
    block_scores_reference,
    exact_scores_reference,
    token_scores_reference,
)
from prefix_kernels.pooling import Pooling

_Table = Mapping[str, Callable[..., Tensor] | str]
_MODULE = "prefix_kernels.pooled_scores.triton"
_TOKEN: _Table = {"reference": token_scores_reference, "triton": f"{_MODULE}:token_scores_triton"}
_EXACT: _Table = {"reference": exact_scores_reference, "triton": f"{_MODULE}:exact_scores_triton"}
_BLOCK: _Table = {"reference": block_scores_reference, "triton": f"{_MODULE}:block_scores_triton"}


def token_scores(
    q: Tensor,
    keys: LowBitTensor,
    channels: Tensor | None,
    sm_scale: float,
    pooling: Pooling = Pooling.MAX,
    *,
    implementation: str = "reference",
) -> Tensor:
    """Pooled share of attention of every token of a prefix, by its low-bit key. Source: AsyncTLS, token selection.

    Args:
        q: [num_rows, num_qo_heads, head_dim] post-RoPE queries, fp32, fp16 or bf16; num_rows >= 1.
        keys: of `quantize`, [num_kv_heads, prefix_len, num_channels]; prefix_len >= 1.
        channels: [num_kv_heads, num_channels] integer, the channels that the codes keep; None for all of them.
        sm_scale: multiplies q.k before the softmax.
        pooling: over the rows and query heads, after the softmax.
        implementation: "reference" or "triton" (on a GPU, or in Triton's interpreter).

    Returns:
        [num_kv_heads, prefix_len] fp32, natural log of the largest or mean share.

    Raises:
        ValueError: shapes do not fit, or an unknown implementation.
    """
    run = resolve("token_scores", implementation, _TOKEN)
    bits = keys.bits
    num_kv_heads, count = keys.packed.shape[:2]
    kept = keys.scale.shape[1]
    check_queries(q, num_kv_heads, q.shape[2] if channels is not None else kept)
    if channels is not None and (channels.shape != keys.scale.shape or channels.dtype.is_floating_point):
        raise ValueError(
            f"expected channels {tuple(keys.scale.shape)} as integers, one per kept channel, got "
            f"{tuple(channels.shape)} {channels.dtype}"
        )
    _check_some(q, count)
    _check_units(bits, kept, implementation)
    return run(q, keys, channels, sm_scale, Pooling(pooling))


def exact_scores(
    q: Tensor,
    k_cache: Tensor,
    slots: Tensor,
    sm_scale: float,
    pooling: Pooling = Pooling.MAX,
    *,
    implementation: str = "reference",
) -> Tensor:
    """Pooled share of attention of every token of a prefix, by its key: an anchor layer's pass. Source: Kascade, 3.4.

    Args:
        q, sm_scale, pooling, implementation: as in `token_scores`; q in the dtype of `k_cache`.
        k_cache: [num_slots, num_kv_heads, head_dim]; only listed slots are read.
        slots: [prefix_len] integer, prefix position -> token slot; prefix_len >= 1.

    Returns:
        As `token_scores`.

    Raises:
        ValueError: shapes do not fit, or an unknown implementation.
    """
    run = resolve("exact_scores", implementation, _EXACT)
    if k_cache.dim() != 3 or slots.dim() != 1 or slots.dtype.is_floating_point:
        raise ValueError(
            "expected k_cache [num_slots, num_kv_heads, head_dim] and slots [prefix_len] as integers, got "
            f"{tuple(k_cache.shape)} and {tuple(slots.shape)} {slots.dtype}"
        )
    check_queries(q, k_cache.shape[1], k_cache.shape[2])
    _check_some(q, slots.shape[0])
    return run(q, k_cache, slots, sm_scale, Pooling(pooling))


def low_bit_block_scores(
    q: Tensor,
    parts: tuple[LowBitTensor, ...],
    row_indptr: Tensor,
    sm_scale: float,
    pooling: Pooling = Pooling.MAX,
    *,
    implementation: str = "reference",
) -> Tensor:
    """Pooled share of attention of every block, straight from its codes, heads of different length without padding.

    Source: AB-Sparse, 3.4 (kernel 1: fused dequantization and scoring over a ragged layout).

    Args:
        q, sm_scale, pooling, implementation: as in `token_scores`.
        parts: one for mean keys, or the maximum and the minimum of each channel, in this order: packed [num_rows,
            head_dim * bits / 8] uint8, the blocks of all heads one after the other; scale and zero [num_kv_heads,
            head_dim] fp32.
        row_indptr: [num_kv_heads + 1] integer, where each head's blocks begin, from 0 to at most num_rows; each has one
            block or more.

    The bound of two parts takes the maximum for positive and the minimum for negative channels of a query: where
    quantization let them cross, it is lower than Quest's by less than a step.

    Returns:
        [num_kv_heads, most blocks of a head] fp32, natural log; -inf behind a head's own blocks.

    Raises:
        ValueError: shapes do not fit, or an unknown implementation.
    """
    run = resolve("low_bit_block_scores", implementation, _BLOCK)
    if len(parts) not in (1, 2) or row_indptr.dim() != 1 or row_indptr.shape[0] < 2:
        raise ValueError(
            f"expected 1 part (mean) or 2 (maximum, minimum) and row_indptr [num_kv_heads + 1], got {len(parts)} and "
            f"{tuple(row_indptr.shape)}"
        )
    num_kv_heads, head_dim = row_indptr.shape[0] - 1, q.shape[-1]
    check_queries(q, num_kv_heads, head_dim)
    for part in parts:
        widths = [head_dim * bits // 8 for bits in (2, 4, 8)]
        if part.scale.shape != (num_kv_heads, head_dim) or part.packed.shape[1] not in widths:
            raise ValueError(
                f"expected packed [num_rows, head_dim * bits / 8] and scale [{num_kv_heads}, {head_dim}], got "
                f"{tuple(part.packed.shape)} and {tuple(part.scale.shape)}"
            )
        if part.packed.dtype != torch.uint8 or part.packed.shape != parts[0].packed.shape:
            raise ValueError(
                f"expected parts of one shape in uint8, got {tuple(part.packed.shape)} {part.packed.dtype} beside "
                f"{tuple(parts[0].packed.shape)}"
            )
    _check_some(q, parts[0].packed.shape[0])
    _check_units(parts[0].packed.shape[1] * 8 // head_dim, head_dim, implementation)
    return run(q, parts, row_indptr, sm_scale, Pooling(pooling))


def _check_some(q: Tensor, count: int) -> None:
    if q.shape[0] < 1 or count < 1:
        raise ValueError(f"expected a query row and a candidate at least, got {q.shape[0]} and {count}")


def _check_units(bits: int, channels: int, implementation: str) -> None:
    if implementation == "triton" and bits < 8 and channels % 4:
        raise ValueError(
            f"expected channels as a multiple of 4 for codes of {bits} bits, got {channels}; keep more of them"
        )
