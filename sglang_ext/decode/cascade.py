"""Exact decode of requests that share slots: what a group has in common is read once for all of its requests.

No index is needed, and the answers are those of dense attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from prefix_kernels.grouped_attention import AttentionShape, Segment
from prefix_kernels.launching import block_of
from prefix_kernels.types import PagedKV
from sglang_ext.decode.attention import Attends, Attentions
from sglang_ext.decode.base import DecodeBackend
from sglang_ext.decode.buffers import StepBuffers, StepLayout
from sglang_ext.decode.costs import StepCosts
from sglang_ext.decode.grouping import SlotTracker
from sglang_ext.decode.types import DecodeBatch, PrefixGroup, StepPath


class CascadePlan(NamedTuple):
    """A batch's groups.

    Attributes:
        groups: requests that share slots.
        size: requests of the batch.
        tokens: that a layer attends for the batch, each group's common ones once.
        saved: tokens that groups need not read a second time.
    """

    groups: tuple[PrefixGroup, ...]
    size: int
    tokens: int
    saved: int

    @property
    def lists(self) -> int:
        """Groups, and requests that are in none."""
        return self.size - sum(len(group.rows) - 1 for group in self.groups)


class CascadeDecode(DecodeBackend[CascadePlan]):
    """Groups the running requests by their slots, and attends for them.

    Args:
        shape: of a layer.
        tracker: what is known of the requests' slots; the caller makes it learn.
        arena_size: slots of all lists of a batch, at most; a batch that needs more does not begin.
        device: of the KV pool. On a CPU the reference attends.
        costs: by `block_of` a captured size, what was measured of it. Not owned.
        captured: whether decode steps replay graphs.
    """

    paths = (StepPath.CASCADE,)

    def __init__(
        self,
        shape: AttentionShape,
        tracker: SlotTracker,
        arena_size: int,
        device: torch.device,
        costs: Mapping[int, StepCosts] | None = None,
        *,
        captured: bool = False,
    ) -> None:
        self._tracker = tracker
        self._costs = {} if costs is None else costs
        self.attentions = Attentions(shape, tracker.max_batch, device, captured=captured)
        self._buffers = StepBuffers(tracker.max_batch, shape.num_kv_heads, arena_size, device)
        self.lse = torch.zeros(tracker.max_batch, shape.num_qo_heads, dtype=torch.float32, device=device)
        self._active: Attends | None = None
        self._planned: tuple[Attends, StepLayout] | None = None
        self.plans = 0

    def plan(self, batch: DecodeBatch) -> CascadePlan | None:
        """The groups of a batch, none among them; None: a batch of this size is never attended here."""
        size = len(batch.serials)
        if not self.attentions.fits(size):
            return None
        groups = tuple(self._tracker.prefixes.groups(batch.serials))
        saved = sum(group.saved for group in groups)
        return CascadePlan(groups, size, sum(batch.seq_lens) - saved, saved)

    def cost_us(self, plan: CascadePlan) -> float | None:
        costs = self._costs.get(block_of(self.attentions.padded(plan.size)))
        return None if costs is None else costs.exact_us(plan.tokens, plan.lists)

    def begin(self, plan: CascadePlan, batch: DecodeBatch) -> StepPath | None:
        before = self._planned[1] if self._planned else None
        layout = self._buffers.lay_out(batch.seq_lens, plan.groups, before)
        if layout is None:
            return None
        attention = self.attentions.of(plan.size)
        if self._planned != (attention, layout):
            self._planned = None  # until all of it is written
            pairs = zip(layout.prefixes, layout.begins, strict=True)
            shared = [Segment(one.rows, one.length, list_begin=begin) for one, begin in pairs]
            attention.plan(shared, layout.suffix)
            self._buffers.place(layout)
            self._buffers.copy_prefixes(layout, batch)
            self._planned = (attention, layout)
            self.plans += 1
        self._buffers.refresh(batch)
        self._active = attention
        return StepPath.CASCADE

    def run(self, q: Tensor, kv: PagedKV, layer: int, sm_scale: float) -> Tensor:
        """See the base; all layers are alike."""
        assert self._active is not None
        out = q.new_empty(q.shape[0], q.shape[1], kv.v_cache.shape[2])
        lse, counts = self.lse[: q.shape[0]], self._buffers.counts
        self._active.run(q, kv, self._buffers.arena, sm_scale, out, lse, counts=counts)
        return out

    @contextmanager
    def capturing(self, size: int, path: StepPath) -> Iterator[None]:
        self.attentions.will_capture(size)
        self._active = self.attentions.of(size)
        self._active.plan()
        self._planned = None
        try:
            yield
        finally:
            self._active = None

    def warm(self, batch: DecodeBatch) -> None:
        """Run what prepares a step once, so that it is compiled; writes nothing that is read."""
        self._tracker.warm(batch)
        self._buffers.refresh(batch)

    @property
    def nbytes(self) -> int:
        """See the base; scratch of the kernels apart."""
        return self._buffers.nbytes + self.lse.nbytes
