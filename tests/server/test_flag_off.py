"""Without `--sparse-attn`, SGLang is what it was: the output of the model by another implementation, no state of ours.

That the hooks then only delegate: `tests/compat/test_seams.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from scripts.needle.vocabulary import encode
from tests.server.harness import MODEL, by_transformers


@pytest.fixture(scope="module")
def with_plugin(serve: Any) -> Any:
    return serve(environment={"SGLANG_PLUGINS": "sparse_attn,sparse_attn_cpu"}, sleep_on_idle=None)


def test_with_the_flag_off_answers_are_those_of_transformers(with_plugin: Any, texts: Any) -> None:
    prompts = [texts.ask(texts.first, 0), texts.ask(texts.second, 1), texts.first.questions[2].text]
    assert [with_plugin.generate(prompt, 12).ids for prompt in prompts] == by_transformers(
        MODEL, [encode(prompt) for prompt in prompts], 12
    )
    assert "sparse attention" not in with_plugin.log.read_text()


def test_with_the_flag_off_the_server_shows_no_sparse_state(with_plugin: Any) -> None:
    assert "sparse_attn" not in with_plugin.get("/get_server_info")["internal_states"][0]
    assert with_plugin.generate("the", 2, sparse=False).decode_steps == 1, "the opt-out means nothing here"
