"""Half of a long document selected, and long own tokens selected from: counted, and answers beside dense ones."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_ext.quality.evaluate import ask_many, paired
from sglang_ext.quality.tasks import Document, make_document
from tests.server.harness import PRODUCTION

pytestmark = pytest.mark.boot("production")
QUESTIONS = 12
OWN_TOKENS = 4096


def _compare(server: Any, text: str, document: Document) -> tuple[Any, Any, Any, Any]:
    """(paired outcome, state before the sparse answers, state behind them, the sparse answers)."""
    questions = document.questions[:QUESTIONS]
    asked = [f"{text} {question.text}" for question in questions]
    longest = max(question.max_new_tokens for question in questions)
    server.generate(text, 1, sparse=False)
    dense = ask_many(server.url, asked, sparse=False, concurrency=4, max_new_tokens=longest)
    before = server.settled()
    sparse = ask_many(server.url, asked, sparse=True, concurrency=4, max_new_tokens=longest)
    scores = (
        [question.score(reply.text) for question, reply in zip(questions, replies, strict=True)]
        for replies in (dense, sparse)
    )
    return paired(*scores), before, server.settled(), sparse


def _grown(before: Any, after: Any, name: str) -> list[int]:
    return [new - old for old, new in zip(before[name], after[name], strict=True)]


def test_half_of_a_long_document_answers_as_all_of_it(production: Any, texts: Any) -> None:
    result, before, after, sparse = _compare(production, texts.large.text, texts.large)
    assert result.dense > 0.5, f"the model does not answer the dense questions: {result}"
    assert result.difference >= -1 / QUESTIONS, result
    steps = sum(reply.completion_tokens - 1 for reply in sparse)
    rows = after["sparse_rows"] - before["sparse_rows"]
    assert rows in production.rows(steps, QUESTIONS)
    assert (after["dense_rows"], after["fallbacks"]) == (before["dense_rows"], before["fallbacks"])
    assert _grown(before, after, "prefix_tokens_per_layer") == [rows * 5120] * 6
    assert _grown(before, after, "attended_tokens_per_layer") == [rows * PRODUCTION["min_top_k"]] * 6


def test_long_own_tokens_are_selected_from_and_answers_found(production: Any, texts: Any) -> None:
    own = make_document("many_keys", seed=611, num_tokens=OWN_TOKENS, num_questions=QUESTIONS)
    text = f"{texts.first.text} {own.text}"
    before_any = production.settled()["private_keep_ratio"]
    result, before, after, _ = _compare(production, text, own)
    assert result.dense > 0.8, f"the model does not answer the dense questions: {result}"
    assert result.difference >= -1 / QUESTIONS, result
    assert before["private_keep_ratio"] == before_any, "dense requests select nothing"
    assert after["sparse_rows"] > before["sparse_rows"]
    assert after["private_keep_ratio"] < 0.9
