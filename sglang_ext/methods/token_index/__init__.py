"""The token index: low-bit keys on a few channels, a score for every token.

Source: AsyncTLS, "Fine-grained Token Selection" (after Double Sparsity: channels with the greatest |q_i| |k_i|;
INT4 keys on them). With all channels it is a quantized copy of the keys, which ranks within 0.003 of the true
scores at INT4 (shipped model, 8K tokens, 5% kept). By default it keeps 75% of them, each prefix its own, and is the
default method (docs/selection.md); as the second level of `two_level` it is read for candidates only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from prefix_kernels.block_scores import block_scores_mean
from prefix_kernels.low_bit import BITS, LowBitTensor, dequantize, quantize
from prefix_kernels.pooling import Pooling, pool_scores
from prefix_kernels.top_k_selection import top_k_selection
from prefix_kernels.types import Selection
from sglang_ext.methods.base import (
    NO_PROFILE,
    IndexSpec,
    LayerProfile,
    check_keys,
    check_range,
    check_samples,
    pool_candidates,
    require_arrays,
)
from sglang_ext.methods.contents import ContentError, Form, IndexSize, low_bit_forms

CHANNEL_RATIO = 0.75
"""Kept channels by default, as a fraction of head_dim."""


@dataclass(frozen=True)
class TokenIndexSpec(IndexSpec):
    """Parameters of the token index.

    Attributes:
        num_channels: channels of a key that are kept; a multiple of 8 / bits. 0: as `channel_ratio` says.
        channel_ratio: kept channels as a fraction of head_dim where `num_channels` is 0; rounded up to whole bytes. 1:
            all channels. Beside `num_channels` only the default, or 1, may stand; neither counts then.
        bits: of a value: 2, 4 or 8.
        symmetric: levels around 0 instead of between each channel's minimum and maximum.

    Raises:
        ValueError: a value out of range.
    """

    method: ClassVar[str] = "token_index"
    num_channels: int = 0
    channel_ratio: float = CHANNEL_RATIO
    bits: int = 4
    symmetric: bool = False

    def __post_init__(self) -> None:
        check_range("token_index.num_channels", self.num_channels, 0, 1 << 15)
        if self.bits not in BITS:
            raise ValueError(f"expected token_index.bits to be 2, 4 or 8, got {self.bits}; choose one of them")
        if self.num_channels % (8 // self.bits):
            raise ValueError(
                f"expected token_index.num_channels to be a multiple of {8 // self.bits} (values of {self.bits} bits "
                f"in a byte), got {self.num_channels}; round it up"
            )
        if not 0.0 < self.channel_ratio <= 1.0:
            raise ValueError(
                f"expected token_index.channel_ratio above 0 and at most 1, got {self.channel_ratio}; 1 takes all "
                "channels"
            )
        if self.num_channels and self.channel_ratio not in (CHANNEL_RATIO, 1.0):
            raise ValueError(
                f"expected token_index.num_channels or token_index.channel_ratio, got both ({self.num_channels} and "
                f"{self.channel_ratio}); remove one"
            )

    def kept_channels(self, head_dim: int) -> int:
        """Channels of a key that are kept."""
        if self.num_channels:
            return self.num_channels
        unit = 8 // self.bits
        return math.ceil(round(self.channel_ratio * head_dim, 6) / unit) * unit

    @property
    def selects_channels(self) -> bool:
        """Whether some channels are left out."""
        return self.num_channels > 0 or self.channel_ratio < 1.0

    def forms(self, size: IndexSize) -> dict[str, Form]:
        """See `IndexSpec.forms`."""
        kept = self.kept_channels(size.head_dim)
        return {
            "channels": Form("int16", (kept,), 0, size.head_dim - 1),
            **low_bit_forms("keys", size.prefix_len, kept, self.bits),
        }

    def check(self, arrays: Mapping[str, Tensor], size: IndexSize) -> None:
        """See `IndexSpec.check`."""
        channels = arrays["channels"]
        if not bool((channels[:, 1:] > channels[:, :-1]).all()):
            raise ContentError("channels", "ascending channels", channels.tolist())


@dataclass(frozen=True)
class TokenIndexBuilder:
    """Builds the token index of a layer.

    Arrays: `channels` [num_kv_heads, num_channels] int16, ascending; `keys_packed` [num_kv_heads, prefix_len,
    num_channels * bits / 8] uint8, `keys_scale` and `keys_zero` [num_kv_heads, num_channels] fp32, see
    `LowBitTensor`.

    Attributes:
        spec: parameters.
        layer: its `channels` are taken where they are known and `num_channels` is given; otherwise those with the
            greatest max |q_i| * max |k_i| over the prefix's own keys and sampled queries.
    """

    spec: TokenIndexSpec
    layer: LayerProfile = NO_PROFILE

    @property
    def needs_queries(self) -> bool:
        """Only to choose channels."""
        profiled = bool(self.spec.num_channels and self.layer.channels)
        return self.spec.selects_channels and not profiled

    def build_layer(self, keys: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        """See `IndexBuilder.build_layer`."""
        check_keys(keys)
        unit, head_dim = 8 // self.spec.bits, keys.shape[2]
        if not self.spec.num_channels and self.spec.kept_channels(head_dim) > head_dim - head_dim % unit:
            raise ValueError(
                f"expected head_dim to be a multiple of {unit} for {self.spec.bits} bits, got {head_dim}; raise "
                "token_index.bits or lower token_index.channel_ratio"
            )
        return _arrays(keys, self._channels(keys, queries).to(keys.device), self.spec.bits, self.spec.symmetric)

    def _channels(self, keys: Tensor, queries: Tensor | None) -> Tensor:
        _, num_kv_heads, head_dim = keys.shape
        wanted = self.spec.kept_channels(head_dim)
        if wanted > head_dim:
            raise ValueError(
                f"expected token_index.num_channels of at most head_dim={head_dim}, got {wanted}; 0 takes all channels"
            )
        if self.spec.num_channels and self.layer.channels:
            return _profiled(self.layer.channels, num_kv_heads, wanted, head_dim)
        if self.spec.selects_channels:
            samples = check_samples(queries, keys, self.spec.method)
            contribution = _largest(samples, 1) * _largest(keys, 0)
            order = contribution.argsort(dim=1, descending=True, stable=True)
            return order[:, :wanted].sort(dim=1).values
        return torch.arange(head_dim).expand(num_kv_heads, -1).contiguous()


def index_behind(arrays: Mapping[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
    """Token index of keys that follow a prefix, on the channels and with the bits of the prefix's: no query is needed.

    Args:
        arrays: a layer of the prefix's index. Read only.
        keys: [num_tokens >= 1, num_kv_heads, head_dim] post-RoPE keys on the arrays' device. Read only.

    Returns:
        New arrays as `TokenIndexBuilder.build_layer` makes them, quantized between each channel's own bounds.

    Raises:
        ValueError: arrays of another method.
    """
    names = tuple(f"keys_{name}" for name in LowBitTensor._fields)
    channels, *parts = require_arrays(arrays, ("channels", *names), TokenIndexSpec.method)
    return _arrays(keys, channels.long(), LowBitTensor(*parts).bits, symmetric=False)


def _arrays(keys: Tensor, channels: Tensor, bits: int, symmetric: bool) -> dict[str, Tensor]:
    """Keys [num_tokens, num_kv_heads, head_dim], quantized on channels int64 [num_kv_heads, num_channels]."""
    rows = keys.transpose(0, 1)
    kept = rows.gather(2, channels[:, None].expand(-1, rows.shape[1], -1))
    arrays = {f"keys_{name}": array for name, array in quantize(kept, bits, symmetric)._asdict().items()}
    return {"channels": channels.short(), **arrays}


@dataclass(frozen=True)
class TokenIndexSelector:
    """Token scores q.k over the kept channels, pooled after the softmax.

    Attributes:
        spec: parameters.
        sum_every: how few tokens enter the sums of that softmax, see `pooling.pool_scores`; among candidates all do.
    """

    spec: TokenIndexSpec
    sum_every: int = 1

    def select(
        self,
        arrays: Mapping[str, Tensor],
        q: Tensor,
        *,
        prefix_len: int,
        budget: int,
        num_sink: int,
        num_recent: int,
        sm_scale: float,
        pooling: Pooling,
    ) -> Selection:
        """See `Selector.select`."""
        scores = self.token_scores(arrays, q, prefix_len=prefix_len, sm_scale=sm_scale, pooling=pooling)
        return top_k_selection(scores, budget, num_sink, num_recent, 1, prefix_len)

    def token_scores(
        self,
        arrays: Mapping[str, Tensor],
        q: Tensor,
        *,
        prefix_len: int,
        sm_scale: float,
        pooling: Pooling,
        candidates: Tensor | None = None,
    ) -> Tensor:
        """See `Selector.token_scores`."""
        names = tuple(f"keys_{name}" for name in LowBitTensor._fields)
        channels, *parts = require_arrays(arrays, ("channels", *names), self.spec.method)
        quantized = LowBitTensor(*parts)
        if quantized.packed.shape[1] != prefix_len or quantized.bits != self.spec.bits:
            raise ValueError(
                f"expected keys of prefix_len={prefix_len} positions and {self.spec.bits} bits, got "
                f"{quantized.packed.shape[1]} and {quantized.bits}; is the index of another prefix or spec?"
            )
        num_rows, num_qo_heads, head_dim = q.shape
        num_kv_heads, num_channels = channels.shape
        grouped = q.view(num_rows, num_kv_heads, -1, head_dim)
        index = channels.long()[None, :, None].expand(num_rows, -1, grouped.shape[2], -1)
        kept = grouped.gather(3, index).reshape(num_rows, num_qo_heads, num_channels)
        raw = block_scores_mean(kept, dequantize(quantized))
        if candidates is None:
            return pool_scores(raw, sm_scale, pooling, sum_every=self.sum_every)
        return pool_candidates(raw, sm_scale, pooling, candidates)


def _largest(x: Tensor, dim: int) -> Tensor:
    """max |x| over one dimension, fp32."""
    largest: Tensor = torch.linalg.vector_norm(x, ord=torch.inf, dim=dim)
    return largest.float()


def _profiled(channels: tuple[tuple[int, ...], ...], num_kv_heads: int, wanted: int, head_dim: int) -> Tensor:
    lengths = {len(row) for row in channels}
    if len(channels) != num_kv_heads or lengths != {wanted}:
        raise ValueError(
            f"expected the profile's channels as {wanted} (token_index.num_channels) for each of {num_kv_heads} KV "
            f"heads, got {sorted(lengths)} for {len(channels)} heads; set num_channels to the "
            "profile's, or calibrate again"
        )
    chosen = torch.tensor(channels, dtype=torch.int64)
    if int(chosen.min()) < 0 or int(chosen.max()) >= head_dim:
        raise ValueError(
            f"expected the profile's channels in 0..{head_dim - 1} (below head_dim), got {int(chosen.min())} to "
            f"{int(chosen.max())}; is the profile of another model?"
        )
    return chosen
