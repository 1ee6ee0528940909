"""Which live requests have how many leading slots in common, and the groups that this makes.

Nothing here looks at tokens: two requests share what a comparison of their slots has shown, for as long as both live.
Their slots no longer change then (see "groups" in docs/architecture.md). What two requests share with a third one, they
share with each other: so lengths in common are those of a tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(eq=False)
class _Known:
    number: int
    length: int
    common: dict[int, int] = field(default_factory=dict)


class BatchGroup(NamedTuple):
    """Requests of a batch that are attended together.

    Attributes:
        key: numbers of the members, see `SharedPrefixes.number_of`: the same members on the same slots.
        rows: batch rows, ascending, at least two.
        length: leading slots in common.
    """

    key: tuple[int, ...]
    rows: tuple[int, ...]
    length: int

    @property
    def saved(self) -> int:
        """Tokens that need not be read a second time."""
        return (len(self.rows) - 1) * self.length


class SharedPrefixes:
    """What the live requests share, pair by pair. Knows serials and lengths only; owns nothing on a device.

    Args:
        min_length: leading slots that are worth a group.
    """

    def __init__(self, min_length: int) -> None:
        self._min_length = max(1, min_length)
        self._known: dict[int, _Known] = {}
        self._numbers = itertools.count()
        self._last: tuple[tuple[int | None, ...], list[BatchGroup]] | None = None

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

    def groups(self, serials: Sequence[int | None]) -> list[BatchGroup]:
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
        return 0 if known is None or other is None else known.common.get(other, 0)

    def _best(self, rows: list[int], serials: Sequence[int | None]) -> tuple[int, list[BatchGroup]]:
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
        return together, [BatchGroup(numbers, tuple(rows), length)]
