"""A selection on CSAttention's lists: scores of the torch reference, lists of a full sort."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from prefix_kernels.anchor_selection import Form
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
from prefix_kernels.pooling import Pooling, pool_scores
from prefix_kernels.types import SelectedLists, SelectionGroup, pack_lists
from tests.prefix_kernels.selecting import KV_HEADS, Problem, Sizes, check, select
from tests.prefix_kernels.triton.conftest import DTYPES, FORMS

GQA, DIM = 2, 32
HEADS = KV_HEADS * GQA
SHAPE = CsaShape(HEADS, KV_HEADS, DIM, num_subspaces=4, num_centroids=5)


@dataclass(eq=False, kw_only=True)
class CsaProblem(Problem):
    """Of CSAttention's lists. Products are fp32, whatever the queries are."""

    shape: CsaShape

    def wanted(self, group: int) -> Tensor:
        shape, of = self.shape, self.scored[group]
        centroids, *lists = of.arrays
        raw = csa_scores_compact(
            self.q[list(of.rows)], centroids, CompactLists(*lists), of.arrays.places.shape[-1], shape.bits,
            self.selected[group].prefix_len,
        )  # fmt: skip
        return pool_scores(raw, self.sm_scale, shape.pooling)

    def launch(self, one: CsaSelection, scores: Tensor, lists: SelectedLists, **options: Any) -> None:
        one.run(self.q, self.sm_scale, scores, lists, slot_table=self.slot_table, **options)


def problem(
    device: torch.device,
    sizes: Sizes,
    shape: CsaShape = SHAPE,
    *,
    ratio: float = 0.1,
    dtype: torch.dtype = torch.float32,
    windows: tuple[int, int] = (5, 20),
    clustered: bool = False,
) -> CsaProblem:
    """Lists that are clustered hold their positions one after the other."""
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
        arrays = CsaArrays((centroids / centroids.norm(dim=-1, keepdim=True)).half(), *lists)
        stride = -(-length // 4) * 4
        begins = tuple(at + head * stride for head in range(KV_HEADS))
        scored.append(CsaGroup(rows, begins, CsaArrays(*(array.to(device) for array in arrays))))
        sink, recent = windows if budget >= sum(windows) else (0, 0)
        selected.append(SelectionGroup(length, budget, sink, recent, slot_start=table_at))
        at += KV_HEADS * stride
        table_at += length
    return CsaProblem(
        q=q.to(device, dtype), scored=scored, selected=pack_lists(selected, KV_HEADS), room=at + 4, limit=1e-4,
        shape=shape,
    )  # fmt: skip


def runner(made: CsaProblem, form: Form, num_chunks: int = 3, **options: Any) -> CsaSelection:
    options = {"config": default_config(made.shape), "groups_of_a_row": 1, **options}
    longest = max(group.prefix_len for group in made.selected)
    return CsaSelection(
        made.shape, len(made.q), 4, longest, KV_HEADS * 2000, device=made.q.device, form=form,
        num_programs=num_chunks * KV_HEADS, **options,
    )  # fmt: skip


SHORT = [((0, 3), 330, 61), ((2,), 1301, 151), ((1,), 90, 90)]
"""Rows, prefix and budget of groups: the longest is not the first, and the last is attended whole."""


@pytest.mark.parametrize("length", [65, 2048, 2500])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens(dtype: torch.dtype, length: int, form: Form, device: torch.device) -> None:
    """A stretch is a part of a step, whole steps, and more."""
    made = problem(device, [((0, 1, 2), length, length // 3)], dtype=dtype)
    check(made, *select(runner(made, form), made))


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("subspaces", "centroids", "dim"), [(1, 1, 8), (3, 300, 24), (32, 3, 32)], ids=str)
def test_tables_and_codes(
    subspaces: int, centroids: int, dim: int, bits: int, pooling: Pooling, form: Form, device: torch.device
) -> None:
    shape = CsaShape(HEADS, KV_HEADS, dim, subspaces, centroids, bits=bits, pooling=pooling)
    made = problem(device, [((1, 0), 303, 40)], shape)
    if (subspaces, bits) == (32, 8):
        made.limit = 1e-3  # half a unit a code, of 255, in each list: 2^-12 of the largest score
    check(made, *select(runner(made, form), made))


@pytest.mark.parametrize(
    ("ratio", "clustered", "budget"), [(0.11, True, 1700), (0.5, True, 200), (1.0, False, 200)], ids=str
)
def test_lists_of_any_length(ratio: float, clustered: bool, budget: int, form: Form, device: torch.device) -> None:
    """Up to all positions of a prefix; of clustered ones a list has all entries of a step or none. Among positions
    without a score the last are taken.
    """
    made = problem(device, [((0, 1), 2300, budget), ((2,), 17, 9)], ratio=ratio, clustered=clustered)
    scores, lists = select(runner(made, form), made)
    check(made, scores, lists)
    assert ratio > 0.2 or int((scores[:2300] == -torch.inf).sum()) > 2300 - budget


def test_entries_are_added_a_few_at_a_time(form: Form, device: torch.device) -> None:
    made = problem(device, [((0, 1), 1100, 99)], ratio=0.11, clustered=True)
    check(made, *select(runner(made, form, config=CsaConfig(32, num_warps=4, programs_per_sm=4)), made))
    with pytest.raises(ValueError, match=r"4 lists for each of 256 threads, got 32 of each list; raise entries"):
        runner(made, form, config=CsaConfig(32, num_warps=8, programs_per_sm=2))


def test_queries_of_all_lengths_keep_their_precision(form: Form, device: torch.device) -> None:
    """Each row has a unit of its own; a query of zeros says that all that is listed is equal."""
    made = problem(device, [((0, 1, 2, 3), 150, 30)])
    made.q *= torch.tensor([1e-20, 0.0, 1.0, 30.0], device=device)[:, None, None]
    check(made, *select(runner(made, form), made))


@pytest.mark.parametrize("num_chunks", [2, pytest.param(9, marks=pytest.mark.full)])
def test_groups_share_the_programs(num_chunks: int, form: Form, device: torch.device) -> None:
    """Fewer programs than groups, and more; a place that no group takes; plans one after another."""
    made = problem(device, SHORT)
    one = runner(made, form, num_chunks)
    for part in (slice(0, 3), slice(2, 3), slice(0, 0), slice(1, 3)):
        some = made.part(part)
        check(some, *select(one, some))


def test_a_request_in_two_groups_and_another_layers_tables(form: Form, device: torch.device) -> None:
    sizes = [((0, 1), 300, 60), ((1,), 200, 50)]
    made, other = problem(device, sizes), problem(device, sizes, clustered=True)
    other.q = made.q
    one = runner(made, form, groups_of_a_row=2)
    addresses = torch.zeros(4, 6, dtype=torch.int64)
    for number, (of, group) in enumerate(zip(other.scored, other.selected, strict=True)):
        addresses[number] = torch.tensor(array_addresses(SHAPE, of.arrays, group.prefix_len))
    check(other, *select(one, made, arrays=addresses.to(device)))


def test_what_cannot_be_planned_or_run_is_refused(device: torch.device) -> None:
    made = problem(device, SHORT)
    one, (of, *_), (group, *_) = runner(made, FORMS[0]), made.scored, made.selected
    for groups, selected, message in (
        ([replace(of, rows=(4,))], [group], "below 4, got 1 groups"),
        ([of], [replace(group, prefix_len=1302)], "at most .1301, 4000."),
        ([replace(of, arrays=of.arrays._replace(scale=of.arrays.scale.float()))], [group], "expected scale"),
        ([of], [replace(group, prefix_len=600)], "expected counts .*another prefix or spec"),
    ):
        with pytest.raises(ValueError, match=message):
            one.plan(groups, selected)
    for changes, message in (({"q": made.q[:3]}, r"expected q \[4 to 4, 4, 32\]"), ({"room": 2}, "expected scores")):
        with pytest.raises(ValueError, match=message):
            select(one, replace(made, **changes))
    with pytest.raises(ValueError, match="expected arrays"):
        select(one, made, arrays=torch.zeros(3, 6, dtype=torch.int64, device=device))
    for config, message in (({"entries": 48}, "power of 2"), ({"entries": 32, "programs_per_sm": 16}, "64 registers")):
        with pytest.raises(ValueError, match=message):
            CsaConfig(**config)
    with pytest.raises(ValueError, match="of at least 1"):
        CsaSelection(SHAPE, 0, 1, 1, 1, default_config(SHAPE), device)
