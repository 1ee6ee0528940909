"""Post-RoPE queries, keys and values of a real model's dense decode, by transformers: for `offload.py churn`.

A document is prefilled once. Each question behind it is answered for a given number of steps, past tokens that end an
answer, as `answers.py` forces them. Nothing here knows the plugin or SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from answers_data import Chat, Document, Question
from torch import Tensor

from sglang_ext.files import partial_file

TEMPERATURE = 0.8
"""Of long answers: greedy ones of small models soon repeat themselves, and so do their queries."""


@dataclass
class Answered:
    """One answer. All tensors are float32.

    Attributes:
        task: kind of the question.
        queries: [steps, layers, num_qo_heads, head_dim], post-RoPE: row t is of the decode step that reads token t.
        keys, values: [layers, num_kv_heads, question and steps, head_dim]: behind the document, in order.
        text: the answer's.
    """

    task: str
    queries: Tensor
    keys: Tensor
    values: Tensor
    text: str


@dataclass
class Captured:
    """A document and its answers.

    Attributes:
        name: of the document.
        keys, values: [layers, num_kv_heads, prefix_len, head_dim] float32, post-RoPE.
        answers: in the order of the questions.
    """

    name: str
    keys: Tensor
    values: Tensor
    answers: list[Answered]

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        with partial_file(path) as partial:
            torch.save({**vars(self), "answers": [vars(one) for one in self.answers]}, partial)

    @classmethod
    def load(cls, path: Path, device: torch.device) -> Captured:
        """Read what `save` wrote."""
        data = torch.load(path, map_location=device, weights_only=True)
        return cls(**{**data, "answers": [Answered(**one) for one in data["answers"]]})


def output_error(keys: Tensor, values: Tensor, query: Tensor, sm_scale: float, selected: Tensor) -> Tensor:
    """Relative error of one layer's output at one decode step [..., num_kv_heads], mean over the KV head's query heads.

    Args:
        keys, values: [num_kv_heads, tokens, head_dim]: the prefix, and all behind it, which is attended.
        query: [num_qo_heads, head_dim].
        sm_scale: multiplies q.k.
        selected: bool [..., num_kv_heads, prefix_len]: the prefix tokens that are attended.
    """
    query = query.view(len(keys), -1, query.shape[-1])
    logits = query @ keys.mT * sm_scale
    dense = logits.softmax(-1) @ values
    every = torch.nn.functional.pad(selected, (0, keys.shape[1] - selected.shape[-1]), value=True)
    out = logits.masked_fill(~every[..., None, :], -torch.inf).softmax(-1) @ values
    return ((out - dense).norm(dim=-1) / dense.norm(dim=-1)).mean(-1)


class Capturing:
    """A model that writes down its queries.

    Args:
        model: a Hugging Face folder.
        chat: of the model's tokenizer.
        device: to compute on, in float32.
    """

    def __init__(self, model: str, chat: Chat, device: torch.device) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask

        def attend(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            if query.shape[2] == 1:
                self._seen[module.layer_idx] = query[0, :, 0]
            return sdpa_attention_forward(module, query, *args, **kwargs)

        AttentionInterface.register("queries_seen", attend)
        AttentionMaskInterface.register("queries_seen", sdpa_mask)
        self._seen: dict[int, Tensor] = {}
        self._device = device
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="queries_seen"
        ).to(device)
        self._chat = chat

    @torch.no_grad()
    def capture(self, document: Document, steps: int, temperature: float = 0.0) -> Captured:
        """Prefill a document, answer the first turn of each conversation.

        Args:
            document: its prefix is what selections are made of.
            steps: decode steps of each answer.
            temperature: 0: greedy.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        prefix = self._chat.prefix(document.text)
        self._read(prefix, cache)
        keys, values = _layers(cache, 0)
        answers = []
        for turns in document.conversations:
            answers.append(self._answer(turns[0], cache, len(prefix), steps, temperature))
            cache.crop(len(prefix))
        return Captured(document.name, keys, values, answers)

    def _answer(self, question: Question, cache: Any, prefix_len: int, steps: int, temperature: float) -> Answered:
        logits = self._read(self._chat.question(question, first=True), cache)
        drawn = torch.Generator(self._device).manual_seed(0)
        tokens, queries = list[int](), list[Tensor]()
        for _ in range(steps):
            if temperature:
                token = (logits / temperature).softmax(-1).multinomial(1, generator=drawn)
            else:
                token = logits.argmax(-1, keepdim=True)
            tokens.append(int(token))
            logits = self._read(tokens[-1:], cache)
            queries.append(torch.stack([self._seen[layer] for layer in sorted(self._seen)]))
        keys, values = _layers(cache, prefix_len)
        return Answered(question.task, torch.stack(queries), keys, values, self._chat.text(tokens))

    def _read(self, ids: list[int], cache: Any) -> Tensor:
        """Logits [vocab_size] behind these tokens; the cache grows by them."""
        given = torch.tensor([ids], device=self._device)
        out: Tensor = self._model(given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return out[0, -1]


def _layers(cache: Any, begin: int) -> tuple[Tensor, Tensor]:
    """Keys and values [layers, num_kv_heads, tokens, head_dim] from a position on, copied."""
    return (
        torch.stack([layer.keys[0, :, begin:] for layer in cache.layers]),
        torch.stack([layer.values[0, :, begin:] for layer in cache.layers]),
    )
