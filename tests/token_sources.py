"""Where tests without SGLang take tokens from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class TextTokens:
    """A `TokenSource` of a function that tokenizes text; it begins with `bos_token_id` unless asked not to."""

    def __init__(self, tokenize: Callable[[str], list[Any]], bos_token_id: int | None = None) -> None:
        self._tokenize = tokenize
        self.bos_token_id = bos_token_id

    def of_text(self, text: str, *, add_special_tokens: bool = True) -> list[Any]:
        begin = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return [*begin, *self._tokenize(text)]

    def of_chat(self, messages: Any, tools: Any = None, chat_template_kwargs: Any = None) -> list[int]:
        raise ValueError("expected text, got messages")


def word_lengths() -> TextTokens:
    """The length of each word is its token."""
    return TextTokens(lambda text: [len(word) for word in text.split()])
