"""A running server explains a prompt: by its own tokens, its own store, and what is loaded now. A damaged index:
`test_faults`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.cli import main
from tests.server.harness import ADMIN_KEY

pytestmark = pytest.mark.boot("production")


@pytest.fixture
def explain(production: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs `sglang-ext explain --url`: (status, its JSON)."""

    def run(text: str, *words: str) -> Any:
        file = tmp_path / "prompt.txt"
        file.write_text(text)
        status = main(
            ["explain", "--url", production.url, "--admin-key", ADMIN_KEY, "--prompt", f"@{file}", "--json", *words]
        )
        return status, json.loads(capsys.readouterr().out)

    return run


def test_a_server_says_which_index_serves_and_that_it_is_loaded(
    explain: Any, production: Any, built: Any, texts: Any
) -> None:
    prompt = texts.ask(texts.first, 0)
    production.generate(prompt, 4)
    (status, found), delta = production.during(lambda: explain(prompt))
    assert delta.hits == 0, "asking is no request"
    assert status == 0
    assert found["index"] == found["compared"]["index"] == built.line("first")["digest"]
    assert (found["name"], found["resident"], found["path"]) == ("first", "ready", "sparse")
    assert found["costs_us"] == {"exact": None, "sparse": None}, "nothing is measured on a CPU"
    assert found["compared"]["candidates"][0]["name"] == "long", "which goes on where the prompt does not"
    assert found["compared"]["candidates"][0]["common"] >= 1536
    longer = explain(f"{texts.long} {texts.tail.questions[0].text}")[1]
    assert longer["name"] == "long"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--admin-key", "wrong"], "expected the server's admin key, got another one"),
        (["--picture", "x.png"], "expected a server that traces"),
        (["--messages", "no-such.json"], "expected a file that can be read"),
        (["--messages", "two.json"], "expected exactly one of text, input_ids"),
        (["--model-path", "m"], "expected --url, or --model-path and --store; got both"),
        (["--url", "http://127.0.0.1:9"], "--url"),
    ],
)
def test_what_cannot_be_explained(
    production: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.json").write_text(json.dumps({"input_ids": [1], "text": "two"}))
    asked = [] if "--messages" in words else ["--prompt", "document note"]
    assert main(["explain", "--url", production.url, "--admin-key", ADMIN_KEY, *asked, *words]) == 2
    assert said in capsys.readouterr().err
    assert production.generate("document note", 2).decode_steps == 1, "the server lives on"
