"""The tokens of a shared prompt are those that SGLang makes of requests: its own tokenizer and chat code, no server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.compat.request_tokens import RequestTokens
from tests.compat.sglang_process import GROUP, in_sglang
from tests.llama_model import SYSTEM, TRAINS, WEATHER, llama_model

pytestmark = GROUP

TOOLS = [WEATHER, TRAINS]
DATE = {"date_string": "1 May 2031"}
IN_SYSTEM = {**DATE, "tools_in_user_message": False}
ASKED = {"role": "user", "content": "Where to?"}
NOTE = {"role": "user", "content": "A note on the"}
RENDERED = "<|begin_of_text|>a text that was rendered"

PROMPTS: dict[str, dict[str, Any]] = {
    "tools": {"messages": [SYSTEM], "tools": TOOLS, "chat_template_kwargs": DATE},
    "tools in system": {"messages": [SYSTEM], "tools": TOOLS, "chat_template_kwargs": IN_SYSTEM},
    "tools alone": {"messages": [], "tools": TOOLS, "chat_template_kwargs": DATE},
    "today": {"messages": [SYSTEM]},
    "user's own": {"messages": [SYSTEM, NOTE], "chat_template_kwargs": DATE},
    "no role": {"messages": [{"content": "a"}]},
    "an argument of its own": {"messages": [SYSTEM], "chat_template_kwargs": {"tokenize": True}},
    "text": {"text": "a text"},
    "rendered": {"text": RENDERED},
    "rendered, none added": {"text": RENDERED, "add_special_tokens": False},
}
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
REQUESTS: dict[str, dict[str, Any]] = {
    "of tools": {"messages": [SYSTEM, ASKED], "tools": TOOLS, "chat_template_kwargs": DATE},
    "of tools in system": {"messages": [SYSTEM, ASKED], "tools": TOOLS, "chat_template_kwargs": IN_SYSTEM},
    "of another tool": {"messages": [SYSTEM, ASKED], "tools": [WEATHER], "chat_template_kwargs": DATE},
    "of tools alone": {"messages": [ASKED], "tools": TOOLS, "chat_template_kwargs": DATE},
    "of user's own": {"messages": [SYSTEM, {**NOTE, "content": "A note on the theme"}], "chat_template_kwargs": DATE},
    "of text": {"text": "a text"},
}


def told_by_sglang(given: dict[str, Any]) -> dict[str, Any]:
    """The tokens of prompts and of requests, by name, and what is said of them."""
    import msgspec
    from sglang.srt.entrypoints.openai.protocol import TokenizeRequest
    from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize

    from sglang_ext.calibration.prompts import CalibrationPrompt, prompt_tokens
    from sglang_ext.compat.preview import ServerPreview
    from sglang_ext.prefill.prompt_tokens import prefix_tokens
    from sglang_ext.prefill.prompts import Prompt

    flags = ["--model-path", given["model"], "--device", "cpu", "--attention-backend", "torch_native"]
    source = ServerPreview(flags).tokens
    manager, templates = source._manager, source._templates
    served = OpenAIServingTokenize(manager, templates)
    out = {}
    for name, line in given["prompts"].items():
        try:
            ids, warnings = prefix_tokens(msgspec.convert(line, Prompt), source)
            out[name] = {"ids": ids, "text": manager.tokenizer.decode(ids), "warnings": warnings}
        except ValueError as error:
            out[name] = {"error": str(error)}
    for name, body in given["requests"].items():
        if "text" in body:
            ids, _ = source._wait(manager._tokenize_texts(body["text"]))
        else:
            ids = served._tokenize_chat_request(TokenizeRequest(**body))
        out[name] = {"ids": list(ids)}
    asked = msgspec.convert({**given["prompts"]["tools"], "question": given["question"]}, CalibrationPrompt)
    tokens, prefix_len = prompt_tokens(asked, source)
    out["calibration"] = {"ids": tokens.ids, "prefix_len": prefix_len}
    templates._jinja_template_content_format = "openai"  # as a template's that takes images
    try:
        source.of_chat(given["image"])
    except ValueError as error:
        out["image"] = {"error": str(error)}
    manager.tokenizer = None
    try:
        source.of_text("a")
    except ValueError as error:
        out["no tokenizer"] = {"error": str(error)}
    return out


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = str(llama_model(tmp_path_factory.mktemp("llama") / "model"))
    given = {"model": model, "prompts": PROMPTS, "requests": REQUESTS, "question": ASKED["content"], "image": IMAGE}
    return in_sglang("tests.compat.test_request_tokens:told_by_sglang", given)


@pytest.mark.parametrize("name", ["tools", "tools in system", "tools alone", "user's own"])
def test_messages_are_what_chat_requests_begin_with(told: Any, name: str) -> None:
    ids, request = told[name]["ids"], told[f"of {name}"]["ids"]
    assert len(ids) > 700
    assert request[: len(ids)] == ids
    assert told[name]["warnings"] == ()
    bos = ids[0]
    assert (told[name]["text"][:17], ids.count(bos)) == ("<|begin_of_text|>", 1)


def test_the_prefix_ends_where_requests_begin_to_differ(told: Any) -> None:
    assert told["tools"]["text"].rstrip().endswith("}"), "the last tool, in the message of the user"
    assert told["tools in system"]["text"].rstrip().endswith("user<|end_header_id|>")
    # "the" is one token, and "them" begins with it; what follows may also be its last letter's.
    assert told["user's own"]["text"].endswith("A note on the")
    ids = told["tools"]["ids"]
    assert told["of another tool"]["ids"][: len(ids)] != ids, "a request with other tools"


def test_a_template_that_renders_the_date_is_a_warning(told: Any) -> None:
    (warning,) = told["today"]["warnings"]
    assert "date or time that the chat template renders" in warning
    assert '"date_string"' in warning
    assert f"of {len(told['today']['ids'])}" in warning


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("image", "image"),
        ("no role", "expected a chat request, got: messages"),
        ("an argument of its own", "the chat template takes, got from it: KeyError('tokenize')"),
        ("no tokenizer", "--skip-tokenizer-init"),
    ],
)
def test_what_sglang_refuses_is_a_value_error(told: Any, name: str, words: str) -> None:
    assert words in told[name]["error"]


def test_ids_of_another_vocabulary_are_shown_as_ids() -> None:
    """Indexes of several models share a store; some tokenizers decode none but their own ids."""
    source = RequestTokens(SimpleNamespace(tokenizer=SimpleNamespace(decode=bytes)), None, lambda _: None)
    assert (source.text([65, 66]), source.text([65, 5000])) == ("b'AB'", "65 5000")


def test_a_text_is_tokenized_as_requests_with_text_are_and_calibration_measures_the_request(told: Any) -> None:
    assert (told["text"]["ids"], told["text"]["warnings"]) == (told["of text"]["ids"], ())
    assert told["calibration"] == {"ids": told["of tools"]["ids"], "prefix_len": len(told["tools"]["ids"])}


def test_two_bos_are_a_warning_that_says_what_to_do(told: Any) -> None:
    twice, once = told["rendered"], told["rendered, none added"]
    assert twice["ids"] == [once["ids"][0], *once["ids"]]
    assert once["warnings"] == ()
    (warning,) = twice["warnings"]
    for words in ('"messages"', '"add_special_tokens": false', "got two"):
        assert words in warning
