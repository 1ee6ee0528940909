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
import base64
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ext.compat.response import OpenAIUsage

# What commands are made of is imported where it is used: every process of SGLang imports this module.
if TYPE_CHECKING:
    from sglang_ext.administration import Answer
    from sglang_ext.config import Settings
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

    from sglang_ext.administration import answered

    found = answered(runtime, request.method.removeprefix(_METHOD), request.body)
    return DumperControlReqOutput(success=True, response=[{"status": found.status, "body": found.body}])


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

    from sglang_ext.administration import FAILED, Answer

    request = DumperControlReqInput(method=_METHOD + command, body=body)
    [found] = await asyncio.shield(asyncio.ensure_future(tokenizer_manager.dumper_control(request)))
    if not found.response:
        return Answer(FAILED, {"error": f"expected the scheduler's answer to {command}, got: {found.error!r}"})
    return Answer(found.response[0]["status"], found.response[0]["body"])


def serve(settings: Settings) -> None:
    """In the launcher: add routes and `OpenAIUsage` to SGLang's app, once; nothing where no HTTP server is launched."""
    server = sys.modules.get(_HTTP_SERVER)
    if server is None or getattr(server.app.state, "has_sparse_attn", False):
        return
    server.app.state.has_sparse_attn = True
    from sglang.srt.utils.auth import AuthLevel, auth_level

    from sglang_ext.administration import COMMANDS

    for name, command in COMMANDS.items():
        endpoint = auth_level(AuthLevel.ADMIN_OPTIONAL)(_endpoint(server, settings, name))
        server.app.add_api_route(f"{PATH}/{name}", endpoint, methods=["GET" if command.asks else "POST"])
    server.app.add_api_route(PATH, _page(), methods=["GET"])
    server.app.add_middleware(OpenAIUsage)


def _page() -> Callable[..., Any]:
    """The page, whose only script is the one that is shipped."""
    from fastapi.responses import HTMLResponse

    import sglang_ext

    text = (Path(sglang_ext.__file__).parent / "page.html").read_text()
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    headers = {
        "Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "Cache-Control": "no-cache",
        "X-Content-Type-Options": "nosniff",
    }

    async def sparse_attn_page() -> HTMLResponse:
        return HTMLResponse(text, headers=headers)

    return sparse_attn_page


def around_decide_request_auth(original: Callable[..., Any], *, method: str, path: str, **rest: Any) -> Any:
    """A browser cannot send a key for a page, and the page holds nothing: its own questions need the key."""
    if (method, path) != ("GET", PATH):
        return original(method=method, path=path, **rest)
    from sglang.srt.utils.auth import AuthDecision

    return AuthDecision(allowed=True)


def prompts_refusal(args: Any) -> str | None:
    """Why `explain` is refused, which shows text of stored prompts: where operators have no key of their own, by
    ServerArgs.
    """
    if args.admin_api_key:
        return None
    return (
        "expected a server with --admin-api-key, got one without: explain shows text of others' "
        "prompts. Start it with an admin key, or explain on its host, with --model-path and --store"
    )


def _endpoint(server: Any, settings: Settings, name: str) -> Callable[..., Any]:
    from fastapi import Request
    from fastapi.responses import JSONResponse

    async def command(request: Request) -> JSONResponse:
        state, found = server.get_global_state(), await _body(request)
        if name == "explain" and (refusal := prompts_refusal(state.tokenizer_manager.server_args)) is not None:
            found = _bad(refusal, 403)
        if name in ("build", "explain") and isinstance(found, dict):
            found = await asyncio.to_thread(_with_tokens, state, asyncio.get_running_loop(), name, found)
        elif name == "reload_profile" and isinstance(found, dict):
            found = await asyncio.to_thread(_with_profile, settings, found)
        if isinstance(found, dict):
            asked = found
            try:
                found = await ask(state.tokenizer_manager, name, asked)
            except (OverflowError, RecursionError, UnicodeEncodeError) as error:
                found = _bad(f"{name}: expected a body that SGLang can pass on, got: {error}; correct the body")
            if name == "explain" and found.status == 200:
                found = await asyncio.to_thread(_compared, settings, state, asked, found)
        return JSONResponse(found.body, found.status, {"Cache-Control": "no-store"})

    command.__annotations__["request"] = Request  # FastAPI looks for the name in this module
    command.__doc__, command.__name__ = f"sglang-ext: {name}.", f"sparse_attn_{name}"
    return command


async def _body(request: Any) -> dict[str, Any] | Answer:
    """The body as JSON, {} where there is none; an answer that says what is wrong with it."""
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > _MOST_BYTES:
            return _bad(f"expected a body of at most {_MOST_BYTES} bytes, got more; send less", 413)
    try:
        body = json.loads(raw) if raw.strip() else {}
    except (ValueError, RecursionError) as error:
        return _bad(f"expected a JSON object as the body, got no JSON: {error}; correct the body")
    if not isinstance(body, dict):
        return _bad(f"expected a JSON object as the body, got {type(body).__name__}; send an object")
    return body


def _bad(message: str, status: int = 400) -> Answer:
    from prefix_index import printable
    from sglang_ext.administration import Answer

    return Answer(status, {"error": printable(message)})


def _with_tokens(
    state: Any, loop: asyncio.AbstractEventLoop, name: str, body: dict[str, Any]
) -> dict[str, Any] | Answer:
    """`build` and `explain`: a prompt, as in a file for prebuild, becomes token ids, as this server makes them: those
    that all its requests share, or those of one request.

    Not in the event loop, which tokenizes.
    """
    import msgspec

    from sglang_ext.compat.engine import salt_refusal, unknown_ids
    from sglang_ext.compat.request_tokens import RequestTokens
    from sglang_ext.prefill.prompt_tokens import prefix_tokens, request_tokens
    from sglang_ext.prefill.prompts import Prompt, check_prompt

    def wait(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    try:
        prompt = msgspec.convert(body, Prompt)
        check_prompt(prompt, "the body")
        source = RequestTokens(state.tokenizer_manager, state.template_manager, wait)
        ids = prefix_tokens(prompt, source).ids if name == "build" else request_tokens(prompt, source)
        refusal = unknown_ids(ids, state.tokenizer_manager.model_config.vocab_size) or salt_refusal(prompt.cache_salt)
        if refusal:
            raise ValueError(refusal)
    except (ValueError, RecursionError) as error:  # msgspec's, SGLang's and ours
        return _bad(f"{name}: {error}")
    return {"input_ids": ids, "extra_key": prompt.extra_key, "cache_salt": prompt.cache_salt}


def _compared(settings: Settings, state: Any, asked: dict[str, Any], told: Answer) -> Answer:
    """`explain`: what the scheduler told, and the prompt beside the indexes of the store. Reads the store's files."""
    import msgspec

    from prefix_index import IndexStoreError, ModelFingerprint
    from sglang_ext.administration import Answer
    from sglang_ext.compat.request_tokens import RequestTokens
    from sglang_ext.prefix.explanation import explain_prompt

    model = msgspec.convert(told.body["model"], ModelFingerprint)
    namespace = {"extra_key": asked["extra_key"], "cache_salt": asked["cache_salt"]}
    text = RequestTokens(state.tokenizer_manager, state.template_manager, asyncio.run).text
    try:
        found = explain_prompt(settings, model, asked["input_ids"], namespace, text)
    except IndexStoreError as error:
        return _bad(f"explain: {error}", 503)
    return Answer(told.status, {**told.body, "input_ids": asked["input_ids"], "compared": msgspec.to_builtins(found)})


def _with_profile(settings: Settings, body: dict[str, Any]) -> dict[str, Any] | Answer:
    """`reload_profile`: the file that the configuration names is read here, so that all ranks have the same text."""
    path = settings.config.profile
    if body:
        return _bad(f"reload_profile: expected an empty body, got the keys {sorted(body)}; send {{}}")
    if settings.profile is None or path is None:
        return _bad("reload_profile: expected a server with a profile, got none; restart it with 'profile'", 409)
    try:
        return {"profile": Path(path).read_text()}
    except (OSError, UnicodeDecodeError) as error:
        return _bad(f"reload_profile: expected a readable profile, got: {error}; correct the file", 409)
