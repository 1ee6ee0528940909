"""INT4 asymmetric per-channel quantization of key representations, two values per byte."""

from prefix_kernels.int4.api import Int4Tensor, dequantize_int4, pack_int4, quantize_int4, unpack_int4
from prefix_kernels.int4.reference import dequantize_int4_reference, quantize_int4_reference

__all__ = [
    "Int4Tensor",
    "dequantize_int4",
    "dequantize_int4_reference",
    "pack_int4",
    "quantize_int4",
    "quantize_int4_reference",
    "unpack_int4",
]
