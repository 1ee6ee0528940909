"""The same store under other page sizes, and in servers started anew."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import EXACT_CONFIG

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", params=["1", "64"], ids=["page-1", "page-64"])
def server(request: Any, serve: Any, built: Any) -> Any:
    """A process that has just been started on a store that another one filled."""
    return serve(built.store, EXACT_CONFIG, fresh=True, page_size=request.param)


def test_the_first_request_after_a_restart_prefills_the_prefix_itself_and_decodes_sparsely(
    server: Any, texts: Any
) -> None:
    prompt = texts.ask(texts.first, 0)
    first, delta = server.during(lambda: server.generate(prompt, 12))
    assert delta.before["sparse_rows"] == 0
    assert first.cached_tokens == 0
    assert (delta.sparse_rows, delta.dense_rows) == (first.decode_steps, 0)
    assert (delta.hits, delta.fallbacks) == (1, {})
    assert first.ids == server.generate(prompt, 12, sparse=False).ids


def test_mixed_batches_equal_dense(server: Any, texts: Any) -> None:
    suffix = " ".join(texts.unindexed.text.split()[:150])
    prompts = [
        texts.ask(texts.first, 2),
        texts.ask(texts.first, 3),
        texts.ask(texts.second, 2),
        f"{texts.first.text} {suffix} {texts.first.questions[4].text}",
        f"{texts.long} {texts.first.questions[5].text}",
        f"{' '.join(texts.long.split()[:2000])} {texts.first.questions[6].text}",
        texts.ask(texts.unindexed, 0),
    ]
    _, delta = server.compared_together(prompts, 16, lambda found: found.after["largest_group"] >= 2)
    assert (delta.sparse_rows, delta.dense_rows) == (6 * 15, 15)
    assert (delta.hits, delta.fallbacks) == (6, {"no_index": 1})
    assert delta.after["largest_group"] >= 2


def test_cold_prefills_of_one_prompt_at_once_equal_dense(server: Any, texts: Any) -> None:
    prompts = [texts.ask(texts.second, n) for n in (4, 4, 5)]
    _, delta = server.compared_together(prompts, 24, cold=True)
    assert (delta.sparse_rows, delta.dense_rows, delta.hits) == (3 * 23, 0, 3)
