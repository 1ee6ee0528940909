"""Groups by shared slots: who joins whom, and what is left when members go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.decode.grouping import SharedPrefixes
from sglang_ext.decode.types import PrefixGroup


def lengths(prefixes: SharedPrefixes, *serials: int) -> dict[tuple[int, ...], int]:
    return {tuple(serials[row] for row in group.rows): group.length for group in prefixes.groups(serials)}


def test_requests_on_one_prefix_make_one_group() -> None:
    prefixes = SharedPrefixes(10)
    prefixes.add(1, 120, {})
    prefixes.add(2, 130, {1: 100})
    prefixes.add(3, 110, {1: 100, 2: 100})
    assert lengths(prefixes, 3, 1, 2) == {(3, 1, 2): 100}
    assert prefixes.groups([2, None, 9, 1]) == [PrefixGroup((1, 0), (0, 3), 100)]
    assert prefixes.groups([2, None]) == []
    prefixes.add(4, 110, {1: 9})
    assert prefixes.groups([1, 4]) == [], "too little in common"


def test_members_that_leave_take_what_they_kept_short_with_them() -> None:
    prefixes = SharedPrefixes(10)
    prefixes.add(1, 110, {})
    prefixes.add(2, 120, {1: 100})
    prefixes.add(3, 130, {1: 90, 2: 90})
    assert lengths(prefixes, 1, 2, 3) == {(1, 2, 3): 90}, "shorter, where that saves more"
    prefixes.remove(3)
    prefixes.remove(3)
    assert lengths(prefixes, 1, 2) == {(1, 2): 100}
    assert (3 in prefixes, len(prefixes)) == (False, 2)
    (before,) = prefixes.groups([1, 2])
    prefixes.remove(2)
    prefixes.add(2, 120, {1: 100})
    (after,) = prefixes.groups([1, 2])
    assert (before.rows, before.length) == (after.rows, after.length)
    assert before.key != after.key, "who comes back has another number"


@pytest.mark.parametrize(("order", "tools"), [("ABABABAB", 40), ("ABBBBAAA", 40), ("AAAABB", 240)])
def test_documents_behind_one_system_prompt_are_grouped_in_any_order(order: str, tools: int) -> None:
    """Tokens of tools for all, then one of two documents: the documents count, not the first that came together."""
    prefixes = SharedPrefixes(10)
    for serial, document in enumerate(order):
        prefixes.add(serial, 410, {other: 400 if order[other] == document else tools for other in range(serial)})
    wanted = {tuple(n for n, one in enumerate(order) if one == document): 400 for document in "AB"}
    assert lengths(prefixes, *range(len(order))) == wanted


def test_rows_on_the_same_slots() -> None:
    prefixes = SharedPrefixes(10)
    prefixes.add(1, 110, {})
    prefixes.add(2, 110, {1: 100})
    prefixes.add(3, 110, {1: 60, 2: 60})
    serials = [2, 3, None, 1, 7]
    assert prefixes.on_same_slots([0, 1, 3, 4], serials, 60) == [[0, 1, 3], [4]]
    assert prefixes.on_same_slots([0, 1, 3, 4], serials, 61) == [[0, 3], [1], [4]]


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=8), st.booleans()), max_size=12))
def test_members_of_a_group_have_its_length_in_common(steps: list[tuple[list[int], bool]]) -> None:
    """Any arrivals and departures, slots being paths in a binary tree: never more than every pair shares."""
    prefixes = SharedPrefixes(1)
    live: dict[int, list[int]] = {}

    def common(a: list[int], b: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    for serial, (path, leaves) in enumerate(steps):
        prefixes.add(serial, len(path), {other: common(path, theirs) for other, theirs in live.items()})
        live[serial] = path
        if leaves:
            gone = min(live)
            prefixes.remove(gone)
            del live[gone]
        serials = list(live)
        seen: set[int] = set()
        for group in prefixes.groups(serials):
            members = [serials[row] for row in group.rows]
            assert seen.isdisjoint(members)
            seen.update(members)
            assert all(group.length <= common(live[a], live[b]) for a in members for b in members)
