"""The runtime of one process on a real store: admission, steps, slots given back, indexes built, what its state says.

`ours` compares every layer's output with dense attention.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from prefix_index import canonical_digest
from sglang_ext.administration import summary
from sglang_ext.config import Settings
from sglang_ext.decode.types import StepPath
from sglang_ext.methods import METHODS, make_selector
from sglang_ext.methods.base import summed_every
from sglang_ext.methods.token_index import TokenIndexSelector
from sglang_ext.runtime import SparseRuntime
from tests.serving.admitting import (
    LAYERS,
    NAMESPACE,
    OTHER,
    PROMPT,
    Model,
    Request,
    decode_batch,
    extend_batch,
    mode,
    ours,
    prefill,
    prefill_layers,
    report,
)


def test_a_batch_without_index_is_left_to_sglang(start: Any) -> None:
    runtime = start()
    runtime.came("a")
    for _ in range(2):
        assert not ours(runtime, ["a", "unknown"], [66, 30])
    assert runtime.snapshot()["fallbacks"] == {"no_index": 1}, "once for a request, not at every step"


@pytest.mark.parametrize("indexed", [True, False])
def test_a_layer_that_must_stay_dense_is_counted_and_ends_what_is_attended_here(start: Any, indexed: bool) -> None:
    """A captured graph could not hold it."""
    runtime = start([PROMPT] if indexed else [], share_prefixes=True, min_shared_tokens=32)
    for rid in ("r0", "r1"):
        runtime.came(rid)
    runtime.share_slots(1)
    for number in range(2):
        ours(runtime, ["r0", "r1"], [66 + number, 70 + number])
    layer, batch = SimpleNamespace(layer_id=1, scaling=1.0), decode_batch(runtime, ["r0", "r1"], [68, 72])
    with pytest.raises(RuntimeError, match="out of memory"), runtime.forwards.step(batch):
        raise RuntimeError("out of memory")
    assert not runtime.forwards.planned, "a step ends with its forward, also one that fails"
    with runtime.forwards.step(batch):
        assert runtime.forwards.planned
        assert runtime.forwards.attend(torch.zeros(2, 64), None, None, layer, batch, True, "a sliding window") is None
        assert not runtime.forwards.planned
    assert not ours(runtime, ["r0", "r1"], [69, 73])
    state = runtime.snapshot()
    assert state["decode"]["refusal"] == "layer 1 has a sliding window"
    assert state["fallbacks"] == {"unsupported_layer": 2} | ({} if indexed else {"no_index": 2}), "requests"
    runtime.came("late")
    assert not ours(runtime, ["late"], [66], [2])
    assert runtime.snapshot()["fallbacks"]["unsupported_layer"] == 3, "and all that come later"


def test_what_was_found_is_too_old_behind_a_mixed_step_but_not_behind_a_prefill(start: Any) -> None:
    """In a mixed step a running request gets a token of SGLang's: the selection would serve more steps than it may."""
    runtime = start([PROMPT], layer_plan=["dense", "anchor", "anchor"], search_period=8)
    runtime.came("r0")
    found = []
    for length, between in enumerate([None] * 5 + ["extend", "mixed", None], len(PROMPT) + 2):
        if between:
            batch = extend_batch("r0", 1, length)
            batch.forward_mode = mode(between)
            with runtime.forwards.step(batch):
                prefill_layers(runtime, batch, 1)
        with runtime.forwards.step(decode_batch(runtime, ["r0"], [length])):
            found.append(runtime.forwards.path)
    assert found[4:] == [StepPath.KEPT, StepPath.KEPT, StepPath.SPARSE, StepPath.KEPT]


def test_the_twins_of_one_id_are_dense_and_give_their_index_back(start: Any) -> None:
    """Whoever else is in the batch keeps its index."""
    runtime = start([PROMPT])
    one, two = runtime.came("same"), runtime.came("same", [*PROMPT, 8])
    assert runtime.residency.num_users() == 0
    assert not ours(runtime, ["same", "same"], [66, 66])
    other = runtime.came("other", [*PROMPT, 9])
    assert ours(runtime, ["same", "same", "other"], [67, 67, 66])
    state = runtime.snapshot()
    assert (state["fallbacks"], state["sparse_rows"], state["dense_rows"]) == ({"unsupported_mode": 1}, 1, 4)
    for request, row in ((one, 0), (two, 1), (other, 2)):
        runtime.slot_freed(request, row, finished=True)
    assert runtime.snapshot()["requests"] == 0


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_a_decode_step_meets_a_loading_index_by_its_policy(start: Any, policy: str) -> None:
    runtime = start([PROMPT], prefetch_policy=policy, prefetch_timeout_s=0.5)
    gate, real = threading.Event(), runtime.store.get
    runtime.store.get = lambda key: (gate.wait(120), real(key))[1]  # a slow disk
    request = runtime.came("a")
    if policy == "wait_complete":
        threading.Timer(0.2, gate.set).start()
        assert ours(runtime, ["a"], [66])
        assert runtime.snapshot()["fallbacks"] == {}
        return
    begun = time.monotonic()
    assert not ours(runtime, ["a"], [66])
    assert (0.2 if policy == "timeout" else 0.0) < time.monotonic() - begun < 60
    assert runtime.snapshot()["fallbacks"] == {"index_loading": 1}
    gate.set()
    runtime.requests.of(request).index.loaded.result(30)
    assert ours(runtime, ["a"], [67])


@pytest.mark.parametrize("waits", [True, False])
def test_a_damaged_index_is_tried_once_for_a_request_which_is_dense_with_the_reason(start: Any, waits: bool) -> None:
    runtime, request = start([PROMPT]), Request()
    path = next(Path(runtime.store.folder).rglob("*.pfxindex"))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    if waits:  # until the load has failed
        runtime.wait(request, "a", [*PROMPT, 7], NAMESPACE)
        (index,) = runtime.residency._by_digest.values()
        index.loaded.result(30)
        runtime.slot_taken(request)
        assert list(runtime.residency._by_digest.values()) == [index], "no second load of what has just failed"
    else:
        runtime.admit(request, "a", [*PROMPT, 7], NAMESPACE)
    assert not any(ours(runtime, ["a"], [length]) for length in (66, 67))
    runtime.slot_freed(request, 0, finished=True)
    state = runtime.snapshot()
    assert state["fallbacks"] == {"index_corrupt": 1}, "not what the store says of it the second time"
    assert (state["index_users"], len(state["store_problems"])) == (0, 1)
    runtime.came("b")
    assert not ours(runtime, ["b"], [66])
    assert runtime.snapshot()["fallbacks"] == {"index_corrupt": 1, "no_index": 1}, "it is offered no more"


def test_a_prefilled_prompt_leaves_an_index_of_its_own_keys(start: Any) -> None:
    runtime = start(build="prefill")
    request = runtime.came("a", [*PROMPT, 7, 8])
    prefill(runtime, "a", 66)
    runtime.slot_freed(request, 0, finished=True)
    (line,) = report(runtime)
    assert (line["status"], line["num_tokens"]) == ("built", 64)
    later = runtime.came("b", [*PROMPT, 9])
    index = runtime.requests.get("b").index
    index.loaded.result(30)
    slots = runtime.view.req_to_token[0, :64].long()
    for number in range(LAYERS):
        assert torch.equal(index.layers[number]["keys"], 0.5 * runtime.view.kv(number).k_cache[slots].transpose(0, 1))
    runtime.slot_freed(later, 1, finished=True)
    assert report(runtime)[1]["status"] == "exists"


def test_a_report_that_cannot_be_written_does_not_end_the_server(start: Any, caplog: Any) -> None:
    start(build="prefill", build_report="/nowhere/report.jsonl").came("short", [1, 2, 3])
    assert "build_report cannot be written" in caplog.text


def test_selections_sum_what_the_configuration_says(start: Any) -> None:
    for every, wanted in ((1, 1), (8, 8), (None, 64)):
        selector = start(method="token_index", sum_every=every).planner.sparse.op._selector
        assert (type(selector), selector.sum_every) == (TokenIndexSelector, wanted)
    assert summed_every(start(method="exact").config) == 1
    with pytest.raises(ValueError, match="only token_index"):
        make_selector(METHODS["exact"].spec(), 2)


@pytest.mark.parametrize(
    ("refused", "length", "reason"), [(False, 64, "index_mismatch"), (True, 66, "unsupported_mode")]
)
def test_a_row_shorter_than_its_index_or_not_looked_up_is_dense(
    start: Any, refused: bool, length: int, reason: str
) -> None:
    runtime, request = start([PROMPT]), Request()
    if refused:
        runtime.refuse(request, "a")
    runtime.admit(request, "a", [*PROMPT, 1], NAMESPACE)
    assert not ours(runtime, ["a"], [length])
    assert runtime.counters.fallbacks == {reason: 1}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"share_prefixes": True},
            "indexes: exact, build off, at most 53,687,091 bytes in memory (5% of the KV pool), model ",
        ),
        ({"decode_path": "stock"}, "left to SGLang (decode_path is stock); indexes: off (decode_path is stock)"),
        (
            {"decode_path": "cascade", "share_prefixes": True},
            "once, exactly; indexes: off (decode_path is cascade, as ",
        ),
    ],
)
def test_the_start_says_what_is_on_and_why_not(start: Any, keys: dict[str, Any], said: str) -> None:
    assert said in summary(start(**keys))


def test_indexes_that_serve_nobody_here_are_counted_apart(make_bench: Any, caplog: Any) -> None:
    bench = make_bench(layer_plan=["anchor"] * LAYERS, index_gpu_bytes=7000)
    other = msgspec.structs.replace(bench.model, kv_dtype="bfloat16")
    for tokens, parts in ((PROMPT, {}), (PROMPT[:32], {"model": other}), (PROMPT[:16], {"profile": "other"})):
        bench.put(tokens, **parts)
    settings = Settings(config=bench.config, store=str(bench.store.folder))
    for model, line in ((bench.model, "1 of 3"), (msgspec.structs.replace(bench.model, kv_dtype="float16"), "0 of 3")):
        runtime = SparseRuntime(settings, Model(model))
        said = summary(runtime)
        assert f"; indexes: {bench.config.method}, build off, at most 7,000 bytes in memory (index_gpu_bytes), " in said
        assert f", model {canonical_digest(model)[:8]}, store {settings.store}: usable {line} indexes (" in said
        assert said.startswith("shared prefixes: each request's own (share_prefixes is off")
        for rid in "ab":
            runtime.admit(Request(), rid, [*PROMPT, 7], NAMESPACE)
        state = runtime.snapshot()
        runtime.close()
        assert (state["indexes_usable"], state["indexes_in_store"]) == (int(line[0]), 3)
        assert state["store_problems"] == []
    assert state["indexes_unusable"] == {"of another KV dtype": 3}
    assert caplog.text.count(" stays dense: ") == caplog.text.count("request a stays dense: ") == 1
    assert "model.kv_dtype: expected float16, found" in caplog.text
    assert "ignored in the store" not in caplog.text
    (bench.store.folder / "notes.txt").write_text("somebody's")
    SparseRuntime(settings, Model(bench.model)).close()
    assert f"ignored in the store: {bench.store.folder}/notes.txt" in caplog.text


def test_a_store_folder_that_is_removed_is_a_problem_until_it_is_back(start: Any, caplog: Any) -> None:
    """What is resident is still used; what is not is no index any more."""
    runtime = start([PROMPT, OTHER])
    runtime.came("a")
    assert ours(runtime, ["a"], [66])
    folder = Path(runtime.store.folder)
    away = folder.rename(folder.with_name("away"))
    assert any(str(folder) in problem for problem in runtime.snapshot()["store_problems"])
    runtime.came("b")
    runtime.came("c", [*OTHER, 7])
    assert ours(runtime, ["a", "b", "c"], [67, 66, 66])
    state = runtime.snapshot()
    assert (state["sparse_rows"], state["dense_rows"], state["fallbacks"]) == (3, 1, {"no_index": 1})
    assert caplog.text.count("cannot be scanned") == 1, "said once, not at every request"
    away.rename(folder)
    assert runtime.snapshot()["store_problems"] == []


def test_a_request_that_generates_nothing_is_no_hit_and_a_probe_no_short_prompt(start: Any) -> None:
    """The first, which prefills the prompt of several answers, still begins to load the index."""
    runtime = start([PROMPT], min_sparse_prompt_len=64)
    runtime.came("n", counted=False)
    assert (runtime.snapshot()["hits"], runtime.snapshot()["index_users"]) == (0, 1)
    prompts = {"a": [*PROMPT, 7], "probe": [0], "short": PROMPT[:16]}
    for rid, tokens in prompts.items():
        runtime.came(rid, tokens)
    assert ours(runtime, [*prompts], [66, 3, 18])
    state = runtime.snapshot()
    assert (state["hits"], state["fallbacks"]) == (1, {"short_prefix": 1})


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"exactness": "verify"}, "exactness verify"),
        ({"method": "two_level", "select_ahead": True, "cache_device": "cpu"}, "cache_device"),
    ],
    ids=["lossless", "cache rank"],
)
def test_what_only_steps_by_indexes_use_is_refused_where_there_are_none(
    start: Any, asked: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In decode graphs. A job that only builds may have the server's settings."""
    monkeypatch.setattr(Model, "decode_graphs", True)
    with pytest.raises(RuntimeError, match=f"by indexes with {name}, .* got none: share_prefixes is off. Change"):
        start(**asked, share_prefixes=False)
    assert not start(**asked, share_prefixes=False, build="prefill").planner.uses_indexes
