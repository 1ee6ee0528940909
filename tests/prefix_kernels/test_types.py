"""Selections, states and paged buffers refuse what does not fit."""

import pytest
import torch

from prefix_kernels import PagedKV, Selection


def int32(rows):
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize(
    ("positions", "counts", "rule"),
    [
        ([[0, 1]], [3], "0 <= count"),
        ([[0, 9]], [2], "0 <= position"),
        ([[-1, 1]], [2], "0 <= position"),
        ([[1, 1]], [2], "ascending"),
        ([[2, 1]], [2], "ascending"),
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
        (Selection.all, (-1, 1), "prefix_len >= 0"),
        (PagedKV, (pool, torch.zeros(5, 2, 8)), "num_slots"),
        (PagedKV, (pool, pool.half()), "floating dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            make(*arguments)
