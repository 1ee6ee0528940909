"""A keep ratio of 10% over all layers, counted, and answers beside dense. And long suffix tokens."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.needle.tasks import make_document
from scripts.servers import keep_ratio_between
from tests.server.harness import SPARSE_CONFIG

pytestmark = pytest.mark.full

LIMIT, OWN_TOKENS = 512, 4096


def test_a_tenth_of_all_layers_is_selected_and_answers_stay_close_to_dense(serve: Any, store: Any, texts: Any) -> None:
    server, large = serve(store, SPARSE_CONFIG), texts.large
    result, delta, answers = server.asked_twice([(large.text, question) for question in large.questions])
    ratio = keep_ratio_between(delta.before, delta.after)
    assert ratio is not None
    assert 0.05 < ratio <= 0.10
    steps = sum(reply.completion_tokens - 1 for reply in answers)
    assert (delta.sparse_rows, delta.dense_rows, delta.fallbacks) == (steps, 0, {}), "every step of every layer"
    assert delta.per_layer("attended_tokens_per_layer") == [steps * 512] * 6
    assert result.dense > 0.5, f"the model does not answer the dense questions: {result}"
    assert result.difference >= -0.05, result


def test_what_stands_in_a_requests_own_tokens_is_found(serve: Any, store: Any, texts: Any) -> None:
    """A tenth of them is selected, behind a prefix whose index says nothing of them."""
    server = serve(store, {**SPARSE_CONFIG, "suffix_dense_tokens": LIMIT})
    own = make_document("many_keys", seed=611, num_tokens=OWN_TOKENS, num_questions=32)
    result, delta, answers = server.asked_twice([(f"{texts.first.text} {own.text}", one) for one in own.questions])
    assert delta.sparse_rows == sum(reply.completion_tokens - 1 for reply in answers)
    assert delta.before["suffix_keep_ratio"] is None, "dense requests select nothing"
    # A tenth of what is covered, which is all but the last 256 to 512 tokens.
    assert delta.after["suffix_keep_ratio"] == pytest.approx(SPARSE_CONFIG["keep_ratio"], abs=0.01)
    assert result.dense > 0.8, f"the model does not answer the dense questions: {result}"
    assert result.difference >= -0.04, result
