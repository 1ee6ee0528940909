"""The prompts of prebuild and calibration jobs: JSON lines, checked before any model is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sglang_ext.config import distinct

#: What may stand around a line's object: white space, other ends of lines, a byte order mark.
_AROUND = " \t\r\u0085\u2028\u2029\ufeff"


class PromptError(ValueError):
    """A prompts file that cannot be used; says file, line, what was expected, what came."""


class LineNumber(str):
    """The id of a prompt that was given none. No index gets it as a name."""


class PromptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a prompt is made of. Exactly one of text, input_ids and messages is given.

    Attributes:
        id: name of the prompt in reports, and of its index; its line number (`LineNumber`) when not given.
        text: the prompt as text, tokenized as the server does for `/generate` and `/v1/completions`.
        input_ids: the prompt as token ids.
        messages: the leading messages of a chat, rendered and tokenized as the server does for
            `/v1/chat/completions`. May be empty where tools alone are shared.
        tools: the tools of the chat requests, in OpenAI's form.
        chat_template_kwargs: of the chat requests.
        add_special_tokens: False for a text that has its BOS already; None or True: as the server does.
    """

    id: str = ""
    text: str | None = None
    input_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


class Prompt(PromptLine, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One shared prompt, with SGLang's `extra_key` and `cache_salt` (before 0.5.18 it is joined into extra_key) of the
    requests that will share it.
    """

    extra_key: str | None = None
    cache_salt: str | None = None


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Read a JSONL file of prompts, one at least, as `read_lines` does."""
    lines, _ = read_lines(path, Prompt, flag="--prompts", example='{"id": "a", "text": "..."}')
    if not lines:
        raise PromptError(f"{path}: expected at least one prompt, got none")
    return [prompt for _, prompt in lines]


_Line = TypeVar("_Line", bound=PromptLine)


def read_lines(
    path: str | os.PathLike[str], kind: type[_Line], *, flag: str, example: str
) -> tuple[list[tuple[str, _Line]], bytes]:
    """Read a JSONL file in UTF-8; empty lines are skipped. Only "\\n" ends a line: JSON strings may hold U+2028,
    U+2029 and U+0085.

    Args:
        kind: what a line is.
        flag, example: that named the file, and of a line; for messages.

    Returns:
        ("file:line", prompt with its id) of each line, and the file's bytes.

    Raises:
        PromptError: unreadable file, or a bad line (all are checked before any work begins).
    """
    file = Path(path)
    try:
        raw = file.read_bytes()
        lines = raw.decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{file}: expected a readable JSONL file, got: {error}; check {flag}") from error
    prompts: list[tuple[str, _Line]] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        where, content = f"{file}:{number}", line.strip(_AROUND)
        if not content:
            continue
        try:
            prompt = msgspec.json.decode(content, type=kind)
            json.loads(content, object_pairs_hook=distinct)
        except (ValueError, RecursionError) as error:  # ValueError: a key that stands there twice, too
            raise PromptError(f"{where}: expected an object like {example}, got: {error}; correct the line") from error
        check_prompt(prompt, where)
        name = prompt.id or LineNumber(number)
        if name in seen:
            raise PromptError(f"{where}: expected ids that differ, got {name!r} as in line {seen[name]}; rename one")
        seen[name] = number
        prompts.append((where, msgspec.structs.replace(prompt, id=name)))
    return prompts, raw


def check_prompt(prompt: PromptLine, where: str) -> None:
    """Raise PromptError, at a place in a file or so, where fields do not go together."""
    given = [name for name in ("text", "input_ids", "messages") if getattr(prompt, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise PromptError(
            f"{where}: expected exactly one of text, input_ids and messages, got {found}; correct the line"
        )
    for name, of in (("tools", "messages"), ("chat_template_kwargs", "messages"), ("add_special_tokens", "text")):
        if getattr(prompt, name) is not None and given != [of]:
            raise PromptError(f"{where}: expected {name} beside {of} only, got it beside {given[0]}; correct the line")
    try:
        msgspec.json.encode(prompt)
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{where}: expected text in Unicode, got {error.object[error.start]!a}, which is half a character; save or "
            "type it as UTF-8"
        ) from error
    if len(prompt.id) > 256 or not prompt.id.isprintable():
        raise PromptError(
            f"{where}: expected an id of at most 256 printable characters, got {prompt.id[:80]!a}; rename it"
        )
