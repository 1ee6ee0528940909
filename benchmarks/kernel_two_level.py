"""An anchor layer's selection in two levels: candidates from one index, ranked by a token index, as kernels.

`csa` is the default recipe (CSAttention's short lists, then INT4 tokens on 3/4 of the channels); `blocks` has minimum
and maximum of blocks of 16 in INT4 in the place of the lists. The indexes are those that the project's builders make of
clustered keys and queries. Every stage is compared with fp64, given what the stage before it wrote.
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
from prefix_kernels.top_k_selection import TopKSelection
from prefix_kernels.two_level_selection import (
    BlockFirstLevel,
    CsaFirstLevel,
    LayerIndex,
    TwoLevelGroup,
    TwoLevelSelection,
)
from sglang_ext.indexing import make_builder
from sglang_ext.indexing.ab_sparse import ABSparseSpec
from sglang_ext.indexing.combined import TwoLevelSpec, part_arrays
from sglang_ext.indexing.csattention import CSAttentionSpec, subspace_channels

if TYPE_CHECKING:
    from prefix_kernels.grouped_attention import AttentionShape

RECIPES = {"csa": TwoLevelSpec(), "blocks": TwoLevelSpec(first=ABSparseSpec(representation="minmax"))}
TOPICS, NUM_SAMPLES = 32, 1024
_STEPS_PER_LOG = 65533 / 44.0
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
        scores = ScoreShape(*heads, Source.MINMAX, shape.head_dim)
        blocks = PooledScores(scores, prefix.q.shape[0], 1, config_of(prefix), prefix.q.device)
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


class FirstLevelAlone:
    """The first level's scores, and nothing after them."""

    eager_too = False

    def __init__(self, prefix: Prefix, index: CsaIndex | BlockIndex) -> None:
        self._prefix, self._index = prefix, index
        index.level.plan([group_of(prefix, index)])  # type: ignore[list-item]
        self.nbytes, self.config = index.nbytes, index.config

    def poison(self) -> None:
        """NaN where a score is expected."""
        self._index.level.scores.fill_(torch.nan)

    def run(self) -> None:
        """As planned."""
        self._index.level.run(self._prefix.q, self._prefix.sm_scale, 0)

    def check(self) -> Gate:
        """The scores against fp64."""
        return first_gate(self._prefix, self._index)


class TwoLevel:
    """From queries to positions and slots."""

    eager_too = False

    def __init__(self, prefix: Prefix, index: CsaIndex | BlockIndex) -> None:
        self._prefix, self._index = prefix, index
        shape, device, rows = prefix.shape, prefix.q.device, prefix.q.shape[0]
        heads, length = shape.num_kv_heads, prefix.prefix_len
        programs = None if device.type == "cuda" else 2 * heads
        nominate = TopKSelection(
            1,
            heads,
            length,
            prefix.num_candidates,
            device,
            key_bits=16,
            num_programs=programs,
            max_block_size=index.block_size,
        )
        kept = prefix.second["channels"].shape[1]
        tokens = ScoreShape(shape.num_qo_heads, heads, Source.LOW_BIT, kept, 4, True)
        second = PooledScores(tokens, rows, 1, config_of(prefix), device, listed=True)
        select = TopKSelection(
            1,
            heads,
            prefix.num_candidates,
            prefix.budget,
            device,
            key_bits=16,
            num_programs=programs,
            max_block_size=1,
        )
        level: Any = index.level
        self._selection: TwoLevelSelection[Any] = TwoLevelSelection(level, nominate, second, select)
        self._selection.plan([group_of(prefix, index)])
        self._lists = self._selection.new_lists(with_slots=True)
        self._slots = torch.randperm(length, generator=torch.Generator().manual_seed(0)).to(device).int()
        token = prefix.second["keys_packed"][0, 0].nbytes
        self.nbytes = index.nbytes + heads * prefix.num_candidates * token
        self.config: dict[str, Any] = {**index.config, "budget": prefix.budget, "candidates": prefix.num_candidates}
        self.config |= {"num_sink": NUM_SINK, "num_recent": NUM_RECENT, "codes": vars(config_of(prefix))}

    def poison(self) -> None:
        """Scores, candidates and lists."""
        for scores in (self._index.level.scores, self._selection.scores):
            scores.fill_(torch.nan)
        assert self._lists.slots is not None
        for places in (self._selection.candidates.positions, self._lists.positions, self._lists.slots):
            places.fill_(-1)

    def run(self) -> None:
        """Everything."""
        prefix = self._prefix
        self._selection.run(prefix.q, self._lists, prefix.sm_scale, slot_table=self._slots, pad=False)

    def check(self) -> Gate:
        """Scores of both levels against fp64; both choices against the scores that they were made by; slots."""
        prefix, index, selection = self._prefix, self._index, self._selection
        named = selection.candidates.positions[0].long()
        taken = self._lists.positions[0].long()
        assert self._lists.slots is not None
        if not (ascending(named, prefix.prefix_len) and ascending(taken, prefix.prefix_len)):
            return Gate(math.inf, {"positions_that_are_none": math.inf})
        gate = first_gate(prefix, index)
        share, worst, wrong = gate.error, 0.0, int((self._slots[taken] != self._lists.slots[0]).sum())
        for head in range(prefix.shape.num_kv_heads):
            first = index.level.scores[head * index.level.score_stride :]
            blocks = first[: -(-prefix.prefix_len // index.block_size)]
            tokens = blocks.repeat_interleave(index.block_size)[: prefix.prefix_len]
            wrong += wrongly_chosen(tokens, named[head])
            scores = selection.scores[head * selection.score_stride :][: prefix.num_candidates]
            error = log_error(scores, prefix.listed(head, named[head]))
            share, worst = max(share, error / prefix.limit(head, named[head])), max(worst, error)
            places = torch.searchsorted(named[head], taken[head])
            missing = int((named[head, places.clamp_max(prefix.num_candidates - 1)] != taken[head]).sum())
            wrong += missing + (0 if missing else wrongly_chosen(scores, places))
        figures = {**gate.figures, "second_log_prob": worst, "wrong_tokens": float(wrong)}
        return Gate(math.inf if wrong else share, figures)


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


def first_gate(prefix: Prefix, index: CsaIndex | BlockIndex) -> Gate:
    """The first level's scores against fp64."""
    share, worst = 0.0, 0.0
    for head in range(prefix.shape.num_kv_heads):
        wanted = index.oracle(head)
        error = log_error(index.level.scores[head * index.level.score_stride :][: len(wanted)], wanted)
        share, worst = max(share, error / index.limit(head)), max(worst, error)
    return Gate(share, {"first_log_prob": worst})


def log_error(scores: Tensor, wanted: Tensor) -> float:
    """Largest error within a factor e^8 of the best one (lower ones never rank); infinite where -inf are others."""
    if not torch.equal(scores == -torch.inf, wanted == -torch.inf):
        return math.inf
    error = (scores.double() - wanted).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return float(error[wanted > wanted.max() - 8.0].max())


def ascending(positions: Tensor, prefix_len: int) -> bool:
    """Whether every row names positions of the prefix, each once and in order."""
    inside = bool(((positions >= 0) & (positions < prefix_len)).all())
    return inside and bool((positions.diff(dim=1) > 0).all())


def wrongly_chosen(scores: Tensor, places: Tensor) -> int:
    """How many of the chosen places [count] differ, by score, from the best ones; windows that are missing.

    Scores are compared as 16-bit keys tell them apart: by steps, rounded down.
    """
    length, count = scores.shape[0], places.shape[0]
    if count == length:
        return 0
    per_log = torch.tensor(_STEPS_PER_LOG, dtype=torch.float32, device=scores.device)
    steps = ((scores.clamp(-44.0, 0.0) + 44.0) * per_log).floor().clamp_max(65533.0)
    steps = torch.where(scores > -torch.inf, steps, -1.0)
    place = torch.arange(length, device=scores.device)
    free = (place >= NUM_SINK) & (place < length - NUM_RECENT)
    taken = torch.zeros_like(free)
    taken[places] = True
    best = steps[free].sort(descending=True).values[: count - NUM_SINK - NUM_RECENT]
    got = steps[free & taken].sort(descending=True).values
    missing = int((~taken & ~free).sum())
    return missing + (int((got != best).sum()) if got.shape == best.shape else length)


def _prefix(recipe: str, *of: Any) -> Prefix:
    return Prefix(*of, RECIPES[recipe])


def _csa(*of: Any) -> FirstLevelAlone:
    prefix = _prefix("csa", *of)
    return FirstLevelAlone(prefix, CsaIndex(prefix))


def _two_level_csa(*of: Any) -> TwoLevel:
    prefix = _prefix("csa", *of)
    return TwoLevel(prefix, CsaIndex(prefix))


def _two_level_blocks(*of: Any) -> TwoLevel:
    prefix = _prefix("blocks", *of)
    return TwoLevel(prefix, BlockIndex(prefix))


TWO_LEVEL = {
    "csa/ours": _csa,
    "anchor/two_level_csa": _two_level_csa,
    "anchor/two_level_blocks": _two_level_blocks,
}
