"""Rows in codes of 2, 4 or 8 bits per channel, in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BITS = (2, 4, 8)
"""Widths of a code; each divides a byte."""


class LowBitTensor(NamedTuple):
    """Quantized rows: value = code * scale + zero, per channel.

    Attributes:
        packed: [..., num_rows, num_channels * bits / 8] uint8; of the channels of a byte the first has the low bits.
        scale: [..., num_channels] fp32, at least 0; step between two codes.
        zero: [..., num_channels] fp32; value of code 0.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor

    @property
    def bits(self) -> int:
        """Width of a code, from the shapes. Raises ValueError where shapes or dtypes do not fit."""
        packed, scale, zero = self
        for bits in BITS:
            packed_shape = (*scale.shape[:-1], packed.shape[-2], scale.shape[-1] * bits // 8)
            if packed.dtype == torch.uint8 and packed.shape == packed_shape and zero.shape == scale.shape:
                return bits
        raise ValueError(
            "expected packed uint8 [..., num_rows, num_channels * bits / 8] with scale and zero [..., num_channels] "
            f"and bits of 2, 4 or 8, got {packed.dtype} {tuple(packed.shape)}, {tuple(scale.shape)} and "
            f"{tuple(zero.shape)}; was it quantized in another way?"
        )


def quantize(x: Tensor, bits: int) -> LowBitTensor:
    """Quantize to 2^bits levels per channel over the rows: code = round((x - zero) / scale).

    zero = min, scale = (max - min) / (2^bits - 1). A channel with scale 0 has one value only, restored exactly.

    Source: AB-Sparse, 3.3 (INT4, asymmetric, per channel is its choice).

    Args:
        x: [..., num_rows, num_channels] floating and finite, num_rows >= 1, num_channels a multiple of 8 / bits.
            Not written.
        bits: 2, 4 or 8.

    Returns:
        New tensors; `dequantize` differs from `x` by at most scale / 2 (plus fp32 rounding).

    Raises:
        ValueError: shape, dtype or bits do not fit.

    Example:
        >>> import torch
        >>> x = torch.tensor([[0.0, 1.0], [15.0, 1.0]])
        >>> dequantize(quantize(x, 4)).tolist()
        [[0.0, 1.0], [15.0, 1.0]]
    """
    if bits not in BITS:
        raise ValueError(f"expected bits to be 2, 4 or 8, got {bits}; choose one of them")
    if x.dim() < 2 or x.shape[-1] % (8 // bits) or x.shape[-2] == 0 or not x.dtype.is_floating_point:
        raise ValueError(
            "expected x [..., num_rows >= 1, num_channels] in a floating dtype with num_channels a multiple of "
            f"{8 // bits} for {bits} bits, got {tuple(x.shape)} {x.dtype}"
        )
    x = x.float()
    levels = (1 << bits) - 1
    zero, top = x.aminmax(dim=-2)
    scale = (top - zero) / levels
    # Steps whose inverse leaves fp32 are as good as none.
    step = scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 1.0)[..., None, :]
    # x / step - zero / step: one pass over x, which is what quantizing a long prefix costs.
    codes = torch.addcmul(-zero[..., None, :] / step, x, 1.0 / step).round_().clamp_(0, levels).to(torch.uint8)
    return LowBitTensor(pack_codes(codes, bits), scale, zero)


def dequantize(quantized: LowBitTensor) -> Tensor:
    """The values of quantized rows: [..., num_rows, num_channels] fp32, new memory.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    packed, scale, zero = quantized
    codes = unpack_codes(packed, quantized.bits).float()
    return codes.mul_(scale.float()[..., None, :]).add_(zero.float()[..., None, :])


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes below 2^bits [..., n] -> bytes [..., n * bits / 8], the first code of a byte in its low bits."""
    per_byte = 8 // bits
    packed = codes[..., 0::per_byte].clone()
    for i in range(1, per_byte):
        packed |= codes[..., i::per_byte] << (i * bits)
    return packed


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_codes`: uint8 [..., num_bytes] -> uint8 [..., num_bytes * 8 / bits]."""
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)
