"""On a GPU: beside HiCache (L2) a prefix that comes back from host memory is decoded as before, behind its index.

    python -m pytest tests/gpu/test_hicache.py

SPARSE_ATTN_TEST_HICACHE_IO names HiCache's io backend, where the default (kernel) cannot be used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.needle.tasks import make_document
from tests.gpu.serving import PAGED, prebuilt, served
from tests.server.harness import DISK, SPARSE_CONFIG, Answer, Server

pytestmark = pytest.mark.gpu

POOL, TOKENS, QUESTIONS = 24_576, 8192, 8
FLAGS = [*PAGED, "--max-total-tokens", str(POOL), "--max-running-requests", "8"]
HICACHE = ["--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-write-policy", "write_through"]
HICACHE += ["--hicache-io-backend", os.environ.get("SPARSE_ATTN_TEST_HICACHE_IO", "kernel")]
CONFIG = {**DISK, **SPARSE_CONFIG, "decode_path": "sparse"}

SHARED = make_document("many_keys", seed=81, num_tokens=TOKENS, num_questions=QUESTIONS)
OTHERS = [make_document("many_keys", seed=seed, num_tokens=TOKENS, num_questions=1) for seed in range(82, 86)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """With HiCache, on a store with the index of one document; its pool holds three."""
    store = prebuilt(tmp_path, [{"id": "shared", "text": SHARED.text}], CONFIG, FLAGS)
    with served(store, CONFIG, [*FLAGS, *HICACHE], tmp_path) as server:
        yield server


def test_a_prefix_that_comes_back_from_host_memory_is_decoded_as_before(server: Server) -> None:
    asked = [f"{SHARED.text} {question.text}" for question in SHARED.questions]

    def from_host(answers: list[Answer]) -> list[int]:
        """Tokens of their prompts that came from host memory."""
        return [int((answer.meta.get("cached_tokens_details") or {}).get("host", 0)) for answer in answers]

    def ask(sparse: bool = True) -> list[Answer]:
        return [server.generate(prompt, 12, sparse=sparse, to_the_end=True) for prompt in asked]

    server.generate(SHARED.text, 1)
    before, first = server.during(ask)
    for other in OTHERS:
        server.generate(other.text, 1)
    after, second = server.during(ask)
    for answers, name in ((before, "device"), (after, "host"), (ask(sparse=False), "dense")):
        right = sum(question.score(answer.text) for question, answer in zip(SHARED.questions, answers, strict=True))
        print(f"{name}: {right} of {QUESTIONS} right, from host {from_host(answers)}")
    assert from_host(before) == [0] * QUESTIONS
    assert from_host(after)[0] >= TOKENS - 64, after[0].meta
    assert [answer.ids for answer in after] == [answer.ids for answer in before]
    for answers, delta in ((before, first), (after, second)):
        assert (delta.hits, delta.fallbacks, delta.dense_rows) == (QUESTIONS, {}, 0)
        assert delta.sparse_rows in server.rows(sum(answer.decode_steps for answer in answers), QUESTIONS)
