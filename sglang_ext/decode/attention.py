"""Attention kernels by the size of a batch: one object for each height of the group's tile."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from prefix_kernels.grouped_attention import AttentionShape, Segment, TunedConfigs, block_m_for
from prefix_kernels.grouped_attention.reference import ReferenceAttention
from prefix_kernels.types import PagedKV
from sglang_ext.decode import tuning

logger = logging.getLogger(__name__)


class Attends(Protocol):
    """`GroupedAttention`, or its reference."""

    def plan(self, *segments: Sequence[Segment]) -> None:
        """Write the tables of the next runs."""

    def run(
        self,
        q: Tensor,
        kv: PagedKV,
        slots: Tensor,
        sm_scale: float,
        out: Tensor,
        lse: Tensor,
        *,
        counts: Tensor | None = None,
        head_map: Tensor | None = None,
        head_slots: Tensor | None = None,
    ) -> None:
        """Attend as planned."""


def _known(device: torch.device) -> TunedConfigs | None:
    """Launch parameters of a GPU; None for a CPU."""
    return TunedConfigs.for_device(device, tuning.tuned_folder()) if device.type == "cuda" else None


class Attentions:
    """What attends batches of each size, made when it is first asked for.

    Args:
        shape: of a layer.
        max_batch: requests of a batch, at most.
        device: of the KV pool. On a CPU the reference attends.
        captured: whether decode steps replay graphs: then only batches that a graph was captured for are attended.
        num_passes: segments that a row may stand in: of its group, of what else is its own, and its own list.
        beside: others whose launch parameters and kernels' scratch serve here, too: their runs and these follow each
            other on one stream.
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
    ) -> None:
        self._beside = beside
        self._shape = shape
        self._captured = captured
        self._num_passes = num_passes
        self._max_batch = max_batch
        self._device = device
        self._configs: TunedConfigs | None = _known(device) if beside is None else beside._configs
        self._tuned = False
        self._found: dict[int, Attends] = {}
        self._sizes: list[int] = []

    def fits(self, size: int) -> bool:
        """Whether batches of that size can be attended: none that is larger than the largest captured one."""
        if self._sizes or self._captured:
            return bool(self._sizes) and size <= self._sizes[-1]
        return size <= self._max_batch

    def tune(self, sizes: Iterable[int]) -> None:
        """Measure what these sizes need and is not known of this GPU, at the first call; nothing on a CPU.

        Args:
            sizes: of all batches that graphs are captured for. Call it before the first `of`.
        """
        if self._configs is None or self._tuned:
            return
        self._tuned = True
        cache = tuning.tuned_folder()
        # A pass of single requests has the tile of one.
        tuning.tune_at_start(self._configs, self._shape, [1, *sizes], self._device, cache)

    def will_capture(self, size: int) -> None:
        """Graphs of that size are captured; SGLang begins with the largest."""
        if size not in self._sizes:
            self._sizes = sorted([*self._sizes, size])

    def padded(self, size: int) -> int:
        """What SGLang pads a batch to: the least captured size that holds it; its own where none is captured."""
        return next((one for one in self._sizes if one >= size), size)

    def of(self, size: int) -> Attends:
        """For batches of that size, padded: one pass of groups, the others of single requests."""
        if self._configs is None:
            return self._found.setdefault(0, ReferenceAttention(self._max_batch))
        from prefix_kernels.grouped_attention import GroupedAttention

        size = self.padded(size)
        block_m = block_m_for(size, self._shape.gqa)
        if block_m not in self._found:
            sizes = self._sizes or range(size, self._max_batch + 1)
            most = max(n for n in (*sizes, size) if block_m_for(n, self._shape.gqa) == block_m)
            groups, alone = self._configs.passes(self._shape, size)
            passes = [groups, *[alone] * (self._num_passes - 1)]
            logger.debug("sparse attention: groups of up to %d requests: %s", most, passes)
            beside = self._beside._found.get(block_m) if self._beside is not None else None
            scratch = beside if isinstance(beside, GroupedAttention) else None
            self._found[block_m] = GroupedAttention(self._shape, most, passes, self._device, scratch_of=scratch)
        return self._found[block_m]
