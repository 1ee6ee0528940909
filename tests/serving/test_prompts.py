"""`sglang-ext prebuild`: what is refused before any model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.calibration.prompts import read_calibration_prompts
from sglang_ext.cli import main
from sglang_ext.prefill.prompts import PromptError, read_prompts


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


BAD = {
    "not JSON": ("{", ":1: expected an object"),
    "no object": ("[1]", ":1: expected an object"),
    "unknown field": ('{"text": "x"}\n{"txt": "x"}', ":2: expected an object"),
    "wrong type": ('{"input_ids": ["a"]}', "input_ids"),
    "neither": ('{"id": "a"}', "exactly one of text, input_ids and messages"),
    "both": ('{"text": "x", "input_ids": [1]}', "exactly one of text, input_ids and messages"),
    "twice": (
        '{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}',
        ":2: expected ids that differ, got 'a' as in line 1",
    ),
    "three": ('{"text": "x", "messages": []}', "got text and messages"),
    "tools of a text": ('{"text": "x", "tools": []}', "tools beside messages only"),
    "arguments of a text": ('{"text": "x", "chat_template_kwargs": {}}', "chat_template_kwargs beside messages only"),
    "special tokens of ids": ('{"input_ids": [1], "add_special_tokens": false}', "add_special_tokens beside text only"),
    "id with an escape": ('{"id": "a\\u001b[1m", "text": "x"}', ":1: expected an id of at most 256 printable"),
    "empty": ("\n\n", "at least one prompt"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    text, message = BAD[name]
    path = _file(tmp_path, text)
    with pytest.raises(PromptError) as caught:
        read_prompts(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PromptError, match="readable JSONL"):
        read_prompts(path)


def _prebuild(tmp_path: Path, prompts: str, *more: str) -> int:
    store = str(tmp_path / "store")
    return main(["prebuild", "--model-path", "nowhere", "--prompts", prompts, "--store", store, *more])


@pytest.mark.parametrize("name", BAD)
def test_the_command_ends_with_2_before_it_starts_anything(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _prebuild(tmp_path, str(_file(tmp_path, BAD[name][0]))) == 2
    assert BAD[name][1] in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_a_missing_prompts_file_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _prebuild(tmp_path, str(tmp_path / "none.jsonl")) == 2
    error = capsys.readouterr().err
    assert "none.jsonl" in error
    assert "check --prompts" in error


def test_a_bad_configuration_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path, '{"text": "x"}')
    assert _prebuild(tmp_path, str(path), "--sparse-attn-config", '{"nope": 1}') == 2
    assert "Known keys" in capsys.readouterr().err


def test_wrong_usage_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["prebuild"], ["nope"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2
    assert "usage: sglang-ext" in capsys.readouterr().err
