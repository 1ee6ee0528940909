"""Rows whose prefix lies in host memory, on a runtime: their steps go past everything that reads slots, or raise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from sglang_ext.config import Settings
from sglang_ext.methods import make_selector, method_specs
from sglang_ext.methods.base import summed_every
from sglang_ext.offload import selecting as of_prefills
from sglang_ext.offload.offloading import Offloading
from sglang_ext.offload.selecting import Behind
from sglang_ext.options import Offload
from sglang_ext.ranks import Agreement, Ranks
from tests.decode_oracle import Oracle, OracleGroup
from tests.offload.host_memory import PlainPools
from tests.serving.admitting import (
    DIM,
    GQA,
    KV_HEADS,
    LAYERS,
    NAMESPACE,
    PROMPT,
    Request,
    Runtime,
    check_dense,
    decode_batch,
    decode_layers,
    layer_of,
    mode,
    ours,
    planned,
)

SCALES = (0.5, 4.0)


@pytest.fixture
def offloaded(start: Any, request: pytest.FixtureRequest) -> Runtime:
    """Two requests: r0 has PROMPT on the device, row 1 has it in host memory in front. Scales as of an fp8 pool. What
    the host has of layers that attend all is NaN: they have it on the device.
    """
    param = getattr(request, "param", {})
    runtime: Runtime = start([PROMPT], **param)
    dense = [layer for layer, role in enumerate(param.get("layer_plan", ())) if role == "dense"]
    pools = PlainPools(1024, 8, LAYERS, KV_HEADS, DIM, dense)
    runtime.view.caches = [pools.kv(layer, *SCALES) for layer in range(LAYERS)]
    runtime.view.req_to_token = torch.arange(16, 16 + 8 * 120, dtype=torch.int32).reshape(8, 120)
    options = Offload(host_bytes=16, min_tokens=16, staging_tokens=32)
    runtime.offload = runtime.forwards.offload = Offloading(options, runtime.view, pools, range(0), 16)
    runtime.came("r0", [*PROMPT, 1])
    assert ours(runtime, ["r0"], [65]), "an index serves it"
    ours(runtime, ["r0"], [66])  # its prefix is copied out
    pools.memory[dense] = torch.nan
    came(runtime, "r1", 1)
    return runtime


def came(runtime: Runtime, rid: str, row: int) -> Request:
    """A request that is matched while the prefix lies in host memory."""
    one = Request()
    runtime.held.append(one)
    runtime.wait(one, rid, [*PROMPT, 2], NAMESPACE)
    offload = runtime.offload
    found = offload.wanted(one, runtime.requests.of(one), 65)
    assert found is not None
    runtime.slot_taken(one, offloaded=offload.slot_taken(one, row))
    runtime.view.req_to_token[row, :64] = offload.virtual_slots(found, runtime.view.device)
    return one


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"share_prefixes": False}, "share_prefixes is off"),
        ({"method": "exact", "share_prefixes": True}, "the warning"),
    ],
)
def test_where_no_index_could_be_used_nothing_is_taken_in_vain(start: Any, config: dict[str, Any], why: str) -> None:
    """In decode graphs: who asks for host memory is told at the start that it would stay empty."""
    runtime = start(**config)
    settings, view = Settings(config=runtime.config, store=str(runtime.directory.address)), runtime.view
    view.decode_graphs = True

    def offloading(_: Any) -> Offloading:
        pools = PlainPools(1024, 8, LAYERS, KV_HEADS, DIM)
        return Offloading(Offload(host_bytes=16), view, pools, range(0), 16)

    with pytest.raises(RuntimeError, match=f"by indexes with offload.* got none: {why}"):
        Runtime(settings, view, offloading=offloading)


def test_a_step_with_such_a_row_attends_all_rows_exactly(offloaded: Runtime) -> None:
    runtime, batch = offloaded, decode_batch(offloaded, ["r0", "r1"], [67, 68])
    table = runtime.view.req_to_token
    slots = [table[0, :67].long(), torch.cat([table[0, :64], table[1, 64:68]]).long()]
    with runtime.forwards.step(batch):
        assert runtime.forwards.eager
        assert runtime.forwards.path is None
        for number, q, _, found in decode_layers(runtime, batch):
            for row, own in enumerate(slots):
                check_dense(found[row], q[row], runtime.view.kv(number), own)
    assert not runtime.forwards.eager
    state = runtime.snapshot()
    assert state["fallbacks"] == {"offloaded": 2}
    assert state["offload"]["users"] == 1
    assert planned(runtime, ["r0"], [68]), "without the other one its index serves it again"
    runtime.slot_freed(runtime.held[1], 1, finished=True, tokens=2)
    assert runtime.snapshot()["offload"]["users"] == 0


def test_no_layer_of_such_a_step_is_left_to_sglang(offloaded: Runtime) -> None:
    runtime, q = offloaded, torch.randn(1, KV_HEADS * GQA * DIM)
    batch = decode_batch(runtime, ["r1"], [68], [1])
    message = "expected layer 0 to be attended from host memory; it has a logit cap"
    with pytest.raises(RuntimeError, match=message), runtime.forwards.step(batch):
        runtime.forwards.attend(q, None, None, layer_of(0), batch, True, "a logit cap")
    with pytest.raises(RuntimeError, match=r"layers \[1, 2\] were not"), runtime.forwards.step(batch):
        assert runtime.forwards.attend(q, None, None, layer_of(0), batch, True, None) is not None
    batch.forward_mode.name = "TARGET_VERIFY"
    with pytest.raises(RuntimeError, match="got TARGET_VERIFY"), runtime.forwards.step(batch):
        raise AssertionError("no layer may run")


SELECTING = {
    "method": "token_index", "min_top_k": 16, "num_sink_tokens": 4, "num_recent_pages": 0,
    "layer_plan": ["dense", "anchor", {"reuse": 1, "head_map": [1, 0]}],
}  # fmt: skip


def selecting(runtime: Runtime, tokens: int, keep_ratio: float = 0.25) -> None:
    """Prefills of so many tokens select from now on, with such a budget of one row."""
    runtime.config = msgspec.structs.replace(runtime.config, keep_ratio=keep_ratio)
    runtime.planner.sparse.set_budget(runtime.config)
    runtime.offload._options = msgspec.structs.replace(runtime.offload._options, select_prefill_tokens=tokens)
    runtime.offload.serves = runtime._serves
    runtime.offload.select_by(runtime.planner.sparse)


def extended(runtime: Runtime, counts: list[int], cap: float = 0.5, first: int = 64) -> list[torch.Tensor]:
    """A prefill step behind the prefix, all layers, of so many tokens of r1, and of r0 where there are two; by layer
    the greatest difference from attention of what the definition selects for those of r1 together: of a budget that
    grows with them, up to such a share of the prefix.
    """
    config, rids = runtime.config, ["r1", "r0"][: len(counts)]
    grown = msgspec.structs.replace(config, group_growth="sqrt", max_keep_ratio=cap)
    oracle = Oracle(
        grown,
        make_selector(method_specs(config)[config.method], summed_every(config)),
        runtime.planner.sparse.layer_plan,
    )
    rows, lens = torch.tensor([1, 0][: len(counts)]), torch.tensor([first + count for count in counts])
    table = runtime.view.req_to_token
    batch = SimpleNamespace(
        forward_mode=mode("extend"), rids=rids, batch_size=len(rids), req_pool_indices=rows, seq_lens=lens,
        seq_lens_cpu=lens, extend_seq_lens=torch.tensor(counts), extend_seq_lens_cpu=counts,
        extend_prefix_lens_cpu=[first] * len(rids),
        out_cache_loc=torch.cat([table[row, first:end] for row, end in zip(rows, lens, strict=True)]).long(),
    )  # fmt: skip
    index, total, found = runtime.requests.get("r1").index, sum(counts), []
    own = [table[row, 64 : first + 1 + n].long() for row, count in zip(rows, counts, strict=True) for n in range(count)]
    group = OracleGroup(index, table[0, :64], list(range(counts[0])))
    others = [torch.cat([table[0, :64].long(), one]) for one in own[counts[0] :]]
    with runtime.forwards.step(batch):
        for number in range(LAYERS):
            q = 3 * torch.randn(total, KV_HEADS * GQA * DIM)
            k, v = (torch.randn(total, KV_HEADS * DIM) for _ in "kv")
            out = runtime.forwards.attend(q, k, v, layer_of(number), batch, True, None)
            heads = q.view(total, KV_HEADS * GQA, DIM)
            expected = oracle.run(
                heads, runtime.view.kv(number), [group], [*own[: counts[0]], *others], number, DIM**-0.5
            )
            found.append((out - expected.flatten(1)).abs().max())
    return found


EARLIER = {**SELECTING, "layer_plan": ["anchor", "anchor", {"reuse": 0}]}


@pytest.mark.parametrize("offloaded", [SELECTING, EARLIER], ids=["the last", "an earlier one"], indirect=True)
@pytest.mark.parametrize("counts", [[4], [1], [4, 3]], ids=["some", "one", "beside another"])
def test_a_prefill_of_few_tokens_selects(offloaded: Runtime, counts: list[int]) -> None:
    runtime = offloaded
    selecting(runtime, 4)
    assert max(extended(runtime, counts)) < 1e-5
    assert runtime.snapshot()["offload"]["selected"] == 1
    assert runtime.figures()["offload"]["selected"] == 1
    lists = {id(one) for one in runtime.offload._attention.selection._lists.values()}
    assert len(lists) == (1 if runtime.planner.sparse.layer_plan.layers[2].anchor_layer == 1 else 2)


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("offloaded", [SELECTING], indirect=True)
def test_several_ranks_select_what_all_had_loaded(
    offloaded: Runtime, loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they said before the batch: on indexes of a decode step they vote behind it."""
    runtime, one = offloaded, offloaded.requests.get("r1")
    selecting(runtime, 4)
    monkeypatch.setattr(runtime.ready, "_agreement", Agreement(Ranks(), 0))
    monkeypatch.setattr(runtime.offload, "_alone", False)
    agreed = runtime.offload._agreed
    agreed._words[one] = agreed.word(one)._replace(loaded=loaded)
    if not loaded:
        runtime.config = msgspec.structs.replace(runtime.config, keep_ratio=1.0)  # what the oracle attends
    assert max(extended(runtime, [4], 0.5 if loaded else 1.0)) < 1e-5
    assert runtime.offload.selected == loaded


@pytest.mark.parametrize("offloaded", [SELECTING], indirect=True)
def test_chunks_of_a_longer_prefill_attend_all(offloaded: Runtime) -> None:
    """However few tokens one has: others of a batch leave a chunk as many as they like."""
    runtime = offloaded
    selecting(runtime, 4)
    runtime.requests.get("r1").prompt_len = 69
    runtime.config = msgspec.structs.replace(runtime.config, keep_ratio=1.0)  # what the oracle attends
    assert max(extended(runtime, [2], 1.0)) < 1e-5
    assert max(extended(runtime, [3], 1.0, first=66)) < 1e-5
    assert runtime.snapshot()["offload"]["selected"] == 0


@pytest.mark.parametrize("offloaded", [SELECTING], indirect=True)
def test_what_has_no_room_beside_others_attends_all(offloaded: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """First come those that few queries are behind."""
    runtime = offloaded
    selecting(runtime, 4)
    prefix, index = runtime.offload.of_row(1), runtime.requests.get("r1").index
    wanted = [Behind(prefix, index, torch.arange(count)) for count in (4, 1, 3)]
    selection = runtime.offload._attention.selection

    def fitting() -> list[bool]:
        chosen = {len(one.rows): one.budget for one in selection.fitting(wanted)}
        assert chosen.items() <= {4: 32, 1: 16, 3: 32}.items()
        return [len(one.rows) in chosen for one in wanted]

    for name, most, fit in (
        ("_ROWS", 8, [True, True, True]),
        ("_ROWS", 7, [False, True, True]),
        ("_LISTED", 48, [False, True, True]),
        ("_GROUPS", 1, [False, True, False]),
        ("_SCORED", 3 * 64, [False, True, True]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(of_prefills, name, most)
            assert fitting() == fit
    monkeypatch.setattr(selection._op, "fits", lambda lengths, budgets: sum(budgets) <= 48)
    assert fitting() == [False, True, True]


def unreadable(_index: Any) -> int:
    raise ValueError("expected arrays of another shape")


MAY_NOT = {
    "its index cannot be read": lambda runtime: setattr(
        runtime.offload._attention.selection._op, "number_of", unreadable
    ),
    "too many tokens": lambda runtime: selecting(runtime, 3),
    "turned off": lambda runtime: setattr(runtime.ready, "off", True),
    "half of the prefix is less": lambda runtime: selecting(runtime, 4, 0.6),
}


@pytest.mark.parametrize("offloaded", [SELECTING], indirect=True)
@pytest.mark.parametrize("why", MAY_NOT)
def test_a_prefill_that_may_not_select_attends_all(offloaded: Runtime, why: str) -> None:
    runtime = offloaded
    selecting(runtime, 4)
    MAY_NOT[why](runtime)
    runtime.config = msgspec.structs.replace(runtime.config, keep_ratio=1.0)  # what the oracle attends
    assert max(extended(runtime, [4], 1.0)) < 1e-5
    assert runtime.snapshot()["offload"]["selected"] == 0


@pytest.mark.parametrize("offloaded", [{"build": "shared", "method": "token_index"}], indirect=True)
def test_no_build_is_told_of_such_a_request(offloaded: Runtime) -> None:
    assert len(offloaded.builds) == 1, "of r0"


def test_new_weights_end_it(offloaded: Runtime) -> None:
    runtime = offloaded
    runtime.weights_updated()
    late = Request()
    runtime.wait(late, "late", [*PROMPT, 2], NAMESPACE)
    assert runtime.offload.wanted(late, runtime.requests.of(late), 64) is None
    assert runtime.offload.wanted(late, runtime.requests.of(runtime.held[0]), 64) is None
    assert runtime.snapshot()["offload"] == {
        "prefixes": {}, "users": 1, "pages": 8, "free_pages": 4, "events": {"copied": 1}, "translated": 1,
        "selected": 0, "refused": {}, "rows": 1, "residents": None, "problem": None,
    }  # fmt: skip
    runtime.slot_freed(runtime.held[1], 1, finished=False)
    assert runtime.snapshot()["offload"]["free_pages"] == 8
