"""An anchor layer's selection on Hopper's own kernel against the one for all GPUs: on a GPU of that kind only."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from prefix_kernels.anchor_selection import AnchorConfig, AnchorSelection, Form, default_config
from prefix_kernels.grouped_attention import AttentionShape, Segment, passes_for
from prefix_kernels.grouped_attention.runner import GroupedAttention
from prefix_kernels.pooled_scores import ScoreInputs
from prefix_kernels.pooling import Pooling
from prefix_kernels.types import PagedKV, SelectedLists
from tests.prefix_kernels import selecting
from tests.prefix_kernels.selecting import KV_HEADS, TokenProblem, lists_of, select

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU (sm_90)"
)

DEVICE = torch.device("cuda")
FORMS = [Form.FUSED, Form.UNFUSED]
CONFIGS = {
    "8x128": AnchorConfig(8, 128, 4, 3, 4, specialized=True),
    "16x64": AnchorConfig(16, 64, 4, 3, 4, specialized=True),
    "32x128": AnchorConfig(32, 128, 4, 3, 3, specialized=True),
    "64x64": AnchorConfig(64, 64, 4, 3, 2, specialized=True),
    "128x64": AnchorConfig(128, 64, 4, 3, 2, specialized=True),
}
problem = partial(selecting.hopper_problem, DEVICE)


def run(
    made: TokenProblem, config: AnchorConfig, form: Form, num_programs: int | None = None
) -> tuple[torch.Tensor, SelectedLists]:
    one = AnchorSelection(
        made.shape, len(made.q), len(made.scored) + 1, 130_000, 100_000, config, DEVICE,
        form=form, num_programs=num_programs,
    )  # fmt: skip
    first, again = select(one, made), select(one, made)
    # What lies between two KV heads' scores stays as it was: not a number.
    assert torch.equal(first[0].nan_to_num(), again[0].nan_to_num()), "the same in every run"
    assert torch.equal(first[1].positions, again[1].positions)
    return again


def check(made: TokenProblem, config: AnchorConfig, *how: Any) -> None:
    selecting.check(replace(made, tile=config.block_m), *run(made, config, *how))


#: Groups with their budgets, and what their index is like. Of some sums one token in 2 to 16 is a part; keys that rise
#: leave the first step behind.
THREE, MANY, ONE_MORE = (0, 1, 2), tuple(range(33)), ((3,), 300, 80)
GROUPS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"{n} tokens": ([(THREE, n, max(1, n // 7))], {}) for n in (1, 63, 64, 65, 129, 1000, 4999)},
    "of other lengths": ([((0, 3), 3001, 500), ((1,), 40, 40), ((2, 4, 5), 1800, 26), ((6,), 1, 1)], {}),
    **{f"one in {n} summed": ([(THREE, 4999, 300), ((3,), 1000, 300)], {"sum_every": n}) for n in (2, 16)},
    "many rows, one in 16 summed": ([(MANY, 4500, 700)], {"sum_every": 16, "rising": 10.0}),
    "long": ([(THREE, 120_000, 900)], {"sum_every": 2}),
    "long, one in 16 summed": ([(THREE, 40_001, 900)], {"sum_every": 16}),
    **{
        f"{n} listed of {each}, one in {every} summed": (
            [(THREE, n, max(1, n // 4)), ONE_MORE],
            {"by_list": True, "entry_tokens": each, "sum_every": every},
        )
        for n in (16, 65, 1000, 4999)
        for each in (1, 16)
        for every in (1, 16)
    },
    "many rows, listed": ([(MANY, 20_011, 5000)], {"by_list": True, "sum_every": 16}),
    **{
        f"{n} tokens, {each} a row": ([(THREE, n, -(-n // 4)), ONE_MORE], {"row_tokens": each})
        for each, n in ((2, 65), (4, 4999), (4, 1))
    },
    **{f"rising by {by}": ([((0, 1), 4000, 300)], {"rising": by}) for by in (2.0, 10.0, 60.0)},
}


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("sizes", "options"), GROUPS.values(), ids=GROUPS)
def test_scores_and_lists(sizes: Any, options: dict[str, Any], config: AnchorConfig, form: Form) -> None:
    """Also with one program to a KV head, and with some that have nothing to score."""
    made = problem(sizes, **options)
    for num_programs in (2, 2 * 7, 2 * 64, None):
        check(made, config, form, num_programs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [32, 64, 96, 128])
def test_every_number_of_channels(channels: int, dtype: torch.dtype) -> None:
    made = problem([((0,), 777, 99)], channels=channels, dtype=dtype)
    for config in (CONFIGS["8x128"], default_config(made.shape, 1, specialized=True)):
        check(made, config, Form.FUSED)


@pytest.mark.parametrize("gqa", [1, 2, 5, 7, 8, 16])
@pytest.mark.parametrize("rows", [1, 2, 9, 33])
def test_every_group_size_and_batch(rows: int, gqa: int) -> None:
    made = problem([(tuple(range(rows)), 1234, 200)], gqa=gqa)
    config = default_config(made.shape, rows, specialized=True)
    assert config.specialized
    check(made, config, Form.FUSED)


def test_a_captured_run_follows_its_plan() -> None:
    made, other = problem([((0, 1), 4000, 300)]), problem([((0,), 2500, 250), ((1,), 1200, 26)])
    config = CONFIGS["8x128"]
    one = AnchorSelection(made.shape, 2, 2, 5000, 100_000, config, DEVICE)
    lists, scores = lists_of(one), torch.zeros(made.room + other.room, device="cuda")
    queries, slots = made.q.clone(), torch.zeros(8000, dtype=torch.int32, device="cuda")
    slots[: len(made.slot_table)] = made.slot_table
    one.plan(made.scored, made.selected)
    one.run(ScoreInputs(queries, made.sm_scale), scores, lists, slot_table=slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.run(ScoreInputs(queries, made.sm_scale), scores, lists, slot_table=slots)
    for each in (other, made, other):
        one.plan(each.scored, each.selected)
        queries.copy_(each.q)
        slots[: len(each.slot_table)] = each.slot_table
        graph.replay()
        _, wanted = run(each, config, Form.FUSED)
        groups = len(each.scored)
        for group in each.selected:
            mine, theirs = (group.lists_in(of.positions, KV_HEADS) for of in (lists, wanted))
            assert torch.equal(mine, theirs)
        assert torch.equal(lists.counts[:groups], wanted.counts[:groups])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_attention_that_begins_while_lists_are_made_is_that_behind_them(form: Form) -> None:
    """With suffixes, which it may attend before, and programs that have none. Lists and counts of before are others."""
    made = problem([((0,), 40_000, 3000), ((1, 2), 2500, 250), ((3,), 900, 90)])
    rows, prefixes = len(made.q), len(made.slot_table)
    one = AnchorSelection(made.shape, rows, 3, 40_000, 200_000, CONFIGS["8x128"], DEVICE, form=form)
    lists, scores = lists_of(one), torch.zeros(made.room, device="cuda")
    one.plan(made.scored, made.selected)
    slots = torch.arange(prefixes + 300 * rows, dtype=torch.int32, device="cuda")
    slots[:prefixes] = made.slot_table
    keys = torch.randn(int(slots.max()) + 1, KV_HEADS, made.q.shape[2], dtype=made.q.dtype, device="cuda")
    kv = PagedKV(keys, keys.flip(0))
    shape = AttentionShape.of(made.q, kv)
    attention = GroupedAttention(shape, rows, passes_for(shape, rows, specialized=True), DEVICE)
    attention.plan(
        [
            Segment(of.rows, group.count, group.list_begin, group.head_stride, number)
            for number, (of, group) in enumerate(zip(made.scored, made.selected, strict=True))
        ],
        [Segment((row,), 300, prefixes + 300 * row, list_id=3 + row) for row in range(rows)],
    )
    counts = torch.zeros(3 + rows, KV_HEADS, dtype=torch.int32, device="cuda")
    counts[3:] = torch.arange(1, 1 + 90 * rows, 90, device="cuda")[:, None]
    lists = replace(lists, counts=counts[:3])
    assert lists.slots is not None
    # Queries and keys are others in every step: what is read too early is that of the step before.
    steps = [(made.q, keys), (-made.q, keys.flip(1))] * 4
    outs = torch.empty(len(steps), *made.q.shape, dtype=made.q.dtype, device="cuda")
    lses = torch.empty(len(steps), *made.q.shape[:2], device="cuda")
    kv = PagedKV(torch.empty_like(keys), keys.flip(0))
    q = torch.empty_like(made.q)
    found = []
    for after_lists in (False, True):

        def run(after_lists: bool = after_lists) -> None:
            for (queries, own_keys), out, lse in zip(steps, outs, lses, strict=True):
                assert lists.slots is not None
                lists.slots.zero_()
                lists.counts.zero_()
                q.copy_(queries)
                kv.k_cache.copy_(own_keys)
                one.run(ScoreInputs(q, made.sm_scale), scores, lists, slot_table=slots)
                of_lists: dict[str, Any] = {"counts": counts, "head_slots": lists.slots, "after_lists": after_lists}
                attention.run(q, kv, slots, made.sm_scale, out, lse, **of_lists)

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for _ in range(10):
            outs.fill_(torch.nan)
            graph.replay()
            found.append((outs.clone(), lses.clone()))
    wanted, _ = found[0]
    assert all(torch.equal(out, wanted[n % 2]) for n, out in enumerate(wanted))
    assert not torch.equal(wanted[0], wanted[1])
    for out, lse in found:
        assert torch.equal(out, wanted)
        assert torch.equal(lse, found[0][1])
    assert not wanted.isnan().any()


def test_what_it_has_not_is_refused() -> None:
    made = problem([((0,), 100, 30)])
    for other in ({"bits": 8}, {"channels": 48}, {"pooling": Pooling.MEAN}):
        with pytest.raises(ValueError, match="own kernel"):
            AnchorSelection(replace(made.shape, **other), 1, 1, 100, 64, CONFIGS["8x128"], DEVICE)
    one = AnchorSelection(made.shape, 1, 1, 100, 64, CONFIGS["8x128"], DEVICE)
    one.plan(made.scored, made.selected)
    scores = torch.zeros(made.room, device="cuda")
    for inputs in (ScoreInputs(made.q, -1.0), ScoreInputs(made.q.float(), 1.0)):
        with pytest.raises(ValueError, match="positive scale and q in fp16 or bf16"):
            one.run(inputs, scores, lists_of(one, with_slots=False))
