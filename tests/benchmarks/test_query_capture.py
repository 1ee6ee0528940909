"""What is captured of a real model's dense decode, and attention over a selection of it, for `offload_churn.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.needle_network import load as load_network
from sglang_ext.methods.layer_plan import LayerPlan
from tests.benchmarks.results import ROOT
from tests.planted import randn

SHIPPED = ROOT / "models" / "needle"


@pytest.fixture(scope="module")
def captured(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The shipped model's answers to two questions behind one document; it has no chat template of its own."""
    from transformers import AutoTokenizer

    model, capture, data = tmp_path_factory.mktemp("model"), bench.offload_churn, bench.answers_data
    for path in SHIPPED.iterdir():
        (model / path.name).symlink_to(path)
    (model / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }} {% endfor %}")
    tokenizer = AutoTokenizer.from_pretrained(model)
    text, chat = tokenizer.decode(torch.arange(3, 900).repeat(2).tolist()), data.Chat(tokenizer)
    asked = [data.Question(str(n), f"ASK {n}", "", (), "all", 0) for n in range(2)]
    document = data.Document("planted", text, tuple((one,) for one in asked))
    return chat, document, capture.Capturing(str(model), chat).capture(document, 6)


@pytest.mark.full
def test_what_is_captured_is_what_the_models_own_network_computes(
    captured: Any, bench: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, document, found = captured
    path = tmp_path / "planted.pt"
    found.save(path)
    found = type(found).load(path)
    network = load_network(SHIPPED, torch.float32, "cpu")
    plan = LayerPlan.from_dict({"layers": ["anchor"] * 6}, num_layers=6, num_kv_heads=2)
    prefix = chat.prefix(document.text)
    assert found.keys.shape == found.values.shape == (6, 2, len(prefix), 64)
    module, queries = bench.replay_model, list[Tensor]()
    attend = module._attend
    monkeypatch.setattr(module, "_attend", lambda q, *of: queries.append(q) or attend(q, *of))
    replayer = module.Replayer(network, plan, max_len=len(prefix) + 100)
    for (question,), answer in zip(document.conversations, found.answers, strict=True):
        prompt = prefix + chat.question(question, first=True)
        tokens = list[int]()
        for _ in range(len(answer.queries)):
            out = replayer.run(prompt, tokens, [None] * len(tokens))
            tokens.append(int(out[-1].argmax()))
        replayer.run(prompt, tokens, [None] * len(tokens))
        assert chat.text(tokens) == answer.text
        for layer, own in enumerate(queries[-6:]):
            torch.testing.assert_close(answer.queries[:, layer], own[1:], rtol=1e-3, atol=1e-3)
        cache = replayer._cache[:, :, :, : len(prompt) + len(tokens)]
        for n, (before, behind) in enumerate(((found.keys, answer.keys), (found.values, answer.values))):
            torch.testing.assert_close(torch.cat([before, behind], 2), cache[:, n], rtol=1e-3, atol=1e-3)


def test_the_error_is_that_of_gathered_attention(bench: Any) -> None:
    """Planted: 2 KV heads of 3 query heads, 512 prefix tokens, 20 behind."""
    keys, values, queries = randn(2, 532, 16, seed=8), randn(2, 532, 16, seed=9), randn(6, 16, seed=11)
    of = bench.offload_churn.output_error
    best = randn(2, 512, seed=12).topk(64).indices
    selected = torch.zeros(2, 512, dtype=torch.bool).scatter_(1, best, True)
    found = of(keys, values, queries, 0.25, selected[None])
    for head in range(2):
        read, errors = torch.cat([selected[head], torch.ones(20, dtype=torch.bool)]), []
        for query in queries[3 * head : 3 * head + 3]:
            dense = (keys[head] @ query * 0.25).softmax(0) @ values[head]
            sparse = (keys[head, read] @ query * 0.25).softmax(0) @ values[head, read]
            errors.append((sparse - dense).norm() / dense.norm())
        torch.testing.assert_close(found[0, head], torch.stack(errors).mean())
    everything = of(keys, values, queries, 0.25, torch.ones(2, 512, dtype=torch.bool))
    torch.testing.assert_close(everything, torch.zeros(2), atol=1e-5, rtol=0)
