"""Builds the token index: of a prefix, and of keys that follow one."""

from __future__ import annotations

from torch import Tensor

from prefix_kernels.low_bit import LowBitTensor, quantize
from sglang_ext.methods.base import Arrays
from sglang_ext.methods.channels import CHANNELS, ChannelBuilder, keys_on
from sglang_ext.methods.token_index.spec import TokenIndexSpec

ARRAYS = (CHANNELS, *(f"keys_{name}" for name in LowBitTensor._fields))


class TokenIndexBuilder(ChannelBuilder[TokenIndexSpec]):
    """Builds the token index of a layer.

    Arrays: `channels` [num_kv_heads, num_channels] int16, ascending; `keys_packed` [num_kv_heads, prefix_len,
    num_channels * bits / 8] uint8, `keys_scale` and `keys_zero` [num_kv_heads, num_channels] fp32, see
    `LowBitTensor`. Which channels, `ChannelBuilder` says.
    """

    def build_layer(self, keys: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        return _arrays(keys, self.channels(keys, queries), self.spec.bits)


def index_behind(arrays: Arrays, keys: Tensor) -> dict[str, Tensor]:
    """Token index of keys that follow a prefix, on the channels and with the bits of the prefix's: no query is needed.

    Args:
        arrays: a layer of the prefix's index. Read only.
        keys: [num_tokens >= 1, num_kv_heads, head_dim] post-RoPE keys on the arrays' device. Read only.

    Returns:
        New arrays as `TokenIndexBuilder.build_layer` makes them, quantized between each channel's own bounds.
    """
    channels, *parts = (arrays[name] for name in ARRAYS)
    return _arrays(keys, channels.long(), LowBitTensor(*parts).bits)


def _arrays(keys: Tensor, channels: Tensor, bits: int) -> dict[str, Tensor]:
    """Keys [num_tokens, num_kv_heads, head_dim], quantized on channels int64 [num_kv_heads, num_channels]."""
    kept = keys_on(channels, keys)
    return dict(zip(ARRAYS, (channels.short(), *quantize(kept, bits)), strict=True))
