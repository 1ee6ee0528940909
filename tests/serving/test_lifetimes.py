"""What a request holds, and from when to when: its index, a lease to build one, a place to be recorded in, its id.

A request that is aborted while it waits is never heard of again, and SGLang may keep its object for ever (its
`custom_params` name the request itself; after `/freeze_gc` nothing collects that). So these tests keep them, too.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.compat.response import Told
from sglang_ext.prefix.requests import CASCADE, SPARSE, Attachment, StepLog
from tests.serving.admitting import (
    DIM,
    KV_HEADS,
    LAYERS,
    NAMESPACE,
    OTHER,
    PROMPT,
    Request,
    decode_batch,
    ours,
    planned,
    prefill,
    report,
)


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
    assert ours(runtime, ["a"], [66])


def test_an_index_that_left_while_its_request_waited_is_loaded_again(start: Any) -> None:
    """Another one that waits, and may have been aborted, holds no memory."""
    nbytes = LAYERS * len(PROMPT) * KV_HEADS * DIM * 4
    small = start([PROMPT, OTHER], index_gpu_bytes=nbytes + nbytes // 2)
    one, two = Request(), Request()
    small.wait(one, "one", [*PROMPT, 7], NAMESPACE)
    small.wait(two, "two", [*OTHER, 7], NAMESPACE)
    small.slot_taken(one)
    assert ours(small, ["one"], [66])
    assert small.counters.hits == 2


def test_the_id_of_an_aborted_request_can_be_used_again(start: Any) -> None:
    runtime, aborted = start([PROMPT]), Request()
    runtime.wait(aborted, "a", [*OTHER, 7], NAMESPACE)
    runtime.came("a")
    assert ours(runtime, ["a"], [66])
    assert runtime.requests.of(aborted) is not None


@pytest.mark.parametrize("build", ["prefill", "shared", "capture"])
def test_a_request_that_waits_is_not_recorded_and_takes_no_lease(start: Any, build: str, tmp_path: Path) -> None:
    fields = {"build": build, "capture_folder": str(tmp_path) if build == "capture" else None}
    runtime, waiting = start(**fields), [Request() for _ in range(20)]
    for number, request in enumerate(waiting):
        runtime.wait(request, str(number), [*PROMPT, number], NAMESPACE)
    assert (len(runtime.builds), runtime.builds.recorder.num_captures) == (0, 0)
    assert report(runtime) == []
    if build == "prefill":
        other = start(store=runtime.store.folder, **fields)
        served = other.came("b")
        prefill(other, "b", 65)
        other.slot_freed(served, 0, finished=True)
        assert [line["status"] for line in report(other)] == ["built"]


def test_a_request_whose_prompt_was_cached_keeps_no_other_server_from_building(start: Any) -> None:
    """It may decode for minutes, and leaves no index at its end."""
    one = start(build="prefill")
    other = start(store=one.store.folder, build="prefill")
    cached = one.came("a")
    other.came("b")
    prefill(one, "a", 1, first=64)
    cold = other.came("c")
    prefill(other, "c", 65)
    other.slot_freed(cold, 0, finished=True)
    assert [line["status"] for line in report(other)] == ["skipped", "built"], "a had not begun when b came"
    one.slot_freed(cached, 0, finished=True)
    assert [(line["status"], line["reason"]) for line in report(one)] == [("failed", "capture_rejected")]


def test_a_retraction_builds_what_is_whole_and_gives_the_lease_back(start: Any) -> None:
    runtime = start(build="prefill")
    request = runtime.came("a")
    prefill(runtime, "a", 65)
    runtime.slot_freed(request, 0, finished=False)
    assert [line["status"] for line in report(runtime)] == ["built"]
    runtime.slot_taken(request)
    prefill(runtime, "a", 1, first=64)
    runtime.slot_freed(request, 0, finished=True)
    assert len(report(runtime)) == 1, "a prompt is reported once"


def test_a_step_whose_token_is_dropped_is_not_told(start: Any) -> None:
    """Behind a retraction prefill makes the token again; behind a round of lossless decode that did not keep it, a
    later step does, which may be SGLang's own.
    """
    runtime = start([PROMPT], share_prefixes=True, exactness="verify", guard_every=0)
    request = runtime.came("a")
    attachment = runtime.requests.of(request)

    def noted(tokens: range) -> dict[str, int]:
        for token in tokens:
            attachment.steps.note(token, SPARSE)
        return attachment.steps.counts(tokens.stop)

    assert noted(range(1, 6)) == {"sparse": 5, "cascade": 0, "dense": 0}
    runtime.slot_freed(request, 0, finished=False, tokens=5)  # the fifth's result has not come yet
    runtime.slot_taken(request)
    assert noted(range(6, 8)) == {"sparse": 6, "cascade": 0, "dense": 1}
    runtime.forwards.begin_round(decode_batch(runtime, ["a"], [attachment.prompt_len + 3]))
    assert attachment.steps.counts(8) == {"sparse": 2, "cascade": 0, "dense": 5}


def test_a_request_with_a_slot_that_vanishes_gives_all_back(start: Any) -> None:
    """The net: of a streaming session's slot SGLang does not say that it is given back."""
    runtime = start([OTHER], build="prefill")
    runtime.came("indexed", [*OTHER, 7])
    runtime.came("a")
    prefill(runtime, "a", 30)
    planned(runtime, ["indexed"], [66])
    assert runtime.snapshot()["decode"]["requests"] == 1
    runtime.held.clear()
    gc.collect()
    runtime.came("b", [1, 2])
    assert (runtime.builds.recorder.take("a"), len(runtime.builds)) == (None, 0)
    assert (runtime.residency.num_users(), len(runtime.requests)) == (0, 1)
    assert runtime.snapshot()["decode"]["requests"] == 0, "nor is anything known of its slots"


def test_a_request_that_is_aborted_behind_a_retraction_is_counted_once_as_one_that_ended(start: Any) -> None:
    runtime = start([PROMPT], share_prefixes=True)
    aborted, unanswered, again = (runtime.came(rid) for rid in ("aborted", "unanswered", "again"))
    for token in (1, 2):
        runtime.requests.of(aborted).steps.note(token, SPARSE)
    for request, tokens in ((aborted, 3), (unanswered, 1), (again, 3)):
        runtime.slot_freed(request, 0, finished=False, tokens=tokens)
    runtime.slot_taken(again)
    runtime.slot_freed(again, 0, finished=True, tokens=4)
    del aborted, unanswered, again, request
    runtime.held.clear()
    gc.collect()
    for rid in ("next", "behind"):
        runtime.came(rid)
    assert runtime.figures()["requests"] == {"sparse": 1, "dense": 1}
    assert runtime.figures()["dense_tokens"] == {"none": 3}


def test_after_a_weight_update_nothing_is_used_or_looked_up_and_the_log_says_so_once(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = start([PROMPT], share_prefixes=True)
    runtime.came("a")
    assert planned(runtime, ["a"], [66])
    for _ in range(2):
        runtime.weights_updated()
    assert caplog.text.count("off until a restart: the weights may have been updated in place; restart") == 1
    assert "updated in place" in str(runtime.planner.refusal)
    assert not planned(runtime, ["a"], [67])
    runtime.came("b", [*PROMPT, 2])
    assert not planned(runtime, ["b"], [66])
    assert (runtime.counters.fallbacks, runtime.counters.hits) == ({"index_mismatch": 2}, 1)


def test_a_log_of_steps_says_what_became_of_the_tokens_that_were_given() -> None:
    """Whatever is not noted is dense; the first token is prefill's."""
    log = StepLog()
    for token, way in ((2, SPARSE), (4, SPARSE), (5, CASCADE), (6, SPARSE)):
        log.note(token, way, 100 * token if way == SPARSE else 0)
    for token in (3, 5, 6):
        log.guarded(token)
    steps = {"sparse": 2, "cascade": 1, "dense": 2}
    assert log.told(6) == {"steps": steps, "selected_tokens": 300, "guarded_steps": 2}, "the last step is not over"
    assert log.told(7)["selected_tokens"] == 400
    log.keep(5)
    assert (log.told(5)["guarded_steps"], StepLog().told(1)["selected_tokens"]) == (1, 0)
    assert (StepLog().counts(1), StepLog().counts(0)) == ({"sparse": 0, "cascade": 0, "dense": 0},) * 2


@pytest.mark.parametrize(("stream", "incremental"), [(True, True), (True, False), (False, True)])
def test_what_is_told_comes_last_and_once(stream: bool, incremental: bool) -> None:
    """SGLang asks for slices by the numbers of tokens; of an incremental stream it cuts what it was given by them."""
    request, ended = Request(), [False, True]
    request.stream, request.finished = stream, lambda: ended.pop(0)
    told = Told(request, Attachment("r", prompt_len=5), incremental)
    found = [*told[0:3], *told[3:5]]
    summary = {"steps": {"sparse": 0, "cascade": 0, "dense": 4}, "index": None}
    summary |= {"prefix_tokens": 0, "selected_tokens": 0, "guarded_steps": 0, "reasons": []}
    assert found == ([None] * 4 if stream and incremental else []) + [summary]
