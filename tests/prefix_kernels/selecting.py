"""Selections by kernels: groups with an index of their own each, and what their scores and lists must be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from prefix_kernels.anchor_selection import AnchorSelection
from prefix_kernels.low_bit import dequantize, quantize
from prefix_kernels.pooled_scores import ScoredGroup, ScoreInputs, ScoreShape
from prefix_kernels.pooling import HEADROOM, Pooling, pool_scores
from prefix_kernels.types import CandidateForm, SelectedLists, SelectionGroup, new_lists, pack_lists

KV_HEADS, GQA, DIM = 2, 4, 64
#: Largest error of a log-probability, natural log, where queries times steps are fp32, and where they are fp16.
FP32_LIMIT, FP16_LIMIT = 1e-4, 1e-2
POISON = 1_000_007

Sizes = Sequence[tuple[tuple[int, ...], int, int]]
"""Of each group its batch rows, the tokens of its prefix, and its budget."""


@dataclass(eq=False, kw_only=True)
class Problem:
    """Groups with an index of their own each, all scores in one arena.

    Attributes:
        q: queries of the batch.
        scored, selected: the plan.
        room: entries of the arena of scores.
        limit: largest error of a score above `least`; lower ones may be anything.
        spread: tokens of a prefix for each that is a candidate.
    """

    q: Tensor
    scored: list[Any]
    selected: list[SelectionGroup]
    room: int
    limit: float
    least: float = -torch.inf
    sm_scale: float = 0.3
    spread: int = 1
    keys: list[Tensor] = field(default_factory=list)

    def part(self, groups: slice) -> Any:
        """The same with some of the groups."""
        return replace(self, scored=self.scored[groups], selected=self.selected[groups], keys=self.keys[groups])

    def wanted(self, group: int) -> Tensor:
        """[KV_HEADS, prefix_len]: scores of the reference."""
        raise NotImplementedError

    def launch(self, one: Any, scores: Tensor, lists: SelectedLists, **options: Any) -> None:
        """Run a selection that has this plan."""
        raise NotImplementedError

    def tokens(self, group: int, head: int, places: Tensor) -> Tensor:
        """Which those at some places of a KV head's scores are."""
        return places

    @property
    def slot_table(self) -> Tensor:
        """Of all groups."""
        size = max((group.slot_start + self.spread * group.prefix_len for group in self.selected), default=0)
        return torch.randperm(size, generator=torch.Generator().manual_seed(9)).to(self.q.device, torch.int32)


@dataclass(eq=False, kw_only=True)
class TokenProblem(Problem):
    """Of token indexes.

    Attributes:
        keys: of each group, [KV_HEADS, prefix_len, head_dim] that the codes stand for, 0 on channels that they do not
            keep.
        tile: query rows that are rounded to units of their own in INT8, as Hopper's kernel has them; 0: none are.
        candidates: int32, of listed tokens: the entries of all lists, which lie as `scored` says.
    """

    shape: ScoreShape
    tile: int = 0
    candidates: Tensor | None = None

    def wanted(self, group: int) -> Tensor:
        q = self.q[list(self.scored[group].rows)].double().unflatten(1, (KV_HEADS, -1)).transpose(0, 1).flatten(1, 2)
        if self.tile:
            q = torch.cat([self._rounded(tile, group) for tile in q.split(self.tile, dim=1)], dim=1)
        raw = (q @ self.keys[group].double().transpose(1, 2)).unflatten(1, (-1, self.shape.gqa))
        return pool_scores(raw, self.sm_scale, self.shape.pooling, sum_every=self.shape.sum_every).float()

    @property
    def least_unit(self) -> float:
        """Of queries that are rounded: in it, exponents to base 2 are multiples of 2^-24."""
        return 2**-24 / (self.sm_scale * math.log2(math.e))

    def _rounded(self, queries: Tensor, group: int) -> Tensor:
        """Queries [KV_HEADS, rows, head_dim] of a tile: times the channels' steps in whole units."""
        channels, _, steps = self.scored[group].arrays
        index = channels.long()[:, None].expand(-1, queries.shape[1], -1)
        products = queries.gather(2, index) * steps[:, None]
        unit = (products.abs().amax(dim=(1, 2), keepdim=True) / 127).clamp_min(self.least_unit)
        return torch.zeros_like(queries).scatter_(2, index, (products / unit).round() * unit / steps[:, None])

    def launch(self, one: AnchorSelection, scores: Tensor, lists: SelectedLists, **options: Any) -> None:
        inputs = ScoreInputs(self.q, self.sm_scale, candidates=self.candidates, **options)
        one.run(inputs, scores, lists, slot_table=self.slot_table)

    def tokens(self, group: int, head: int, places: Tensor) -> Tensor:
        """See the base."""
        if self.candidates is None:
            return places
        each, begin = self.shape.entry_tokens, self.scored[group].list_begins[head]
        return self.candidates[begin + places.long() // each] * each + places % each


def problem(
    device: torch.device,
    sizes: Sizes,
    *,
    bits: int = 4,
    pooling: Pooling = Pooling.MAX,
    dtype: torch.dtype = torch.float32,
    same: bool = False,
    windows: tuple[int, int] = (5, 20),
    dim: int = DIM,
    channels: int = DIM,
    sum_every: int = 1,
    gqa: int = GQA,
    rising: float = 0.0,
    by_list: bool = False,
    entry_tokens: int = 1,
    row_tokens: int = 1,
    **more: Any,
) -> TokenProblem:
    """Token indexes of groups.

    Args:
        by_list: what is said of tokens is said of candidates, every third one of a prefix or so.
        entry_tokens: of these lists.
        row_tokens: that share a row of codes.
        same: all tokens are one and the same, so all of them tie.
        rising: how far later keys point the way of the first row's queries: scores leave any first step behind.
        more: fields of the problem.
    """
    gen = torch.Generator().manual_seed(len(sizes) + sizes[0][1])
    batch = max(max(rows) for rows, _, _ in sizes) + 1
    q = torch.randn(batch, KV_HEADS * gqa, dim, generator=gen)
    hopper = "tile" in more
    scored, selected, keys = [], [], []
    at = table_at = 0
    form = CandidateForm.LISTED if by_list else CandidateForm.TOKEN
    lists = torch.full((7,), POISON, dtype=torch.int32)
    spread = 3 if by_list else 1
    for rows, count, budget in sizes:
        length, coded = spread * count, -(-spread * count // row_tokens)
        values = torch.randn(KV_HEADS, 1 if same else coded, channels, generator=gen) + 0.7
        kept = torch.rand(KV_HEADS, dim, generator=gen).argsort(dim=1)[:, :channels]
        kept = kept if hopper or channels < dim else kept.sort(dim=1).values
        way = q[rows[0]].unflatten(0, (KV_HEADS, gqa)).mean(1).gather(1, kept)
        values = values + torch.linspace(0, rising, coded)[None, :, None] * way[:, None] if rising else values
        codes = quantize(values.expand(-1, coded, -1).to(device), bits)
        kept = kept.to(device)
        listed = kept.short() if hopper or channels < dim else None
        full = torch.zeros(KV_HEADS, coded, dim, device=device)
        full = full.scatter_(2, kept[:, None].expand(-1, coded, -1), dequantize(codes))
        full = full.repeat_interleave(row_tokens, dim=1)[:, :length]
        list_begins = ()
        if by_list:
            entries, listed_entries = length // entry_tokens, -(-count // entry_tokens)
            order = torch.rand(KV_HEADS, entries, generator=gen).argsort(dim=1)[:, :listed_entries].sort(dim=1).values
            tokens = (order[..., None] * entry_tokens + torch.arange(entry_tokens)).flatten(1)[:, :count]
            full = torch.stack([own[of] for own, of in zip(full, tokens.to(device), strict=True)])
            list_begins = tuple(len(lists) + head * listed_entries for head in range(KV_HEADS))
            lists = torch.cat([lists, order.flatten().int()])
        keys.append(full)
        stride = -(-count // 4) * 4
        firsts = tuple(head * coded for head in range(KV_HEADS))
        begins = tuple(at + head * stride for head in range(KV_HEADS))
        arrays = (listed, codes.packed, codes.scale)
        shared = (row_tokens,) * KV_HEADS if row_tokens > 1 else ()
        scored.append(ScoredGroup(rows, count, firsts, begins, arrays, list_begins=list_begins, row_tokens=shared))
        sink, recent = windows if budget >= sum(windows) else (0, 0)
        selected.append(SelectionGroup(count, budget, sink, recent, slot_start=table_at))
        at += KV_HEADS * stride
        table_at += length
    shape = ScoreShape(
        KV_HEADS * gqa, KV_HEADS, channels, bits, hopper or channels < dim, pooling, sum_every, form, entry_tokens,
        row_tokens > 1,
    )  # fmt: skip
    more.setdefault("limit", FP32_LIMIT if dtype is torch.float32 else FP16_LIMIT)
    return TokenProblem(
        q=q.to(device, dtype), scored=scored, selected=pack_lists(selected, KV_HEADS), room=at + 4, keys=keys,
        shape=shape, spread=spread, candidates=lists.to(device) if by_list else None, **more,
    )  # fmt: skip


def hopper_problem(device: torch.device, sizes: Sizes, **options: Any) -> TokenProblem:
    """Of indexes that sm_90's own kernel has."""
    least = -25.0 if options.get("sum_every", 1) == 1 else -25.0 - HEADROOM
    fixed = {"dtype": torch.bfloat16, "dim": 128, "channels": 96, "sm_scale": 0.11, "tile": 8}
    return problem(device, sizes, **{**fixed, "limit": 2e-2, "least": least, **options})


def lists_of(one: Any, *, with_slots: bool = True) -> SelectedLists:
    """Buffers that a selection can list in."""
    device = one.programs.at_least.device
    return new_lists(one.list_entries, (one.max_groups, one.shape.num_kv_heads), device, with_slots=with_slots)


def select(one: Any, made: Problem, **options: Any) -> tuple[Tensor, SelectedLists]:
    """Plan and run into buffers that hold garbage before."""
    lists = lists_of(one)
    scores = torch.full((made.room,), torch.nan, device=made.q.device)
    one.plan(made.scored, made.selected)
    for buffer in (lists.positions, lists.counts, lists.slots):
        buffer.fill_(POISON)
    made.launch(one, scores, lists, **options)
    return scores, lists


def keys_of(scores: Tensor) -> Tensor:
    """int64 keys of 11 bits, written otherwise than in the kernel: -inf and NaN 0."""
    steps = torch.tensor(2045.0 / 44.0, dtype=torch.float32, device=scores.device)
    place = (scores.clamp(-44.0, 0.0).nan_to_num() - -44.0) * steps
    return torch.where(scores > -torch.inf, place.long() + 1, 0)


def best(scores: Tensor, group: SelectionGroup) -> list[int]:
    """The positions of one KV head: sorted whole by window, then key, then position, the highest first."""
    keys, recent = keys_of(scores).tolist(), group.prefix_len - group.num_recent
    order = sorted(range(group.prefix_len), key=lambda t: (t < group.num_sink or t >= recent, keys[t], t), reverse=True)
    return sorted(order[: group.count])


def check_scores(made: Problem, scores: Tensor) -> None:
    """Those of the reference, none of a prefix that is attended whole."""
    written = torch.zeros_like(scores, dtype=torch.bool)
    for g, (of, group) in enumerate(zip(made.scored, made.selected, strict=True)):
        if group.budget < group.prefix_len:
            for wanted, begin in zip(made.wanted(g), of.score_begins, strict=True):
                there = slice(begin, begin + group.prefix_len)
                near = wanted >= made.least
                torch.testing.assert_close(scores[there][near], wanted[near], atol=made.limit, rtol=1e-5)
                assert not scores[there].isnan().any()
                written[there] = True
    assert bool((scores.isnan() | written).all()), "nothing else"


def check(made: Problem, scores: Tensor, lists: SelectedLists) -> None:
    """Scores of the reference, and the best of these very scores."""
    check_scores(made, scores)
    groups, table = len(made.selected), made.slot_table
    assert lists.counts[:groups].tolist() == [[group.count] * KV_HEADS for group in made.selected]
    assert bool((lists.counts[groups:] == POISON).all())
    assert lists.slots is not None
    for g, (of, group) in enumerate(zip(made.scored, made.selected, strict=True)):
        positions = group.lists_in(lists.positions, KV_HEADS)
        assert torch.equal(group.lists_in(lists.slots, KV_HEADS), table[group.slot_start + positions.long()])
        for head, begin in enumerate(of.score_begins):
            chosen = torch.tensor(best(scores[begin : begin + group.prefix_len], group), device=table.device)
            assert torch.equal(positions[head], made.tokens(g, head, chosen).int()), (g, head)
    for buffer in (lists.positions, lists.slots):
        assert int((buffer != POISON).sum()) == KV_HEADS * sum(group.count for group in made.selected), "nothing else"
