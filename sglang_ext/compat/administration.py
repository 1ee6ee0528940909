"""Commands from HTTP routes to every scheduler process, and their answers back.

They travel as SGLang's `DumperControlReqInput`, the one control request of both releases with a JSON body and a JSON
answer, under a method name of ours. SGLang broadcasts it to all tensor-parallel ranks, which handle it in the same
step; rank 0's answer goes back. Other methods stay SGLang's.

Routes are added to SGLang's own app in the launcher, before it asks which of them need which key. They are of the level
of SGLang's own control routes: the admin key where one is set, else the API key where one is set, else open. A server
with `--tokenizer-worker-num` above 1 has none: SGLang loads no plugin in its worker processes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_ext.administration import BAD, COMMANDS, FAILED, Answer, answered

if TYPE_CHECKING:
    from sglang_ext.runtime import SparseRuntime

PATH = "/sparse_attn"
_METHOD = "sparse_attn."
_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
_MOST_BYTES = 16 << 20
"""Of a body: token ids of a million tokens take half of it."""


def answer(runtime: SparseRuntime | None, request: Any) -> Any:
    """In a scheduler process: SGLang's answer to a control request; None where it is not ours.

    Args:
        runtime: of this process; None without `--sparse-attn`.
        request: SGLang's `DumperControlReqInput`.
    """
    if runtime is None or not request.method.startswith(_METHOD):
        return None
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    found = answered(runtime, request.method.removeprefix(_METHOD), request.body)
    response = [{"status": found.status, "body": found.body}]
    return DumperControlReqOutput(success=True, response=response)


async def ask(tokenizer_manager: Any, command: str, body: dict[str, Any]) -> Answer:
    """In a process with a tokenizer manager: ask all scheduler processes of its server, and wait for their answer.

    Questions wait for one another. One whose client has gone is waited for all the same: SGLang would take its answer
    for that of the next one.

    Args:
        tokenizer_manager: SGLang's; call this in its event loop.
        command: a name of `administration.COMMANDS`.
        body: JSON values.
    """
    from sglang.srt.managers.io_struct import DumperControlReqInput

    request = DumperControlReqInput(method=_METHOD + command, body=body)
    [found] = await asyncio.shield(asyncio.ensure_future(tokenizer_manager.dumper_control(request)))
    if not found.response:
        return Answer(FAILED, {"error": f"expected the scheduler's answer to {command}, got: {found.error!r}"})
    return Answer(found.response[0]["status"], found.response[0]["body"])


def serve() -> None:
    """In the launcher: add the routes to SGLang's app, once; nothing where no HTTP server is launched."""
    server = sys.modules.get(_HTTP_SERVER)
    if server is None or getattr(server.app.state, "has_sparse_attn", False):
        return
    server.app.state.has_sparse_attn = True
    from sglang.srt.utils.auth import AuthLevel, auth_level

    for name, command in COMMANDS.items():
        endpoint = auth_level(AuthLevel.ADMIN_OPTIONAL)(_endpoint(server, name))
        server.app.add_api_route(f"{PATH}/{name}", endpoint, methods=["GET" if command.asks else "POST"])


def _endpoint(server: Any, name: str) -> Callable[..., Any]:
    from fastapi import Request
    from fastapi.responses import JSONResponse

    async def command(request: Request) -> JSONResponse:
        found = await _body(request)
        if isinstance(found, dict):
            found = await ask(server.get_global_state().tokenizer_manager, name, found)
        return JSONResponse(found.body, found.status, {"Cache-Control": "no-store"})

    command.__annotations__["request"] = Request  # FastAPI looks for the name in this module
    command.__doc__, command.__name__ = f"sglang-ext: {name}.", f"sparse_attn_{name}"
    return command


async def _body(request: Any) -> dict[str, Any] | Answer:
    """The body as JSON, {} where there is none; an answer that says what is wrong with it."""
    raw = b""
    async for piece in request.stream():
        raw += piece
        if len(raw) > _MOST_BYTES:
            return Answer(413, {"error": f"expected a body of at most {_MOST_BYTES} bytes, got more; send less"})
    try:
        body = json.loads(raw) if raw.strip() else {}
    except (ValueError, RecursionError) as error:
        return Answer(BAD, {"error": f"expected a JSON object as the body, got no JSON: {error}; correct the body"})
    if not isinstance(body, dict):
        return Answer(BAD, {"error": f"expected a JSON object as the body, got {type(body).__name__}; send an object"})
    return body
