"""Both levels' indexes of a prefix, as the project's builders make them of clustered keys and queries; oracles in fp64.

`csa` is `two_level` with its defaults (CSAttention's short lists, then INT4 tokens on 3/4 of the channels); `blocks`
has minimum and maximum of blocks of 16 in INT4 in the place of the lists.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from kernel_naive import KEEP, NUM_RECENT, NUM_SINK, SCORE_LIMIT
from kernel_problem import Gate
from kernel_rounding import rounding_of
from torch import Tensor

from prefix_kernels.budget import budget_for_group
from prefix_kernels.csa_scores import CompactLists, decode_lists
from prefix_kernels.csa_scores.runner import CsaScores, CsaShape, CsaTables, default_config
from prefix_kernels.low_bit import LowBitTensor, dequantize
from prefix_kernels.pooled_scores import PooledScores, ScoreConfig, ScoreShape, Source
from prefix_kernels.pooled_scores.triton import config_for
from prefix_kernels.two_level_selection import BlockFirstLevel, CsaFirstLevel, LayerIndex, TwoLevelGroup
from sglang_ext.indexing import make_builder
from sglang_ext.indexing.ab_sparse import ABSparseSpec
from sglang_ext.indexing.combined import TwoLevelSpec, part_arrays
from sglang_ext.indexing.csattention import CSAttentionSpec, subspace_channels

if TYPE_CHECKING:
    from prefix_kernels.grouped_attention import AttentionShape

RECIPES = {"csa": TwoLevelSpec(), "blocks": TwoLevelSpec(first=ABSparseSpec(representation="minmax"))}
TOPICS, NUM_SAMPLES = 32, 1024
_ORACLE_ELEMENTS = 1 << 24


class Prefix:
    """Keys in clusters, queries that want some of them, and both levels' indexes of one layer.

    Args:
        shape: of the layer.
        batch: requests of one group.
        prefix_len: tokens.
        device: where everything lies.
        spec: the recipe.
    """

    def __init__(
        self, shape: AttentionShape, batch: int, prefix_len: int, device: torch.device, spec: TwoLevelSpec
    ) -> None:
        gen = torch.Generator(device).manual_seed(prefix_len + batch)
        heads, dim = shape.num_kv_heads, shape.head_dim

        def randn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=gen, device=device)

        def topics(*sizes: int) -> Tensor:
            return torch.randint(TOPICS, sizes, generator=gen, device=device)

        self.shape, self.prefix_len, self.spec, self.sm_scale = shape, prefix_len, spec, dim**-0.5
        wanted = torch.nn.functional.normalize(randn(heads, TOPICS, dim), dim=2) * dim**0.5
        head = torch.arange(heads, device=device)
        keys = randn(prefix_len, heads, dim)
        keys += 0.7 * wanted[head, topics(prefix_len, heads)]
        samples = randn(heads, NUM_SAMPLES, dim) + wanted[head[:, None], topics(heads, NUM_SAMPLES)]
        q = randn(batch, heads, shape.gqa, dim) + wanted[head[:, None], topics(batch, heads, shape.gqa)]
        self.q = q.flatten(1, 2).to(shape.dtype)
        arrays = make_builder(spec).build_layer(keys.to(shape.kv_dtype), samples.to(shape.kv_dtype))
        self.first, self.second = part_arrays(arrays, "first"), part_arrays(arrays, "second")
        budget = budget_for_group(max(NUM_SINK + NUM_RECENT + 16, round(KEEP * prefix_len)), batch)
        self.budget = min(budget, prefix_len)
        self.num_candidates = spec.num_candidates(prefix_len, self.budget)
        kept = self.second["channels"].shape[1]
        self.tokens = ScoreShape(shape.num_qo_heads, heads, Source.LOW_BIT, kept, 4, True)

    def rows(self, head: int) -> Tensor:
        """Queries of a KV head, [rows, head_dim]."""
        gqa = self.shape.gqa
        return self.q[:, head * gqa : (head + 1) * gqa].flatten(0, 1)

    def tile(self, head: int) -> Tensor:
        """The same in fp64."""
        return self.rows(head).double()

    def pooled(self, raw: Tensor) -> Tensor:
        """From raw scores [rows, n] in fp64 to natural logs [n]; -inf is no score."""
        return (raw * self.sm_scale).log_softmax(dim=1).nan_to_num(nan=-torch.inf, neginf=-torch.inf).amax(dim=0)

    def listed(self, head: int, positions: Tensor) -> Tensor:
        """The oracle of the second level: pooled scores of these positions."""
        keys = dequantize(self._codes(head, positions)).double()
        return self.pooled(self.tile(head)[:, self.second["channels"][head].long()] @ keys.T)

    def limit(self, head: int, positions: Tensor) -> float:
        """Largest error of the second level's scores of these positions, where queries are rounded to fp16."""
        rows = self.rows(head)[:, self.second["channels"][head].long()]
        return SCORE_LIMIT + rounding_of(rows, [self._codes(head, positions)], self.sm_scale)

    def _codes(self, head: int, positions: Tensor) -> LowBitTensor:
        parts = (self.second["keys_packed"], self.second["keys_scale"], self.second["keys_zero"])
        return LowBitTensor(parts[0][head, positions], *(part[head] for part in parts[1:]))


class CsaIndex:
    """CSAttention's tables of a prefix: the first level and its oracle."""

    block_size = 1

    def __init__(self, prefix: Prefix) -> None:
        spec, q = prefix.spec.first, prefix.q
        assert isinstance(spec, CSAttentionSpec)
        self._prefix, self._spec, length = prefix, spec, prefix.prefix_len
        parts = [prefix.first.get(name) for name in CompactLists._fields]
        self._lists = CompactLists(*parts)  # type: ignore[arg-type]
        self._list_len = spec.list_len(length)
        self.arrays = CsaTables(prefix.first["centroids"], self._lists, self._list_len, length)
        shape, rows = prefix.shape, q.shape[0]
        self._dims = subspace_channels(shape.head_dim, spec.num_subspaces, spec.layout).to(q.device)
        heads = (shape.num_qo_heads, shape.num_kv_heads)
        of_csa = CsaShape(*heads, shape.head_dim, spec.num_subspaces, spec.num_centroids, spec.score_bits)
        config = default_config(self._list_len / length)
        csa = CsaScores(of_csa, self._dims, rows, length, config, bitmap=self._lists.counts is None)
        pooled = ScoreShape(*heads, Source.RAW)
        # Short stretches: nothing is multiplied while scores are on their way.
        chunks = replace(config_for(pooled, rows), num_chunks=4 * config_of(prefix).num_chunks)
        pooling = PooledScores(pooled, rows, 1, chunks, q.device)
        self.level = CsaFirstLevel(csa, pooling)
        # What the rows fetch, each list once.
        of_list = sum(part[0, 0, 0].nbytes for part in self._lists if part is not None)
        fetched = min(rows * shape.gqa, spec.num_centroids) * spec.num_subspaces * shape.num_kv_heads
        self.nbytes = of_list * fetched + prefix.first["centroids"].nbytes
        self.config: dict[str, Any] = {"csa": vars(config), "pooling": vars(chunks), "list_len": self._list_len}

    def limit(self, head: int) -> float:
        """Largest error of a score: sums in fp32."""
        return SCORE_LIMIT

    def oracle(self, head: int) -> Tensor:
        """Pooled scores [prefix_len] of a KV head."""
        tile = self._prefix.tile(head)
        subspaces = torch.arange(self._spec.num_subspaces, device=tile.device)[:, None]
        parts = tile[:, self._dims].transpose(0, 1)
        weight, nearest = (parts @ self._prefix.first["centroids"][head].double().transpose(1, 2)).max(dim=2)
        raw = torch.full((tile.shape[0], self._prefix.prefix_len), -torch.inf, dtype=torch.float64, device=tile.device)
        for row in range(tile.shape[0]):
            places, counts, *scores = (
                None if part is None else part[head][subspaces[:, 0], nearest[:, row]] for part in self._lists
            )
            lists = CompactLists(places, counts, *scores)  # type: ignore[arg-type]
            positions, values = decode_lists(lists, self._list_len, self._spec.score_bits)
            index, terms = positions.flatten(), (values.double() * weight[:, row, None]).flatten()
            raw[row].scatter_(0, index, 0.0).scatter_add_(0, index, terms)
        return self._prefix.pooled(raw)


class BlockIndex:
    """Minimum and maximum of blocks: the first level and its oracle."""

    def __init__(self, prefix: Prefix) -> None:
        spec, shape, first = prefix.spec.first, prefix.shape, prefix.first
        assert isinstance(spec, ABSparseSpec)
        self._prefix, self.block_size = prefix, spec.block_size
        self.arrays = (None, *(first[f"{part}_{name}"] for part in ("max", "min") for name in ("packed", "scale")))
        heads = (shape.num_qo_heads, shape.num_kv_heads)
        self.shape = ScoreShape(*heads, Source.MINMAX, shape.head_dim)
        blocks = PooledScores(self.shape, prefix.q.shape[0], 1, config_of(prefix), prefix.q.device)
        self.level = BlockFirstLevel(blocks, -(-prefix.prefix_len // spec.block_size))
        self.nbytes = sum(part.nbytes for part in first.values())
        self.config: dict[str, Any] = {"block_size": self.block_size}

    def limit(self, head: int) -> float:
        """Largest error of a score, where queries are rounded to fp16."""
        prefix = self._prefix
        return SCORE_LIMIT + rounding_of(prefix.rows(head), self._bounds(head), prefix.sm_scale)

    def oracle(self, head: int) -> Tensor:
        """Pooled scores of the blocks of a KV head."""
        tile = self._prefix.tile(head)
        bounds = [dequantize(part).double() for part in self._bounds(head)]
        step = max(1, _ORACLE_ELEMENTS // bounds[0].numel())
        raw = [torch.maximum(*(some[:, None] * bound for bound in bounds)).sum(dim=2) for some in tile.split(step)]
        return self._prefix.pooled(torch.cat(raw))

    def _bounds(self, head: int) -> list[LowBitTensor]:
        first = self._prefix.first
        return [
            LowBitTensor(*(first[f"{part}_{name}"][head] for name in LowBitTensor._fields)) for part in ("min", "max")
        ]


def group_of(prefix: Prefix, index: CsaIndex | BlockIndex) -> TwoLevelGroup[Any]:
    """All requests, one layer."""
    second = tuple(prefix.second[name] for name in ("channels", "keys_packed", "keys_scale"))
    return TwoLevelGroup(
        tuple(range(prefix.q.shape[0])),
        prefix.prefix_len,
        prefix.num_candidates,
        prefix.budget,
        (LayerIndex(index.arrays, second),),
        index.block_size,
        NUM_SINK,
        NUM_RECENT,
    )


def config_of(prefix: Prefix) -> ScoreConfig:
    """Two programs for every multiprocessor; on a CPU two for every KV head."""
    device, heads = prefix.q.device, prefix.shape.num_kv_heads
    places = 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    rows = prefix.q.shape[0] * prefix.shape.gqa
    return ScoreConfig(min(64, max(16, 1 << (rows - 1).bit_length())), 128, 4, 3, max(2, places // heads))


def first_gate(prefix: Prefix, index: CsaIndex | BlockIndex, scores: Tensor, stride: int) -> Gate:
    """The first level's scores, KV heads `stride` apart, against fp64."""
    share, worst = 0.0, 0.0
    for head in range(prefix.shape.num_kv_heads):
        wanted = index.oracle(head)
        error = log_error(scores[head * stride :][: len(wanted)], wanted)
        share, worst = max(share, error / index.limit(head)), max(worst, error)
    return Gate(share, {"first_log_prob": worst})


def log_error(scores: Tensor, wanted: Tensor) -> float:
    """Largest error within a factor e^8 of the best one (lower ones never rank); infinite where -inf are others."""
    if not torch.equal(scores == -torch.inf, wanted == -torch.inf):
        return math.inf
    error = (scores.double() - wanted).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return float(error[wanted > wanted.max() - 8.0].max())
