"""AB-Sparse: block representations with one block size for all heads or one for each, selection by block.

Source: AB-Sparse, 2.2 (estimation), 3.2 (block sizes per head), 3.3 (INT4 asymmetric per-channel centroids), 3.4
(ragged layout by prefix sums, fixed token budget: K_h = ceil(T / B_h)). The min/max representation and its upper
bound are Quest's (2406.10774, 3.2), the ball and its upper bound ArkVale's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from prefix_kernels.block_scores import block_scores_ball, block_scores_mean, block_scores_minmax
from prefix_kernels.low_bit import LowBitTensor, dequantize, quantize
from prefix_kernels.pooling import Pooling, pool_scores
from prefix_kernels.top_k_selection import top_k_selection
from prefix_kernels.types import Selection
from sglang_ext.methods.base import (
    NO_PROFILE,
    IndexSpec,
    LayerProfile,
    check_choice,
    check_keys,
    pool_candidates,
    require_arrays,
    to_half,
)
from sglang_ext.methods.contents import LARGEST, ContentError, Form, IndexSize, low_bit_forms
from sglang_ext.methods.heads import RAGGED, ROW_INDPTR, is_ragged, join_heads

BLOCK_SIZES = (16, 32, 64)

_BITS = {"int2": 2, "int4": 4, "int8": 8}
_PARTS = {"mean": ("mean",), "minmax": ("min", "max"), "ball": ("center",)}


@dataclass(frozen=True)
class ABSparseSpec(IndexSpec):
    """Parameters of the block index.

    Attributes:
        block_size: tokens per block: 16, 32 or 64. The last block of a prefix may be shorter.
        sizes: "uniform": every head has `block_size`; "profile": each head has the size that the model's profile
            gives it, and `block_size` is not used.
        representation: "mean" (mean key), "minmax" (minimum and maximum per channel, Quest) or "ball" (mean key and
            radius, ArkVale).
        quantization: "int2", "int4", "int8" (per channel) or "none" (fp16). The radius stays fp16.
        symmetric: quantization with levels around 0 instead of between each channel's minimum and maximum.

    Raises:
        ValueError: a value outside its choices.
    """

    method: ClassVar[str] = "ab_sparse"
    block_size: int = 16
    sizes: str = "uniform"
    representation: str = "mean"
    quantization: str = "int4"
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(
                f"expected ab_sparse.block_size to be one of {', '.join(map(str, BLOCK_SIZES))} tokens, got "
                f"{self.block_size}; choose one of them"
            )
        check_choice("ab_sparse.sizes", self.sizes, ("uniform", "profile"))
        check_choice("ab_sparse.representation", self.representation, tuple(_PARTS))
        check_choice("ab_sparse.quantization", self.quantization, (*_BITS, "none"))

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the vectors that one block has."""
        return _PARTS[self.representation]

    def forms(self, size: IndexSize) -> dict[str, Form]:
        """See `IndexSpec.forms`."""
        blocks, forms = -(-size.prefix_len // self.block_size), dict[str, Form]()
        for part in self.parts:
            if self.quantization == "none":
                forms[part] = Form("float16", (blocks, size.head_dim), -LARGEST, LARGEST)
            else:
                forms |= low_bit_forms(part, blocks, size.head_dim, _BITS[self.quantization])
        if self.representation == "ball":
            forms["radius"] = Form("float16", (blocks,), 0.0, LARGEST)
        if self.sizes == "uniform":
            return forms
        # How many blocks a head has, its own size says.
        ragged = {name: form for name, form in forms.items() if _ragged_name(name) != name}
        forms = {name: form for name, form in forms.items() if name not in ragged}
        forms |= {_ragged_name(name): form._replace(shape=(None, *form.shape[1:])) for name, form in ragged.items()}
        return {**forms, "block_sizes": Form("int32", (), min(BLOCK_SIZES), max(BLOCK_SIZES))}

    def check(self, arrays: Mapping[str, Tensor], size: IndexSize) -> None:
        """See `IndexSpec.check`."""
        if self.sizes == "uniform":
            return
        sizes, rows = arrays["block_sizes"].tolist(), arrays[ROW_INDPTR].diff().tolist()
        if not set(sizes) <= set(BLOCK_SIZES) or rows != [-(-size.prefix_len // own) for own in sizes]:
            raise ContentError("block_sizes", f"blocks of {BLOCK_SIZES} that cover the prefix", f"{rows} of {sizes}")


@dataclass(frozen=True)
class ABSparseBuilder:
    """Builds block representations.

    Arrays with uniform sizes, for each part p (`mean`; `min` and `max`; `center`), num_blocks = ceil(prefix_len /
    block_size). Quantized: `p_packed` [num_kv_heads, num_blocks, head_dim * bits / 8] uint8, `p_scale` and `p_zero`
    [num_kv_heads, head_dim] fp32; none: `p` [num_kv_heads, num_blocks, head_dim] fp16. With balls also `radius`
    [num_kv_heads, num_blocks] fp16, rounded up.

    With the profile's sizes the arrays of blocks are ragged (see `heads`): `ragged_p_packed`, `ragged_p` and
    `ragged_radius` have the rows of all heads one after the other, ceil(prefix_len / B_h) for head h; `row_indptr`
    [num_kv_heads + 1] int32 says where each head's begin and `block_sizes` [num_kv_heads] int32 is B_h.

    Attributes:
        spec: parameters.
        layer: its `block_sizes` are used with `sizes="profile"`.
    """

    spec: ABSparseSpec
    layer: LayerProfile = NO_PROFILE
    needs_queries: ClassVar[bool] = False

    def build_layer(self, keys: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        """See `IndexBuilder.build_layer`."""
        check_keys(keys)
        if self.spec.sizes == "uniform":
            arrays = self._build(keys, self.spec.block_size)
            return {name: array.contiguous() for name, array in arrays.items()}
        sizes = self._sizes(keys.shape[1])
        heads: dict[int, dict[str, Tensor]] = {}
        for size in sorted(set(sizes)):
            members = [head for head, own in enumerate(sizes) if own == size]
            built = self._build(keys[:, members], size)
            for i, head in enumerate(members):
                heads[head] = {_ragged_name(name): array[i] for name, array in built.items()}
                heads[head]["block_sizes"] = torch.tensor(size, dtype=torch.int32, device=keys.device)
        return join_heads([heads[head] for head in range(len(sizes))])

    def _sizes(self, num_kv_heads: int) -> tuple[int, ...]:
        sizes = self.layer.block_sizes
        if len(sizes) != num_kv_heads or any(size not in BLOCK_SIZES for size in sizes):
            raise ValueError(
                f"expected block sizes of {', '.join(map(str, BLOCK_SIZES))} tokens for each of {num_kv_heads} KV "
                f"heads from the profile, got {list(sizes)}; calibrate the model, or set ab_sparse.sizes to uniform"
            )
        return sizes

    def _build(self, keys: Tensor, block_size: int) -> dict[str, Tensor]:
        spec = self.spec
        form = "mean" if spec.representation == "ball" else spec.representation
        blocks = block_representation(keys, block_size, form)
        arrays: dict[str, Tensor] = {}
        for part, block in zip(spec.parts, blocks, strict=True):
            if spec.quantization == "none":
                stored = arrays[part] = to_half(block, f"ab_sparse {part}")
            else:
                quantized = quantize(block, _BITS[spec.quantization], spec.symmetric)
                arrays.update({f"{part}_{name}": array for name, array in quantized._asdict().items()})
                stored = dequantize(quantized)
        if spec.representation == "ball":
            # Around the center that is stored, so that quantizing it does not break the bound.
            radius = to_half(_radii(keys, stored.float(), block_size) * (1 + 2**-10), "ab_sparse radius")
            arrays["radius"] = radius
        return arrays


@dataclass(frozen=True)
class ABSparseSelector:
    """Scores blocks, pools after the softmax over blocks, takes the best blocks within the token budget."""

    spec: ABSparseSpec

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
        """See `Selector.select`. No array's values are read on the host."""
        raw, sizes = self._block_scores(arrays, q, prefix_len)
        scores = pool_scores(raw, sm_scale, pooling)
        if sizes is None:
            return top_k_selection(scores, budget, num_sink, num_recent, self.spec.block_size, prefix_len)
        # Tokens in the order of their blocks' ranks: the last block is cut at the budget, as with one block size.
        order = scores.argsort(dim=1, descending=True, stable=True)
        place = torch.arange(scores.shape[1], device=q.device).expand_as(order)
        rank = torch.empty_like(order).scatter_(1, order, place)
        token = torch.arange(prefix_len, device=q.device)
        turn = rank.gather(1, token // sizes[:, None]) * sizes[:, None] + token % sizes[:, None]
        return top_k_selection(-turn.double(), budget, num_sink, num_recent, 1, prefix_len)

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
        """See `Selector.token_scores`. Without candidates the softmax is over blocks, as in `select`."""
        raw, sizes = self._block_scores(arrays, q, prefix_len)
        token = torch.arange(prefix_len, device=q.device)
        size = torch.tensor(self.spec.block_size, device=q.device) if sizes is None else sizes[:, None]
        block = (token // size).expand(raw.shape[0], -1)
        if candidates is None:
            return pool_scores(raw, sm_scale, pooling).gather(1, block)
        tokens = raw.gather(3, block[:, None, None].expand(-1, *raw.shape[1:3], -1))
        return pool_candidates(tokens, sm_scale, pooling, candidates)

    def _block_scores(self, arrays: Mapping[str, Tensor], q: Tensor, prefix_len: int) -> tuple[Tensor, Tensor | None]:
        """Raw scores [num_kv_heads, num_rows, gqa, most blocks] and block sizes [num_kv_heads] int64 where they differ.

        With sizes per head a head of fewer blocks has -inf in the rest.
        """
        if self.spec.sizes == "uniform":
            blocks = -(-prefix_len // self.spec.block_size)
            parts = [self._read(arrays, part) for part in self.spec.parts]
            if parts[0].shape[1] != blocks:
                raise ValueError(
                    f"expected {blocks} blocks of {self.spec.block_size} tokens for prefix_len={prefix_len}, got "
                    f"{parts[0].shape[1]}; is the index of another prefix or block size?"
                )
            radius = require_arrays(arrays, ("radius",), self.spec.method)[0] if self._has_radius else None
            return self._score(q, parts, radius), None
        sizes, indptr = require_arrays(arrays, ("block_sizes", ROW_INDPTR), self.spec.method)
        sizes = sizes.long()
        block = torch.arange(-(-prefix_len // min(BLOCK_SIZES)), device=q.device)
        exists = block < (prefix_len + sizes[:, None] - 1) // sizes[:, None]
        rows = torch.where(exists, indptr[:-1, None].long() + block, 0)
        padded = {name: array for name, array in arrays.items() if name.endswith(_CHANNELWISE)}
        for name, array in arrays.items():
            if is_ragged(name):
                self._check_rows(array, prefix_len, sizes.shape[0])
                padded[name.removeprefix(RAGGED)] = array[rows]
        parts = [self._read(padded, part) for part in self.spec.parts]
        radius = require_arrays(padded, ("radius",), self.spec.method)[0] if self._has_radius else None
        raw = self._score(q, parts, radius)
        return raw.masked_fill(~exists[:, None, None], -torch.inf), sizes

    @property
    def _has_radius(self) -> bool:
        return self.spec.representation == "ball"

    def _score(self, q: Tensor, parts: list[Tensor], radius: Tensor | None) -> Tensor:
        if radius is not None:
            return block_scores_ball(q, parts[0], radius)
        if len(parts) == 2:
            return block_scores_minmax(q, parts[0], parts[1])
        return block_scores_mean(q, parts[0])

    def _read(self, arrays: Mapping[str, Tensor], part: str) -> Tensor:
        if self.spec.quantization == "none":
            return require_arrays(arrays, (part,), self.spec.method)[0]
        names = tuple(f"{part}_{name}" for name in LowBitTensor._fields)
        return dequantize(LowBitTensor(*require_arrays(arrays, names, self.spec.method)))

    def _check_rows(self, array: Tensor, prefix_len: int, num_kv_heads: int) -> None:
        """Raise unless there are as many rows as some assignment of block sizes has. Reads the shape only."""
        least, most = (num_kv_heads * -(-prefix_len // size) for size in (max(BLOCK_SIZES), min(BLOCK_SIZES)))
        if not least <= array.shape[0] <= most:
            raise ValueError(
                f"expected {least} to {most} blocks in {num_kv_heads} KV heads for prefix_len={prefix_len}, got "
                f"{array.shape[0]}; is the index of another prefix?"
            )


_CHANNELWISE = ("_scale", "_zero")
"""Ends of the names of arrays with a row per KV head and none per block."""


def _ragged_name(name: str) -> str:
    return name if name.endswith(_CHANNELWISE) else f"{RAGGED}{name}"


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
