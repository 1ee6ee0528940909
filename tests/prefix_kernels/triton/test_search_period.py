"""Sparse decode in which a selection serves several steps, as the graphs hold it, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.sparse_server import FIRST, Server, searches, until_search


@pytest.mark.parametrize("kind", FIRST, ids=str)
def test_a_selection_serves_its_steps_until_a_group_changes(kind: Any, device: torch.device) -> None:
    """Each anchor layer's own selection, in a step with other queries; suffix tokens grow in all of them."""
    server = Server(device, 6, *kind, search_period=3)
    first, second = server.prefix(300), server.prefix(210)
    for serial in (1, 2):
        server.join(serial, *first, 5 + serial)
    server.join(3, *second, 9)
    server.join(4, server.slots(77), None, 3)
    # As long as slots may change, and when two requests become a group, every step searches.
    found = searches(server, [1, 2, 3, 4], 7)
    settled = found.index(False) - 1
    assert settled <= 3
    assert found[settled:] == ([True, False, False] * 3)[: 7 - settled]
    until_search(server, [1, 2, 3, 4])
    server.leave(4)
    assert searches(server, [1, 2, 3], 3) == [False, False, True], "who has no index is in no group"
    server.join(6, server.slots(50), None, 3)
    assert searches(server, [1, 2, 3, 6], 3) == [False, False, True], "nor is one that comes"
    assert searches(server, [3, 1, 2], 2) == [True, False], "rows have moved"
    server.join(5, *first, 4)
    assert searches(server, [3, 1, 2, 5], 1) == [True]


@pytest.mark.full
def test_own_tokens_are_searched_when_the_step_searches(device: torch.device) -> None:
    """Also when an index of suffix tokens has grown: the groups are others then."""
    server = Server(device, 5, search_period=8, suffix_dense_tokens=64)
    first = server.prefix(210)
    server.join(1, *first, 300)
    server.join(2, *first, 20)
    searches(server, [1, 2], 4)
    covered = [one.prefix_len for one in server.suffix_reads]
    found, grown = [], 0
    for _ in range(40):
        found += searches(server, [1, 2], 1)
        if [one.prefix_len for one in server.suffix_reads] != covered:
            assert found[-1], "an index has grown"
            covered, grown = [one.prefix_len for one in server.suffix_reads], grown + 1
    assert grown >= 1
    assert 40 > found.count(False) > 20
