"""How the programs of a KV head are shared out among the groups of an anchor layer's selection."""

from __future__ import annotations

from prefix_kernels.anchor_selection.items import ITEM_FIELDS, make_items, share_programs
from prefix_kernels.top_k_selection import SelectionGroup


def test_programs_are_shared_by_length() -> None:
    assert share_programs([100, 100], 4) == [2, 2]
    assert share_programs([100, 900, 10], 10) == [1, 8, 1]
    assert share_programs([5, 6, 7], 2) == [1, 1, 1]
    assert share_programs([], 5) == []


def test_only_the_first_item_of_a_program_is_shared() -> None:
    groups = [
        SelectionGroup(0, 1),
        SelectionGroup(50, 9, num_sink=2, num_recent=3, slot_start=4),
        SelectionGroup(80, 7),
    ]
    items = make_items(groups, 5, 4)
    assert [item[:3] for item in items[:4]] == [[1, 0, 2], [1, 1, 2], [2, 0, 2], [2, 1, 2]]
    assert items[0][3:] == [50, 9, 2, 47, 4]
    assert sorted(item[0] for item in items[4:]) == [0, 3, 4]
    assert all(item[1:4] == [0, 1, 0] for item in items[4:])
    assert {len(item) for item in items} == {ITEM_FIELDS}
    few = make_items(groups, 3, 1)
    assert [item[:3] for item in few] == [[1, 0, 1], [2, 0, 1], [0, 0, 1]], "more groups than programs: none is cut"
