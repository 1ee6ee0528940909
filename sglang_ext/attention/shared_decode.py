"""Exact decode of requests that share slots: what a group has in common is read once for all of its requests.

No index is needed, and the answers are those of dense attention. Everything that a CUDA graph reads lies in buffers of
fixed place: the host writes them before a replay, and a captured launch works on whatever they say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from prefix_kernels.grouped_attention import Segment
from prefix_kernels.types import PagedKV
from sglang_ext.attention.attentions import Attends, Attentions, LayerShape
from sglang_ext.attention.slot_tracker import DecodeBatch, SlotTracker
from sglang_ext.attention.step_buffers import PrefixRows, StepBuffers, StepLayout

_LEAST_SHARE = 16
"""A step must save one of so many of its tokens: behind long private texts, SGLang's kernels may be the faster ones."""


class SharedDecode:
    """Groups the running requests by their slots, and attends for them.

    A step of a batch: `prepare` says whether it is worth it, and writes the tables; then every layer calls `attend`,
    or a graph that was captured with these calls is replayed.

    Args:
        shape: of a layer.
        tracker: what is known of the requests' slots; the caller makes it learn.
        arena_size: slots of all lists of a batch, at most; a batch that needs more is never prepared.
        device: of the KV pool. On a CPU the reference attends.
        min_saved: tokens that groups must save in a step, at least, to be worth another attention kernel.
        captured: whether decode steps replay graphs.
    """

    def __init__(
        self,
        shape: LayerShape,
        tracker: SlotTracker,
        arena_size: int,
        device: torch.device,
        min_saved: int,
        *,
        captured: bool = False,
    ) -> None:
        self._tracker = tracker
        self._min_saved = min_saved
        self._attentions = Attentions(shape, tracker.max_batch, device, captured=captured)
        implementation = "triton" if device.type == "cuda" else "reference"
        self._buffers = StepBuffers(tracker.max_batch, shape.num_kv_heads, arena_size, device, implementation)
        self._lse = torch.zeros(tracker.max_batch, shape.num_qo_heads, dtype=torch.float32, device=device)
        self._active: Attends | None = None
        self._planned: tuple[Attends, StepLayout] | None = None
        self.plans = 0

    def prepare(self, batch: DecodeBatch) -> bool:
        """Group a batch and write the tables of its step, on the current stream. Never waits for the device.

        Returns:
            Whether this step is to be attended here. False: by SGLang's own backend.
        """
        size = len(batch.serials)
        if not self._attentions.fits(size):
            return False
        groups = self._tracker.prefixes.groups(batch.serials)
        saved = sum(group.saved for group in groups)
        if saved < max(self._min_saved, sum(batch.seq_lens) // _LEAST_SHARE):
            return False
        before = self._planned[1] if self._planned else None
        layout = self._buffers.lay_out(batch.seq_lens, [PrefixRows(*group) for group in groups], before)
        if layout is None:
            return False
        attention = self._attentions.of(size)
        if self._planned != (attention, layout):
            self._planned = None  # until all of it is written
            pairs = zip(layout.prefixes, layout.begins, strict=True)
            shared = [Segment(one.rows, one.length, list_begin=begin) for one, begin in pairs]
            attention.plan(shared, layout.private)
            self._buffers.place(layout)
            self._buffers.copy_prefixes(layout, batch)
            self._planned = (attention, layout)
            self.plans += 1
        self._buffers.refresh(batch)
        self._active = attention
        return True

    @property
    def attentions(self) -> Attentions:
        """The kernels, whose scratch others may share."""
        return self._attentions

    def attend(self, q: Tensor, kv: PagedKV, sm_scale: float) -> Tensor:
        """One layer of the prepared step, or of the one being captured.

        Args:
            q: [batch_size or more, num_qo_heads, head_dim]; rows beyond the batch come out as 0.
            kv: the layer's pool buffers; the new tokens' K and V are already written.
            sm_scale: attention scale.

        Returns:
            [rows of q, num_qo_heads, v_head_dim] in q's dtype, new memory.
        """
        assert self._active is not None
        out = q.new_empty(q.shape[0], q.shape[1], kv.v_cache.shape[2])
        lse, counts = self._lse[: q.shape[0]], self._buffers.counts
        self._active.run(q, kv, self._buffers.arena, sm_scale, out, lse, counts=counts)
        return out

    def warm(self, batch: DecodeBatch) -> None:
        """Run what prepares a step once, so that it is compiled; writes nothing that is read."""
        self._tracker.warm(batch)
        self._buffers.refresh(batch)

    @contextmanager
    def capturing(self, size: int) -> Iterator[None]:
        """Within the block `attend` may be captured, for batches of at most `size` requests."""
        self._attentions.will_capture(size)
        self._active = self._attentions.of(size)
        self._active.plan()
        self._planned = None
        try:
            yield
        finally:
            self._active = None
