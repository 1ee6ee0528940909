"""Rivals of the selection benchmark, written from their papers' descriptions: arrays, token scores, bytes.

Each rival is one class with `build`, `token_scores` and `index_bytes`. All of them get the same pooling over a KV
head's query heads after the softmax, the same windows and the same budgets as the product's methods, so that only
the estimate of the scores differs. KV heads do not depend on each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from prefix_kernels.low_bit import LowBitTensor, dequantize, quantize
from prefix_kernels.pooling import Pooling, pool_scores

Arrays = Mapping[str, Tensor]


@dataclass
class Rival(ABC):
    """Base: what a rival keeps. How it selects is `ScoringRival`'s or `FixedRival`'s part.

    `needs` says what the offline calibration hands in: "" nothing, "channels" the channel set of the layer.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[str] = ""

    def describe(self) -> dict[str, Any]:
        """Parameters for the row."""
        return {"method": self.name, **{key: value for key, value in vars(self).items() if not key.startswith("_")}}

    @abstractmethod
    def build(self, keys: Tensor, samples: Tensor | None, channels: Tensor | None = None) -> dict[str, Tensor]:
        """Arrays of a layer from keys [prefix_len, num_kv_heads, head_dim]; leading dimension num_kv_heads."""

    def index_bytes(self, arrays: Arrays, prefix_len: int, budget: int) -> float:
        """Bytes of the index that a step reads for one KV head; by default all of it."""
        heads = next(iter(arrays.values())).shape[0] if arrays else 1
        return sum(array.nbytes for array in arrays.values()) / heads


class ScoringRival(Rival):
    """Scores every position by its arrays and the query."""

    @abstractmethod
    def token_scores(self, arrays: Arrays, q: Tensor, prefix_len: int, sm_scale: float, pooling: Pooling) -> Tensor:
        """[num_kv_heads, prefix_len] from q [1, num_qo_heads, head_dim]: higher is better."""


class FixedRival(Rival):
    """Keeps nothing and looks at no query."""

    def build(self, keys: Tensor, samples: Tensor | None, channels: Tensor | None = None) -> dict[str, Tensor]:
        return {}

    @abstractmethod
    def fixed_scores(self, num_rows: int, prefix_len: int, device: torch.device) -> Tensor:
        """[num_rows, prefix_len]: higher is better."""


def _tile(q: Tensor, num_kv_heads: int) -> Tensor:
    """[num_kv_heads, gqa, head_dim] fp32."""
    return q[0].float().view(num_kv_heads, -1, q.shape[2])


@dataclass
class Quest(ScoringRival):
    """Quest (2406.10774): pages of 16 tokens, minimum and maximum of each channel in fp16, upper bound of q.k."""

    name: ClassVar[str] = "quest"
    page: int = 16

    def build(self, keys: Tensor, samples: Tensor | None, channels: Tensor | None = None) -> dict[str, Tensor]:
        low, high = _pages(keys, self.page).aminmax(dim=2)
        return {"low": low.half(), "high": high.half()}

    def token_scores(self, arrays: Arrays, q: Tensor, prefix_len: int, sm_scale: float, pooling: Pooling) -> Tensor:
        tile = _tile(q, arrays["low"].shape[0])
        bound = tile.clamp_min(0) @ arrays["high"].float().transpose(1, 2)
        bound += tile.clamp_max(0) @ arrays["low"].float().transpose(1, 2)
        pooled = pool_scores(bound[:, None], sm_scale, pooling)
        return pooled.repeat_interleave(self.page, dim=1)[:, :prefix_len]


@dataclass
class ArkVale(ScoringRival):
    """ArkVale (NeurIPS 2024): pages of 32 tokens in bounding balls, fp16 center and radius, upper bound of q.k."""

    name: ClassVar[str] = "arkvale"
    page: int = 32

    def build(self, keys: Tensor, samples: Tensor | None, channels: Tensor | None = None) -> dict[str, Tensor]:
        pages = _pages(keys, self.page)
        center = (pages.amax(dim=2) + pages.amin(dim=2)).div(2).half()
        radius = (pages - center.float()[:, :, None]).norm(dim=3).amax(dim=2)
        return {"center": center, "radius": radius.half()}

    def token_scores(self, arrays: Arrays, q: Tensor, prefix_len: int, sm_scale: float, pooling: Pooling) -> Tensor:
        tile = _tile(q, arrays["center"].shape[0])
        bound = tile @ arrays["center"].float().transpose(1, 2)
        bound += tile.norm(dim=2, keepdim=True) * arrays["radius"].float()[:, None]
        pooled = pool_scores(bound[:, None], sm_scale, pooling)
        return pooled.repeat_interleave(self.page, dim=1)[:, :prefix_len]


@dataclass
class KMeansKeys(ScoringRival):
    """Squeezed Attention (2411.09688): the prefix's keys in cosine k-means clusters, about 20 keys each; a step scores
    the clusters' mean keys and takes the keys of the best clusters.

    Kept: centroids in fp16 and the positions in the order of their clusters (int32), of which a step reads those of
    the clusters that it takes.
    """

    name: ClassVar[str] = "kmeans_keys"
    keys_per_cluster: int = 20
    iterations: int = 10
    seed: int = 0

    def build(self, keys: Tensor, samples: Tensor | None, channels: Tensor | None = None) -> dict[str, Tensor]:
        rows = keys.transpose(0, 1).float()
        num_clusters = max(1, rows.shape[1] // self.keys_per_cluster)
        label = _clusters(rows, num_clusters, self.iterations, self.seed)
        members = rows.new_zeros(rows.shape[0], num_clusters).scatter_add_(1, label, torch.ones_like(rows[..., 0]))
        index = label[..., None].expand_as(rows)
        total = rows.new_zeros(rows.shape[0], num_clusters, rows.shape[2]).scatter_add_(1, index, rows)
        order = label.argsort(dim=1, stable=True).int()
        ends = torch.nn.functional.pad(members.cumsum(dim=1), (1, 0)).int()
        return {"centroids": (total / members.clamp_min(1)[..., None]).half(), "order": order, "ends": ends}

    def token_scores(self, arrays: Arrays, q: Tensor, prefix_len: int, sm_scale: float, pooling: Pooling) -> Tensor:
        raw = _tile(q, arrays["centroids"].shape[0]) @ arrays["centroids"].float().transpose(1, 2)
        place = torch.arange(prefix_len, device=q.device).expand(raw.shape[0], -1).contiguous()
        # The cluster of each place in the order, then of each position.
        by_place = torch.searchsorted(arrays["ends"][:, 1:].long().contiguous(), place, right=True)
        label = torch.empty_like(by_place).scatter_(1, arrays["order"].long(), by_place)
        # The softmax over tokens is the paper's over clusters weighted by their sizes.
        tokens = raw.gather(2, label[:, None].expand(-1, raw.shape[1], -1))
        return pool_scores(tokens[:, None], sm_scale, pooling)

    def index_bytes(self, arrays: Arrays, prefix_len: int, budget: int) -> float:
        heads = arrays["order"].shape[0]
        return (arrays["centroids"].nbytes + arrays["ends"].nbytes) / heads + arrays["order"].element_size() * budget


@dataclass
class DoubleSparsity(ScoringRival):
    """Double Sparsity (2408.07092): the keys on a few channels that an offline calibration chose, every token scored.

    bits 16 keeps them in fp16, 4 in INT4 per channel.
    """

    name: ClassVar[str] = "double_sparsity"
    needs: ClassVar[str] = "channels"
    num_channels: int = 16
    bits: int = 16

    def build(self, keys: Tensor, samples: Tensor | None, channels: Tensor | None = None) -> dict[str, Tensor]:
        if channels is None:
            raise ValueError("expected the channels of the offline calibration, got none; hand in top_channels")
        rows = keys.transpose(0, 1).float()
        index = channels.long().to(keys.device)
        kept = rows.gather(2, index[:, None].expand(-1, rows.shape[1], -1))
        arrays = {"channels": index.short()}
        if self.bits == 16:
            return {**arrays, "labels": kept.half()}
        return {**arrays, **{f"labels_{name}": part for name, part in quantize(kept, self.bits)._asdict().items()}}

    def token_scores(self, arrays: Arrays, q: Tensor, prefix_len: int, sm_scale: float, pooling: Pooling) -> Tensor:
        tile = _tile(q, arrays["channels"].shape[0])
        kept = tile.gather(2, arrays["channels"].long()[:, None].expand(-1, tile.shape[1], -1))
        if self.bits == 16:
            labels = arrays["labels"].float()
        else:
            labels = dequantize(LowBitTensor(*(arrays[f"labels_{name}"] for name in LowBitTensor._fields)))
        return pool_scores((kept @ labels.transpose(1, 2))[:, None], sm_scale, pooling)


@dataclass
class StreamingLLM(FixedRival):
    """StreamingLLM (2309.17453): attention sinks and the most recent tokens, no index."""

    name: ClassVar[str] = "streaming_llm"

    def fixed_scores(self, num_rows: int, prefix_len: int, device: torch.device) -> Tensor:
        """[num_rows, prefix_len]: the later the better."""
        return torch.arange(prefix_len, device=device, dtype=torch.float32).expand(num_rows, -1)


@dataclass
class Random(FixedRival):
    """Positions at random beside the windows; other ones at every call."""

    name: ClassVar[str] = "random"
    seed: int = 0
    _generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def fixed_scores(self, num_rows: int, prefix_len: int, device: torch.device) -> Tensor:
        """[num_rows, prefix_len] uniform numbers."""
        return torch.rand(num_rows, prefix_len, generator=self._generator).to(device)


def _pages(keys: Tensor, page: int) -> Tensor:
    """[num_kv_heads, num_pages, page, head_dim] fp32; a short last page repeats the last key."""
    rows = keys.transpose(0, 1).float()
    missing = -rows.shape[1] % page
    rows = torch.cat([rows, rows[:, -1:].expand(-1, missing, -1)], dim=1)
    return rows.view(rows.shape[0], -1, page, rows.shape[2])


def _clusters(rows: Tensor, num_clusters: int, iterations: int, seed: int) -> Tensor:
    """Lloyd's algorithm by cosine from random keys: labels [num_kv_heads, prefix_len] int64.

    Random seeds instead of k-means++: with one cluster for every 20 keys, seeding by distance takes thousands of
    sequential steps. An empty cluster keeps its centroid.
    """
    unit = torch.nn.functional.normalize(rows, dim=2)
    generator = torch.Generator().manual_seed(seed)
    first = torch.randperm(rows.shape[1], generator=generator)[:num_clusters].to(rows.device)
    centroids = unit[:, first]
    label = _nearest(unit, centroids)
    for _ in range(iterations):
        total = torch.zeros_like(centroids).scatter_add_(1, label[..., None].expand_as(unit), unit)
        length = total.norm(dim=2, keepdim=True)
        centroids = torch.where(length > 1e-6, total / length.clamp_min(1e-6), centroids)
        label = _nearest(unit, centroids)
    return label


def _nearest(unit: Tensor, centroids: Tensor) -> Tensor:
    step = max(1, (1 << 27) // (centroids.shape[0] * centroids.shape[1]))
    parts = [(part @ centroids.transpose(1, 2)).argmax(dim=2) for part in unit.split(step, dim=1)]
    return torch.cat(parts, dim=1)
