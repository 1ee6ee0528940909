"""On a GPU: behind a prefix in host memory, decode graphs say what they said while it lay on the device.

    python -m pytest -s tests/gpu/test_offload.py

SPARSE_ATTN_TEST_BACKEND names the attention backend, where the default (triton) cannot be used.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.needle.tasks import make_document
from tests.gpu.serving import PAGED, prebuilt, served
from tests.server.harness import DISK, SPARSE_CONFIG, Answer, Server

pytestmark = pytest.mark.gpu

TOKENS, QUESTIONS, SAID = 8192, 8, 24
FLAGS = [*PAGED, "--max-total-tokens", "32768", "--max-running-requests", "8", "--disable-prefill-cuda-graph"]
CONFIG: dict[str, Any] = {
    **DISK, **SPARSE_CONFIG, "decode_path": "sparse", "layer_plan": ["dense", *["anchor"] * 5], "guard_every": 0,
    "share_prefixes": True,
}  # fmt: skip
OFFLOAD = {"host_bytes": 64 << 20, "min_tokens": 1024, "resident_tokens": 16384}

SHARED = make_document("many_keys", seed=81, num_tokens=TOKENS, num_questions=QUESTIONS)
OTHER = make_document("multi_query", seed=82, num_tokens=TOKENS, num_questions=QUESTIONS)


@pytest.fixture(params=[1, 2], ids=["one-gpu", "two-gpus"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    if torch.cuda.device_count() < request.param:
        pytest.skip("expected a GPU for each tensor-parallel rank")
    prompts = [{"id": name, "text": one.text} for name, one in (("shared", SHARED), ("other", OTHER))]
    store, flags = prebuilt(tmp_path, prompts, CONFIG, FLAGS), [*FLAGS, "--tp-size", str(request.param)]
    with served(store, {**CONFIG, "offload": OFFLOAD}, flags, tmp_path) as server:
        yield server


def test_steps_behind_host_memory_say_what_they_said_on_the_device(server: Server) -> None:
    documents = (SHARED, OTHER)
    scored = [question for one in documents for question in one.questions]
    asked = [f"{one.text} {question.text}" for one in documents for question in one.questions]
    said = functools.partial(server.generate, num_tokens=SAID, to_the_end=True)

    def ask() -> tuple[list[Answer], list[Answer]]:
        calls = [functools.partial(said, prompt) for prompt in asked]
        return [call() for call in calls], server.together(calls[:4] + calls[-4:])

    # Its answers of one token leave no prefix in host memory: nothing decodes.
    dense = [said(prompt, sparse=False) for prompt in asked]
    assert server.settled()["offload"]["prefixes"] == {}
    first = [said(f"{one.text} {one.questions[0].text}") for one in documents]
    assert server.settled()["offload"]["prefixes"] == {"host": 2}
    begun = time.perf_counter()
    (alone, together), delta = server.during(ask)
    seconds = time.perf_counter() - begun
    state = server.settled()["offload"]
    right = [sum(q.score(a.text) for q, a in zip(scored, found, strict=True)) for found in (dense, alone)]
    print(f"right: dense {right[0]}, from host memory {right[1]} of {len(asked)}; {seconds:.1f} s; {state}")
    assert state["translated"] == len(asked) + 8
    assert delta.fallbacks == {}
    assert delta.dense_rows == 0
    for document, answer in zip((0, QUESTIONS), first, strict=True):
        assert alone[document].ids == answer.ids, "expected what the device's slots gave"
    assert [one.ids for one in together] == [one.ids for one in (*alone[:4], *alone[-4:])]
    assert right[1] >= right[0] - 1
    # SGLang's own graph again: what its kernels read was not made before replays of ours.
    assert said(asked[-1], sparse=False).ids == dense[-1].ids
    assert state["users"] == 0
    ranks = [rank["offload"] for rank in server.state()["ranks"]]
    for rank in ranks:
        assert rank.pop("residents")["wanted"] > 0
        assert rank["problem"] is None
    assert all(rank == ranks[0] for rank in ranks)
