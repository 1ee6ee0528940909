"""Long own tokens behind an indexed prefix: selected from, on the shipped model. Two servers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_ext.quality.evaluate import ask_many, paired
from sglang_ext.quality.tasks import Document, make_document

pytestmark = pytest.mark.full

LIMIT = 512
OWN_TOKENS, QUESTIONS = 4096, 32


@pytest.fixture(scope="module")
def own() -> Document:
    """What a request brings along behind the prefix: no index speaks of it."""
    return make_document("many_keys", seed=611, num_tokens=OWN_TOKENS, num_questions=QUESTIONS)


@pytest.fixture(scope="module")
def store(serve: Any, prebuild: Any, sparse_config: Any, texts: Any, tmp_path_factory: Any) -> Any:
    serve.close()
    prompts = [{"id": "first", "text": texts.first.text}]
    job = prebuild(tmp_path_factory.mktemp("private"), prompts, config=sparse_config)
    assert job.status == 0, job.output[-3000:]
    return job.store


def test_what_stands_in_a_requests_own_tokens_is_found(
    serve: Any, store: Any, sparse_config: Any, texts: Any, own: Document
) -> None:
    server = serve(store, {**sparse_config, "private_dense_tokens": LIMIT})
    asked = [f"{texts.first.text} {own.text} {question.text}" for question in own.questions]
    longest = max(question.max_new_tokens for question in own.questions)
    dense = ask_many(server.url, asked, sparse=False, concurrency=4, max_new_tokens=longest)
    before = server.settled()
    sparse = ask_many(server.url, asked, sparse=True, concurrency=4, max_new_tokens=longest)
    after = server.settled()
    result = paired(
        *(
            [one.score(reply.text) for one, reply in zip(own.questions, replies, strict=True)]
            for replies in (dense, sparse)
        )
    )
    print("PAIRED", json.dumps({**vars(result), "private_keep_ratio": after["private_keep_ratio"]}))
    assert after["sparse_rows"] - before["sparse_rows"] == sum(reply.completion_tokens - 1 for reply in sparse)
    assert before["private_keep_ratio"] is None, "dense requests select nothing"
    # A tenth of what is covered, which is all but the last 256 to 512 tokens.
    assert after["private_keep_ratio"] == pytest.approx(sparse_config["keep_ratio"], abs=0.01)
    assert result.dense > 0.8, f"the model does not answer the dense questions: {result}"
    assert result.difference >= -0.04, result
