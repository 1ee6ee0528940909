"""The choice between attending all and selecting, by measured costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize(
    ("batch", "changes", "room", "most"),
    [
        (1, {"top_k": 8}, 1000, {1: 512}),
        (2, {"top_k": 8}, 1000, {1: 512, 2: 968}),
        (5, {}, 60, {1: 44}),
        (5, {}, 90, {1: 74, 4: 24}),
        (5, {}, 20, {1: 4}),
    ],
)
def test_small_budgets_and_small_pools_are_measured_with_all_tokens_there_is_room_for(
    batch: int, changes: dict[str, Any], room: int, most: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists are as short as budgets are; that says nothing of how many tokens are searched."""
    pytest.importorskip("triton")
    from tests.sparse_server import Server

    server = Server(torch.device("cpu"), batch, **changes)
    sparse = server.sparse
    sparse._room = room
    found: dict[int, set[int]] = {}

    def note(run: Any, device: torch.device) -> float:
        segments = sparse._whole.of(batch)._segments  # type: ignore[attr-defined]
        found.setdefault(len(segments), set()).add(sum(segment.length for segment in segments))
        return 1.0

    monkeypatch.setattr("sglang_ext.decode.sparse.measure_us", note)
    costs = sparse.measure(batch, server.caches[0])
    assert costs is not None
    assert {number: max(tokens) for number, tokens in found.items()} == most
    assert set(costs.attend) == set(costs.select) == set(most)
    assert costs.sparse_us([100], [10], 1, others=batch) > 0


def test_a_pool_too_small_for_a_prefix_has_no_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.sparse_server import Server

    server = Server(torch.device("cpu"), 5)
    server.sparse._room = 19
    monkeypatch.setattr("sglang_ext.decode.sparse.measure_us", lambda run, device: 1.0)
    assert server.sparse.measure(5, server.caches[0]) is None
    server.join(1, *server.prefix(100), 5)
    plan = server.sparse.plan(server.batch([1], [server.lens[1]]))
    assert plan is not None
    assert server.sparse.cost_us(plan) is None
