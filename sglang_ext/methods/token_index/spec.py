"""Parameters and arrays of the token index.

Source: AsyncTLS, "Fine-grained Token Selection" (after Double Sparsity: channels with the greatest |q_i| |k_i|;
INT4 keys on them). With all channels it is a quantized copy of the keys, which ranks within 0.003 of the true
scores at INT4 (shipped model, 8K tokens, 5% kept). By default it keeps half of them, each prefix its own, and is the
default method (docs/selection.md); as the second level of `two_level` it is read for candidates only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from prefix_kernels.low_bit import BITS
from sglang_ext.methods.arrays import ContentError, Form, IndexSize, low_bit_forms
from sglang_ext.methods.base import Arrays, IndexSpec, LayerProfile, check_choice, check_range, check_share

CHANNEL_RATIO = 0.5
"""Kept channels by default, as a fraction of head_dim."""
MAX_CHANNELS = 128
"""Kept channels by default, at most: so many of an MLA model's 576."""


@dataclass(frozen=True)
class TokenIndexSpec(IndexSpec):
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
    num_channels: int = 0
    channel_ratio: float = CHANNEL_RATIO
    bits: int = 4

    def __post_init__(self) -> None:
        check_range("token_index.num_channels", self.num_channels, 0, 1 << 15)
        check_choice("token_index.bits", self.bits, BITS)
        if self.num_channels % (8 // self.bits):
            raise ValueError(
                f"expected token_index.num_channels to be a multiple of {8 // self.bits} (values of {self.bits} bits "
                f"in a byte), got {self.num_channels}; round it up"
            )
        check_share("token_index.channel_ratio", self.channel_ratio, "1 takes all channels")
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
        kept = math.ceil(round(self.channel_ratio * head_dim, 6) / unit) * unit
        return min(kept, MAX_CHANNELS) if self.channel_ratio == CHANNEL_RATIO else kept

    @property
    def selects_channels(self) -> bool:
        """Whether some channels are left out."""
        return self.num_channels > 0 or self.channel_ratio < 1.0

    def forms(self, size: IndexSize) -> dict[str, Form]:
        kept = self.kept_channels(size.head_dim)
        return {
            "channels": Form("int16", (kept,), 0, size.head_dim - 1),
            **low_bit_forms("keys", size.prefix_len, kept, self.bits),
        }

    def check(self, arrays: Arrays, size: IndexSize) -> None:
        channels = arrays["channels"]
        if not bool((channels[:, 1:] > channels[:, :-1]).all()):
            raise ContentError("channels", "ascending channels", channels.tolist())

    def profile_part(self, layers: Sequence[LayerProfile]) -> dict[str, Any]:
        """See the base: `channels`, where some are kept and the profile says which."""
        if not (self.num_channels and layers and layers[0].channels):
            return {}
        calibrated = len(layers[0].channels[0])
        if self.num_channels != calibrated:
            raise ValueError(
                f"expected token_index.num_channels of {calibrated}, as many as the profile has, got "
                f"{self.num_channels}; set it to that, calibrate with this number, or use no profile"
            )
        return {"channels": [[list(head) for head in layer.channels] for layer in layers]}
