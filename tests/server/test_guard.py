"""The quality guard in a real server: planted faults are noticed within a stated number of tokens, and answers are
those of dense attention from then on; it reports what an offline computation of the same steps says. By day, without a
server: `tests/serving/test_guard.py`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from scripts.needle_network import load
from sglang_ext.decode.quality import EARLY, LEAST_SAMPLES
from sglang_ext.decode.trace import read_trace
from sglang_ext.methods.layer_plan import LayerPlan
from tests import index_faults
from tests.server.harness import METHODS, ROOT, Pool, Server
from tests.server.jobs import Prebuilt

NOTICED = EARLY[LEAST_SAMPLES - 1] + 2
"""Tokens that a bad index serves, at most: up to its third early step, and the way of the figures."""
CONFIG: dict[str, Any] = {
    "method": "token_index", "methods": METHODS, "profile": "none", "prefetch_policy": "wait_complete",
    "quality_slo": 0.25, "guard_share": 0.5,
}  # fmt: skip
"""With that share no early step is left out, however long guarded ones take here."""
TOKENS = 40

pytestmark = pytest.mark.full


def noticed(server: Server, prompts: list[str]) -> None:
    """The first of these prompts behind one bad index is served by it for a while, the others' answers are dense."""
    first, *later = [server.generate(prompt, TOKENS) for prompt in prompts]
    steps = first.told["steps"]
    assert 0 < steps["sparse"] <= NOTICED + server.overlaps
    assert first.told["reasons"] == ["quality_guard"]
    for prompt, answer in zip(prompts[1:], later, strict=True):
        assert answer.told["steps"]["sparse"] == 0
        assert answer.told["reasons"] == ["quality_guard"]
        assert answer.ids == server.generate(prompt, TOKENS, sparse=False).ids


@pytest.fixture
def faults(built: Prebuilt, tmp_path: Path) -> Path:
    """A store in which `large` has shuffled positions and `long` the keys of `large`; `first` is whole."""
    store = Path(shutil.copytree(built.store, tmp_path / "store"))
    index_faults.exchange(store, built.line("long")["digest"], built.line("large")["digest"])
    index_faults.shuffle(store, built.line("large")["digest"])
    return store


def test_planted_faults_are_noticed_and_answers_are_dense_from_then_on(serve: Pool, faults: Path, texts: Any) -> None:
    server = serve(faults, CONFIG, fresh=True, disable_overlap_schedule=None, enable_metrics="")
    for text, questions in ((texts.large.text, texts.large.questions), (texts.long, texts.first.questions)):
        noticed(server, [f"{text} {question.text}" for question in questions[:3]])
    whole = [server.generate(texts.ask(texts.first, n), TOKENS).told for n in range(3)]
    assert [one["steps"]["sparse"] for one in whole] == [TOKENS - 1] * 3
    assert sum(one["guarded_steps"] for one in whole) >= LEAST_SAMPLES
    state = server.state()
    guard = state["guard"]
    standings = [one["standing"] for one in guard["indexes"].values()]
    assert sorted(standings) == ["dense", "dense", "serving"]
    assert guard["events"]["dense"] == 2
    assert state["fallbacks"]["quality_guard"] == 6
    exported = server.metrics()
    assert exported["guard_steps"][""] == server.state()["guard"]["steps"]
    assert exported["guard_events"]["dense"] == 2
    assert "quality guard: index" in server.log.read_text()


def test_reported_recall_is_what_the_model_computes_of_the_same_steps(
    serve: Pool, built: Prebuilt, texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another process and in plain torch, over what the server's trace says that it selected."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import replay
    import replay_model

    guarded = {"guard_every": 1, "guard_share": 1.0, "quality_slo": None, "trace_folder": str(tmp_path)}
    server = serve(built.store, {**CONFIG, **guarded}, fresh=True)
    prompt = AutoTokenizer.from_pretrained(ROOT / "models" / "needle")(texts.ask(texts.first, 0))["input_ids"]
    tokens = list(server.generate(prompt, 16, rid="trace-1").ids)
    reported = server.state()["guard"]["indexes"][built.line("first")["digest"]]
    start, *records = read_trace(next(tmp_path.glob("steps-*.trace")))
    (epoch,) = replay.histories(records)["trace-1"]
    steps = [epoch.steps.get(len(prompt) + i) for i in range(len(tokens) - 1)]
    found: list[Tensor] = []

    def attend(q: Tensor, keys: Tensor, values: Tensor, allowed: Tensor) -> Tensor:
        """Notes the recall of each row, a mean over heads; the last six calls are those of the answer."""
        scores = (q.view(len(q), len(keys), -1, q.shape[2]).permute(1, 2, 0, 3) @ keys[:, None].mT) * q.shape[2] ** -0.5
        causal = torch.ones(len(q), keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - len(q))
        kept, every = (scores.masked_fill(~mask, -torch.inf).logsumexp(-1) for mask in (allowed[:, None], causal))
        found.append((kept - every).exp().mean((0, 1)))
        return whole(q, keys, values, allowed)

    whole = replay_model._attend
    monkeypatch.setattr(replay_model, "_attend", attend)
    plan = LayerPlan.from_dict(start.layer_plan, num_layers=6, num_kv_heads=start.num_kv_heads)
    network = load(ROOT / "models" / "needle", torch.float32, "cpu")
    replay_model.Replayer(network, plan, max_len=len(prompt) + len(tokens)).run(prompt, tokens[:-1], steps)
    sparse = [row for row, step in enumerate(steps, 1) if step is not None][: reported["guarded"]]
    assert len(sparse) >= LEAST_SAMPLES
    recall = [float(of[sparse].mean()) for of in found[-6:]]
    assert reported["recall"] == pytest.approx(recall, abs=0.002)
    assert min(recall) < 0.99, "something is left out"
