"""Builds block representations."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.low_bit import dequantize, quantize
from sglang_ext.methods.ab_sparse.spec import BITS, ABSparseSpec, ragged_name
from sglang_ext.methods.arrays import join_heads
from sglang_ext.methods.base import to_half
from sglang_ext.methods.channels import CHANNELS, ChannelBuilder, keys_on


class ABSparseBuilder(ChannelBuilder[ABSparseSpec]):
    """Builds block representations.

    Arrays with uniform sizes, for each part p (`mean`; `min` and `max`; `center`), num_blocks = ceil(prefix_len /
    block_size). Quantized: `p_packed` [num_kv_heads, num_blocks, head_dim * bits / 8] uint8, `p_scale` and `p_zero`
    [num_kv_heads, head_dim] fp32; none: `p` [num_kv_heads, num_blocks, head_dim] fp16. With balls also `radius`
    [num_kv_heads, num_blocks] fp16, rounded up.

    With the profile's sizes the arrays of blocks are ragged (see `arrays`): `ragged_p_packed`, `ragged_p` and
    `ragged_radius` have the rows of all heads one after the other, ceil(prefix_len / B_h) for head h; `row_indptr`
    [num_kv_heads + 1] int32 says where each head's begin and `block_sizes` [num_kv_heads] int32 is B_h.

    Where channels are chosen (`ABSparseSpec.selects_channels`), `channels` [num_kv_heads, num_channels] int16,
    ascending, are those that all vectors and radii are of, and their number takes the place of head_dim.
    """

    def build_layer(self, keys: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        channels = self.channels(keys, queries)
        if not self.spec.selects_channels(keys.shape[2]):
            return self._layer(keys)
        return {CHANNELS: channels.short(), **self._layer(keys_on(channels, keys).transpose(0, 1))}

    def _layer(self, keys: Tensor) -> dict[str, Tensor]:
        """Of keys on the kept channels."""
        if self.spec.sizes == "uniform":
            arrays = self._build(keys, self.spec.block_size)
            return {name: array.contiguous() for name, array in arrays.items()}
        sizes = self.layer.block_sizes
        heads: dict[int, dict[str, Tensor]] = {}
        for size in sorted(set(sizes)):
            members = [head for head, own in enumerate(sizes) if own == size]
            built = self._build(keys[:, members], size)
            for i, head in enumerate(members):
                heads[head] = {ragged_name(name): array[i] for name, array in built.items()}
                heads[head]["block_sizes"] = torch.tensor(size, dtype=torch.int32, device=keys.device)
        return join_heads([heads[head] for head in range(len(sizes))])

    def _build(self, keys: Tensor, block_size: int) -> dict[str, Tensor]:
        spec = self.spec
        form = "mean" if spec.representation == "ball" else spec.representation
        blocks = block_representation(keys, block_size, form)
        arrays: dict[str, Tensor] = {}
        for part, block in zip(spec.parts, blocks, strict=True):
            if spec.quantization == "none":
                stored = arrays[part] = to_half(block, f"ab_sparse {part}")
            else:
                quantized = quantize(block, BITS[spec.quantization])
                arrays.update({f"{part}_{name}": array for name, array in quantized._asdict().items()})
                stored = dequantize(quantized)
        if spec.representation == "ball":
            # Around the center that is stored, so that quantizing it does not break the bound.
            arrays["radius"] = to_half(_radii(keys, stored.float(), block_size) * (1 + 2**-10), "ab_sparse radius")
        return arrays


def _radii(keys: Tensor, centers: Tensor, block_size: int) -> Tensor:
    """Greatest distance of a block's keys from its center: [num_kv_heads, num_blocks] fp32."""
    rows = keys.transpose(0, 1).float()
    missing = centers.shape[1] * block_size - rows.shape[1]
    own = centers.repeat_interleave(block_size, dim=1)[:, : rows.shape[1]]
    distance = torch.nn.functional.pad((rows - own).norm(dim=2), (0, missing))
    return distance.view(*centers.shape[:2], block_size).amax(dim=2)


def block_representation(keys: Tensor, block_size: int, representation: str) -> tuple[Tensor, ...]:
    """Per block the mean key, or the minimum and the maximum of each channel; a short last one as it is.

    Args:
        keys: [prefix_len >= 1, num_kv_heads, head_dim] floating.
        block_size: tokens per block.
        representation: "mean" or "minmax".

    Returns:
        One or two tensors [num_kv_heads, ceil(prefix_len / block_size), head_dim] fp32.
    """
    prefix_len, num_kv_heads, head_dim = keys.shape
    num_blocks = -(-prefix_len // block_size)
    rows = keys.transpose(0, 1).float()
    missing = num_blocks * block_size - prefix_len
    if missing:
        # Repeating the last key changes neither minimum nor maximum; the mean is corrected below.
        rows = torch.cat([rows, rows[:, -1:].expand(-1, missing, -1)], dim=1)
    blocks = rows.reshape(num_kv_heads, num_blocks, block_size, head_dim)
    if representation == "minmax":
        low, high = blocks.aminmax(dim=2)
        return low, high
    mean = blocks.mean(dim=2)
    mean[:, -1] = blocks[:, -1, : block_size - missing].mean(dim=1)
    return (mean,)
