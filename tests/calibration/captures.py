"""Captures of made-up prompts: random queries and keys; and what their attention is, by loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_ext.calibration.prompt_capture import LayerCapture, PromptCapture


def make_capture(
    seed: int = 0, *, num_layers: int = 3, prefix_len: int = 256, asked: int = 6, sampled: int = 40
) -> PromptCapture:
    """2 KV heads, 4 query heads; the sampled tokens stand in the prefix, the asked ones behind it."""
    gen = torch.Generator().manual_seed(seed)
    tokens = sampled + asked
    inside = torch.randperm(prefix_len, generator=gen)[:sampled].sort().values
    return PromptCapture(
        queries=1.5 * torch.randn(num_layers, tokens, 4, 16, generator=gen),
        positions=torch.cat([inside, torch.arange(prefix_len, prefix_len + asked)]),
        sampled=torch.arange(tokens) < sampled,
        keys=torch.randn(num_layers, prefix_len, 2, 16, generator=gen),
        importance=torch.rand(num_layers, tokens, generator=gen),
        prompt_len=prefix_len + asked,
        sm_scale=0.25,
    )


def make_layers(
    num_layers: int,
    *,
    num_tokens: int = 5,
    prefix_len: int = 50,
    kv_heads: int = 2,
    gqa: int = 2,
    dim: int = 8,
    seed: int = 0,
    positions: torch.Tensor | None = None,
    scale: float = 2.0,
) -> list[LayerCapture]:
    """The same tokens in several layers, inside the prefix and behind it."""
    gen = torch.Generator().manual_seed(seed)
    if positions is None:
        positions = torch.randint(0, prefix_len + 5, (num_tokens,), generator=gen)
    return [
        LayerCapture(
            scale * torch.randn(len(positions), kv_heads * gqa, dim, generator=gen),
            torch.randn(prefix_len, kv_heads, dim, generator=gen),
            positions,
        )
        for _ in range(num_layers)
    ]


def softmax(values: Any) -> Any:
    weight = np.exp(values - values.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def attention(layer: LayerCapture, sm_scale: float) -> list[list[Any]]:
    """[kv_head][token] -> probabilities over the keys a token sees, mean over the group, in numpy fp64."""
    q, k = layer.queries.double().numpy(), layer.keys.double().numpy()
    gqa = q.shape[1] // k.shape[1]
    return [
        [
            softmax(q[token, head * gqa : (head + 1) * gqa] @ k[: position + 1, head].T * sm_scale).mean(axis=0)
            for token, position in enumerate(layer.positions.tolist())
        ]
        for head in range(k.shape[1])
    ]
