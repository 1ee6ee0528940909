"""Schedules that move requests about: retraction under memory pressure, no prefix cache.

Requests that are aborted while they wait: by day without a server (`serving/test_lifetimes`).
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.harness import EXACT_CONFIG, REQUEST_SECONDS, Answer, Delta, Server

#: Room for the first document and 256 tokens more, and an admission that expects short answers.
SMALL_POOL: dict[str, Any] = {
    "max_total_tokens": "1792",
    "schedule_conservativeness": "0.1",
    "environment": {"SGLANG_EXT_CPU_SHORT_EXTEND": "1", "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"},
}


def retracted(server: Server, prompts: list[str]) -> tuple[Delta, int]:
    """Long answers in `SMALL_POOL`, of which some begin anew; how often. A request that is late finds room."""
    for _attempt in range(5):
        batch, delta = server.compared_together(prompts, 100, cold=True)
        if retractions := sum(answer.num_retractions for answer in batch):
            return delta, retractions
    pytest.fail("expected the pool to be too small for these requests")


@pytest.mark.boot("small-pool")
def test_retraction_under_memory_pressure_equals_dense(serve: Any, store: Any, texts: Any) -> None:
    server = serve(store, EXACT_CONFIG, **SMALL_POOL)
    prompts = [texts.ask(texts.first, n) for n in range(4)]
    delta, retractions = retracted(server, prompts)
    assert (delta.dense_rows, delta.hits, delta.fallbacks) == (0, 4, {})
    assert delta.sparse_rows == 4 * 99 - retractions, "a prefill after a retraction gives one token itself"


def _aborted(future: Future[Answer]) -> bool:
    """Whether a request ended by an abort; one that never began is answered by an error."""
    if future.exception(REQUEST_SECONDS) is not None:
        return True
    return bool(future.result().meta["finish_reason"]["type"] == "abort")


@pytest.mark.full
@pytest.mark.boot("small-pool")
def test_requests_aborted_while_they_wait_for_memory_give_their_index_back(serve: Any, store: Any, texts: Any) -> None:
    """Such a request was matched, but never got a slot: it holds nothing, and no slot is given back when it ends."""
    server = serve(store, EXACT_CONFIG, **SMALL_POOL)
    words = texts.unindexed.text.split()
    prompts = [f"{texts.first.text} {' '.join(words[n * 130 : n * 130 + 130])}" for n in range(6)]
    server.flush()
    delta = server.delta()
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(server.generate, p, 90, rid=f"crowd-{n}") for n, p in enumerate(prompts)]
        waited = False
        while not waited and not all(future.done() for future in running):
            state = server.state()
            unfinished = sum(not future.done() for future in running)
            waited = state["requests"] < unfinished and state["sparse_rows"] > delta.before["sparse_rows"]
            assert state["index_users"] <= state["requests"]
        assert waited, "expected one request to decode and another one to wait for memory"
        server.post("/abort_request", {"abort_all": True})
        aborted = [_aborted(future) for future in running]
    assert any(aborted), "expected requests that were running or waiting to be aborted"
    server.done(delta)
    assert server.generate(texts.ask(texts.first, 0), 4).decode_steps == 3


@pytest.mark.full
@pytest.mark.boot("no-radix")
def test_no_radix_cache_means_groups_of_one_and_equals_dense(serve: Any, store: Any, texts: Any) -> None:
    server = serve(store, EXACT_CONFIG, disable_radix_cache="")
    prompts = [texts.ask(texts.second, n) for n in range(3)]
    _, delta = server.compared_together(prompts, 12, cold=True)
    assert delta.after["largest_group"] == 1
    assert (delta.sparse_rows, delta.dense_rows) == (3 * 11, 0)
