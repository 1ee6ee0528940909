"""Requests on one prefix without any index: what they share is read once, and answers stay those of dense decode."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.boot("production")
TOKENS = 24


@pytest.fixture
def server(production: Any) -> Any:
    return production


def test_requests_on_one_prompt_decode_as_a_group_and_equal_dense(server: Any, texts: Any) -> None:
    prompts = [texts.ask(texts.unindexed, n) for n in range(4)] + [texts.ask(texts.elsewhere, 0)]
    _, delta = server.during(lambda: [server.generate(prompt, TOKENS, sparse=False) for prompt in prompts])
    assert delta.cascade_steps == 0, "a request asked alone, or one that opts out, shares nothing"
    _, delta = server.compared_together(
        prompts,
        TOKENS,
        lambda found: found.cascade_steps > TOKENS // 2 and found.cascade_rows >= 4 * found.cascade_steps,
    )
    assert delta.cascade_steps > TOKENS // 2
    assert delta.cascade_rows >= 4 * delta.cascade_steps
    assert (delta.hits, delta.sparse_rows) == (0, 0)


def test_members_come_and_go(server: Any, texts: Any) -> None:
    """Different lengths: the founder of a group leaves first, and its row is taken by the next prefill."""
    jobs = [(texts.ask(doc, n), 4 + 7 * n) for n in range(4) for doc in (texts.elsewhere, texts.unindexed)]
    _, delta = server.compared_together(jobs, TOKENS, lambda found: found.cascade_steps > 8, times=2)
    assert delta.cascade_steps > 8
    shared = delta.after["decode"]
    assert (shared["requests"], shared["compared"], shared["refusal"]) == (0, 0, None)


def test_requests_that_opt_out_ride_along(server: Any, texts: Any) -> None:
    prompts = [texts.ask(texts.unindexed, n) for n in range(6)]
    alone = [server.generate(prompt, TOKENS, sparse=False) for prompt in prompts]
    jobs = [lambda p=p, s=i < 4: server.generate(p, TOKENS, sparse=s) for i, p in enumerate(prompts)]
    batch, delta = server.together_until(jobs, lambda found: found.cascade_steps > TOKENS // 2)
    assert [a.ids for a in batch] == [a.ids for a in alone]
    assert delta.cascade_steps > TOKENS // 2
