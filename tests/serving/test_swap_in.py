"""Sparse steps of prefixes in host memory, by the references: each step equals its definition on KV of the device."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from prefix_kernels.residents import PAGE_TOKENS, Counter
from prefix_kernels.types import PagedKV
from sglang_ext.config import config_from_dict
from sglang_ext.decode.costs import Line, Lines, StepCosts
from sglang_ext.decode.quality import Standing
from sglang_ext.decode.swap import HostKV
from sglang_ext.decode.types import HostPrefix, StepPath
from sglang_ext.methods.layer_plan import LayerPlan
from sglang_ext.methods.registry import parse_spec
from sglang_ext.metrics import Counters
from sglang_ext.prefix.requests import Attachment, RequestTable
from tests.hosted_server import HostedServer, walk_host
from tests.serving.admitting import entered
from tests.serving.planning import DIM, LONGEST, PREFIX, blank_index, capture_all, forward_of, planner
from tests.sparse_server import KV_HEADS, LAYERS, ROLES, Server, searches

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="token index"),
        pytest.param({"spec": parse_spec({"method": "two_level"})}, id="two levels"),
        pytest.param({"suffix_dense_tokens": 32}, id="suffixes selected from"),
    ],
)
def test_steps_equal_those_of_prefixes_on_the_device(changes: dict[str, Any]) -> None:
    server = HostedServer(CPU, 160, kernels=False, **changes)
    walk_host(server, 3)
    counted = server.sparse.swap.counted()
    assert 0 < counted["transferred"] < counted["wanted"]


def test_steps_that_keep_a_selection_keep_its_tokens() -> None:
    server = HostedServer(CPU, 160, kernels=False, search_period=3)
    slots, index = server.prefix(304)
    host = server.offload(slots)
    for serial in (1, 2):
        server.join_behind(serial, host, slots, index, 4)
    found, wanted = [], [0]
    for _ in range(9):
        found += searches(server, [1, 2], 1)
        wanted.append(int(server.sparse.swap.residents.counters[0, Counter.WANTED]))
    assert found.count(False) >= 4
    assert [now > before for before, now in itertools.pairwise(wanted)] == found


def test_budgets_shrink_to_those_of_one_request_where_cells_are_few() -> None:
    for num_cells, budgets in ((126, (85, 41)), (110, (69, 41)), (101, (60, 41)), (100, None)):
        server = HostedServer(CPU, num_cells, kernels=False)
        prefixes = [server.prefix(length) for length in (304, 208)]
        hosts = [server.offload(slots) for slots, _ in prefixes]
        for serial, of in ((1, 0), (2, 0), (3, 1)):
            server.join_behind(serial, hosts[of], *prefixes[of], 4)
        batch = server.batch([1, 2, 3], [server.lens[serial] for serial in (1, 2, 3)])
        plan, swap = server.sparse.plan(batch), server.sparse.swap
        assert swap is not None
        assert (plan and plan.selects.budgets) == budgets
        if plan is None:
            continue
        assert server.sparse.begin(plan, batch) is not None
        q = torch.randn(3, 4, server.dim, generator=server.gen)
        assert not any(server.sparse.run(q, kv, layer, 0.1).isnan().any() for layer, kv in enumerate(server.pools))
        counted = swap.counted()
        assert counted["wanted"] == counted["transferred"] == sum(plan.selects.budgets) * KV_HEADS * 2, (
            "two layers select"
        )


@pytest.mark.parametrize(
    ("num_cells", "entries", "planned"),
    [
        pytest.param(60, None, True, id="as many as are selected"),
        pytest.param(59, None, False, id="too few cells"),
        pytest.param(60, 8, False, id="no room for its lists"),
    ],
)
def test_no_step_attends_virtual_slots(num_cells: int, entries: int | None, planned: bool) -> None:
    """A batch that cannot be attended here is not planned, though another row of it could be."""
    server = HostedServer(CPU, num_cells, kernels=False)
    if entries is not None:
        server.sparse._lists.entries = entries
    slots, index = server.prefix(304)
    host = server.offload(slots)
    server.join_behind(1, host, slots, index, 4)
    server.join(2, *server.prefix(16), 4)
    batch = server.batch([1, 2], [server.lens[1], server.lens[2]])
    assert (server.sparse.plan(batch) is not None) == planned
    real = server.batch([2], [server.lens[2]])
    assert (server.sparse.plan(real) is not None) == (entries is None)


def test_layers_that_attend_all_need_such_a_prefix_on_the_device() -> None:
    for roles, planned in ((ROLES, False), (["anchor"] * LAYERS, True)):
        server = HostedServer(CPU, 160, kernels=False, layer_plan=roles)
        slots, index = server.prefix(304)
        server.join_behind(1, HostPrefix(server.offload(slots).pages), slots, index, 4)
        if planned:
            server.step([1])
        assert (server.sparse.plan(server.batch([1], [server.lens[1]])) is not None) == planned


def test_prefixes_in_host_memory_are_not_ours_without_residents() -> None:
    server = Server(CPU, kernels=False)
    slots, index = server.prefix(304)
    server.join(1, slots, index, 4)
    batch = server.batch([1], [server.lens[1]])
    assert server.sparse.plan(batch) is not None
    assert server.sparse.plan(replace(batch, hosts=[HostPrefix(torch.arange(19))])) is None


@pytest.mark.parametrize(
    ("num_cells", "trial", "path"),
    [
        pytest.param(128, False, StepPath.SPARSE, id="as many as are selected"),
        pytest.param(127, False, None, id="too few cells"),
        pytest.param(128, True, None, id="an index on trial"),
    ],
)
def test_a_step_of_such_a_prefix_is_sparse_or_not_ours(num_cells: int, trial: bool, path: StepPath | None) -> None:
    """Whatever it costs; no group is attended exactly, and no guard compares, by slots that hold nothing."""
    roles = ["anchor", "anchor"]
    config = config_from_dict(
        {"share_prefixes": True, "min_shared_tokens": 16, "layer_plan": roles, "guard_every": 1, "guard_share": 1.0}
    )
    plan = LayerPlan.from_dict({"layers": roles}, num_layers=2, num_kv_heads=1)
    kv = PagedKV(*(torch.zeros(8 * PAGE_TOKENS, 1, DIM) for _ in "kv"))
    host = HostKV(8, lambda layer: kv, 3 * LONGEST, num_cells)
    requests, index = RequestTable(), blank_index(2)
    made = planner(config, requests, Counters(2), plan, 3, 1, host=host, trial=trial)
    _held = [entered(requests, Attachment(f"r{row}", index=index)) for row in range(3)]
    # A search that never pays.
    made.sparse._costs[4] = StepCosts(Lines({1: Line(0.0, 1.0)}), Lines({1: Line(1e6, 0.0)}), 0, 2, 0)
    capture_all(made, 3)
    prefix = HostPrefix(torch.arange(8))
    for _ in range(4):
        forward = forward_of(["r0", "r1", "r2"], [0, 1, 2], [PREFIX + 1] * 3)
        step = made.prepare(forward, lambda one, **_: index, [prefix, prefix, None])
        assert (None if step is None else step.path) == path
        assert step is None or step.guarded is None
        exact = made.prepare(forward, lambda one, **_: None)
    assert exact.path is StepPath.CASCADE, "the same rows on real slots"


def test_beside_such_a_prefix_an_index_on_trial_waits_for_its_turn_and_keeps_no_one_away() -> None:
    """No guard compares these steps. The request's turn is its first step without such a row."""
    roles = ["anchor", "anchor"]
    fields = {"share_prefixes": True, "layer_plan": roles, "decode_path": "sparse", "guard_share": 1.0}
    plan = LayerPlan.from_dict({"layers": roles}, num_layers=2, num_kv_heads=1)
    kv = PagedKV(*(torch.zeros(8 * PAGE_TOKENS, 1, DIM) for _ in "kv"))
    host = HostKV(8, lambda layer: kv, 3 * LONGEST, 128)
    requests, counters, known, on_trial = RequestTable(), Counters(2), blank_index(2, "a"), blank_index(2, "b")
    made = planner(config_from_dict(fields), requests, counters, plan, 2, 1, host=host, trial=True)
    made.guard.records.of("a", PREFIX).become(Standing.SERVING)
    _held = [entered(requests, Attachment(f"r{row}", index=one)) for row, one in enumerate((known, on_trial))]
    made.sparse._costs[2] = StepCosts(Lines({1: Line(0.0, 1.0)}), Lines({1: Line(1.0, 0.0)}), 0, 2, 0)
    capture_all(made, 2)
    both = forward_of(["r0", "r1"], [0, 1], [PREFIX + 1] * 2)
    for _ in range(10):
        step = made.prepare(both, lambda one, **_: one.index, [HostPrefix(torch.arange(8)), None])
        assert (step.path, step.guarded) == (StepPath.SPARSE, None)
    assert (counters.sparse_rows, counters.dense_rows, counters.fallbacks) == (10, 10, {"quality_guard": 1})
    alone = made.prepare(forward_of(["r1"], [1], [PREFIX + 1]), lambda one, **_: one.index)
    assert alone is not None
    assert alone.guarded.serves_exact
