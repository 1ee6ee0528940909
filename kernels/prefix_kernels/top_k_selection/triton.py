"""Triton form of `top_k_selection`: one group of the runner."""

from __future__ import annotations

import torch
from torch import Tensor

from prefix_kernels.top_k_selection.plan import SelectionGroup
from prefix_kernels.top_k_selection.runner import TopKSelection
from prefix_kernels.types import Selection


def top_k_selection_triton(
    scores: Tensor, budget: int, num_sink: int, num_recent: int, block_size: int, prefix_len: int
) -> Selection:
    """As the reference, up to the order of equal scores: the most recent token comes first, in a cut block too."""
    num_kv_heads = scores.shape[0]
    count = min(budget, prefix_len)
    if count == 0 or num_kv_heads == 0:
        return Selection(scores.new_empty(num_kv_heads, count).int(), scores.new_full((num_kv_heads,), count).int())
    scores = scores.float()
    if block_size & (block_size - 1):
        scores, block_size = scores.repeat_interleave(block_size, dim=1)[:, :prefix_len], 1
    # Whole vectors of 4 scores a row; what is added is not read.
    scores = torch.nn.functional.pad(scores, (0, -scores.shape[1] % 4))
    select = TopKSelection(1, num_kv_heads, prefix_len, count, scores.device, max_block_size=block_size)
    select.plan(
        [
            SelectionGroup(
                prefix_len,
                budget,
                score_stride=scores.shape[1],
                block_size=block_size,
                num_sink=num_sink,
                num_recent=num_recent,
            )
        ]
    )
    lists = select.new_lists()
    select.run(scores.flatten(), lists)
    return Selection(lists.positions[0], lists.counts[0])
