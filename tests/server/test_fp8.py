"""Servers whose KV cache is in fp8: indexes are of the keys as they are stored, and answers those of dense decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.server.harness import EXACT_CONFIG, SPARSE_CONFIG, Answer

pytestmark = pytest.mark.full

FP8 = {"kv_cache_dtype": "fp8_e4m3"}
METHODS = {"methods": {"ab_sparse": {}, "token_index": {}}}
TOKENS = 16
END = 1
"""Token id of `<end>`, where an answer is over."""


def _answers(found: Sequence[Answer]) -> list[tuple[int, ...]]:
    """Ids up to the end of each answer: of what follows the model is not sure, and rows of a batch round otherwise."""
    assert all(END in one.ids for one in found)
    return [one.ids[: one.ids.index(END) + 1] for one in found]


@pytest.fixture(scope="module")
def stored(prebuild: Any, texts: Any, tmp_path_factory: Any) -> Any:
    prompts = [{"id": "first", "text": texts.first.text}, {"id": "second", "text": texts.second.text}]
    return prebuild(tmp_path_factory.mktemp("fp8"), prompts, config={**EXACT_CONFIG, **METHODS}, **FP8)


@pytest.fixture(scope="module")
def server(serve: Any, stored: Any) -> Any:
    shared = {"share_prefixes": True, "min_shared_tokens": 512}
    return serve(stored.store, {**EXACT_CONFIG, **METHODS, **shared}, **FP8)


def test_indexed_and_other_requests_in_one_batch_equal_dense(server: Any, stored: Any, texts: Any) -> None:
    assert [stored.line(name)["status"] for name in ("first", "second")] == ["built", "built"]
    prompts = [texts.ask(doc, n) for n in range(3) for doc in (texts.first, texts.second, texts.unindexed)]
    _, delta = server.compared_together(prompts, TOKENS, said=_answers)
    assert (delta.sparse_rows, delta.hits, delta.fallbacks) == (6 * (TOKENS - 1), 6, {"no_index": 3})
    assert server.state()["model"]["kv_dtype"] == "float8_e4m3fn"


def test_requests_that_share_slots_without_an_index_equal_dense(server: Any, texts: Any) -> None:
    prompts = [texts.ask(texts.unindexed, n) for n in range(4)]
    _, delta = server.compared_together(prompts, TOKENS, lambda found: found.cascade_steps > TOKENS // 2, _answers)
    assert delta.cascade_steps > TOKENS // 2


def test_few_of_the_positions_find_the_answers(serve: Any, stored: Any, texts: Any) -> None:
    """The index that was built of fp8 keys ranks positions by them."""
    server = serve(stored.store, {**SPARSE_CONFIG, **METHODS}, **FP8)
    right, delta = 0.0, server.delta()
    for number, question in enumerate(texts.first.questions[:10]):
        right += question.score(server.generate(texts.ask(texts.first, number), to_the_end=True).text)
    server.done(delta)
    assert (delta.hits, delta.fallbacks, delta.dense_rows) == (10, {}, 0)
    assert right >= 8


def test_an_index_of_another_kv_dtype_is_not_used(serve: Any, built: Any, texts: Any) -> None:
    server = serve(built.store, EXACT_CONFIG, **FP8)
    _, delta = server.during(lambda: server.generate(texts.ask(texts.first, 0), 4))
    assert (delta.sparse_rows, delta.hits, delta.fallbacks) == (0, 0, {"index_mismatch": 1})
