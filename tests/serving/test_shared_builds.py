"""Indexes that a server makes while it serves: what counts as a hit, whose queries and keys, and what is given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.methods import METHODS, method_specs
from sglang_ext.prefill import background_build, shared_builds
from sglang_ext.prefill.background_build import Build
from sglang_ext.prefill.builder import IndexAssembly
from sglang_ext.prefill.prefixes import Prefix
from sglang_ext.prefill.shared_builds import SharedBuilds
from sglang_ext.runtime import SparseRuntime
from tests.serving.admitting import (
    DIM,
    GQA,
    KV_HEADS,
    LAYERS,
    NAMESPACE,
    PROMPT,
    Request,
    Runtime,
    decode_batch,
    eventually,
    extend_batch,
    hashes,
    prefill_layers,
    report,
)


@pytest.fixture
def start(start: Callable[..., Runtime]) -> Callable[..., Runtime]:
    """Runtimes that build beside serving."""
    return partial(start, build="shared", method="token_index", build_share=1.0)


class Traffic:
    """Requests on one runtime, each on the slots that the prefix cache would give it."""

    def __init__(self, runtime: SparseRuntime) -> None:
        self.runtime = runtime
        self.requests: dict[str, tuple[Request, int]] = {}
        self.gen = torch.Generator().manual_seed(3)

    def prefill(self, rid: str, tokens: list[int], cached: int, chunk: int = 1000, *, repeats: bool = False) -> None:
        """Admit and prefill; the first `cached` tokens lie on the slots of row 0."""
        runtime, request, row = self.runtime, Request(), len(self.requests)
        self.requests[rid] = (request, row)
        runtime.view.req_to_token[row, :cached] = runtime.view.req_to_token[0, :cached]
        runtime.admit(request, rid, tokens, NAMESPACE, repeats=repeats)
        for first in range(cached, len(tokens), chunk):
            count = min(chunk, len(tokens) - first)
            with runtime.forwards.step(batch := extend_batch(rid, count, first)):
                prefill_layers(runtime, batch, count, self.gen)
                runtime.forwards.prefilled(in_graph=False)

    def decode(self, rid: str, length: int) -> bool:
        """One step; whether an index served it."""
        _, row = self.requests[rid]
        batch = decode_batch(self.runtime, [rid], [length], [row])
        with self.runtime.forwards.step(batch):
            return self.runtime.forwards.planned

    def end(self, rid: str, finished: bool = True) -> None:
        request, row = self.requests[rid]
        self.runtime.slot_freed(request, row, finished=finished)

    def retract(self, rid: str) -> None:
        """It loses its slot, and gets another one."""
        self.end(rid, finished=False)
        self.runtime.slot_taken(self.requests[rid][0])

    def decode_until(self, rid: str, length: int, done: Callable[[], bool]) -> bool:
        return eventually(lambda: (self.decode(rid, length), done())[1])

    def hand_over(self, rid: str, length: int, build: Build) -> None:
        """Decode until one more piece of the build is given, then no more until it is done."""
        given = build.given + 1
        assert self.decode_until(rid, length, lambda: build.given == given)
        assert eventually(lambda: build.built == given)


def sharing(runtime: SparseRuntime, rids: str) -> Traffic:
    """Requests that begin with PROMPT and go on for 18 tokens of their own; the first one prefills it for all."""
    traffic = Traffic(runtime)
    for number, rid in enumerate(rids):
        traffic.prefill(rid, [*PROMPT, *range(100 * number, 100 * number + 18)], 64 if number else 0)
    return traffic


def counts(runtime: SparseRuntime) -> dict[str, Any]:
    assert isinstance(runtime.builds, SharedBuilds)
    return runtime.builds.snapshot()


def test_a_shared_prefix_gets_an_index_of_the_cached_keys_while_requests_decode(start: Any) -> None:
    runtime = start()
    traffic = Traffic(runtime)
    traffic.prefill("a", [*PROMPT, *range(100, 118)], 0, chunk=30)
    traffic.prefill("b", [*PROMPT, *range(200, 218)], 64)
    assert counts(runtime)["prefixes"] == 1
    traffic.prefill("c", [*PROMPT, *range(300, 318)], 64)
    assert traffic.decode_until("c", 83, lambda: counts(runtime)["built"] == 1)
    (line,) = report(runtime)
    assert (line["status"], line["num_tokens"], line["hits"]) == ("built", 64, 2)
    traffic.prefill("d", [*PROMPT, *range(400, 418)], 64)
    assert traffic.decode("d", 83)  # served by the index
    index = runtime.requests.get("d").index
    slots = runtime.view.req_to_token[0, :64].long()
    spec = method_specs(runtime.config)["token_index"]
    for number in range(LAYERS):
        keys = 0.5 * runtime.view.kv(number).k_cache[slots]
        channels = index.layers[number]["channels"].long()
        choosing = torch.full((KV_HEADS, 1, DIM), 1e-6).scatter(2, channels[:, None], 1e3)
        expected = METHODS["token_index"].builder(spec).build_layer(keys, choosing)
        for name, array in expected.items():
            assert torch.equal(index.layers[number][name], array), name
    for rid in "abcd":
        traffic.end(rid)
    assert (len(runtime.builds), runtime.snapshot()["index_users"]) == (0, 0)


def test_several_answers_to_one_prompt_are_one_hit(start: Any) -> None:
    """SGLang has the prompt prefilled, then answered so many times."""
    traffic = Traffic(runtime := start())
    for user, (answers, known) in enumerate([("ab", 0), ("ab", 1), ("a", 1)]):
        tokens = [*PROMPT, *range(100 * user, 100 * user + 18)]
        assert runtime.builds._builder.open == []
        traffic.prefill(f"{user}", tokens, 64 if user else 0)
        for answer in answers:
            traffic.prefill(f"{user}{answer}", tokens, 64, repeats=True)
        assert counts(runtime)["prefixes"] == known
    assert traffic.decode_until("2a", 83, lambda: counts(runtime)["built"] == 1), "their keys are as good as others'"
    (line,) = report(runtime)
    assert line["hits"] == 2


def test_the_channels_are_those_of_the_queries_of_the_prefix(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    builder = METHODS["token_index"].builder
    real = builder.build_layer
    monkeypatch.setattr(builder, "build_layer", lambda self, k, q, *more: (seen.append(q), real(self, k, q, *more))[1])
    runtime = start(query_samples=4096)
    traffic = sharing(runtime, "abc")
    assert traffic.decode_until("c", 83, lambda: counts(runtime)["built"] == 1)
    gen = torch.Generator().manual_seed(3)
    for found in seen:
        q = torch.randn(82, KV_HEADS * GQA * DIM, generator=gen)[:64].view(64, KV_HEADS, GQA, DIM)
        for own, wanted in zip(found, q.permute(1, 0, 2, 3).reshape(KV_HEADS, -1, DIM), strict=True):
            assert torch.equal(own[own[:, 0].argsort()], wanted[wanted[:, 0].argsort()])
    assert len(seen) == LAYERS


def test_a_build_goes_on_with_another_request_when_its_holder_ends(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_build, "PIECE_TOKENS", 64)  # a KV head at a time
    runtime = start()
    traffic = sharing(runtime, "abc")
    (build,) = runtime.builds._builder.open
    assert traffic.decode_until("c", 83, lambda: build.built >= 1)
    traffic.end("c")
    assert build.given < len(build.pieces) == LAYERS * KV_HEADS
    assert traffic.decode_until("b", 83, lambda: counts(runtime)["built"] == 1)


def test_keys_are_not_taken_before_slots_have_settled_nor_from_other_prompts(start: Any) -> None:
    runtime = start()
    traffic = sharing(runtime, "abc")
    traffic.prefill("other", list(range(2000, 2080)), 0)
    (build,) = runtime.builds._builder.open
    for _ in range(5):
        traffic.decode("other", 81)
    for length in (83, 84):
        traffic.decode("b", length)  # the first two steps: a duplicate's slots may still be replaced
    assert build.given == 0
    traffic.retract("b")  # it starts over
    traffic.decode("b", 85)
    assert build.given == 0
    traffic.decode_until("b", 86, lambda: build.given > 0)
    assert build.given > 0


def test_builds_take_turns_by_whose_requests_decode(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_build, "PIECE_TOKENS", 64)
    runtime = start(build_after_hits=1)
    traffic = Traffic(runtime)
    other = list(range(500, 564))
    for rid, tokens in (("a", PROMPT), ("b", PROMPT), ("x", other), ("y", other)):
        traffic.prefill(rid, [*tokens, ord(rid), 2], 0 if rid in "ax" else 64)
    first, second = runtime.builds._builder.open
    assert traffic.decode_until("y", 67, lambda: counts(runtime)["built"] == 1)  # nobody decodes on the first
    assert (first.given, second.closed) == (0, True)
    assert traffic.decode_until("b", 67, lambda: counts(runtime)["built"] == 2)
    assert counts(runtime)["open"] == []


def test_too_many_builds_and_those_nobody_has_keys_for_are_given_up(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_build, "PIECE_TOKENS", 64)
    runtime = start(build_after_hits=1)
    traffic, builder = sharing(runtime, "ab"), runtime.builds._builder
    (oldest,) = builder.open
    traffic.hand_over("b", 83, oldest)
    more = [Build(Prefix("", hashes([*range(900 + n, 964 + n)]), hits=2), oldest.identity, ()) for n in range(8)]
    assert len(more) == background_build.MAX_OPEN
    assert all(builder.add(build) for build in more)  # the last one takes the place of the one with fewer hits
    assert not builder.add(Build(Prefix("", hashes(list(range(700, 764))), hits=2), oldest.identity, ()))
    assert eventually(lambda: counts(runtime)["failed"] == 1)
    assert (oldest.closed, builder.open) == (True, more)
    assert report(traffic.runtime)[0]["reason"] == "abandoned"
    with runtime.store.lease(oldest.identity) as lease:  # it went back
        assert lease is not None
    more[-1].built = 1  # of equals the one added last leaves, however far it is: on every rank the same
    newest = Build(Prefix("", hashes(list(range(700, 764))), hits=3), oldest.identity, ())
    assert builder.add(newest)
    assert builder.open == [*more[:-1], newest]


def test_a_prefix_that_had_no_room_asks_again_with_its_next_hit(start: Any) -> None:
    runtime = start(build_after_hits=1)
    traffic, builder = sharing(runtime, "ab"), runtime.builds._builder
    (build,) = builder.open
    for number in range(7):
        idle = Prefix("", hashes([*range(900 + number, 964 + number)]), hits=9)
        assert builder.add(Build(idle, build.identity, ()))
    for number in range(3):  # its second hit is one more than the build's
        assert build in builder.open
        traffic.prefill(f"x{number}", [*range(500, 564), number, 2], 64 if number else 0)
    assert (len(builder.open), build in builder.open) == (8, False)


def leased(runtime: SparseRuntime, build: Build) -> bool:
    lease = runtime.store.lease(build.identity)
    if lease is not None:
        lease.release()
    return lease is None


@pytest.fixture
def begun(start: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Traffic, Build]:
    """Requests a and b on a prefix whose build has begun, and has one of its pieces."""
    monkeypatch.setattr(background_build, "PIECE_TOKENS", 64)
    monkeypatch.setattr(background_build, "LOOK_S", 0.05)
    traffic = sharing(start(build_after_hits=1), "ab")
    (build,) = traffic.runtime.builds._builder.open
    traffic.hand_over("b", 83, build)
    assert leased(traffic.runtime, build)
    return traffic, build


def test_an_idle_server_gives_leases_back_unless_a_piece_is_on_its_way(begun: tuple[Traffic, Build]) -> None:
    traffic, build = begun
    for rid in "ab":
        traffic.end(rid)
    build.given += 1  # handed over, not yet built
    build.latest -= background_build.IDLE_S + 1  # nobody's request had its keys for so long
    traffic.runtime.builds._builder._give_up_idle()
    assert not build.closed
    build.given -= 1
    assert eventually(lambda: counts(traffic.runtime)["failed"] == 1)
    assert build.closed
    assert not leased(traffic.runtime, build)
    assert report(traffic.runtime)[0]["reason"] == "abandoned"


def test_who_sees_a_closed_build_finds_its_lease_given_back(begun: tuple[Traffic, Build]) -> None:
    traffic, build = begun
    lease, seen = build.lease, []
    build.lease = SimpleNamespace(release=lambda: (seen.append(build.closed), lease.release()))
    traffic.runtime.builds._builder._close(build)
    assert (seen, build.closed, leased(traffic.runtime, build)) == ([False], True, False)


def test_leases_go_back_when_weights_change(begun: tuple[Traffic, Build]) -> None:
    traffic, build = begun
    samples = traffic.runtime.builds._samples
    traffic.runtime.weights_updated()
    assert eventually(lambda: build.closed)
    assert not leased(traffic.runtime, build)
    assert samples.nbytes == 0
    assert not traffic.decode("b", 86)


def test_an_error_of_the_device_ends_builds_and_not_the_server(
    begun: tuple[Traffic, Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic, build = begun
    builds = traffic.runtime.builds
    monkeypatch.setattr(traffic.runtime.view, "kv", lambda layer: 1 / 0)
    assert eventually(lambda: not traffic.decode("b", 84) and build.closed)
    monkeypatch.undo()
    traffic.prefill("c", [*PROMPT, 5, 6], 64)
    assert (len(builds), builds.recorder.num_captures) == (0, 0)


@pytest.mark.parametrize("short", ["keys", "queries", "building"])
def test_behind_an_error_of_memory_builds_rest_and_go_on(
    begun: tuple[Traffic, Build], monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    """As of one moment's batches: what was open goes on, and nothing is asked of the device meanwhile."""
    traffic, build = begun
    builds, asked = traffic.runtime.builds, []

    def no_memory(*_: Any) -> None:
        asked.append(1)
        raise torch.OutOfMemoryError("no memory")

    asks = {"keys": (traffic.runtime.view, "kv"), "queries": (builds.recorder, "allocate")}
    monkeypatch.setattr(*asks.get(short, (IndexAssembly, "add")), no_memory)
    if short == "queries":
        traffic.prefill("x", list(range(2000, 2080)), 0)
    else:
        assert eventually(lambda: not traffic.decode("b", 84) and asked)
    assert eventually(lambda: "no memory" in (counts(traffic.runtime)["off"] or ""))
    traffic.prefill("c", list(range(3000, 3080)), 0)
    for _ in range(5):
        traffic.decode("b", 85)
    assert (len(asked), builds.recorder.num_captures, build.closed) == (1, 0, False)
    monkeypatch.undo()
    builds._builder._rests_until -= background_build.REST_S
    assert counts(traffic.runtime)["off"] is None
    assert traffic.decode_until("b", 86, lambda: counts(traffic.runtime)["built"] == 1)


@pytest.mark.parametrize("short", ["keys", "building"])
def test_a_build_that_never_finds_memory_is_given_up(
    begun: tuple[Traffic, Build], monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    """Or its lease would keep others from building it for as long as its prefix is asked for."""
    traffic, build = begun
    monkeypatch.setattr(background_build, "REST_S", 0.0)
    monkeypatch.setattr(background_build, "IDLE_S", 0.3)

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(*((traffic.runtime.view, "kv") if short == "keys" else (IndexAssembly, "add")), no_memory)
    assert traffic.decode_until("b", 84, lambda: build.closed)
    (line,) = report(traffic.runtime)
    assert (line["reason"], "found no memory" in line["detail"]) == ("abandoned", True)
    assert not leased(traffic.runtime, build)


def test_samples_on_their_way_are_few(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = start()
    samples, gate = runtime.builds._samples, threading.Event()
    arrived = samples._arrived
    monkeypatch.setattr(samples, "_arrived", lambda kept: (gate.wait(30), arrived(kept)))
    traffic = Traffic(runtime)
    for number in range(8):
        traffic.prefill(str(number), [1000 * number + i for i in range(80)], 0)
        assert samples.coming + runtime.builds.recorder.num_captures <= shared_builds.MAX_CAPTURES
    gate.set()
    assert eventually(lambda: samples.coming == 0)


def test_a_capture_that_broke_leaves_room(start: Any) -> None:
    runtime = start()
    for rid in ("a", "b"):
        runtime.admit(Request(), rid, list(range(ord(rid), ord(rid) + 80)), NAMESPACE)
        for first in (0, 60):  # tokens 30 to 59 never come
            with runtime.forwards.step(extend_batch(rid, 30, first)):
                pass
    assert runtime.builds.recorder.num_captures == 0


def test_keys_of_a_request_with_anothers_id_are_not_taken(begun: tuple[Traffic, Build]) -> None:
    traffic, build = begun
    runtime = traffic.runtime
    traffic.end("b")
    traffic.prefill("x", list(range(2000, 2080)), 0)
    second, third = Request(), Request()
    runtime.admit(second, "x", list(range(3000, 3080)), NAMESPACE)
    runtime.slot_freed(second, 7, finished=True)
    runtime.wait(third, "x", [*PROMPT, 9, 9], NAMESPACE)  # waits, while the first one still decodes
    given = build.given
    for _ in range(6):
        traffic.decode("x", 81)
        time.sleep(0.02)
    assert build.given == given


def test_a_failed_build_is_reported_and_the_server_goes_on(start: Any) -> None:
    runtime = start(build_after_hits=1)
    for number in range(LAYERS):
        runtime.view.kv(number).k_cache.fill_(torch.nan)
    traffic = sharing(runtime, "ab")
    assert traffic.decode_until("b", 83, lambda: counts(runtime)["failed"] == 1)
    (line,) = report(runtime)
    assert (line["status"], line["reason"]) == ("failed", "ValueError")
    assert "NaN" in line["detail"]
    assert runtime.store.list() == ()
    assert not traffic.decode("b", 84)
    (known,) = runtime.builds._hits._known.values()
    assert eventually(lambda: (runtime.builds.settle(), known.tries)[1] == 1), "it waits for more hits than before"


def test_no_queries_are_recorded_where_no_method_needs_them(start: Any) -> None:
    runtime = start(method="exact", build_after_hits=1)
    traffic = sharing(runtime, "ab")
    assert runtime.builds.recorder.num_captures == 0
    assert traffic.decode_until("b", 83, lambda: counts(runtime)["built"] == 1)
    assert counts(runtime)["sample_bytes"] == 0


def test_requests_that_opted_out_are_neither_counted_nor_read(start: Any) -> None:
    runtime = start(build_after_hits=1)
    requests = [Request() for _ in range(3)]  # held weakly
    for number, request in enumerate(requests):
        runtime.admit(request, str(number), [*PROMPT, number], NAMESPACE, ("by_request", ""))
    assert (len(runtime.builds), counts(runtime)["prefixes"]) == (0, 0)


def test_what_only_opted_out_requests_prefilled_is_said_to_need_another_prefill(start: Any) -> None:
    traffic = Traffic(start(build_after_hits=1))
    opted_out = Request()
    traffic.runtime.admit(opted_out, "out", [*PROMPT, 1], NAMESPACE, ("by_request", "as asked"))
    with traffic.runtime.forwards.step(batch := extend_batch("out", 65)):
        prefill_layers(traffic.runtime, batch, 65, traffic.gen)
        traffic.runtime.forwards.prefilled(in_graph=False)
    traffic.prefill("a", [*PROMPT, *range(100, 118)], 64)
    assert traffic.decode_until("a", 83, lambda: counts(traffic.runtime)["failed"] == 1)
    (line,) = report(traffic.runtime)
    assert line["reason"] == "abandoned"
    assert all(word in line["detail"] for word in ("opt out", "Flush the cache", "sample_host_bytes"))


def test_turns_of_a_conversation_that_leave_no_queries_are_not_logged_each(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers are decoded, and each turn adds little: from some turn on queries of less than half are known."""
    runtime = start(build_after_hits=1)
    traffic, words = Traffic(runtime), list(range(3000, 3112))
    for turn, length in enumerate(range(32, 113, 16)):
        traffic.prefill(str(turn), words[:length], length - 8 if turn else 0)
        if turn:
            assert traffic.decode_until(str(turn), length + 1, lambda turn=turn: len(report(runtime)) == turn)
        traffic.end(str(turn))
    assert [line["status"] for line in report(runtime)] == ["built"] * 3 + ["failed"] * 2
    (said,) = [one for one in caplog.messages if "no index of" in one]
    assert all(word in said for word in ("of 80 shared tokens", "compute few tokens", "build_report"))


def test_a_build_that_could_go_on_is_not_idle(begun: tuple[Traffic, Build]) -> None:
    traffic, build = begun
    popular = Build(Prefix(build.prefix.namespace, build.prefix.hashes, hits=99), build.identity, ())
    traffic.runtime.builds._builder.add(popular)
    before, given = build.latest, build.given
    assert traffic.decode_until("b", 84, lambda: popular.given > 0)
    assert build.latest > before
    assert build.given == given


@pytest.mark.parametrize("slow", ["store", "share"])
def test_a_build_that_waits_for_the_builder_is_not_idle(start: Any, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """The store takes another one, or pieces are far between, for longer than a build may be without any."""
    monkeypatch.setattr(background_build, "LOOK_S", 0.05)
    monkeypatch.setattr(background_build, "IDLE_S", 0.3)
    runtime = start(build_after_hits=1)
    builder = runtime.builds._builder
    traffic, other = Traffic(runtime), list(range(500, 564))
    for rid, tokens in (("a", PROMPT), ("b", PROMPT), ("x", other), ("y", other)):
        traffic.prefill(rid, [*tokens, ord(rid), 2], 0 if rid in "ax" else 64)
    real = builder._stored if slow == "store" else builder._add
    monkeypatch.setattr(builder, real.__name__, lambda *given: (real(*given), time.sleep(0.5))[0])
    opened = list(builder.open)
    assert eventually(lambda: [traffic.decode(rid, 67) for rid in "by"] and all(build.closed for build in opened))
    assert [line["status"] for line in report(runtime)] == ["built", "built"]


def test_another_request_under_an_id_that_was_searched_in_vain_is_searched(begun: tuple[Traffic, Build]) -> None:
    traffic, build = begun
    for rid in "ab":
        traffic.end(rid)
    traffic.prefill("x", list(range(2000, 2080)), 0)
    for _ in range(4):
        traffic.decode("x", 81)
    traffic.end("x")
    given = build.given
    traffic.prefill("x", [*PROMPT, 9, 9], 64)
    assert traffic.decode_until("x", 67, lambda: build.given > given)


def test_a_batch_that_was_searched_in_vain_is_not_searched_again_for_a_short_prompt_in_it(
    begun: tuple[Traffic, Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for one that opted out: of neither is ever known more. Searching 256 requests takes 0.25 ms a step."""
    traffic, searched = begun[0], []
    for rid in "ab":
        traffic.end(rid)
    traffic.prefill("x", list(range(2000, 2080)), 0)
    traffic.prefill("short", list(range(12)), 0)
    begins = Prefix.begins
    monkeypatch.setattr(Prefix, "begins", lambda *given: (searched.append(1), begins(*given))[1])
    rows = [traffic.requests[rid][1] for rid in ("x", "short")]
    for step in range(6):
        with traffic.runtime.forwards.step(decode_batch(traffic.runtime, ["x", "short"], [81 + step, 13 + step], rows)):
            pass
    assert len(searched) == 1, "once, as soon as its slots have settled"


def test_nothing_is_built_any_more_once_no_step_may_use_an_index(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Nor is an index that nobody looks up taken for one that has left the store."""
    runtime = start(build_after_hits=1)
    traffic = sharing(runtime, "ab")
    assert traffic.decode_until("b", 83, lambda: counts(runtime)["built"] == 1)
    runtime.forwards.refuse("layer 1 has a sliding window", "unsupported_layer")
    for number in range(3):
        traffic.prefill(f"x{number}", [*PROMPT, *range(300 * number, 300 * number + 18)], 64)
        traffic.prefill(f"y{number}", [*range(500, 564), number, 2], 64 if number else 0)
        traffic.end(f"x{number}")
        traffic.end(f"y{number}")
    assert (counts(runtime)["open"], counts(runtime)["evicted"]) == ([], 0)
    assert "left the store" not in caplog.text


def test_an_index_of_another_server_that_look_ups_do_not_show_yet_has_not_left_the_store(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A service or a remote store says at once that it is there, and is listed seconds later."""
    runtime = start(build_after_hits=1)
    traffic = sharing(runtime, "ab")
    monkeypatch.setattr(runtime.store, "contains", lambda identity: True)
    assert traffic.decode_until("b", 83, lambda: bool(report(runtime)))
    for number, rid in enumerate("cd"):
        traffic.prefill(rid, [*PROMPT, *range(1000 * number, 1000 * number + 18)], 64)
    assert report(runtime)[0]["status"] == "exists"
    assert (counts(runtime)["evicted"], counts(runtime)["open"]) == (0, [])
    assert "left the store" not in caplog.text
    (known,) = runtime.builds._hits._known.values()
    known.built_at -= shared_builds.SHOWN_S
    traffic.prefill("e", [*PROMPT, 7, 8], 64)
    assert counts(runtime)["evicted"] == 1, "nobody has it any more"
