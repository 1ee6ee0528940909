"""Parameters and arrays of the block index.

Source: AB-Sparse, 2.2 (estimation), 3.2 (block sizes per head), 3.3 (INT4 asymmetric per-channel centroids), 3.4
(ragged layout by prefix sums, fixed token budget: K_h = ceil(T / B_h)). The min/max representation and its upper
bound are Quest's (2406.10774, 3.2), the ball and its upper bound ArkVale's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sglang_ext.methods.arrays import LARGEST, RAGGED, ROW_INDPTR, ContentError, Form, IndexSize, low_bit_forms
from sglang_ext.methods.base import Arrays, LayerProfile, check_choice
from sglang_ext.methods.channels import CHANNELS, ChannelSpec

BLOCK_SIZES = (16, 32, 64)
BITS = {"int2": 2, "int4": 4, "int8": 8}
CHANNELWISE = ("_scale", "_zero", CHANNELS)
"""Ends of the names of arrays with a row per KV head and none per block."""

_PARTS = {"mean": ("mean",), "minmax": ("min", "max"), "ball": ("center",)}


@dataclass(frozen=True)
class ABSparseSpec(ChannelSpec):
    """Parameters of the block index.

    Attributes:
        num_channels: channels of a key that are kept; a multiple of 8 / bits. 0: as `channel_ratio` says.
        channel_ratio: as `token_index` has it, but by default 1: all channels, or 128 of an MLA model's 576.
        block_size: tokens per block: 16, 32 or 64. The last block of a prefix may be shorter.
        sizes: "uniform": every head has `block_size`; "profile": each head has the size that the model's profile
            gives it, and `block_size` is not used.
        representation: "mean" (mean key), "minmax" (minimum and maximum per channel, Quest) or "ball" (mean key and
            radius, ArkVale).
        quantization: "int2", "int4", "int8" (per channel) or "none" (fp16). The radius stays fp16.

    Raises:
        ValueError: a value outside its choices.
    """

    method: ClassVar[str] = "ab_sparse"
    scored_together: ClassVar[int] = min(BLOCK_SIZES)
    block_size: int = 16
    sizes: str = "uniform"
    representation: str = "mean"
    quantization: str = "int4"

    def __post_init__(self) -> None:
        check_choice("ab_sparse.block_size", self.block_size, BLOCK_SIZES, " tokens")
        check_choice("ab_sparse.sizes", self.sizes, ("uniform", "profile"))
        check_choice("ab_sparse.representation", self.representation, tuple(_PARTS))
        check_choice("ab_sparse.quantization", self.quantization, (*BITS, "none"))
        super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        """See the base; without channels where they are the default, since indexes of before do not name them."""
        found = super().to_dict()
        default = not self.num_channels and self.channel_ratio == type(self).channel_ratio
        return {name: found[name] for name in found if not (default and name in ("num_channels", "channel_ratio"))}

    @property
    def bits(self) -> int:
        """Of a kept value: 16 without quantization."""
        return BITS.get(self.quantization, 16)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the vectors that one block has."""
        return _PARTS[self.representation]

    def forms(self, size: IndexSize) -> dict[str, Form]:
        blocks, kept, forms = -(-size.prefix_len // self.block_size), self.kept_channels(size.head_dim), {}
        if self.selects_channels(size.head_dim):
            forms[CHANNELS] = self.channels_form(size)
        for part in self.parts:
            if self.quantization == "none":
                forms[part] = Form("float16", (blocks, kept), -LARGEST, LARGEST)
            else:
                forms |= low_bit_forms(part, blocks, kept, self.bits)
        if self.representation == "ball":
            forms["radius"] = Form("float16", (blocks,), 0.0, LARGEST)
        if self.sizes == "uniform":
            return forms
        # How many blocks a head has, its own size says.
        ragged = {name: form for name, form in forms.items() if ragged_name(name) != name}
        forms = {name: form for name, form in forms.items() if name not in ragged}
        forms |= {ragged_name(name): form._replace(shape=(None, *form.shape[1:])) for name, form in ragged.items()}
        return {**forms, "block_sizes": Form("int32", (), min(BLOCK_SIZES), max(BLOCK_SIZES))}

    def rows(self, size: IndexSize, layer: LayerProfile, head: int) -> int:
        return -(-size.prefix_len // layer.block_sizes[head])

    def check(self, arrays: Arrays, size: IndexSize) -> None:
        super().check(arrays, size)
        if self.sizes == "uniform":
            return
        sizes, rows = arrays["block_sizes"].tolist(), arrays[ROW_INDPTR].diff().tolist()
        if not set(sizes) <= set(BLOCK_SIZES) or rows != [-(-size.prefix_len // own) for own in sizes]:
            raise ContentError("block_sizes", f"blocks of {BLOCK_SIZES} that cover the prefix", f"{rows} of {sizes}")

    def profile_part(self, layers: Sequence[LayerProfile]) -> dict[str, Any]:
        """See the base: `block_sizes`, too, where heads have the profile's."""
        used = super().profile_part(layers)
        if self.sizes == "uniform":
            return used
        if not layers or not layers[0].block_sizes:
            came = "one without block sizes" if layers else "none"
            raise ValueError(
                f"expected a profile for ab_sparse.sizes=profile, got {came}; name one ('profile'), make one "
                "(sglang-ext calibrate), or set sizes to uniform"
            )
        return {**used, "block_sizes": [list(layer.block_sizes) for layer in layers]}


def ragged_name(name: str) -> str:
    """Name of an array where heads differ in the number of their blocks."""
    return name if name.endswith(CHANNELWISE) else f"{RAGGED}{name}"
