"""An operator's commands to a running server, over HTTP and by `sglang-ext server`: what answers and counters show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_ext.administration import COMMANDS
from sglang_ext.cli.asking import ENV_ADMIN_KEY
from tests.server.harness import ADMIN_KEY, ROOT, Server

pytestmark = pytest.mark.boot("production")
TOKENS = 12


def called(server: Server, path: str, body: bytes | None = None, key: str | None = ADMIN_KEY) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{server.url}/sparse_attn{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def told(server: Server, name: str, /, **body: Any) -> dict[str, Any]:
    sent = None if COMMANDS[name].asks else json.dumps(body).encode()
    status, text = called(server, f"/{name}", sent)
    assert status == 200, text
    return dict(json.loads(text))


def index(server: Server, name: str) -> dict[str, Any]:
    [found] = [one for one in told(server, "indexes")["indexes"] if one["name"] == name]
    return dict(found)


def until_ready(server: Server, name: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (found := index(server, name))["state"] != "ready":
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


@pytest.fixture
def server(production: Server) -> Iterator[Server]:
    """As it was before, whatever a test has told it."""
    yield production
    told(production, "on")
    told(production, "budget", top_k=None)
    for one in told(production, "indexes")["indexes"]:
        if one["pinned"]:
            told(production, "unpin", index=one["digest"])


def test_without_the_key_there_is_a_page_and_nothing_else(server: Server) -> None:
    for key in (None, "sesam", ADMIN_KEY.upper()):
        for name, command in COMMANDS.items():
            status, text = called(server, f"/{name}", None if command.asks else b"{}", key)
            assert (status, b"Unauthorized" in text) == (401, True), (name, key)
    status, page = called(server, "", key=None)
    assert (status, page[:15]) == (200, b"<!doctype html>")
    assert b"second-named" not in page
    assert told(server, "status")["indexes"]["on"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/pin", b"{", 400, "expected a JSON object as the body, got no JSON"),
        ("/pin", b"[" * 100_000, 400, "expected a JSON object as the body"),
        ("/pin", b"[]", 400, "got list; send an object"),
        ("/pin", b"\xff\xfe", 400, "got no JSON"),
        ("/pin", b'{"index": "\\ud800"}', 404, "which means none"),
        ("/pin", b" " * ((16 << 20) + 1), 413, "expected a body of at most 16777216 bytes"),
        ("/budget", b'{"keep_ratio": NaN}', 400, "keep_ratio"),
        ("/build", b'{"text": "a", "input_ids": [1]}', 400, "exactly one of text, input_ids and messages"),
        ("/build", b'{"messages": [{"role": "nobody"}]}', 400, "build: "),
        ("/build", b'{"text": "\\ud800 a"}', 400, "which is half a character"),
        ("/status", b"{}", 405, "Method Not Allowed"),
        ("/stop", b"{}", 404, "Not Found"),
    ],
    ids=[
        "no JSON", "deep", "a list", "no UTF-8", "a surrogate", "too large", "no number", "two prompts", "no role",
        "half a character", "a question", "no command",
    ],
)  # fmt: skip
def test_a_bad_body_is_named_and_the_server_lives_on(
    server: Server, path: str, body: bytes, status: int, words: str
) -> None:
    """The one that is too large is so by its last byte: an answer before that would meet a client that still sends.
    What a runtime refuses: tests/serving/test_administration.py.
    """
    before = told(server, "status")["budget"]
    found, text = called(server, path, body)
    assert (found, words in text.decode()) == (status, True), text
    assert told(server, "status")["budget"] == before


def test_an_index_is_loaded_pinned_and_evicted(server: Server, texts: Any) -> None:
    """Whether it is on the device nobody sees in an answer, but in the counters."""
    server.settled()
    told(server, "evict", index="second")
    assert index(server, "second")["tiers"] == ["store"]
    held = told(server, "status")["state"]["resident_bytes"]
    assert told(server, "prefetch", index="second")["digest"] == index(server, "second")["digest"]
    found = until_ready(server, "second")
    assert (found["tiers"], found["tokens"]) == (["device", "store"], 1280)
    assert told(server, "status")["state"]["resident_bytes"] == held + found["device_bytes"] > held
    assert told(server, "pin", index="second")["device"] == "done"
    assert "unpin it first" in called(server, "/evict", b'{"index": "second"}')[1].decode()
    answers, delta = server.compared([texts.ask(texts.second, 1)], TOKENS)
    assert answers[0].told["index"] == "second"
    assert delta.hits == 1
    assert index(server, "second")["hits"] == found["hits"] + 1


def test_a_budget_shows_in_the_next_response(server: Server, texts: Any) -> None:
    prompt = texts.ask(texts.first, 3)
    selected = []
    for tokens in (256, 1024, None):
        told(server, "budget", top_k=tokens)
        selected.append(server.generate(prompt, TOKENS).told["selected_tokens"])
    assert selected == [256, 1024, 1536]


def test_off_while_requests_run(server: Server, texts: Any) -> None:
    """All positions are selected, so answers are those of dense decode, whichever way their steps went."""
    prompts = [texts.ask(texts.first, 0), texts.ask(texts.first, 1), texts.ask(texts.second, 0)]
    tokens = 64
    dense = [server.generate(prompt, tokens, sparse=False).ids for prompt in prompts]
    before: dict[str, Any] = {}

    def switch() -> Any:
        server.until(lambda state: state["sparse_rows"] > before["sparse_rows"] + 10)
        told(server, "off")
        off = server.state()
        still = server.until(lambda now: now["dense_rows"] > off["dense_rows"] + 10 or now["requests"] == 0)
        told(server, "on")
        return server.generate(prompts[0], 1), still["sparse_rows"] - off["sparse_rows"]

    for _attempt in range(10):  # requests may end before the command comes
        before = server.settled()
        calls = [lambda p=prompt: server.generate(p, tokens) for prompt in prompts]
        *answers, (_, meanwhile) = server.together([*calls, switch])
        assert [answer.ids for answer in answers] == dense
        assert meanwhile <= len(prompts), "a step that ran when the command came"
        steps = [answer.told["steps"] for answer in answers]
        if all(one["sparse"] > 0 < one["dense"] + one["cascade"] for one in steps):
            break
    else:
        pytest.fail("expected the command to come while three requests run, in ten attempts")
    assert [answer.told["reasons"] for answer in answers] == [["by_operator"]] * 3
    assert server.settled()["fallbacks"]["by_operator"] >= before["fallbacks"].get("by_operator", 0) + 3


def test_commands_at_once_each_get_their_own_answer(server: Server, texts: Any) -> None:
    digests = {name: index(server, name)["digest"] for name in ("first", "second", "long", "large")}
    calls: list[Any] = [lambda n=name: told(server, "pin", index=n) for name in digests for _ in range(3)]
    calls += [lambda: told(server, "status"), lambda: server.generate(texts.ask(texts.second, 2), TOKENS)] * 2
    found = server.together(calls)
    assert [one["digest"] for one in found[:12]] == [digest for digest in digests.values() for _ in range(3)]
    assert all("versions" in one for one in found[12::2])
    assert all(one["pinned"] == (one["name"] in digests) for one in told(server, "indexes")["indexes"])


def command(server: Server, *words: str, key: str = ADMIN_KEY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_ext.cli", "server", *words, "--url", server.url],
        capture_output=True, text=True, timeout=120, cwd=ROOT, env={**os.environ, ENV_ADMIN_KEY: key, "COLUMNS": "200"},
    )  # fmt: skip


def test_commands_say_the_same_in_tables_and_json(server: Server) -> None:
    shown = command(server, "status")
    assert shown.returncode == 0, shown.stderr
    assert "indexes          on\n" in shown.stdout
    assert "budget           keep_ratio 0.1, most_tokens 2560\n" in shown.stdout
    found = json.loads(command(server, "status", "--json").stdout)
    assert found["versions"] == told(server, "status")["versions"]
    assert json.loads(command(server, "pin", "second", "--json").stdout)["digest"] == index(server, "second")["digest"]
    [line] = [line for line in command(server, "indexes").stdout.splitlines() if line.endswith("  second")]
    assert "  pin  " in line
    names = {json.loads(line)["name"] for line in command(server, "indexes", "--json").stdout.splitlines()}
    assert {"first", "second", "long", "second-named", "large"} <= names
    assert command(server, "budget", "--top-k", "512").stdout == "keep ratio: 0.1, top k: 512, most tokens: 2560\n"
    assert command(server, "budget", "--top-k", "none").stdout == "keep ratio: 0.1, top k: not set, most tokens: 2560\n"
    assert command(server, "off").stdout == "indexes: off, shared prefixes: on\n"
    assert "indexes          off: turned off by an operator\n" in command(server, "status").stdout
    assert command(server, "on").stdout == "indexes: on, shared prefixes: on\n"


def test_commands_say_what_went_wrong(server: Server, tmp_path: Any) -> None:
    for words, key, said in (
        (["status"], "wrong", f"expected the server's admin key, got another one; give it by {ENV_ADMIN_KEY}"),
        (["status"], "", "expected the server's admin key, got none"),
        (["status"], "k\ney", "check --url"),
        (["evict", "nobody"], ADMIN_KEY, "got 'nobody', which means none"),
        (["budget"], ADMIN_KEY, "expected keep_ratio, top_k or both"),
        (["reload-profile"], ADMIN_KEY, "the configuration gives a budget"),
    ):
        ran = command(server, *words, key=key)
        assert (ran.returncode, ran.stdout, said in ran.stderr) == (1, "", True), ran
        assert "Traceback" not in ran.stderr
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "text": "x"}\n{"text": "y"}\n')
    ran = command(server, "build", "--prompts", str(file))
    assert (ran.returncode, ran.stdout) == (1, "a: refused\nline 2: refused\n")
    assert ran.stderr.count("this one has build 'off'") == 2
    file.write_text("no json")
    assert command(server, "build", "--prompts", str(file)).returncode == 2
