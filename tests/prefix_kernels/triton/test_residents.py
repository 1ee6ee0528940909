"""Residents: the kernels against the reference, step by step, state and all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from prefix_kernels import PagedKV
from prefix_kernels.residents import PAGE_TOKENS, gather_listed
from prefix_kernels.residents import runner as residents_runner
from prefix_kernels.types import SelectionGroup, pack_lists
from tests.prefix_kernels.resident_steps import Prefixes, Steps, Wanted
from tests.prefix_kernels.triton.conftest import INTERPRETED


def steps_of(prefixes: Prefixes, count: int, seed: int, most: int) -> list[Wanted]:
    """What steps want: some prefixes, each KV head tokens of a few pages, and a part of what the step before had."""
    drawn = random.Random(seed)
    steps: list[Wanted] = []
    for _ in range(count):
        some = [one for one in range(len(prefixes.pages)) if drawn.random() < 0.7]
        step: dict[int, list[list[int]]] = {}
        for one in some:
            step[one] = []
            for head in range(prefixes.host.shape[1]):
                pages = range(prefixes.pages[one])
                near = sorted(drawn.sample(pages, min(len(pages), drawn.randint(0, most))))
                before = steps[-1].get(one) if steps else None
                kept = [n for n in before[head] if drawn.random() < 0.6] if before and drawn.random() < 0.7 else []
                tokens = {PAGE_TOKENS * page + drawn.randrange(PAGE_TOKENS) for page in near for _ in "123"}
                step[one].append(sorted({*tokens, *kept}))
        steps.append(step)
    return steps


def most_wanted(steps: Sequence[Wanted]) -> int:
    """Cells of a KV head that one of the steps can want: its lists have room for as many as the longest has."""
    return max(sum(max(1, *map(len, by_head)) for by_head in step.values()) for step in steps if step)


def caches(kv: PagedKV) -> tuple[torch.Tensor, torch.Tensor]:
    return kv.k_cache, kv.v_cache


def pinned(prefixes: Prefixes) -> Prefixes:
    """With KV that a kernel can read."""
    if INTERPRETED:
        return prefixes
    return replace(prefixes, host=prefixes.host.pin_memory())


def assert_same(one: Steps, other: Steps) -> None:
    for name, mine in vars(one.residents.state).items():
        theirs = getattr(other.residents.state, name)
        if name in ("fetched_rows", "fetched_cells"):
            # Behind the last one there is nothing.
            there = torch.arange(mine.shape[2]) < one.residents.state.num_fetched[..., None].cpu()
            mine, theirs = mine.cpu()[there], theirs.cpu()[there]
        assert torch.equal(mine.cpu(), theirs.cpu()), name
    for mine, theirs in zip(one.pools, other.pools, strict=True):
        for cache, like in zip(caches(mine), caches(theirs), strict=True):
            assert torch.equal(cache.cpu().view(torch.uint8), like.cpu().view(torch.uint8))


CASES = [
    # pages of prefixes, KV heads, cells, widths of a key and a value, dtype, most new pages of a step
    pytest.param(([5], 1, 20, (8, 8), torch.float32, 4), id="one prefix"),
    pytest.param(([9, 4, 6], 3, 40, (16, 4), torch.float16, 5), id="few cells"),
    pytest.param(([40, 31], 2, 200, (12, 12), torch.float16, 30), id="several tiles"),
    pytest.param(([9, 4], 2, 1, (2, 6), torch.float16, 3), id="as many cells as a step wants"),
]


@pytest.mark.parametrize("case", CASES)
def test_steps_as_the_reference(
    case: tuple[list[int], int, int, tuple[int, int], torch.dtype, int],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages, heads, num_cells, dims, dtype, most = case
    few = {"_STRETCHES": 3, "_LOOK_UP_TILE": 32, "_CELL_TILE": 32, "_FETCH_TOKENS": 4, "_COPYING": 3}
    for name, size in few.items():
        monkeypatch.setattr(residents_runner, name, size)
    prefixes = Prefixes.of(pages, heads, dtype, dims)
    steps = steps_of(prefixes, 8, num_cells, most)
    num_cells = max(num_cells, most_wanted(steps))
    of = Steps(pinned(prefixes), num_cells, "triton", device)
    wanted_of = Steps(prefixes, num_cells, "reference")
    for number, wanted in enumerate(steps):
        lists, should = of.run(wanted, number % 2), wanted_of.run(wanted, number % 2)
        assert_same(of, wanted_of)
        for place in range(len(wanted)):
            for head in range(heads):
                mine, theirs = of.listed(lists, place, head), wanted_of.listed(should, place, head)
                assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
        of.check(lists, wanted, number % 2)
        if number == 2:
            for one in (of, wanted_of):
                one.residents.state = type(one.residents.state).empty(one.shape, one.residents.device)
        if number == 5:
            for one in (of, wanted_of):
                one.residents.state.forget(one.tables[: pages[0]].long())
    assert int(of.residents.counters[:, 1].sum()) > 0


def test_layers_that_reuse_a_selection_fetch_by_their_heads(device: torch.device) -> None:
    prefixes = Prefixes.of([6, 3], 3, torch.float32)
    other = Prefixes.of([6, 3], 3, torch.float32)
    other.host.mul_(3)
    steps = steps_of(prefixes, 4, 0, 2)
    head_map = torch.tensor([2, 0, 0], device=device)
    of = Steps(pinned(prefixes), most_wanted(steps), "triton", device)
    pool = PagedKV(torch.full_like(of.pools[0].k_cache, torch.nan), torch.full_like(of.pools[0].v_cache, torch.nan))
    host = pinned(other).host
    for wanted in steps:
        lists = of.run(wanted)
        of.residents.fetch(0, host, pool, head_map.int())
        for place, prefix in enumerate(wanted):
            for head, of_head in enumerate(head_map.tolist()):
                positions, slots = of.listed(lists, place, of_head)
                for cache, kv in zip(caches(pool), other.kv(other.rows(prefix, positions), head), strict=True):
                    assert torch.equal(cache.cpu()[slots.long(), head], kv)


def test_without_groups_nothing_is_copied(device: torch.device) -> None:
    of = Steps(pinned(Prefixes.of([6], 1, torch.float32)), 6, "triton", device)
    of.run({0: [[0, 40]]})
    of.residents.state.forget(of.tables.long())
    of.pools[0].k_cache.fill_(torch.nan)
    before = of.residents.counters
    of.run({})
    assert torch.equal(of.residents.counters, before)
    assert bool(of.pools[0].k_cache.isnan().all())


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: a graph, and pageable memory that a kernel cannot read")
def test_replays_follow_the_lists_and_the_plan(device: torch.device) -> None:
    prefixes = pinned(Prefixes.of([40, 31], 2, torch.float16, (64, 64)))
    steps = steps_of(prefixes, 6, 1, 12)
    cells = most_wanted(steps)
    of, wanted_of = (Steps(prefixes, cells, one, device) for one in ("triton", "reference"))
    fixed = of.begin(steps[0])
    for _ in range(2):
        of.residents.run(0, of.tables, fixed, prefixes.host, of.pools[0])
        wanted_of.run(steps[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        of.residents.run(0, of.tables, fixed, prefixes.host, of.pools[0])
    for wanted in steps:
        lists = of.begin(wanted)
        for mine, theirs in zip(vars(fixed).values(), vars(lists).values(), strict=True):
            mine.copy_(theirs)
        graph.replay()
        wanted_of.run(wanted)
        assert_same(of, wanted_of)
        of.check(fixed, wanted)
    with pytest.raises(ValueError, match="expected host in pinned memory"):
        of.residents.run(0, of.tables, fixed, prefixes.host.clone(), of.pools[0])


@pytest.mark.parametrize("heads_from", [None, [2, 0, 0]], ids=["own lists", "another layer's"])
@pytest.mark.parametrize(("dtype", "dims"), [(torch.float32, (4, 2)), (torch.float16, (12, 12))], ids=str)
def test_listed_tokens_are_gathered(
    dtype: torch.dtype, dims: tuple[int, int], heads_from: list[int] | None, device: torch.device
) -> None:
    prefixes, number, heads = pinned(Prefixes.of([6, 9], 3, dtype, dims)), 1, 3
    [_, group] = pack_lists([SelectionGroup(96, 20), SelectionGroup(144, 80)], heads)
    positions = torch.full((group.lists_end(heads),), -1, dtype=torch.int32)
    drawn = torch.rand(heads, 144, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :80].sort(1).values
    group.lists_in(positions, heads)[:] = drawn
    begin = prefixes.begins[number]
    table = prefixes.tables[begin : begin + 9]
    head_map = None if heads_from is None else torch.tensor(heads_from, dtype=torch.int32)
    for implementation, first, pages in (("triton", 0, 5), ("triton", 48, 2), ("reference", 16, 3)):
        out = torch.full((pages, heads, PAGE_TOKENS, sum(dims)), torch.nan, dtype=dtype)
        to = device if implementation == "triton" else out.device
        table, positions, out = table.to(to), positions.to(to), out.to(to)
        mapped = None if head_map is None else head_map.to(to)
        gather_listed(
            prefixes.host, table, positions, group, first, out, head_map=mapped, implementation=implementation
        )
        out = out.cpu()
        for head in range(heads):
            listed = drawn[head if heads_from is None else heads_from[head], first : first + pages * PAGE_TOKENS]
            expected = torch.cat(prefixes.kv(prefixes.rows(number, listed), head), dim=1)
            assert torch.equal(out[:, head].flatten(0, 1), expected)


def test_more_than_lists_have_is_not_gathered() -> None:
    host, out = torch.zeros(9, 2, PAGE_TOKENS, 4), torch.zeros(2, 2, PAGE_TOKENS, 4)
    [group] = pack_lists([SelectionGroup(144, 40)], 2)
    table, positions = torch.zeros(9, dtype=torch.int32), torch.zeros(80, dtype=torch.int32)
    with pytest.raises(ValueError, match="expected lists of 48 entries, of which 32 from 16 on are copied, got 40"):
        gather_listed(host, table, positions, group, 16, out)
    with pytest.raises(ValueError, match=r"expected out \[pages, \(2, 16, 4\)\] torch.float32 as host"):
        gather_listed(host, table, positions, group, 0, out[:, :, :8])
    odd = [one[..., :3].half().contiguous() for one in (host, out)]
    with pytest.raises(ValueError, match=r"expected tokens of whole words of 4 bytes, got 3 of torch\.float16"):
        gather_listed(odd[0], table, positions, group, 0, odd[1])
