"""Public low-bit functions: validation and dispatch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prefix_kernels.dispatch import resolve
from prefix_kernels.low_bit.reference import (
    dequantize_reference,
    pack_codes_reference,
    quantize_reference,
    unpack_codes_reference,
)

BITS = (2, 4, 8)
"""Widths of a code; each divides a byte."""

_QUANTIZE = {"reference": quantize_reference}
_DEQUANTIZE = {"reference": dequantize_reference}


class LowBitTensor(NamedTuple):
    """Quantized rows: value = code * scale + zero, per channel, whether symmetric or not.

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
        """Width of a code, from the shapes.

        Raises:
            ValueError: shapes or dtypes do not fit.
        """
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


def quantize(x: Tensor, bits: int, symmetric: bool = False, *, implementation: str = "reference") -> LowBitTensor:
    """Quantize to 2^bits levels per channel. Source: AB-Sparse, 3.3 (INT4 asymmetric per channel is its choice).

    Args:
        x: [..., num_rows, num_channels] floating and finite, num_rows >= 1, num_channels a multiple of 8 / bits.
            Not written.
        bits: 2, 4 or 8.
        symmetric: levels lie evenly around 0, one of them at 0 (2^bits - 1 levels are used); otherwise between the
            channel's minimum and maximum.
        implementation: "reference".

    Returns:
        New tensors; `dequantize` differs from `x` by at most scale / 2 (plus fp32 rounding).

    Raises:
        ValueError: shape, dtype or bits do not fit, or an unknown implementation.

    Example:
        >>> import torch
        >>> x = torch.tensor([[0.0, 1.0], [15.0, 1.0]])
        >>> dequantize(quantize(x, 4)).tolist()
        [[0.0, 1.0], [15.0, 1.0]]
    """
    run = resolve("quantize", implementation, _QUANTIZE)
    _check_bits(bits)
    if x.dim() < 2 or x.shape[-1] % (8 // bits) or x.shape[-2] == 0 or not x.dtype.is_floating_point:
        raise ValueError(
            "expected x [..., num_rows >= 1, num_channels] in a floating dtype with num_channels a multiple of "
            f"{8 // bits} for {bits} bits, got {tuple(x.shape)} {x.dtype}"
        )
    return LowBitTensor(*run(x, bits, symmetric))


def dequantize(quantized: LowBitTensor, *, implementation: str = "reference") -> Tensor:
    """The values of quantized rows: [..., num_rows, num_channels] fp32, new memory.

    Raises:
        ValueError: shapes or dtypes do not fit, or an unknown implementation.
    """
    run = resolve("dequantize", implementation, _DEQUANTIZE)
    return run(*quantized, quantized.bits)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes below 2^bits [..., n] -> bytes [..., n * bits / 8], the first code of a byte in its low bits.

    Raises:
        ValueError: another dtype, another width, or n is no multiple of 8 / bits.
    """
    _check_bits(bits)
    if codes.dtype != torch.uint8 or codes.dim() == 0 or codes.shape[-1] % (8 // bits):
        raise ValueError(
            f"expected uint8 codes with a last dim that is a multiple of {8 // bits}, got {codes.dtype} "
            f"{tuple(codes.shape)}"
        )
    return pack_codes_reference(codes, bits)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_codes`: uint8 [..., num_bytes] -> uint8 [..., num_bytes * 8 / bits].

    Raises:
        ValueError: another dtype or another width.
    """
    _check_bits(bits)
    if packed.dtype != torch.uint8:
        raise ValueError(f"expected packed uint8, got {packed.dtype}")
    return unpack_codes_reference(packed, bits)


def _check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"expected bits to be 2, 4 or 8, got {bits}; choose one of them")
