"""A server that finds out by itself what requests share, builds an index of it beside serving, and uses it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from scripts.needle.tasks import make_document
from tests.server.harness import SPARSE_CONFIG, Pool, Server

pytestmark = pytest.mark.full


def _at_rest(server: Server, seconds: float = 60.0) -> dict[str, Any]:
    """The state once no request is known, builds have come to a stop, and what has all its pieces is stored."""
    state, deadline = server.settled(), time.monotonic() + seconds
    while True:
        time.sleep(0.2)
        builds, state = state["builds"], server.state()
        whole = any(one["pieces"] == one["of"] for one in state["builds"]["open"])
        if (state["builds"] == builds and not whole) or time.monotonic() > deadline:
            return state


def test_earlier_turns_of_a_conversation_that_grows_are_attended_sparsely(serve: Pool, tmp_path: Path) -> None:
    """Each turn is asked once and begins with all turns before it. What two later turns began with has an index."""
    config: dict[str, Any] = {**SPARSE_CONFIG, "build": "shared", "build_share": 1.0, "min_sparse_prompt_len": 1024}
    server = serve(tmp_path, config, fresh=True)
    document = make_document("many_keys", seed=8, num_tokens=6 * 1280, num_questions=8)
    words = document.text.split()
    indexed = []
    for turn in range(1, 7):
        before = server.state()
        server.generate(" ".join(words[: turn * len(words) // 6]), num_tokens=100)
        after = _at_rest(server)
        tokens = after["prefix_tokens_per_layer"][0] - before["prefix_tokens_per_layer"][0]
        indexed.append(tokens // max(1, after["sparse_rows"] - before["sparse_rows"]))
    # [0, 0, 0, 1280, 2560, 3840] where no build is behind; the fourth turn is the first that can have an index.
    assert indexed[:3] == [0, 0, 0]
    assert indexed == sorted(indexed)
    assert set(indexed) <= {0, 1280, 2560, 3840}
    assert indexed[-1] >= 2560
    right = [
        question.score(server.generate(f"{document.text} {question.text}", to_the_end=True).text)
        for question in document.questions
    ]
    assert sum(right) >= 6
    _an_operator_asks_for_an_index(server)


def _an_operator_asks_for_an_index(server: Server) -> None:
    """Of a prompt that nobody has asked yet: the first request that brings it leaves its index."""
    document = make_document("many_keys", seed=9, num_tokens=1280, num_questions=2)
    built = server.state()["builds"]["built"]
    assert server.post("/sparse_attn/build", {"text": document.text})["tokens"] == 1280
    server.generate(document.text, num_tokens=100)
    server.until(lambda state: state["builds"]["built"] == built + 1)
    answer = server.generate(f"{document.text} {document.questions[0].text}", 4)
    assert answer.told["prefix_tokens"] == 1280
