"""On two GPUs: a cache rank's candidates in decode graphs, and what becomes of requests when it is killed or stopped.

    python -m pytest -s tests/gpu/test_cache_rank.py

SPARSE_ATTN_TEST_BACKEND names the attention backend, where the default (triton) cannot be used.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from scripts.needle.tasks import make_document
from tests.gpu.serving import PAGED, prebuilt, served
from tests.server.harness import DISK, MODEL, SPARSE_CONFIG, Server, tokens_alike

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")]

TOKENS, QUESTIONS, SAID, FIRST = 8192, 4, 192, 16
"""FIRST: steps behind a change of the batch that name their own candidates. Left alone, a server with a cache rank has
more of these than one without, as the process learns of the change later. Other tokens are kept then, and texts part.
"""
FLAGS = [*PAGED, "--dtype", "float16", "--max-total-tokens", "65536", "--max-running-requests", "32"]
FLAGS += ["--disable-prefill-cuda-graph"]
CONFIG: dict[str, Any] = {
    **DISK, **SPARSE_CONFIG, "layer_plan": ["dense", *["anchor"] * 5], "share_prefixes": True, "keep_ratio": 0.05,
    "decode_path": "sparse", "method": "two_level", "methods": {"two_level": {}}, "select_ahead": True,
    "guard_every": 0,
}  # fmt: skip
IN_LINE = f"""
from sglang_ext.decode.turns import SearchTurns

take = SearchTurns.take
SearchTurns.take = lambda turns, groups, *, must=False: take(
    turns, groups, must=must or turns.steps_of(groups) <= {FIRST}
)
"""
DOCUMENT = make_document("many_keys", seed=81, num_tokens=TOKENS, num_questions=QUESTIONS)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prebuilt(tmp_path_factory.mktemp("built"), [{"id": "0", "text": DOCUMENT.text}], CONFIG, FLAGS)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    asked = [f"{DOCUMENT.text} {one.text}" for one in DOCUMENT.questions]
    found: list[list[int]] = AutoTokenizer.from_pretrained(str(MODEL))(asked, add_special_tokens=False)["input_ids"]
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of servers whose first steps select in line."""
    folder = tmp_path_factory.mktemp("in_line")
    (folder / "sitecustomize.py").write_text(IN_LINE)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.fixture(scope="module")
def alone(
    store: Path, prompts: list[list[int]], environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Any], int]:
    """Answers of a server that names its own candidates, and of how many steps the step before named them."""
    with served(store, CONFIG, FLAGS, tmp_path_factory.mktemp("alone"), environment=environment) as server:
        return [server.generate(one, SAID) for one in prompts], kept_steps(server)


@pytest.fixture(scope="module")
def server(store: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = {**CONFIG, "cache_device": "cuda:1"}
    with served(store, config, FLAGS, tmp_path_factory.mktemp("ranked"), environment=environment) as server:
        yield server


def kept_steps(server: Server) -> int:
    return int(server.state()["decode"]["kept_steps"])


def rank(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.state()["decode"]["cache_rank"]
    return found


def until_served(server: Server, prompt: list[int]) -> dict[str, Any]:
    """Answers until the other process has a part in one."""
    server.until(lambda state: state["decode"]["cache_rank"]["state"] == "serving")
    before = rank(server)["served"]
    for _ in range(20):
        server.generate(prompt, SAID)
        if rank(server)["served"] > before + SAID / 2:
            break
    return rank(server)


def assert_answered(said: list[int]) -> None:
    """Every answer is whole. Behind it the model says anything, and requests that select together select otherwise."""
    assert all(count >= len(of.answer) - 1 for count, of in zip(said, DOCUMENT.questions, strict=True))


def test_answers_are_those_of_a_server_that_names_its_own_candidates(
    server: Server, alone: tuple[list[Any], int], prompts: list[list[int]]
) -> None:
    """Token by token: in every step candidates are those that the other server names, by the same queries."""
    expected, steps = alone
    before, kept = until_served(server, prompts[0]), kept_steps(server)
    answers = [server.generate(one, SAID) for one in prompts]
    after = rank(server)
    served, missed = (after[name] - before[name] for name in ("served", "missed"))
    said = [tokens_alike(one, of) for one, of in zip(answers, expected, strict=True)]
    print(f"{served} steps served, {missed} not, {after['answer_us']} us an answer, alike {said}")
    assert served > len(prompts) * SAID / 2
    assert missed <= served / 100
    assert kept_steps(server) - kept == steps
    assert_answered(said)
    assert said == [SAID] * len(prompts)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_end_whatever_becomes_of_the_process(
    server: Server, alone: tuple[list[Any], int], prompts: list[list[int]], fault: signal.Signals
) -> None:
    starts = until_served(server, prompts[0])["started"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        calls = [pool.submit(server.generate, one, SAID) for one in prompts]
        os.kill(rank(server)["pid"], fault)
        answers = [call.result() for call in calls]
    said = [tokens_alike(one, of) for one, of in zip(answers, alone[0], strict=True)]
    print(f"{fault.name}: alike {said}")
    assert [len(one.ids) for one in answers] == [SAID] * len(prompts)
    assert_answered(said)
    server.until(lambda state: state["decode"]["cache_rank"]["started"] > starts)
    assert until_served(server, prompts[0])["state"] == "serving"
