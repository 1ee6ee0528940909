"""Commands between SGLang's HTTP process and its schedulers: whose answer is whose, and which key a route wants."""

from __future__ import annotations

import asyncio
import json
import pickle
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import DumperControlReqInput, DumperControlReqOutput

from sglang_ext.compat import administration
from sglang_ext.compat import scheduler_hooks as hooks
from sglang_ext.compat.administration import ask, prompts_refusal
from sglang_ext.compat.response import OpenAIUsage, after_generate_request
from sglang_ext.ranks import Ranks
from tests.compat.sglang_process import GROUP, in_sglang

pytestmark = GROUP

DEEP = b'{"a":' * 750 + b"1" + b"}" * 750


def test_a_client_that_goes_away_leaves_its_answer_to_nobody() -> None:
    """While the scheduler works; and the next one: through SGLang's own communicator."""

    async def main() -> None:
        sent: list[Any] = []
        manager = SimpleNamespace(dumper_control=FanOutCommunicator(sent.append, 1))
        first, second = (asyncio.create_task(ask(manager, name, {})) for name in ("first", "second"))
        for _ in range(5):
            await asyncio.sleep(0)
        first.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        while not second.done():
            request = sent.pop(0)
            answer = [{"status": 200, "body": {"of": request.method}}]
            manager.dumper_control.handle_recv(DumperControlReqOutput(success=True, response=answer))
            for _ in range(5):
                await asyncio.sleep(0)
        assert first.cancelled()
        assert (await second).body == {"of": "sparse_attn.second"}

    asyncio.run(main())


def test_other_methods_of_the_request_stay_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook answers commands itself, where a runtime is."""

    def call(method: str) -> Any:
        return hooks.around_dumper_control(lambda *_: "SGLang's", None, DumperControlReqInput(method=method, body={}))

    assert call("sparse_attn.status") == "SGLang's"
    monkeypatch.setattr(hooks, "_runtime", SimpleNamespace(ranks=Ranks()))
    assert [call(method) for method in ("get_state", "sparse_attnstatus")] == ["SGLang's"] * 2
    [ours] = call("sparse_attn.nothing").response
    assert ours["status"] == 404
    assert "expected a command of status" in ours["body"]["error"]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("build", b'{"messages": [], "chat_template_kwargs": %s}' % DEEP),
        ("pin", b'{"index": %s}' % DEEP),
        ("budget", b'{"top_k": %d}' % (1 << 70)),
        ("pin", b'{"index": "\\ud800"}'),
    ],
    ids=["deep prompt", "deep", "large number", "half a character"],
)
def test_a_body_that_cannot_be_read_or_sent_is_refused(name: str, body: bytes) -> None:
    """SGLang pickles what it sends to the scheduler, or packs it with msgspec."""

    class Asked:
        async def stream(self) -> Any:
            yield body

    def send(request: Any) -> None:
        pickle.dumps(request)
        msgspec.msgpack.encode(request)

    chat = {"tokenizer": SimpleNamespace(), "serving_chat_class": lambda *_: None}
    manager = SimpleNamespace(dumper_control=FanOutCommunicator(send, 1), **chat)
    state = SimpleNamespace(tokenizer_manager=manager, template_manager=None)
    endpoint = administration._endpoint(SimpleNamespace(get_global_state=lambda: state), None, name)
    answer = asyncio.run(asyncio.wait_for(endpoint(Asked()), 60))
    assert (answer.status_code, json.loads(answer.body)["error"].partition(":")[0]) == (400, name)


def routes_and_keys() -> dict[str, Any]:
    """Of the real app, once without our routes, then with them added twice."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import auth

    load_plugins()
    from sglang_ext.administration import COMMANDS
    from sglang_ext.compat import administration
    from sglang_ext.config import Settings, config_from_dict

    app = http_server.app
    before = len(app.router.routes)
    for _ in range(2):
        administration.serve(Settings(config=config_from_dict({}), store="/nowhere"))

    def level(path: str, method: str) -> str:
        scope = {"type": "http", "path": path, "method": method, "headers": []}
        return str(auth._get_auth_level_from_app_and_scope(app, scope).value)

    def allowed(path: str, method: str, key: str | None, **keys: Any) -> bool:
        keys = {"api_key": None, "admin_api_key": None, **keys}
        header = None if key is None else f"Bearer {key}"
        found = auth.decide_request_auth(
            method=method,
            path=path,
            authorization_header=header,
            auth_level=auth.AuthLevel(level(path, method)),
            **keys,
        )
        return bool(found.allowed)

    paths = {f"/sparse_attn/{name}": "GET" if one.asks else "POST" for name, one in COMMANDS.items()}
    both = {"api_key": "user", "admin_api_key": "admin"}
    return {
        "added": len(app.router.routes) - before - len(COMMANDS),
        "levels": sorted({level(path, method) for path, method in paths.items()}),
        "keys": [
            [allowed(path, method, key, **both) for key in (None, "user", "admin")] for path, method in paths.items()
        ],
        "no admin key": [allowed("/sparse_attn/off", "POST", key, api_key="user") for key in (None, "user")],
        "page": [allowed("/sparse_attn", method, None, **both) for method in ("GET", "POST")],
        "beside it": [
            allowed(path, "GET", None, **both) for path in ("/sparse_attn/", "/generate", "/get_server_info")
        ],
    }


def test_routes_want_the_admin_key_and_only_the_page_none() -> None:
    found = in_sglang("tests.compat.test_administration:routes_and_keys")
    assert found["added"] == 1, "the page, and each route once"
    assert found["levels"] == ["admin_optional"]
    assert found["keys"] == [[False, False, True]] * len(found["keys"])
    assert found["no admin key"] == [False, True]
    assert found["page"] == [True, False]
    assert found["beside it"] == [False] * 3


@pytest.mark.parametrize(
    "request_", [None, object(), SimpleNamespace(scope={"type": "http"})], ids=["none", "grpc", "http"]
)
def test_outputs_of_what_is_no_openai_request_stay_as_they_are(request_: Any) -> None:
    outputs = object()
    assert after_generate_request(outputs, None, None, request_) is outputs


def answered(path: str, pieces: list[bytes], *, length: bool = True) -> tuple[dict[bytes, bytes], list[bytes]]:
    """Headers and pieces that a client gets of an answer whose choice has ended."""
    sent: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], _receive: Any, send: Any) -> None:
        scope["sparse_attn"][0] = [{"steps": 1}]
        own = [(b"content-length", b"%d" % sum(map(len, pieces)))] if length else []
        await send({"type": "http.response.start", "headers": own})
        for number, piece in enumerate(pieces, start=1):
            await send({"type": "http.response.body", "body": piece, "more_body": number < len(pieces)})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(OpenAIUsage(app)({"type": "http", "path": path}, None, send))
    start, *rest = sent
    return dict(start["headers"]), [message["body"] for message in rest]


@pytest.mark.parametrize("cut", [None, 10, 18, 28], ids=lambda cut: f"cut at {cut}")
def test_a_body_is_as_long_as_its_header_says_whatever_pieces_it_comes_in(cut: int | None) -> None:
    body = b'{"choices":[],"usage":{"a":1}}'
    headers, pieces = answered("/v1/completions", [body] if cut is None else [body[:cut], body[cut:]])
    said = b"".join(pieces)
    assert headers[b"content-length"] == b"%d" % len(said)
    assert headers[b"sglang-sparse-attn"] == b'[{"steps":1}]'
    assert (json.loads(said)["usage"] == {"a": 1, "sparse_attn": [{"steps": 1}]}) == (cut is None)


def test_what_a_tool_is_called_with_is_not_taken_for_the_usage() -> None:
    """Arguments and schemas are objects in some interfaces, and may have any key."""
    called = {"type": "tool_use", "input": {"usage": {"cpu": 3}}}
    answer = {"content": [called], "usage": {"output_tokens": 7}}
    _, (body,) = answered("/v1/messages", [json.dumps(answer).encode()])
    assert json.loads(body) == {**answer, "usage": {"output_tokens": 7, "sparse_attn": [{"steps": 1}]}}
    tools = [{"parameters": {"properties": {"usage": {"type": "object"}}}}]
    events = [
        {"type": "response.created", "response": {"usage": None, "tools": tools}},
        {"type": "response.completed", "response": {"tools": tools, "usage": {"output_tokens": 7}}},
    ]
    lines = [b"event: x\ndata: %s\n\n" % json.dumps(event).encode() for event in events]
    _, pieces = answered("/v1/responses", lines, length=False)
    assert pieces[0] == lines[0]
    (completed,) = [json.loads(line[6:]) for line in pieces[1].split(b"\n") if line.startswith(b"data: ")]
    usage = {"output_tokens": 7, "sparse_attn": [{"steps": 1}]}
    assert completed == {**events[1], "response": {"tools": tools, "usage": usage}}


def test_text_of_stored_prompts_is_not_for_every_client() -> None:
    """A key that all users have is none, and so is an empty one, for SGLang too: its routes are open then."""
    keys = [(None, None), ("a", None), (None, ""), (None, "b"), ("a", "b")]
    refused = [prompts_refusal(SimpleNamespace(api_key=api, admin_api_key=admin)) for api, admin in keys]
    assert [bool(one) for one in refused] == [True, True, True, False, False]
