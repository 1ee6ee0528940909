"""The anchor programme against exhaustive search, by hand, and what it refuses."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.calibration import anchor_total, assigned_anchors, choose_anchors, evenly_spaced_anchors
from tests.examples import examples


def objective(matrix, weights, anchors, first):
    """The sum of the paper's 3.3, written with plain loops."""
    total = 0.0
    for layer in range(first, len(matrix)):
        anchor = max(a for a in anchors if a <= layer)
        total += weights[layer] * matrix[anchor][layer]
    return total


def exhaustive(matrix, weights, count, first):
    others = range(first + 1, len(matrix))
    choices = [(first, *rest) for rest in itertools.combinations(others, count - 1)]
    return max((objective(matrix, weights, choice, first), choice) for choice in choices)


# Layers 0-1, 2-4 and 5 are alike; w makes layer 5 worthless in the second case.
BLOCKS = torch.tensor(
    [
        [1.0, 0.9, 0.2, 0.2, 0.2, 0.1],
        [0.0, 1.0, 0.2, 0.2, 0.2, 0.1],
        [0.0, 0.0, 1.0, 0.9, 0.9, 0.1],
        [0.0, 0.0, 0.0, 1.0, 0.9, 0.1],
        [0.0, 0.0, 0.0, 0.0, 1.0, 0.1],
        [0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
    ]
)


@pytest.mark.parametrize(
    ("num_anchors", "importance", "anchors", "total"),
    [
        (1, None, (0,), 2.6),
        (2, None, (0, 2), 4.8),
        (3, None, (0, 2, 5), 5.7),
        (6, None, (0, 1, 2, 3, 4, 5), 6.0),
        (3, [1, 9, 1, 1, 1, 0.0], (0, 1, 2), 12.8),
    ],
)
def test_by_hand(num_anchors, importance, anchors, total):
    weights = None if importance is None else torch.tensor(importance)
    choice = choose_anchors(BLOCKS, num_anchors, importance=weights)
    assert choice.anchors == anchors
    assert choice.total == pytest.approx(total)


def test_a_later_first_layer():
    choice = choose_anchors(BLOCKS, 2, first_layer=1)
    assert choice.anchors == (1, 2)
    assert choice.total == pytest.approx(1 + 1 + 0.9 + 0.9 + 0.1)


@settings(max_examples=examples(80))
@given(data=st.data(), size=st.integers(1, 8))
def test_against_exhaustive_search(data, size):
    value = st.floats(-1, 1, width=32)
    matrix = data.draw(st.lists(st.lists(value, min_size=size, max_size=size), min_size=size, max_size=size))
    weights = data.draw(st.lists(st.floats(0, 2, width=32), min_size=size, max_size=size))
    first = data.draw(st.integers(0, size - 1))
    count = data.draw(st.integers(1, size - first))
    choice = choose_anchors(
        torch.tensor(matrix), count, importance=torch.tensor(weights, dtype=torch.float64), first_layer=first
    )
    best, _ = exhaustive(matrix, weights, count, first)
    assert len(choice.anchors) == count
    assert choice.anchors[0] == first
    assert choice.total == pytest.approx(best, abs=1e-6)
    assert objective(matrix, weights, choice.anchors, first) == pytest.approx(best, abs=1e-6)
    even = evenly_spaced_anchors(size, count, first_layer=first)
    settings_of = {"importance": torch.tensor(weights, dtype=torch.float64), "first_layer": first}
    worth = anchor_total(torch.tensor(matrix), even, **settings_of)
    assert worth == pytest.approx(objective(matrix, weights, even, first), abs=1e-6)
    assert worth <= choice.total + 1e-6


def test_entries_below_the_diagonal_are_not_read():
    matrix = BLOCKS.clone()
    matrix[torch.ones(6, 6).tril(-1).bool()] = torch.nan
    assert choose_anchors(matrix, 3) == choose_anchors(BLOCKS, 3)


def test_a_large_model_is_quick_enough_and_right_at_the_ends():
    matrix = torch.rand(126, 126, generator=torch.Generator().manual_seed(0))
    matrix.fill_diagonal_(1.0)
    assert choose_anchors(matrix, 126).total == pytest.approx(126)
    assert choose_anchors(matrix, 1).total == pytest.approx(float(matrix[0].double().sum()))
    totals = [choose_anchors(matrix, count).total for count in (2, 9, 30)]
    assert totals == sorted(totals)


@pytest.mark.parametrize(
    ("num_layers", "count", "first", "expected"),
    [(32, 4, 0, (0, 8, 16, 24)), (10, 3, 0, (0, 3, 6)), (7, 2, 1, (1, 4)), (3, 3, 0, (0, 1, 2)), (5, 1, 4, (4,))],
)
def test_evenly_spaced(num_layers, count, first, expected):
    assert evenly_spaced_anchors(num_layers, count, first_layer=first) == expected


def test_assigned_anchors():
    assert assigned_anchors((0, 2, 5), 7) == (0, 0, 2, 2, 2, 5, 5)
    assert assigned_anchors((1, 2), 4, first_layer=1) == (1, 2, 2)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: choose_anchors(BLOCKS, 0), r"expected num_anchors in 1\.\.6 .*got 0"),
        (lambda: choose_anchors(BLOCKS, 6, first_layer=1), r"expected num_anchors in 1\.\.5"),
        (lambda: choose_anchors(BLOCKS, 1, first_layer=6), r"expected first_layer in 0\.\.5, got 6"),
        (lambda: choose_anchors(BLOCKS[:2], 1), r"expected similarity \[num_layers, num_layers\]"),
        (lambda: choose_anchors(BLOCKS, 1, importance=torch.ones(5)), r"expected importance \[num_layers=6\]"),
        (lambda: choose_anchors(BLOCKS / 0, 1), "expected finite similarities"),
        (lambda: choose_anchors(BLOCKS, 1, importance=torch.full((6,), torch.nan)), "expected finite similarities"),
        (lambda: assigned_anchors((1, 2), 4), "expected ascending anchors from layer 0 on"),
        (lambda: assigned_anchors((0, 2, 2), 4), "expected ascending anchors"),
        (lambda: assigned_anchors((), 4), "expected ascending anchors"),
        (lambda: anchor_total(BLOCKS, (0, 6)), "below num_layers=6"),
        (lambda: evenly_spaced_anchors(4, 5), r"expected num_anchors in 1\.\.4"),
    ],
)
def test_what_is_refused(run, message):
    with pytest.raises(ValueError, match=message):
        run()
