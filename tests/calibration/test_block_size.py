"""Block sizes from recall: Eq. 2 literally, exhaustive search at a given average."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.calibration.block_size import block_sizes_by_budget, block_sizes_by_tau
from tests.examples import examples

SIZES = (16, 32, 64)
unit = st.integers(0, 100).map(lambda n: n / 100)
recalls = st.lists(st.tuples(unit, unit, unit), min_size=1, max_size=5).map(
    lambda rows: torch.tensor(rows, dtype=torch.float64)
)
targets = st.one_of(st.sampled_from([16.0, 32.0, 64.0]), st.floats(1, 64))


def harmonic(chosen):
    return len(chosen) / sum(1 / size for size in chosen)


@given(recall=recalls, tau=unit)
def test_equation_2(recall, tau):
    chosen = block_sizes_by_tau(recall, tau).tolist()
    for row, size in zip(recall.tolist(), chosen, strict=True):
        assert size == max(b for b, r in zip(SIZES, row, strict=True) if r >= tau * row[0])


@settings(max_examples=examples(80))
@given(recall=recalls, target=targets)
def test_budget_against_exhaustive_search(recall, target):
    chosen = block_sizes_by_budget(recall, target).tolist()
    rows = recall.tolist()

    def worth(choice):
        return sum(row[SIZES.index(size)] for row, size in zip(rows, choice, strict=True))

    choices = itertools.product(SIZES, repeat=len(rows))
    allowed = [choice for choice in choices if harmonic(choice) >= target * (1 - 1e-9)]
    assert tuple(chosen) in allowed
    assert worth(chosen) == pytest.approx(max(map(worth, allowed)), abs=1e-9)


def test_a_target_that_rounding_puts_just_out_of_reach_is_met():
    """64 / target * 9 comes out below 11, which is the exact cost of this choice."""
    target = 9 / (2 / 32 + 7 / 64)
    assert 64 / target * 9 < 11
    recall = torch.tensor([[0.9, 0.9, 0.1]] * 2 + [[0.9, 0.9, 0.9]] * 7)
    assert block_sizes_by_budget(recall, target).tolist() == [32] * 2 + [64] * 7
