"""Indexes that a server makes while it serves: what counts as a hit, whose queries and keys, and what is given up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from prefix_index import page_hashes
from sglang_ext.config import Settings
from sglang_ext.indexing import METHODS
from sglang_ext.prefill import background_build
from sglang_ext.prefill.background_build import Build, pieces_of
from sglang_ext.prefill.builder import method_specs
from sglang_ext.prefill.hits import MAX_PREFIXES, HitCounter, Prefix
from sglang_ext.prefill.samples import QuerySample, QuerySamples
from sglang_ext.prefill.shared_builds import SharedBuilds
from sglang_ext.runtime import SparseRuntime
from tests.serving.test_runtime import DIM, GQA, KV_HEADS, LAYERS, NAMESPACE, Model, Request, _decode_batch, _mode

SHARED = list(range(64))


def hashes(tokens: list[int]) -> tuple[bytes, ...]:
    return tuple(page_hashes(tokens, 16))


# -- hits --------------------------------------------------------------------------------------------------------------


def test_a_prefix_is_due_once_after_so_many_hits() -> None:
    counter = HitCounter(after=2, least=32, align=16)
    prompts = [hashes([*SHARED, *range(1000 * n, 1000 * n + 32)]) for n in range(1, 6)]
    found = [
        counter.hit("", one, cached, 0) for one, cached in zip(prompts, (0, 70, 64, 64, 0), strict=True)
    ]  # the last one's came out of no cache: it begins with a known prefix all the same
    assert [one is not None for one in found] == [False, False, True, False, False]
    assert found[2] is not None
    assert (found[2].num_tokens, found[2].hits) == (64, 4)


def test_another_namespace_a_short_prefix_and_one_that_an_index_nearly_covers_are_not_due() -> None:
    counter = HitCounter(after=1, least=32, align=16)
    prompt = hashes([*SHARED, *range(100, 164)])
    assert counter.hit("", prompt, 16, 0) is None  # 16 tokens
    assert counter.hit("", prompt, 64, 48) is None  # an index of 48 is there
    assert len(counter) == 1
    assert counter.hit("other", prompt, 0, 0) is None
    due = counter.hit("", prompt, 0, 0)
    assert due is not None
    assert due.namespace == ""


def test_prefixes_within_each_other_are_due_as_each_is_hit_often_enough() -> None:
    counter = HitCounter(after=2, least=16, align=16)
    prompt = hashes([*SHARED[:32], *range(500, 564), 1])
    due = [counter.hit("", prompt, cached, 0) for cached in (32, 96, 96, 96)]
    assert [one and one.num_tokens for one in due] == [None, 32, 96, None]


def test_a_little_more_than_what_is_being_built_already_is_not_begun() -> None:
    counter = HitCounter(after=1, least=16, align=16)
    first = counter.hit("", hashes([*range(1280)]), 1264, 0)
    assert first is not None
    longer = hashes([*range(1280), *range(5000, 5128)])
    assert counter.hit("", longer, 1392, 0) is None
    counter.failed(first)
    assert counter.hit("", longer, 1392, 0) is not None


def test_a_build_that_failed_waits_for_more_hits_and_an_index_that_left_is_built_again() -> None:
    counter = HitCounter(after=1, least=16, align=16)
    prompt = hashes(SHARED)
    due = counter.hit("", prompt, 64, 0)
    assert due is not None
    counter.failed(due)
    assert [counter.hit("", prompt, 64, 0) is not None for _ in range(5)] == [False, False, False, True, False]
    due.built = True
    assert counter.hit("", prompt, 64, 64) is None
    due.tries = 0
    assert counter.hit("", prompt, 64, 0) is due  # no index serves it any more


def test_prefixes_that_nobody_hits_are_forgotten() -> None:
    counter = HitCounter(after=9, least=16, align=16)
    for n in range(MAX_PREFIXES + 5):
        counter.hit("", hashes([n] * 16 + SHARED), 16 + 16 * (n % 3), 0)
    assert len(counter) == MAX_PREFIXES
    assert len(counter._known) == sum(counter._pages.values())


# -- samples -----------------------------------------------------------------------------------------------------------


def sample(tokens: list[int], begin: int, value: float, rows: int = 8) -> QuerySample:
    """Queries whose values say who they are and where."""
    positions = np.linspace(begin, len(tokens) - 1, rows).astype(np.int64)
    queries = torch.full((LAYERS, rows, KV_HEADS * GQA, DIM), value) + torch.from_numpy(positions)[None, :, None, None]
    return QuerySample("", hashes(tokens), begin, positions, queries.float())


def test_a_prefix_gets_queries_of_its_own_tokens_only_and_evenly() -> None:
    samples = QuerySamples(1 << 30)
    samples.add(sample([*SHARED[:32], *range(700, 732)], 0, 1000.0))  # begins as it does, then differs
    samples.add(sample([*SHARED, *range(100, 132)], 32, 2000.0))  # computed from 32 on
    samples.add(sample(list(range(9, 99)), 0, 9000.0))  # another prompt
    found = samples.of(Prefix("", hashes(SHARED)), KV_HEADS, 4)
    assert found is not None
    assert found.shape[:2] == (LAYERS, KV_HEADS)
    values = found[0, 0, :, 0].tolist()
    positions = [value % 1000 for value in values]
    assert all(value < 3000 for value in values)
    assert max(positions) < 64
    assert sum(1000 <= value < 2000 for value in values) == sum(value >= 2000 for value in values) > 0
    assert all((value < 2000) == (position < 32) for value, position in zip(values, positions, strict=True))


def test_a_prefix_that_no_sample_covers_half_of_gets_none() -> None:
    samples = QuerySamples(1 << 30)
    samples.add(sample([*SHARED, *range(100, 132)], 48, 0.0))
    assert samples.of(Prefix("", hashes(SHARED)), KV_HEADS, 4) is None
    assert samples.of(Prefix("other", hashes(SHARED)), KV_HEADS, 4) is None


def test_samples_stay_within_their_bytes_and_the_one_used_last_stays() -> None:
    one = sample(SHARED, 0, 0.0)
    samples = QuerySamples(2 * one.queries.nbytes)
    samples.add(one)
    samples.add(sample(list(range(300, 364)), 0, 0.0))
    assert samples.of(Prefix("", hashes(SHARED)), KV_HEADS, 4) is not None
    samples.add(sample(list(range(600, 664)), 0, 0.0))
    assert samples.nbytes == 2 * one.queries.nbytes
    assert samples.of(Prefix("", hashes(SHARED)), KV_HEADS, 4) is not None
    assert samples.of(Prefix("", hashes(list(range(300, 364)))), KV_HEADS, 4) is None


def test_a_build_waits_for_samples_that_are_on_their_way() -> None:
    samples = QuerySamples(1 << 30)
    for kept in (sample(SHARED, 0, 0.0), None):
        samples.announce()
        timer = threading.Timer(0.2, samples.add, (kept,))
        timer.start()
        assert samples.of(Prefix("", hashes(SHARED)), KV_HEADS, 4) is not None
        timer.join()


def test_pieces_cover_every_head_of_every_layer_once() -> None:
    for length in (1000, 40_000, 131_072, 1_000_000):
        pieces = pieces_of(3, 8, length)
        covered = [(piece.layer, head) for piece in pieces for head in piece.heads]
        assert covered == [(layer, head) for layer in range(3) for head in range(8)]
        assert all(
            len(piece.heads) == 1 or len(piece.heads) * length <= background_build.PIECE_TOKENS for piece in pieces
        )


# -- in a runtime ------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(make_bench: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., SparseRuntime]]:
    started: list[SparseRuntime] = []

    def make(**fields: Any) -> SparseRuntime:
        given = {
            "build": "shared",
            "method": "token_index",
            "keep_ratio": 1.0,
            "layer_plan": ["anchor"] * LAYERS,
            "prefetch_policy": "wait_complete",
            "build_align": 16,
            "build_share": 1.0,
            "build_report": str(tmp_path / "report.jsonl"),
            **fields,
        }
        bench = make_bench(**given)
        runtime = SparseRuntime(Settings(config=bench.config, store=str(bench.store.folder)), Model(bench.model))
        started.append(runtime)
        return runtime

    yield make
    for runtime in started:
        runtime.close()


class Traffic:
    """Requests on one runtime, each on the slots that the prefix cache would give it."""

    def __init__(self, runtime: SparseRuntime) -> None:
        self.runtime = runtime
        self.requests: dict[str, tuple[Request, int]] = {}
        self.gen = torch.Generator().manual_seed(3)

    def prefill(self, rid: str, tokens: list[int], cached: int, chunk: int = 1000) -> None:
        """Admit and prefill; the first `cached` tokens lie on the slots of row 0."""
        runtime, request, row = self.runtime, Request(), len(self.requests)
        self.requests[rid] = (request, row)
        runtime.view.req_to_token[row, :cached] = runtime.view.req_to_token[0, :cached]
        runtime.admit(request, rid, tokens, NAMESPACE)
        for first in range(cached, len(tokens), chunk):
            count = min(chunk, len(tokens) - first)
            batch = SimpleNamespace(
                forward_mode=_mode("extend"), rids=[rid], extend_seq_lens_cpu=[count], extend_prefix_lens_cpu=[first]
            )
            with runtime.step(batch):
                for number in range(LAYERS):
                    q = torch.randn(count, KV_HEADS * GQA * DIM, generator=self.gen)
                    layer = SimpleNamespace(layer_id=number, scaling=DIM**-0.5)
                    assert runtime.attend(q, None, None, layer, batch, True, None) is None
                runtime.prefilled(in_graph=False)

    def decode(self, rid: str, length: int) -> bool:
        """One step; whether an index served it."""
        _, row = self.requests[rid]
        batch = _decode_batch(self.runtime, [rid], [length], [row])
        with self.runtime.step(batch):
            return self.runtime.planned

    def end(self, rid: str, finished: bool = True) -> None:
        request, row = self.requests[rid]
        self.runtime.slot_freed(request, row, finished=finished)

    def decode_until(self, rid: str, length: int, done: Callable[[], bool], seconds: float = 20.0) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.decode(rid, length)
            if done():
                return True
            time.sleep(0.002)
        return False


def counts(runtime: SparseRuntime) -> dict[str, Any]:
    assert isinstance(runtime.builds, SharedBuilds)
    return runtime.builds.snapshot()


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]


def test_a_shared_prefix_gets_an_index_of_the_cached_keys_while_requests_decode(start: Any, tmp_path: Path) -> None:
    runtime = start()
    traffic = Traffic(runtime)
    traffic.prefill("a", [*SHARED, *range(100, 118)], 0, chunk=30)
    traffic.prefill("b", [*SHARED, *range(200, 218)], 64)
    assert counts(runtime)["prefixes"] == 1
    traffic.prefill("c", [*SHARED, *range(300, 318)], 64)
    assert traffic.decode_until("c", 83, lambda: counts(runtime)["built"] == 1)
    (line,) = lines(tmp_path)
    assert (line["status"], line["num_tokens"], line["hits"]) == ("built", 64, 2)
    traffic.prefill("d", [*SHARED, *range(400, 418)], 64)
    assert traffic.decode("d", 83)  # served by the index
    index = runtime.requests.get("d").index
    slots = runtime.view.req_to_token[0, :64].long()
    spec = method_specs(runtime.config)["token_index"]
    for number in range(LAYERS):
        keys = runtime.view.kv(number).k_cache[slots]
        channels = index.layers[number]["channels"].long()
        expected = METHODS["token_index"].builder(spec).build_layer(keys, _queries_choosing(channels))
        for name, array in expected.items():
            assert torch.equal(index.layers[number][name], array), name
    for rid in "abcd":
        traffic.end(rid)
    assert (len(runtime.builds), runtime.snapshot()["index_users"]) == (0, 0)


def _queries_choosing(channels: torch.Tensor) -> torch.Tensor:
    """Samples whose only large values are in these channels."""
    queries = torch.full((KV_HEADS, 1, DIM), 1e-6)
    return queries.scatter(2, channels[:, None], 1e3)


def test_the_channels_are_those_of_the_queries_of_the_prefix(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    builder = METHODS["token_index"].builder
    build_layer = builder.build_layer

    def spy(self: Any, keys: torch.Tensor, queries: torch.Tensor) -> Any:
        seen.append(queries)
        return build_layer(self, keys, queries)

    monkeypatch.setattr(builder, "build_layer", spy)
    runtime = start(query_samples=4096)
    traffic = Traffic(runtime)
    traffic.prefill("a", [*SHARED, *range(100, 118)], 0)
    traffic.prefill("b", [*SHARED, *range(200, 218)], 64)
    traffic.prefill("c", [*SHARED, *range(300, 318)], 64)
    assert traffic.decode_until("c", 83, lambda: counts(runtime)["built"] == 1)
    gen = torch.Generator().manual_seed(3)
    for number in range(LAYERS):
        q = torch.randn(82, KV_HEADS * GQA * DIM, generator=gen)[:64].view(64, KV_HEADS, GQA, DIM)
        expected = q.permute(1, 0, 2, 3).reshape(KV_HEADS, -1, DIM)
        order = expected[..., 0].argsort(dim=1)
        found = seen[number][..., 0].argsort(dim=1)
        for head in range(KV_HEADS):
            assert torch.equal(seen[number][head][found[head]], expected[head][order[head]])


def test_a_build_goes_on_with_another_request_when_its_holder_ends(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_build, "PIECE_TOKENS", 64)  # a KV head at a time
    runtime = start()
    traffic = Traffic(runtime)
    for number, rid in enumerate("abc"):
        traffic.prefill(rid, [*SHARED, *range(100 * number, 100 * number + 18)], 64 if number else 0)
    (build,) = runtime.builds._builder.open
    assert traffic.decode_until("c", 83, lambda: build.built >= 1)
    traffic.end("c")
    assert build.given < len(build.pieces) == LAYERS * KV_HEADS
    assert traffic.decode_until("b", 83, lambda: counts(runtime)["built"] == 1)


def test_keys_are_not_taken_before_slots_have_settled_nor_from_other_prompts(start: Any) -> None:
    runtime = start()
    traffic = Traffic(runtime)
    for number, rid in enumerate("abc"):
        traffic.prefill(rid, [*SHARED, *range(100 * number, 100 * number + 18)], 64 if number else 0)
    traffic.prefill("other", list(range(2000, 2080)), 0)
    (build,) = runtime.builds._builder.open
    for _ in range(5):
        traffic.decode("other", 81)
    for length in (83, 84):
        traffic.decode("b", length)  # the first two steps: a duplicate's slots may still be replaced
    assert build.given == 0
    traffic.end("b", finished=False)  # retracted: it starts over
    traffic.decode("b", 85)
    assert build.given == 0
    traffic.decode_until("b", 86, lambda: build.given > 0)
    assert build.given > 0


def test_builds_take_turns_by_whose_requests_decode(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_build, "PIECE_TOKENS", 64)
    runtime = start(build_after_hits=1)
    traffic = Traffic(runtime)
    other = list(range(500, 564))
    for rid, tokens in (("a", SHARED), ("b", SHARED), ("x", other), ("y", other)):
        traffic.prefill(rid, [*tokens, ord(rid), 2], 0 if rid in "ax" else 64)
    first, second = runtime.builds._builder.open
    assert traffic.decode_until("y", 67, lambda: counts(runtime)["built"] == 1)  # nobody decodes on the first
    assert (first.given, second.closed) == (0, True)
    assert traffic.decode_until("b", 67, lambda: counts(runtime)["built"] == 2)
    assert counts(runtime)["open"] == []


def test_too_many_builds_and_those_nobody_has_keys_for_are_given_up(
    start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(background_build, "PIECE_TOKENS", 64)
    runtime = start(build_after_hits=1)
    traffic = Traffic(runtime)
    builder = runtime.builds._builder
    traffic.prefill("a", [*SHARED, 1, 2], 0)
    traffic.prefill("b", [*SHARED, 3, 4], 64)
    (oldest,) = builder.open
    assert traffic.decode_until("b", 67, lambda: oldest.built == 1)
    more = [Build(Prefix("", hashes([*range(900 + n, 964 + n)]), hits=2), oldest.identity) for n in range(8)]
    assert len(more) == background_build.MAX_OPEN
    assert all(builder.add(build) for build in more)  # the last one takes the place of the one with fewer hits
    assert not builder.add(Build(Prefix("", hashes(list(range(700, 764))), hits=2), oldest.identity))
    deadline = time.monotonic() + 10
    while counts(runtime)["failed"] < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (oldest.closed, builder.open) == (True, more)
    assert lines(tmp_path)[0]["reason"] == "abandoned"
    with runtime.store.lease(oldest.identity) as lease:  # it went back
        assert lease is not None
    monkeypatch.setattr(background_build, "IDLE_S", 0.0)
    builder.tidy()
    assert builder.open == []


def test_a_failed_build_is_reported_and_the_server_goes_on(start: Any, tmp_path: Path) -> None:
    runtime = start(build_after_hits=1)
    for number in range(LAYERS):
        runtime.view.kv(number).k_cache.fill_(torch.nan)
    traffic = Traffic(runtime)
    traffic.prefill("a", [*SHARED, 1, 2], 0)
    traffic.prefill("b", [*SHARED, 3, 4], 64)
    assert traffic.decode_until("b", 67, lambda: counts(runtime)["failed"] == 1)
    (line,) = lines(tmp_path)
    assert (line["status"], line["reason"]) == ("failed", "ValueError")
    assert "NaN" in line["detail"]
    assert runtime.store.list() == ()
    assert not traffic.decode("b", 68)


def test_no_queries_are_recorded_where_no_method_needs_them(start: Any) -> None:
    runtime = start(method="exact", build_after_hits=1)
    traffic = Traffic(runtime)
    traffic.prefill("a", [*SHARED, 1, 2], 0)
    traffic.prefill("b", [*SHARED, 3, 4], 64)
    assert runtime.builds.recorder.num_captures == 0
    assert traffic.decode_until("b", 67, lambda: counts(runtime)["built"] == 1)
    assert counts(runtime)["sample_bytes"] == 0


def test_requests_that_opted_out_are_neither_counted_nor_read(start: Any) -> None:
    runtime = start(build_after_hits=1)
    for number in range(3):
        request = Request()
        runtime.admit(request, str(number), [*SHARED, number], NAMESPACE, ("by_request", ""))
    assert (len(runtime.builds), counts(runtime)["prefixes"]) == (0, 0)
