"""INT2, INT4 and INT8 quantization per channel, codes packed into bytes."""

from prefix_kernels.low_bit.api import (
    BITS,
    LowBitTensor,
    dequantize,
    pack_codes,
    quantize,
    unpack_codes,
)
from prefix_kernels.low_bit.reference import dequantize_reference, quantize_reference

__all__ = [
    "BITS",
    "LowBitTensor",
    "dequantize",
    "dequantize_reference",
    "pack_codes",
    "quantize",
    "quantize_reference",
    "unpack_codes",
]
