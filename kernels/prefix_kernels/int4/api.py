"""Public INT4 functions: validation and dispatch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prefix_kernels.dispatch import resolve
from prefix_kernels.int4.reference import (
    dequantize_int4_reference,
    pack_int4_reference,
    quantize_int4_reference,
    unpack_int4_reference,
)

_QUANTIZE = {"reference": quantize_int4_reference}
_DEQUANTIZE = {"reference": dequantize_int4_reference}


class Int4Tensor(NamedTuple):
    """Quantized rows: value = code * scale + zero, per channel.

    Attributes:
        packed: [..., num_rows, num_channels / 2] uint8; channel 2c in the low nibble of byte c, 2c + 1 in the
            high.
        scale: [..., num_channels] fp32, at least 0; step between two codes.
        zero: [..., num_channels] fp32; value of code 0 (the channel's minimum).
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor


def quantize_int4(x: Tensor, *, implementation: str = "reference") -> Int4Tensor:
    """Quantize to 16 levels per channel. Source: AB-Sparse, 3.3 (asymmetric, one scale and zero per channel).

    Args:
        x: [..., num_rows, num_channels] floating and finite, num_rows >= 1, num_channels even.
        implementation: "reference".

    Returns:
        New tensors; `dequantize_int4` differs from `x` by at most scale / 2 (plus fp32 rounding).

    Raises:
        ValueError: shape or dtype does not fit, or an unknown implementation.

    Example:
        >>> import torch
        >>> x = torch.tensor([[0.0, 1.0], [15.0, 1.0]])
        >>> dequantize_int4(quantize_int4(x)).tolist()
        [[0.0, 1.0], [15.0, 1.0]]
    """
    run = resolve("quantize_int4", implementation, _QUANTIZE)
    if x.dim() < 2 or x.shape[-1] % 2 or x.shape[-2] == 0 or not x.dtype.is_floating_point:
        raise ValueError(
            "expected x [..., num_rows >= 1, num_channels] in a floating dtype with an even num_channels, "
            f"got {tuple(x.shape)} {x.dtype}"
        )
    return Int4Tensor(*run(x))


def dequantize_int4(quantized: Int4Tensor, *, implementation: str = "reference") -> Tensor:
    """The values of quantized rows: [..., num_rows, num_channels] fp32, new memory.

    Raises:
        ValueError: shapes or dtypes do not fit, or an unknown implementation.
    """
    run = resolve("dequantize_int4", implementation, _DEQUANTIZE)
    packed, scale, zero = quantized
    if packed.dtype != torch.uint8 or scale.shape != zero.shape or scale.shape[-1] != 2 * packed.shape[-1]:
        raise ValueError(
            "expected packed uint8 [..., num_rows, num_channels / 2] with scale and zero [..., "
            f"num_channels], got {packed.dtype} {tuple(packed.shape)}, {tuple(scale.shape)} and "
            f"{tuple(zero.shape)}"
        )
    return run(packed, scale, zero)


def pack_int4(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 [..., num_channels], num_channels even -> [..., num_channels / 2], low nibble first.

    Raises:
        ValueError: another dtype or an odd number of channels.
    """
    if codes.dtype != torch.uint8 or codes.shape[-1] % 2:
        raise ValueError(f"expected uint8 codes with an even last dim, got {codes.dtype} {tuple(codes.shape)}")
    return pack_int4_reference(codes)


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of `pack_int4`: uint8 [..., num_channels / 2] -> uint8 [..., num_channels].

    Raises:
        ValueError: another dtype.
    """
    if packed.dtype != torch.uint8:
        raise ValueError(f"expected packed uint8, got {packed.dtype}")
    return unpack_int4_reference(packed)
