"""A keep ratio of 10% over all layers, counted, and the needle tasks at 8K beside dense. And long suffix tokens."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.needle.tasks import make_document
from scripts.servers import keep_ratio_between
from tests.server.harness import SPARSE_CONFIG

pytestmark = pytest.mark.full

NUM_TOKENS = 8192
QUESTIONS = {"single_needle": 16, "many_keys": 48}
LIMIT, OWN_TOKENS = 512, 4096


@pytest.fixture(scope="module")
def built(serve: Any, prebuild: Any, texts: Any, tmp_path_factory: Any) -> Any:
    """(documents, the store of their indexes)."""
    serve.close()
    documents = [make_document(task, 501, NUM_TOKENS, count) for task, count in QUESTIONS.items()]
    prompts = [{"id": document.task, "text": document.text} for document in documents]
    prompts.append({"id": "first", "text": texts.first.text})
    job = prebuild(tmp_path_factory.mktemp("accuracy"), prompts, config=SPARSE_CONFIG)
    assert job.status == 0, job.output[-3000:]
    return documents, job.store


def test_a_tenth_of_all_layers_is_selected_and_answers_stay_within_two_points_of_dense(built: Any, serve: Any) -> None:
    documents, store = built
    server = serve(store, SPARSE_CONFIG)
    asked = [(document.text, question) for document in documents for question in document.questions]
    result, delta, answers = server.asked_twice(asked)
    ratio = keep_ratio_between(delta.before, delta.after)
    assert ratio is not None
    assert 0.05 < ratio <= 0.10
    steps = sum(reply.completion_tokens - 1 for reply in answers)
    assert (delta.sparse_rows, delta.dense_rows, delta.fallbacks) == (steps, 0, {}), "every step of every layer"
    attended, prefix = (delta.per_layer(f"{name}_tokens_per_layer") for name in ("attended", "prefix"))
    for layer in range(6):
        assert attended[layer] / prefix[layer] <= 0.10, f"layer {layer}"
        assert attended[layer] / steps == pytest.approx(int(0.1 * NUM_TOKENS), rel=0.02), f"layer {layer}"
    assert result.dense > 0.5, f"the model does not answer the dense questions: {result}"
    assert result.count >= 64, "one lost question must weigh less than two points"
    assert result.difference >= -0.02, result


def test_what_stands_in_a_requests_own_tokens_is_found(built: Any, serve: Any, texts: Any) -> None:
    """A tenth of them is selected, behind a prefix whose index says nothing of them."""
    server = serve(built[1], {**SPARSE_CONFIG, "suffix_dense_tokens": LIMIT})
    own = make_document("many_keys", seed=611, num_tokens=OWN_TOKENS, num_questions=32)
    result, delta, answers = server.asked_twice([(f"{texts.first.text} {own.text}", one) for one in own.questions])
    assert delta.sparse_rows == sum(reply.completion_tokens - 1 for reply in answers)
    assert delta.before["suffix_keep_ratio"] is None, "dense requests select nothing"
    # A tenth of what is covered, which is all but the last 256 to 512 tokens.
    assert delta.after["suffix_keep_ratio"] == pytest.approx(SPARSE_CONFIG["keep_ratio"], abs=0.01)
    assert result.dense > 0.8, f"the model does not answer the dense questions: {result}"
    assert result.difference >= -0.04, result
