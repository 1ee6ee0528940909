"""Which live requests have how many leading slots in common, and the groups that this makes.

Nothing here looks at tokens: two requests share what a comparison of their slots has shown, for as long as both live.
Their slots no longer change then (see "groups" in docs/architecture.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_ids = itertools.count()


@dataclass(eq=False)
class SharedGroup:
    """Requests whose first `length` slots are the same.

    Attributes:
        length: leading slots that all members have in common; of a single member, its own.
        members: own length of each, by serial.
        id: unlike any other group's.
    """

    length: int
    members: dict[int, int]
    id: int = field(default_factory=_ids.__next__)


class BatchGroup(NamedTuple):
    """The members of one group that are in a batch.

    Attributes:
        id: of the group.
        rows: batch rows, ascending, at least two.
        length: leading slots in common.
    """

    id: int
    rows: tuple[int, ...]
    length: int

    @property
    def saved(self) -> int:
        """Tokens that need not be read a second time."""
        return (len(self.rows) - 1) * self.length


class SharedPrefixes:
    """The groups of the live requests. Knows serials and lengths only; owns nothing on a device.

    Args:
        min_length: leading slots that are worth a group.
    """

    def __init__(self, min_length: int) -> None:
        self._min_length = max(1, min_length)
        self._group_of: dict[int, SharedGroup] = {}

    def __contains__(self, serial: int) -> bool:
        return serial in self._group_of

    def add(self, serial: int, own_length: int, common: Mapping[int, int]) -> None:
        """A request whose slots were compared with those of others.

        It joins the group that saves the most reads in all: n members that share L tokens save (n - 1) L of them, and
        n + 1 that share l save n l. So a group may become shorter for it, and a request that shares little of a long
        prefix founds its own.

        Args:
            serial: of the request; not known yet.
            own_length: tokens of it whose slots are settled.
            common: leading slots in common with others, by their serials; unknown ones are passed over.
        """
        found = SharedGroup(own_length, {})
        most, shared = 0, own_length
        for group in {id(g): g for g in self._group_of.values()}.values():
            with_group = max((common.get(member, 0) for member in group.members), default=0)
            length = min(with_group, own_length, group.length)
            n = len(group.members)
            gain = n * length - (n - 1) * group.length
            if length >= self._min_length and gain > most:
                found, most, shared = group, gain, length
        found.length = shared
        found.members[serial] = own_length
        self._group_of[serial] = found

    def remove(self, serial: int) -> None:
        """A request ended or was retracted; nothing happens where it is not known."""
        group = self._group_of.pop(serial, None)
        if group is None:
            return
        del group.members[serial]
        if len(group.members) == 1:
            (group.length,) = group.members.values()

    def group_of(self, serial: int) -> SharedGroup | None:
        """The group of a request; None where it is not known yet."""
        return self._group_of.get(serial)

    def groups(self, serials: Sequence[int | None]) -> list[BatchGroup]:
        """Groups with at least two rows in a batch, by their first row.

        Args:
            serials: per batch row; None for a row that shares nothing.
        """
        rows: dict[int, list[int]] = {}
        found: dict[int, SharedGroup] = {}
        for row, serial in enumerate(serials):
            group = self._group_of.get(serial) if serial is not None else None
            if group is not None:
                found[group.id] = group
                rows.setdefault(group.id, []).append(row)
        return [BatchGroup(i, tuple(rows[i]), found[i].length) for i in rows if len(rows[i]) > 1]

    def __len__(self) -> int:
        return len(self._group_of)
