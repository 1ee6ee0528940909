"""One layer's KV pool and the queries of a decode batch, with an fp64 oracle: what every attention case reads.

Pages lie in random order in a pool larger than the L2 cache; slots that nobody may read hold NaN. Some tokens of every
list are *beacons*: keys that all queries of their KV head want, the first and the last token among them. They hold
about half of the attention, so one of them lost or misplaced moves a row by a tenth, not by 1 / prefix_len.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prefix_kernels.budget import budget_for_group
from prefix_kernels.grouped_attention import AttentionShape
from prefix_kernels.types import PagedKV
from tests.planted import AttnState, dense_attention

#: K and V of a pool, at least, on a GPU: several times any L2 cache.
_MIN_POOL_BYTES = 1 << 29
_PAGES_AT_ONCE = 4096
_BEACONS = 64

#: Largest relative error of an output row (request, query head), and largest error of lse, by dtype. bf16: weights and
#: output are rounded to 8 bits, 1.6e-3 together (rms); the limit leaves a factor of 6. lse is never rounded to bf16.
OUT_LIMIT = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LSE_LIMIT = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-3}


@dataclass(frozen=True)
class Gate:
    """How far a result is from its oracle.

    Attributes:
        error: as a share of what is allowed; infinite where a value is missing or not a number.
        figures: what was compared.
    """

    error: float
    figures: dict[str, float]

    @property
    def green(self) -> bool:
        """Whether the result may be timed."""
        return self.error <= 1.0


@dataclass(frozen=True)
class Sizes:
    """What distinguishes problems.

    Attributes:
        context: tokens of each prefix, a multiple of page.
        batch: requests, a multiple of groups.
        groups: distinct prefixes, each read by batch / groups requests.
        suffix: suffix tokens of each request.
        page: tokens of a page.
    """

    context: int
    batch: int
    groups: int
    suffix: int
    page: int

    def __post_init__(self) -> None:
        if self.batch % self.groups or self.context % self.page:
            raise ValueError(
                f"expected a batch that is a multiple of the groups and a context that is one of the page, got {self}"
            )

    @property
    def rows(self) -> int:
        """Requests of a group."""
        return self.batch // self.groups


@dataclass(eq=False)
class Problem:
    """Made by `make_problem`.

    Attributes:
        shape: of the layer.
        sizes: of the batch.
        q: [batch, num_qo_heads, head_dim].
        layers: the pools of the layers that a run attends, one after the other, with the same pages.
        prefix_pages: int32 [groups, context / page].
        suffix_pages: int32 [batch, ceil(suffix / page)].
        positions: int32 [groups, num_kv_heads, count], ascending; the sparse case's selection.
        sm_scale: multiplies q.k.
    """

    shape: AttentionShape
    sizes: Sizes
    q: Tensor
    layers: tuple[PagedKV, ...]
    prefix_pages: Tensor
    suffix_pages: Tensor
    positions: Tensor
    sm_scale: float
    _oracles: dict[str, AttnState] = field(default_factory=dict)

    @property
    def kv(self) -> PagedKV:
        """The last layer's pool, whose output a run leaves behind; pages of `sizes.page` slots."""
        return self.layers[-1]

    @property
    def prefix_slots(self) -> Tensor:
        """int32 [groups, context]."""
        return _slots(self.prefix_pages, self.sizes.page)

    @property
    def suffix_slots(self) -> Tensor:
        """int32 [batch, suffix]."""
        return _slots(self.suffix_pages, self.sizes.page)[:, : self.sizes.suffix].contiguous()

    @property
    def selected_slots(self) -> Tensor:
        """int32 [groups, num_kv_heads, count]."""
        return self.prefix_slots[:, None].expand(-1, self.positions.shape[1], -1).gather(2, self.positions.long())

    def members(self, group: int) -> tuple[int, ...]:
        """Batch rows of a group."""
        rows = self.sizes.rows
        return tuple(range(group * rows, (group + 1) * rows))

    def kv_bytes(self, reads: str) -> int:
        """K and V that must be read, each once: without lists, queries and output."""
        sizes, shape = self.sizes, self.shape
        prefix = {"all": sizes.context, "sparse": self.positions.shape[2], "suffix": 0}[reads]
        tokens = sizes.groups * prefix + sizes.batch * sizes.suffix
        return tokens * slot_bytes(shape)

    def oracle(self, reads: str) -> AttnState:
        """Attention over `all`, over the `sparse` selection and the suffix, or over the `suffix` alone, in fp64."""
        if reads not in self._oracles:
            lists = list(self.suffix_slots[:, None])
            if reads != "suffix":
                prefixes = self.prefix_slots[:, None] if reads == "all" else self.selected_slots
                rows, width = self.sizes.rows, prefixes.shape[1]
                lists = [torch.cat([prefixes[n // rows], own.expand(width, -1)], 1) for n, own in enumerate(lists)]
            self._oracles[reads] = oracle(self.q, self.kv, lists, self.sm_scale)
        return self._oracles[reads]

    def gate(self, out: Tensor, lse: Tensor | None, reads: str) -> Gate:
        """Compare a result with the oracle; see `OUT_LIMIT`."""
        wanted = self.oracle(reads)
        difference = (out.double() - wanted.out).norm(dim=2) / wanted.out.norm(dim=2)
        figures = {"out": _worst(difference)}
        errors = [figures["out"] / OUT_LIMIT[self.shape.dtype]]
        if lse is not None:
            figures["lse"] = _worst((lse - wanted.lse).abs())
            errors.append(figures["lse"] / LSE_LIMIT[self.shape.dtype])
        return Gate(max(errors), figures)


def slot_bytes(shape: AttentionShape) -> int:
    """K and V of one token. Narrower values are latent: the first channels of the keys."""
    width = shape.head_dim + shape.v_head_dim * (shape.v_head_dim == shape.head_dim)
    return shape.num_kv_heads * width * shape.kv_dtype.itemsize


def make_problem(
    shape: AttentionShape, sizes: Sizes, keep: float, device: torch.device, seed: int = 0, layers: int = 1
) -> Problem:
    """Random keys, values and queries with beacons, and a random selection of them per KV head.

    Args:
        keep: of the prefix's tokens, for a group of one; grows with the square root of the group.
        layers: pools; beacons are in the last one's keys.
    """
    gen = torch.Generator(device).manual_seed(seed + 7 * sizes.context + sizes.batch)
    per_prefix, per_suffix = sizes.context // sizes.page, -(-sizes.suffix // sizes.page)
    used = sizes.groups * per_prefix + sizes.batch * per_suffix
    least = _MIN_POOL_BYTES // (slot_bytes(shape) * sizes.page) if device.type == "cuda" else 0
    num_pages = max(used + used // 4 + 1, least)
    order = torch.randperm(num_pages, generator=gen, device=device).int()
    kv, *others = (_filled_pool(shape, sizes.page, num_pages, order[:used], gen) for _ in range(layers))
    prefix_pages = order[: sizes.groups * per_prefix].view(sizes.groups, per_prefix)
    suffix_pages = order[sizes.groups * per_prefix : used].view(sizes.batch, per_suffix)

    strength = max(math.log(max(sizes.context, 1) / _BEACONS), 1.0) * math.sqrt(shape.head_dim)
    wanted = torch.nn.functional.normalize(
        torch.randn(shape.num_kv_heads, shape.head_dim, generator=gen, device=device), dim=1
    ) * math.sqrt(strength)
    q = torch.randn(sizes.batch, shape.num_qo_heads, shape.head_dim, generator=gen, device=device)
    q += wanted.repeat_interleave(shape.gqa, dim=0)
    beacons = _beacons(sizes.context, _BEACONS, gen)
    for row in _slots(prefix_pages, sizes.page):
        kv.k_cache[row[beacons].long()] += wanted.to(kv.k_cache.dtype)
    if sizes.suffix:
        own = _slots(suffix_pages, sizes.page)[:, _beacons(sizes.suffix, 4, gen)].flatten().long()
        kv.k_cache[own] += wanted.to(kv.k_cache.dtype)
    positions = _select(shape, sizes, keep, beacons, gen)
    pools = (*others, kv)
    return Problem(shape, sizes, q.to(shape.dtype), pools, prefix_pages, suffix_pages, positions, shape.head_dim**-0.5)


def oracle(q: Tensor, kv: PagedKV, lists: Sequence[Tensor], sm_scale: float) -> AttnState:
    """Attention in fp64, row by row and KV head by KV head; out in fp64, lse in fp32, natural log.

    Args:
        q: [batch, num_qo_heads, head_dim].
        kv: the pool.
        lists: per row the slots that it attends, [num_kv_heads or 1, n].
        sm_scale: multiplies q.k.
    """
    parts = [
        dense_attention(queries[None], kv.k_cache[slots, head, None], kv.v_cache[slots, head, None], sm_scale)
        for row, of_row in zip(q.unflatten(1, (kv.num_kv_heads, -1)), lists, strict=True)
        for head, (queries, slots) in enumerate(zip(row, of_row.long().expand(len(row), -1), strict=True))
    ]
    shape = q.shape[:2]
    return AttnState(
        torch.cat([part.out for part in parts]).view(*shape, -1), torch.cat([part.lse for part in parts]).view(shape)
    )


def _filled_pool(shape: AttentionShape, page: int, num_pages: int, used: Tensor, gen: torch.Generator) -> PagedKV:
    """NaN everywhere but in the used pages."""

    def cache(dim: int) -> Tensor:
        pages = torch.full(
            (num_pages, page, shape.num_kv_heads, dim), torch.nan, dtype=shape.kv_dtype, device=used.device
        )
        for some in used.long().split(_PAGES_AT_ONCE):
            values = torch.randn(len(some), *pages.shape[1:], generator=gen, device=used.device)
            pages[some] = values.to(shape.kv_dtype)
        return pages.view(num_pages * page, shape.num_kv_heads, dim)

    keys = cache(shape.head_dim)
    latent = shape.v_head_dim < shape.head_dim
    return PagedKV(keys, keys[..., : shape.v_head_dim] if latent else cache(shape.v_head_dim))


def _beacons(length: int, count: int, gen: torch.Generator) -> Tensor:
    """Distinct positions, ascending, the first and the last among them."""
    if length <= 2:
        return torch.arange(length, device=gen.device)
    count = max(min(count, length // 2), 2)
    inner = torch.randperm(length - 2, generator=gen, device=gen.device)[: count - 2] + 1
    ends = torch.tensor([0, length - 1], device=gen.device)
    return torch.cat([ends, inner]).sort().values


def _select(shape: AttentionShape, sizes: Sizes, keep: float, beacons: Tensor, gen: torch.Generator) -> Tensor:
    """Random positions per group and KV head, as many as the group's budget; the beacons are among them."""
    budget = budget_for_group(max(1, round(keep * sizes.context)), sizes.rows)
    count = max(min(budget, sizes.context), len(beacons))
    chosen = torch.empty(sizes.groups, shape.num_kv_heads, count, dtype=torch.int32, device=gen.device)
    for group in chosen:
        rank = torch.rand(shape.num_kv_heads, sizes.context, generator=gen, device=gen.device)
        rank[:, beacons] = 2.0
        group.copy_(rank.topk(count, dim=1).indices.sort(dim=1).values)
    return chosen


def _slots(pages: Tensor, page: int) -> Tensor:
    inside = torch.arange(page, dtype=torch.int32, device=pages.device)
    return (pages[..., None] * page + inside).flatten(-2)


def _worst(error: Tensor) -> float:
    """The largest; infinite where one is not a number."""
    return float(error.double().nan_to_num(nan=math.inf, posinf=math.inf).max())
