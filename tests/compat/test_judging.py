"""What a calibration takes of an earlier run's judgements; SGLang's engine is left out, its logit processor is not."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sglang_ext.calibration.judge import Candidate
from sglang_ext.calibration.prompts import CalibrationPrompt
from sglang_ext.cli import judging
from sglang_ext.compat.forced_tokens import ForcedTokens
from sglang_ext.methods.profile import load_profile
from tests.prefix_index.samples import sample_model
from tests.server.harness import MODEL
from tests.token_sources import TextTokens

PROMPTS = [[CalibrationPrompt(id="a", text="a b")]]
PROFILE = load_profile(MODEL / "sparse_attn_profile.json")
CANDIDATES = {Candidate(anchors=anchors, keep_ratio=0.05): PROFILE for anchors in (None, 2)}


class Engine:
    """Answers with logits of no model; the class's attributes say what goes wrong."""

    context_len, tokens = 10_000, TextTokens(lambda text: [ord(one) for one in text])
    started: list[str]
    cached: list[list[tuple[Any, ...]]]
    model = msgspec.to_builtins(sample_model())
    loses_a_token = False
    ends_behind = 99

    def state(self) -> dict[str, Any]:
        return {"sparse_rows": 1, "dense_rows": 0, "model": self.model}

    def generate(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        self.cached.append([(one.get("extra_key"), *one["input_ids"]) for one in requests])
        steps = requests[0]["sampling_params"]["max_new_tokens"]
        params = [one["sampling_params"].get("custom_params", {}) for one in requests]
        answers: list[list[int]] = [[] for _ in requests]
        for step in range(steps):
            logits = torch.randn(len(requests), 100, generator=torch.Generator().manual_seed(step))
            if params[0]:
                logits = ForcedTokens()(logits, params)
            for answer, row in zip(answers, logits, strict=True):
                answer.append(int(row.argmax()))
        return [{"output_ids": answer[self.loses_a_token :]} for answer in answers]


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Engine, "started", [], raising=False)
    monkeypatch.setattr(Engine, "cached", [], raising=False)

    @contextmanager
    def engine(_model: str, _flags: Any, _store: str, config: str, _graphs: Any) -> Iterator[Engine]:
        Engine.started.append("dense" if '"stock"' in config else "candidate")
        if len(Engine.started) > Engine.ends_behind:
            raise KeyboardInterrupt
        yield Engine()

    monkeypatch.setattr(judging, "plugin_engine", engine)
    args = argparse.Namespace(model_path="m", sglang_flags=[], rows=2)

    def judged(prompts: Any = PROMPTS) -> list[str]:
        """Engines that a run starts."""
        Engine.started.clear()
        found = judging.Judge(args, prompts, tmp_path, "digest", sample_model()).judge(CANDIDATES)
        assert {len(one.kl) for one in found} == {min(len(prompts), 8)}, "as many as may be"
        return list(Engine.started)

    return judged


def test_what_was_judged_is_taken_from_the_run_before(judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "ends_behind", 2)
        with pytest.raises(KeyboardInterrupt):
            judge()
    assert (judge(), judge()) == (["candidate"], [])


@pytest.mark.parametrize("name", ["device", "sglang"])
def test_times_of_another_device_or_release_are_not(judge: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert judge() == ["dense", "candidate", "candidate"]
    if name == "device":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    else:
        monkeypatch.setattr(judging.versions, "installed", lambda *_of: "0.0")
    assert judge() == ["dense", "candidate", "candidate"]


def test_references_that_were_refused_are_made_anew(judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "loses_a_token", True)
        with pytest.raises(ValueError, match="steps were lost or counted twice"):
            judge()
    assert judge() == ["dense", "candidate", "candidate"]


@pytest.mark.parametrize("count", [7, 8, 9, 17])
def test_as_many_prompts_are_judged_behind_as_may_be(judge: Any, count: int) -> None:
    judge([[CalibrationPrompt(id=str(number), text=f"a {number}")] for number in range(count)])


def test_a_model_that_was_not_measured_is_not_judged(judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete state starts no engine but these: other flags may have given them other positions."""
    monkeypatch.setattr(Engine, "model", msgspec.to_builtins(sample_model(rope_digest="e" * 64)))
    with pytest.raises(ValueError, match=r"the model that was measured, got another \(model.rope_digest"):
        judge()


def test_the_first_request_of_a_prompt_finds_nothing_in_the_prefix_cache(judge: Any) -> None:
    """Where texts begin alike, with a BOS or a chat template's tokens, none but the first got an index."""
    judge([[CalibrationPrompt(id=str(number), text=f"a {number}")] for number in range(2)])
    dense, candidate = Engine.cached[:4], Engine.cached[4:]
    for first, rows, second, others, *times in (dense, candidate):
        (prefix,), (other,) = first, second
        assert prefix[1:3] == other[1:3], "their texts begin alike"
        assert prefix[0] != other[0], "so the cache has to keep them apart"
        assert {one[: len(prefix)] for one in rows} == {prefix}, "and what is asked has the prefix"
        assert {one[: len(other)] for one in others} == {other}
        assert {one[0] for step in times for one in step} <= {prefix[0], other[0]}
