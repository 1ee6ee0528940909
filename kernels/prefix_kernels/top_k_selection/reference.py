"""Reference of `top_k_selection`."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.types import Selection


def top_k_selection_reference(
    scores: Tensor, budget: int, num_sink: int, num_recent: int, block_size: int, prefix_len: int
) -> Selection:
    """Rank enough blocks, list their tokens in rank order, drop those in the windows, cut at the budget.

    At most ceil(T / B) blocks give T tokens outside the windows, plus the blocks that the windows touch and
    the one short block at the end: that many are ranked, so no full sort of the scores is made. Shapes depend
    on sizes only, never on values.
    """
    num_kv_heads, num_blocks = scores.shape
    device = scores.device
    if budget >= prefix_len:
        return Selection.all(prefix_len, num_kv_heads, device)
    ranked = rank_unscored_last(scores)
    wanted = budget - num_sink - num_recent
    window_blocks = -(-num_sink // block_size) + -(-num_recent // block_size) + 1
    needed = min(num_blocks, -(-wanted // block_size) + window_blocks + 1)
    best = ranked.topk(needed, dim=1).indices
    token = torch.arange(block_size, device=device)
    positions = (best[:, :, None] * block_size + token).flatten(1)
    free = (positions >= num_sink) & (positions < prefix_len - num_recent)
    kept = free & (free.cumsum(dim=1) <= wanted)
    positions = torch.where(kept, positions, prefix_len)
    windows = torch.cat(
        [
            torch.arange(num_sink, device=device),
            torch.arange(prefix_len - num_recent, prefix_len, device=device),
        ]
    )
    positions = torch.cat([positions, windows.expand(num_kv_heads, -1)], dim=1)
    chosen = positions.int().sort(dim=1).values[:, :budget].contiguous()
    return Selection(chosen, torch.full((num_kv_heads,), budget, dtype=torch.int32, device=device))


def rank_unscored_last(scores: Tensor) -> Tensor:
    """fp32 scores, -inf and NaN replaced by a finite ramp below every real score that rises with position."""
    lowest = torch.finfo(torch.float32).min
    ramp = torch.linspace(1.0, 0.5, scores.shape[-1], device=scores.device) * lowest
    scores = scores.float()
    return torch.where(scores > -torch.inf, scores, ramp)
