"""What a server says of one prompt: the index that it would have, which way its steps would go, and what they
attended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as changed

from prefix_index import BuildInfo, FileStore, namespace_digest
from prefix_kernels.launching import block_of
from sglang_ext.administration import BAD, GOOD, answered
from sglang_ext.cli.explain.picture import draw_attended, read_attended
from sglang_ext.config import Settings
from sglang_ext.decode.costs import Line, Lines, StepCosts
from sglang_ext.decode.quality import Standing
from sglang_ext.prefix import explanation
from sglang_ext.prefix.explanation import explain_prompt
from tests.prefix_index.samples import sample_payload
from tests.serving.admitting import KV_HEADS, OTHER, PROMPT, Runtime, eventually
from tests.serving.test_trace import SELECTING, decode, prefill


def told(runtime: Any, ids: list[Any], **keys: Any) -> dict[str, Any]:
    answer = answered(runtime, "explain", {"input_ids": ids, **keys})
    assert answer.status == GOOD, answer
    return answer.body


def test_the_index_of_a_prompt_and_whether_it_is_loaded(start: Callable[..., Runtime]) -> None:
    runtime = start([PROMPT])
    [entry] = runtime.store.list()
    before = told(runtime, [*PROMPT, 7])
    assert (before["index"], before["prefix_tokens"], before["resident"]) == (entry.digest, 64, None)
    assert (before["path"], before["reason"]) == ("sparse", None)
    assert "there are no decode graphs" in before["why"]
    assert before["costs_us"] == {"exact": None, "sparse": None}
    assert before["budget"] == runtime.config.budget(64)
    runtime.came("a")
    assert eventually(lambda: told(runtime, [*PROMPT, 7])["resident"] == "ready")
    assert runtime.counters.hits == 1, "asking is no hit"


@pytest.mark.parametrize(
    ("ids", "keys", "reason"),
    [(OTHER, {}, "no_index"), ([*PROMPT, 7], {"extra_key": "tenant"}, "no_index"), (PROMPT[:15], {}, None)],
    ids=["other tokens", "other extra_key", "less than a page"],
)
def test_a_prompt_without_an_index(start: Callable[..., Runtime], ids: Any, keys: Any, reason: str | None) -> None:
    found = told(start([PROMPT]), ids, **keys)
    assert (found["index"], found["reason"], found["path"]) == (None, reason, "stock")
    assert (reason or "less than a page") in found["why"]


def test_what_is_turned_off_and_what_is_no_token(start: Callable[..., Runtime]) -> None:
    runtime = start([PROMPT])
    answered(runtime, "off", {})
    assert (told(runtime, PROMPT)["path"], told(runtime, PROMPT)["why"]) == ("stock", "turned off by an operator")
    refused = answered(runtime, "explain", {"input_ids": ["a"]})
    assert (refused.status, "Expected `int`" in refused.body["error"]) == (BAD, True)


@pytest.mark.parametrize(("per_token", "path"), [(0.01, "sparse"), (2.0, "stock")], ids=["cheap", "dear"])
def test_costs_of_a_step_decide_as_in_a_step(start: Callable[..., Runtime], per_token: float, path: str) -> None:
    runtime = start([PROMPT], layer_plan=["dense", "anchor", {"reuse": 1}], keep_ratio=0.25, min_top_k=0)
    runtime.planner.forced = False
    attend, select = Lines({1: Line(10.0, 1.0)}), Lines({1: Line(5.0, per_token)})
    runtime.planner._costs[block_of(1)] = StepCosts(attend, select, 1, 1, 1)
    found = told(runtime, [*PROMPT, 7])
    dense, selecting = 10.0 + 66.0, 10.0 + 16.0 + 2.0
    assert found["costs_us"]["exact"] == 3 * dense
    assert found["costs_us"]["sparse"] == pytest.approx(dense + 5.0 + per_token * 64 + 2 * selecting)
    assert found["path"] == path
    assert ("cost_model" in found["why"]) == (path == "stock")


def test_an_index_that_the_quality_guard_holds_back_is_told_and_asking_changes_nothing(
    start: Callable[..., Runtime],
) -> None:
    runtime = start([PROMPT], keep_ratio=0.25, min_top_k=0, guard_every=8, quality_slo=0.3)
    [entry] = runtime.store.list()
    guard = runtime.planner.guard
    record = guard.records.of(entry.digest, 64)
    record.become(Standing.DENSE)
    record.until = float("inf")
    found = told(runtime, [*PROMPT, 7])
    assert (found["path"], "quality_guard: its output error" in found["why"]) == ("stock", True)
    record.until = 0.0
    found = told(runtime, [*PROMPT, 7])
    assert (found["path"], "on trial" in found["why"]) == ("stock", True)
    assert (record.standing, guard.records.events) == (Standing.DENSE, {}), "a request tries it again, no question"
    record.become(Standing.SERVING)
    assert (told(runtime, [*PROMPT, 7])["path"], told(runtime, [*PROMPT, 7])["budget"]) == ("sparse", 16)
    record.factor = 2
    assert told(runtime, [*PROMPT, 7])["budget"] == 30, "as far as lists were made"


def test_what_was_attended_is_read_from_the_trace_and_drawn(start: Any, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    runtime = start([PROMPT], trace_folder=str(folder), **SELECTING)
    for rid in ("trace-1", "trace-2"):
        runtime.came(rid, [*PROMPT, 1])
    prefill(runtime, ["trace-1", "trace-2"], [0, 16], [65, 49])
    chosen = [decode(runtime, ["trace-1"], [66 + n])[0][1] for n in range(2)]
    (folder / "other.trace").write_bytes(b"\x03\x00\x00\x00abc")
    attended = read_attended(folder, "trace-1")
    assert list(attended) == [1]
    for head in range(KV_HEADS):
        wanted = np.zeros(64)
        for positions, counts in chosen:
            wanted[positions[head, : counts[head]].numpy()] += 0.5
        assert attended[1][head].tolist() == wanted.tolist()
    assert read_attended(folder, "trace-2") == {}
    draw_attended(attended, tmp_path / "attended.png")
    from matplotlib import image

    drawn = image.imread(tmp_path / "attended.png")
    assert drawn.shape[1] == 1200
    colors = {tuple(pixel) for pixel in (drawn * 255).astype(int)[drawn.shape[0] // 2]}
    assert len(colors) >= 2, "positions that were attended, and others"


def explained(runtime: Runtime, extra_key: str | None = None) -> Any:
    settings = Settings(config=runtime.config, store=str(runtime.store.folder))
    return explain_prompt(settings, runtime.model, [*PROMPT, 7], {"extra_key": extra_key}, str)


def test_the_index_of_a_prompt_is_found_among_more_of_other_tenants_than_are_read(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explanation, "MOST_READ", 2)
    runtime = start([PROMPT])
    [entry] = runtime.store.list()
    with FileStore(runtime.store.folder) as store:
        for tenant in "abc":
            identity = changed(entry.identity, namespace=namespace_digest({"extra_key": tenant}))
            store.put(replace(sample_payload(identity), info=BuildInfo(created=time.time() + 60)))
    found = explained(runtime)
    assert (found.index, found.reason, found.unread) == (entry.digest, None, 2)
    assert explained(runtime, "b").index is not None


def test_a_damaged_index_that_once_left_and_was_built_again_has_not_left(start: Any) -> None:
    runtime = start([PROMPT])
    [entry] = runtime.store.list()
    raw = Path(entry.path).read_bytes()
    runtime.store.delete(entry.digest)
    assert [one.digest for one in explained(runtime).gone] == [entry.digest]
    Path(entry.path).write_bytes(raw[:70] + b"?" + raw[71:])
    found = explained(runtime)
    assert (found.index, found.reason, found.gone, len(found.problems)) == (None, "no_index", [], 1)
