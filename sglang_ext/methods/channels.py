"""Channels of a key that an index keeps: how many, which, and queries on them.

Source of the choice: Double Sparsity (2408.07092), channels with the greatest |q_i| |k_i|; here max |q_i| * max |k_i|
over a prefix's own keys and sampled queries.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from sglang_ext.methods.arrays import ContentError, Form, IndexSize
from sglang_ext.methods.base import (
    Arrays,
    IndexBuilder,
    IndexSpec,
    LayerProfile,
    check_keys,
    check_range,
    check_samples,
    check_share,
)

WIDE_KEYS = 256
"""Keys of more channels are wide: those of MLA models, which have 576."""
CHANNELS_OF_WIDE_KEYS = 128
"""Channels that an index keeps of wide keys by default."""
CHANNELS = "channels"
"""Name of the array that has the kept channels' numbers: int16 [num_kv_heads, num_channels], ascending."""


@dataclass(frozen=True)
class ChannelSpec(IndexSpec):
    """Of a method that may keep some channels of the keys only. Attributes: see the methods'.

    The default of `channel_ratio`, which is a method's own, keeps `CHANNELS_OF_WIDE_KEYS` of wide keys.
    """

    num_channels: int = 0
    channel_ratio: float = 1.0

    @property
    @abstractmethod
    def bits(self) -> int:
        """Of a kept value."""

    @property
    def unit(self) -> int:
        """Channels that fill a byte, or one."""
        return max(1, 8 // self.bits)

    @property
    def _default_ratio(self) -> float:
        return type(self).channel_ratio

    def __post_init__(self) -> None:
        name = self.method
        check_range(f"{name}.num_channels", self.num_channels, 0, 1 << 15)
        if self.num_channels % self.unit:
            raise ValueError(
                f"expected {name}.num_channels to be a multiple of {self.unit} (values of {self.bits} bits in a "
                f"byte), got {self.num_channels}; round it up"
            )
        check_share(f"{name}.channel_ratio", self.channel_ratio, "0.5 keeps half of the channels")
        if self.num_channels and self.channel_ratio not in (self._default_ratio, 1.0):
            raise ValueError(
                f"expected {name}.num_channels or {name}.channel_ratio, got both ({self.num_channels} and "
                f"{self.channel_ratio}); remove one"
            )

    def _cut(self, head_dim: int) -> bool:
        """Whether keys are wide, and `channel_ratio` is the default, which does not count then."""
        return self.channel_ratio == self._default_ratio and head_dim > WIDE_KEYS

    def kept_channels(self, head_dim: int) -> int:
        """Channels of a key that are kept."""
        if self.num_channels:
            return self.num_channels
        if self._cut(head_dim):
            return CHANNELS_OF_WIDE_KEYS
        return math.ceil(round(self.channel_ratio * head_dim, 6) / self.unit) * self.unit

    def selects_channels(self, head_dim: int) -> bool:
        """Whether some channels of such keys are chosen, and not all taken in their order."""
        return self.num_channels > 0 or self.channel_ratio < 1.0 or self._cut(head_dim)

    def channels_form(self, size: IndexSize) -> Form:
        """Of the array `channels` of a KV head."""
        return Form("int16", (self.kept_channels(size.head_dim),), 0, size.head_dim - 1)

    def check(self, arrays: Arrays, size: IndexSize) -> None:
        channels = arrays.get(CHANNELS)
        if channels is not None and not bool((channels[:, 1:] > channels[:, :-1]).all()):
            raise ContentError(CHANNELS, "ascending channels", channels.tolist())

    def profile_part(self, layers: Sequence[LayerProfile]) -> dict[str, Any]:
        """See the base: `channels`, where some are kept and the profile says which."""
        if not (self.num_channels and layers and layers[0].channels):
            return {}
        calibrated = len(layers[0].channels[0])
        if self.num_channels != calibrated:
            raise ValueError(
                f"expected {self.method}.num_channels of {calibrated}, as many as the profile has, got "
                f"{self.num_channels}; set it to that, calibrate with this number, or use no profile"
            )
        return {CHANNELS: [[list(head) for head in layer.channels] for layer in layers]}


C = TypeVar("C", bound=ChannelSpec)


class ChannelBuilder(IndexBuilder[C]):
    """Of such a method. The profile's channels are taken where they are known and `num_channels` is given; otherwise
    those with the greatest max |q_i| * max |k_i| over the prefix's own keys and sampled queries.
    """

    def needs_queries(self, head_dim: int) -> bool:
        """Only to choose channels."""
        profiled = bool(self.spec.num_channels and self.layer.channels)
        return self.spec.selects_channels(head_dim) and not profiled

    def channels(self, keys: Tensor, queries: Tensor | None) -> Tensor:
        """Which channels are kept: int64 [num_kv_heads, num_channels], ascending, on the keys' device.

        Args:
            keys, queries: as of `build_layer`. Read only, and checked.

        Raises:
            ValueError: as `build_layer`; more channels than keys have.
        """
        spec, (_, num_kv_heads, head_dim) = self.spec, keys.shape
        if self.needs_queries(head_dim):
            queries, _ = check_samples(queries, keys, spec.method)
        else:
            check_keys(keys)
        wanted = spec.kept_channels(head_dim)
        if wanted > head_dim:
            if not spec.num_channels:
                raise ValueError(
                    f"expected head_dim to be a multiple of {spec.unit} for {spec.bits} bits, got {head_dim}; keep "
                    f"more bits, or lower {spec.method}.channel_ratio"
                )
            raise ValueError(
                f"expected {spec.method}.num_channels of at most head_dim={head_dim}, got {wanted}; 0 takes as many "
                "as channel_ratio says"
            )
        if spec.num_channels and self.layer.channels:
            return torch.tensor(self.layer.channels, device=keys.device)
        if self.needs_queries(head_dim):
            assert queries is not None
            contribution = _largest(queries, 1) * _largest(keys, 0)
            order = contribution.argsort(dim=1, descending=True, stable=True)
            return order[:, :wanted].sort(dim=1).values
        return torch.arange(head_dim, device=keys.device).expand(num_kv_heads, -1).contiguous()


def keys_on(channels: Tensor, keys: Tensor) -> Tensor:
    """Keys [num_tokens, num_kv_heads, head_dim] on channels int64 [num_kv_heads, num_channels]: [num_kv_heads,
    num_tokens, num_channels], new memory.
    """
    rows = keys.transpose(0, 1)
    return rows.gather(2, channels[:, None].expand(-1, rows.shape[1], -1))


def queries_on(channels: Tensor, q: Tensor) -> Tensor:
    """Queries [num_rows, num_qo_heads, head_dim] on the channels [num_kv_heads, num_channels] of their KV heads:
    [num_rows, num_qo_heads, num_channels], new memory.
    """
    grouped = q.view(q.shape[0], channels.shape[0], -1, q.shape[2])
    index = channels.long()[None, :, None].expand(*grouped.shape[:1], -1, grouped.shape[2], -1)
    return grouped.gather(3, index).flatten(1, 2)


def _largest(x: Tensor, dim: int) -> Tensor:
    """max |x| over one dimension, fp32."""
    largest: Tensor = torch.linalg.vector_norm(x, ord=torch.inf, dim=dim)
    return largest.float()
