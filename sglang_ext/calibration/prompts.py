"""The prompts of a calibration: JSON lines, checked before any model is loaded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sglang_ext.prefill.prompts import PromptError


class CalibrationPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One prompt of the development set.

    Attributes:
        id: name of the prompt; its line number when not given.
        text: the prompt as text, tokenized as the server does. Exactly one of text and input_ids is given.
        input_ids: the prompt as token ids.
        question: what follows the prompt, as text or as token ids, of the prompt's kind: the prompt is then the
            prefix, and the question's tokens are measured with the decode steps.
        task: kind of prompt, for the report; without it the id up to its first "-".
    """

    id: str = ""
    text: str | None = None
    input_ids: list[int] | None = None
    question: str | list[int] | None = None
    task: str = ""


def read_calibration_prompts(path: str | os.PathLike[str]) -> tuple[list[CalibrationPrompt], str]:
    """Read a JSONL file of prompts; empty lines are skipped.

    Returns:
        The prompts with ids and tasks filled in, and the digest (SHA-256) of the file.

    Raises:
        PromptError: unreadable file, fewer than two prompts, the same prefix in all of them, or a bad line (all are
            checked before any work begins).
    """
    file = Path(path)
    try:
        raw = file.read_bytes()
        # Only "\n" ends a line: JSON strings may hold U+2028 and U+0085, which `splitlines` would cut at.
        lines = raw.decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{file}: expected a readable JSONL file, got: {error}; check --data") from error
    prompts: list[CalibrationPrompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            prompt = msgspec.json.decode(line, type=CalibrationPrompt)
        except msgspec.DecodeError as error:
            raise PromptError(
                f'{where}: expected an object like {{"id": "a", "text": "...", "question": "..."}}, got: {error}; '
                "correct the line"
            ) from error
        _check(prompt, where)
        name = prompt.id or str(number)
        if name in seen:
            raise PromptError(f"{where}: expected ids that differ, got {name!r} as in line {seen[name]}; rename one")
        seen[name] = number
        prompts.append(msgspec.structs.replace(prompt, id=name, task=prompt.task or name.partition("-")[0]))
    if len(prompts) < 2:
        raise PromptError(
            f"{file}: expected at least two prompts, got {len(prompts)}; one half is fitted, the other compared"
        )
    if len({prefix_digest(prompt) for prompt in prompts}) < 2:
        raise PromptError(
            f"{file}: expected at least two different prompts, got {len(prompts)} with the same prefix; one half is "
            "fitted, the other compared, and they must not share it: add prompts of another text"
        )
    return prompts, hashlib.sha256(raw).hexdigest()


def _check(prompt: CalibrationPrompt, where: str) -> None:
    if (prompt.text is None) == (prompt.input_ids is None):
        raise PromptError(f"{where}: expected exactly one of text and input_ids; correct the line")
    if not (prompt.text or prompt.input_ids):
        raise PromptError(f"{where}: expected a prompt of at least one token, got an empty one; remove the line")
    if prompt.question is not None and isinstance(prompt.question, str) != (prompt.text is not None):
        raise PromptError(
            f"{where}: expected the question as {'text' if prompt.text is not None else 'token ids'}, as the prompt "
            "is; correct the line"
        )


def prefix_digest(prompt: CalibrationPrompt) -> str:
    """SHA-256 of the prompt without its question: equal for questions about one document."""
    return hashlib.sha256(msgspec.json.encode([prompt.text, prompt.input_ids])).hexdigest()


def held_out_ids(prompts: Sequence[CalibrationPrompt]) -> frozenset[str]:
    """Every second group of prompts in the order of tasks; both halves have as many groups of a task, but for one.

    A group is the prompts with the same prefix: its keys must not be fitted on and compared with. A prefix of several
    tasks is one group, of the task that comes first.
    """
    groups: dict[str, list[str]] = {}
    for prompt in sorted(prompts, key=lambda prompt: prompt.task):
        groups.setdefault(prefix_digest(prompt), []).append(prompt.id)
    return frozenset(name for group in list(groups.values())[1::2] for name in group)


def prompt_tokens(prompt: CalibrationPrompt, tokenize: Callable[[str], list[int]]) -> tuple[list[int], int | None]:
    """Token ids of prompt and question, and how many of them are the prefix (None: all, there is no question).

    A question of text is tokenized together with its prompt, joined by a space unless there is white space; the
    prefix ends where the tokens begin to differ from the prompt's own.

    Raises:
        ValueError: no token of the prompt stays the same with the question behind it.
    """
    if prompt.input_ids is not None:
        if not prompt.question:
            return prompt.input_ids, None
        assert not isinstance(prompt.question, str)
        return [*prompt.input_ids, *prompt.question], len(prompt.input_ids)
    text = prompt.text or ""
    alone = tokenize(text)
    if not prompt.question:
        return alone, None
    assert isinstance(prompt.question, str)
    gap = "" if text[-1:].isspace() or prompt.question[:1].isspace() else " "
    both = tokenize(f"{text}{gap}{prompt.question}")
    same = next((i for i, (a, b) in enumerate(zip(alone, both, strict=False)) if a != b), min(len(alone), len(both)))
    if same == 0:
        raise ValueError("expected the prompt's tokens in front of the question's, got others; give input_ids")
    return both, same
