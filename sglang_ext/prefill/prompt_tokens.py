"""The token ids that requests behind a shared prompt begin with."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from sglang_ext.prefill.prompts import PromptLine

#: What may follow a shared beginning. Tokens at its end can merge with what follows: those that stay the same in front
#: of all of these are kept.
_FOLLOWING = ("a", "Zz", "7", "\n\n- b", "(c")
#: A time that is not now, for templates that render one.
_ANOTHER_TIME = datetime(2001, 2, 3, 4, 5, 6)


class TokenSource(Protocol):
    """Makes token ids as the server does of requests. Raises ValueError where SGLang refuses them."""

    @property
    def bos_token_id(self) -> int | None: ...

    def of_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def of_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]: ...


class PrefixTokens(NamedTuple):
    """Token ids of a prompt, and sentences on what its author should know of them."""

    ids: list[int]
    warnings: tuple[str, ...] = ()


def prefix_tokens(prompt: PromptLine, source: TokenSource) -> PrefixTokens:
    """The leading tokens of all requests that share a prompt.

    `input_ids` are what they are; a text is tokenized as it is. Messages are rendered with different messages of the
    user behind them, and the tokens that all renderings begin with are kept. Where the last message is the user's,
    it may go on: its content is then the beginning of theirs.

    Raises:
        ValueError: SGLang refuses the prompt.
    """
    if prompt.messages is not None:
        ids, warnings = _of_chat(prompt, source)
    else:
        ids, warnings = request_tokens(prompt, source), []
    bos = source.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        warnings.append(f"expected one BOS (token {bos}) at the beginning, got two: {_remedy(prompt)}")
    return PrefixTokens(ids, tuple(warnings))


def tokens_with(prompt: PromptLine, source: TokenSource, text: str = "") -> list[int]:
    """The tokens of one request: a prompt of text or messages, and `text` behind it.

    Raises:
        ValueError: SGLang refuses the prompt.
    """
    if prompt.messages is not None:
        return source.of_chat(_with_user_text(prompt.messages, text), prompt.tools, prompt.chat_template_kwargs)
    whole = f"{prompt.text or ''}{text}"
    return source.of_text(whole, add_special_tokens=prompt.add_special_tokens is not False) if whole else []


def request_tokens(prompt: PromptLine, source: TokenSource) -> list[int]:
    """The tokens of a request that is this prompt and no more. Raises ValueError where SGLang refuses it."""
    return prompt.input_ids if prompt.input_ids is not None else tokens_with(prompt, source)


def count_common(first: Sequence[int], *others: Sequence[int]) -> int:
    """How many leading tokens all of them have in common."""
    pairs = enumerate(zip(first, *others, strict=False))
    return next((i for i, tokens in pairs if len(set(tokens)) > 1), min(map(len, (first, *others))))


def _of_chat(prompt: PromptLine, source: TokenSource) -> tuple[list[int], list[str]]:
    first, *others = (tokens_with(prompt, source, text) for text in _FOLLOWING)
    ids = first[: count_common(first, *others)]
    kwargs = {**(prompt.chat_template_kwargs or {}), "strftime_now": _ANOTHER_TIME.strftime}
    messages = _with_user_text(prompt.messages or [], _FOLLOWING[0])
    try:
        # An argument of a template stands before the global function of its name.
        later = source.of_chat(messages, prompt.tools, kwargs)
    except ValueError:  # a tokenizer without a Jinja template knows no such argument
        return ids, []
    same = count_common(ids, later)
    if same == len(ids):
        return ids, []
    return ids, [
        f"expected tokens that stay the same, got a date or time that the chat template renders, at token {same} of "
        f"{len(ids)}: requests of another time will not find this index. Fix it by the template's own argument (often "
        '"date_string") in "chat_template_kwargs", here and in the requests, or prebuild again when it changes'
    ]


def _with_user_text(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The messages with the user's own text behind them: in a message of its own, or at the end of the last one where
    that is the user's, too.
    """
    last = messages[-1] if messages else {}
    content = last.get("content")
    if last.get("role") != "user" or not isinstance(content, str | list):
        return [*messages, {"role": "user", "content": text}]
    longer = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return [*messages[:-1], {**last, "content": longer}]


def _remedy(prompt: PromptLine) -> str:
    if prompt.messages is not None:
        return "the chat template renders both, and does so for requests, too; correct the template"
    if prompt.text is None or prompt.add_special_tokens is False:
        return "take one away, unless the requests begin so, too"
    return (
        "the tokenizer adds one to a text that has one. A chat request begins with one: give its messages in "
        '"messages", or "add_special_tokens": false beside this text'
    )
