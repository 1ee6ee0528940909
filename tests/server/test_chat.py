"""From nothing: a system prompt and two tools are prebuilt as `messages`; the OpenAI client's chat requests find them.

The tokenizer adds a BOS and the chat template renders it, as those of Llama 3 do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.llama_model import SYSTEM, TRAINS, WEATHER, llama_model
from tests.server.harness import EXACT_CONFIG

pytestmark = pytest.mark.full

TOOLS = [WEATHER, TRAINS]
DATE = {"date_string": "1 May 2031"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_model(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def chatted(model: Path, prebuild: Any, serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(the job, a server on its store, a client)."""
    serve.close()
    prompts = [{"id": "travel", "messages": [SYSTEM], "tools": TOOLS, "chat_template_kwargs": DATE}]
    job = prebuild(tmp_path_factory.mktemp("chat"), prompts, model=model)
    server = serve(job.store, EXACT_CONFIG, model_path=str(model))
    return job, server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


def ask(client: Any, tools: Any) -> Any:
    return client.chat.completions.create(
        model="default",
        messages=[SYSTEM, {"role": "user", "content": "By train to the sea, please."}],
        tools=tools,
        max_tokens=6,
        temperature=0.0,
        extra_body={"chat_template_kwargs": DATE, "ignore_eos": True, "return_meta_info": True},
    )


def test_a_chat_request_of_the_openai_client_finds_the_index(chatted: Any) -> None:
    job, server, client = chatted
    assert job.status == 0, job.output[-4000:]
    assert "warnings" not in job.line("travel"), "tests/compat/test_request_tokens.py has those that are warned of"
    reply, delta = server.during(lambda: ask(client, TOOLS))
    assert reply.usage.prompt_tokens > job.line("travel")["num_tokens"] > 1024
    assert delta.sparse_rows in server.rows(5)
    assert delta.fallbacks == {}
    (told,) = reply.choices[0].meta_info["sparse_attn"]
    assert (told["index"], told["steps"]["sparse"], told["reasons"]) == ("travel", 5, [])
    assert reply.usage.sparse_attn == [told]
    other, delta = server.during(lambda: ask(client, [WEATHER]))
    assert (delta.sparse_rows, delta.fallbacks) == (0, {"no_index": 1}), "other tools"
    assert other.choices[0].meta_info["sparse_attn"][0]["reasons"] == ["no_index"]
