"""Questions to a running server: who sees them, and answers that are none."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from sglang_ext.cli import main
from sglang_ext.cli.asking import ServerError, ask


class Answering(BaseHTTPRequestHandler):
    """Says what it is told to; of an error less than it promises."""

    status, body = 200, b"{}"
    seen: list[str]

    def do_GET(self) -> None:
        self.seen.append(self.path)
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body) + 5 * (self.status != 200)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def answers() -> Iterator[Any]:
    """The handler's class, and the URL that it answers at."""
    kind = type("Own", (Answering,), {"seen": []})
    with HTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield kind, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_no_proxy_sees_the_key(answers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, url = answers
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, url)
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(ServerError, match="refused"):
        ask(argparse.Namespace(url="http://127.0.0.1:9", admin_key="secret"), "status")
    assert kind.seen == []
    assert ask(argparse.Namespace(url=url, admin_key="secret"), "status") == {}
    assert kind.seen == ["/sparse_attn/status"]


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, {}, "with the field 'state', got no field"),
        (200, {"a": 1}, "with the field 'state', got a"),
        (500, {}, "IncompleteRead"),
    ],
)
def test_an_answer_that_is_none_is_a_message(
    answers: Any, capsys: pytest.CaptureFixture[str], status: int, body: Any, said: str
) -> None:
    kind, url = answers
    kind.status, kind.body = status, json.dumps(body).encode()
    assert main(["server", "status", "--url", url]) == 1
    assert said in " ".join(capsys.readouterr().err.split())
