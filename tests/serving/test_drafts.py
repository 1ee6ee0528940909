"""How many tokens are drafted behind a prefix: by what exact steps kept of earlier drafts."""

from __future__ import annotations

import pytest

from sglang_ext.decode.drafts import AGAIN, DraftLengths
from sglang_ext.decode.grouping import SharedPrefixes

ROUNDS = 400


def after(lengths: DraftLengths, accepted: int, drafted: int = 4) -> DraftLengths:
    for _ in range(ROUNDS):
        lengths.verified("one", drafted, accepted)
    return lengths


@pytest.mark.parametrize(
    ("accepted", "share", "wanted"), [(4, 1.0, 8), (3, 3 / 4, 2), (2, 2 / 3, 1), (1, 1 / 2, 1), (0, 0.0, 0)]
)
def test_the_last_draft_is_likelier_kept_than_dropped(accepted: int, share: float, wanted: int) -> None:
    lengths = DraftLengths(8)
    assert (lengths.wanted("one"), lengths.acceptance("one")) == (8, 1.0)
    after(lengths, accepted)
    assert lengths.acceptance("one") == pytest.approx(share, abs=0.01)
    assert lengths.wanted("one") == wanted
    assert lengths.wanted("another") == 8


def test_an_index_that_drafts_badly_is_tried_again_and_trusted_when_it_drafts_well() -> None:
    lengths = after(DraftLengths(4), 0)
    tried = [lengths.wanted("one") for _ in range(3 * AGAIN)]
    assert sum(tried) == 3
    assert max(tried) == 1
    after(lengths, 1, drafted=1)
    assert lengths.wanted("one") == 4


def test_a_round_without_drafts_says_nothing() -> None:
    lengths = DraftLengths(4)
    lengths.verified("one", 0, 0)
    assert lengths.acceptance("one") == 1.0


def test_a_request_and_its_drafts_share_its_own_slots() -> None:
    """Rows of one request are a group of as many tokens as its slots were compared of, and part of others' groups."""
    prefixes = SharedPrefixes(16)
    prefixes.add(1, 200, {})
    assert [(group.rows, group.length) for group in prefixes.groups([1, 1, None, 1])] == [((0, 1, 3), 200)]
    prefixes.add(2, 180, {1: 160})
    assert [(group.rows, group.length) for group in prefixes.groups([1, 1, 2])] == [((0, 1, 2), 160)]
    assert [(group.rows, group.length) for group in prefixes.groups([2, 1])] == [((0, 1), 160)]
    short = SharedPrefixes(16)
    short.add(1, 200, {})
    short.add(2, 180, {1: 32})
    assert [(group.rows, group.length) for group in short.groups([1, 1, 2, 2])] == [((0, 1), 200), ((2, 3), 180)]
