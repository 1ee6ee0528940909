"""The prompts of a calibration: JSON lines, checked before any model is loaded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import msgspec

from sglang_ext.prefill.prompt_tokens import PrefixTokens, TokenSource, count_common, prefix_tokens, tokens_with
from sglang_ext.prefill.prompts import PromptError, PromptLine, read_lines


class CalibrationPrompt(PromptLine, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One prompt of the development set.

    Attributes:
        question: what follows the prompt, as text (of `messages`: the user's message behind them) or as token ids, of
            the prompt's kind: the prompt is then the prefix, and the question's tokens are measured with the decode
            steps.
        task: kind of prompt, for the report; without it the id up to its first "-".
    """

    question: str | list[int] | None = None
    task: str = ""


def read_calibration_prompts(path: str | os.PathLike[str]) -> tuple[list[CalibrationPrompt], str]:
    """Read a JSONL file of prompts, as `read_lines` does.

    Returns:
        The prompts with ids and tasks filled in, and the digest (SHA-256) of the file.

    Raises:
        PromptError: fewer than two prompts, the same prefix in all of them, or what `read_lines` refuses.
    """
    example = '{"id": "a", "text": "...", "question": "..."}'
    lines, raw = read_lines(path, CalibrationPrompt, flag="--data", example=example)
    for where, prompt in lines:
        _check(prompt, where)
    prompts = [msgspec.structs.replace(p, task=p.task or p.id.partition("-")[0]) for _, p in lines]
    if len(prompts) < 2:
        raise PromptError(
            f"{path}: expected at least two prompts, got {len(prompts)}; one half is fitted, the other compared"
        )
    if len({prefix_digest(prompt) for prompt in prompts}) < 2:
        raise PromptError(
            f"{path}: expected at least two different prompts, got {len(prompts)} with the same prefix; one half is "
            "fitted, the other compared, and they must not share it: add prompts of another text"
        )
    return prompts, hashlib.sha256(raw).hexdigest()


def _check(prompt: CalibrationPrompt, where: str) -> None:
    if not (prompt.text or prompt.input_ids or prompt.messages is not None):
        raise PromptError(f"{where}: expected a prompt of at least one token, got an empty one; remove the line")
    if prompt.question is not None and isinstance(prompt.question, str) != (prompt.input_ids is None):
        raise PromptError(
            f"{where}: expected the question as {'text' if prompt.input_ids is None else 'token ids'}, as the prompt "
            "is; correct the line"
        )


def prefix_digest(prompt: CalibrationPrompt) -> str:
    """SHA-256 of the prompt without its question: equal for questions about one document."""
    alike = {"add_special_tokens": prompt.add_special_tokens is not False}
    parts = [alike.get(name, getattr(prompt, name) or None) for name in PromptLine.__struct_fields__ if name != "id"]
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()


def held_out_ids(prompts: Sequence[CalibrationPrompt]) -> frozenset[str]:
    """Every second group of prompts in the order of tasks; both halves have as many groups of a task, but for one.

    A group is the prompts with the same prefix: its keys must not be fitted on and judged by. A prefix of several
    tasks is one group, of the task that comes first.
    """
    groups: dict[str, list[str]] = {}
    for prompt in sorted(prompts, key=lambda prompt: prompt.task):
        groups.setdefault(prefix_digest(prompt), []).append(prompt.id)
    return frozenset(name for group in list(groups.values())[1::2] for name in group)


def prompt_tokens(prompt: CalibrationPrompt, source: TokenSource) -> tuple[PrefixTokens, int | None]:
    """Token ids of prompt and question, and how many of them are the prefix (None: all, there is no question).

    A question of text is tokenized together with its prompt, joined by a space unless there is white space; that of a
    chat is the user's message behind it. The prefix ends where the tokens begin to differ from the prompt's own.

    Raises:
        ValueError: no token of the prompt stays the same with the question behind it, or SGLang refuses the prompt.
    """
    alone = prefix_tokens(prompt, source)
    if not prompt.question:
        return alone, None
    if not isinstance(prompt.question, str):
        return alone._replace(ids=[*alone.ids, *prompt.question]), len(alone.ids)
    spaced = prompt.text is None or prompt.text[-1:].isspace() or prompt.question[:1].isspace()
    both = tokens_with(prompt, source, prompt.question if spaced else f" {prompt.question}")
    same = count_common(alone.ids, both)
    if same == 0:
        raise ValueError("expected the prompt's tokens in front of the question's, got others; give input_ids")
    return alone._replace(ids=both), same
