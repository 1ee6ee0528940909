"""Rows whose prefix lies in host memory, on a runtime: their steps go past everything that reads slots, or raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_ext.offload.offloading import Offloading
from sglang_ext.options import Offload
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
    ours,
    planned,
)

SCALES = (0.5, 4.0)


@pytest.fixture
def offloaded(start: Any, request: pytest.FixtureRequest) -> Runtime:
    """Two requests: r0 has PROMPT on the device, row 1 has it in host memory in front. Scales as of an fp8 pool."""
    runtime: Runtime = start([PROMPT], **getattr(request, "param", {}))
    pools = PlainPools(1024, 8, LAYERS, KV_HEADS, DIM)
    runtime.view.caches = [pools.kv(layer, *SCALES) for layer in range(LAYERS)]
    runtime.view.req_to_token = torch.arange(16, 16 + 8 * 120, dtype=torch.int32).reshape(8, 120)
    options = Offload(host_bytes=16, min_tokens=16, staging_tokens=32)
    runtime.offload = Offloading(options, runtime.view, pools, range(0), 16)
    runtime.came("r0", [*PROMPT, 1])
    assert ours(runtime, ["r0"], [65]), "an index serves it"
    ours(runtime, ["r0"], [66])  # its prefix is copied out
    came(runtime, "r1", 1)
    return runtime


def came(runtime: Runtime, rid: str, row: int) -> Request:
    """A request that is matched while the prefix lies in host memory."""
    one = Request()
    runtime.held.append(one)
    runtime.wait(one, rid, [*PROMPT, 2, 3], NAMESPACE)
    offload = runtime.offload
    found = offload.wanted(one, runtime.requests.of(one), 65)
    assert found is not None
    runtime.slot_taken(one, offloaded=offload.slot_taken(one, row))
    runtime.view.req_to_token[row, :64] = offload.virtual_slots(found, runtime.view.device)
    return one


def test_a_step_with_such_a_row_attends_all_rows_exactly(offloaded: Runtime) -> None:
    runtime, batch = offloaded, decode_batch(offloaded, ["r0", "r1"], [67, 68])
    table = runtime.view.req_to_token
    slots = [table[0, :67].long(), torch.cat([table[0, :64], table[1, 64:68]]).long()]
    with runtime.step(batch):
        assert runtime.eager
        assert runtime.path is None
        for number, q, _, found in decode_layers(runtime, batch):
            for row, own in enumerate(slots):
                check_dense(found[row], q[row], runtime.view.kv(number), own)
    assert not runtime.eager
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
    with pytest.raises(RuntimeError, match=message), runtime.step(batch):
        runtime.attend(q, None, None, layer_of(0), batch, True, "a logit cap")
    with pytest.raises(RuntimeError, match=r"layers \[1, 2\] were not"), runtime.step(batch):
        assert runtime.attend(q, None, None, layer_of(0), batch, True, None) is not None
    batch.forward_mode.name = "TARGET_VERIFY"
    with pytest.raises(RuntimeError, match="got TARGET_VERIFY"), runtime.step(batch):
        raise AssertionError("no layer may run")


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
        "refused": {}, "rows": 1, "residents": None, "problem": None,
    }  # fmt: skip
    runtime.slot_freed(runtime.held[1], 1, finished=False)
    assert runtime.snapshot()["offload"]["free_pages"] == 8
