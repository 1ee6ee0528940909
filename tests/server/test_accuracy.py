"""A keep ratio of 10% over all layers, counted, and the needle tasks at 8K beside dense."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_ext.quality.evaluate import ask_many, keep_ratio_between, paired
from sglang_ext.quality.tasks import make_document

pytestmark = pytest.mark.full

NUM_TOKENS = 8192
QUESTIONS = {"single_needle": 16, "many_keys": 48}


@pytest.fixture(scope="module")
def documents() -> Any:
    return {task: make_document(task, 501, NUM_TOKENS, count) for task, count in QUESTIONS.items()}


@pytest.fixture(scope="module")
def asked(serve: Any, prebuild: Any, sparse_config: Any, documents: Any, tmp_path_factory: Any) -> Any:
    """Every question dense and sparse: (server, state before, state after, dense, sparse, questions)."""
    serve.close()
    prompts = [{"id": task, "text": document.text} for task, document in documents.items()]
    job = prebuild(tmp_path_factory.mktemp("accuracy"), prompts, config=sparse_config)
    assert job.status == 0, job.output[-3000:]
    server = serve(job.store, sparse_config)
    questions = [question for document in documents.values() for question in document.questions]
    texts = [f"{document.text} {question.text}" for document in documents.values() for question in document.questions]
    longest = max(question.max_new_tokens for question in questions)
    ask_many(server.url, [document.text for document in documents.values()], sparse=False, max_new_tokens=1)
    dense = ask_many(server.url, texts, sparse=False, concurrency=4, max_new_tokens=longest)
    before = server.settled()
    sparse = ask_many(server.url, texts, sparse=True, concurrency=4, max_new_tokens=longest)
    return server, before, server.settled(), dense, sparse, questions


def test_counted_keep_ratio_over_all_layers_is_at_most_a_tenth(asked: Any) -> None:
    _, before, after, _, _, _ = asked
    ratio = keep_ratio_between(before, after)
    assert ratio is not None
    assert 0.05 < ratio <= 0.10
    for layer in range(6):
        attended = after["attended_tokens_per_layer"][layer] - before["attended_tokens_per_layer"][layer]
        prefix = after["prefix_tokens_per_layer"][layer] - before["prefix_tokens_per_layer"][layer]
        assert attended / prefix <= 0.10, f"layer {layer}"


def test_every_decode_step_of_every_layer_selected_its_budget(asked: Any, sparse_config: Any) -> None:
    _, before, after, _, sparse, _ = asked
    steps = sum(reply.completion_tokens - 1 for reply in sparse)
    assert after["sparse_rows"] - before["sparse_rows"] == steps
    assert after["dense_rows"] == before["dense_rows"]
    assert after["fallbacks"] == before["fallbacks"]
    budget = int(sparse_config["keep_ratio"] * NUM_TOKENS)
    for layer in range(6):
        attended = after["attended_tokens_per_layer"][layer] - before["attended_tokens_per_layer"][layer]
        assert attended / steps == pytest.approx(budget, rel=0.02), f"tokens per step and row in layer {layer}"
        assert after["selections_per_layer"][layer] > before["selections_per_layer"][layer]


def test_needle_accuracy_at_8k_stays_within_two_points_of_dense(asked: Any) -> None:
    _, before, after, dense, sparse, questions = asked
    outcome = {
        name: [question.score(reply.text) for question, reply in zip(questions, replies, strict=True)]
        for name, replies in (("dense", dense), ("sparse", sparse))
    }
    result = paired(outcome["dense"], outcome["sparse"])
    print("PAIRED", json.dumps({**vars(result), "keep_ratio": keep_ratio_between(before, after)}))
    assert result.dense > 0.5, f"the model does not answer the dense questions: {result}"
    assert result.count >= 64, "one lost question must weigh less than two points"
    assert result.difference >= -0.02, result
