"""`sglang-ext prebuild`: what is refused before any model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.calibration.prompts import read_calibration_prompts
from sglang_ext.cli import main
from sglang_ext.prefill.prompts import read_prompts


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    return path


def test_prompts_are_read_and_lines_without_id_get_their_number(tmp_path: Path) -> None:
    text = '{"id": "a", "text": "x"}\n\n{"input_ids": [1, 2], "extra_key": "t", "cache_salt": "s"}\n'
    first, second = read_prompts(_file(tmp_path, text))
    assert (first.id, first.text, first.input_ids) == ("a", "x", None)
    assert (second.id, second.input_ids, second.extra_key, second.cache_salt) == ("3", [1, 2], "t", "s")


ODD = {
    "U+2028 inside": ('{"id": "a", "text": "x\u2028y"}', "x\u2028y"),
    "U+2029 inside": ('{"id": "a", "text": "x\u2029y"}', "x\u2029y"),
    "U+0085 inside": ('{"id": "a", "text": "x\u0085y"}', "x\u0085y"),
    "mark inside": ('{"id": "a", "text": "\ufeffx"}', "\ufeffx"),
    "mark before": ('\ufeff{"id": "a", "text": "x"}', "x"),
    "U+2028 before": ('\u2028{"id": "a", "text": "x"}', "x"),
    "U+0085 behind": ('{"id": "a", "text": "x"}\u0085', "x"),
    "carriage return": ('{"id": "a", "text": "x"}\r', "x"),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("read", [read_prompts, lambda path: read_calibration_prompts(path)[0]], ids=["build", "dev"])
def test_only_a_line_feed_ends_a_line(tmp_path: Path, read: Any, name: str) -> None:
    line, text = ODD[name]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(f'{line}\n{{"id": "b", "text": "z"}}\n\ufeff\n'.encode())
    assert [(prompt.id, prompt.text) for prompt in read(path)] == [("a", text), ("b", "z")]


def test_a_prompt_may_be_messages_with_tools(tmp_path: Path) -> None:
    line = {"messages": [{"role": "system", "content": "s"}], "tools": [{"type": "function"}]}
    (prompt,) = read_prompts(_file(tmp_path, json.dumps({**line, "chat_template_kwargs": {"a": 1}})))
    assert (prompt.messages, prompt.tools, prompt.chat_template_kwargs) == (*line.values(), {"a": 1})


BAD: dict[str, tuple[str | bytes, str]] = {
    "deep": ('{"messages": ' + "[" * 9999, ":1: expected an object like"),
    "not JSON": ("{", ":1: expected an object"),
    "no object": ("[1]", ":1: expected an object"),
    "unknown field": ('{"text": "x"}\n{"txt": "x"}', ":2: expected an object"),
    "wrong type": ('{"input_ids": ["a"]}', "input_ids"),
    "a key twice": ('{"text": "x"}\n{"text": "x", "text": "y"}', ":2: expected an object"),
    "a tool's key twice": ('{"messages": [], "tools": [{"a": 1, "a": 2}]}', "got: key 'a' stands there twice, remove"),
    "neither": ('{"id": "a"}', "exactly one of text, input_ids and messages"),
    "both": ('{"text": "x", "input_ids": [1]}', "exactly one of text, input_ids and messages"),
    "twice": ('{"id": "a", "text": "x"}\n' * 2, ":2: expected ids that differ, got 'a' as in line 1"),
    "three": ('{"text": "x", "messages": []}', "got text and messages"),
    "tools of a text": ('{"text": "x", "tools": []}', "tools beside messages only"),
    "arguments of a text": ('{"text": "x", "chat_template_kwargs": {}}', "chat_template_kwargs beside messages only"),
    "special tokens of ids": ('{"input_ids": [1], "add_special_tokens": false}', "add_special_tokens beside text only"),
    "id with an escape": ('{"id": "a\\u001b[1m", "text": "x"}', ":1: expected an id of at most 256 printable"),
    "empty": ("\n\n", "at least one prompt"),
    "no text": (b"\xff\xfe", "readable JSONL"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_ends_the_command_with_2_and_its_line_before_anything_starts(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = BAD[name]
    path, store = tmp_path / "prompts.jsonl", tmp_path / "store"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["prebuild", "--model-path", "nowhere", "--prompts", str(path), "--store", str(store)]) == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert message in said
    assert not store.exists()
