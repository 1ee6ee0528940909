"""Which way decode steps go: by measured costs, by what the batch was before, and never a graph that is not there.

Which steps search: also `test_a_selection_serves_its_steps_until_a_group_changes`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from prefix_kernels.launching import block_of
from sglang_ext.config import config_from_dict
from sglang_ext.decode.costs import Line, Lines, StepCosts, numbers_of_groups
from sglang_ext.decode.sparse import SearchTurns
from sglang_ext.decode.types import StepPath
from sglang_ext.methods.ab_sparse import ABSparseSpec
from sglang_ext.methods.base import IndexSpec
from sglang_ext.methods.exact import ExactSpec
from sglang_ext.methods.layer_plan import LayerPlan
from sglang_ext.methods.two_level import TwoLevelSpec
from sglang_ext.methods.union import UnionSpec
from sglang_ext.metrics import Counters
from sglang_ext.prefix.requests import Attachment, RequestTable
from sglang_ext.prefix.residency import State
from tests.serving.admitting import Request, entered
from tests.serving.planning import PREFIX, blank_index, capture_all, forward_of, path_of, planner
from tests.sparse_server import Server

ROWS, LAYERS = 4, 3
#: Of 129 tokens exact costs 3 * 129 and sparse 129 + 2 * 33, beside a search of 2 * 200 or a part of it.
COSTS = StepCosts(Lines({1: Line(0.0, 1.0)}), Lines({1: Line(200.0, 0.0)}), num_dense=1, num_anchors=2, num_reuse=0)


class Batches:
    """Requests on one indexed prefix, each in a row of the table of its own."""

    def __init__(self, roles: list[Any], *, trial: bool = False, **fields: Any) -> None:
        self.index = blank_index(LAYERS)
        self.index.state = State.READY
        settings = {"share_prefixes": True, "min_top_k": 32, "search_period": 4, "min_shared_tokens": 10_000}
        config = config_from_dict({**settings, **fields, "layer_plan": roles})
        plan = LayerPlan.from_dict({"layers": roles}, num_layers=LAYERS, num_kv_heads=1)
        self.requests = RequestTable()
        self.steps = planner(config, self.requests, Counters(LAYERS), plan, ROWS, 1, trial=trial)
        self.steps.sparse._costs[block_of(ROWS)] = COSTS
        capture_all(self.steps, ROWS)
        self.held: dict[int, Request] = {}

    def step(self, *rows: int, index: bool = True, beams: bool = False) -> StepPath | None:
        """A decode step of the requests in these rows."""
        for row in rows:
            if row not in self.held:
                self.held[row] = entered(self.requests, Attachment(f"r{row}", index=self.index))
        forward = forward_of([f"r{row}" for row in rows], [*rows], [PREFIX + 1] * len(rows), beams)
        path = path_of(self.steps, forward, lambda one, **_: self.index if index else None)
        assert path is None or path in self.steps.paths_of(len(rows)), "a graph that was never captured"
        return path


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (UnionSpec(second=ExactSpec()), "exact has no kernels for decode graphs, as csattention, ab_sparse, "),
        (TwoLevelSpec(second=ABSparseSpec()), "expected token_index as two_level.second"),
    ],
    ids=["union", "two levels"],
)
def test_a_spec_that_kernels_do_not_read_is_named_and_steps_go_on(
    spec: IndexSpec, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_from_dict({"share_prefixes": True, "method": spec.method})
    plan = LayerPlan.default(LAYERS, 1)
    steps = planner(config, RequestTable(), Counters(LAYERS), plan, ROWS, 1, spec=spec)
    assert steps.sparse is None
    assert steps.cascade is not None
    assert "indexes are not used" in caplog.text
    assert message in caplog.text


def settled(batches: Batches, *rows: int) -> None:
    """Steps until the slots of these requests cannot change any more."""
    for _ in range(4):
        batches.step(*rows, index=False)


def test_a_search_pays_once_its_groups_have_stayed_for_some_steps() -> None:
    """A third of a search does, half of one does not; then three steps use what one has found."""
    batches = Batches(["dense", "anchor", "anchor"])
    settled(batches, 0)
    found = [batches.step(0) for _ in range(8)]
    sparse = [StepPath.SPARSE, StepPath.KEPT, StepPath.KEPT, StepPath.KEPT, StepPath.SPARSE, StepPath.KEPT]
    assert found == [None, None, *sparse]
    assert batches.step(0, index=False) is None
    assert [batches.step(0) for _ in range(3)] == [None, None, StepPath.SPARSE], "its groups were others in between"
    assert batches.steps.snapshot()["kept_steps"] == 4


@pytest.mark.parametrize(("period", "passes"), [(4, True), (2, False)])
def test_an_index_on_trial_is_tried_where_it_pays_once_its_groups_stay(period: int, passes: bool) -> None:
    """Steps of a trial never follow each other; half of a search does not pay, so that there is nothing to try."""
    batches = Batches(["dense", "anchor", "anchor"], trial=True, search_period=period, guard_share=1.0)
    guard = batches.steps.guard
    for row in range(ROWS):
        for _ in range(16):
            batches.step(row)
            guard.runs()
            guard.ran()
    assert guard.records.events == ({"accepted": 1} if passes else {})
    assert (batches.steps.account.counters.sparse_steps > 0) == passes


def test_explain_charges_a_search_as_steps_that_follow_each_other_do() -> None:
    batches = Batches(["dense", "anchor", "anchor"])
    settled(batches, 0)
    assert {batches.step(0) for _ in range(8)} == {None, StepPath.SPARSE, StepPath.KEPT}
    costs = batches.steps.costs_alone(PREFIX + 1, PREFIX, 32)
    assert costs == {"exact": 3 * 129.0, "sparse": 129.0 + 2 * 33.0 + 2 * 200.0 / 4}


@pytest.mark.parametrize("other", [{"beams": True}, {"index": False}], ids=str)
def test_what_was_found_is_too_old_behind_another_step(other: dict[str, bool]) -> None:
    batches = Batches(["dense", "anchor", "anchor"], decode_path="sparse")
    settled(batches, 0)
    assert [batches.step(0) for _ in range(2)] == [StepPath.SPARSE, StepPath.KEPT]
    assert batches.step(0, **other) is None
    assert batches.step(0) is StepPath.SPARSE


def test_nothing_is_kept_of_before_a_capture() -> None:
    searches = SearchTurns(4)
    searches.take("A")
    searches.begin(searches=False)
    assert not searches.searches, "a graph without selections is captured"
    searches.take("A")
    assert searches.searches


def test_groups_that_keep_changing_never_pay_for_a_part_of_a_search_only() -> None:
    batches = Batches(["dense", "anchor", "anchor"])
    settled(batches, 0, 1)
    for row in (0, 1) * 8:
        assert batches.step(row) is None
        assert batches.step(row) is None


@pytest.mark.parametrize("roles", [["dense", "anchor", "anchor"], ["dense", "dense", "dense"]], ids=["anchors", "none"])
def test_every_path_has_its_graph(roles: list[Any]) -> None:
    batches = Batches(roles, decode_path="sparse")
    found = {batches.step(0) for _ in range(10)}
    assert found == ({StepPath.SPARSE, StepPath.KEPT} if "anchor" in roles else {StepPath.SPARSE})


def test_rows_that_lists_have_no_room_for_are_counted_and_attended_beside_the_others() -> None:
    """Nothing is known of the requests' slots yet: each one is a group. Room for three of four lists of 32 tokens."""
    batches = Batches(["dense", "anchor", "anchor"], decode_path="sparse", search_period=1)
    batches.steps.sparse._lists.entries = 3 * 32
    assert batches.step(0, 1, 2, 3) is StepPath.SPARSE
    counters = batches.steps.account.counters
    assert (counters.sparse_rows, counters.dense_rows, counters.fallbacks) == (3, 1, {"no_room": 1})


def test_a_batch_that_is_too_large_says_so() -> None:
    batches = Batches(["dense", "anchor", "anchor"], decode_path="sparse")
    assert batches.step(*range(ROWS + 1)) is None
    assert batches.steps.account.counters.fallbacks == {"no_room": ROWS + 1}


#: 2 layers attend all, 4 select, 2 reuse.
ONE = (Lines({1: Line(5.0, 0.002)}), Lines({1: Line(10.0, 0.001)}))
EIGHT_LAYERS = StepCosts(*ONE, num_dense=2, num_anchors=4, num_reuse=2)


def test_a_line_goes_through_two_points_and_never_falls() -> None:
    assert Line.through((1000, 6.0), (3000, 10.0)) == Line(4.0, 0.002)
    assert Line.through((1000, 6.0), (3000, 5.0)) == Line(6.0, 0.0)
    assert Line.through((1000, 1.0), (3000, 9.0)).base == 0.0


def test_each_layer_costs_as_its_role_says_and_a_search_is_shared_out() -> None:
    exact, suffix = EIGHT_LAYERS.exact_us(10_100, 1), 100
    assert exact == pytest.approx(8 * (5.0 + 20.2))
    whole, selected, search = 2 * (5.0 + 20.2), 6 * (5.0 + 2.2), 4 * (10.0 + 10.0)
    assert EIGHT_LAYERS.sparse_us([10_000], [1_000], suffix) == pytest.approx(whole + selected + search)
    assert EIGHT_LAYERS.sparse_us([10_000], [1_000], suffix, steps=4) == pytest.approx(whole + selected + search / 4)
    ahead = {"behind": Lines({1: Line(4.0, 0.0)}), "ahead": Lines({1: Line(30.0, 0.0)})}
    both = replace(EIGHT_LAYERS, **ahead).sparse_us([10_000], [1_000], suffix, steps=8)
    assert both == pytest.approx(whole + selected + 4 * (4.0 + 16.0 / 8) + 30.0), "once a step, for all layers"
    several = EIGHT_LAYERS.sparse_us([6_000, 4_000], [600, 400], suffix)
    assert several == pytest.approx(whole + selected + search), "lists add up"


def test_many_groups_have_lines_of_their_own() -> None:
    assert [numbers_of_groups(size) for size in (1, 4, 32)] == [[1], [1, 4], [1, 4, 16, 32]]
    lines = Lines({1: Line(5.0, 0.004), 5: Line(9.0, 0.002)})
    assert [lines(1000, groups) for groups in (0, 1, 2, 5, 9)] == [9.0, 9.0, pytest.approx(9.5), 11.0, 11.0]
    select = Lines({1: Line(10.0, 0.001), 5: Line(20.0, 0.001)})
    costs = StepCosts(lines, select, num_dense=1, num_anchors=1, num_reuse=0)
    assert costs.exact_us(1000, 5) == 2 * 11.0
    # One prefix and four requests without: five lists to attend, one to search.
    assert costs.sparse_us([500], [100], 500, others=4) == pytest.approx(11.0 + 10.5 + 9.0 + 1.2)


@pytest.mark.parametrize(
    ("batch", "changes", "room", "most"),
    [
        (2, {"top_k": 8}, 1000, {1: 512, 2: 968}),
        (5, {}, 90, {1: 74, 4: 24}),
        (5, {}, 20, {1: 4}),
        (5, {}, 19, {}),
    ],
)
def test_small_budgets_and_small_pools_are_measured_with_all_tokens_there_is_room_for(
    batch: int, changes: dict[str, Any], room: int, most: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists are as short as budgets are; that says nothing of how many tokens are searched."""
    server = Server(torch.device("cpu"), batch, **changes)
    sparse = server.sparse
    sparse._room = room
    found: dict[int, set[int]] = {}

    def note(run: Any, device: torch.device) -> float:
        segments = sparse._whole.of(batch)._segments
        found.setdefault(len(segments), set()).add(sum(segment.length for segment in segments))
        return 1.0

    monkeypatch.setattr("sglang_ext.decode.sparse.measure_us", note)
    costs = sparse.measure(batch, server.caches[0])
    assert {number: max(tokens) for number, tokens in found.items()} == most
    if not most:  # no room for any prefix
        assert costs is None
        return
    assert set(costs.attend) == set(costs.select) == set(most)
    assert costs.sparse_us([100], [10], 1, others=batch) > 0
