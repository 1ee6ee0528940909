"""What a launch of grouped attention holds on the device, and which passes share one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prefix_kernels.grouped_attention.config import AttentionConfig
from prefix_kernels.grouped_attention.items import ITEM_FIELDS


class AttentionPass:
    """Segments of one kind, as groups or single requests: at most one segment of a batch row.

    Args:
        config: tile and schedule.
        max_batch: requests of a batch, at most.
        target: items that fill the GPU once.
    """

    def __init__(self, config: AttentionConfig, max_batch: int, target: int) -> None:
        self.config = config
        self.target = target
        self.max_items = target + max_batch

    def partial_rows(self, num_kv_heads: int) -> int:
        """Partial rows that its items may write."""
        return self.max_items * num_kv_heads * self.config.block_m


class AttentionLaunch:
    """One launch of an attention kernel: the items of its passes, in fixed device buffers."""

    def __init__(
        self, passes: Sequence[int], all_passes: Sequence[AttentionPass], max_batch: int, device: torch.device
    ):
        self.passes = passes
        self.config = all_passes[passes[0]].config
        self.target = all_passes[passes[0]].target
        self.max_items = sum(all_passes[number].max_items for number in passes)
        self.items = torch.zeros(self.max_items, ITEM_FIELDS, dtype=torch.int32, device=device)
        self.rows = torch.zeros(len(passes) * max_batch, dtype=torch.int32, device=device)
        self.num_items = torch.zeros(2, dtype=torch.int32, device=device)

    @property
    def programs(self) -> int:
        """Programs per KV head: one an item, or, where each takes item after item, what fills the GPU."""
        return self.target if self.config.specialized else self.max_items


def joined(passes: Sequence[AttentionConfig]) -> list[list[int]]:
    """Numbers of the passes by launch: neighbours of one specialized configuration together, others alone."""
    found: list[list[int]] = []
    for number, config in enumerate(passes):
        if found and config.specialized and config == passes[found[-1][0]]:
            found[-1].append(number)
        else:
            found.append([number])
    return found
