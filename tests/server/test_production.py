"""Half of a long document selected, and long suffix tokens selected from: counted, and answers beside dense ones."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.needle.tasks import make_document
from tests.server.harness import PRODUCTION

pytestmark = pytest.mark.boot("production")
QUESTIONS = 12
OWN_TOKENS = 4096


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
