"""Weights of a model that says nothing, but whose attention differs from token to token, in place of dummy weights.

SGLang's are all within 0.001, so that queries are nearly 0 and all tokens score alike: what is selected then are the
last tokens of a prompt, in one piece, in all layers and heads. Here the logits of attention have a variance of about 1.
`engines.write_model` makes this module a plugin of SGLang.
"""

from __future__ import annotations

import zlib

import torch


def initialize(model: torch.nn.Module) -> None:
    """Fill a model's weights: of norms 1, of biases 0, else normal, so that values keep their size; the same for a
    name in every process."""
    for name, weight in model.state_dict().items():
        if weight.is_floating_point() and weight.dim() < 2:
            weight.fill_(float("norm" in name and not name.endswith("bias")))
        elif weight.is_floating_point():
            generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)


def register() -> None:
    """SGLang's plugin: what `--load-format dummy` does."""
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = initialize
