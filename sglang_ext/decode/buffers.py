"""The lists of slots of one decode step, in device buffers of fixed place: what captured kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prefix_kernels.grouped_attention import Segment
from prefix_kernels.launching import send
from prefix_kernels.slot_lists import copy_slot_lists
from prefix_kernels.types import SelectedLists, SelectionGroup, list_stride
from sglang_ext.decode.types import DecodeBatch, PrefixGroup
from sglang_ext.methods.layer_plan import LayerMode, LayerPlan

_LIST_FIELDS = 5
_SHORT = 4096
_ROUND_SHORT, _ROUND_LONG = 128, 1024
_LEAST_FREE = 64
"""Entries that a new layout leaves free in each list: it serves as many steps of the same requests, at least."""


LIST_BYTES = 32 << 20
"""Device memory of a set of lists, at most, unless one group alone takes more: lists of 64 requests, of 2,048 positions
for each of 8 KV heads, take an eighth of it."""
KEPT_BYTES = 512 << 20
"""Device memory of the lists beside the first set, at most: fewer groups have lists before there are more."""


class StepLayout(NamedTuple):
    """Where a batch's lists lie.

    Attributes:
        prefixes: the groups, then the suffixes that are selected from.
        begins: per group, where its table of slots begins in the arena.
        starts: per row, the first position of its own list; 0 without a prefix, else behind all that `prefixes` has.
        rooms: per row, entries that its list may have.
        suffix: per row, the segment of its own list.
    """

    prefixes: tuple[PrefixGroup, ...]
    begins: tuple[int, ...]
    starts: tuple[int, ...]
    rooms: tuple[int, ...]
    suffix: tuple[Segment, ...]


def capacity(length: int) -> int:
    """Entries that a list of `length` may grow to before the next plan."""
    rounding = _ROUND_SHORT if length < _SHORT else _ROUND_LONG
    return -(-(length + _LEAST_FREE) // rounding) * rounding


class StepBuffers:
    """An arena of slots: the groups' own copies of their tables, then each request's own list.

    Copies are made on the stream of the step before it runs: no captured kernel reads SGLang's table, whose rows may be
    taken by another request while the step runs.

    Attributes:
        arena: [arena_size] int32.
        num_sets: copies of the counts.
        counts: [num_sets * (max_batch + reserved_counts), num_kv_heads] int32: in each copy row i has the entries of
            the list of batch row i; rows from max_batch on are the caller's, and may differ from copy to copy.

    Args:
        max_batch: requests of a batch, at most.
        num_kv_heads: KV heads.
        arena_size: slots of all lists of a batch, at most.
        device: of the KV pool.
        reserved_counts, num_sets: see above.
    """

    def __init__(
        self,
        max_batch: int,
        num_kv_heads: int,
        arena_size: int,
        device: torch.device,
        *,
        reserved_counts: int = 0,
        num_sets: int = 1,
    ) -> None:
        self.max_batch, self.num_sets = max_batch, num_sets

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.arena = integers(arena_size)
        self.counts = integers(num_sets * (max_batch + reserved_counts), num_kv_heads)
        self._sets = self.counts.view(num_sets, max_batch + reserved_counts, num_kv_heads)
        self._lists = integers(max_batch, _LIST_FIELDS)
        most = max(max_batch, reserved_counts)
        self._prefix_lists = integers(most, _LIST_FIELDS)
        self._prefix_counts = integers(most, num_kv_heads)

    def lay_out(
        self, seq_lens: Sequence[int], prefixes: Sequence[PrefixGroup], before: StepLayout | None = None
    ) -> StepLayout | None:
        """Where the lists of a batch would lie; None where they do not fit. Writes nothing.

        Args:
            seq_lens: tokens of each request.
            prefixes: a row stands in one of them at most, and in one that begins behind it.
            before: the layout in force: returned where the batch still fits in it.
        """
        starts = [0] * len(seq_lens)
        for prefix in prefixes:
            for row in prefix.rows:
                starts[row] = max(starts[row], prefix.begin + prefix.length)
        suffix_lens = [length - start for length, start in zip(seq_lens, starts, strict=True)]
        if before is not None and (before.prefixes, before.starts) == (tuple(prefixes), tuple(starts)):
            free = [room - length for room, length in zip(before.rooms, suffix_lens, strict=True)]
            if min(free) >= 0 and min(suffix_lens) > 0:
                return before
        rooms = [capacity(length) for length in suffix_lens]
        needed = sum(prefix.length for prefix in prefixes) + sum(rooms)
        if min(suffix_lens) < 1 or needed > len(self.arena) or len(seq_lens) > self.max_batch:
            return None
        at, begins, suffix = 0, [], []
        for prefix in prefixes:
            begins.append(at)
            at += prefix.length
        for row, room in enumerate(rooms):
            suffix.append(Segment((row,), room, list_begin=at, list_id=row))
            at += room
        return StepLayout(tuple(prefixes), tuple(begins), tuple(starts), tuple(rooms), tuple(suffix))

    def place(self, layout: StepLayout) -> None:
        """Begin a layout: send its tables."""
        fields = (layout.starts, layout.suffix)
        listed = [(row, start, -1, s.list_begin, s.length) for row, (start, s) in enumerate(zip(*fields, strict=True))]
        send(torch.tensor(listed, dtype=torch.int32), self._lists)
        if layout.prefixes:
            pairs = zip(layout.prefixes, layout.begins, strict=True)
            copied = [(p.rows[0], p.begin, p.begin + p.length, begin, p.length) for p, begin in pairs]
            send(torch.tensor(copied, dtype=torch.int32), self._prefix_lists)

    def copy_prefixes(self, layout: StepLayout, batch: DecodeBatch) -> None:
        """Copy the groups' slots out of the rows of their first members: at the begin of a layout, and in each step as
        long as they may change. A prefix in host memory has those of the layers that attend all.
        """
        if layout.prefixes:
            self._copy(batch, self._prefix_lists[: len(layout.prefixes)], self._prefix_counts)
        for prefix, begin in zip(layout.prefixes, layout.begins, strict=True):
            if prefix.host is not None and prefix.host.dense_slots is not None:
                self.arena[begin : begin + prefix.length] = prefix.host.dense_slots

    def refresh(self, batch: DecodeBatch) -> None:
        """Copy each request's own list as it is in this step."""
        size = len(batch.seq_lens)
        self._copy(batch, self._lists[:size], self.counts_of(0))
        if self.num_sets > 1:
            self._sets[1:, :size] = self._sets[:1, :size]

    @property
    def nbytes(self) -> int:
        """Device memory."""
        tensors = (self.arena, self.counts, self._lists, self._prefix_lists, self._prefix_counts)
        return sum(tensor.nbytes for tensor in tensors)

    def counts_of(self, number: int) -> Tensor:
        """A copy of the counts: [max_batch + reserved_counts, num_kv_heads], a view."""
        return self._sets[number]

    def _copy(self, batch: DecodeBatch, lists: Tensor, counts: Tensor) -> None:
        copy_slot_lists(*batch.tables, lists, self.arena, counts)


class ListsTooLargeError(ValueError):
    """Kept lists of one group alone would take more than `KEPT_BYTES`."""


def num_sets(layer_plan: LayerPlan, search_period: int) -> int:
    """Sets of lists: one serves all anchor layers in turns, unless a later step reads them, or a layer behind the next
    anchor; then each has its own.
    """
    latest: int | None = None
    for number, role in enumerate(layer_plan.layers):
        latest = number if role.mode is LayerMode.ANCHOR else latest
        if role.anchor_layer not in (None, latest):
            search_period = max(search_period, 2)
    return max(1, len(layer_plan.anchor_layers)) if search_period > 1 else 1


def list_entries(max_groups: int, num_sets: int, num_kv_heads: int, width: int, most_bytes: int = LIST_BYTES) -> int:
    """Entries of a set of lists: for all groups the largest budget, but no more than `most_bytes` for more than one
    group, and `KEPT_BYTES` for all sets.

    Args:
        max_groups: at most.
        num_sets: from `num_sets`, or copies of one set; the first one does not count against `KEPT_BYTES`.
        num_kv_heads: KV heads.
        width: largest budget.
        most_bytes: of one set.

    Raises:
        ListsTooLargeError: not even those of one group fit `KEPT_BYTES`.
    """
    of_one, kept = num_kv_heads * list_stride(width), 4 * (num_sets - 1)
    if kept * of_one > KEPT_BYTES:
        raise ListsTooLargeError(
            f"expected lists of at most {KEPT_BYTES} bytes for one group, got {kept * of_one} ({num_sets} anchor "
            f"layers, {num_kv_heads} KV heads, {width} positions); set search_period to 1 and let layers reuse the "
            "last layer that selects, or lower max_keep_ratio, --context-length or the number of anchor layers"
        )
    entries = min(max_groups * of_one, max(of_one, most_bytes // 4))
    return min(entries, KEPT_BYTES // kept if kept else entries) // 4 * 4


def head_maps(layer_plan: LayerPlan, device: torch.device) -> list[Tensor | None]:
    """Per layer int32 [num_kv_heads], the anchor layer's KV head for each of its own; None: it selects itself."""
    maps = [None if role.anchor_layer is None else role.head_map for role in layer_plan.layers]
    return [None if one is None else torch.tensor(one, dtype=torch.int32, device=device) for one in maps]


class AnchorLists:
    """Lists of one anchor layer after the other, or of each of them a set of its own.

    The lists of a step's groups lie one behind the other, as `pack_lists` places them, at the same entries of each set.
    Attention of a layer takes the slots and the counts of its set.

    Attributes:
        entries: of each set.
        head_maps: per layer, int32 [num_kv_heads] for attention of what its anchor layer selected; None: its own heads.

    Args:
        layer_plan: role of each layer.
        buffers: whose counts have as many copies as there are sets.
        entries: see above.
        device: of the KV pool.
    """

    def __init__(self, layer_plan: LayerPlan, buffers: StepBuffers, entries: int, device: torch.device) -> None:
        self.entries, self._buffers = entries, buffers
        # Attention reads slots; positions are read by nobody but a trace, at once.
        positions, *slots = torch.zeros(1 + buffers.num_sets, entries, dtype=torch.int32, device=device)
        self._sets = [
            SelectedLists(positions, buffers.counts_of(number)[buffers.max_batch :], own)
            for number, own in enumerate(slots)
        ]
        own_sets = buffers.num_sets > 1
        number_of = {layer: number if own_sets else 0 for number, layer in enumerate(layer_plan.anchor_layers)}
        anchors = (
            layer if role.anchor_layer is None else role.anchor_layer for layer, role in enumerate(layer_plan.layers)
        )
        self._set_of = [number_of.get(anchor, 0) for anchor in anchors]
        self.head_maps = head_maps(layer_plan, device)

    def of(self, layer: int) -> SelectedLists:
        """That a layer writes, or reads."""
        return self._sets[self._set_of[layer]]

    def counts(self, layer: int) -> Tensor:
        """int32 [num_lists, num_kv_heads], as attention of a layer takes it together with the slots of its set."""
        return self._buffers.counts_of(self._set_of[layer])

    def segment(self, number: int, rows: tuple[int, ...], group: SelectionGroup) -> Segment:
        """Of a group and its selection."""
        list_id = self._buffers.max_batch + number
        return Segment(rows, group.count, group.list_begin, group.head_stride, list_id)

    @property
    def nbytes(self) -> int:
        """Device memory, the counts apart."""
        return 4 * self.entries * (1 + len(self._sets))
