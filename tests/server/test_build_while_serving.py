"""A server that finds out by itself what requests share, builds an index of it beside serving, and uses it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sglang_ext.quality.tasks import make_document
from tests.server.harness import SPARSE_CONFIG, Pool

TOKENS = 4096


def test_a_document_that_requests_share_is_indexed_and_answers_stay_right(serve: Pool, tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    config: dict[str, Any] = {**SPARSE_CONFIG, "build": "shared", "build_share": 0.5, "build_report": str(report)}
    server = serve(tmp_path, config, fresh=True)
    document = make_document("many_keys", seed=4, num_tokens=TOKENS, num_questions=12)
    asked = [f"{document.text} {question.text}" for question in document.questions]
    assert server.state()["builds"]["prefixes"] == 0
    right = []
    for number, prompt in enumerate(asked[:3]):  # computed, found in the cache, found again: due
        right.append(document.questions[number].score(server.generate(prompt, to_the_end=True).text))
    assert server.state()["builds"]["prefixes"] == 1
    deadline = time.monotonic() + 120
    while server.state()["builds"]["built"] == 0 and time.monotonic() < deadline:
        server.generate(asked[3], num_tokens=40)  # keys are taken while a request that has them decodes
    (line,) = report.read_text().splitlines()
    assert '"status": "built"' in line
    delta = server.delta()
    for number in range(4, 12):
        right.append(document.questions[number].score(server.generate(asked[number], to_the_end=True).text))
    server.done(delta)
    assert sum(right) >= 10
    assert (delta.hits, delta.dense_rows) == (8, 0)
    assert delta.sparse_rows > 0
    state = server.state()
    assert state["indexes_in_store"] == 1
    assert state["keep_ratio"] < 0.2
    assert state["builds"]["open"] == []
