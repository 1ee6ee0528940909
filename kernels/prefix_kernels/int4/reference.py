"""References of the INT4 functions."""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 15


def quantize_int4_reference(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """zero = min over rows; scale = (max - min) / 15; code = round((x - zero) / scale) in 0..15.

    A constant channel has scale 0 and codes 0, so it is restored exactly.
    """
    x = x.float()
    zero, top = x.aminmax(dim=-2)
    scale = (top - zero) / LEVELS
    step = scale.masked_fill(scale == 0, 1.0)[..., None, :]
    codes = ((x - zero[..., None, :]) / step).round_().clamp_(0, LEVELS).to(torch.uint8)
    return pack_int4_reference(codes), scale, zero


def dequantize_int4_reference(packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """value = code * scale + zero, in fp32."""
    codes = unpack_int4_reference(packed).float()
    return codes.mul_(scale.float()[..., None, :]).add_(zero.float()[..., None, :])


def pack_int4_reference(codes: Tensor) -> Tensor:
    """byte c = codes[2c] | codes[2c + 1] << 4."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_int4_reference(packed: Tensor) -> Tensor:
    """codes[2c] = byte c & 15; codes[2c + 1] = byte c >> 4."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
