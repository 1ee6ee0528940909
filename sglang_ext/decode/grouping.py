"""Which requests of a batch are attended together: by what comparing their slots has shown, never by their tokens.

Their slots no longer change while two requests that share some live (see "groups" in docs/architecture.md). What two
requests share with a third one, they share with each other: so lengths in common are those of a tree.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from prefix_kernels.slot_lists import common_slots
from sglang_ext.decode.types import DecodeBatch, HostPrefix, Index, PrefixGroup
from sglang_ext.prefix.residency import ResidentIndex
from sglang_ext.prefix.suffix_index import SuffixIndex

_T = TypeVar("_T")

_LOCKSTEP = 2
"""Steps after which a result is taken in lockstep. With the overlap schedule the host prepares a step when the one
before the last has run, so the result is there: the wait for it is none."""


@dataclass(eq=False)
class _Known:
    number: int
    length: int
    common: dict[int, int] = field(default_factory=dict)


class SharedPrefixes:
    """What the live requests share, pair by pair. Knows serials and lengths only; owns nothing on a device.

    Args:
        min_length: leading slots that are worth a group.
    """

    def __init__(self, min_length: int) -> None:
        self._min_length = max(1, min_length)
        self._known: dict[int, _Known] = {}
        self._numbers = itertools.count()
        self._last: tuple[tuple[int | None, ...], list[PrefixGroup]] | None = None

    def __contains__(self, serial: int) -> bool:
        return serial in self._known

    def __len__(self) -> int:
        return len(self._known)

    def add(self, serial: int, own_length: int, common: Mapping[int, int]) -> None:
        """A request whose slots were compared with those of others.

        Args:
            serial: of the request; not known yet.
            own_length: tokens of it whose slots are settled.
            common: leading slots in common with others, by their serials; unknown ones are passed over.
        """
        self._last = None
        mine = _Known(next(self._numbers), own_length)
        for other, length in common.items():
            theirs = self._known.get(other)
            if theirs is not None:
                theirs.common[serial] = mine.common[other] = min(length, own_length)
        self._known[serial] = mine

    def remove(self, serial: int) -> None:
        """A request ended or was retracted; nothing happens where it is not known."""
        self._last = None
        known = self._known.pop(serial, None)
        for other in known.common if known is not None else ():
            if other in self._known:
                del self._known[other].common[serial]

    def number_of(self, serial: int) -> int | None:
        """A number that no other request on no other slots has had; None where nothing is known of it yet."""
        known = self._known.get(serial)
        return None if known is None else known.number

    def groups(self, serials: Sequence[int | None]) -> list[PrefixGroup]:
        """The groups of a batch that save the most reads: n requests that share L tokens save (n - 1) L of them.

        Args:
            serials: per batch row; None for a row that shares nothing.
        """
        batch = tuple(serials)
        if self._last is None or self._last[0] != batch:
            rows = [row for row, serial in enumerate(batch) if serial is not None and serial in self._known]
            _, found = self._best(rows, batch)
            self._last = batch, sorted(found, key=lambda group: group.rows)
        return list(self._last[1])

    def on_same_slots(self, rows: Sequence[int], serials: Sequence[int | None], length: int) -> list[list[int]]:
        """These rows, put together where they share at least so many slots; rows of which nothing is known, apart."""
        left, found = list(rows), []
        while left:
            first, *rest = left
            same = [row for row in rest if self._common(serials[first], serials[row]) >= length]
            found.append([first, *same])
            left = [row for row in rest if row not in same]
        return found

    def _common(self, one: int | None, other: int | None) -> int:
        known = self._known.get(one) if one is not None else None
        if known is not None and one == other:  # a request and its drafts
            return known.length
        return 0 if known is None or other is None else known.common.get(other, 0)

    def _best(self, rows: list[int], serials: Sequence[int | None]) -> tuple[int, list[PrefixGroup]]:
        """All of these rows as one group, or the best of two parts: those nearest to the first one, and the rest."""
        if len(rows) < 2:
            return 0, []
        first, *rest = rows
        common = {row: self._common(serials[first], serials[row]) for row in rest}
        length = min(common.values())
        near = [first, *(row for row in rest if common[row] > length)]
        far = [row for row in rest if common[row] == length]
        parts = [self._best(part, serials) for part in (near, far)]
        saved, found = sum(part[0] for part in parts), [group for part in parts for group in part[1]]
        together = (len(rows) - 1) * length
        if length < self._min_length or together <= saved:
            return saved, found
        numbers = tuple(self._known[serial].number for row in rows if (serial := serials[row]) is not None)
        return together, [PrefixGroup(numbers, tuple(rows), length)]


@dataclass(eq=False)
class _Comparison:
    serial: int
    length: int
    others: Sequence[int | None]
    lengths: Tensor
    done: Any
    begun: int


class SlotTracker:
    """Compares each request once with the others of its batch, and keeps the groups that this makes.

    In its first step a request may still stand on slots of its own that the prefix cache is about to replace, so it is
    compared in the second one; what it shares is known a step or two later, when the device has answered.

    Args:
        max_batch: requests of a batch, at most.
        min_length: leading slots that are worth a group.
        device: where SGLang's table lies.
        lockstep: take each result so many steps after its start, not when this device has it: with tensor parallelism
            all ranks must know of it in the same step.
    """

    def __init__(self, max_batch: int, min_length: int, device: torch.device, *, lockstep: bool = False) -> None:
        self.max_batch = max_batch
        self.prefixes = SharedPrefixes(min_length)
        self._lockstep = lockstep
        self._step = 0
        self._out = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._pending: list[_Comparison] = []  # in the order of their starts
        self._steps: dict[int, int] = {}

    def learn(self, batch: DecodeBatch) -> None:
        """One step of a batch of at most `max_batch` requests. Never waits for the device."""
        self._step += 1
        while self._pending and self._is_back(self._pending[0]):
            one = self._pending.pop(0)
            pairs = zip(one.others, one.lengths.tolist(), strict=True)
            common = {other: n for other, n in pairs if other is not None and other != one.serial}
            if one.serial in self._steps and one.serial not in self.prefixes:
                self.prefixes.add(one.serial, one.length, common)
        settled = [serial if serial is not None and serial in self._steps else None for serial in batch.serials]
        for row, serial in enumerate(batch.serials):
            if serial is None:
                continue
            steps = self._steps.get(serial, 0)
            self._steps[serial] = steps + 1
            if steps == 1:
                self._compare(serial, row, settled, batch)

    def _compare(self, serial: int, row: int, others: Sequence[int | None], batch: DecodeBatch) -> None:
        """Compare a batch row with all others, on the current stream."""
        out = self._out[: len(others)]
        common_slots(*batch.tables, row, out)
        done = None
        if out.device.type == "cuda":
            lengths = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
            lengths.copy_(out, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        else:
            lengths = out.clone()
        self._pending.append(_Comparison(serial, batch.seq_lens[row], others, lengths, done, self._step))

    def _is_back(self, one: _Comparison) -> bool:
        if not self._lockstep:
            return one.done is None or bool(one.done.query())
        if self._step - one.begun < _LOCKSTEP:
            return False
        if one.done is not None:
            one.done.synchronize()
        return True

    def warm(self, batch: DecodeBatch) -> None:
        """Compare the first row with all, to no purpose but that the kernel is compiled."""
        self._compare(-1, 0, [None] * len(batch.serials), batch)
        self._pending.pop()

    def ended(self, serial: int) -> None:
        """A request gave its slots back: finished, aborted or retracted."""
        self._steps.pop(serial, None)
        self._pending = [one for one in self._pending if one.serial != serial]
        self.prefixes.remove(serial)

    def __len__(self) -> int:
        return len(self._steps)


class StepGroups:
    """Groups of a batch by index and slots.

    Args:
        prefixes: what live requests share; the caller makes it learn.
        number_of: of an index, a number that no other one has.
    """

    def __init__(self, prefixes: SharedPrefixes, number_of: Callable[[Index], int]) -> None:
        self._prefixes, self._number_of = prefixes, number_of

    def of(
        self,
        serials: Sequence[int | None],
        indexes: Sequence[ResidentIndex | None],
        hosts: Sequence[HostPrefix | None] = (),
    ) -> list[tuple[PrefixGroup, ResidentIndex]]:
        """Rows that have one index and, as was shown, one set of slots of its prefix, or one prefix in host memory; in
        the order of first rows.

        Args:
            serials: per batch row; None for a row that shares nothing.
            indexes: per batch row, that it may use; None: it attends all of its prefix.
            hosts: as of `DecodeBatch`.
        """
        of_index: dict[tuple[int, HostPrefix | None], list[int]] = {}
        found: dict[int, ResidentIndex] = {}
        for row, (serial, index) in enumerate(zip(serials, indexes, strict=True)):
            if index is None or serial is None:
                continue
            number = self._number_of(index)
            of_index.setdefault((number, hosts[row] if hosts else None), []).append(row)
            found[number] = index
        groups = []
        for (number, host), rows in of_index.items():
            length = found[number].prefix_len
            # Of prefixes in host memory no slot says which one it is.
            apart = self._prefixes.on_same_slots(rows, serials, length) if host is None else [rows]
            for same in apart:
                key = (number, *((serials[row], self._settled(serials[row])) for row in same))
                groups.append((PrefixGroup(key, tuple(same), length, host=host), found[number]))
        return sorted(groups, key=lambda group: group[0].rows)

    def suffixes(
        self, groups: Sequence[tuple[PrefixGroup, ResidentIndex]], suffix: Sequence[SuffixIndex | None]
    ) -> list[tuple[PrefixGroup, SuffixIndex]]:
        """Suffixes of rows whose prefix is in a group, in the order of rows.

        Args:
            groups: from `of`.
            suffix: per batch row, the index of its suffix tokens; fewer rows or None: these are attended in full.
        """
        found = []
        begins = {row: rows.length for rows, _ in groups for row in rows.rows}
        for row, own in enumerate(suffix):
            if own is not None and row in begins:
                found.append((PrefixGroup((self._number_of(own),), (row,), own.prefix_len, begins[row]), own))
        return found

    def settled(self, serials: Sequence[int | None], groups: Sequence[tuple[PrefixGroup, ResidentIndex]]) -> bool:
        """Whether the groups' slots stay as they are: something is known of all of their requests."""
        return all(self._settled(serials[row]) is not None for rows, _ in groups for row in rows.rows)

    def _settled(self, serial: int | None) -> int | None:
        return None if serial is None else self._prefixes.number_of(serial)


def first_that_fit(
    wanted: Sequence[_T], sizes: Mapping[_T, tuple[int, ...]], fits: Callable[[Sequence[_T]], bool]
) -> set[_T]:
    """Those that fit beside all that were taken before them, in few tries: each looks at all that are taken.

    Args:
        wanted: in the order in which they are taken.
        sizes: where one does not fit, none does all of whose sizes are as large.
        fits: whether some fit together; where they do, fewer of them do, too.
    """
    taken, rest = list[_T](), list(wanted)
    while rest:
        # Twice as many each time, until they do not fit.
        least, most = 0, 1
        while least < len(rest) and fits([*taken, *rest[:most]]):
            least, most = most, min(len(rest), 2 * most)
        count = least + bisect_right(range(least + 1, most), False, key=lambda n: not fits([*taken, *rest[:n]]))
        taken += rest[:count]
        refused = [sizes[one] for one in rest[count : count + 1]]
        rest = [
            one
            for one in rest[count + 1 :]
            if any(size < large for of in refused for size, large in zip(sizes[one], of, strict=True))
        ]
        least_sizes = tuple(map(min, zip(*(sizes[one] for one in rest), strict=True)))
        smallest = next((one for one in rest if sizes[one] == least_sizes), None)
        if smallest is not None and not fits([*taken, smallest]):
            break
    return set(taken)
