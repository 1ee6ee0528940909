"""An MLA model of random weights: indexes of its latent keys, and answers that are those of dense decode."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mla_model import LAYERS, RANK, ROPE, mla_model
from tests.server.harness import by_transformers
from tests.server.jobs import Prebuilt
from tests.server.test_tensor_parallel import cores

FIRST, SECOND, SHORT = (random.Random(size).choices(range(3, 2000), k=size // 10) for size in (6400, 6409, 4800))
KEPT = 32
CONFIG: dict[str, Any] = {
    "method": "token_index",
    "methods": {
        "token_index": {},
        "ab_sparse": {"num_channels": KEPT, "representation": "ball"},
        "two_level": {
            "first": {"method": "ab_sparse", "num_channels": KEPT},
            "second": {"method": "token_index", "num_channels": KEPT},
        },
        "csattention": {"num_subspaces": 8},
    },
    "keep_ratio": 1.0,
    "layer_plan": ["anchor"] * LAYERS,
    "prefetch_policy": "wait_complete",
    "share_prefixes": True,
    "min_sparse_prompt_len": 512,
    "min_shared_tokens": 256,
}
CHUNK = "256"
TOKENS = 16


def ask(document: list[int], number: int) -> Any:
    return [*document, 5 + number, 9, 77 + number]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mla_model(tmp_path_factory.mktemp("mla") / "model")


@pytest.fixture(scope="module")
def stored(prebuild: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Prebuilt:
    prompts = [{"id": name, "input_ids": ids} for name, ids in (("first", FIRST), ("second", SECOND))]
    folder = tmp_path_factory.mktemp("stored")
    job: Prebuilt = prebuild(folder, prompts, config=CONFIG, model=model, chunked_prefill_size=CHUNK)
    assert [line["status"] for line in job.report] == ["built"] * 2, job.output[-4000:]
    return job


@pytest.fixture(scope="module")
def server(serve: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """It indexes what it prefills in chunks; at night stores are prebuilt."""
    config = {**CONFIG, "build": "prefill"}
    server = serve(tmp_path_factory.mktemp("built"), config, model=model, chunked_prefill_size=CHUNK)
    for document in (FIRST, SECOND):
        server.generate(document, 1)
    return server


def test_all_positions_of_an_index_are_those_of_dense_decode(server: Any) -> None:
    prompts = [ask(document, number) for document in (FIRST, SECOND) for number in range(2)]
    _, delta = server.compared(prompts, TOKENS)
    assert (delta.dense_rows, delta.hits, delta.fallbacks) == (0, 4, {})
    assert delta.sparse_rows in server.rows(4 * (TOKENS - 1), 4)
    assert delta.per_layer("attended_tokens_per_layer") == [len(FIRST) * delta.sparse_rows] * LAYERS
    found = server.state()["model"]
    assert [found[name] for name in ("num_kv_heads", "head_dim", "v_head_dim")] == [1, RANK + ROPE, RANK]


def test_indexed_and_other_requests_in_one_batch_equal_dense(server: Any) -> None:
    prompts = [ask(document, number) for number in range(2, 4) for document in (FIRST, SECOND, SHORT)]
    _, delta = server.compared_together(prompts, TOKENS)
    assert delta.sparse_rows in server.rows(4 * (TOKENS - 1), 4)
    assert delta.fallbacks == {"short_prefix": 2}


def test_requests_that_share_slots_without_an_index_equal_dense(server: Any) -> None:
    prompts = [ask(SHORT, number) for number in range(4)]
    _, delta = server.compared_together(prompts, TOKENS, lambda found: found.cascade_steps > TOKENS // 2)
    assert delta.cascade_steps > TOKENS // 2


def test_answers_are_those_of_the_model_outside_sglang(server: Any, model: Path) -> None:
    prompt = ask(FIRST, 9)
    assert [server.generate(prompt, TOKENS).ids] == by_transformers(model, [prompt], TOKENS)


@pytest.mark.full
@pytest.mark.parametrize("method", ["token_index", "ab_sparse", "two_level"])
def test_some_positions_are_selected_in_every_step(serve: Any, stored: Prebuilt, model: Path, method: str) -> None:
    server = serve(stored.store, {**CONFIG, "method": method, "keep_ratio": 0.25, "min_top_k": 64}, model=model)
    _, delta = server.during(lambda: [server.generate(ask(FIRST, number), TOKENS) for number in range(2)])
    assert (delta.sparse_rows, delta.dense_rows, delta.fallbacks) == (2 * (TOKENS - 1), 0, {})
    assert delta.per_layer("attended_tokens_per_layer") == [len(FIRST) // 4 * delta.sparse_rows] * LAYERS


@pytest.mark.full
def test_two_ranks_attend_the_one_head_that_both_hold(serve: Any, stored: Prebuilt, model: Path) -> None:
    server = serve(stored.store, CONFIG, model=model, tp_size="2", environment={"SGLANG_CPU_OMP_THREADS_BIND": cores()})
    _, delta = server.compared([ask(FIRST, number) for number in range(2)], TOKENS)
    assert delta.sparse_rows in server.rows(2 * (TOKENS - 1), 2)


@pytest.mark.full
def test_a_server_indexes_what_its_requests_share(serve: Any, model: Path, tmp_path: Path) -> None:
    config = {**CONFIG, "build": "shared", "build_share": 1.0, "guard_every": 0}
    server = serve(tmp_path, config, model=model)
    for number in range(3):
        server.generate(ask(FIRST, number), 60)
    server.until(lambda state: state["builds"]["built"] == 1)
    _, delta = server.compared([ask(FIRST, 3)], TOKENS)
    assert (delta.hits, delta.dense_rows) == (1, 0)


@pytest.mark.full
def test_queries_of_a_chunk_without_a_cached_prefix_are_recorded_as_others_are(
    stored: Prebuilt, prebuild: Any, model: Path, tmp_path: Path
) -> None:
    """SGLang absorbs queries of all chunks but the first one. Here that has all tokens, in the store 256 of 640. Few
    centroids of k-means fall elsewhere by rounding.
    """
    whole = prebuild(tmp_path, [{"id": "first", "input_ids": FIRST}], config=CONFIG, model=model)
    assert whole.line("first")["digest"] == stored.line("first")["digest"], whole.output[-3000:]
    chunked, unchunked = stored.index("first").arrays, whole.index("first").arrays
    assert chunked.keys() == unchunked.keys()
    for key, left in chunked.items():
        if key.name.endswith("channels"):
            assert np.array_equal(left, unchunked[key]), key
        elif key.name == "csattention.centroids":
            assert np.isclose(left, unchunked[key], atol=1e-2).mean() > 0.9, key
