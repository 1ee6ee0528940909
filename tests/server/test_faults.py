"""A damaged index, odd requests: the server says what is wrong, attends densely, and lives on."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.servers import post
from sglang_ext.cli import main
from tests.server.harness import ADMIN_KEY
from tests.server.jobs import Prebuilt

pytestmark = pytest.mark.boot("production")
STEPS = 8


def test_a_corrupted_array_makes_its_requests_dense_and_the_answer_stays_right(
    production: Any, built: Prebuilt, damaged: tuple[Path, Path], texts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, wrong = texts.ask(texts.damaged, 0), str(damaged[1])
    state = production.state()
    assert state["indexes_usable"] == state["indexes_in_store"] > 0
    said = production.log.read_text()
    usable, stored = re.findall(r"usable (\d+) of (\d+) indexes", said)[0]  # at the start
    assert usable == stored > "0"
    (most,) = re.findall(r"at most ([\d,]+) bytes in memory \(5% of the KV pool\), model [0-9a-f]{8}, store ", said)
    assert state["resident_bytes"] <= int(most.replace(",", "")) > 1 << 20
    _, delta = production.compared([prompt], STEPS)
    assert (delta.sparse_rows, delta.fallbacks) == (0, {"index_corrupt": 1})
    assert wrong in production.log.read_text()
    assert any(wrong in problem for problem in production.state()["store_problems"])
    words = ["explain", "--url", production.url, "--admin-key", ADMIN_KEY, "--prompt", texts.damaged.text, "--json"]
    assert main(words) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["index"] is None
    assert any(built.line("damaged")["digest"] in problem for problem in found["problems"])
    _, delta = production.compared([prompt], STEPS)
    assert delta.fallbacks == {"no_index": 1}, "it is offered no more"


def test_a_prompt_longer_than_the_context_gets_sglangs_error_and_the_server_lives(production: Any, texts: Any) -> None:
    with pytest.raises(OSError, match=r"(?i)HTTP 400.*(longer|exceed)"):
        production.generate(" ".join([texts.long] * 5), STEPS)
    assert production.generate(texts.ask(texts.second, 1), STEPS).decode_steps == STEPS - 1
    assert production.settled()["requests"] == 0


@pytest.mark.parametrize("value", [True, "no", 3, [], {"sparse-attn": False}])
def test_an_odd_value_of_the_opt_out_does_no_harm_and_is_named_once(production: Any, texts: Any, value: Any) -> None:
    custom = value if isinstance(value, dict) else {"sparse_attn": value}
    body = {
        "text": texts.ask(texts.second, 2),
        "sampling_params": {"temperature": 0, "max_new_tokens": 3, "custom_params": custom},
    }
    for _ in range(2):
        assert post(production.url, "/generate", body)["meta_info"]["completion_tokens"] >= 1
    said = "sparse_attn, got 'sparse-attn'" if custom is value else f"sparse_attn to be true or false, got {value!r}"
    assert production.log.read_text().count(f"custom_params: expected {said};") == int(value is not True)


@pytest.mark.parametrize("custom", [[1], "x", 7])
def test_custom_params_that_are_no_object_do_not_end_the_server(production: Any, texts: Any, custom: Any) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 3, "custom_params": custom}
    with contextlib.suppress(OSError):  # a release may refuse the request; none may die of it
        post(production.url, "/generate", {"text": texts.ask(texts.second, 2), "sampling_params": sampling}, 60)
    assert production.generate(texts.ask(texts.second, 1), STEPS).decode_steps == STEPS - 1
