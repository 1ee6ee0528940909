"""Attention kernels by the size of a batch: one object for each height of the group's tile."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeAlias

import torch

from prefix_kernels.grouped_attention import AttentionShape, block_m_for, has_specialized, passes_for
from prefix_kernels.grouped_attention.reference import ReferenceAttention

if TYPE_CHECKING:  # imports Triton
    from prefix_kernels.grouped_attention.runner import GroupedAttention

logger = logging.getLogger(__name__)


Attends: TypeAlias = "GroupedAttention | ReferenceAttention"


class Attentions:
    """What attends batches of each size, made when it is first asked for.

    Args:
        shape: of a layer.
        max_batch: requests of a batch, at most.
        device: of the KV pool. On a CPU the reference attends.
        captured: whether decode steps replay graphs: then only batches that a graph was captured for are attended.
        num_passes: segments that a row may stand in: of its group, of what else is its own, and its own list.
        beside: others whose kernels' scratch serves here, too: their runs and these follow each other on one stream.
        short: groups have lists of some thousand tokens, see `grouped_attention.default_config`.
    """

    def __init__(
        self,
        shape: AttentionShape,
        max_batch: int,
        device: torch.device,
        *,
        captured: bool = False,
        num_passes: int = 2,
        beside: Attentions | None = None,
        short: bool = False,
    ) -> None:
        self._beside, self._short = beside, short
        self._shape = shape
        self._captured = captured
        self._num_passes = num_passes
        self._max_batch = max_batch
        self._device = device
        self._found: dict[int, Attends] = {}
        self._sizes: list[int] = []

    def fits(self, size: int) -> bool:
        """Whether batches of that size can be attended: none that is larger than the largest captured one."""
        if self._sizes or self._captured:
            return bool(self._sizes) and size <= self._sizes[-1]
        return size <= self._max_batch

    def will_capture(self, size: int) -> None:
        """Graphs of that size are captured; SGLang begins with the largest."""
        if size not in self._sizes:
            self._sizes = sorted([*self._sizes, size])

    def padded(self, size: int) -> int:
        """What SGLang pads a batch to: the least captured size that holds it; its own where none is captured."""
        return next((one for one in self._sizes if one >= size), size)

    def of(self, size: int) -> Attends:
        """For batches of that size, padded: one pass of groups, the others of single requests."""
        if self._device.type == "cpu":
            return self._found.setdefault(0, ReferenceAttention(self._max_batch))
        from prefix_kernels.grouped_attention.runner import GroupedAttention

        size = self.padded(size)
        block_m = block_m_for(size, self._shape.gqa)
        if block_m not in self._found:
            sizes = self._sizes or range(size, self._max_batch + 1)
            most = max(n for n in (*sizes, size) if block_m_for(n, self._shape.gqa) == block_m)
            specialized = has_specialized(self._device)
            groups, alone = passes_for(self._shape, size, specialized=specialized, short=self._short)
            passes = [groups, *[alone] * (self._num_passes - 1)]
            logger.debug("sparse attention: groups of up to %d requests: %s", most, passes)
            beside = self._beside._found.get(block_m) if self._beside is not None else None
            scratch = beside if isinstance(beside, GroupedAttention) else None
            self._found[block_m] = GroupedAttention(self._shape, most, passes, self._device, scratch_of=scratch)
        return self._found[block_m]
