"""`sglang-ext prebuild` and building while serving, on the real SGLang."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefix_index import FileStore
from prefix_kernels.pooling import Pooling
from sglang_ext.config import config_from_dict
from sglang_ext.decode.select_op import selection_group
from sglang_ext.decode.trace import SparseStep, read_trace
from sglang_ext.methods import make_selector
from sglang_ext.methods.arrays import join_heads
from sglang_ext.methods.base import LeveledSelector, SelectArgs, parse_spec, summed_every
from tests.server.harness import EXACT_CONFIG


@pytest.mark.boot("production")
def test_a_job_reports_each_prompt_and_says_why_not(built: Any) -> None:
    statuses = {line["id"]: line["status"] for line in built.report}
    names = ("first", "second", "long", "second-named", "large", "damaged")
    refused = dict.fromkeys(("negative", "outside", "too-long"), "failed")
    assert statuses == {**dict.fromkeys(names, "built"), **refused, "short": "skipped"}
    assert built.status == 1, "a failed prompt makes the job fail"
    assert "6 built, 3 failed, 1 skipped" in built.output
    for name, one in (("negative", -1), ("outside", 1 << 20)):
        line = built.line(name)
        assert line["reason"] == "unknown_tokens"
        assert f"(the model's vocabulary), got {one} at position 1087" in line["detail"]
    too_long, short = built.line("too-long"), built.line("short")
    assert too_long["reason"] == "too_long"
    assert "--context-length" in too_long["detail"]
    assert "12288" in too_long["detail"]
    assert short["reason"] == "short_prefix"
    assert "min_sparse_prompt_len" in short["detail"]


@pytest.mark.boot("production")
def test_a_built_line_holds_sizes_time_and_recall(built: Any) -> None:
    line = built.line("first")
    assert line["num_tokens"] == line["prompt_tokens"] == 1536
    assert line["kv_bytes"] == 6 * 1536 * 2 * 128 * 4
    assert 0 < line["index_bytes"] < line["kv_bytes"]
    assert line["build_seconds"] > 0
    for value in line["recall"].values():
        assert 0 < value <= 1.0 + 1e-6
    assert built.line("second")["digest"] != built.line("second-named")["digest"], "one text in two namespaces"


#: Up to 2,048 tokens all positions are selected; of `large` as many, among 3,072 that another process names by the
#: queries of the step before.
AHEAD: dict[str, Any] = {
    **EXACT_CONFIG,
    "keep_ratio": 0.1,
    "min_top_k": 2048,
    "method": "two_level",
    "methods": {"two_level": {"candidate_factor": 1.5}},
    "select_ahead": True,
    "cache_device": "cpu",
}


@pytest.fixture(scope="module")
def building(serve: Any, tmp_path_factory: Any) -> Any:
    """(server that indexes what it prefills, in mixed chunks and pages of 64 tokens; path of its report)."""
    folder = tmp_path_factory.mktemp("building")
    (folder / "store").mkdir()
    report = folder / "report.jsonl"
    config = {**AHEAD, "build": "prefill", "build_report": str(report), "trace_folder": str(folder / "trace")}
    server = serve(folder / "store", config, enable_mixed_chunk="", chunked_prefill_size="512", page_size="64")
    return server, report


def _lines(report: Path) -> dict[str, dict[str, Any]]:
    return {line["rid"]: line for line in map(json.loads, report.read_text().splitlines())}


@pytest.mark.boot("building")
def test_a_server_that_builds_indexes_what_it_prefills_and_uses_it(building: Any, texts: Any) -> None:
    server, report = building
    prompt = texts.ask(texts.first, 0)
    first = server.generate(prompt, 12, rid="cold")
    line = _lines(report)["cold"]
    assert (line["status"], line["num_tokens"]) == ("built", 1536)
    second, delta = server.during(lambda: server.generate(prompt, 12))
    assert (delta.sparse_rows, second.ids) == (11, first.ids)


@pytest.mark.boot("building")
def test_a_capture_that_the_radix_cache_served_in_part_is_rejected_and_the_server_goes_on(
    building: Any, texts: Any
) -> None:
    server, report = building
    server.generate(texts.first.text, 1)
    shared = " ".join(texts.first.text.split()[:1024])
    dense = server.generate(f"{shared} {texts.second.text}", 8, sparse=False)
    server.flush()
    server.generate(texts.first.text, 1)
    answer = server.generate(f"{shared} {texts.second.text}", 8, rid="partly-cached")
    assert answer.cached_tokens >= 1008
    line = _lines(report)["partly-cached"]
    assert line["status"] == "failed"
    assert "came from the prefix cache" in line["detail"]
    assert answer.ids == dense.ids
    assert server.generate(texts.ask(texts.second, 0), 4, rid="afterwards").decode_steps == 3
    assert _lines(report)["afterwards"]["status"] == "built"


@pytest.mark.boot("building")
def test_requests_in_one_mixed_batch_are_captured_apart(building: Any, texts: Any) -> None:
    server, report = building
    server.flush()
    prompts = {"mixed-a": texts.ask(texts.unindexed, 0), "mixed-b": f"{texts.tail.text} {texts.tail.questions[0].text}"}
    server.together([lambda r=rid, p=prompt: server.generate(p, 16, rid=r) for rid, prompt in prompts.items()])
    lines = _lines(report)
    assert [lines[rid]["status"] for rid in prompts] == ["built", "built"], lines
    assert server.settled()["requests"] == 0


@pytest.mark.boot("building")
def test_mixed_chunks_equal_dense(building: Any, texts: Any) -> None:
    """Of requests with an index, steps that run inside a mixed batch are dense."""
    server, _ = building
    prompts = [texts.ask(doc, n) for n, doc in enumerate((texts.first, texts.first, texts.second, texts.unindexed))]
    for document in (texts.first, texts.second):
        server.generate(document.text, 1)
    _, delta = server.compared_together(prompts, 24, lambda found: found.sparse_rows > 0, cold=True)
    assert 0 < delta.sparse_rows <= 4 * 23
    assert delta.hits >= 3, "of the documents that were prefilled whole"


@pytest.mark.boot("building")
def test_candidates_named_ahead_are_what_the_references_say(building: Any, texts: Any) -> None:
    """Without decode graphs: by a step's queries the first level names, by the next step's the second one ranks."""
    server, report = building
    prompt = texts.ask(texts.large, 0)
    server.generate(prompt, 1, rid="large")
    before = server.state()["decode"]
    _, delta = server.during(lambda: server.generate(prompt, 48, rid="trace-ahead"))
    after = server.state()["decode"]
    kept = after["kept_steps"] - before["kept_steps"]
    assert (delta.sparse_rows, delta.fallbacks) == (47, {})
    assert 16 <= kept < 47
    served, missed = (after["cache_rank"][name] - before["cache_rank"][name] for name in ("served", "missed"))
    assert (served, missed) == (kept - 1, 0), "the first one had what the step before named itself"
    (path,) = (report.parent / "trace").iterdir()
    steps = [group for one in read_trace(path) if isinstance(one, SparseStep) for group in one.groups]
    assert len(steps) == 47
    config = config_from_dict({name: value for name, value in AHEAD.items() if name != "methods"})
    spec = parse_spec({"method": "two_level", **AHEAD["methods"]["two_level"]})
    selector, places = make_selector(spec, summed_every(config)), selection_group(config, 5120, 2048)
    assert isinstance(selector, LeveledSelector)
    differing = 0
    with FileStore(report.parent / "store") as store, store.get(_lines(report)["large"]["digest"]) as file:
        dim = file.identity.model.head_dim
        windows = {"num_sink": places.num_sink, "num_recent": places.num_recent}
        args = SelectArgs(prefix_len=5120, budget=2048, sm_scale=dim**-0.5, pooling=Pooling(config.pooling), **windows)
        for layer in range(6):
            own = [{key.name.removeprefix("two_level."): torch.from_numpy(file.array(*key)) for key in file.keys
                    if (key.layer, key.kv_head) == (layer, head)} for head in range(2)]  # fmt: skip
            arrays, queries = join_heads(own), [step.query(layer, dim) for step in steps]
            for number, step in enumerate(steps):
                inline = selector.select(arrays, queries[number], args)
                found, ahead = step.mask(layer), inline
                if number >= len(steps) - kept:
                    named = selector.candidates(arrays, queries[number - 1], args)
                    ahead = selector.select_among(arrays, queries[number], args, named)
                for head in range(2):
                    mine = set(np.flatnonzero(found[head]).tolist())
                    assert len(mine) == 2048
                    assert len(mine - set(ahead.positions[head].tolist())) <= 2, "near ties"
                    differing += mine != set(inline.positions[head].tolist())
    assert differing > 0, "a step's own candidates are others"


@pytest.mark.boot("building")
def test_requests_end_and_are_right_whatever_becomes_of_the_cache_rank(building: Any, texts: Any) -> None:
    """Killed, stopped, the words that both read overwritten, under load."""
    server, _ = building
    documents = (texts.first, texts.second, texts.first)
    prompts = [texts.ask(document, n) for n, document in enumerate(documents)]
    large = texts.ask(texts.large, 1)
    for prompt in (texts.first.text, texts.second.text, texts.large.text):
        server.generate(prompt, 1)
    dense = [server.generate(prompt, 64, sparse=False).ids for prompt in prompts]

    def rank() -> dict[str, Any]:
        found: dict[str, Any] = server.state()["decode"]["cache_rank"]
        return found

    def kill() -> None:
        os.kill(rank()["pid"], signal.SIGKILL)

    def stop() -> None:
        os.kill(rank()["pid"], signal.SIGSTOP)

    def overwrite() -> None:
        (path,) = (one for one in Path(f"/proc/{rank()['pid']}/fd").iterdir() if "memfd:" in os.readlink(one))
        words = np.memmap(path, np.int64, "r+", shape=4)
        for number in range(100):
            words[[0, 3]] = number << 40 | number, number << 32 | 7
            time.sleep(0.002)

    for fault in (kill, overwrite, stop):
        server.until(lambda state: state["decode"]["cache_rank"]["state"] == "serving")
        served = rank()["served"]
        server.generate(large, 64)
        assert rank()["served"] > served
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(server.generate, prompt, 64) for prompt in (*prompts, large)]
            fault()
            answers = [call.result() for call in calls]
        assert [answer.ids for answer in answers[:3]] == dense, fault.__name__
        assert len(answers[3].ids) == 64
    assert rank()["started"] >= 2
