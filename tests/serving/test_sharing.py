"""Groups by shared slots: who joins whom, and what is left when members go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.attention.sharing import BatchGroup, SharedPrefixes


def lengths(prefixes: SharedPrefixes, *serials: int) -> dict[tuple[int, ...], int]:
    return {tuple(serials[row] for row in group.rows): group.length for group in prefixes.groups(serials)}


def test_requests_on_one_prefix_make_one_group() -> None:
    prefixes = SharedPrefixes(10)
    prefixes.add(1, 120, {})
    prefixes.add(2, 130, {1: 100})
    prefixes.add(3, 110, {1: 100, 2: 100})
    assert lengths(prefixes, 3, 1, 2) == {(3, 1, 2): 100}
    assert prefixes.groups([2, None, 9, 1]) == [BatchGroup(prefixes.groups([1, 2])[0].id, (0, 3), 100)]
    assert prefixes.groups([2, None]) == []


def test_a_branch_that_shares_little_founds_its_own_group() -> None:
    """Four on 100 tokens and one that shares 60 of them: to shorten the group would cost more than it saves."""
    prefixes = SharedPrefixes(10)
    for serial in range(4):
        prefixes.add(serial, 110, dict.fromkeys(range(serial), 100))
    prefixes.add(4, 110, dict.fromkeys(range(4), 60))
    prefixes.add(5, 110, {**dict.fromkeys(range(4), 60), 4: 100})
    assert lengths(prefixes, *range(6)) == {(0, 1, 2, 3): 100, (4, 5): 100}


def test_a_group_becomes_shorter_where_that_saves_more() -> None:
    prefixes = SharedPrefixes(10)
    prefixes.add(1, 110, {})
    prefixes.add(2, 110, {1: 100})
    prefixes.add(3, 110, {1: 90, 2: 90})
    assert lengths(prefixes, 1, 2, 3) == {(1, 2, 3): 90}


def test_too_little_in_common_is_no_group() -> None:
    prefixes = SharedPrefixes(10)
    prefixes.add(1, 110, {})
    prefixes.add(2, 110, {1: 9})
    assert prefixes.groups([1, 2]) == []


def test_who_is_left_alone_shares_all_of_its_own_again() -> None:
    prefixes = SharedPrefixes(10)
    prefixes.add(1, 110, {})
    prefixes.add(2, 120, {1: 50})
    prefixes.remove(1)
    prefixes.remove(1)
    prefixes.add(3, 130, {2: 100})
    assert lengths(prefixes, 2, 3) == {(2, 3): 100}
    prefixes.remove(2)
    prefixes.remove(3)
    assert len(prefixes) == 0
    assert 3 not in prefixes


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
            assert not seen & set(members)
            seen |= set(members)
            for a in members:
                for b in members:
                    assert group.length <= common(live[a], live[b])
