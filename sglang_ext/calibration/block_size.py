"""A block size for each head from its recall: by a threshold, or at a given average block size.

Source: AB-Sparse, Eq. 2: the largest B with Recall(h, B) >= tau * Recall(h, B_min). Recall tensors have the sizes of
`BLOCK_SIZES` as their last dimension; the leading ones (layers, KV heads) are treated alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.methods.ab_sparse import BLOCK_SIZES

TAU = 0.98
"""Recall retention of the paper's study (AB-Sparse, Figure 4)."""


def block_sizes_by_tau(recall: Tensor, tau: float) -> Tensor:
    """The largest block size that keeps tau of the recall at the smallest one (Eq. 2).

    Args:
        recall: [..., num_block_sizes] floating, 0..1.
        tau: 0..1.

    Returns:
        [...] int64, tokens per block. As in Eq. 2, a size may be taken even though a smaller one falls below tau.
    """
    kept = recall >= tau * recall[..., :1]
    last = (kept * torch.arange(1, len(BLOCK_SIZES) + 1)).amax(dim=-1) - 1
    return torch.tensor(BLOCK_SIZES)[last]


def block_sizes_by_budget(recall: Tensor, target: float) -> Tensor:
    """The block sizes with the greatest mean recall among those that are on average at least `target`.

    The average is the harmonic mean over the heads: equal averages have equal numbers of blocks, so index bytes and
    scoring are equal too.

    An exact solution (a knapsack over heads), so it is never worse than the uniform block size of that average. Of
    equal choices a head takes the larger block.

    Args:
        recall: [..., num_block_sizes] floating, 0..1.
        target: average tokens per block, 1 up to the largest block size; the command line checks it.

    Returns:
        [...] int64, tokens per block.
    """
    largest = BLOCK_SIZES[-1]
    # Integer costs of the sizes, and the most that a head may cost on average.
    costs, most = [largest // size for size in BLOCK_SIZES], largest / target
    rows = recall.reshape(-1, len(BLOCK_SIZES)).double()
    # Float targets: a bound that is an integer but for rounding counts as that integer.
    room = min(int(most * len(rows) + 1e-9), max(costs) * len(rows))
    best = torch.zeros(room + 1, dtype=torch.float64)
    taken = torch.empty(len(rows), room + 1, dtype=torch.int64)
    largest_first = range(len(BLOCK_SIZES) - 1, -1, -1)
    for head, row in enumerate(rows):
        value = torch.full((len(costs), room + 1), -torch.inf, dtype=torch.float64)
        for rank, i in enumerate(largest_first):
            if costs[i] <= room:
                value[rank, costs[i] :] = best[: room + 1 - costs[i]] + row[i]
        best, taken[head] = value.max(dim=0)
    chosen, left = [], room
    for head in reversed(range(len(rows))):
        i = largest_first[int(taken[head, left])]
        chosen.append(BLOCK_SIZES[i])
        left -= costs[i]
    return torch.tensor(chosen[::-1]).view(recall.shape[:-1])
