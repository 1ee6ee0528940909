"""Captures of a process, from records to files: what is written, under which name, and what is not."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from sglang_ext.calibration.prompt_capture import load_capture
from sglang_ext.config import config_from_dict
from sglang_ext.prefill.captures import PrefillCaptures
from sglang_ext.prefill.recorder import Admission
from tests.serving.admitting import DIM, GQA, KV_HEADS, LAYERS, Model

HEADS, PROMPT = KV_HEADS * GQA, 12


def _captures(folder: Path) -> PrefillCaptures:
    fields = {"build": "capture", "capture_folder": str(folder), "build_report": str(folder / "events.jsonl")}
    sizes = {"query_samples": 8, "capture_tail": 2, "capture_steps": 3}
    return PrefillCaptures(config_from_dict({**fields, **sizes}), Model(None))


def _run(captures: PrefillCaptures, rid: str, steps: int, layers_of_last_step: int = LAYERS) -> torch.Tensor:
    """Records a prompt and decode steps; returns all queries [LAYERS, tokens, HEADS, DIM]."""
    q = torch.randn(LAYERS, PROMPT + steps, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    captures.admit(Admission(rid, list(range(PROMPT)), {}, None))
    for first, count in [(0, PROMPT), *((PROMPT + i, 1) for i in range(steps))]:
        chunks = captures.recorder.begin_step([rid], [first], [count], torch.device("cpu"))
        last = first == PROMPT + steps - 1
        for layer in range(layers_of_last_step if last else LAYERS):
            captures.recorder.record(chunks, layer, q[layer, first : first + count], 0.125)
    captures.finish(rid, 0)
    return q


def _events(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_capture_holds_queries_keys_and_the_layers_scale(tmp_path: Path) -> None:
    captures = _captures(tmp_path)
    q = _run(captures, "a", 2)
    (event,) = _events(tmp_path)
    assert event["status"] == "captured"
    capture = load_capture(event["path"])
    assert capture.sm_scale == 0.125
    assert capture.positions[~capture.sampled].tolist() == [10, 11, 12, 13]
    torch.testing.assert_close(capture.queries, q[:, capture.positions])
    slots = captures._view.req_to_token[0, :PROMPT].long()
    for layer in range(LAYERS):
        pool = captures._view.kv(layer)
        assert torch.equal(capture.keys[layer], 0.5 * pool.k_cache[slots])


def test_a_token_that_a_layer_has_not_seen_is_left_out(tmp_path: Path) -> None:
    captures = _captures(tmp_path)
    _run(captures, "a", 2, layers_of_last_step=1)
    capture = load_capture(_events(tmp_path)[0]["path"])
    assert capture.positions[~capture.sampled].tolist() == [10, 11, 12]


def test_a_request_id_is_no_path(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "here"
    folder.mkdir(parents=True)
    captures = _captures(folder)
    for rid in ("../escaped", "/absolute", "same", "same"):
        _run(captures, rid, 1)
    paths = [Path(event["path"]) for event in _events(folder)]
    assert len(set(paths)) == 4
    assert {path.parent for path in paths} == {folder}
    assert sorted(p.name for p in tmp_path.rglob("*.safetensors")) == sorted(p.name for p in paths)


def test_refused_and_incomplete_requests_are_reported_and_leave_nothing(tmp_path: Path) -> None:
    captures = _captures(tmp_path)
    captures.admit(Admission("a", [1] * PROMPT, {}, ("by_request", "no")))
    captures.admit(Admission("b", [1] * PROMPT, {}, None))
    captures.finish("b", 0)
    reasons = [(event["status"], event["reason"]) for event in _events(tmp_path)]
    assert reasons == [("skipped", "by_request"), ("failed", "capture_rejected")]
    assert len(captures) == 0
    assert not list(tmp_path.glob("*.safetensors"))


def test_importance_stands_in_the_rows_of_its_tokens(tmp_path: Path) -> None:
    captures = _captures(tmp_path)
    captures.admit(Admission("a", list(range(PROMPT)), {}, None))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, PROMPT, 5, generator=generator)
    for first, count in ((0, 7), (7, PROMPT - 7)):
        here = slice(first, first + count)
        step = captures.recorder.begin_step(["a"], [first], [count], torch.device("cpu"))
        for layer in range(LAYERS):
            captures.recorder.record(step, layer, torch.randn(count, HEADS, DIM, generator=generator))
            captures.observe(step, layer, x[here], (layer + y)[here])
    captures.finish("a", 0)
    capture = load_capture(_events(tmp_path)[0]["path"])
    for layer in range(LAYERS):
        cosine = torch.nn.functional.cosine_similarity(x, layer + y)[capture.positions]
        torch.testing.assert_close(capture.importance[layer], 1 - cosine)
