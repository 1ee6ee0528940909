"""References of the low-bit functions."""

from __future__ import annotations

import torch
from torch import Tensor


def quantize_reference(x: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """code = round((x - zero) / scale), value = code * scale + zero, per channel over the rows.

    Asymmetric: zero = min, scale = (max - min) / (2^bits - 1). Symmetric: scale = max |x| / (2^(bits-1) - 1), zero =
    -scale * 2^(bits-1), so that code 2^(bits-1) is exactly 0 and the lowest code stays unused. A channel with scale
    0 has one value only: it is restored exactly (asymmetric) or is all zeros (symmetric).
    """
    x = x.float()
    levels = (1 << bits) - 1
    if symmetric:
        half = 1 << (bits - 1)
        scale = x.abs().amax(dim=-2) / (half - 1)
        zero = scale * -half
    else:
        zero, top = x.aminmax(dim=-2)
        scale = (top - zero) / levels
    # Steps whose inverse leaves fp32 are as good as none.
    step = scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 1.0)[..., None, :]
    # x / step - zero / step: one pass over x, which is what quantizing a long prefix costs.
    codes = torch.addcmul(-zero[..., None, :] / step, x, 1.0 / step).round_().clamp_(0, levels).to(torch.uint8)
    return pack_codes_reference(codes, bits), scale, zero


def dequantize_reference(packed: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """value = code * scale + zero, in fp32."""
    codes = unpack_codes_reference(packed, bits).float()
    return codes.mul_(scale.float()[..., None, :]).add_(zero.float()[..., None, :])


def pack_codes_reference(codes: Tensor, bits: int) -> Tensor:
    """byte c = sum over i of codes[n * c + i] << (i * bits), n = 8 / bits codes a byte."""
    per_byte = 8 // bits
    packed = codes[..., 0::per_byte].clone()
    for i in range(1, per_byte):
        packed |= codes[..., i::per_byte] << (i * bits)
    return packed


def unpack_codes_reference(packed: Tensor, bits: int) -> Tensor:
    """codes[n * c + i] = (byte c >> (i * bits)) & (2^bits - 1)."""
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)
