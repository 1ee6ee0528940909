"""Parameters and arrays of the token index.

Source: AsyncTLS, "Fine-grained Token Selection" (after Double Sparsity: channels with the greatest |q_i| |k_i|;
INT4 keys on them). With all channels it is a quantized copy of the keys, which ranks within 0.003 of the true
scores at INT4 (shipped model, 8K tokens, 5% kept). By default it keeps half of them, each prefix its own, and is the
default method (docs/selection.md); as the second level of `two_level` it is read for candidates only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from prefix_kernels.low_bit import BITS
from sglang_ext.methods.arrays import Form, IndexSize, low_bit_forms
from sglang_ext.methods.base import check_choice
from sglang_ext.methods.channels import CHANNELS, ChannelSpec


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
