"""Builds the token index: of a prefix, and of keys that follow one."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.low_bit import LowBitTensor, quantize
from sglang_ext.methods.base import Arrays, IndexBuilder, check_keys, check_samples
from sglang_ext.methods.token_index.spec import TokenIndexSpec

ARRAYS = ("channels", *(f"keys_{name}" for name in LowBitTensor._fields))


class TokenIndexBuilder(IndexBuilder[TokenIndexSpec]):
    """Builds the token index of a layer.

    Arrays: `channels` [num_kv_heads, num_channels] int16, ascending; `keys_packed` [num_kv_heads, prefix_len,
    num_channels * bits / 8] uint8, `keys_scale` and `keys_zero` [num_kv_heads, num_channels] fp32, see
    `LowBitTensor`.

    The profile's channels are taken where they are known and `num_channels` is given; otherwise those with the
    greatest max |q_i| * max |k_i| over the prefix's own keys and sampled queries.
    """

    @property
    def needs_queries(self) -> bool:
        """Only to choose channels."""
        profiled = bool(self.spec.num_channels and self.layer.channels)
        return self.spec.selects_channels and not profiled

    def build_layer(self, keys: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        if self.needs_queries:
            queries, _ = check_samples(queries, keys, self.spec.method)
        else:
            check_keys(keys)
        unit, head_dim = 8 // self.spec.bits, keys.shape[2]
        if not self.spec.num_channels and self.spec.kept_channels(head_dim) > head_dim - head_dim % unit:
            raise ValueError(
                f"expected head_dim to be a multiple of {unit} for {self.spec.bits} bits, got {head_dim}; raise "
                "token_index.bits or lower token_index.channel_ratio"
            )
        return _arrays(keys, self._channels(keys, queries).to(keys.device), self.spec.bits)

    def _channels(self, keys: Tensor, queries: Tensor | None) -> Tensor:
        """[num_kv_heads, num_channels] int64."""
        _, num_kv_heads, head_dim = keys.shape
        wanted = self.spec.kept_channels(head_dim)
        if wanted > head_dim:
            raise ValueError(
                f"expected token_index.num_channels of at most head_dim={head_dim}, got {wanted}; 0 takes all channels"
            )
        if self.spec.num_channels and self.layer.channels:
            return _profiled(self.layer.channels, num_kv_heads, wanted, head_dim)
        if self.spec.selects_channels:
            assert queries is not None
            contribution = _largest(queries, 1) * _largest(keys, 0)
            order = contribution.argsort(dim=1, descending=True, stable=True)
            return order[:, :wanted].sort(dim=1).values
        return torch.arange(head_dim).expand(num_kv_heads, -1).contiguous()


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
    rows = keys.transpose(0, 1)
    kept = rows.gather(2, channels[:, None].expand(-1, rows.shape[1], -1))
    return dict(zip(ARRAYS, (channels.short(), *quantize(kept, bits)), strict=True))


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
