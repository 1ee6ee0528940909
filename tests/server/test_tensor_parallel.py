"""Two tensor-parallel ranks on a CPU: answers of one rank, and one decode path on both. What comes late on one:
`tests/serving/test_agreement.py`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.offload.kv_files import kv_file_name
from tests.offload.slow_file import slow
from tests.server.harness import EXACT_CONFIG, Answer
from tests.server.jobs import Prebuilt
from tests.server.test_offload import BYTES_OF_TOKEN, FIRST, FLAGS, SECOND, served
from tests.server.test_offload import TOKENS as FEW
from tests.server.test_offload_faults import Asked, _corrupt, config_of

TOKENS = 24
EXACT: dict[str, Any] = {"share_prefixes": True, "min_shared_tokens": 512}


def cores() -> str:
    """One core for each rank: without it SGLang wants a NUMA node for each."""
    cores = sorted(os.sched_getaffinity(0))
    return f"{cores[0]}|{cores[-1]}"


@pytest.fixture
def serve_two(serve: Any) -> Any:
    def start(store: Path, config: dict[str, Any], **flags: Any) -> Any:
        env = {"SGLANG_EXT_CPU_SHORT_EXTEND": "1", "SGLANG_CPU_OMP_THREADS_BIND": cores()}
        env |= flags.pop("environment", {})
        return serve(store, config, **{"disable_overlap_schedule": None, **flags}, environment=env, tp_size="2")

    return start


@pytest.mark.boot("two-ranks")
def test_two_ranks_share_slots_build_an_index_and_read_it(serve_two: Any, texts: Any, tmp_path: Path) -> None:
    """One server's life: what requests share is read once, then indexed, each rank its own KV head, then selected from.

    Answers are always those of SGLang's own decode on the same ranks. All positions are selected.
    """
    report = tmp_path / "report.jsonl"
    build: dict[str, Any] = {"build": "shared", "build_share": 1.0, "build_after_hits": 40, "build_report": str(report)}
    (tmp_path / "store").mkdir()
    server = serve_two(tmp_path / "store", {**EXACT_CONFIG, **EXACT, **build})
    one, other = re.findall(r"at most ([\d,]+) bytes in memory \(5% of the KV pool\)", server.log.read_text())
    assert one == other, "of both ranks"
    prompts = _prompts(texts)[:4]
    first = server.generate(prompts[0], TOKENS).ids  # its prefill leaves the queries that the index is built from
    expected = [server.generate(prompt, TOKENS, sparse=False).ids for prompt in prompts]
    assert first == expected[0]
    answers, delta = server.together_until(
        _calls(server, prompts), lambda found: found.cascade_steps > TOKENS // 2, attempts=8
    )
    assert [answer.ids for answer in answers] == expected
    assert delta.cascade_steps > TOKENS // 2
    for rank in _same_path(delta.after):
        assert rank["cascade_steps"] == delta.after["cascade_steps"]
    for _ in range(build["build_after_hits"]):
        if server.state()["builds"]["open"]:
            break
        server.generate(prompts[0], 1)  # one hit more
    deadline = time.monotonic() + 300
    while server.state()["builds"]["built"] == 0 and time.monotonic() < deadline:
        assert server.generate(prompts[0], 2 * TOKENS).ids[:TOKENS] == expected[0]
    builds = server.state()["builds"]
    assert builds["built"] == 1, builds
    (line,) = report.read_text().splitlines()
    assert '"status": "built"' in line
    # Both ranks read their own KV heads of it, and take one path in every step.
    found, delta = server.during(lambda: _ask_together(server, prompts))
    assert found == expected
    assert (delta.hits, delta.fallbacks) == (len(prompts), {})
    assert delta.sparse_rows >= len(prompts) * (TOKENS - 1)
    for rank in _same_path(delta.after):
        assert rank["sparse_steps"] == delta.after["sparse_steps"]
        assert rank["resident_bytes"] > 0
    _commands_reach_both_ranks(server, prompts, expected)


def _commands_reach_both_ranks(server: Any, prompts: Sequence[str], expected: Sequence[tuple[int, ...]]) -> None:
    """Turned off while requests run, and on again: answers stay those of dense decode, and both ranks took one path."""

    def switch() -> Answer:
        for name in ("off", "on", "off", "on"):
            server.post(f"/sparse_attn/{name}", {"shared_prefixes": True} if name == "off" else {})
            server.generate(prompts[0], 2)
        return server.generate(prompts[0], TOKENS)

    answers = server.together([*_calls(server, prompts), switch])
    assert [answer.ids for answer in answers] == [*expected, expected[0]]
    server.post("/sparse_attn/off", {})
    found, delta = server.during(lambda: _ask_together(server, prompts))
    assert (found, delta.sparse_rows) == (expected, 0)
    assert delta.fallbacks == {"by_operator": len(prompts)}
    server.post("/sparse_attn/on", {})
    [digest] = [line["digest"] for line in server.get("/sparse_attn/indexes")["indexes"]]
    assert server.post("/sparse_attn/evict", {"index": digest})["device"] == "done"
    ranks = _same_path(server.state())
    assert [rank["resident_bytes"] for rank in ranks] == [0, 0]
    assert server.post("/sparse_attn/budget", {"top_k": 256})["top_k"] == 256
    _, delta = server.during(lambda: _ask_together(server, prompts))
    attended = delta.per_layer("attended_tokens_per_layer")
    assert attended[-1] == 256 * delta.sparse_rows > 0
    _same_path(delta.after)


@pytest.mark.parametrize("anew", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.boot("two-ranks-offload")
def test_two_ranks_keep_kv_in_host_memory_and_in_files(
    serve_two: Any, built: Prebuilt, store: Path, texts: Any, tmp_path: Path, anew: bool
) -> None:
    """What goes wrong on one rank alone: both decide alike, and answers are those without. At the end SGLang's cache is
    empty, or the server is another one.
    """
    folder, flags = tmp_path / "kv", {**FLAGS, "fresh": True}
    server = serve_two(store, config_of(folder), **flags)
    ranks: Any = [SimpleNamespace(rank=rank, size=2) for rank in range(2)]
    files = [folder / kv_file_name(built.line("second")["digest"], rank) for rank in ranks]
    prompts = [texts.ask(texts.second, n) for n in range(3)]
    one = Asked(server, prompts[0], SECOND, files[1])
    one.right(hosted=False)
    one.happens("saved", 1)
    assert [file.stat().st_size for file in files] == [4096 + SECOND * BYTES_OF_TOKEN // 2] * 2
    assert sorted(folder.iterdir()) == sorted(files)
    served(server, prompts, SECOND)
    # Damaged, missing: on one rank each. The other rank's file stays.
    for number, damage in enumerate((lambda: _corrupt(files[1]), files[0].unlink)):
        kept = files[number].stat().st_mtime_ns
        server.flush()
        damage()
        one.right(hosted=False)
        one.happens("saved", number + 2)
        assert all(file.exists() for file in files)
        assert files[number].stat().st_mtime_ns >= kept
        one.right(hosted=True)
    one.happens("load_failed", 1)
    # Slow, on one rank: others are served meanwhile; an abort, and a flush, in between.
    server.flush()
    with ThreadPoolExecutor(1) as pool:
        with slow(files[1]):
            waits = pool.submit(server.generate, prompts[0], FEW)
            server.until(lambda state: state["offload"]["prefixes"].get("loading") == 1)
            assert len(server.generate("Others are served.", 4).ids) == 4
            assert "loaded" not in server.state()["offload"]["events"]
        answer = waits.result(60)
    assert answer.ids == one.dense
    assert answer.cached_tokens >= SECOND
    server.flush()
    with one.held():
        one.happens("loaded", 1)
    one.happens("loaded", 2)
    one.right(hosted=True)
    one.flushed_while_read()
    # Another document, which needs the room.
    one.right(hosted=True)
    other = Asked(server, texts.ask(texts.first, 0), FIRST, files[0])
    one.right(hosted=True)
    other.right(hosted=False)
    other.right(hosted=True)
    other.balanced(host=1)
    _alike(server)
    # From files, without prefill; together, and behind a prefix that leaves for another.
    if anew:
        server = serve_two(store, config_of(folder), **flags)
    server.flush()
    for each in (one, other):
        each.on(server)
    one.right(hosted=True)
    one.happens("loaded", 1)
    served(server, prompts, SECOND)
    calls = [lambda p=prompt: server.generate(p, FEW) for prompt in (other.prompt, *prompts)]
    answers = server.together(calls)
    assert [answers[0].ids, answers[1].ids] == [other.dense, one.dense]
    other.right(hosted=True)
    server.flush()
    one.balanced()
    _alike(server)


def _alike(server: Any) -> None:
    """Both ranks came to the same, and their pools have all that they had."""
    states = [rank["offload"] for rank in _same_path(server.settled())]
    for state in states:
        assert state.pop("residents")["wanted"] > 0
        assert state["problem"] is None
    assert states[0] == states[1]


def _prompts(texts: Any) -> list[str]:
    return [texts.ask(texts.first, n) for n in range(4)] + [texts.ask(texts.second, 0)]


def _calls(server: Any, prompts: Sequence[str]) -> list[Callable[[], Answer]]:
    return [lambda p=p: server.generate(p, TOKENS) for p in prompts]


def _ask_together(server: Any, prompts: Sequence[str]) -> list[tuple[int, ...]]:
    return [answer.ids for answer in server.together(_calls(server, prompts))]


def _same_path(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each rank; both took one path in every step."""
    ranks: list[dict[str, Any]] = state["ranks"]
    assert len(ranks) == 2
    assert ranks[0]["history"] == ranks[1]["history"] != 0
    assert ranks[0]["votes"] == ranks[1]["votes"] > 0
    assert state["decode"]["refusal"] in (None, "share_prefixes is off")
    return ranks


@pytest.mark.full
def test_a_selection_is_that_of_one_rank(serve: Any, serve_two: Any, texts: Any, store: Path) -> None:
    """A quarter of the prefix, in a plan with reuse layers: each rank selects for its own head.

    Asked one by one, as a group selects for all of its requests, and who is in it depends on when they come.
    """
    plan = ["dense", "anchor", {"reuse": 1, "head_map": [0, 1]}, "anchor", {"reuse": 3}, "anchor"]
    config = {**EXACT_CONFIG, "keep_ratio": 0.25, "layer_plan": plan}
    servers = (lambda: serve(store, config), lambda: serve_two(store, config))
    one, two = ([call().ids for call in _calls(start(), _prompts(texts))] for start in servers)
    assert one == two
    server = serve_two(store, config)  # the one that runs
    _ask_together(server, _prompts(texts))
    state = server.settled()
    _same_path(state)
    assert state["keep_ratio"] < 0.5


@pytest.mark.full
def test_two_ranks_build_what_one_builds(
    serve: Any, texts: Any, prebuild: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Rank 0 has the KV heads of both. Sums of two ranks round otherwise: codes may differ by one, here and there."""
    serve.close()
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", cores())
    prompts = [{"id": "first", "text": texts.first.text}, {"id": "short", "text": texts.first.questions[0].text}]
    prompts.append({"id": "again", "text": texts.first.text})
    jobs = [prebuild(tmp_path / "two", prompts, chunked_prefill_size="512", tp_size="2")]
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND")
    jobs.append(prebuild(tmp_path / "one", prompts[:1], chunked_prefill_size="512"))
    two, one = jobs
    assert [line["status"] for line in two.report] == ["built", "skipped", "exists"], two.output[-3000:]
    assert two.line("first")["digest"] == one.line("first")["digest"]
    assert two.line("first")["recall"]["ab_sparse"] == pytest.approx(one.line("first")["recall"]["ab_sparse"], abs=0.01)
    mine, theirs = two.index("first").arrays, one.index("first").arrays
    assert mine.keys() == theirs.keys()
    for key, array in mine.items():
        assert array.shape == theirs[key].shape
        near = abs(array - theirs[key]) <= 1e-3 * abs(theirs[key]) if array.dtype.kind == "f" else array == theirs[key]
        assert near.mean() > 0.98, key
    server = serve(two.store, EXACT_CONFIG)
    _, delta = server.compared(_prompts(texts)[:1], TOKENS)
    assert delta.sparse_rows >= TOKENS - 1
