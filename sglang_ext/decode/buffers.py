"""The lists of slots of one decode step, in device buffers of fixed place: what captured kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prefix_kernels.grouped_attention import Segment
from prefix_kernels.launching import send
from prefix_kernels.slot_lists import copy_slot_lists
from prefix_kernels.types import SelectedLists
from sglang_ext.decode.types import DecodeBatch, PrefixGroup
from sglang_ext.methods.layer_plan import LayerMode, LayerPlan

_LIST_FIELDS = 5
_SHORT = 4096
_ROUND_SHORT, _ROUND_LONG = 128, 1024
_LEAST_FREE = 64
"""Entries that a new layout leaves free in each list: it serves as many steps of the same requests, at least."""


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
        arena: [reserved + arena_size] int32; the first `reserved` entries are the caller's.
        num_sets: copies of the counts.
        counts: [num_sets * (max_batch + reserved_counts), num_kv_heads] int32: in each copy row i has the entries of
            the list of batch row i; rows from max_batch on are the caller's, and may differ from copy to copy.

    Args:
        max_batch: requests of a batch, at most.
        num_kv_heads: KV heads.
        arena_size: slots of all lists of a batch, at most.
        device: of the KV pool.
        implementation: of `copy_slot_lists`.
        reserved, reserved_counts, num_sets: see above.
    """

    def __init__(
        self,
        max_batch: int,
        num_kv_heads: int,
        arena_size: int,
        device: torch.device,
        implementation: str,
        *,
        reserved: int = 0,
        reserved_counts: int = 0,
        num_sets: int = 1,
    ) -> None:
        self.max_batch, self.num_sets = max_batch, num_sets
        self._implementation = implementation
        self._reserved = reserved

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.arena = integers(reserved + arena_size)
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
        if min(suffix_lens) < 1 or self._reserved + needed > len(self.arena) or len(seq_lens) > self.max_batch:
            return None
        at, begins, suffix = self._reserved, [], []
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
        long as they may change.
        """
        if layout.prefixes:
            self._copy(batch, self._prefix_lists[: len(layout.prefixes)], self._prefix_counts)

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
        copy_slot_lists(*batch.tables, lists, self.arena, counts, implementation=self._implementation)


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


def groups_that_fit(num_groups: int, num_sets: int, num_kv_heads: int, width: int) -> int:
    """Groups of a batch, at most `num_groups`, whose kept lists take no more than `KEPT_BYTES`.

    Args:
        num_groups: at most.
        num_sets: from `num_sets`; the first one is not counted.
        num_kv_heads: KV heads.
        width: entries of a list.

    Raises:
        ListsTooLargeError: not even those of one group do.
    """
    of_one = (num_sets - 1) * num_kv_heads * width * 4
    if of_one > KEPT_BYTES:
        raise ListsTooLargeError(
            f"expected lists of at most {KEPT_BYTES} bytes for one group, got {of_one} ({num_sets} anchor layers, "
            f"{num_kv_heads} KV heads, {width} positions); set search_period to 1 and let layers reuse the last layer "
            "that selects, or lower max_keep_ratio, --context-length or the number of anchor layers"
        )
    return min(num_groups, KEPT_BYTES // of_one) if of_one else num_groups


class AnchorLists:
    """Lists of one anchor layer after the other, or of each of them a set of its own.

    A segment of a group names its list in the first set. A layer reads another set by its head map: list and count of a
    KV head are found by (begin of the list) + head * width and (row of the counts) * num_kv_heads + head, so a map that
    adds groups * num_kv_heads to each head for each set reaches the next set's lists. Rows of counts of requests' own
    lists lie between those of two sets: by so many rows the counts that are handed over begin later.

    Attributes:
        shape: (max_groups, num_kv_heads, max_budget) of each set.
        head_maps: per layer, int32 [num_kv_heads] for attention of what it or its anchor layer selected; None: its own
            heads, of the first set.

    Args:
        layer_plan: role of each layer.
        buffers: whose arena begins with the sets' slots, and whose counts have as many copies.
        shape: see above.
        device: of the KV pool.
    """

    def __init__(
        self, layer_plan: LayerPlan, buffers: StepBuffers, shape: tuple[int, int, int], device: torch.device
    ) -> None:
        groups, heads, width = self.shape = shape
        self._buffers = buffers
        listed = groups * heads * width
        # Attention reads slots; positions are read by nobody but a trace, at once.
        positions = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._sets = [
            SelectedLists(
                positions,
                buffers.counts_of(number)[buffers.max_batch :],
                buffers.arena[number * listed :][:listed].view(shape),
            )
            for number in range(buffers.num_sets)
        ]
        own_sets = buffers.num_sets > 1
        number_of = {layer: number if own_sets else 0 for number, layer in enumerate(layer_plan.anchor_layers)}
        self._set_of: list[int] = []
        self.head_maps: list[Tensor | None] = []
        for layer, role in enumerate(layer_plan.layers):
            number = number_of.get(layer if role.anchor_layer is None else role.anchor_layer, 0)
            heads_read = range(heads) if role.anchor_layer is None else role.head_map
            own = role.anchor_layer is None and number == 0
            mapped = [number * groups * heads + head for head in heads_read]
            self.head_maps.append(None if own else torch.tensor(mapped, dtype=torch.int32, device=device))
            self._set_of.append(number)

    @property
    def first(self) -> SelectedLists:
        """The first set."""
        return self._sets[0]

    def of(self, layer: int) -> SelectedLists:
        """That a layer writes, or reads."""
        return self._sets[self._set_of[layer]]

    def counts(self, layer: int) -> Tensor:
        """int32 [num_lists, num_kv_heads], as attention of a layer takes it together with its head map."""
        return self._buffers.counts[self._set_of[layer] * self._buffers.max_batch :]

    def segment(self, number: int, rows: tuple[int, ...], budget: int) -> Segment:
        """Of a group and its selection, in the first set."""
        _, heads, width = self.shape
        first = number * heads * width
        return Segment(rows, budget, list_begin=first, head_stride=width, list_id=self._buffers.max_batch + number)
