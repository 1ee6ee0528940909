"""The token index: low-bit keys on a few channels, a score for every token.

Source: AsyncTLS, "Fine-grained Token Selection" (after Double Sparsity: channels with the greatest |q_i| |k_i|;
INT4 keys on them). With all channels it is a quantized copy of the keys, which ranks within 0.003 of the true
scores at INT4 (shipped model, 8K tokens, 5% kept). By default it keeps half of them, each prefix its own, and is the
default method (docs/selection.md); as the second level of `two_level` it is read for candidates only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from prefix_kernels.block_scores import block_scores_mean
from prefix_kernels.low_bit import BITS, LowBitTensor, dequantize, quantize
from sglang_ext.methods.arrays import Form, IndexSize, low_bit_forms
from sglang_ext.methods.base import Arrays, SelectArgs, Selector, check_choice, pool_candidates
from sglang_ext.methods.channels import CHANNELS, ChannelBuilder, ChannelSpec, keys_on, queries_on

ARRAYS = (CHANNELS, *(f"keys_{name}" for name in LowBitTensor._fields))


@dataclass(frozen=True)
class TokenIndexSpec(ChannelSpec):
    """Parameters of the token index.

    Attributes:
        num_channels: channels of a key that are kept; a multiple of 8 / bits. 0: as `channel_ratio` says.
        channel_ratio: kept channels as a fraction of head_dim where `num_channels` is 0; rounded up to whole bytes. 1:
            all channels; 0.5: at most 128. Beside `num_channels` only the default, or 1, may stand; no ratio counts
            then.
        bits: of a value: 2, 4 or 8.

    Raises:
        ValueError: a value out of range.
    """

    method: ClassVar[str] = "token_index"
    channel_ratio: float = 0.5
    bits: int = 4

    def __post_init__(self) -> None:
        check_choice("token_index.bits", self.bits, BITS)
        super().__post_init__()

    def forms(self, size: IndexSize) -> dict[str, Form]:
        kept = self.kept_channels(size.head_dim)
        return {CHANNELS: self.channels_form(size), **low_bit_forms("keys", size.prefix_len, kept, self.bits)}


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


@dataclass(frozen=True)
class TokenIndexSelector(Selector[TokenIndexSpec]):
    """Token scores q.k over the kept channels, pooled after the softmax.

    Attributes:
        sum_every: how few tokens, or candidates, enter the sums of that softmax, see `pooling.pool_scores`.
    """

    sum_every: int = 1

    def token_scores(self, arrays: Arrays, q: Tensor, args: SelectArgs, candidates: Tensor | None = None) -> Tensor:
        channels, *parts = (arrays[name] for name in ARRAYS)
        raw = block_scores_mean(queries_on(channels, q), dequantize(LowBitTensor(*parts)))
        return pool_candidates(raw, args, candidates, self.sum_every)
