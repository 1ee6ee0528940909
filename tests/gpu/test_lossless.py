"""On a GPU: lossless decode in decode graphs says what dense decoding says, but for near-ties of bf16.

    python -m pytest -s tests/gpu/test_lossless.py

SPARSE_ATTN_TEST_BACKEND names the attention backend, where the default (triton) cannot be used.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.needle.tasks import make_document
from tests.server.harness import DISK, MODEL, SPARSE_CONFIG, Server, equal_tokens

pytestmark = pytest.mark.gpu

TOKENS, QUESTIONS, SAID, TIE = 8192, 4, 96, 0.05
"""TIE: log-probability by which bf16 may turn one token into another."""
FLAGS = ["--attention-backend", os.environ.get("SPARSE_ATTN_TEST_BACKEND", "triton"), "--sampling-backend", "pytorch"]
FLAGS += ["--grammar-backend", "none"]
FLAGS += ["--dtype", "bfloat16", "--context-length", "16384", "--page-size", "16", "--max-total-tokens", "65536"]
FLAGS += ["--max-running-requests", "32", "--disable-prefill-cuda-graph"]
CONFIG: dict[str, Any] = {
    **DISK, **SPARSE_CONFIG, "layer_plan": ["dense", *["anchor"] * 5], "share_prefixes": True, "keep_ratio": 0.05,
}  # fmt: skip
ROUNDS: dict[str, Any] = {"exactness": "verify", "draft_tokens": 3, "min_shared_tokens": 1024}

DOCUMENTS = [
    make_document(task, seed=81, num_tokens=TOKENS, num_questions=QUESTIONS)
    for task in ("many_keys", "multi_query", "many_keys")
]
"""The last one has no index."""
PROMPTS = [f"{one.text} {one.questions[number].text}" for one in DOCUMENTS for number in range(QUESTIONS)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    lines = [json.dumps({"id": str(number), "text": one.text}) for number, one in enumerate(DOCUMENTS[:2])]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "sglang_ext.cli", "prebuild", "--model-path", str(MODEL), "--store"]
    command += [str(folder / "store"), "--prompts", str(folder / "prompts.jsonl")]
    command += ["--sparse-attn-config", json.dumps(CONFIG), "--", *FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "store"


@pytest.fixture(params=["sparse", "auto"])
def server(store: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    config = json.dumps({**CONFIG, **ROUNDS, "decode_path": request.param, "search_period": 3})
    ours = ["--sparse-attn", "--sparse-attn-store", str(store), "--sparse-attn-config", config]
    server = Server([*FLAGS, *ours], {}, tmp_path / "server.log", MODEL)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def test_tokens_are_those_of_dense_decoding(server: Server) -> None:
    """Requests alone, then all together and of different lengths: some end while others are in a round."""
    dense = [server.generate(one, SAID, sparse=False, return_logprob=True, top_logprobs_num=2) for one in PROMPTS]
    alone, delta = server.during(lambda: [server.generate(one, SAID) for one in PROMPTS])
    assert delta.drafted > delta.accepted > delta.drafted / 2
    together = []
    for turn in range(4):
        sizes = [SAID - (turn + number) % 4 * 16 for number in range(len(PROMPTS))]
        calls = [
            lambda one=one, size=size: server.generate(one, size) for one, size in zip(PROMPTS, sizes, strict=True)
        ]
        found, delta = server.during(lambda calls=calls: server.together(calls))  # type: ignore[misc]
        assert delta.drafted > 0
        assert delta.cascade_steps > SAID / 8
        together += found
    agreed = [equal_tokens(answer, of, TIE) for answer, of in zip(alone, dense, strict=True)]
    print(f"tokens that agree of {SAID}: {agreed}")
    shorter = [replace(of, ids=of.ids[: len(one.ids)]) for one, of in zip(together, 4 * dense, strict=True)]
    shared = [equal_tokens(answer, of, TIE) / len(of.ids) for answer, of in zip(together, shorter, strict=True)]
    print(f"together: {[round(share, 2) for share in shared]}")
    assert sum(agreed) > len(agreed) * SAID * 0.8
    assert sum(shared) > len(shared) * 0.8
    log = server.tail(1 << 20)
    steps = re.findall(r"Decode batch.*cuda graph: (\w+)", log)
    assert steps
    assert set(steps) == {"True"}
