"""Top-k selection and budgets: properties over random sizes, and the order of preference. And what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_kernels import PagedKV, Selection
from prefix_kernels.budget import BudgetGrowth, budget_for_group
from prefix_kernels.top_k_selection import top_k_selection
from prefix_kernels.types import SelectionGroup
from tests.examples import examples


@st.composite
def cases(draw):
    prefix_len = draw(st.integers(0, 300))
    budget = draw(st.integers(1, 320))
    num_sink = draw(st.integers(0, min(budget, 40)))
    num_recent = draw(st.integers(0, min(budget - num_sink, 70)))
    scores = torch.randn(2, prefix_len, generator=torch.Generator().manual_seed(budget))
    kind = draw(st.sampled_from(["plain", "holes", "nothing", "nan", "ties"]))
    if kind == "holes":
        scores[scores < 0] = -torch.inf
    elif kind != "plain":
        scores.fill_({"nothing": -torch.inf, "nan": torch.nan, "ties": 0.0}[kind])
    return scores, budget, num_sink, num_recent


@settings(max_examples=examples(400))
@given(cases())
def test_properties(case):
    scores, budget, num_sink, num_recent = case
    prefix_len = scores.shape[1]
    selection = top_k_selection(*case)
    selection.check_integrity(prefix_len)
    assert selection.counts.tolist() == [min(budget, prefix_len)] * 2
    for row, head_scores in zip(selection.positions.tolist(), scores, strict=True):
        chosen = set(row)
        assert len(chosen) == min(budget, prefix_len)
        windows = set(range(min(num_sink, prefix_len))) | set(range(max(prefix_len - num_recent, 0), prefix_len))
        assert windows <= chosen
        left = set(range(prefix_len)) - chosen
        ranked = head_scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        if chosen - windows and left:
            assert min(ranked[p] for p in chosen - windows) >= max(ranked[p] for p in left)


def test_unscored_positions_come_last_and_recent_first():
    scores = torch.full((1, 10), -torch.inf)
    scores[0, 2] = -1e30
    chosen = top_k_selection(scores, 4, 0, 0)
    assert chosen.positions.tolist() == [[2, 7, 8, 9]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 0), "budget >= 1"),
        ((5, -1, 0), "num_sink >= 0"),
        ((5, 0, -1), "num_recent >= 0"),
        ((5, 3, 3), "shrink the windows"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        top_k_selection(torch.zeros(1, 10), *arguments)
    with pytest.raises(ValueError, match="floating dtype"):
        top_k_selection(torch.zeros(1, 10, dtype=torch.int32), 5, 0, 0)
    # Windows may exceed a budget that covers the prefix.
    assert top_k_selection(torch.zeros(1, 10), 12, 8, 8).counts.tolist() == [10]


def test_budget_for_group():
    assert budget_for_group(100, 1) == 100
    assert budget_for_group(100, 16) == 400
    assert budget_for_group(100, 2) == 142
    assert budget_for_group(100, 16, BudgetGrowth.NONE) == 100
    assert budget_for_group(100, 16, BudgetGrowth.SQRT, cap=250) == 250
    for arguments in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="budget >= 1"):
            budget_for_group(*arguments)
    with pytest.raises(ValueError, match="cap >= budget"):
        budget_for_group(100, 4, cap=50)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefix_len": -1, "budget": 1}, "prefix_len >= 0"),
        ({"prefix_len": 1, "budget": 0}, "budget >= 1"),
        ({"prefix_len": 1, "budget": 1, "head_stride": -1}, "head_stride >= 0"),
        ({"prefix_len": 10, "budget": 5, "num_sink": 3, "num_recent": 3}, "shrink the windows"),
    ],
)
def test_groups_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        SelectionGroup(**arguments)


def test_the_references_are_imported_without_triton():
    source = Path(__file__).parents[2] / "kernels"
    names = ("block_scores", "csa_scores", "grouped_attention", "low_bit", "pooling", "top_k_selection")
    code = f"import sys, {', '.join(f'prefix_kernels.{n}' for n in names)}; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=source)


def int32(rows):
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize(
    ("positions", "counts", "rule"),
    [
        ([[0, 1]], [3], "0 <= count"),
        ([[0, 9]], [2], "0 <= position"),
        ([[1, 1]], [2], "ascending"),
        ([[1, 2]], [1], "padding"),
    ],
)
def test_check_integrity_names_the_rule(positions, counts, rule):
    with pytest.raises(ValueError, match=rule):
        Selection(int32(positions), int32(counts)).check_integrity(5)


def test_shape_and_dtype_errors():
    pool = torch.zeros(4, 2, 8)
    for make, arguments, message in (
        (Selection, (int32([[1]]), int32([1, 2])), "positions"),
        (Selection, (torch.tensor([[1]]), int32([1])), "int32"),
        (PagedKV, (pool, torch.zeros(5, 2, 8)), "num_slots"),
        (PagedKV, (pool, pool.half()), "floating dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            make(*arguments)
