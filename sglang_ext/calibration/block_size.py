"""A block size for each head from its recall: by a threshold, or at a given average block size.

Source: AB-Sparse, Eq. 2: the largest B with Recall(h, B) >= tau * Recall(h, B_min). Recall tensors have the block
sizes, ascending, as their last dimension; the leading ones (layers, KV heads) are treated alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from sglang_ext.calibration.block_recall import check_block_sizes
from sglang_ext.methods.ab_sparse import BLOCK_SIZES

TAU = 0.98
"""Recall retention of the paper's study (AB-Sparse, Figure 4)."""

MIN_ORACLE_RECALL = 0.5
"""A head whose best possible selection keeps less than this share of its attention is called near-uniform. Uniform
attention reaches the keep ratio (0.05 to 0.1); heads that sparse attention is made for, 0.95 (Kascade, Figure 1)."""


class Average(str, Enum):
    """What "average block size" means when heads differ."""

    ARITHMETIC = "arithmetic"
    """Mean of B over the heads, as the paper reports it (44.2 for Llama-3.1-8B)."""
    HARMONIC = "harmonic"
    """1 / mean of 1 / B: equal averages have equal numbers of blocks, so index bytes and scoring are equal too.
    Never above the arithmetic one."""


def block_sizes_by_tau(recall: Tensor, tau: float = TAU, block_sizes: Sequence[int] = BLOCK_SIZES) -> Tensor:
    """The largest block size that keeps tau of the recall at the smallest one (Eq. 2).

    Args:
        recall: [..., num_block_sizes] floating, 0..1.
        tau: 0..1.
        block_sizes: ascending.

    Returns:
        [...] int64, tokens per block. As in Eq. 2, a size may be taken even though a smaller one falls below tau.

    Raises:
        ValueError: shapes do not fit or a value is out of range.
    """
    _check_recall(recall, block_sizes)
    if not 0.0 <= tau <= 1.0:
        raise ValueError(f"expected tau in 0..1, got {tau}; 0.98 keeps 98% of the recall")
    kept = recall >= tau * recall[..., :1]
    rank = torch.arange(1, len(block_sizes) + 1, device=recall.device)
    last = (kept * rank).amax(dim=-1) - 1
    return torch.tensor(list(block_sizes), device=recall.device)[last]


def tau_for_average(
    recall: Tensor,
    target: float,
    average: Average = Average.ARITHMETIC,
    block_sizes: Sequence[int] = BLOCK_SIZES,
) -> float:
    """The largest tau whose block sizes are on average at least `target`.

    Block sizes change with tau only where it passes a head's Recall(h, B) / Recall(h, B_min), so these ratios are
    all that has to be tried. Ties of heads make the average step over the target: it is met or exceeded.

    Args:
        recall, block_sizes: as in `block_sizes_by_tau`.
        target: average tokens per block, up to the largest block size.
        average: how block sizes are averaged.

    Raises:
        ValueError: shapes do not fit or a value is out of range.
    """
    _check_recall(recall, block_sizes)
    _check_target(target, block_sizes)
    base = recall[..., :1].double()
    ratio = torch.where(base > 0, recall.double() / base.clamp_min(1e-300), torch.ones_like(base))
    # A hair below each ratio, so that the comparison of Eq. 2 does not depend on the rounding of tau * base.
    below: list[float] = (ratio.clamp(0.0, 1.0) - 1e-12).clamp_min(0.0).flatten().tolist()
    tried = sorted({0.0, *below})
    low, high = 0, len(tried) - 1
    while low < high:
        middle = (low + high + 1) // 2
        sizes = block_sizes_by_tau(recall.double(), tried[middle], block_sizes)
        if average_block_size(sizes, average) >= target:
            low = middle
        else:
            high = middle - 1
    return tried[low]


def block_sizes_by_budget(
    recall: Tensor,
    target: float,
    average: Average = Average.ARITHMETIC,
    block_sizes: Sequence[int] = BLOCK_SIZES,
) -> Tensor:
    """The block sizes with the greatest mean recall among those that are on average at least `target`.

    An exact solution (a knapsack over heads), so it is never worse than the uniform block size of that average. Of
    equal choices a head takes the larger block.

    Args:
        recall, block_sizes: as in `block_sizes_by_tau`.
        target: average tokens per block, up to the largest block size.
        average: how block sizes are averaged; with `HARMONIC` the bound is the number of blocks.

    Returns:
        [...] int64, tokens per block.

    Raises:
        ValueError: shapes do not fit or a value is out of range.
    """
    _check_recall(recall, block_sizes)
    _check_target(target, block_sizes)
    costs, most = _costs(list(block_sizes), target, Average(average))
    rows = recall.reshape(-1, len(block_sizes)).double().cpu()
    # Float targets: a bound that is an integer but for rounding counts as that integer.
    room = min(int(most * len(rows) + 1e-9), max(costs) * len(rows))
    best = torch.zeros(room + 1, dtype=torch.float64)
    taken = torch.empty(len(rows), room + 1, dtype=torch.int64)
    largest_first = sorted(range(len(costs)), key=lambda i: -block_sizes[i])
    for head, row in enumerate(rows):
        value = torch.full((len(costs), room + 1), -torch.inf, dtype=torch.float64)
        for rank, i in enumerate(largest_first):
            if costs[i] <= room:
                value[rank, costs[i] :] = best[: room + 1 - costs[i]] + row[i]
        best, taken[head] = value.max(dim=0)
    chosen, left = [], room
    for head in reversed(range(len(rows))):
        i = largest_first[int(taken[head, left])]
        chosen.append(block_sizes[i])
        left -= costs[i]
    return torch.tensor(chosen[::-1], device=recall.device).view(recall.shape[:-1])


def average_block_size(assigned: Tensor, average: Average = Average.ARITHMETIC) -> float:
    """Average tokens per block over all heads of `assigned` [...].

    Raises:
        ValueError: no head.
    """
    if assigned.numel() == 0:
        raise ValueError("expected the block size of at least one head, got none")
    sizes = assigned.double()
    if Average(average) is Average.HARMONIC:
        return float(1.0 / (1.0 / sizes).mean())
    return float(sizes.mean())


def near_uniform_heads(oracle_recall: Tensor, least: float = MIN_ORACLE_RECALL) -> Tensor:
    """Heads that no selection serves: even the best one keeps less than `least` of the attention.

    Args:
        oracle_recall: [...] floating, recall of the best tokens at the budget, see
            `BlockRecallAccumulator.oracle_recall`.
        least: 0..1.

    Returns:
        [...] bool: the head attends densely in the profile.

    Raises:
        ValueError: a value out of range or NaN.
    """
    if not 0.0 <= least <= 1.0:
        raise ValueError(f"expected the least oracle recall in 0..1, got {least}")
    if not bool(((oracle_recall >= 0) & (oracle_recall <= 1)).all()):
        raise ValueError("expected oracle recall in 0..1, got NaN or a value outside; measure it again")
    return oracle_recall < least


def _costs(block_sizes: list[int], target: float, average: Average) -> tuple[list[int], float]:
    """Integer costs of the block sizes and the most that a head may cost on average."""
    if average is Average.HARMONIC:
        common = math.lcm(*block_sizes)
        return [common // size for size in block_sizes], common / target
    unit = math.gcd(*block_sizes)
    largest = block_sizes[-1]
    return [(largest - size) // unit for size in block_sizes], (largest - target) / unit


def _check_recall(recall: Tensor, block_sizes: Sequence[int]) -> None:
    check_block_sizes(block_sizes)
    if recall.dim() < 1 or recall.shape[-1] != len(block_sizes) or recall.numel() == 0:
        raise ValueError(
            f"expected recall [..., num_block_sizes={len(block_sizes)}] of at least one head, got {tuple(recall.shape)}"
        )
    if not bool(((recall >= 0) & (recall <= 1)).all()):
        raise ValueError("expected recall in 0..1, got NaN or a value outside; measure it again")


def _check_target(target: float, block_sizes: Sequence[int]) -> None:
    if not 1.0 <= target <= block_sizes[-1]:
        raise ValueError(
            f"expected an average block size in 1..{block_sizes[-1]} tokens, got {target}; no head may have larger "
            "blocks than that"
        )
