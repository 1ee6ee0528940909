"""The positions to attend, from pooled scores and a token budget. In torch; `anchor_selection` has the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.top_k_selection.plan import SelectionGroup, pack_lists
from prefix_kernels.types import Selection

__all__ = ["LOWEST_LOG", "NUM_KEYS", "SelectionGroup", "pack_lists", "rank_by_keys", "top_k_selection"]

NUM_KEYS = 2048
"""Keys of scores, each a bin of the kernel's counts: 0 for what has no score, the last one for the windows."""
LOWEST_LOG = -44.0
"""Natural log of the least share that a key tells from others; shares of a sample are lowered by 20."""


def rank_by_keys(scores: Tensor) -> Tensor:
    """Scores as the kernel ranks them: by keys of 11 bits, among equal ones the most recent first.

    A key is a step of 44 / 2,045 = 0.0215 from -44 to 0, what lies outside ties at the ends, -inf and NaN come last. At
    the threshold tokens then stand for each other whose shares differ by 2% at most.

    Args:
        scores: [num_kv_heads, prefix_len] fp32, natural logs of shares.

    Returns:
        fp64, the same shape: the key, and below 1 the position.
    """
    place = (scores.clamp(LOWEST_LOG, 0.0).nan_to_num() - LOWEST_LOG) * ((NUM_KEYS - 3) / -LOWEST_LOG)
    keys = torch.where(scores > -torch.inf, place.long() + 1, 0)
    return keys + torch.arange(scores.shape[-1], device=scores.device, dtype=torch.float64) / scores.shape[-1]


def top_k_selection(
    scores: Tensor, budget: int, num_sink: int, num_recent: int, block_size: int, prefix_len: int
) -> Selection:
    """Exactly min(budget, prefix_len) positions per KV head: sink, recent window, then the best blocks.

    The K_h = ceil(T / B_h) best blocks (AB-Sparse, 3.4, T the tokens that the windows leave) are taken in the order of
    their scores, and the last one is cut. So every method and block size reads the same number of tokens, and counts
    are known without asking the device. Shapes depend on sizes only, never on values.

    Args:
        scores: [num_kv_heads, ceil(prefix_len / block_size)] floating, higher is better; any monotone scale.
            -inf and NaN rank last, among themselves the most recent first.
        budget: tokens, at least 1; sink and recent window count towards it.
        num_sink: leading positions always taken.
        num_recent: trailing positions of the prefix always taken.
        block_size: tokens per score; 1 is token granularity. The last block may be shorter.
        prefix_len: tokens of the prefix, 0 allowed.

    Returns:
        A new `Selection` of max_count = min(budget, prefix_len) without padding.

    Raises:
        ValueError: sizes out of range, scores of another shape, or windows that do not fit the budget.
    """
    for name, value, least in (
        ("budget", budget, 1),
        ("num_sink", num_sink, 0),
        ("num_recent", num_recent, 0),
        ("block_size", block_size, 1),
        ("prefix_len", prefix_len, 0),
    ):
        if value < least:
            raise ValueError(f"expected {name} >= {least} tokens, got {value}")
    num_blocks, device = -(-prefix_len // block_size), scores.device
    if scores.dim() != 2 or scores.shape[1] != num_blocks or not scores.dtype.is_floating_point:
        raise ValueError(
            f"expected scores [num_kv_heads, ceil({prefix_len} / {block_size}) = {num_blocks}] in a floating "
            f"dtype, got {tuple(scores.shape)} {scores.dtype}; pool them over rows and query heads first"
        )
    num_kv_heads = scores.shape[0]
    if budget >= prefix_len:
        return Selection.all(prefix_len, num_kv_heads, device)
    wanted = budget - num_sink - num_recent
    if wanted < 0:
        raise ValueError(
            f"expected num_sink + num_recent <= budget={budget} tokens, got {num_sink} + {num_recent}; "
            "raise the budget or shrink the windows"
        )
    # Besides the blocks that the budget fills: those that the windows touch, the short one at the end, the cut one. So
    # no full sort is made.
    touched = -(-num_sink // block_size) + -(-num_recent // block_size) + 1
    needed = min(num_blocks, -(-wanted // block_size) + touched + 1)
    best = _rank_unscored_last(scores).topk(needed, dim=1).indices
    positions = (best[:, :, None] * block_size + torch.arange(block_size, device=device)).flatten(1)
    free = (positions >= num_sink) & (positions < prefix_len - num_recent)
    kept = free & (free.cumsum(dim=1) <= wanted)
    positions = torch.where(kept, positions, prefix_len)
    recent = torch.arange(prefix_len - num_recent, prefix_len, device=device)
    windows = torch.cat([torch.arange(num_sink, device=device), recent])
    positions = torch.cat([positions, windows.expand(num_kv_heads, -1)], dim=1)
    chosen = positions.int().sort(dim=1).values[:, :budget].contiguous()
    return Selection(chosen, torch.full((num_kv_heads,), budget, dtype=torch.int32, device=device))


def _rank_unscored_last(scores: Tensor) -> Tensor:
    """Scores, -inf and NaN replaced by a finite ramp in fp32 below every real score that rises with position."""
    lowest = torch.finfo(torch.float32).min
    ramp = torch.linspace(1.0, 0.5, scores.shape[-1], device=scores.device) * lowest
    scores = scores if scores.dtype is torch.float64 else scores.float()
    return torch.where(scores > -torch.inf, scores, ramp)
