"""The lists of slots of one decode step, in device buffers of fixed place: what captured kernels read."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prefix_kernels.grouped_attention import Segment
from prefix_kernels.launching import send
from prefix_kernels.slot_lists import copy_slot_lists
from sglang_ext.attention.slot_tracker import DecodeBatch

_LIST_FIELDS = 5
_SHORT = 4096
_ROUND_SHORT, _ROUND_LONG = 128, 1024
_LEAST_FREE = 64
"""Entries that a new layout leaves free in each list: it serves as many steps of the same requests, at least."""


class PrefixRows(NamedTuple):
    """A prefix and the requests of a batch that sit on its slots; or a stretch of one request's own tokens behind it.

    Attributes:
        key: what makes two of them the same in two steps.
        rows: batch rows, ascending.
        length: tokens.
        begin: position of the first one.
    """

    key: Hashable
    rows: tuple[int, ...]
    length: int
    begin: int = 0


class StepLayout(NamedTuple):
    """Where a batch's lists lie.

    Attributes:
        prefixes: the groups, then the stretches of own tokens that are selected from.
        begins: per group, where its table of slots begins in the arena.
        starts: per row, the first position of its own list; 0 without a prefix, else behind all that `prefixes` has.
        rooms: per row, entries that its list may have.
        private: per row, the segment of its own list.
    """

    prefixes: tuple[PrefixRows, ...]
    begins: tuple[int, ...]
    starts: tuple[int, ...]
    rooms: tuple[int, ...]
    private: tuple[Segment, ...]


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
        self, seq_lens: Sequence[int], prefixes: Sequence[PrefixRows], before: StepLayout | None = None
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
        private_lens = [length - start for length, start in zip(seq_lens, starts, strict=True)]
        if before is not None and (before.prefixes, before.starts) == (tuple(prefixes), tuple(starts)):
            free = [room - length for room, length in zip(before.rooms, private_lens, strict=True)]
            if min(free) >= 0 and min(private_lens) > 0:
                return before
        rooms = [capacity(length) for length in private_lens]
        needed = sum(prefix.length for prefix in prefixes) + sum(rooms)
        if min(private_lens) < 1 or self._reserved + needed > len(self.arena) or len(seq_lens) > self.max_batch:
            return None
        at, begins, private = self._reserved, [], []
        for prefix in prefixes:
            begins.append(at)
            at += prefix.length
        for row, room in enumerate(rooms):
            private.append(Segment((row,), room, list_begin=at, list_id=row))
            at += room
        return StepLayout(tuple(prefixes), tuple(begins), tuple(starts), tuple(rooms), tuple(private))

    def place(self, layout: StepLayout) -> None:
        """Begin a layout: send its tables."""
        fields = (layout.starts, layout.private)
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

    def counts_of(self, number: int) -> Tensor:
        """A copy of the counts: [max_batch + reserved_counts, num_kv_heads], a view."""
        return self._sets[number]

    def _copy(self, batch: DecodeBatch, lists: Tensor, counts: Tensor) -> None:
        copy_slot_lists(*batch.tables, lists, self.arena, counts, implementation=self._implementation)
