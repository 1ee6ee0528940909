"""Guarded steps on a runtime without SGLang: what they report is what torch computes of the same queries and keys; what
is served does not change; an index that selects badly is noticed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_ext.config import config_from_dict
from sglang_ext.decode.quality import EARLY, LEAST_SAMPLES, TRIAL_STEPS
from sglang_ext.methods.layer_plan import LayerPlan
from sglang_ext.metrics import Counters
from sglang_ext.prefix.requests import Attachment, RequestTable
from sglang_ext.prefix.residency import State
from tests.index_faults import replaced
from tests.serving.admitting import (
    DIM,
    GQA,
    KV_HEADS,
    NAMESPACE,
    PROMPT,
    Request,
    Runtime,
    decode_batch,
    decode_layers,
    entered,
)
from tests.serving.planning import PREFIX, blank_index, capture_all, forward_of, planner

CONFIG: dict[str, Any] = {
    "method": "token_index", "keep_ratio": 0.25, "min_top_k": 8, "num_sink_tokens": 1, "num_recent_pages": 0,
    "layer_plan": ["dense", "anchor", "anchor"],
}  # fmt: skip
EVERY = {"guard_every": 1, "guard_share": 1.0}
NOTICED = EARLY[LEAST_SAMPLES - 1] + 2
"""Steps until a bad index is noticed, at most: its third early one, and the way of its figures."""


class Steps:
    """Decode steps of requests that run together; figures by definition, of each guarded step."""

    def __init__(self, runtime: Runtime, rids: list[str]) -> None:
        self.runtime, self.rids, self.lens = runtime, rids, [len(PROMPT) + 2] * len(rids)
        self.recall: list[list[list[float]]] = []
        self.error: list[list[list[float]]] = []

    def step(self, seed: int) -> tuple[bool, torch.Tensor | None]:
        """Whether it was guarded, and the outputs of all layers [layers, rows, ...]; None where SGLang attends."""
        runtime, gen = self.runtime, torch.Generator().manual_seed(seed)
        batch = decode_batch(runtime, self.rids, self.lens)
        self.lens = [length + 1 for length in self.lens]
        outs: list[torch.Tensor] = []
        recall, error = [], []
        with runtime.forwards.step(batch):
            guarded = runtime.forwards.eager
            for number, q, _, out in decode_layers(runtime, batch, gen, 3.0):
                if out is None:
                    return False, None
                outs.append(out)
                if guarded:
                    found = [self._figures(row, number, q[row].view(KV_HEADS, GQA, DIM)) for row in range(len(q))]
                    recall.append([one[0] for one in found])
                    error.append([one[1] for one in found])
        if guarded:
            self.recall.append(recall)
            self.error.append(error)
        return guarded, torch.stack(outs)

    def _figures(self, row: int, layer: int, q: torch.Tensor) -> tuple[float, float]:
        """By the slots in the lists of the layer that has just run, in double precision."""
        sparse, kv = self.runtime.planner.sparse, self.runtime.view.kv(layer)
        own = self.runtime.view.req_to_token[row, : self.lens[row] - 1].long()
        group = next(n for n, one in enumerate(sparse._planned.layout.prefixes) if row in one.rows)
        kept, outs = [], []
        for head in range(KV_HEADS):
            listed = own
            if layer > 0:
                segment = sparse._lists.segment(group, (row,), sparse.op._planned[group][1])
                begin = segment.list_begin + head * segment.head_stride
                count = int(sparse._lists.of(layer).counts[group, head])
                chosen = sparse._lists.of(layer).slots[begin : begin + count].long()
                listed = torch.cat((chosen, own[len(PROMPT) :]))
            keys = [kv.keys(s, torch.float64)[:, head] for s in (own, listed)]
            values = [kv.v_scale * kv.v_cache[s, head].double() for s in (own, listed)]
            every, some = (DIM**-0.5 * q[head].double() @ one.T for one in keys)
            kept.append(some.exp().sum(1) / every.exp().sum(1))
            outs.append([scores.softmax(1) @ value for scores, value in zip((every, some), values, strict=True)])
        exact, selected = (torch.stack([one[n] for one in outs]).flatten() for n in (0, 1))
        return float(torch.stack(kept).mean()), float((selected - exact).norm() / exact.norm())


def guard_of(runtime: Runtime) -> dict[str, Any]:
    found: dict[str, Any] = runtime.snapshot()["guard"]
    return found


def test_what_is_reported_is_what_torch_computes_and_changes_nothing(start: Any) -> None:
    outs, buffers = [], []
    for fields in ({"guard_every": 0}, EVERY):
        runtime = start([PROMPT], **CONFIG, **fields)
        for rid in ("r0", "r1"):
            runtime.came(rid)
        runtime.share_slots(1)
        steps = Steps(runtime, ["r0", "r1"])
        outs.append([steps.step(seed) for seed in range(12)])
        assert [guarded for guarded, _ in outs[-1]] == [fields is EVERY] * 12
        buffers.append(runtime.snapshot()["decode"]["buffer_bytes"])
    assert buffers[1] - buffers[0] == runtime.planner.guard.exact.nbytes > 0, "it has its own, where no step is shared"
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(*outs, strict=True))
    (found,) = guard_of(runtime)["indexes"].values()
    assert found["guarded"] == 10, "figures come two steps later"
    # The running mean of the first sixteen steps is the mean.
    for name, of in (("recall", steps.recall), ("output_error", steps.error)):
        wanted = torch.tensor(of[:10]).mean(dim=(0, 2)).tolist()
        assert found[name] == pytest.approx(wanted, abs=2e-5), name
    assert found["recall"][0] == pytest.approx(1.0, abs=1e-6), "dense"
    assert 0.2 < found["mean_recall"] < 0.95


def test_an_index_that_selects_badly_is_noticed_and_exact_from_then_on(start: Any) -> None:
    runtime = start([PROMPT], **CONFIG, quality_slo=0.5, quality_recovery_s=3600.0)
    served = []
    for number in range(2):
        request, steps = runtime.came(f"r{number}"), Steps(runtime, [f"r{number}"])
        for seed in range(24):
            guarded, out = steps.step(seed)
            served.append(out is not None and not (guarded and runtime.planner.guard.must))
        runtime.slot_freed(request, 0, finished=True)
    noticed = served.index(False)
    assert noticed <= NOTICED
    assert not any(served[noticed:]), "exact from then on"
    state = runtime.snapshot()
    assert state["guard"]["events"] == {"raised": 1, "dense": 1}, "lists have room for twice the budget"
    assert state["fallbacks"] == {"quality_guard": 2}
    later, hits = Request(), runtime.counters.hits
    runtime.admit(later, "r2", [*PROMPT, 9], NAMESPACE)
    assert runtime.counters.hits == hits, "nothing is loaded for it"
    assert Steps(runtime, ["r2"]).step(0) == (False, None)
    assert runtime.requests.of(later).reason == "quality_guard"
    runtime.slot_freed(later, 0, finished=True)
    # Another build of it was never compared.
    [entry] = runtime.store.list()
    replaced(runtime.store, entry.digest, lambda _arrays: None, created=entry.created + 5)
    runtime.directory.rescan()
    runtime.came("r3")
    assert Steps(runtime, ["r3"]).step(0)[1] is not None, "its build serves"
    assert runtime.snapshot()["fallbacks"] == {"quality_guard": 3}, "no request more"


def test_on_trial_exact_answers_are_served_until_it_has_passed(start: Any) -> None:
    """`build: shared` without a profile."""
    runtime = start([PROMPT], **CONFIG, build="shared", quality_slo=9.0)
    ways = []
    for number in range(2):
        request, steps = runtime.came(f"r{number}"), Steps(runtime, [f"r{number}"])
        for seed in range(12):
            guarded, out = steps.step(seed)
            ways.append("trial" if guarded and runtime.planner.guard.must else "stock" if out is None else "sparse")
        runtime.slot_freed(request, 0, finished=True)
    first, second = TRIAL_STEPS
    one = ["trial", *["stock"] * (second - first - 1), "trial", *["stock"] * (12 - second)]
    assert ways == [*one, "trial", "stock", *["sparse"] * 10], "one long answer does not decide"
    state = runtime.snapshot()
    assert state["guard"]["events"] == {"accepted": 1}
    assert (state["sparse_rows"], state["fallbacks"]) == (10, {"quality_guard": 2})
    steps = state["metrics"]["steps"]
    assert steps == state["metrics"]["decode_tokens"] == {"sparse": 10, "cascade": 0, "dense": 14}, "of one row each"


@pytest.mark.parametrize("build", ["off", "shared"])
def test_where_no_layer_selects_nothing_is_compared_or_on_trial(start: Any, build: str) -> None:
    """A profile whose layers are all flat makes such a plan. Its state has no means to show."""
    runtime = start([PROMPT], **{**CONFIG, "layer_plan": ["dense"] * 3}, **EVERY, build=build)
    runtime.came("r0")
    steps = Steps(runtime, ["r0"])
    assert [steps.step(seed)[1] is not None for seed in range(8)] == [True] * 8
    assert runtime.snapshot()["guard"] is None
    assert runtime.snapshot()["sparse_steps"] == 8


def test_next_tokens_are_compared_by_one_forward_more(start: Any) -> None:
    runtime = start([PROMPT], **CONFIG, **EVERY)
    runtime.came("r0")
    steps = Steps(runtime, ["r0"])
    exact: list[bool] = []

    def forward() -> Any:
        exact.append(not runtime.forwards.eager)
        return torch.tensor([7 if runtime.forwards.eager or len(exact) < 9 else 8])

    for _ in range(8):
        batch = decode_batch(runtime, ["r0"], steps.lens)
        with runtime.forwards.step(batch):
            assert runtime.forwards.run(forward, lambda out: out).tolist() == [7]
        steps.lens = [length + 1 for length in steps.lens]
    assert exact == [True, False, False, False, False] * 2
    (found,) = guard_of(runtime)["indexes"].values()
    assert (found["tokens"], found["agreed"]) == (2, 2)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_guarded_step_that_fails_costs_its_own_requests_and_tells_nothing(
    start: Any, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where steps replay graphs: it runs outside of them, so that SGLang can go on with the next layer."""
    runtime = start([PROMPT], **CONFIG, **EVERY)
    runtime.came("r0")
    steps = Steps(runtime, ["r0"])
    run = runtime.planner.guard.exact.run

    def fails_late(q: Any, kv: Any, layer: int, *rest: Any) -> Any:
        if layer == 1:
            raise RuntimeError("out of memory")
        return run(q, kv, layer, *rest)

    monkeypatch.setattr(runtime.planner.guard.exact, "run", fails_late)
    monkeypatch.setattr(runtime.view, "decode_graphs", graphs)
    assert steps.step(0) == (False, None)
    assert [steps.step(seed) for seed in range(1, 4)] == [(False, None)] * 3
    state = runtime.snapshot()
    assert state["fallbacks"] == {"unsupported_mode": 1}
    assert (state["guard"]["indexes"], state["guard"]["steps"]) == ({}, 0)


def test_a_trial_whose_exact_step_has_no_room_is_dense_and_says_why(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = start([PROMPT], **CONFIG)
    runtime.came("r0")
    monkeypatch.setattr(runtime.planner.guard, "tries", lambda _indexes: True)
    monkeypatch.setattr(runtime.planner.guard.exact, "begin", lambda *_: None)
    assert Steps(runtime, ["r0"]).step(0) == (False, None)
    assert runtime.snapshot()["fallbacks"] == {"quality_guard": 1}


def test_figures_that_cannot_be_sent_are_lost_and_the_answer_is_not(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = start([PROMPT], **CONFIG, **EVERY)
    runtime.came("r0")
    steps = Steps(runtime, ["r0"])
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError("pinned")))
        assert steps.step(0)[1] is not None
    assert "figures of a step are lost: pinned" in caplog.text
    assert [steps.step(seed)[0] for seed in range(1, 5)] == [True] * 4
    assert (runtime.snapshot()["guard"]["steps"], runtime.snapshot()["fallbacks"]) == (2, {})


@pytest.mark.parametrize("fields", [EVERY, {"guard_every": 0}], ids=["guarded", "no graph"])
def test_a_batch_is_padded_to_the_size_that_its_tables_are_of(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps replay graphs, SGLang pads a batch to a captured size, and what selects reads so many rows. With
    --disable-cuda-graph-padding it runs a batch of another size than was captured without a graph.
    """
    monkeypatch.setattr("sglang_ext.decode.sparse.measure_us", lambda *_: 1.0)
    index, requests = blank_index(2), RequestTable()
    index.state = State.READY
    config = config_from_dict({"share_prefixes": True, "decode_path": "sparse", "min_top_k": 16, **fields})
    planned = planner(config, requests, Counters(2), LayerPlan.default(2, 1), 4, 1)
    for size in (4, 1):
        capture_all(planned, size)
    _held = [entered(requests, Attachment(f"r{number}", index=index)) for number in range(3)]
    step = planned.prepare(forward_of(["r0", "r1", "r2"], [0, 1, 2], [PREFIX + 1] * 3), lambda *_, **__: index)
    assert (step.guarded is not None) == (fields is EVERY)
    rows: list[int] = []
    monkeypatch.setattr(planned.sparse.op, "run", lambda size, q, *_: rows.extend((size, len(q))))
    kv = planned._view.kv(0)
    assert [len(step.run(torch.randn(3, 2, 64), kv, layer, 1.0)) for layer in range(2)] == [3, 3]
    assert rows == [4, 4]
