"""A decode step that fails costs the groups of its own requests: never those of others, and never an answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.decode.types import StepPath
from tests.serving.admitting import OTHER, PROMPT, Runtime, decode_batch, decode_layers, ours, run_step
from tests.serving.test_cascade import Server
from tests.sparse_server import Server as SparseServer


class BrokenError(Exception):
    """Of ours."""


def _raises(*_: Any, **__: Any) -> Any:
    raise BrokenError("an index that nobody can read")


def _admit(runtime: Runtime, *prompts: list[int]) -> None:
    for number, prompt in enumerate(prompts):
        runtime.came(f"r{number}", [*prompt, number])


@pytest.mark.parametrize("where", ["plan", "layer"])
def test_its_requests_decode_dense_and_the_others_as_before(
    start: Any, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = start([PROMPT, OTHER])
    _admit(runtime, PROMPT, OTHER)
    with monkeypatch.context() as patched:
        if where == "plan":
            patched.setattr(runtime.planner.sparse, "begin", _raises)
        else:
            patched.setattr(runtime.planner.sparse.op, "select", _raises)
        assert not ours(runtime, ["r0"], [66])
    assert "a decode step of 1 requests failed" in caplog.text
    counted = runtime.snapshot()
    assert counted["dense_rows"] + counted["sparse_rows"] == 1, "its token is counted, on the way that was begun"
    assert counted["dense_rows"] == (where == "plan")
    assert not ours(runtime, ["r0"], [67]), "from now on"
    assert ours(runtime, ["r0", "r1"], [68, 66]), "the other one has its index"
    runtime.came("late")
    assert ours(runtime, ["late"], [70], [2])
    state = runtime.snapshot()
    assert (state["fallbacks"], state["decode"]["refusal"]) == ({"unsupported_mode": 1}, None)
    for row, request in enumerate(runtime.held[:2]):
        runtime.slot_freed(request, row, finished=True)
    assert runtime.snapshot()["index_users"] == 1


@pytest.mark.parametrize("graphs", [False, True])
def test_a_layer_that_fails_in_the_middle_leaves_the_rest_to_sglang(
    start: Any, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came before stays; the failing layer's own keys and values are written twice, the same ones. So it is where
    steps replay graphs, of a step that SGLang runs without one.
    """
    runtime = start([PROMPT])
    _admit(runtime, PROMPT)
    run = runtime.planner.sparse.run

    def fails_late(q: Any, kv: Any, layer: int, *rest: Any) -> Any:
        return _raises() if layer == 1 else run(q, kv, layer, *rest)

    monkeypatch.setattr(runtime.planner.sparse, "run", fails_late)
    monkeypatch.setattr(runtime.view, "decode_graphs", graphs)
    assert run_step(runtime, decode_batch(runtime, ["r0"], [66])) == [True, False, False]


def test_groups_by_slots_go_on_with_others(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = start(share_prefixes=True, min_shared_tokens=32)
    _admit(runtime, *[PROMPT] * 4)
    runtime.share_slots(1, 2, 3)

    def steps(first: int, number: int, begin: int) -> list[bool]:
        rids, rows = [f"r{first}", f"r{first + 1}"], [first, first + 1]
        return [ours(runtime, rids, [begin + n, begin + 4 + n], rows) for n in range(number)]

    assert steps(0, 3, 66)[-1]
    with monkeypatch.context() as patched:
        patched.setattr(runtime.planner.cascade, "begin", _raises)
        assert steps(0, 1, 70) == [False]
    assert runtime.planner.refusal is None
    assert not steps(0, 3, 72)[-1], "they share nothing any more"
    assert steps(2, 3, 66)[-1]
    assert runtime.snapshot()["decode"]["compared"] == 2, "what was known of those that failed is forgotten"


def test_with_several_ranks_it_ends_the_process(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may have prepared the step: another graph would be replayed there."""
    runtime = start(share_prefixes=True, min_shared_tokens=32)
    _admit(runtime, PROMPT)
    monkeypatch.setattr(runtime.planner.cascade, "plan", _raises)
    runtime.forwards.ranks = SimpleNamespace(size=2)
    with pytest.raises(BrokenError):
        ours(runtime, ["r0"], [66])


def test_a_state_that_cannot_be_told_is_an_error_in_it_and_ends_nothing_but_a_group_of_ranks(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang_ext.compat import scheduler_hooks

    runtime, result = start(), SimpleNamespace(internal_state={})
    monkeypatch.setattr(scheduler_hooks, "_runtime", runtime)
    monkeypatch.setattr(runtime.planner, "snapshot", _raises)
    scheduler_hooks.after_get_internal_state(result, None)
    assert result.internal_state["sparse_attn"]["error"].startswith("BrokenError: an index that nobody can read; see")
    assert "the state could not be told" in caplog.text
    runtime.ranks = SimpleNamespace(size=2, gathered=lambda value: [value] * 2)
    with pytest.raises(BrokenError):
        scheduler_hooks.after_get_internal_state(result, None)


@pytest.mark.parametrize("kind", ["exact", "sparse"])
def test_tables_that_were_half_written_are_written_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches come back unchanged: neither the one that failed nor the one before it may take tables for written."""
    server: Any = Server() if kind == "exact" else SparseServer(torch.device("cpu"), kernels=False)
    backend = server.decode if kind == "exact" else server.sparse
    for serials in ([1, 2], [3, 4]):
        prefix = server.prefix(300)
        for serial in serials:
            server.join(serial, *prefix, 5)
        for _ in range(4):
            server.step(serials)
    assert server.step([1, 2])

    copy = backend._buffers.copy_prefixes

    def fails_late(*of: Any) -> None:
        copy(*of)
        raise BrokenError

    for after, fails in (([1, 2], fails_late), ([3, 4], _raises)):
        with monkeypatch.context() as patched:
            patched.setattr(backend._buffers, "copy_prefixes", fails)
            with pytest.raises(BrokenError):
                server.step([3, 4])
        assert server.step(after), "and is compared with the oracle"


def test_a_layer_that_fails_while_a_graph_is_captured_fails_the_start(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a graph would be replayed with a layer that is SGLang's, whose preparation is left out."""
    runtime = start([PROMPT])
    _admit(runtime, PROMPT)
    monkeypatch.setattr(runtime.planner.sparse, "measure", lambda *_: None)
    monkeypatch.setattr(runtime.planner.sparse, "run", _raises)
    layers = decode_layers(runtime, decode_batch(runtime, ["r0"], [66]), torch.Generator())
    with runtime.forwards.capturing(1, StepPath.SPARSE), pytest.raises(BrokenError):
        next(iter(layers))
