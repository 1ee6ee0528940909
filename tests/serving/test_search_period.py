"""The search period: how often a group's selection is made, by whom it is used, and when it is made anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from prefix_kernels.types import PagedKV, Selection
from sglang_ext.attention.decode import GroupedDecode
from sglang_ext.attention.plan import DecodePlan, make_plan
from sglang_ext.config import config_from_dict
from sglang_ext.indexing import METHODS, LayerPlan
from sglang_ext.indexing.exact import ExactSpec
from sglang_ext.metrics import Counters
from sglang_ext.prefix.requests import Attachment, SharedSlots
from sglang_ext.prefix.residency import Residency, ResidentIndex

PREFIX, LAYERS, KV_HEADS, GQA, DIM, BUDGET = 64, 3, 2, 2, 16, 12


class Searches:
    """The exact selector, which writes down for how many rows it was asked, per call."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._selector = METHODS["exact"].selector(METHODS["exact"].spec())

    def select(self, arrays: Any, q: torch.Tensor, **options: Any) -> Selection:
        self.rows.append(q.shape[0])
        return self._selector.select(arrays, q, **options)


class Serving:
    """Decode steps of requests behind one prefix; every request that is named shares the same slots."""

    def __init__(self, index: ResidentIndex, period: int, layers: list[Any]) -> None:
        gen = torch.Generator().manual_seed(4)
        self.kv = PagedKV(*(torch.randn(512, KV_HEADS, DIM, generator=gen) for _ in range(2)))
        self.table = torch.arange(400, 400 + PREFIX + 8).repeat(8, 1).to(torch.int32)
        self.index = index
        self.period = period
        self.searches = Searches()
        fields = {"method": "exact", "methods": {"exact": {}}, "top_k": BUDGET, "num_sink_tokens": 0}
        config = config_from_dict({**fields, "num_recent_pages": 0, "search_period": period})
        plan = LayerPlan.from_dict({"layers": layers}, num_layers=LAYERS, num_kv_heads=KV_HEADS)
        self.decode = GroupedDecode(config, self.searches, plan, Counters(LAYERS, torch.device("cpu")))
        self.requests: dict[str, Attachment] = {}
        self.shared: dict[str, list[SharedSlots]] = {}
        self.steps = 0

    def step(self, *names: str) -> DecodePlan:
        """One decode step of these requests with queries of its own, through all layers."""
        batch = [self.requests.setdefault(name, Attachment(name, 70, self.index, None)) for name in names]
        rows = torch.arange(len(names))
        lens = [PREFIX + 2] * len(names)
        plan = make_plan(batch, [self.index] * len(names), self.table, rows, lens, self.shared, self.period)
        assert plan is not None
        self.steps += 1
        gen = torch.Generator().manual_seed(self.steps)
        q = torch.randn(len(names), KV_HEADS * GQA, DIM, generator=gen)
        for layer in range(LAYERS):
            self.decode.run(q, self.kv, plan, layer, DIM**-0.5)
        return plan

    def searched(self, *names: str) -> list[int]:
        """Rows of each search that a step made."""
        self.searches.rows.clear()
        self.step(*names)
        return list(self.searches.rows)

    def end(self, name: str) -> None:
        """What `SparseRuntime` does with a request that ends or is retracted."""
        request = self.requests.pop(name)
        assert request.shared is not None
        request.shared.leave()
        request.shared = None


@pytest.fixture
def serving(bench: Any) -> Any:
    """(period, layers) -> a serving of one loaded index."""
    residency = Residency(bench.store, ExactSpec(), LAYERS, KV_HEADS, torch.device("cpu"), 1 << 30)

    def make(period: int, layers: list[Any] | None = None) -> Serving:
        index = residency.acquire(bench.put(list(range(PREFIX))))
        assert index.loaded is not None
        index.loaded.result(30)
        return Serving(index, period, layers or ["dense", "anchor", "anchor"])

    yield make
    residency.close()


Make = Callable[..., Serving]


@pytest.mark.parametrize("period", [1, 2, 4, 8])
def test_a_group_searches_once_in_a_period(serving: Make, period: int) -> None:
    one = serving(period)
    one.step("a", "b")  # their first step: each on its own, its slots are not settled
    per_step = [one.searched("a", "b") for _ in range(16)]
    assert sum(map(len, per_step)) == 2 * 16 // period, "two anchor layers"
    assert [bool(rows) for rows in per_step] == [step % period == 0 for step in range(16)]
    assert {rows for step in per_step for rows in step} == {2}


def test_the_steps_between_attend_the_same_positions_with_their_own_queries(serving: Make) -> None:
    one = serving(4)
    one.step("a")
    plans = [one.step("a") for _ in range(8)]
    taken = [plan.groups[0].selections for plan in plans]
    for layer in (1, 2):
        for first in (0, 4):
            for step in range(first, first + 4):
                assert torch.equal(taken[step][layer].positions, taken[first][layer].positions)
        assert not torch.equal(taken[0][layer].positions, taken[4][layer].positions), "another query finds others"


def test_reuse_layers_follow_the_kept_selection_of_their_anchor(serving: Make) -> None:
    one = serving(3, ["dense", "anchor", {"reuse": 1, "head_map": [1, 0]}])
    one.step("a")
    for _ in range(3):
        plan = one.step("a")
        group = plan.groups[0]
        reused = one.decode.select(torch.zeros(1, KV_HEADS * GQA, DIM), group, KV_HEADS, 2, 0.25)
        assert torch.equal(reused.positions, group.selections[1].positions[[1, 0]])


def test_a_request_that_joins_is_searched_for_at_once(serving: Make) -> None:
    one = serving(8)
    one.step("a")
    assert one.searched("a") == [1, 1]
    assert one.searched("a") == []
    assert one.searched("a", "b") == [1, 1], "its first step is its own, and the group keeps its search"
    assert one.searched("a", "b") == [2, 2]
    assert one.searched("b", "a") == [], "the order of a batch does not matter"


def test_a_request_that_leaves_ends_the_search(serving: Make) -> None:
    one = serving(8)
    one.step("a", "b")
    assert one.searched("a", "b") == [2, 2]
    one.end("b")
    assert one.searched("a") == [1, 1]
    assert one.searched("a") == []


def test_a_request_with_the_id_of_one_that_ended_is_somebody_else(serving: Make) -> None:
    one = serving(8)
    one.step("a", "b")
    one.step("a", "b")
    one.end("b")
    assert one.searched("a", "b") == [1, 1, 1, 1], "a alone, the new b alone"
    assert one.searched("a", "b") == [2, 2]


def test_members_of_another_batch_are_other_members(serving: Make) -> None:
    one = serving(8)
    one.step("a", "b")
    assert one.searched("a", "b") == [2, 2]
    assert one.searched("a") == [1, 1], "b waits this step"
    assert one.searched("a", "b") == [2, 2]


def test_requests_on_other_slots_have_searches_of_their_own(serving: Make) -> None:
    one = serving(4)
    one.table[1] += 1
    one.step("a", "b")
    assert one.searched("a", "b") == [1, 1, 1, 1]
    assert one.searched("a", "b") == []
    one.end("b")
    assert one.searched("a") == []


def test_a_step_that_failed_midway_leaves_no_layer_without_selection(serving: Make) -> None:
    one = serving(4)
    one.step("a")
    run = one.decode.run
    one.decode.run = lambda q, kv, plan, layer, scale: run(q, kv, plan, layer, scale) if layer < 2 else 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        one.step("a")
    one.decode.run = run  # type: ignore[method-assign]
    assert one.searched("a") == [1], "layer 1 was found, layer 2 is looked for"
