"""A selection on CSAttention's lists: scores of the torch reference, lists of a full sort."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from prefix_kernels.anchor_selection import Form
from prefix_kernels.anchor_selection.kernels import list_kernel
from prefix_kernels.csa_scores import CompactLists, csa_scores_compact, encode_lists
from prefix_kernels.csa_selection import (
    CsaArrays,
    CsaConfig,
    CsaGroup,
    CsaSelection,
    CsaShape,
    array_addresses,
    default_config,
)
from prefix_kernels.launching import recording
from prefix_kernels.pooling import Pooling, pool_scores
from prefix_kernels.top_k_selection import SelectionGroup, pack_lists, rank_by_keys, top_k_selection
from prefix_kernels.types import SelectedLists
from tests.prefix_kernels.triton.conftest import INTERPRETED

KV_HEADS, GQA, DIM = 2, 2, 32
HEADS = KV_HEADS * GQA
FORMS = [Form.UNFUSED] if INTERPRETED else [Form.UNFUSED, Form.FUSED]
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
#: Largest error of a log-probability: products are fp32 in either, whatever the queries are.
LIMIT = 1e-4
SM_SCALE = 0.3
POISON = 1_000_007
SHAPE = CsaShape(HEADS, KV_HEADS, DIM, num_subspaces=4, num_centroids=5)


@dataclass(eq=False)
class Problem:
    """Groups with tables of their own each, all scores in one arena of `room` entries."""

    shape: CsaShape
    q: Tensor
    scored: list[CsaGroup]
    selected: list[SelectionGroup]
    room: int

    def part(self, groups: slice) -> Problem:
        """The same with some of the groups."""
        return replace(self, scored=self.scored[groups], selected=self.selected[groups])

    def wanted(self, group: int) -> Tensor:
        """[KV_HEADS, prefix_len]: scores of the reference."""
        shape, of = self.shape, self.scored[group]
        centroids, *lists = of.arrays
        channels = torch.arange(shape.head_dim, device=self.q.device).view(shape.num_subspaces, -1)
        raw = csa_scores_compact(
            self.q[list(of.rows)], centroids, CompactLists(*lists), of.arrays.places.shape[-1], shape.bits, channels,
            self.selected[group].prefix_len,
        )  # fmt: skip
        return pool_scores(raw, SM_SCALE, shape.pooling)


def problem(
    device: torch.device,
    sizes: list[tuple[tuple[int, ...], int, int]],
    shape: CsaShape = SHAPE,
    *,
    ratio: float = 0.1,
    dtype: torch.dtype = torch.float32,
    windows: tuple[int, int] = (5, 20),
    clustered: bool = False,
) -> Problem:
    """Groups of (rows, prefix_len, budget). Lists that are clustered hold their positions one after the other."""
    gen = torch.Generator().manual_seed(len(sizes) + sizes[0][1])
    q = torch.randn(max(max(rows) for rows, _, _ in sizes) + 1, shape.num_qo_heads, shape.head_dim, generator=gen)
    scored, selected, at, table_at = [], [], 0, 0
    for rows, length, budget in sizes:
        entries = max(1, round(ratio * length))
        centroids = torch.randn(*shape.lead, shape.head_dim // shape.num_subspaces, generator=gen)
        order = torch.rand(*shape.lead, length, generator=gen)
        if clustered:
            order = (torch.arange(length) - torch.rand(*shape.lead, 1, generator=gen) * length).abs()
        positions = order.argsort(dim=-1)[..., :entries].sort(dim=-1).values
        lists = encode_lists(positions, torch.randn(positions.shape, generator=gen) - 0.5, length, shape.bits)
        assert lists.counts is not None, "offsets"
        arrays = CsaArrays((centroids / centroids.norm(dim=-1, keepdim=True)).half(), *lists)  # type: ignore[arg-type]
        stride = -(-length // 4) * 4
        begins = tuple(at + head * stride for head in range(shape.num_kv_heads))
        scored.append(CsaGroup(rows, begins, CsaArrays(*(array.to(device) for array in arrays))))
        sink, recent = windows if budget >= sum(windows) else (0, 0)
        selected.append(SelectionGroup(length, budget, sink, recent, slot_start=table_at))
        at += shape.num_kv_heads * stride
        table_at += length
    return Problem(shape, q.to(device, dtype), scored, pack_lists(selected, shape.num_kv_heads), at + 4)


def runner(made: Problem, form: Form, num_chunks: int = 3, **options: Any) -> CsaSelection:
    options = {"config": default_config(made.shape), "groups_of_a_row": 1, **options}
    longest = max(group.prefix_len for group in made.selected)
    return CsaSelection(
        made.shape, len(made.q), 4, longest, KV_HEADS * 2000, device=made.q.device, form=form,
        num_programs=num_chunks * KV_HEADS, **options,
    )  # fmt: skip


def select(one: CsaSelection, made: Problem, **options: Any) -> tuple[Tensor, SelectedLists]:
    """Plan and run into buffers that hold garbage before."""
    lists = one.new_lists(with_slots=True)
    for buffer in (lists.positions, lists.counts, lists.slots):
        assert buffer is not None
        buffer.fill_(POISON)
    scores = torch.full((made.room,), torch.nan, device=made.q.device)
    one.plan(made.scored, made.selected)
    one.run(made.q, SM_SCALE, scores, lists, slot_table=slot_table(made), **options)
    return scores, lists


def slot_table(made: Problem) -> Tensor:
    """Of all groups."""
    size = max((group.slot_start + group.prefix_len for group in made.selected), default=0)
    return torch.randperm(size, generator=torch.Generator().manual_seed(9)).to(made.q.device, torch.int32)


def check(made: Problem, scores: Tensor, lists: SelectedLists) -> None:
    """Scores of the reference, none of a prefix that is attended whole; the best of these very scores."""
    written, table = torch.zeros_like(scores, dtype=torch.bool), slot_table(made)
    groups = len(made.selected)
    assert lists.counts[:groups].tolist() == [[group.count] * KV_HEADS for group in made.selected]
    assert bool((lists.counts[groups:] == POISON).all())
    assert lists.slots is not None
    for g, (of, group) in enumerate(zip(made.scored, made.selected, strict=True)):
        length = group.prefix_len
        positions = group.lists_in(lists.positions, KV_HEADS)
        slots = group.lists_in(lists.slots, KV_HEADS)
        assert torch.equal(slots, table[group.slot_start + positions.long()])
        if group.budget >= length:
            assert positions.tolist() == [list(range(length))] * KV_HEADS
            continue
        own = torch.stack([scores[begin : begin + length] for begin in of.score_begins])
        torch.testing.assert_close(own, made.wanted(g), atol=LIMIT, rtol=1e-5)
        best = top_k_selection(rank_by_keys(own), group.budget, group.num_sink, group.num_recent)
        assert torch.equal(positions, best.positions), g
        for begin in of.score_begins:
            written[begin : begin + length] = True
    assert bool((scores.isnan() | written).all()), "nothing else"
    for buffer in (lists.positions, lists.slots):
        assert int((buffer != POISON).sum()) == KV_HEADS * sum(group.count for group in made.selected), "nothing else"


SHORT = [((0, 3), 330, 61), ((2,), 1301, 151), ((1,), 90, 90)]
"""Rows, prefix and budget of groups: the longest is not the first, and the last is attended whole."""


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("length", [65, 2048, 2500])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens(dtype: torch.dtype, length: int, form: Form, device: torch.device) -> None:
    """A stretch is a part of a step, whole steps, and more."""
    made = problem(device, [((0, 1, 2), length, length // 3)], dtype=dtype)
    check(made, *select(runner(made, form), made))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("bits", [4, 8])
def test_codes(bits: int, pooling: Pooling, form: Form, device: torch.device) -> None:
    made = problem(device, [((2, 0), 603, 60)], replace(SHAPE, bits=bits, pooling=pooling))
    check(made, *select(runner(made, form), made))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(
    ("subspaces", "centroids", "dim"), [(1, 1, 8), (3, 300, 24), (16, 16, 64), (32, 3, 32)], ids=str
)
def test_tables_of_any_size(subspaces: int, centroids: int, dim: int, form: Form, device: torch.device) -> None:
    made = problem(device, [((0, 1), 300, 40)], CsaShape(HEADS, KV_HEADS, dim, subspaces, centroids))
    check(made, *select(runner(made, form), made))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_positions_that_no_list_holds_come_last(form: Form, device: torch.device) -> None:
    """Of clustered lists whole blocks are empty and others full; among positions without a score the last are taken."""
    made = problem(device, [((0,), 2300, 1700)], ratio=0.11, clustered=True)
    scores, lists = select(runner(made, form), made)
    check(made, scores, lists)
    assert int((scores[:2300] == -torch.inf).sum()) > 800


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_entries_are_added_a_few_at_a_time(form: Form, device: torch.device) -> None:
    made = problem(device, [((0, 1), 1100, 99)], ratio=0.11, clustered=True)
    check(made, *select(runner(made, form, config=CsaConfig(32)), made))
    with pytest.raises(ValueError, match=r"4 lists for each of 256 threads, got 32 of each list; raise entries"):
        runner(made, form, config=CsaConfig(32, num_warps=8, programs_per_sm=2))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("windows", [(0, 0), (16, 0), (150, 60)], ids=str)
def test_windows(windows: tuple[int, int], form: Form, device: torch.device) -> None:
    made = problem(device, [((0,), 1301, 211)], windows=windows)
    check(made, *select(runner(made, form), made))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_queries_of_all_lengths_keep_their_precision(form: Form, device: torch.device) -> None:
    """Each row has a unit of its own; a query of zeros says that all that is listed is equal."""
    made = problem(device, [((0, 1, 2, 3), 300, 60)])
    made.q *= torch.tensor([1e-20, 0.0, 1.0, 30.0], device=device)[:, None, None]
    check(made, *select(runner(made, form), made))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("num_chunks", [2, pytest.param(9, marks=pytest.mark.full)])
def test_groups_share_the_programs(num_chunks: int, form: Form, device: torch.device) -> None:
    """Fewer programs than groups, and more; a place that no group takes; plans one after another."""
    made = problem(device, SHORT)
    one = runner(made, form, num_chunks)
    for part in (slice(0, 3), slice(2, 3), slice(0, 0), slice(1, 3)):
        some = made.part(part)
        check(some, *select(one, some))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_request_in_two_groups_and_another_layers_tables(form: Form, device: torch.device) -> None:
    made = problem(device, [((0, 1), 300, 60), ((1,), 200, 50)])
    other = problem(device, [((0, 1), 300, 60), ((1,), 200, 50)], ratio=0.1, clustered=True)
    other.q = made.q
    one = runner(made, form, groups_of_a_row=2)
    addresses = torch.zeros(4, 6, dtype=torch.int64)
    for number, (of, group) in enumerate(zip(other.scored, other.selected, strict=True)):
        addresses[number] = torch.tensor(array_addresses(SHAPE, of.arrays, group.prefix_len))
    check(other, *select(one, made, arrays=addresses.to(device)))


def test_one_launch_or_one_for_each_phase(device: torch.device) -> None:
    made = problem(device, SHORT)
    with recording() as kept:
        select(runner(made, Form.UNFUSED), made)
    picking, *scoring, listing = kept.launches
    assert picking.grid == (len(made.q) * GQA, KV_HEADS)
    assert [(one.arguments["FIRST_PHASE"], one.arguments["LAST_PHASE"]) for one in scoring] == [(1, 1), (2, 2)]
    assert listing.kernel is list_kernel
    assert all("launch_cooperative_grid" not in one.options for one in kept.launches)


@pytest.mark.skipif(not INTERPRETED, reason="what Triton's interpreter cannot do")
def test_the_interpreter_refuses_programs_that_wait(device: torch.device) -> None:
    made = problem(device, SHORT)
    with pytest.raises(ValueError, match=r"expected Form\.UNFUSED in Triton's interpreter"):
        select(runner(made, Form.FUSED), made)


def test_what_cannot_be_planned_or_run_is_refused(device: torch.device) -> None:
    made = problem(device, SHORT)
    one, (of, *_), (group, *_) = runner(made, FORMS[0]), made.scored, made.selected
    for groups, selected, message in (
        (made.scored, made.selected[:1], "as many groups scored as selected, got 3 and 1"),
        ([replace(of, rows=())], [group], "one or more each"),
        ([replace(of, rows=(4,))], [group], "of 4, got 1"),
        ([of], [replace(group, prefix_len=1302)], "at most .1301, 4000."),
        ([replace(of, score_begins=(0, 2))], [group], "multiples of 4"),
        ([replace(of, arrays=of.arrays._replace(scale=of.arrays.scale.float()))], [group], "expected scale"),
        ([of], [replace(group, prefix_len=600)], "expected counts .*another prefix or spec"),
    ):
        with pytest.raises(ValueError, match=message):
            one.plan(groups, selected)
    for changes, message in (
        ({"q": made.q[:3]}, r"expected q \[4 to 4, 4, 32\]"),
        ({"q": made.q.double()}, "fp16 or bf16"),
        ({"room": 2}, "expected scores"),
    ):
        with pytest.raises(ValueError, match=message):
            select(one, replace(made, **changes))
    with pytest.raises(ValueError, match="expected arrays"):
        select(one, made, arrays=torch.zeros(3, 6, dtype=torch.int64, device=device))
    for sizes in ((5, 2, 32, 4, 5), (4, 2, 30, 4, 5), (4, 2, 32, 4, 5, 2)):
        with pytest.raises(ValueError, match="expected num_qo_heads as a multiple"):
            CsaShape(*sizes)
    for config, message in (({"entries": 48}, "power of 2"), ({"entries": 32, "programs_per_sm": 16}, "64 registers")):
        with pytest.raises(ValueError, match=message):
            CsaConfig(**config)
    with pytest.raises(ValueError, match="of at least 1"):
        CsaSelection(SHAPE, 0, 1, 1, 1, default_config(SHAPE), device)
