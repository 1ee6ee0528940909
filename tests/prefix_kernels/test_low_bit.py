"""INT2, INT4 and INT8 against their definition, value by value."""

import doctest

import pytest
import torch

from prefix_kernels import low_bit
from prefix_kernels.low_bit import LowBitTensor, dequantize, pack_codes, quantize, unpack_codes
from tests.planted import randn


def by_definition(values, bits):
    """One channel's values after rounding to the nearest level, in Python floats."""
    step = (max(values) - min(values)) / (2**bits - 1)
    levels = [min(values) + step * i for i in range(2**bits)]
    return [min(levels, key=lambda level: abs(level - v)) for v in values]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_values_are_the_nearest_levels(bits):
    x = randn(2, 30, 8) + 3 * randn(2, 1, 8, seed=1)
    restored = dequantize(quantize(x, bits))
    for batch in range(2):
        for channel in range(8):
            expected = by_definition(x[batch, :, channel].tolist(), bits)
            torch.testing.assert_close(restored[batch, :, channel], torch.tensor(expected), atol=1e-5, rtol=1e-5)
    constant = torch.tensor([0.3, 0.0, -2.0, 1.0]).expand(3, 4)
    torch.testing.assert_close(dequantize(quantize(constant, bits)), constant)


@pytest.mark.parametrize(("bits", "byte"), [(2, 0b11100100), (4, 0b00010000), (8, 0)])
def test_packing_puts_the_first_code_in_the_low_bits(bits, byte):
    codes = torch.arange(1 << bits, dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed[0] == byte
    assert packed.numel() == codes.numel() * bits // 8
    assert torch.equal(unpack_codes(packed, bits), codes)


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (quantize, (randn(4, 3), 4), "multiple of 2 for 4 bits"),
        (quantize, (randn(4, 6), 2), "multiple of 4 for 2 bits"),
        (quantize, (randn(0, 4), 4), "num_rows >= 1"),
        (quantize, (randn(4, 4), 3), "2, 4 or 8, got 3"),
        (dequantize, (LowBitTensor(torch.zeros(3, 2).byte(), torch.zeros(3), torch.zeros(3)),), "in another way"),
    ],
)
def test_errors(call, arguments, message):
    with pytest.raises(ValueError, match=message):
        call(*arguments)


def test_the_example_runs():
    result = doctest.testmod(low_bit)
    assert result.attempted > 0
    assert result.failed == 0
