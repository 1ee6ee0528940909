"""What a request's response says of its decode steps.

In a scheduler process it becomes `meta_info["sparse_attn"]` (`tell`), which `/generate` and `/vertex_generate` show.
Responses of other interfaces have no room for that: in the launcher `after_generate_request` keeps it beside the HTTP
request, and `OpenAIUsage` writes it into the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_ext.prefix.requests import Attachment

KEY = "sparse_attn"
HEADER = b"sglang-sparse-attn"
_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/invocations")
_OLLAMA = {"SGLANG_OLLAMA_CHAT_ROUTE": "/api/chat", "SGLANG_OLLAMA_GENERATE_ROUTE": "/api/generate"}
"""Paths, by the variables with which SGLang lets people move them."""
_USAGE = re.compile(rb'"usage":\s*\{')
_EVENT = b"data: "
_HOLDERS = ("response", "message")
"""Objects in an event of a stream that may hold the usage."""
_LENGTH = b"content-length"


class Told:
    """Stands where SGLang has one value for each output token, which it sends with the tokens and strings together.

    Its slices are empty until the request has finished; then one summary is all. Of a stream that sends each token once
    (`--incremental-streaming-output`) SGLang cuts them by the tokens: there they have None for each but the last.

    Args:
        req: SGLang's request; held weakly, as it holds this.
        attachment: what is known of it.
        incremental: whether streams send each token once.
    """

    def __init__(self, req: Any, attachment: Attachment, incremental: bool) -> None:
        self._req = weakref.ref(req)
        self._attachment = attachment
        self._by_token = incremental and req.stream

    def __getitem__(self, tokens: slice) -> list[dict[str, Any] | None]:
        req = self._req()
        told = [self._attachment.told(tokens.stop)] if req is not None and req.finished() else []
        spare = tokens.stop - tokens.start - len(told) if self._by_token else 0
        return [*[None] * spare, *told]


def tell(req: Any, attachment: Attachment, *, incremental: bool) -> None:
    """Let a request's response say how it was decoded; see `Told`."""
    if req.customized_info is None:
        req.customized_info = {}
    req.customized_info.setdefault(KEY, Told(req, attachment, incremental))


def after_generate_request(outputs: Any, _manager: Any, _obj: Any, request: Any = None) -> Any:
    """Of a request that came through `OpenAIUsage`: note what its outputs say."""
    told = getattr(request, "scope", {}).get(KEY)  # SGLang's gRPC server has requests of its own
    return outputs if told is None else _noting(outputs, told)


async def _noting(outputs: Any, told: dict[int, list[Any]]) -> AsyncIterator[Any]:
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            for index, one in enumerate(output) if isinstance(output, list) else [(output.get("index", 0), output)]:
                told[index] = one["meta_info"].get(KEY, [])[-1:]
            yield output


class OpenAIUsage:
    """An ASGI application around SGLang's: `usage.sparse_attn` of OpenAI and Anthropic answers, and the header `HEADER`
    of these and of Ollama's, which have no usage.

    The field is a list: of each choice that has ended, in their order, what `meta_info["sparse_attn"]` says of it. A
    whole answer with one choice has the list as a header too. A stream has no header: it leaves before the first step.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._paths = (*_PATHS, *(os.environ.get(name, path) for name, path in _OLLAMA.items()))

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(self._paths):
            await self._app(scope, receive, send)
            return
        told: dict[int, list[Any]] = {}
        scope[KEY] = told
        start: dict[str, Any] | None = None
        promised = False  # the length, to the client

        async def write(message: dict[str, Any]) -> None:
            nonlocal start, promised
            if message["type"] == "http.response.start":
                start = message  # waits for the body, whose length it holds
                return
            choices = [one for index in sorted(told) for one in told[index] if one is not None]
            before = message.get("body", b"")
            body = before
            if not promised and before:
                body = b"\n".join(_told(line, choices) for line in before.split(b"\n"))
                message = {**message, "body": body}
            if start is not None:
                if promised := _LENGTH in dict(start["headers"]):
                    own = [(HEADER, _json(choices))] if len(told) == 1 else []
                    start = {**start, "headers": [*_grown(start["headers"], len(body) - len(before)), *own]}
                await send(start)
                start = None
            await send(message)

        await self._app(scope, receive, write)


def _told(line: bytes, choices: list[Any]) -> bytes:
    """An answer, or a line of an event, with the choices in its usage, if it has one. What tools were called with, and
    their schemas, may hold any key.
    """
    event = _EVENT if line.startswith(_EVENT) else b""
    if not _USAGE.search(line):
        return line
    try:
        answer = json.loads(line[len(event) :])
        found = [answer, *(answer.get(name) for name in _HOLDERS)] if isinstance(answer, dict) else []
        usages = [one["usage"] for one in found if isinstance(one, dict) and isinstance(one.get("usage"), dict)]
        for usage in usages[:1]:
            usage[KEY] = choices
        return event + _json(answer) if usages else line
    except (ValueError, RecursionError):  # a piece of an answer, or one too deep
        return line


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _grown(headers: Any, added: int) -> list[tuple[bytes, bytes]]:
    """Of a body that grew by so many bytes."""
    return [(name, b"%d" % (int(value) + added) if name == _LENGTH else value) for name, value in headers]
