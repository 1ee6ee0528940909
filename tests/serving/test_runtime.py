"""The runtime of one process on a real store: admission, steps, slots given back, indexes built on the way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from prefix_kernels.testing import dense_attention
from prefix_kernels.types import PagedKV
from sglang_ext.config import Settings
from sglang_ext.methods import METHODS, make_selector
from sglang_ext.methods.token_index import TokenIndexSelector
from sglang_ext.runtime import SparseRuntime
from tests.serving.admitting import Runtime

LAYERS, KV_HEADS, GQA, DIM = 3, 2, 2, 16
NAMESPACE: dict[str, str | None] = {"extra_key": None}


class Request:
    """As SGLang's: compared by identity, and weakly referenceable."""


class Model:
    """A model runner in plain tensors: what `ModelView` asks for."""

    num_layers, num_qo_heads, num_kv_heads, head_dim, v_head_dim = LAYERS, KV_HEADS * GQA, KV_HEADS, DIM, DIM
    dtype = kv_dtype = torch.float32
    num_slots, max_requests, decode_graphs = 1024, 8, False
    tp_rank, tp_size = 0, 1
    has_kv_scales = True
    device = torch.device("cpu")

    def __init__(self, fingerprint: Any) -> None:
        self._fingerprint = fingerprint
        gen = torch.Generator().manual_seed(0)
        self.weight = torch.randn(5, 7, generator=gen)
        pools = [torch.randn(2, 1024, KV_HEADS, DIM, generator=gen) for _ in range(LAYERS)]
        self.caches = [PagedKV(*pool, k_scale=0.5, v_scale=4.0) for pool in pools]
        self.table = torch.randperm(1024, generator=gen)[: 8 * 120].reshape(8, 120).to(torch.int32)

    @property
    def req_to_token(self) -> torch.Tensor:
        return self.table

    def kv(self, layer: int) -> PagedKV:
        return self.caches[layer]

    def write_kv(self, layer: Any, forward_batch: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        cache = self.caches[layer.layer_id]
        cache.k_cache[forward_batch.out_cache_loc] = k / cache.k_scale
        cache.v_cache[forward_batch.out_cache_loc] = v / cache.v_scale

    def fingerprint(self) -> Any:
        return self._fingerprint

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", self.weight


def _mode(name: str) -> Any:
    return SimpleNamespace(is_decode=lambda: name == "decode", is_extend=lambda: name == "extend")


def _decode_batch(runtime: SparseRuntime, rids: list[str], lens: list[int], rows: list[int] | None = None) -> Any:
    indices = torch.tensor(rows or list(range(len(rids))))
    last = runtime.view.req_to_token[indices, torch.tensor(lens) - 1].long()
    return SimpleNamespace(
        forward_mode=_mode("decode"),
        rids=rids,
        batch_size=len(rids),
        req_pool_indices=indices,
        seq_lens_cpu=torch.tensor(lens),
        seq_lens=torch.tensor(lens),
        out_cache_loc=last,
    )


def planned(runtime: SparseRuntime, batch: Any) -> bool:
    """Whether a decode step is attended here; its layers do not run."""
    with runtime.step(batch):
        return runtime.planned


@pytest.fixture
def start(make_bench: Callable[..., Any]) -> Iterator[Callable[..., SparseRuntime]]:
    started: list[SparseRuntime] = []

    def make(prompts: list[list[int]] | None = None, **fields: Any) -> SparseRuntime:
        fields = {"keep_ratio": 1.0, "layer_plan": ["anchor"] * LAYERS, "prefetch_policy": "wait_complete", **fields}
        bench = make_bench(**fields)
        for prompt in prompts or []:
            bench.put(prompt)
        settings = Settings(config=bench.config, store=str(bench.store.folder))
        runtime = Runtime(settings, Model(bench.model))
        started.append(runtime)
        return runtime

    yield make
    for runtime in started:
        runtime.close()


PROMPT = list(range(64))


def _step(runtime: SparseRuntime, batch: Any) -> list[torch.Tensor | None]:
    """All layers of one forward; checks each sparse output against dense attention."""
    out: list[torch.Tensor | None] = []
    gen = torch.Generator().manual_seed(int(batch.seq_lens_cpu.sum()))
    with runtime.step(batch):
        for number in range(LAYERS):
            layer = SimpleNamespace(layer_id=number, scaling=DIM**-0.5)
            q = torch.randn(batch.batch_size, KV_HEADS * GQA * DIM, generator=gen)
            k, v = (torch.randn(batch.batch_size, KV_HEADS * DIM, generator=gen) for _ in "kv")
            result = runtime.attend(q, k, v, layer, batch, True, None)
            out.append(result)
            if result is None:
                continue
            kv = runtime.view.kv(number)
            torch.testing.assert_close(kv.keys(batch.out_cache_loc, k.dtype).flatten(1), k)
            for row, (slot, length) in enumerate(zip(batch.req_pool_indices, batch.seq_lens_cpu, strict=True)):
                own = runtime.view.req_to_token[slot, :length].long()
                heads = q[row].reshape(1, KV_HEADS * GQA, DIM)
                keys, values = kv.keys(own, k.dtype), kv.values(own, k.dtype)
                expected = dense_attention(heads, keys, values, DIM**-0.5).out.reshape(-1)
                torch.testing.assert_close(result[row].double(), expected, atol=2e-5, rtol=0)
    return out


def test_an_admitted_request_decodes_sparsely_until_its_slot_is_freed(start: Any) -> None:
    runtime, request = start([PROMPT]), Request()
    runtime.admit(request, "a", [*PROMPT, 7], NAMESPACE)
    runtime.admit(request, "a", [*PROMPT, 7], NAMESPACE)  # matched again while it waits: nothing new
    assert runtime.counters.hits == 1
    for length in (66, 67, 68):
        assert all(out is not None for out in _step(runtime, _decode_batch(runtime, ["a"], [length])))
    runtime.slot_freed(request, 0, finished=True)
    state = runtime.snapshot()
    assert (state["sparse_rows"], state["requests"], state["index_users"]) == (3, 0, 0)
    assert (state["allocated_bytes"] is None) == (not torch.cuda.is_available())
    assert state["selections_per_layer"] == [3] * LAYERS


def test_rows_without_index_ride_along_in_a_grouped_step_and_stay_exact(start: Any) -> None:
    runtime = start([PROMPT])
    requests = [Request() for _ in range(3)]
    for number, (request, prompt) in enumerate(
        zip(requests, ([*PROMPT, 7], list(range(500, 540)), [*PROMPT, 9]), strict=True)
    ):
        runtime.admit(request, str(number), prompt, NAMESPACE)
    _step(runtime, _decode_batch(runtime, ["0", "1", "2"], [66, 41, 70]))
    state = runtime.snapshot()
    assert (state["sparse_rows"], state["dense_rows"], state["fallbacks"]) == (2, 1, {"no_index": 1})


def test_a_batch_without_index_is_left_to_sglang(start: Any) -> None:
    runtime, request = start(), Request()
    runtime.admit(request, "a", [*PROMPT, 7], NAMESPACE)
    batch = _decode_batch(runtime, ["a", "unknown"], [66, 30])
    assert _step(runtime, batch) == [None] * LAYERS
    with runtime.step(batch):
        assert not runtime.planned
    assert runtime.snapshot()["fallbacks"] == {"no_index": 1}, "once for a request, not at every step"


def test_a_refused_layer_is_dense_and_counted(start: Any) -> None:
    runtime, request = start([PROMPT]), Request()
    runtime.admit(request, "a", [*PROMPT, 7], NAMESPACE)
    batch = _decode_batch(runtime, ["a"], [66])
    with runtime.step(batch):
        assert runtime.planned
        q = torch.zeros(1, KV_HEADS * GQA * DIM)
        assert runtime.attend(q, None, None, SimpleNamespace(layer_id=0), batch, True, "a logit cap") is None
    assert not runtime.planned, "a step ends with its forward"
    assert runtime.snapshot()["fallbacks"] == {"unsupported_layer": 1}


def test_a_step_that_fails_leaves_no_plan_behind(start: Any) -> None:
    runtime, request = start([PROMPT]), Request()
    runtime.admit(request, "a", [*PROMPT, 7], NAMESPACE)
    with pytest.raises(RuntimeError, match="out of memory"), runtime.step(_decode_batch(runtime, ["a"], [66])):
        raise RuntimeError("out of memory")
    assert not runtime.planned


def test_the_twins_of_one_id_are_dense_and_give_their_index_back(start: Any) -> None:
    """Whoever else is in the batch keeps its index; `_step` compares all rows with dense attention."""
    runtime, one, two, other = start([PROMPT]), Request(), Request(), Request()
    runtime.admit(one, "same", [*PROMPT, 7], NAMESPACE)
    runtime.admit(two, "same", [*PROMPT, 8], NAMESPACE)
    assert runtime.residency.num_users() == 0
    assert _step(runtime, _decode_batch(runtime, ["same", "same"], [66, 66])) == [None] * LAYERS
    runtime.admit(other, "other", [*PROMPT, 9], NAMESPACE)
    assert None not in _step(runtime, _decode_batch(runtime, ["same", "same", "other"], [67, 67, 66]))
    state = runtime.snapshot()
    assert (state["fallbacks"], state["sparse_rows"], state["dense_rows"]) == ({"unsupported_mode": 1}, 1, 4)
    for request, row in ((one, 0), (two, 1), (other, 2)):
        runtime.slot_freed(request, row, finished=True)
    assert runtime.snapshot()["requests"] == 0


@pytest.mark.parametrize("policy", ["best_effort", "timeout", "wait_complete"])
def test_a_decode_step_meets_a_loading_index_by_its_policy(start: Any, policy: str) -> None:
    runtime, request = start([PROMPT], prefetch_policy=policy, prefetch_timeout_s=0.05), Request()
    gate, real = threading.Event(), runtime.store.get
    runtime.store.get = lambda key: (gate.wait(120), real(key))[1]  # a slow disk
    runtime.admit(request, "a", [*PROMPT, 7], NAMESPACE)
    if policy == "wait_complete":
        threading.Timer(0.2, gate.set).start()
        assert all(out is not None for out in _step(runtime, _decode_batch(runtime, ["a"], [66])))
        assert runtime.snapshot()["fallbacks"] == {}
        return
    begun = time.monotonic()
    assert _step(runtime, _decode_batch(runtime, ["a"], [66])) == [None] * LAYERS
    assert time.monotonic() - begun < 60
    assert runtime.snapshot()["fallbacks"] == {"index_loading": 1}
    gate.set()
    index = runtime.requests.get("a").index
    index.loaded.result(30)
    assert all(out is not None for out in _step(runtime, _decode_batch(runtime, ["a"], [67])))


def test_a_damaged_index_makes_its_request_dense_with_the_reason(start: Any) -> None:
    runtime, request = start([PROMPT]), Request()
    path = next(Path(runtime.store.folder).rglob("*.pfxindex"))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    runtime.admit(request, "a", [*PROMPT, 7], NAMESPACE)
    for length in (66, 67):
        assert _step(runtime, _decode_batch(runtime, ["a"], [length])) == [None] * LAYERS
    runtime.slot_freed(request, 0, finished=True)
    state = runtime.snapshot()
    assert (state["fallbacks"], state["index_users"]) == ({"index_corrupt": 1}, 0)
    assert len(state["store_problems"]) == 1


def _prefill(runtime: SparseRuntime, rid: str, count: int, first: int = 0) -> None:
    batch = SimpleNamespace(
        forward_mode=_mode("extend"), rids=[rid], extend_seq_lens_cpu=[count], extend_prefix_lens_cpu=[first]
    )
    with runtime.step(batch):
        for number in range(LAYERS):
            q = torch.randn(count, KV_HEADS * GQA * DIM)
            layer = SimpleNamespace(layer_id=number, scaling=DIM**-0.5)
            assert runtime.attend(q, None, None, layer, batch, True, None) is None


def _built(runtime: SparseRuntime, report: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report.read_text().splitlines()]


def test_a_prefilled_prompt_leaves_an_index_of_its_own_keys(start: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    runtime, request = start(build="prefill", build_report=str(report), build_align=16), Request()
    runtime.admit(request, "a", [*PROMPT, 7, 8], NAMESPACE)
    _prefill(runtime, "a", 66)
    runtime.slot_freed(request, 0, finished=True)
    (line,) = _built(runtime, report)
    assert (line["status"], line["num_tokens"]) == ("built", 64)
    later = Request()
    runtime.admit(later, "b", [*PROMPT, 9], NAMESPACE)
    index = runtime.requests.get("b").index
    index.loaded.result(30)
    slots = runtime.view.req_to_token[0, :64].long()
    for number in range(LAYERS):
        assert torch.equal(index.layers[number]["keys"], 0.5 * runtime.view.kv(number).k_cache[slots].transpose(0, 1))
    runtime.slot_freed(later, 1, finished=True)
    assert _built(runtime, report)[1]["status"] == "exists"


def test_a_report_that_cannot_be_written_does_not_end_the_server(start: Any, caplog: Any) -> None:
    runtime, request = start(build="prefill", build_report="/nowhere/report.jsonl"), Request()
    runtime.admit(request, "short", [1, 2, 3], NAMESPACE)
    assert "build_report cannot be written" in caplog.text


def test_a_layer_plan_of_another_model_is_refused(start: Any) -> None:
    with pytest.raises(ValueError, match="expected 3 layers in the plan"):
        start(layer_plan=["anchor"] * 5)


def test_selections_sum_what_the_configuration_says(start: Any) -> None:
    for every, wanted in ((1, 1), (8, 8), (None, 16)):
        selector = start(method="token_index", sum_every=every).planner.sparse.op._selector
        assert (type(selector), selector.sum_every) == (TokenIndexSelector, wanted)
    assert start(method="exact").config.summed_every == 1
    with pytest.raises(ValueError, match="only token_index"):
        make_selector(METHODS["exact"].spec(), 2)


def test_the_snapshot_is_plain_values(start: Any) -> None:
    runtime = start([PROMPT])
    state = msgspec.json.decode(msgspec.json.encode(runtime.snapshot()))
    assert state["indexes_in_store"] == 1
    assert state["store_problems"] == []
    assert state["model"]["num_layers"] == LAYERS


def test_a_row_shorter_than_its_index_is_dense_and_counted(start: Callable[..., SparseRuntime]) -> None:
    runtime = start([PROMPT])
    request = Request()
    runtime.admit(request, "a", [*PROMPT, 1], NAMESPACE)
    assert _step(runtime, _decode_batch(runtime, ["a"], [64])) == [None] * LAYERS
    assert runtime.counters.fallbacks == {"index_mismatch": 1}


def test_a_request_that_cannot_be_looked_up_is_dense(start: Callable[..., SparseRuntime]) -> None:
    runtime = start([PROMPT])
    request = Request()
    runtime.refuse(request, "a", "unsupported_mode", "why")
    runtime.admit(request, "a", [*PROMPT, 1], NAMESPACE)
    assert _step(runtime, _decode_batch(runtime, ["a"], [66])) == [None] * LAYERS
    assert runtime.counters.fallbacks == {"unsupported_mode": 1}


def test_requests_on_one_prefix_share_it_without_an_index(start: Any) -> None:
    """`_step` compares every layer's output with dense attention."""
    runtime = start(share_prefixes=True, min_shared_tokens=32)
    requests = [Request() for _ in range(3)]
    for number, request in enumerate(requests):
        runtime.admit(request, f"r{number}", [*PROMPT, number], NAMESPACE)
        runtime.view.req_to_token[number, :64] = runtime.view.req_to_token[0, :64].clone()
    rids = ["r0", "r1", "r2"]
    shared = [_step(runtime, _decode_batch(runtime, rids, [66 + n, 70 + n, 81 + n]))[0] is not None for n in range(5)]
    assert shared == [False, False, True, True, True]
    runtime.slot_freed(requests[0], 0, finished=True)
    assert _step(runtime, _decode_batch(runtime, rids[1:], [75, 86], [1, 2]))[0] is not None
    runtime.slot_freed(requests[1], 1, finished=False)  # retracted: it comes back with other slots
    assert _step(runtime, _decode_batch(runtime, ["r2"], [87], [2])) == [None] * LAYERS
    state = runtime.snapshot()
    assert (state["shared_steps"], state["shared_rows"], state["sparse_rows"]) == (4, 11, 0)
    assert state["shared"]["compared"] == 1


def test_a_layer_that_must_stay_dense_ends_the_sharing(start: Any) -> None:
    """A captured graph could not hold it."""
    runtime = start(share_prefixes=True, min_shared_tokens=32)
    requests = [Request() for _ in range(2)]
    for number, request in enumerate(requests):
        runtime.admit(request, f"r{number}", [*PROMPT, number], NAMESPACE)
        runtime.view.req_to_token[number, :64] = runtime.view.req_to_token[0, :64].clone()
    batches = [_decode_batch(runtime, ["r0", "r1"], [66 + n, 70 + n]) for n in range(4)]
    for batch in batches[:2]:
        _step(runtime, batch)
    layer = SimpleNamespace(layer_id=1, scaling=1.0)
    with runtime.step(batches[2]):
        assert runtime.planned
        assert runtime.attend(torch.zeros(2, 64), None, None, layer, batches[2], True, "a sliding window") is None
    assert _step(runtime, batches[3]) == [None] * LAYERS
    state = runtime.snapshot()
    assert state["shared"]["refusal"] == "layer 1 has a sliding window"
    assert state["fallbacks"] == {"no_index": 2, "unsupported_layer": 1}
