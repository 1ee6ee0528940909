"""The positions to attend, from pooled scores and a token budget. In torch; `anchor_selection` has the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.types import Selection

NUM_KEYS = 2048
"""Keys of scores, each a bin of the kernel's counts: 0 for what has no score, the last one for the windows."""
LOWEST_LOG = -44.0
"""Natural log of the least share that a key tells from others; shares of a sample are lowered by 20."""


def keys_of(scores: Tensor) -> Tensor:
    """Keys of 11 bits: steps of 44 / 2,045 = 0.0215 from -44 to 0; what lies outside ties there, -inf and NaN last.

    Args:
        scores: fp32, natural logs of shares.

    Returns:
        int64, the same shape, from 0 to NUM_KEYS - 2.
    """
    place = (scores.clamp(LOWEST_LOG, 0.0).nan_to_num() - LOWEST_LOG) * ((NUM_KEYS - 3) / -LOWEST_LOG)
    return torch.where(scores > -torch.inf, place.long() + 1, 0)


def rank_by_keys(scores: Tensor) -> Tensor:
    """Scores as the kernel ranks them: by `keys_of`, among equal ones the most recent first.

    At the threshold tokens then stand for each other whose shares differ by 2% at most.

    Args:
        scores: [num_kv_heads, prefix_len] fp32, natural logs of shares.

    Returns:
        fp64, the same shape: the key, and below 1 the position.
    """
    return (
        keys_of(scores) + torch.arange(scores.shape[-1], device=scores.device, dtype=torch.float64) / scores.shape[-1]
    )


def log_ranks(scores: Tensor, counted: Tensor | None = None) -> Tensor:
    """How deep a list by these scores alone must be for a token to be in it, as a score that can be ranked again.

    Args:
        scores: [num_kv_heads, prefix_len] fp32, natural logs of shares.
        counted: bool [prefix_len], which tokens of the list count; None: all.

    Returns:
        [num_kv_heads, prefix_len] fp32: minus the natural log of how many tokens have the token's key or a higher one;
        -inf where there is no score.
    """
    keys = keys_of(scores)
    ones = torch.ones_like(keys) if counted is None else counted.long().expand_as(keys)
    totals = keys.new_zeros(keys.shape[0], NUM_KEYS).scatter_add_(1, keys, ones)
    at_least = totals.flip(1).cumsum(1).flip(1).gather(1, keys)
    return (-at_least.clamp(min=1).float().log()).masked_fill(keys == 0, -torch.inf)


def top_k_selection(scores: Tensor, budget: int, num_sink: int, num_recent: int) -> Selection:
    """Exactly min(budget, prefix_len) positions per KV head: sink, recent window, then the best tokens.

    So every method reads the same number of tokens, and counts are known without asking the device. Shapes depend on
    sizes only, never on values.

    Args:
        scores: [num_kv_heads, prefix_len] floating, higher is better; any monotone scale. -inf and NaN rank last, among
            themselves the most recent first.
        budget: tokens, at least 1; sink and recent window count towards it.
        num_sink: leading positions always taken.
        num_recent: trailing positions of the prefix always taken.

    Returns:
        A new `Selection` of max_count = min(budget, prefix_len) without padding.

    Raises:
        ValueError: sizes out of range, scores of another shape, or windows that do not fit the budget.
    """
    for name, value, least in (("budget", budget, 1), ("num_sink", num_sink, 0), ("num_recent", num_recent, 0)):
        if value < least:
            raise ValueError(f"expected {name} >= {least} tokens, got {value}")
    if scores.dim() != 2 or not scores.dtype.is_floating_point:
        raise ValueError(
            f"expected scores [num_kv_heads, prefix_len] in a floating dtype, got {tuple(scores.shape)} "
            f"{scores.dtype}; pool them over rows and query heads first"
        )
    num_kv_heads, prefix_len = scores.shape
    if budget >= prefix_len:
        return Selection.all(prefix_len, num_kv_heads, scores.device)
    wanted = budget - num_sink - num_recent
    if wanted < 0:
        raise ValueError(
            f"expected num_sink + num_recent <= budget={budget} tokens, got {num_sink} + {num_recent}; "
            "raise the budget or shrink the windows"
        )
    ranked = _rank_unscored_last(scores)
    ranked[:, :num_sink] = torch.inf
    ranked[:, prefix_len - num_recent :] = torch.inf
    chosen = ranked.topk(budget, dim=1).indices.int().sort(dim=1).values
    return Selection(chosen, torch.full((num_kv_heads,), budget, dtype=torch.int32, device=scores.device))


def _rank_unscored_last(scores: Tensor) -> Tensor:
    """Scores, -inf and NaN replaced by a finite ramp in fp32 below every real score that rises with position."""
    lowest = torch.finfo(torch.float32).min
    ramp = torch.linspace(1.0, 0.5, scores.shape[-1], device=scores.device) * lowest
    scores = scores if scores.dtype is torch.float64 else scores.float()
    return torch.where(scores > -torch.inf, scores, ramp)
