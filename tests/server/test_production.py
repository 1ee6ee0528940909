"""Half of a long document selected, and long suffix tokens selected from: counted, and answers beside dense ones. What
requests share without any index is read once, and answers stay those of dense decode.
"""

from __future__ import annotations

from typing import Any

import pytest

from scripts.needle.tasks import make_document
from tests.server.harness import PRODUCTION

pytestmark = pytest.mark.boot("production")
QUESTIONS = 12
OWN_TOKENS = 4096
TOKENS = 24


def test_half_of_a_long_document_answers_as_all_of_it(production: Any, texts: Any) -> None:
    asked = [(texts.large.text, question) for question in texts.large.questions[:QUESTIONS]]
    result, delta, answers = production.asked_twice(asked)
    assert result.dense > 0.5, f"the model does not answer the dense questions: {result}"
    assert result.difference >= -1 / QUESTIONS, result
    steps = sum(reply.completion_tokens - 1 for reply in answers)
    assert delta.sparse_rows in production.rows(steps, QUESTIONS)
    assert (delta.dense_rows, delta.fallbacks) == (0, {})
    assert delta.per_layer("prefix_tokens_per_layer") == [delta.sparse_rows * 5120] * 6
    assert delta.per_layer("attended_tokens_per_layer") == [delta.sparse_rows * PRODUCTION["min_top_k"]] * 6


def test_long_own_tokens_are_selected_from_and_answers_found(production: Any, texts: Any) -> None:
    own = make_document("many_keys", seed=611, num_tokens=OWN_TOKENS, num_questions=QUESTIONS)
    before_any = production.settled()["suffix_keep_ratio"]
    asked = [(f"{texts.first.text} {own.text}", question) for question in own.questions]
    result, delta, _ = production.asked_twice(asked)
    assert result.dense > 0.8, f"the model does not answer the dense questions: {result}"
    assert result.difference >= -1 / QUESTIONS, result
    assert delta.before["suffix_keep_ratio"] == before_any, "dense requests select nothing"
    assert delta.sparse_rows > 0
    assert delta.after["suffix_keep_ratio"] < 0.9


def test_requests_on_one_prompt_decode_as_a_group_and_equal_dense(production: Any, texts: Any) -> None:
    prompts = [texts.ask(texts.unindexed, n) for n in range(4)] + [texts.ask(texts.elsewhere, 0)]
    _, delta = production.during(lambda: [production.generate(prompt, TOKENS, sparse=False) for prompt in prompts])
    assert delta.cascade_steps == 0, "a request asked alone, or one that opts out, shares nothing"
    _, delta = production.compared_together(
        prompts,
        TOKENS,
        lambda found: found.cascade_steps > TOKENS // 2 and found.cascade_rows >= 4 * found.cascade_steps,
    )
    assert delta.cascade_steps > TOKENS // 2
    assert delta.cascade_rows >= 4 * delta.cascade_steps
    assert (delta.hits, delta.sparse_rows) == (0, 0)


@pytest.mark.parametrize("documents", [("elsewhere", "unindexed"), ("first", "second")], ids=["shared", "indexed"])
def test_members_come_and_go(production: Any, texts: Any, documents: tuple[str, str]) -> None:
    """Different lengths: the founder of a group leaves first, and its row is taken by the next prefill. The overlap
    schedule gives rows of finished requests away while the step that still holds them runs.
    """
    assert "disable_overlap_schedule=False" in production.log.read_text().replace("'", "").replace(": ", "=")
    jobs = [(texts.ask(getattr(texts, name), n), 4 + 7 * n) for n in range(4) for name in documents]
    least = 0 if "first" in documents else 9
    _, delta = production.compared_together(jobs, TOKENS, lambda found: found.cascade_steps >= least, times=2)
    assert delta.cascade_steps >= least
    shared = delta.after["decode"]
    assert (shared["requests"], shared["compared"], shared["refusal"]) == (0, 0, None)


def test_requests_that_opt_out_ride_along(production: Any, texts: Any) -> None:
    prompts = [texts.ask(texts.unindexed, n) for n in range(6)]
    alone = [production.generate(prompt, TOKENS, sparse=False) for prompt in prompts]
    jobs = [lambda p=p, s=i < 4: production.generate(p, TOKENS, sparse=s) for i, p in enumerate(prompts)]
    batch, delta = production.together_until(jobs, lambda found: found.cascade_steps > TOKENS // 2)
    assert [a.ids for a in batch] == [a.ids for a in alone]
    assert delta.cascade_steps > TOKENS // 2
