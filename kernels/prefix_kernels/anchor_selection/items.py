"""Which program selects what: the groups of a batch, shared out on the host among the programs of a KV head."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from prefix_kernels.top_k_selection.plan import SelectionGroup

ITEM_FIELDS = 8
"""int64 fields of an item: group, chunk, the group's number of chunks, prefix_len, tokens that are selected, num_sink,
recent_begin, slot_start. Group -1: nothing to do."""


def share_programs(lengths: Sequence[int], num_programs: int) -> list[int]:
    """Programs of each group, so that the longest stretch is as short as can be.

    Args:
        lengths: tokens of each group.
        num_programs: of a KV head.

    Returns:
        One for each group, or more where there are fewer groups than programs; then `num_programs` together.
    """
    shares = [1] * len(lengths)
    longest: list[tuple[float, int]] = [(-length, group) for group, length in enumerate(lengths)]
    heapq.heapify(longest)
    for _ in range(num_programs - len(lengths) if lengths else 0):
        _, group = heapq.heappop(longest)
        shares[group] += 1
        heapq.heappush(longest, (-lengths[group] / shares[group], group))
    return shares


def make_items(groups: Sequence[SelectionGroup], max_groups: int, num_programs: int) -> list[list[int]]:
    """Items in the order of programs: program p has items p, p + num_programs, and so on.

    Items of a group follow each other. A group that is cut has its items among the first `num_programs`, one to a
    program, so programs that wait for each other have nothing before that others wait for. A group without tokens, and
    one that the plan does not name, has an item behind: it writes a count of 0 and the padding.
    """
    some = [g for g, group in enumerate(groups) if group.prefix_len]
    shares = dict(zip(some, share_programs([groups[g].prefix_len for g in some], num_programs), strict=True))
    items: list[list[int]] = []
    for g in some + [g for g in range(max_groups) if g not in shares]:
        group = groups[g] if g < len(groups) else SelectionGroup(0, 1)
        share = shares.get(g, 1)
        rest = [share, group.prefix_len, group.count, group.num_sink, group.prefix_len - group.num_recent]
        items += [[g, chunk, *rest, group.slot_start] for chunk in range(share)]
    return items
