"""Which rows of a decode step select together: those of one index on one set of slots, and each one's own tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_ext.attention.private_index import PrivateIndex
from sglang_ext.attention.sharing import SharedPrefixes
from sglang_ext.attention.step_buffers import PrefixRows
from sglang_ext.prefix.residency import ResidentIndex


class StepGroups:
    """Groups of a batch by index and slots.

    Args:
        prefixes: what live requests share; the caller makes it learn.
        number_of: of an index, a number that no other one has.
    """

    def __init__(self, prefixes: SharedPrefixes, number_of: Callable[[ResidentIndex | PrivateIndex], int]) -> None:
        self._prefixes, self._number_of = prefixes, number_of

    def of(
        self, serials: Sequence[int | None], indexes: Sequence[ResidentIndex | None]
    ) -> list[tuple[PrefixRows, ResidentIndex]]:
        """Rows that have one index and, as was shown, one set of slots of its prefix; in the order of first rows.

        Args:
            serials: per batch row; None for a row that shares nothing.
            indexes: per batch row, that it may use; None: it attends all of its prefix.
        """
        of_index: dict[int, list[int]] = {}
        found: dict[int, ResidentIndex] = {}
        for row, (serial, index) in enumerate(zip(serials, indexes, strict=True)):
            if index is None or serial is None:
                continue
            number = self._number_of(index)
            of_index.setdefault(number, []).append(row)
            found[number] = index
        groups = []
        for number, rows in of_index.items():
            length = found[number].prefix_len
            for same in self._prefixes.on_same_slots(rows, serials, length):
                key = (number, *((serials[row], self._settled(serials[row])) for row in same))
                groups.append((PrefixRows(key, tuple(same), length), found[number]))
        return sorted(groups, key=lambda group: group[0].rows)

    def stretches(
        self, groups: Sequence[tuple[PrefixRows, ResidentIndex]], private: Sequence[PrivateIndex | None]
    ) -> list[tuple[PrefixRows, PrivateIndex]]:
        """Own tokens of rows whose prefix is in a group, in the order of rows.

        Args:
            groups: from `of`.
            private: per batch row, the index of its own tokens; fewer rows or None: these are attended in full.
        """
        found = []
        begins = {row: rows.length for rows, _ in groups for row in rows.rows}
        for row, own in enumerate(private):
            if own is not None and row in begins:
                found.append((PrefixRows((self._number_of(own),), (row,), own.prefix_len, begins[row]), own))
        return found

    def settled(self, serials: Sequence[int | None], groups: Sequence[tuple[PrefixRows, ResidentIndex]]) -> bool:
        """Whether the groups' slots stay as they are: something is known of all of their requests."""
        return all(self._settled(serials[row]) is not None for rows, _ in groups for row in rows.rows)

    def _settled(self, serial: int | None) -> int | None:
        return None if serial is None else self._prefixes.number_of(serial)
