"""A decode step that fails costs the groups of its own requests: never those of others, and never an answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefix_kernels.grouped_attention import AttentionShape
from prefix_kernels.types import PagedKV
from sglang_ext.decode.cascade import CascadeDecode
from sglang_ext.decode.grouping import SlotTracker
from sglang_ext.decode.types import DecodeBatch
from tests.serving.admitting import OTHER, PROMPT, Runtime, decode_batch, ours, run_step


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
    assert not ours(runtime, ["r0"], [67]), "from now on"
    assert ours(runtime, ["r0", "r1"], [68, 66]), "the other one has its index"
    runtime.came("late")
    assert ours(runtime, ["late"], [70], [2])
    state = runtime.snapshot()
    assert (state["fallbacks"], state["decode"]["refusal"]) == ({"unsupported_mode": 1}, None)
    for row, request in enumerate(runtime.held[:2]):
        runtime.slot_freed(request, row, finished=True)
    assert runtime.snapshot()["index_users"] == 1


def test_a_layer_that_fails_in_the_middle_leaves_the_rest_to_sglang(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came before stays; the failing layer's own keys and values are written twice, the same ones."""
    runtime = start([PROMPT])
    _admit(runtime, PROMPT)
    run = runtime.planner.sparse.run

    def fails_late(q: Any, kv: Any, layer: int, *rest: Any) -> Any:
        return _raises() if layer == 1 else run(q, kv, layer, *rest)

    monkeypatch.setattr(runtime.planner.sparse, "run", fails_late)
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
    runtime.ranks = SimpleNamespace(size=2)
    with pytest.raises(BrokenError):
        ours(runtime, ["r0"], [66])


def test_tables_that_were_half_written_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch before comes back unchanged: nothing of the one that failed may be left in its tables."""
    cpu, gen = torch.device("cpu"), torch.Generator().manual_seed(0)
    kv = PagedKV(*(torch.randn(512, 1, 16, generator=gen) for _ in "kv"))
    table = torch.randperm(512, generator=gen)[: 4 * 100].reshape(4, 100).int()
    table[1, :64], table[3, :64] = table[0, :64], table[2, :64]
    tracker = SlotTracker(4, 16, cpu, "reference")
    decode = CascadeDecode(AttentionShape(2, 1, 16, 16, torch.float32, torch.float32), tracker, 2048, cpu)

    def batch(first: int) -> DecodeBatch:
        rows, lens = torch.tensor([first, first + 1]), [70, 72]
        return DecodeBatch([first, first + 1], lens, table, rows, torch.tensor(lens))

    for first in (0, 2):
        for _ in range(3):
            tracker.learn(batch(first))
    q = torch.randn(2, 2, 16, generator=gen)

    def begin(of: DecodeBatch) -> None:
        plan = decode.plan(of)
        assert plan is not None
        assert decode.begin(plan, of) is not None

    begin(batch(0))
    before = decode.run(q, kv, 0, 0.25)
    copy = decode._buffers.copy_prefixes

    def fails_late(*of: Any) -> None:
        copy(*of)
        raise BrokenError

    with monkeypatch.context() as patched:
        patched.setattr(decode._buffers, "copy_prefixes", fails_late)
        with pytest.raises(BrokenError):
            begin(batch(2))
    begin(batch(0))
    assert torch.equal(decode.run(q, kv, 0, 0.25), before)
