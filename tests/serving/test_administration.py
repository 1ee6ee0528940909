"""Commands of an operator on a runtime: what each does, what it refuses and says, and that ranks do the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from prefix_index import Retention
from sglang_ext import administration
from sglang_ext.administration import BAD, COMMANDS, CONFLICT, FAILED, GOOD, UNKNOWN, answered
from sglang_ext.config import Settings
from sglang_ext.prefix.residency import State
from tests.serving.admitting import (
    LAYERS,
    NAMESPACE,
    OTHER,
    PROMPT,
    Model,
    Request,
    Runtime,
    check_books,
    eventually,
    hashes,
    ours,
    planned,
    report,
)
from tests.serving.meeting import Meeting
from tests.serving.test_shared_builds import Traffic


def told(runtime: Any, name: str, /, **body: Any) -> dict[str, Any]:
    answer = answered(runtime, name, body)
    assert answer.status == GOOD, answer
    json.dumps(answer.body)
    return answer.body


def refused(runtime: Any, status: int, name: str, /, **body: Any) -> str:
    answer = answered(runtime, name, body)
    assert answer.status == status, answer
    return str(answer.body["error"])


def row(runtime: Any, digest: str | None = None) -> dict[str, Any]:
    """Of the index of this digest, or of the only one."""
    rows = told(runtime, "indexes")["indexes"]
    [found] = [one for one in rows if digest in (None, one["digest"])]
    return dict(found)


def loaded(runtime: Any, digest: str) -> bool:
    return eventually(lambda: row(runtime, digest)["state"] == "ready")


def test_status_says_what_is_on_and_indexes_who_uses_them(start: Callable[..., Runtime]) -> None:
    runtime = start([PROMPT])
    [entry] = runtime.store.list()
    runtime.store.retain(entry.digest, Retention(name="<b>travel</b>"))
    before = told(runtime, "status")
    assert before["indexes"] == {"on": True, "why_not": None}
    assert before["shared_prefixes"] == {"on": False, "why_not": "share_prefixes is off"}
    assert before["path_shares"] == {"sparse": 0.0, "cascade": 0.0, "dense": 0.0}
    request = runtime.came("a")
    runtime.came("b", OTHER)
    ours(runtime, ["a", "b"], [66, 65])
    found, index = told(runtime, "status"), row(runtime)
    assert found["path_shares"] == {"sparse": 0.5, "cascade": 0.0, "dense": 0.5}
    assert (found["state"]["hits"], found["state"]["fallbacks"]) == (1, {"no_index": 1})
    assert set(found["versions"]) == {"sglang-ext", "python", "sglang", "torch"}
    assert (index["digest"], index["name"], index["tokens"]) == (entry.digest, "<b>travel</b>", 64)
    assert (index["tiers"], index["state"], index["users"], index["hits"]) == (["device", "store"], "ready", 1, 1)
    assert index["device_bytes"] == found["state"]["resident_bytes"] > 0
    assert (index["pinned"], index["pinned_in_store"], index["why_not"]) == (False, False, None)
    runtime.slot_freed(request, 0, finished=True)
    assert row(runtime)["users"] == 0


def test_of_many_indexes_those_that_are_used_are_told(start: Callable[..., Runtime], monkeypatch: Any) -> None:
    prompts = [list(range(n, n + 32)) for n in range(6)]
    runtime = start(prompts)
    for rid, tokens in (("a", prompts[5]), ("b", prompts[2])):
        request = runtime.came(rid, [*tokens, 7])
        runtime.slot_freed(request, 0, finished=True)
    digests = {one["digest"] for one in told(runtime, "indexes")["indexes"] if one["hits"]}
    monkeypatch.setattr(administration, "MOST_SHOWN", 2)
    found = told(runtime, "indexes")
    assert ({one["digest"] for one in found["indexes"]}, found["not_shown"]) == (digests, 4)


@pytest.mark.parametrize(
    ("name", "body", "status", "words"),
    [
        ("stop", {}, UNKNOWN, ["expected a command of status, indexes", "got 'stop'"]),
        ("status", {"x": 1}, BAD, ["unknown field `x`", "correct the body"]),
        ("prefetch", {}, BAD, ["missing required field `index`"]),
        ("pin", {"index": "no-such"}, UNKNOWN, ["the name of one index", "'no-such', which means none"]),
        ("evict", {"index": "same"}, UNKNOWN, ["which means 2 indexes"]),
        ("budget", {}, BAD, ["expected keep_ratio, top_k or both; got neither"]),
        ("budget", {"keep_ratio": 1.5}, BAD, ["expected keep_ratio to be a fraction above 0 and at most 1", "1.5"]),
        ("budget", {"top_k": 0}, BAD, ["expected top_k to be 1 or more tokens"]),
        ("build", {"input_ids": [1] * 64}, CONFLICT, ["this one has build 'off'", '"build": "shared"']),
        ("reload_profile", {"profile": "{}"}, CONFLICT, ["expected a server with a profile"]),
    ],
)
def test_what_is_refused_says_what_was_expected_and_changes_nothing(
    start: Callable[..., Runtime], name: str, body: Any, status: int, words: list[str]
) -> None:
    runtime = start([PROMPT, OTHER])
    for entry in runtime.store.list():
        runtime.store.retain(entry.digest, Retention(name="same"))
    before = [told(runtime, "indexes"), runtime.config]
    message = refused(runtime, status, name, **body)
    for word in words:
        assert word in message, message
    assert before == [told(runtime, "indexes"), runtime.config]
    assert not runtime.ready.off


def test_prefetch_loads_and_evict_lets_go_of_what_nobody_uses(start: Callable[..., Runtime]) -> None:
    runtime = start([PROMPT])
    [entry] = runtime.store.list()
    assert told(runtime, "prefetch", index=entry.digest[:8])["digest"] == entry.digest
    assert loaded(runtime, entry.digest)
    assert (row(runtime)["users"], runtime.counters.hits) == (0, 0)
    request = runtime.came("a")
    assert "in use by 1 requests" in refused(runtime, CONFLICT, "evict", index=entry.digest)
    assert ours(runtime, ["a"], [66])
    runtime.slot_freed(request, 0, finished=True)
    assert told(runtime, "evict", index=entry.digest) == {"digest": entry.digest, "device": "done", "store": "kept"}
    assert (row(runtime)["tiers"], row(runtime)["device_bytes"]) == (["store"], 0)
    request = runtime.came("b")
    assert ours(runtime, ["b"], [66]), "the store still has it"
    runtime.slot_freed(request, 0, finished=True)
    assert told(runtime, "evict", index=entry.digest, store=True)["store"] in ("done", "under way")
    assert eventually(lambda: told(runtime, "indexes")["indexes"] == [])
    check_books(runtime.residency)


def test_an_index_that_is_being_loaded_is_not_evicted(start: Callable[..., Runtime]) -> None:
    runtime = start([PROMPT])
    [entry] = runtime.store.list()
    gate, real = threading.Event(), runtime.store.get
    runtime.store.get = lambda key: (gate.wait(60), real(key))[1]
    waiting = Request()
    runtime.wait(waiting, "a", [*PROMPT, 7], NAMESPACE)  # begins to load, and holds nothing
    assert row(runtime)["users"] == 0
    assert "is being loaded" in refused(runtime, CONFLICT, "evict", index=entry.digest)
    gate.set()
    assert loaded(runtime, entry.digest)
    assert eventually(lambda: row(runtime)["users"] == 0)
    told(runtime, "evict", index=entry.digest)


def test_a_pinned_index_stays_when_another_one_wants_its_bytes(start: Callable[..., Runtime]) -> None:
    """There is room for one. Without the pin the second one takes it."""
    probe = start([PROMPT])
    [entry] = probe.store.list()
    told(probe, "prefetch", index=entry.digest)
    assert loaded(probe, entry.digest)
    room = row(probe)["device_bytes"] * 3 // 2
    runtime = start([PROMPT, OTHER], index_gpu_bytes=room)
    by_hash = {entry.identity.prefix_hash: entry for entry in runtime.store.list()}
    one, two = (by_hash[hashes(tokens)[-1].hex()] for tokens in (PROMPT, OTHER))
    told(runtime, "prefetch", index=one.digest)
    assert loaded(runtime, one.digest)
    assert told(runtime, "pin", index=one.digest) == {"digest": one.digest, "device": "done", "store": "done"}
    assert (row(runtime, one.digest)["pinned"], row(runtime, one.digest)["pinned_in_store"]) == (True, True)
    told(runtime, "prefetch", index=two.digest)
    assert eventually(lambda: row(runtime, two.digest)["state"] == "failed")
    assert "or pinned" in row(runtime, two.digest)["why_not"]
    assert "unpin it first" in refused(runtime, CONFLICT, "evict", index=one.digest)
    told(runtime, "unpin", index=one.digest)
    assert row(runtime, one.digest)["pinned_in_store"] is False
    told(runtime, "prefetch", index=two.digest)
    assert loaded(runtime, two.digest)
    assert row(runtime, one.digest)["tiers"] == ["store"]


def test_a_store_that_refuses_is_said_beside_what_was_done(start: Callable[..., Runtime]) -> None:
    runtime = start([PROMPT])
    [entry] = runtime.store.list()
    told(runtime, "prefetch", index=entry.digest)
    assert loaded(runtime, entry.digest)
    runtime.store.delete(entry.digest)
    answer = told(runtime, "pin", index=entry.digest)
    assert answer["device"] == "done"
    assert answer["store"].startswith("refused: ")
    assert "index: expected a usable file, found none" in answer["store"]
    assert row(runtime)["tiers"] == ["device"]


def test_a_budget_holds_from_the_next_step_on(start: Callable[..., Runtime]) -> None:
    runtime = start([PROMPT], min_top_k=16, num_sink_tokens=4, num_recent_pages=1)
    runtime.came("a")
    ours(runtime, ["a"], [66])
    assert told(runtime, "budget", keep_ratio=0.5) == {"keep_ratio": 0.5, "top_k": None, "most_tokens": 120}
    attended = [64]
    for length in (67, 68):
        assert planned(runtime, ["a"], [length])
        attended.append(runtime.counters.snapshot()["attended_tokens_per_layer"][0] - sum(attended))
        told(runtime, "budget", top_k=24)
    assert attended == [64, 32, 24]
    assert told(runtime, "status")["budget"] == {"keep_ratio": 0.5, "top_k": 24, "most_tokens": 120}
    assert told(runtime, "budget", keep_ratio=1.0, top_k=None)["keep_ratio"] == 1.0
    assert ours(runtime, ["a"], [69])


def test_a_budget_larger_than_the_lists_is_refused_with_the_largest_that_fits(start: Callable[..., Runtime]) -> None:
    runtime = start([PROMPT], keep_ratio=0.25, min_top_k=16)
    message = refused(runtime, CONFLICT, "budget", keep_ratio=0.5)
    assert "at most 30 tokens" in message
    assert "got 60, of a prefix of 120: set top_k to at most 30" in message
    assert runtime.config.keep_ratio == 0.25
    assert told(runtime, "budget", keep_ratio=0.5, top_k=30)["top_k"] == 30


def test_off_leaves_running_requests_dense_from_the_next_step_on_until_it_is_on_again(
    start: Callable[..., Runtime],
) -> None:
    """`ours` compares every attended step with dense attention."""
    runtime = start([PROMPT])
    runtime.came("a")
    assert ours(runtime, ["a"], [66])
    assert told(runtime, "off") == {"indexes": False, "shared_prefixes": True}
    assert told(runtime, "status")["indexes"] == {"on": False, "why_not": "turned off by an operator"}
    assert not ours(runtime, ["a"], [67])
    runtime.came("b")
    assert not ours(runtime, ["a", "b"], [68, 66])
    assert (runtime.counters.hits, runtime.counters.fallbacks) == (1, {"by_operator": 2})
    told(runtime, "on")
    runtime.came("c")
    assert planned(runtime, ["a", "b", "c"], [69, 67, 66])
    assert runtime.counters.snapshot()["dense_rows"] == 1 + 2 + 1, "b came meanwhile and has no index"
    assert runtime.counters.hits == 2


def test_off_with_shared_prefixes_leaves_all_steps_to_sglang(start: Callable[..., Runtime]) -> None:
    runtime = start(share_prefixes=True, min_shared_tokens=32)
    for rid in ("a", "b"):
        runtime.came(rid)
    runtime.share_slots(1)
    assert [ours(runtime, ["a", "b"], [n, n]) for n in range(66, 70)][-1]
    told(runtime, "off")
    assert ours(runtime, ["a", "b"], [70, 70]), "what requests share is exact"
    told(runtime, "off", shared_prefixes=True)
    assert not ours(runtime, ["a", "b"], [71, 71])
    assert told(runtime, "status")["shared_prefixes"]["why_not"] == "turned off by an operator"
    told(runtime, "on")
    assert ours(runtime, ["a", "b"], [72, 72]), "what is known of their slots was kept"


def test_build_makes_the_next_request_leave_an_index(start: Callable[..., Runtime]) -> None:
    """Hundreds of hits would be wanted otherwise; that one is the first."""
    runtime = start(build="shared", method="token_index", build_share=1.0, build_after_hits=500)
    assert told(runtime, "build", input_ids=PROMPT[:60])["tokens"] == 48
    assert "expected at least min_sparse_prompt_len=16" in refused(runtime, CONFLICT, "build", input_ids=[1, 2])
    assert "expected token ids" in refused(runtime, BAD, "build", input_ids=[1 << 70] * 64)
    traffic = Traffic(runtime)
    traffic.prefill("a", [*PROMPT, 7], 0)
    assert traffic.decode_until("a", 67, lambda: runtime.builds.snapshot()["built"] == 1)
    [line] = report(runtime)
    assert (line["status"], line["num_tokens"]) == ("built", 48)
    traffic.prefill("other", OTHER, 0)
    assert len(told(runtime, "indexes")["indexes"]) == 1
    runtime.forwards.refuse("layer 1 has a sliding window")
    assert "layer 1 has a sliding window" in refused(runtime, CONFLICT, "build", input_ids=OTHER), "nothing is built"


def test_what_weights_that_changed_leave_without_indexes_is_said(start: Callable[..., Runtime]) -> None:
    runtime = start([PROMPT], build="shared", method="token_index")
    told(runtime, "off")
    assert "an operator" in refused(runtime, CONFLICT, "build", input_ids=PROMPT), "no request would be counted"
    [row] = told(runtime, "indexes")["indexes"]
    told(runtime, "prefetch", index=row["digest"])
    assert told(runtime, "on") == {"indexes": True, "shared_prefixes": True}
    runtime.weights_updated()
    assert not told(runtime, "on")["indexes"]
    for name, body in (("build", {"input_ids": PROMPT}), ("prefetch", {"index": row["digest"]})):
        assert "the weights may have been updated in place" in refused(runtime, CONFLICT, name, **body)


def of_rank(bench: Any, ranks: Any) -> Runtime:
    """One of two ranks, each with a KV head of its own."""
    view = Model(bench.model, slice(ranks.rank, ranks.rank + 1))
    view.tp_rank, view.tp_size = ranks.rank, 2
    return Runtime(Settings(config=bench.config, store=str(bench.store.folder)), view, ranks=ranks)


def test_ranks_act_on_the_index_that_rank_0_knows_and_stay_in_step_whatever_fails_on_one(make_bench: Any) -> None:
    """Rank 1 has not seen the index yet; its own refusal of a budget, and what fails there, is the answer of all."""
    bench = make_bench(keep_ratio=1.0, layer_plan=["anchor"] * LAYERS)
    entry = bench.put(PROMPT)

    def work(ranks: Any) -> Any:
        runtime = of_rank(bench, ranks)
        directory, known, answers = runtime.directory, runtime.directory.known, list[Any]()

        def ask(name: str, **body: Any) -> None:
            answers.append(answered(runtime, name, body))

        if ranks.rank == 1:
            directory.known = lambda: ((), False)
        ask("prefetch", index=entry.digest)
        ask("pin", index="none")
        eventually(lambda: runtime.residency.resident()[entry.digest].state is State.READY)
        ask("evict", index=entry.digest)
        if ranks.rank == 1:
            runtime.planner.set_budget = Mock(side_effect=ValueError("no room"))
        ask("budget", top_k=8)
        for failing in (1, 0):
            directory.known = known if ranks.rank != failing else lambda: 1 / 0
            ask("prefetch", index=entry.digest)
            ask("status")
        runtime.close()
        return [(answer.status, answer.body.get("error", "")[:80]) for answer in answers]

    one, two = Meeting(2).run(work)
    assert one == two
    assert [status for status, _ in one[:4]] == [GOOD, UNKNOWN, GOOD, CONFLICT]
    assert [status for status, _ in one[4:]] == [GOOD, FAILED, FAILED, FAILED], "rank 0 says which index is meant"
    assert all("ZeroDivisionError" in error for _, error in one[5:])


def test_what_failed_and_left_the_store_is_known_no_more(start: Callable[..., Runtime]) -> None:
    """What is damaged is in the store still, and says why it cannot be used."""
    runtime = start([list(range(n, n + 64)) for n in range(3)])
    for entry in runtime.store.list():
        runtime.store.retain(entry.digest, Retention(name="same"))
    damaged, gone, intact = runtime.store.list()
    path = Path(damaged.path)
    path.write_bytes(path.read_bytes()[:-1])
    Path(gone.path).unlink()
    for entry in (damaged, gone):
        index = runtime.residency.load(entry)
        index.loaded.result(30)
        assert index.state is State.FAILED
    assert eventually(
        lambda: {one["digest"] for one in told(runtime, "indexes")["indexes"]} == {damaged.digest, intact.digest}
    )
    assert row(runtime, damaged.digest)["state"] == "failed"
    path.unlink()
    assert eventually(lambda: [one["digest"] for one in told(runtime, "indexes")["indexes"]] == [intact.digest])
    assert told(runtime, "pin", index="same")["digest"] == intact.digest


def test_every_command_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "administration.md").read_text()
    for name in COMMANDS:
        assert f"`{name.replace('_', '-')}`" in text or f"`{name}" in text, name
