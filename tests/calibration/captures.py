"""Captures of made-up prompts: random queries, keys and values."""

from __future__ import annotations

import torch

from sglang_ext.calibration.prompt_capture import PromptCapture


def make_capture(
    seed: int = 0, *, num_layers: int = 3, prefix_len: int = 256, asked: int = 6, sampled: int = 40, dim: int = 16
) -> PromptCapture:
    """2 KV heads, 4 query heads; the sampled tokens stand in the prefix, the asked ones behind it."""
    gen = torch.Generator().manual_seed(seed)
    tokens = sampled + asked
    inside = torch.randperm(prefix_len, generator=gen)[:sampled].sort().values
    return PromptCapture(
        queries=1.5 * torch.randn(num_layers, tokens, 4, dim, generator=gen),
        positions=torch.cat([inside, torch.arange(prefix_len, prefix_len + asked)]),
        sampled=torch.arange(tokens) < sampled,
        keys=torch.randn(num_layers, prefix_len, 2, dim, generator=gen),
        values=torch.randn(num_layers, prefix_len, 2, dim, generator=gen),
        importance=torch.rand(num_layers, tokens, generator=gen),
        prompt_len=prefix_len + asked,
        sm_scale=dim**-0.5,
    )
