"""Exact decode of requests that share slots: what a group has in common is read once for all of its requests.

No index is needed, and the answers are those of dense attention. Everything that a CUDA graph reads lies in buffers of
fixed place: the host writes them before a replay, and a captured launch works on whatever they say.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from prefix_kernels.grouped_attention import AttentionShape, Segment, TunedConfigs, block_m_for
from prefix_kernels.grouped_attention.reference import ReferenceAttention
from prefix_kernels.launching import send
from prefix_kernels.slot_lists import copy_slot_lists
from prefix_kernels.types import PagedKV
from sglang_ext.attention.comparisons import SlotComparisons
from sglang_ext.attention.sharing import BatchGroup, SharedPrefixes

logger = logging.getLogger(__name__)

_LIST_FIELDS = 5
_MEMBERS = 32
"""Requests of the group that decides how little may be shared: fewer must share more to be worth it."""
_SHORT = 4096
_ROUND_SHORT, _ROUND_LONG = 128, 1024


class Attends(Protocol):
    """`GroupedAttention`, or its reference."""

    def plan(self, *segments: Sequence[Segment]) -> None:
        """Write the tables of the next runs."""

    def run(
        self, q: Tensor, kv: PagedKV, slots: Tensor, sm_scale: float, out: Tensor, lse: Tensor, *, counts: Tensor
    ) -> None:
        """Attend as planned."""


@dataclass(frozen=True)
class DecodeBatch:
    """One decode step, as SGLang describes it.

    Attributes:
        serials: per batch row, of its request; None for one that shares nothing.
        seq_lens: tokens of each request, the one being decoded included, on the host.
        req_to_token: [num_rows, max_context_len] int32, SGLang's table of slots.
        req_pool_indices: [batch_size], row of the table of each request, on the device.
        device_seq_lens: [batch_size], `seq_lens` on the device.
    """

    serials: Sequence[int | None]
    seq_lens: Sequence[int]
    req_to_token: Tensor
    req_pool_indices: Tensor
    device_seq_lens: Tensor


def capacity(length: int, rounding: int = 0) -> int:
    """Entries that a list of `length` may grow to before the next plan: rounded up, at least one more."""
    rounding = rounding or (_ROUND_SHORT if length < _SHORT else _ROUND_LONG)
    return (length // rounding + 1) * rounding


class SharedDecode:
    """Groups the running requests by their slots, and attends for them.

    A step of a batch: `prepare` says whether it is worth it, and writes the tables; then every layer calls `attend`,
    or a graph that was captured with these calls is replayed.

    Args:
        num_qo_heads, num_kv_heads, head_dim, v_head_dim, dtype, kv_dtype: of a layer.
        max_batch: requests of a batch, at most; a larger batch is never prepared.
        arena_size: slots of all lists of a batch, at most; a batch that needs more is never prepared.
        device: of the KV pool. On a CPU the reference attends.
        min_saved: tokens that groups must save in a step, at least, to be worth another attention kernel.
    """

    def __init__(
        self,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        max_batch: int,
        arena_size: int,
        device: torch.device,
        min_saved: int,
    ) -> None:
        self._heads = (num_qo_heads, num_kv_heads, head_dim, v_head_dim, dtype, kv_dtype)
        self.max_batch = max_batch
        self._device = device
        self._min_saved = min_saved
        on_gpu = device.type == "cuda"
        self._implementation = "triton" if on_gpu else "reference"
        self.prefixes = SharedPrefixes(min_saved // _MEMBERS)
        self._comparisons = SlotComparisons(max_batch, device, self._implementation)
        self._steps: dict[int, int] = {}
        self._arena = torch.zeros(arena_size, dtype=torch.int32, device=device)
        self._counts = torch.zeros(max_batch, num_kv_heads, dtype=torch.int32, device=device)
        self._lists = torch.zeros(max_batch, _LIST_FIELDS, dtype=torch.int32, device=device)
        self._group_counts = torch.zeros(max_batch, num_kv_heads, dtype=torch.int32, device=device)
        self._group_lists = torch.zeros(max_batch, _LIST_FIELDS, dtype=torch.int32, device=device)
        self._lse = torch.zeros(max_batch, num_qo_heads, dtype=torch.float32, device=device)
        self._configs = TunedConfigs.for_device(device) if on_gpu else None
        self._attentions: dict[int, Attends] = {}
        self._sizes: list[int] = []
        self._active: Attends | None = None
        self._planned: dict[int, object] = {}
        self.plans = 0

    # -- the life of a request -----------------------------------------------------------------------------

    def ended(self, serial: int) -> None:
        """A request gave its slots back: finished, aborted or retracted."""
        self._steps.pop(serial, None)
        self._comparisons.drop(serial)
        self.prefixes.remove(serial)

    def _learn(self, batch: DecodeBatch) -> None:
        """Take what comparisons have found; compare requests that are in their second step or later.

        In its first one a request may still stand on slots of its own that the prefix cache is about to replace.
        """
        for result in self._comparisons.finished():
            if result.serial in self._steps and result.serial not in self.prefixes:
                self.prefixes.add(result.serial, result.length, result.common)
        for row, serial in enumerate(batch.serials):
            if serial is None:
                continue
            steps = self._steps.get(serial, 0)
            self._steps[serial] = steps + 1
            if steps == 1:
                settled = [one if self._settled(one) else None for one in batch.serials]
                tables = (batch.req_to_token, batch.req_pool_indices, batch.device_seq_lens)
                self._comparisons.start(serial, row, settled, *tables, batch.seq_lens[row])

    def _settled(self, serial: int | None) -> bool:
        return serial is not None and self._steps.get(serial, 0) > 0

    # -- a step --------------------------------------------------------------------------------------------

    def prepare(self, batch: DecodeBatch) -> bool:
        """Group a batch and write the tables of its step, on the current stream. Never waits for the device.

        Returns:
            Whether this step is to be attended here. False: by SGLang's own backend.
        """
        size = len(batch.serials)
        if size > (self._sizes[-1] if self._sizes else self.max_batch):
            return False
        self._learn(batch)
        groups = self.prefixes.groups(batch.serials)
        if sum(group.saved for group in groups) < self._min_saved:
            return False
        starts = [0] * size
        for group in groups:
            for row in group.rows:
                starts[row] = group.length
        suffixes = [n - start for n, start in zip(batch.seq_lens, starts, strict=True)]
        rooms = [capacity(n) for n in suffixes]
        if min(suffixes) < 1 or sum(group.length for group in groups) + sum(rooms) > len(self._arena):
            return False
        attention = self._attention(self._padded(size))
        wanted = (tuple(groups), tuple(starts), tuple(rooms))
        if self._planned.get(id(attention)) != wanted:
            self._plan(attention, batch, groups, starts, rooms)
            self._planned = {id(attention): wanted}  # the lists of the others are overwritten
        self._copy(batch, self._lists[:size], self._counts)
        self._active = attention
        return True

    def _plan(
        self,
        attention: Attends,
        batch: DecodeBatch,
        groups: Sequence[BatchGroup],
        starts: Sequence[int],
        rooms: Sequence[int],
    ) -> None:
        """Segments of the batch, and the groups' own copies of their slots."""
        at = 0
        shared, copied = [], []
        for group in groups:
            shared.append(Segment(group.rows, group.length, list_begin=at))
            copied.append((group.rows[0], 0, group.length, at, group.length))
            at += group.length
        private, listed = [], []
        for row, (start, room) in enumerate(zip(starts, rooms, strict=True)):
            private.append(Segment((row,), room, list_begin=at, list_id=row))
            listed.append((row, start, -1, at, room))
            at += room
        attention.plan(shared, private)
        send(torch.tensor(listed, dtype=torch.int32), self._lists)
        send(torch.tensor(copied, dtype=torch.int32), self._group_lists)
        self._copy(batch, self._group_lists[: len(copied)], self._group_counts)
        self.plans += 1

    def _copy(self, batch: DecodeBatch, lists: Tensor, counts: Tensor) -> None:
        tables = (batch.req_to_token, batch.req_pool_indices, batch.device_seq_lens)
        copy_slot_lists(*tables, lists, self._arena, counts, implementation=self._implementation)

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
        lse = self._lse[: q.shape[0]]
        self._active.run(q, kv, self._arena, sm_scale, out, lse, counts=self._counts)
        return out

    # -- graphs --------------------------------------------------------------------------------------------

    @contextmanager
    def capturing(self, size: int) -> Iterator[None]:
        """Within the block `attend` may be captured, for batches of at most `size` requests."""
        if size not in self._sizes:
            self._sizes = sorted([*self._sizes, size])
        self._active = self._attention(size)
        self._active.plan()
        self._planned = {}
        try:
            yield
        finally:
            self._active = None

    def _padded(self, size: int) -> int:
        """What SGLang pads a batch to: the least captured size; its own where none is as large."""
        return next((one for one in self._sizes if one >= size), size)

    def _attention(self, size: int) -> Attends:
        """What attends batches of that size: one for each height of the group's tile."""
        if self._configs is None:
            return self._attentions.setdefault(0, ReferenceAttention(self.max_batch))
        from prefix_kernels.grouped_attention import GroupedAttention

        shape = AttentionShape(*self._heads)
        block_m = block_m_for(size, shape.gqa)
        found = self._attentions.get(block_m)
        if found is None:
            sizes = self._sizes or range(size, self.max_batch + 1)
            most = max(n for n in (*sizes, size) if block_m_for(n, shape.gqa) == block_m)
            passes = self._configs.passes(shape, size)
            found = GroupedAttention(shape, most, passes, self._device)
            logger.info("sparse attention: groups of up to %d requests: %s", most, passes)
            self._attentions[block_m] = found
        return found

    def snapshot(self) -> dict[str, Any]:
        """State as plain values."""
        return {"requests": len(self._steps), "compared": len(self.prefixes), "plans": self.plans}
