"""The prompts of a prebuild job: JSON lines, checked before any model is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class PromptError(ValueError):
    """A prompts file that cannot be used; says file, line, what was expected, what came."""


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One shared prompt.

    Attributes:
        id: name of the prompt in the report; its line number when not given.
        text: the prompt as text, tokenized as the server does. Exactly one of text and input_ids is given.
        input_ids: the prompt as token ids.
        extra_key: SGLang's `extra_key` of the requests that will share it.
        cache_salt: SGLang's `cache_salt` of these requests (0.5.23; 0.5.16 joins it into extra_key).
    """

    id: str = ""
    text: str | None = None
    input_ids: list[int] | None = None
    extra_key: str | None = None
    cache_salt: str | None = None


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Read a JSONL file of prompts; empty lines are skipped.

    Raises:
        PromptError: unreadable file, no prompt in it, or a bad line (all are checked before any work begins).
    """
    file = Path(path)
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{file}: expected a readable JSONL file, got: {error}; check --prompts") from error
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = msgspec.json.decode(line, type=Prompt)
        except msgspec.DecodeError as error:
            raise PromptError(
                f'{file}:{number}: expected an object like {{"id": "a", "text": "..."}}, got: {error}; correct the line'
            ) from error
        if (prompt.text is None) == (prompt.input_ids is None):
            raise PromptError(f"{file}:{number}: expected exactly one of text and input_ids; correct the line")
        prompt = msgspec.structs.replace(prompt, id=prompt.id or str(number))
        if prompt.id in seen:
            raise PromptError(
                f"{file}:{number}: expected ids that differ, got {prompt.id!r} as in line {seen[prompt.id]}; rename one"
            )
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise PromptError(f"{file}: expected at least one prompt, got none")
    return prompts
