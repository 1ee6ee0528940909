"""On a GPU: an MLA model of random weights, attended in decode graphs, says what SGLang's own kernels say.

    python -m pytest -s tests/gpu/test_mla.py

All positions are kept, so these answers do not tell which channels an index has: tests/server/test_mla.py does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.serving import prebuilt, served
from tests.mla_model import LAYERS, mla_model
from tests.server.harness import DISK, Server, tokens_alike

pytestmark = pytest.mark.gpu

SIZES = {
    "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 64,
}  # fmt: skip
"""As DeepSeek-V2-Lite has them."""
TOKENS, SAID, TIE = 4096, 32, 0.05
"""TIE: nats that bfloat16 may turn."""
FLAGS = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
FLAGS += ["--dtype", "bfloat16", "--context-length", "8192", "--page-size", "16", "--chunked-prefill-size", "2048"]
FLAGS += ["--max-total-tokens", "32768", "--max-running-requests", "8", "--disable-prefill-cuda-graph"]
CONFIG: dict[str, Any] = {
    **DISK, "methods": {"token_index": {}, "two_level": {}}, "layer_plan": ["anchor"] * LAYERS, "guard_every": 0,
    "prefetch_policy": "wait_complete", "share_prefixes": True, "decode_path": "sparse", "min_sparse_prompt_len": 1024,
}  # fmt: skip
DOCUMENTS = [[random.Random(seed).randrange(3, 2000) for _ in range(TOKENS)] for seed in range(3)]
"""The last one has no index."""


def asked(document: int, number: int) -> list[int]:
    return [*DOCUMENTS[document], 5 + number, 9, 77 + number]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mla_model(tmp_path_factory.mktemp("mla") / "model", **SIZES)


@pytest.fixture(scope="module")
def store(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    prompts = [{"id": str(number), "input_ids": DOCUMENTS[number]} for number in range(2)]
    config = {**CONFIG, "method": "token_index"}
    return prebuilt(tmp_path_factory.mktemp("built"), prompts, config, FLAGS, model)


@pytest.fixture(params=["token_index", "two_level"])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(store: Path, model: Path, method: str, tmp_path: Path) -> Iterator[Server]:
    config = {**CONFIG, "method": method, "keep_ratio": 1.0 if method == "token_index" else 0.25}
    with served(store, config, FLAGS, tmp_path, model) as server:
        yield server


def test_answers_in_decode_graphs(server: Server, method: str) -> None:
    """All together, the last document without an index; then some behind that one, which they share exactly."""
    prompts = [asked(document, number) for document in range(3) for number in range(2)]
    dense = [server.generate(prompt, SAID, sparse=False) for prompt in prompts]
    calls = [lambda p=prompt: server.generate(p, SAID) for prompt in prompts]
    found, delta = server.during(lambda: server.together(calls))  # type: ignore[misc]
    assert delta.sparse_steps > SAID // 2
    assert set(delta.fallbacks) <= {"no_index"}
    ours = list(zip(prompts, found, strict=True))
    if method == "token_index":  # all positions
        agreed = [tokens_alike(one, of) for one, of in zip(found, dense, strict=True)]
        print(f"tokens that agree of {SAID}: {agreed}")
        assert sum(agreed) > len(agreed) * SAID // 2
    else:  # a quarter of the positions
        ours = ours[4:]
    calls = [lambda n=n: server.generate(asked(2, n), SAID) for n in range(4)]
    shared, delta = server.during(lambda: server.together(calls))  # type: ignore[misc]
    assert delta.cascade_steps > SAID // 2
    ours += [(asked(2, number), answer) for number, answer in enumerate(shared)]
    assert sum(tokens_alike(shared[number], dense[4 + number]) for number in range(2)) > SAID
    behind = [max(server.behind(prompt, answer)) for prompt, answer in ours]
    print(f"tokens at most {max(behind):.3f} nats behind dense's")
    assert max(behind) < TIE
