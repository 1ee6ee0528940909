"""Channels that approximate attention scores best, per KV head: the token index reads only these.

Source: AsyncTLS, "Fine-grained Token Selection" (after Double Sparsity): the channels with the greatest |q_i| |k_i|
over a calibration set, mean over the query heads of a KV head's group. The set is aggregated as the paper prints it,
by max |q_i| * max |k_i|: critical keys are rare, and only a maximum sees them. It factorizes over all pairs of a query
and a key, so no pair is formed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sglang_ext.calibration.prompt_capture import LayerCapture
from sglang_ext.methods.base import check_finite

NUM_CHANNELS_GQA = 32
"""Channels of a KV head's key in GQA models (AsyncTLS)."""


def channel_maxima(layers: Iterable[LayerCapture]) -> tuple[Tensor, Tensor]:
    """Greatest |q_i| and |k_i| of one prompt.

    Args:
        layers: one capture per layer in layer order; read once. Positions are not used.

    Returns:
        [num_layers, num_qo_heads, head_dim] and [num_layers, num_kv_heads, head_dim], fp64 on the CPU. Those of
        several prompts are their maxima.

    Raises:
        ValueError: a query or key that is NaN or infinite.
    """
    found = [[x.abs().amax(dim=0).double().cpu() for x in (capture.queries, capture.keys)] for capture in layers]
    q_max, k_max = (torch.stack(part) for part in zip(*found, strict=True))
    check_finite(queries=q_max, keys=k_max)
    return q_max, k_max


def channel_contribution(q_max: Tensor, k_max: Tensor) -> Tensor:
    """s_i of every channel, by `channel_maxima`: mean over the group's query heads of max |q_i|, times max |k_i|.

    Returns:
        [num_layers, num_kv_heads, head_dim] fp64, new.
    """
    num_layers, num_kv_heads, head_dim = k_max.shape
    return q_max.view(num_layers, num_kv_heads, -1, head_dim).mean(dim=2) * k_max


def top_channels(contribution: Tensor, num_channels: int) -> Tensor:
    """The channels with the greatest contribution.

    Args:
        contribution: [..., num_kv_heads, head_dim] floating, finite.
        num_channels: 1..head_dim.

    Returns:
        [..., num_kv_heads, num_channels] int16, ascending; of equal channels the lower number.
    """
    order = contribution.argsort(dim=-1, descending=True, stable=True)
    return order[..., :num_channels].sort(dim=-1).values.to(torch.int16)
