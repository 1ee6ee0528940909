"""Prefixes in host memory in a real server: greedy answers are those without, token by token, and nothing leaks.

The padding page, whose slots stand for what lies in host memory, holds NaN.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.server.harness import MODEL, PRODUCTION, SPARSE_CONFIG, Answer, Pool, Server
from tests.server.test_schedules import SMALL_POOL

BYTES_OF_TOKEN = 6 * 2 * 2 * 64 * 4
"""Layers, K and V, KV heads, width, fp32."""
FIRST, SECOND = 1536, 1280
"""Tokens of the indexed documents. The pool has room for one of the two."""
CONFIG: dict[str, Any] = {
    **PRODUCTION,
    "offload": {
        "host_bytes": 2048 * BYTES_OF_TOKEN,
        "min_tokens": 1024,
        "staging_tokens": 512,
        "resident_tokens": 1536,
    },
}
FLAGS: dict[str, Any] = {
    "disable_overlap_schedule": None,
    "chunked_prefill_size": "512",
    "environment": {"SGLANG_EXT_CPU_SHORT_EXTEND": "1", "SGLANG_EXT_CPU_POISON": "1"},
}
TOKENS = 12


def offload(server: Server) -> dict[str, Any]:
    """What the server says of its host memory, without requests."""
    state = server.settled()["offload"]
    assert state["users"] == state["rows"] == 0
    return dict(state)


def copied_out(server: Server, prompt: str) -> None:
    """A request that decodes leaves its prefix in host memory."""
    before = offload(server)["events"].get("copied", 0)
    server.generate(prompt, 4)
    assert offload(server)["events"]["copied"] == before + 1


def served(server: Server, prompts: list[str], prefix: int) -> list[Answer]:
    """Answers behind a prefix in host memory, one by one and together, are those without; so is the usage."""
    before = offload(server)["translated"]
    dense = [server.generate(prompt, TOKENS, sparse=False) for prompt in prompts]
    answers = [server.generate(prompt, TOKENS) for prompt in prompts]
    again = server.together([lambda p=prompt: server.generate(p, TOKENS) for prompt in prompts])
    for found in (answers, again):
        for one, other in zip(found, dense, strict=True):
            assert one.ids == other.ids
            assert one.meta["prompt_tokens"] == other.meta["prompt_tokens"]
            assert prefix <= one.cached_tokens < one.meta["prompt_tokens"]
            assert one.told["reasons"] == []
            assert one.told["steps"]["sparse"] == one.decode_steps
    assert offload(server)["translated"] == before + 2 * len(prompts)
    return answers


@pytest.mark.parametrize("page", ["16", pytest.param("1", marks=pytest.mark.full)])
@pytest.mark.boot("offload")
def test_answers_behind_host_memory_are_those_without(
    serve: Pool, store: Path, texts: Any, tmp_path: Path, page: str
) -> None:
    """One server's life: copied out, matched, chunks, mixed batches, abort, a full pool, flush, other weights."""
    server = serve(store, CONFIG, fresh=True, page_size=page, **FLAGS)
    assert "rows of the KV tensors behind SGLang's" in server.log.read_text()
    assert offload(server)["prefixes"] == {}
    first = [texts.ask(texts.first, n) for n in range(3)]
    copied_out(server, first[0])
    served(server, first, FIRST)
    # A suffix of several chunks; then what stands behind the prefix comes from SGLang's cache.
    long = f"{texts.first.text} {texts.unindexed.text}"
    served(server, [long], FIRST)
    assert server.generate(f"{long} {texts.unindexed.questions[0].text}", TOKENS).cached_tokens >= FIRST + 1152
    _beside_others(server, first, texts)
    _turned_off(server, first[0])
    _aborted(server, first[0])
    _room(server, texts)
    # A flush forgets, in SGLang's cache and here.
    server.flush()
    state = offload(server)
    assert state["prefixes"] == {}
    assert state["free_pages"] == state["pages"]
    assert server.generate(first[0], TOKENS).cached_tokens == 0
    served(server, first[:2], FIRST)
    _weights_updated(server, first[0], tmp_path / "others")


def _beside_others(server: Server, hosted: list[str], texts: Any) -> None:
    """Rows with and without a prefix in host memory, in one batch."""
    others = [texts.ask(texts.unindexed, 0), texts.ask(texts.large, 0)]
    dense = [server.generate(prompt, TOKENS, sparse=False).ids for prompt in [*hosted, *others]]
    calls = [lambda p=prompt: server.generate(p, TOKENS) for prompt in [*hosted, *others[:1]]]
    calls.append(lambda: server.generate(others[1], TOKENS, sparse=False))
    assert [answer.ids for answer in server.together(calls)] == dense


def _turned_off(server: Server, prompt: str) -> None:
    """A request that runs attends its prefix exactly, a layer at a time; one that comes is prefilled."""
    dense = [server.generate(prompt, tokens, sparse=False).ids for tokens in (60, TOKENS)]
    for _attempt in range(10):  # it may end before the command comes
        translated = offload(server)["translated"]
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.generate, prompt, 60)
            server.until(lambda state, n=translated: state["offload"]["translated"] > n)
            server.post("/sparse_attn/off", {"shared_prefixes": True})
            assert server.generate(prompt, TOKENS).ids == dense[1]
            server.post("/sparse_attn/on", {})
            answer = running.result(120)
        assert answer.ids == dense[0]
        assert offload(server)["translated"] == translated + 1
        if answer.told["steps"]["sparse"] > 0 < answer.told["steps"]["dense"]:
            return
    pytest.fail("expected the command to come while the request runs, in ten attempts")


def _aborted(server: Server, prompt: str) -> None:
    """In the middle of an answer, and of a prefill."""
    with ThreadPoolExecutor(1) as pool:
        for tokens in (400, 1):
            before = server.state()["offload"]["translated"]
            future = pool.submit(server.generate, f"{prompt} {prompt}", tokens, rid="gone")
            server.until(lambda state, n=before: state["offload"]["translated"] > n)
            server.post("/abort_request", {"rid": "gone"})
            future.exception(120)
    offload(server)


def _room(server: Server, texts: Any) -> None:
    """A prefix that is in use stays; one that is not leaves for another; one that residents do not hold stays out."""
    prompts = [texts.ask(one, 0) for one in (texts.second, texts.large)]
    dense = [server.generate(prompt, TOKENS, sparse=False).ids for prompt in prompts]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, texts.ask(texts.first, 0), 3000, rid="user")
        server.until(lambda state: state["offload"]["rows"] > 0)
        assert server.generate(prompts[0], TOKENS).ids == dense[0]
        refused = server.state()["offload"]
        assert refused["rows"] == 1, "expected the request that holds the prefix to run still"
        assert refused["refused"]["host_full"] == 1
        server.post("/abort_request", {"rid": "user"})
        running.exception(120)
    copied_out(server, prompts[0])
    assert offload(server)["events"]["evicted"] == 1
    second = [texts.ask(texts.second, n) for n in range(3)]
    served(server, second, SECOND)
    _beside_others(server, second, texts)
    server.generate(prompts[1], 3)
    assert offload(server)["refused"]["few_residents"] == 1
    copied_out(server, texts.ask(texts.first, 0))


def _weights_updated(server: Server, prompt: str, folder: Path) -> None:
    """In place: one from a mistyped path changes nothing; behind others no index or KV of before is used."""
    before = server.generate(prompt, TOKENS)
    with pytest.raises(OSError, match="HTTP 400"):
        server.post("/update_weights_from_disk", {"model_path": "/nowhere"})
    again = server.generate(prompt, TOKENS)
    assert (again.ids, again.told["steps"]) == (before.ids, before.told["steps"])
    assert again.told["steps"]["sparse"] == again.decode_steps
    weights = load_file(MODEL / "model.safetensors")
    weights["model.layers.3.self_attn.v_proj.weight"] *= 2
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert server.post("/update_weights_from_disk", {"model_path": str(folder)})["success"]
    dense = server.generate(prompt, TOKENS, sparse=False).ids
    assert offload(server)["prefixes"] == {}
    answer, delta = server.during(lambda: server.generate(prompt, TOKENS))
    assert (answer.ids, answer.told["steps"]["sparse"], delta.hits) == (dense, 0, 0)


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.full)])
@pytest.mark.boot("offload-selecting")
def test_questions_that_select_are_answered(serve: Pool, store: Path, texts: Any, ranks: str) -> None:
    """A prefill of few tokens attends a part of its prefix. What decodes selects as much with and without."""
    config = {**SPARSE_CONFIG, **{name: CONFIG[name] for name in ("offload", "share_prefixes")}}
    sizes = {"host_bytes": 8192 * BYTES_OF_TOKEN, "select_prefill_tokens": 64}
    flags = dict(FLAGS)
    if ranks != "1":
        cores = sorted(os.sched_getaffinity(0))
        binding = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
        flags |= {"tp_size": ranks, "environment": FLAGS["environment"] | binding}
    server = serve(store, {**config, "offload": {**config["offload"], **sizes}}, fresh=True, **flags)
    for document, prefix in ((texts.first, FIRST), (texts.large, 5120)):
        prompts = [texts.ask(document, n) for n in range(8)]
        copied_out(server, prompts[0])
        before = offload(server)
        calls = [lambda p=prompt: server.generate(p, to_the_end=True) for prompt in prompts]
        answers = [call() for call in calls] + server.together(calls)
        right = [of.score(one.text) for one, of in zip(answers, 2 * document.questions[:8], strict=True)]
        assert sum(right) >= 15
        assert all(one.cached_tokens >= prefix for one in answers)
        after = offload(server)
        assert after["selected"] == before["selected"] + 16
        assert after["translated"] == before["translated"] + 16
    long = f"{texts.first.text} {texts.unindexed.text}"  # several chunks, more tokens each
    assert server.generate(long, TOKENS).cached_tokens >= FIRST
    assert offload(server)["selected"] == after["selected"]


@pytest.mark.full
@pytest.mark.boot("offload-small")
def test_requests_that_are_retracted_and_matched_again(serve: Pool, store: Path, texts: Any) -> None:
    """A pool with room for one document beside an answer, but for the suffixes and answers of few requests."""
    small = {**SMALL_POOL, "environment": {**SMALL_POOL["environment"], "SGLANG_EXT_CPU_POISON": "1"}}
    flags = {**FLAGS, **small, "max_running_requests": "12"}
    server = serve(store, CONFIG, fresh=True, **flags)
    prompts = [texts.ask(texts.first, n) for n in range(12)]
    dense = [server.generate(prompt, 200, sparse=False).ids for prompt in prompts]
    copied_out(server, prompts[0])
    for _attempt in range(5):  # a request that is late finds room
        calls = [lambda p=prompt: server.generate(p, 200) for prompt in prompts]
        answers = server.together(calls)
        assert [answer.ids for answer in answers] == dense
        retractions = sum(answer.num_retractions for answer in answers)
        if retractions:
            break
    assert retractions > 0, "expected the pool to be too small for twelve requests"
    assert offload(server)["translated"] >= 12 + retractions
