"""Prefixes in host memory in a real server: greedy answers are those without, token by token, and nothing leaks.

The padding page, whose slots stand for what lies in host memory, holds NaN.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.offload.kv_files import kv_file_name
from tests.offload.slow_file import slow
from tests.server.harness import PRODUCTION, Answer, Pool, Server
from tests.server.jobs import Prebuilt
from tests.server.test_schedules import SMALL_POOL

BYTES_OF_TOKEN = 6 * 2 * 2 * 64 * 4
"""Layers, K and V, KV heads, width, fp32."""
FIRST, SECOND, LARGE = 1536, 1280, 5120
"""Tokens of the indexed documents. The pool has room for one of the first two."""
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
            (told,) = one.meta["sparse_attn"]
            assert told["reasons"] == []
            assert told["steps"]["sparse"] == len(one.ids) - 1
    assert offload(server)["translated"] == before + 2 * len(prompts)
    return answers


@pytest.mark.parametrize("page", ["16", pytest.param("1", marks=pytest.mark.full)])
@pytest.mark.boot("offload")
def test_answers_behind_host_memory_are_those_without(serve: Pool, store: Path, texts: Any, page: str) -> None:
    """One server's life: copied out, matched, chunks, mixed batches, abort, a full pool, flush."""
    server = serve(store, CONFIG, fresh=True, page_size=page, **FLAGS)
    assert "rows of the KV tensors behind SGLang's" in server.log.read_text()
    assert offload(server)["prefixes"] == {}
    first = [texts.ask(texts.first, n) for n in range(3)]
    copied_out(server, first[0])
    served(server, first, FIRST)
    # A suffix of several chunks; then what stands behind the prefix comes from SGLang's cache.
    long = f"{texts.first.text} {texts.unindexed.text}"
    served(server, [long], FIRST)
    assert server.generate(f"{long} {first[0]}", TOKENS).cached_tokens >= FIRST + 1152
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


def _beside_others(server: Server, hosted: list[str], texts: Any) -> None:
    """Rows with and without a prefix in host memory, in one batch."""
    others = [texts.ask(texts.unindexed, 0), texts.ask(texts.large, 0)]
    dense = [server.generate(prompt, 30, sparse=False).ids for prompt in [*hosted, *others]]
    calls = [lambda p=prompt: server.generate(p, 30) for prompt in [*hosted, *others[:1]]]
    calls.append(lambda: server.generate(others[1], 30, sparse=False))
    assert [answer.ids for answer in server.together(calls)] == dense


def _turned_off(server: Server, prompt: str) -> None:
    """A request that runs attends its prefix exactly, a layer at a time; one that comes is prefilled."""
    dense = [server.generate(prompt, tokens, sparse=False).ids for tokens in (300, TOKENS)]
    translated = server.state()["offload"]["translated"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, prompt, 300)
        server.until(lambda state: state["offload"]["rows"] == 1)
        server.post("/sparse_attn/off", {"shared_prefixes": True})
        assert server.generate(prompt, TOKENS).ids == dense[1]
        server.post("/sparse_attn/on", {})
        answer = running.result(120)
    assert answer.ids == dense[0]
    steps = answer.meta["sparse_attn"][0]["steps"]
    assert steps["sparse"] > 0 < steps["dense"]
    assert offload(server)["translated"] == translated + 1


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
        running = pool.submit(server.generate, texts.ask(texts.first, 0), 300, rid="user")
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


@pytest.mark.boot("offload-files")
def test_a_server_that_starts_anew_needs_no_prefill(
    serve: Pool, built: Prebuilt, store: Path, texts: Any, tmp_path: Path
) -> None:
    """From its file, which the prebuild wrote, a prefix is read while its request waits; a file that is damaged or gone
    is written anew.
    """
    kept = {**CONFIG["offload"], "folder": str(shutil.copytree(built.kv, tmp_path / "kv"))}
    prompts = [texts.ask(texts.second, n) for n in range(3)]
    server = serve(store, {**CONFIG, "offload": kept}, fresh=True, enable_metrics="", **FLAGS)
    answer = server.generate(prompts[0], TOKENS)
    assert answer.cached_tokens >= SECOND
    assert _until(server, "loaded") == 1
    dense = [server.generate(prompt, TOKENS, sparse=False).ids for prompt in prompts]
    assert answer.ids == dense[0]
    served(server, prompts, SECOND)
    server.flush()
    file = tmp_path / "kv" / kv_file_name(built.line("second")["digest"])
    file.unlink()
    assert server.generate(prompts[0], TOKENS).cached_tokens == 0
    assert _until(server, "saved") == 1
    assert file.stat().st_size == 4096 + SECOND * BYTES_OF_TOKEN
    server.flush()
    content = bytearray(file.read_bytes())
    content[4096 + 1000 * BYTES_OF_TOKEN] ^= 64
    file.write_bytes(content)
    answer = server.generate(prompts[1], TOKENS)
    assert answer.ids == dense[1]
    assert answer.cached_tokens < SECOND
    assert _until(server, "load_failed") == 1
    server.until(lambda state: state["offload"]["events"]["saved"] == 2)
    counted = {"loaded": 1, "load_failed": 1, "saved": 2, "copied": 2, "translated": 1 + 2 * len(prompts)}
    server.until(lambda _state: {n: c for n, c in server.metrics()["offload"].items() if c} == counted)
    # Another process, which selects a part, but for the first layer; its requests do not wait.
    config = {**CONFIG, "offload": kept, "prefetch_policy": "best_effort", "min_top_k": 256}
    config |= {"layer_plan": ["dense", *["anchor"] * 5], "suffix_dense_tokens": None}
    server = serve(store, config, fresh=True, **FLAGS)
    for number, prompt in enumerate(prompts):
        on_device = server.generate(prompt, TOKENS)
        server.until(lambda state, n=number: state["offload"]["events"].get("loaded", 0) > n)
        found = server.generate(prompt, TOKENS)
        assert found.ids == on_device.ids
        assert (on_device.cached_tokens, found.cached_tokens >= SECOND) == (0, True)
        (there,), (here,) = on_device.meta["sparse_attn"], found.meta["sparse_attn"]
        assert here["selected_tokens"] == there["selected_tokens"] == 256
        assert here["steps"]["sparse"] == TOKENS - 1
        server.flush()
    state = offload(server)
    assert (state["events"].get("copied", 0), state["translated"]) == (0, len(prompts))
    assert 0 < state["residents"]["transferred"] < state["residents"]["wanted"]


@pytest.mark.boot("offload-files")
def test_prompts_that_are_longer_than_the_pool(
    serve: Pool, built: Prebuilt, store: Path, texts: Any, tmp_path: Path
) -> None:
    """They need room for what stands behind their prefix. A prompt whose prefix is in no file is refused, and one whose
    file is not read in time; a pause lets them wait.
    """
    prompts = [texts.ask(one, n) for one in (texts.first, texts.second) for n in range(2)]
    whole = serve(store, PRODUCTION, fresh=True, **FLAGS)
    expected = [whole.generate(prompt, 100).ids for prompt in prompts]
    kept = {**CONFIG["offload"], "folder": str(shutil.copytree(built.kv, tmp_path / "kv"))}
    config = {**CONFIG, "offload": kept, "prefetch_policy": "timeout", "prefetch_timeout_s": 5.0}
    server = serve(store, config, fresh=True, max_total_tokens="1024", **FLAGS)
    for places in ((0, 1), (2, 3), (0, 2)):  # the host has room for one of the two documents
        calls = [lambda p=prompts[n]: server.generate(p, 100) for n in places]
        assert [answer.ids for answer in server.together(calls)] == [expected[n] for n in places]
    state = offload(server)
    assert state["events"]["loaded"] == state["events"]["evicted"] + 1
    assert state["events"]["loaded"] in (3, 4), "who of the last two comes first is not said"
    assert state["translated"] == 6
    with pytest.raises(OSError, match=r"HTTP 400.* exceeds the maximum allowed length"):
        server.generate(texts.ask(texts.unindexed, 0))
    file = tmp_path / "kv" / kv_file_name(built.line("first")["digest"])
    _not_read(server, file, prompts[0], expected[0])
    for mode in ("in_place", "retract"):
        _paused(server, file, mode, prompts, expected)
    server.flush()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(OSError, match=r"HTTP 400.* in host memory or a file; it is in neither"):
        server.generate(prompts[0])
    assert server.generate(prompts[2], 100).ids == expected[2]
    offload(server)


def _not_read(server: Server, file: Path, prompt: str, expected: tuple[int, ...]) -> None:
    """Its request ends with an error; others are served, and a later one with it."""
    server.flush()
    with slow(file):
        with pytest.raises(OSError, match=r"HTTP 400.* no more of its file was read within 5 s"):
            server.generate(prompt)
        assert len(server.generate("Others are served.", 4).ids) == 4
    server.until(lambda state: state["offload"]["users"] == 0)
    assert server.generate(prompt, 100).ids == expected
    assert offload(server)["problem"] is None


def _paused(server: Server, file: Path, mode: str, prompts: list[str], expected: list[tuple[int, ...]]) -> None:
    """While one waits for its file, and while one runs and one waits for its room; for longer than a file may take."""
    for running in (False, True):
        server.flush()
        with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as block:
            if not running:
                block.enter_context(slow(file))
            answers = [pool.submit(server.generate, prompts[0], 100)]
            wanted = ("rows", 1) if running else ("users", 1)
            server.until(lambda state, w=wanted: state["offload"][w[0]] == w[1])
            if running:
                answers.append(pool.submit(server.generate, prompts[2], 100))
                server.until(lambda state: state["requests"] == 1)
            server.post("/pause_generation", {"mode": mode})
            block.close()
            time.sleep(5.5 if mode == "in_place" and not running else 0.5)
            server.post("/continue_generation", {})
            assert [answer.result(60).ids for answer in answers] == [expected[0], expected[2]][: len(answers)]
    assert offload(server)["problem"] is None


def _until(server: Server, event: str) -> int:
    """How often it happened, once it has."""
    before = int(offload(server)["events"].get(event, 0))
    if not before:
        server.until(lambda state: state["offload"]["events"].get(event, 0) > 0)
    return int(offload(server)["events"][event])
