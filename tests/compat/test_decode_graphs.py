"""Our graphs of each batch size: captured before SGLang's own, and chosen by the label of the step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.model_runner import ModelRunner

from prefix_kernels.launching import block_of, recording
from prefix_kernels.types import PagedKV
from sglang_ext.compat import scheduler_hooks
from sglang_ext.config import config_from_dict
from sglang_ext.decode.costs import Line, Lines, StepCosts
from sglang_ext.decode.planner import DecodePlanner
from sglang_ext.decode.types import StepPath
from sglang_ext.methods.base import IndexSpec
from sglang_ext.methods.layer_plan import LayerPlan
from sglang_ext.methods.two_level import TwoLevelSpec
from sglang_ext.metrics import Counters
from sglang_ext.prefix.requests import RequestTable
from tests.serving.planning import planner


class Runtime:
    """What the hooks ask of the runtime and its forwards; keeps what happens in order."""

    def __init__(self, runner: Any, largest: int) -> None:
        self.view = SimpleNamespace(runner=runner)
        self.planner = SimpleNamespace(paths_of=lambda size: tuple(StepPath) if size <= largest else ())
        self.forwards = self
        self.path: StepPath | None = None
        self.events: list[Any] = []

    @contextmanager
    def capturing(self, size: int, path: StepPath) -> Iterator[None]:
        self.events.append(("begin", size, path.value))
        yield
        self.events.append(("end", size))

    def original(self, _runner: Any, size: int, _forward: Any, *rest: Any) -> str:
        self.events.append((size, *rest))
        return "captured"


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Runtime | None], Any]:
    """The hooks, of a process with that runtime."""

    def hook(runtime: Runtime | None) -> Any:
        monkeypatch.setattr(scheduler_hooks, "_runtime", runtime)
        return scheduler_hooks

    return hook


def _graph_runner(model_runner: Any, width: int = 1) -> Any:
    return SimpleNamespace(model_runner=model_runner, captured_req_width=width, capture_bs=[8, 16, 32])


def test_our_graphs_are_captured_first_and_under_their_own_labels(hooked: Any) -> None:
    """A backend may keep what it made for the last capture of a size: that must be SGLang's own."""
    model = object()
    runtime = Runtime(model, largest=32)
    capture = hooked(runtime).around_capture_one_shape
    capture(runtime.original, _graph_runner(model), 32, None)
    capture(runtime.original, _graph_runner(model), 8, None, None, "nolora", "dense")
    assert runtime.events == [
        ("begin", 32, "cascade"), (32, None, "cascade"), ("end", 32),
        ("begin", 32, "sparse"), (32, None, "sparse"), ("end", 32),
        ("begin", 32, "kept"), (32, None, "kept"), ("end", 32), (32, None, None),
        ("begin", 8, "cascade"), (8, None, "nolora+cascade", "dense"), ("end", 8),
        ("begin", 8, "sparse"), (8, None, "nolora+sparse", "dense"), ("end", 8),
        ("begin", 8, "kept"), (8, None, "nolora+kept", "dense"), ("end", 8), (8, None, "nolora", "dense"),
    ]  # fmt: skip


@pytest.mark.parametrize("case", ["no runtime", "a draft model", "a large batch", "several tokens a request"])
def test_other_captures_are_left_as_they_are(case: str, hooked: Any) -> None:
    model = object()
    runtime = Runtime(object() if case == "a draft model" else model, largest=8)
    graph_runner = _graph_runner(model, width=3 if case == "several tokens a request" else 1)
    capture = hooked(None if case == "no runtime" else runtime).around_capture_one_shape
    assert capture(runtime.original, graph_runner, 16, None, None, "lora") == "captured"
    if case == "several tokens a request":
        assert capture(runtime.original, graph_runner, 4, None) == "captured"
    assert {event[0] for event in runtime.events} <= {16, 4}


#: Nothing is measured on a CPU.
COSTS = StepCosts(Lines({1: Line(0.0, 1.0)}), Lines({1: Line(0.0, 1.0)}), num_dense=1, num_anchors=1, num_reuse=0)


def _steps(layers: int = 2, spec: IndexSpec | None = None, **changes: Any) -> DecodePlanner:
    config = config_from_dict({"share_prefixes": True, **changes})
    return planner(config, RequestTable(), Counters(layers), LayerPlan.default(layers, 2), 4, spec=spec)


def test_a_refusal_while_graphs_are_captured_does_not_end_the_start() -> None:
    """A layer that must stay dense is found in the first capture; the second path of that size is captured all the
    same, and neither is replayed.
    """
    steps = _steps()
    assert steps.uses_indexes
    assert steps.paths_of(2) == (StepPath.CASCADE, StepPath.SPARSE)
    steps.sparse._costs[block_of(2)] = COSTS
    steps.refuse("layer 1 has a logit cap")
    with steps.capturing(2, StepPath.SPARSE) as step:
        kv = PagedKV(*(torch.zeros(1024, 2, 64) for _ in "kv"))
        assert step.backend.run(torch.zeros(2, 4, 64), kv, 0, 1.0).shape == (2, 4, 64)
    assert not steps.uses_indexes
    assert steps.paths_of(2) == ()


def test_with_a_search_period_one_more_graph_attends_what_an_earlier_step_selected() -> None:
    steps = _steps(search_period=4)
    assert steps.paths_of(2) == (StepPath.CASCADE, StepPath.SPARSE, StepPath.KEPT)
    kv = PagedKV(*(torch.zeros(1024, 2, 64) for _ in "kv"))
    steps.sparse._costs[block_of(2)] = COSTS
    for path in (StepPath.SPARSE, StepPath.KEPT):
        with steps.capturing(2, path) as step, recording() as launched:
            step.backend.run(torch.zeros(2, 4, 64), kv, 1, 1.0)
        searches = path is StepPath.SPARSE
        assert bool(launched.launches) == searches, "the reference attends; only selections are launched"


def test_candidates_are_named_ahead_once_a_step_in_either_graph() -> None:
    """A selection is three launches on a CPU: each of two layers selects at one level or both; then all look ahead."""
    steps = _steps(3, TwoLevelSpec(), method="two_level", select_ahead=True)
    kv = PagedKV(*(torch.zeros(1024, 2, 64) for _ in "kv"))
    steps.sparse._costs[block_of(2)] = COSTS
    found = {}
    for path in (StepPath.SPARSE, StepPath.KEPT):
        with steps.capturing(2, path) as step, recording() as launched:
            for layer in range(3):
                step.backend.run(torch.zeros(2, 4, 64), kv, layer, 1.0)
        found[path] = len(launched.launches)
    assert found == {StepPath.SPARSE: 2 * 6 + 3, StepPath.KEPT: 2 * 3 + 3}


def test_a_step_replays_the_graph_of_its_path(hooked: Any) -> None:
    model = object()
    runtime, graph_runner = Runtime(model, 8), _graph_runner(model)
    assert hooked(None).after_resolve_lora_variant("lora", graph_runner, None) == "lora"
    label_of_step = hooked(runtime).after_resolve_lora_variant
    assert label_of_step(None, graph_runner, None) is None
    for path in (StepPath.CASCADE, StepPath.SPARSE):
        runtime.path = path
        assert label_of_step(None, graph_runner, None) == path.value
        assert label_of_step("lora", graph_runner, None) == f"lora+{path.value}"
    assert label_of_step("lora", _graph_runner(object()), None) == "lora", "another model's runner"


def test_between_two_forwards_of_a_step_nobody_is_told_that_its_inputs_may_change() -> None:
    source = inspect.getsource(ModelRunner)
    (name,) = [one for one in scheduler_hooks.READS_ENDED if f"self.{one}" in source]
    runner, logits = SimpleNamespace(**{name: "an event"}), torch.tensor([[0.0, 2.0], [3.0, 1.0]])
    output = SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits))
    assert scheduler_hooks.next_tokens(runner, output).tolist() == [1, 0]
    assert vars(runner) == {name: None}


@pytest.mark.parametrize(("ours", "guarded", "can"), [(True, True, False), (True, False, True), (False, True, True)])
def test_a_guarded_step_is_not_replayed(hooked: Any, ours: bool, guarded: bool, can: bool) -> None:
    model = object()
    runtime = Runtime(model, largest=32)
    runtime.eager = guarded
    assert hooked(runtime).after_can_run_graph(True, _graph_runner(model if ours else object()), None) is can
    assert hooked(runtime).after_can_run_graph(False, _graph_runner(model), None) is False
    assert hooked(None).after_can_run_graph(True, _graph_runner(model), None) is True


@pytest.mark.parametrize(
    ("ahead", "path", "runs"), [(True, None, False), (True, StepPath.KEPT, True), (False, None, True)]
)
def test_a_draft_ahead_that_no_index_serves_is_not_run(
    hooked: Any, ahead: bool, path: StepPath | None, runs: bool
) -> None:
    runtime: Any = Runtime(model := object(), largest=32)
    runtime.planner.ahead, runtime.path = ahead, path
    runtime.step, runtime.prefilled = (lambda _batch: nullcontext()), (lambda **_of: None)
    runtime.run = lambda forward, _tokens_of: forward()
    found = hooked(runtime).around_model_runner_forward(lambda *_of: "output", model, "batch")
    assert found == ("output" if runs else None)
