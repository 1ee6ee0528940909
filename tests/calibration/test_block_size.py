"""Block sizes from recall: Eq. 2 literally, both ways to an average, exhaustive search, near-uniform heads."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.calibration import (
    Average,
    average_block_size,
    block_sizes_by_budget,
    block_sizes_by_tau,
    near_uniform_heads,
    tau_for_average,
)
from tests.examples import examples

SIZES = (16, 32, 64)
unit = st.integers(0, 100).map(lambda n: n / 100)
recalls = st.lists(st.tuples(unit, unit, unit), min_size=1, max_size=5).map(
    lambda rows: torch.tensor(rows, dtype=torch.float64)
)
targets = st.one_of(st.sampled_from([16.0, 32.0, 64.0]), st.floats(1, 64))


def averages(chosen, average):
    if average is Average.ARITHMETIC:
        return sum(chosen) / len(chosen)
    return len(chosen) / sum(1 / size for size in chosen)


@given(recall=recalls, tau=unit)
def test_equation_2(recall, tau):
    chosen = block_sizes_by_tau(recall, tau).tolist()
    for row, size in zip(recall.tolist(), chosen, strict=True):
        assert size == max(b for b, r in zip(SIZES, row, strict=True) if r >= tau * row[0])


def test_equation_2_by_hand():
    recall = torch.tensor([[[0.9, 0.89, 0.5], [0.9, 0.6, 0.89]], [[0.9, 0.88, 0.883], [0.0, 0.0, 0.0]]])
    assert block_sizes_by_tau(recall, 0.98).tolist() == [[32, 64], [64, 64]]
    assert block_sizes_by_tau(recall, 1.0).tolist() == [[16, 16], [16, 64]]
    assert block_sizes_by_tau(recall, 0.0).tolist() == [[64, 64], [64, 64]]


@settings(max_examples=examples(80))
@given(recall=recalls, target=targets, average=st.sampled_from(Average))
def test_budget_against_exhaustive_search(recall, target, average):
    chosen = block_sizes_by_budget(recall, target, average).tolist()
    rows = recall.tolist()

    def worth(choice):
        return sum(row[SIZES.index(size)] for row, size in zip(rows, choice, strict=True))

    allowed = [
        choice
        for choice in itertools.product(SIZES, repeat=len(rows))
        if averages(choice, average) >= target * (1 - 1e-9)
    ]
    assert tuple(chosen) in allowed
    assert worth(chosen) == pytest.approx(max(map(worth, allowed)), abs=1e-9)
    assert average_block_size(torch.tensor(chosen), average) == pytest.approx(averages(chosen, average))


@settings(max_examples=examples(150))
@given(recall=recalls, target=targets, average=st.sampled_from(Average))
def test_tau_is_the_largest_that_meets_the_average(recall, target, average):
    tau = tau_for_average(recall, target, average)
    assert averages(block_sizes_by_tau(recall, tau).tolist(), average) >= target * (1 - 1e-9)
    tighter = min(tau + 1e-6, 1.0)
    if tighter > tau + 1e-9:
        assert averages(block_sizes_by_tau(recall, tighter).tolist(), average) < target


def test_adaptive_is_at_least_uniform_at_the_same_average():
    gen = torch.Generator().manual_seed(0)
    recall = torch.rand(8, 4, 3, generator=gen).sort(dim=-1, descending=True).values
    for column, uniform in enumerate(SIZES):
        for average in Average:
            chosen = block_sizes_by_budget(recall, uniform, average)
            assert average_block_size(chosen, average) >= uniform * (1 - 1e-9)
            picked = recall.gather(2, torch.searchsorted(torch.tensor(SIZES), chosen)[..., None])
            assert picked.mean() >= recall[..., column].mean()
    # Sensitive and insensitive heads: adaptive wins outright.
    mixed = torch.tensor([[0.9, 0.2, 0.1]] * 4 + [[0.9, 0.9, 0.9]] * 4)
    assert block_sizes_by_budget(mixed, 32).tolist() == [16] * 4 + [64] * 4
    assert block_sizes_by_budget(mixed, 25.6, Average.HARMONIC).tolist() == [16] * 4 + [64] * 4


def test_equal_arithmetic_averages_have_different_numbers_of_blocks():
    mixed, uniform = torch.tensor([16, 16, 64]), torch.tensor([32, 32, 32])
    assert average_block_size(mixed) == average_block_size(uniform) == 32.0
    assert average_block_size(mixed, Average.HARMONIC) == pytest.approx(64 / 3)
    blocks = [sum(8192 // size for size in sizes.tolist()) for sizes in (mixed, uniform)]
    assert blocks[0] / blocks[1] == pytest.approx(32.0 / (64 / 3))


def test_a_target_that_rounding_puts_just_out_of_reach_is_met():
    """64 / target * 9 comes out below 11, which is the exact cost of this choice."""
    target = 9 / (2 / 32 + 7 / 64)
    assert 64 / target * 9 < 11
    recall = torch.tensor([[0.9, 0.9, 0.1]] * 2 + [[0.9, 0.9, 0.9]] * 7)
    assert block_sizes_by_budget(recall, target, Average.HARMONIC).tolist() == [32] * 2 + [64] * 7


def test_many_heads():
    recall = torch.rand(32, 8, 3, generator=torch.Generator().manual_seed(1))
    assert average_block_size(block_sizes_by_budget(recall, 32.0)) >= 32.0


def test_other_block_sizes():
    recall = torch.tensor([[1.0, 0.9], [1.0, 0.2]])
    assert block_sizes_by_tau(recall, 0.5, (4, 6)).tolist() == [6, 4]
    assert block_sizes_by_budget(recall, 5.0, block_sizes=(4, 6)).tolist() == [6, 4]


def test_near_uniform_heads():
    oracle = torch.tensor([[0.049, 0.5], [0.97, 0.4999]])
    assert near_uniform_heads(oracle).tolist() == [[True, False], [False, True]]
    assert near_uniform_heads(oracle, 0.05).tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: block_sizes_by_tau(torch.ones(2, 2)), r"expected recall \[\.\.\., num_block_sizes=3\]"),
        (lambda: block_sizes_by_tau(torch.ones(0, 3)), "of at least one head"),
        (lambda: block_sizes_by_tau(torch.full((1, 3), torch.nan)), "expected recall in 0..1"),
        (lambda: block_sizes_by_tau(torch.full((1, 3), 1.5)), "expected recall in 0..1"),
        (lambda: block_sizes_by_tau(torch.ones(1, 3), 1.1), "expected tau in 0..1, got 1.1"),
        (lambda: block_sizes_by_tau(torch.ones(1, 2), 0.9, (64, 16)), "expected ascending block sizes"),
        (lambda: tau_for_average(torch.ones(1, 3), 65.0), r"expected an average block size in 1\.\.64 tokens, got 65"),
        (lambda: block_sizes_by_budget(torch.ones(1, 3), 0.0), "expected an average block size"),
        (lambda: block_sizes_by_budget(torch.ones(1, 3), float("nan")), "expected an average block size"),
        (lambda: average_block_size(torch.tensor([], dtype=torch.int64)), "at least one head"),
        (lambda: near_uniform_heads(torch.tensor([torch.nan])), "expected oracle recall in 0..1"),
        (lambda: near_uniform_heads(torch.ones(1), 1.5), "expected the least oracle recall in 0..1"),
    ],
)
def test_what_is_refused(run, message):
    with pytest.raises(ValueError, match=message):
        run()
