"""What a request holds, and from when to when: its index, a lease to build one, a place to be recorded in, its id.

A request that is aborted while it waits is never heard of again, and SGLang may keep its object for ever (its
`custom_params` name the request itself; after `/freeze_gc` nothing collects that). So these tests keep them, too.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.config import Settings
from tests.serving.admitting import Runtime
from tests.serving.test_runtime import (
    LAYERS,
    NAMESPACE,
    PROMPT,
    Model,
    Request,
    _decode_batch,
    _prefill,
    _step,
    planned,
)

OTHER = list(range(2000, 2064))


@pytest.fixture
def start(make_bench: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Runtime]]:
    """Runtimes on one store."""
    started: list[Runtime] = []

    def make(prompts: list[list[int]] | None = None, **fields: Any) -> Runtime:
        fields = {"keep_ratio": 1.0, "layer_plan": ["anchor"] * LAYERS, "prefetch_policy": "wait_complete", **fields}
        bench = make_bench(build_align=16, build_report=str(tmp_path / f"report-{len(started)}.jsonl"), **fields)
        for prompt in prompts or []:
            bench.put(prompt)
        store = started[0].store.folder if started else bench.store.folder
        started.append(Runtime(Settings(config=bench.config, store=str(store)), Model(bench.model)))
        return started[-1]

    yield make
    for runtime in started:
        runtime.close()


def _report(runtime: Runtime) -> list[dict[str, Any]]:
    path = Path(str(runtime.config.build_report))
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_request_that_waits_has_its_index_loaded_and_does_not_hold_it(start: Any) -> None:
    runtime, request = start([PROMPT]), Request()
    runtime.wait(request, "a", [*PROMPT, 7], NAMESPACE)
    (index,) = runtime.residency._by_digest.values()
    index.loaded.result(30)
    assert runtime.residency.resident_bytes() > 0
    assert (runtime.residency.num_users(), runtime.snapshot()["requests"]) == (0, 0)
    runtime.slot_taken(request)
    runtime.slot_taken(request)  # the next chunk of its prefill
    assert runtime.requests.get("a").index is index, "the one that was loaded meanwhile"
    assert (index.users, runtime.snapshot()["requests"]) == (1, 1)
    assert all(out is not None for out in _step(runtime, _decode_batch(runtime, ["a"], [66])))


def test_the_index_of_an_aborted_request_makes_room_for_another(start: Any, make_bench: Any) -> None:
    bench = make_bench(method="exact")
    nbytes = sum(layer.numel() * 4 for layer in [bench.keys(PROMPT, 0)] * LAYERS)
    runtime = start([PROMPT, OTHER], index_gpu_bytes=nbytes + nbytes // 2)
    aborted, other = Request(), Request()
    runtime.wait(aborted, "aborted", [*PROMPT, 7], NAMESPACE)
    runtime.admit(other, "other", [*OTHER, 7], NAMESPACE)
    assert all(out is not None for out in _step(runtime, _decode_batch(runtime, ["other"], [66])))
    assert runtime.snapshot()["fallbacks"] == {}
    assert runtime.requests.known(aborted), "nobody has forgotten it"


def test_an_index_that_left_while_its_request_waited_is_loaded_again(start: Any, make_bench: Any) -> None:
    bench = make_bench(method="exact")
    nbytes = sum(layer.numel() * 4 for layer in [bench.keys(PROMPT, 0)] * LAYERS)
    runtime = start([PROMPT, OTHER], index_gpu_bytes=nbytes + nbytes // 2)
    one, two = Request(), Request()
    runtime.wait(one, "one", [*PROMPT, 7], NAMESPACE)
    runtime.wait(two, "two", [*OTHER, 7], NAMESPACE)
    runtime.slot_taken(one)
    assert all(out is not None for out in _step(runtime, _decode_batch(runtime, ["one"], [66])))
    assert runtime.counters.hits == 2


def test_a_damaged_index_is_tried_once_for_a_request(start: Any) -> None:
    runtime, request = start([PROMPT]), Request()
    path = next(Path(runtime.store.folder).rglob("*.pfxindex"))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    runtime.wait(request, "a", [*PROMPT, 7], NAMESPACE)
    (index,) = runtime.residency._by_digest.values()
    index.loaded.result(30)
    runtime.slot_taken(request)
    assert list(runtime.residency._by_digest.values()) == [index], "no second load of what has just failed"
    assert _step(runtime, _decode_batch(runtime, ["a"], [66])) == [None] * LAYERS
    assert runtime.snapshot()["fallbacks"] == {"index_corrupt": 1}, "not what the store says of it the second time"


def test_the_id_of_an_aborted_request_can_be_used_again(start: Any) -> None:
    runtime, aborted, again = start([PROMPT]), Request(), Request()
    runtime.wait(aborted, "a", [*OTHER, 7], NAMESPACE)
    runtime.admit(again, "a", [*PROMPT, 7], NAMESPACE)
    assert all(out is not None for out in _step(runtime, _decode_batch(runtime, ["a"], [66])))


@pytest.mark.parametrize("build", ["prefill", "shared", "capture"])
def test_a_request_that_waits_is_not_recorded_and_takes_no_lease(start: Any, build: str, tmp_path: Path) -> None:
    fields = {"build": build, "capture_folder": str(tmp_path) if build == "capture" else None}
    runtime, waiting = start(**fields), [Request() for _ in range(20)]
    for number, request in enumerate(waiting):
        runtime.wait(request, str(number), [*PROMPT, number], NAMESPACE)
    assert (len(runtime.builds), runtime.builds.recorder.num_captures) == (0, 0)
    assert _report(runtime) == []
    if build == "prefill":
        other, served = start(**fields), Request()
        other.admit(served, "b", [*PROMPT, 8], NAMESPACE)
        _prefill(other, "b", 65)
        other.slot_freed(served, 0, finished=True)
        assert [line["status"] for line in _report(other)] == ["built"]


def test_a_retracted_request_holds_nothing_and_gets_its_index_back_with_a_slot(start: Any) -> None:
    runtime = start([PROMPT])
    runtime.view.table[1, :64] = runtime.view.table[0, :64]
    requests = [Request(), Request()]
    for number, request in enumerate(requests):
        runtime.admit(request, str(number), [*PROMPT, number], NAMESPACE)
    for length in (66, 67, 68):
        _step(runtime, _decode_batch(runtime, ["0", "1"], [length, length]))
    assert runtime.snapshot()["largest_group"] == 2
    runtime.slot_freed(requests[1], 1, finished=False)
    assert (runtime.residency.num_users(), runtime.requests.get("1")) == (1, None)
    _step(runtime, _decode_batch(runtime, ["0"], [68]))
    runtime.slot_taken(requests[1])
    assert (runtime.residency.num_users(), runtime.counters.hits) == (2, 2)
    # It comes back in another row, with other slots, while the first one decodes on.
    for length in (69, 70, 71):
        outs = _step(runtime, _decode_batch(runtime, ["0", "1"], [length, length + 1], rows=[0, 4]))
        assert all(out is not None for out in outs)
    for number, request in enumerate(requests):
        runtime.slot_freed(request, (0, 4)[number], finished=True)
    state = runtime.snapshot()
    assert (state["index_users"], state["requests"]) == (0, 0)


def test_a_retraction_builds_what_is_whole_and_gives_the_lease_back(start: Any) -> None:
    runtime, request = start(build="prefill"), Request()
    runtime.admit(request, "a", [*PROMPT, 7], NAMESPACE)
    _prefill(runtime, "a", 65)
    runtime.slot_freed(request, 0, finished=False)
    assert [line["status"] for line in _report(runtime)] == ["built"]
    runtime.slot_taken(request)
    _prefill(runtime, "a", 1, first=64)
    runtime.slot_freed(request, 0, finished=True)
    assert len(_report(runtime)) == 1, "a prompt is reported once"


def test_a_retraction_in_the_middle_of_a_prefill_is_a_rejected_capture(start: Any) -> None:
    runtime, request = start(build="prefill"), Request()
    runtime.admit(request, "a", [*PROMPT, 7], NAMESPACE)
    _prefill(runtime, "a", 30)
    runtime.slot_freed(request, 0, finished=False)
    runtime.slot_taken(request)
    _prefill(runtime, "a", 5, first=60)  # the rest came out of the cache
    runtime.slot_freed(request, 0, finished=True)
    (line,) = _report(runtime)
    assert (line["status"], line["reason"]) == ("failed", "capture_rejected")
    assert (len(runtime.builds), runtime.store.list()) == (0, ())


def test_a_request_with_a_slot_that_vanishes_gives_all_back(start: Any) -> None:
    """The net: of a streaming session's slot SGLang does not say that it is given back."""
    runtime, request, other = start([OTHER], build="prefill"), Request(), Request()
    indexed = Request()
    runtime.admit(indexed, "indexed", [*OTHER, 7], NAMESPACE)
    runtime.admit(request, "a", [*PROMPT, 7], NAMESPACE)
    _prefill(runtime, "a", 30)
    del request, indexed
    gc.collect()
    runtime.admit(other, "b", [1, 2], NAMESPACE)
    assert runtime.builds is not None
    assert (runtime.builds.recorder.take("a"), len(runtime.builds)) == (None, 0)
    assert (runtime.residency.num_users(), len(runtime.requests)) == (0, 1)


# -- weights that are replaced in place ------------------------------------------------------------------------------


def test_after_a_weight_update_nothing_is_used_or_looked_up(start: Any) -> None:
    runtime = start([PROMPT], share_prefixes=True)
    first, second = Request(), Request()
    runtime.admit(first, "a", [*PROMPT, 1], NAMESPACE)
    assert planned(runtime, _decode_batch(runtime, ["a"], [66]))
    runtime.weights_updated(replaced=True)
    assert "updated in place" in str(runtime.planner.refusal)
    assert not planned(runtime, _decode_batch(runtime, ["a"], [67]))
    runtime.admit(second, "b", [*PROMPT, 2], NAMESPACE)
    assert not planned(runtime, _decode_batch(runtime, ["b"], [66]))
    assert runtime.counters.fallbacks == {"index_mismatch": 2}
    assert runtime.counters.hits == 1


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize("changed", [True, False])
def test_a_failed_weight_update_leaves_indexes_in_use_if_the_weights_are_shown_to_be_the_same(
    start: Any, noted: bool, changed: bool
) -> None:
    runtime, request = start([PROMPT]), Request()
    if noted:
        runtime.weights.note()
    runtime.admit(request, "a", [*PROMPT, 1], NAMESPACE)
    if changed:
        runtime.view.weight[3, 3] = torch.nextafter(runtime.view.weight[3, 3], torch.tensor(9.0))
    runtime.weights_updated(replaced=False)
    used = planned(runtime, _decode_batch(runtime, ["a"], [66]))
    assert used == (noted and not changed)
    assert runtime.counters.fallbacks == ({} if used else {"index_mismatch": 1})
