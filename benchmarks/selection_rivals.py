"""Rivals of the selection benchmark that the product does not have, from their papers' descriptions.

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

from prefix_kernels.pooling import Pooling, pool_scores

Arrays = Mapping[str, Tensor]


class Rival(ABC):
    """What it keeps of a prefix, and how it scores tokens by that."""

    name: ClassVar[str] = ""

    def describe(self) -> dict[str, Any]:
        """Parameters for the row."""
        return {"method": self.name, **{key: value for key, value in vars(self).items() if not key.startswith("_")}}

    def build(self, keys: Tensor) -> dict[str, Tensor]:
        """Arrays of a layer from keys [prefix_len, num_kv_heads, head_dim]; leading dimension num_kv_heads."""
        return {}

    @abstractmethod
    def token_scores(
        self, arrays: Arrays, q: Tensor, num_rows: int, prefix_len: int, sm_scale: float, pooling: Pooling
    ) -> Tensor:
        """[num_rows, prefix_len], num_rows KV heads, from q [1, num_qo_heads, head_dim]: higher is better."""

    def index_bytes(self, arrays: Arrays, prefix_len: int, budget: int) -> float:
        """Bytes of the index that a step reads for one KV head; by default none."""
        return 0.0


@dataclass
class KMeansKeys(Rival):
    """Squeezed Attention (2411.09688): the prefix's keys in cosine k-means clusters, about 20 keys each; a step scores
    the clusters' mean keys and takes the keys of the best clusters.

    Kept: centroids in fp16 and the positions in the order of their clusters (int32), of which a step reads those of
    the clusters that it takes.
    """

    name: ClassVar[str] = "kmeans_keys"
    keys_per_cluster: int = 20
    iterations: int = 10
    seed: int = 0

    def build(self, keys: Tensor) -> dict[str, Tensor]:
        rows = keys.transpose(0, 1).float()
        num_clusters = max(1, rows.shape[1] // self.keys_per_cluster)
        label = _clusters(rows, num_clusters, self.iterations, self.seed)
        members = rows.new_zeros(rows.shape[0], num_clusters).scatter_add_(1, label, torch.ones_like(rows[..., 0]))
        index = label[..., None].expand_as(rows)
        total = rows.new_zeros(rows.shape[0], num_clusters, rows.shape[2]).scatter_add_(1, index, rows)
        order = label.argsort(dim=1, stable=True).int()
        ends = torch.nn.functional.pad(members.cumsum(dim=1), (1, 0)).int()
        return {"centroids": (total / members.clamp_min(1)[..., None]).half(), "order": order, "ends": ends}

    def token_scores(
        self, arrays: Arrays, q: Tensor, num_rows: int, prefix_len: int, sm_scale: float, pooling: Pooling
    ) -> Tensor:
        tile = q[0].float().view(num_rows, -1, q.shape[2])
        raw = tile @ arrays["centroids"].float().transpose(1, 2)
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
class StreamingLLM(Rival):
    """StreamingLLM (2309.17453): attention sinks and the most recent tokens, no index."""

    name: ClassVar[str] = "streaming_llm"

    def token_scores(
        self, arrays: Arrays, q: Tensor, num_rows: int, prefix_len: int, sm_scale: float, pooling: Pooling
    ) -> Tensor:
        return torch.arange(prefix_len, device=q.device, dtype=torch.float32).expand(num_rows, -1)


@dataclass
class Random(Rival):
    """Positions at random beside the windows; other ones at every call."""

    name: ClassVar[str] = "random"
    seed: int = 0
    _generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def token_scores(
        self, arrays: Arrays, q: Tensor, num_rows: int, prefix_len: int, sm_scale: float, pooling: Pooling
    ) -> Tensor:
        return torch.rand(num_rows, prefix_len, generator=self._generator).to(q.device)


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
