"""The choice between attending all and selecting, by measured costs."""

from __future__ import annotations

import pytest

from sglang_ext.decode.costs import Line, Lines, StepCosts, numbers_of_groups

#: 2 layers attend all, 4 select, 2 reuse.
ONE = (Lines({1: Line(5.0, 0.002)}), Lines({1: Line(10.0, 0.001)}))
COSTS = StepCosts(*ONE, num_dense=2, num_anchors=4, num_reuse=2)


def test_a_line_goes_through_two_points_and_never_falls() -> None:
    assert Line.through((1000, 6.0), (3000, 10.0)) == Line(4.0, 0.002)
    assert Line.through((1000, 6.0), (3000, 5.0)) == Line(6.0, 0.0)
    assert Line.through((1000, 1.0), (3000, 9.0)).base == 0.0


def test_each_layer_costs_as_its_role_says_and_a_search_is_shared_out() -> None:
    exact, suffix = COSTS.exact_us(10_100, 1), 100
    assert exact == pytest.approx(8 * (5.0 + 20.2))
    whole, selected, search = 2 * (5.0 + 20.2), 6 * (5.0 + 2.2), 4 * (10.0 + 10.0)
    assert COSTS.sparse_us([10_000], [1_000], suffix) == pytest.approx(whole + selected + search)
    assert COSTS.sparse_us([10_000], [1_000], suffix, steps=4) == pytest.approx(whole + selected + search / 4)
    assert COSTS.sparse_us([6_000, 4_000], [600, 400], suffix) == pytest.approx(whole + selected + search), (
        "lists add up"
    )


def test_a_search_may_pay_only_where_several_steps_use_it() -> None:
    attended = 5_100
    assert (
        COSTS.sparse_us([5_000], [500], 100)
        > COSTS.exact_us(attended, 1)
        > COSTS.sparse_us([5_000], [500], 100, steps=8)
    )


def test_many_groups_have_lines_of_their_own() -> None:
    assert [numbers_of_groups(size) for size in (1, 2, 4, 32, 128)] == [
        [1],
        [1, 2],
        [1, 4],
        [1, 4, 16, 32],
        [1, 4, 16, 64, 128],
    ]
    lines = Lines({1: Line(5.0, 0.004), 5: Line(9.0, 0.002)})
    assert [lines(1000, groups) for groups in (0, 1, 2, 5, 9)] == [9.0, 9.0, pytest.approx(9.5), 11.0, 11.0]
    costs = StepCosts(
        lines, Lines({1: Line(10.0, 0.001), 5: Line(20.0, 0.001)}), num_dense=1, num_anchors=1, num_reuse=0
    )
    assert costs.exact_us(1000, 5) == 2 * 11.0
    # One prefix and four requests without: five lists to attend, one to search.
    assert costs.sparse_us([500], [100], 500, others=4) == pytest.approx(11.0 + 10.5 + 9.0 + 1.2)
