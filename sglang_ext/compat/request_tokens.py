"""The token ids that this SGLang's server makes of requests: by the server's own code, called here."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Coroutine, Sequence
from typing import Any


class RequestTokens:
    """What requests become before the scheduler sees them.

    Args:
        tokenizer_manager: SGLang's, of an engine or by itself.
        template_manager: SGLang's, with the chat template of that tokenizer.
        wait: runs a coroutine to its end, in the loop of the tokenizer manager.
    """

    def __init__(
        self, tokenizer_manager: Any, template_manager: Any, wait: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        self._manager = tokenizer_manager
        self._templates = template_manager
        self._wait = wait
        self._chat: Any = None

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, where the tokenizer has one; None without a tokenizer."""
        bos = getattr(self._manager.tokenizer, "bos_token_id", None)
        return None if bos is None else int(bos)

    def of_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text prompt of `/generate` and `/v1/completions`.

        Args:
            text: at least one character.
            add_special_tokens: as the server does, which is what the tokenizer says; False: none are added.

        Raises:
            ValueError: the engine has no tokenizer.
        """
        tokenizer = self._tokenizer()
        if not add_special_tokens:
            return list(map(int, tokenizer.encode(text, add_special_tokens=False)))
        ids, _ = self._wait(self._manager._tokenize_texts(text))
        return list(map(int, ids))

    def of_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a request of `/v1/chat/completions`, up to where the answer begins.

        Raises:
            ValueError: SGLang refuses the request, it holds images, video or audio, or the engine has no tokenizer.
        """
        from pydantic import ValidationError
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        self._tokenizer()
        if self._chat is None:
            self._chat = self._manager.serving_chat_class(self._manager, self._templates)
        body = {"messages": list(messages), "tools": tools, "chat_template_kwargs": chat_template_kwargs}
        given = {name: copy.deepcopy(value) for name, value in body.items() if value is not None}
        try:
            request = ChatCompletionRequest.model_validate(given)  # as the HTTP server does with a body
        except ValidationError as error:
            found = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3]]
            raise ValueError(f"expected a chat request, got: {'; '.join(found)}") from error
        refused = self._chat._validate_request(request)
        if refused:
            raise ValueError(refused)
        try:
            made, _ = self._chat._convert_to_internal_request(request)
        except ValueError:
            raise
        except Exception as error:  # SGLang names some kinds only of what a template or its arguments may raise
            raise ValueError(
                "expected messages, tools and chat_template_kwargs that the chat template takes, got from it: "
                f"{error!r}; correct them"
            ) from error
        if any(getattr(made, name, None) for name in ("image_data", "video_data", "audio_data")):
            raise ValueError("expected messages of text, got images, video or audio; an index is of text only")
        if made.input_ids is not None:
            return list(map(int, made.input_ids))
        return self.of_text(made.text)

    def text(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included; the ids themselves where there is none: without a tokenizer, and
        of ids of another model's index that some tokenizers refuse.
        """
        tokenizer = self._manager.tokenizer
        if tokenizer is not None:
            with contextlib.suppress(Exception):  # of each tokenizer another one
                return str(tokenizer.decode(list(ids)))
        return " ".join(map(str, ids))

    def _tokenizer(self) -> Any:
        tokenizer = self._manager.tokenizer
        if tokenizer is None:
            raise ValueError(
                "expected a tokenizer for text and messages, got none (--skip-tokenizer-init); leave that flag out, or "
                "give input_ids"
            )
        return tokenizer
