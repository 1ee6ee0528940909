"""What SGLang's own process captures is what the model computes, by an implementation that is not SGLang's."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from scripts.needle.tasks import make_document
from sglang_ext.calibration.prompt_capture import PromptCapture, attention_importance, load_capture
from tests.server.capture_job import DECODE_STEPS
from tests.server.harness import MODEL, flags_of, rendezvous
from tests.server.jobs import run_job

pytestmark = pytest.mark.full

SAMPLED_TOKENS = 512 // 4  # query_samples over the query heads of a KV head
TAIL = 32


class Reference:
    """The model by transformers, in fp32: per layer q [N, heads, dim], k, v, and the importance of each token."""

    def __init__(self, input_ids: list[int]) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.q: dict[int, torch.Tensor] = {}
        self.k: dict[int, torch.Tensor] = {}
        self.importance: dict[int, torch.Tensor] = {}

        def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> Any:
            layer = module.layer_idx
            self.q[layer], self.k[layer] = (x[0].transpose(0, 1) for x in (q, k))
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True, scale=scaling
            )
            return out.transpose(1, 2).contiguous(), None

        ALL_ATTENTION_FUNCTIONS["kept"] = attention
        model = AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32, attn_implementation="kept").eval()
        streams: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(
                lambda _m, args, kwargs, n=number: streams.update({n: (args or (kwargs["hidden_states"],))[0][0]}),
                with_kwargs=True,
            )
            layer.self_attn.register_forward_hook(
                lambda _m, _a, out, n=number: self.importance.update(
                    {n: attention_importance(streams[n], streams[n] + out[0][0])}
                )
            )
        with torch.no_grad():
            logits = model(torch.tensor([input_ids]), use_cache=False).logits[0]
        self.next_ids = logits.argmax(dim=-1).tolist()


@pytest.fixture(scope="module")
def captured(tmp_path_factory: Any, serve: Any) -> tuple[PromptCapture, list[int], int, str]:
    from transformers import AutoTokenizer

    serve.close()
    document = make_document("copy_span", seed=5, num_tokens=1024, num_questions=1)
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    prefix = tokenizer.encode(document.text, add_special_tokens=False)
    ids = tokenizer.encode(f"{document.text} {document.questions[0].text}", add_special_tokens=False)
    path = tmp_path_factory.mktemp("capture") / "first.safetensors"
    request = json.dumps({"input_ids": ids, "prefix_len": len(prefix)})
    flags = [*rendezvous(), *flags_of(None, None, {"--chunked-prefill-size": "384"})]
    command = [sys.executable, "-m", "tests.server.capture_job", request, str(path), "--", *flags]
    status, output = run_job(command, path.with_suffix(".log"))
    assert status == 0, output[-4000:]
    return load_capture(path), ids, len(prefix), output


@pytest.fixture(scope="module")
def reference(captured: Any) -> Reference:
    """Of the prompt and of what greedy decoding makes of it."""
    _, ids, *_ = captured
    tokens = list(ids)
    for _ in range(DECODE_STEPS):
        tokens.append(Reference(tokens).next_ids[-1])
    return Reference(tokens)


def test_sample_tail_and_decode_steps_are_kept(captured: Any) -> None:
    capture, ids, prefix_len, _ = captured
    assert capture.prompt_len == len(ids)
    assert capture.prefix_len == prefix_len
    sampled, late = capture.positions[capture.sampled], capture.positions[~capture.sampled]
    assert len(set(sampled.tolist())) == len(sampled) == SAMPLED_TOKENS
    assert int(sampled.max()) < len(ids)
    assert late.tolist() == list(range(len(ids) - TAIL, len(ids) + DECODE_STEPS))
    assert capture.positions[capture.asked()].tolist() == list(range(prefix_len, len(ids) + DECODE_STEPS))


def test_queries_and_keys_are_those_of_the_model(captured: Any, reference: Reference) -> None:
    capture, _, prefix_len, _ = captured
    for layer in range(capture.num_layers):
        torch.testing.assert_close(capture.queries[layer], reference.q[layer][capture.positions], atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(capture.keys[layer], reference.k[layer][:prefix_len], atol=2e-3, rtol=2e-3)


def test_importance_is_that_of_the_residual_stream(captured: Any, reference: Reference) -> None:
    capture, *_ = captured
    for layer in range(capture.num_layers):
        expected = reference.importance[layer][capture.positions].float()
        torch.testing.assert_close(capture.importance[layer], expected, atol=2e-4, rtol=5e-3)


def test_a_prompt_beyond_the_context_is_refused_with_what_to_do(captured: Any) -> None:
    output = captured[3]
    assert "REFUSED long: expected 1.." in output
    assert "--context-length" in output
