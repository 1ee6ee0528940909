"""Top-k selection among listed candidates: places in the list, chosen as tokens are, then named by their positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from prefix_kernels.top_k_selection.plan import SelectionGroup
from prefix_kernels.top_k_selection.runner import TopKConfig, TopKSelection
from tests.prefix_kernels.triton.conftest import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HEADS, WIDTH, POISON = 2, 600, 1_000_007
GROUPS = [
    SelectionGroup(3000, 77, 0, WIDTH, 1, 4, 20, slot_start=9, num_candidates=599),
    SelectionGroup(40, 90, 2 * WIDTH, WIDTH, (1, 1), 4, 20, slot_start=3100, num_candidates=40),
    SelectionGroup(2000, 300, 4 * WIDTH, WIDTH, 1, 0, 33, slot_start=3200, num_candidates=300),
    SelectionGroup(0, 1, num_candidates=0),
]
"""Few of many, a prefix below the budget, all candidates, an empty prefix; the fifth place is no group's."""


def runner_of(**options: Any) -> TopKSelection:
    return TopKSelection(5, HEADS, WIDTH, 320, DEVICE, config=TopKConfig(64, 1), num_programs=14, **options)


def listed(groups: list[SelectionGroup], width: int = WIDTH) -> torch.Tensor:
    """int32 [5, HEADS, width]: other ascending positions for every KV head, windows at the ends."""
    gen = torch.Generator().manual_seed(len(groups))
    table = torch.full((5, HEADS, width), POISON, dtype=torch.int32)
    for g, group in enumerate(groups):
        for head in range(HEADS):
            rank = torch.rand(group.prefix_len, generator=gen)
            rank[: group.num_sink], rank[group.prefix_len - group.num_recent :] = 2.0, 2.0
            chosen = rank.topk(group.num_scored).indices.sort().values
            table[g, head, : group.num_scored] = chosen.int()
    return table.to(DEVICE)


@pytest.mark.parametrize("key_bits", [16, 32])
@pytest.mark.parametrize("strided", [False, True])
def test_places_in_a_list_become_its_positions_and_their_slots(key_bits: int, strided: bool) -> None:
    runner = runner_of(key_bits=key_bits)
    scores = -torch.rand(6 * WIDTH, generator=torch.Generator().manual_seed(1)).mul(30.0).round().to(DEVICE)
    candidates = listed(GROUPS, 2 * WIDTH)[..., :WIDTH] if strided else listed(GROUPS)
    table = torch.randperm(6000, generator=torch.Generator().manual_seed(2)).int().to(DEVICE)
    places, lists = runner.new_lists(), runner.new_lists(with_slots=True)
    runner.plan([replace(group, prefix_len=group.num_scored, num_candidates=None) for group in GROUPS])
    runner.run(scores, places)
    runner.plan(GROUPS)
    runner.run(scores, lists, candidates=candidates, slot_table=table)
    assert lists.slots is not None
    assert torch.equal(lists.counts, places.counts)
    assert lists.counts[:, 0].tolist() == [77, 40, 300, 0, 0]
    for g, group in enumerate(GROUPS):
        wanted = candidates[g].gather(1, places.positions[g, :, : group.count].long())
        assert torch.equal(lists.positions[g, :, : group.count], wanted)
        assert torch.equal(lists.slots[g, :, : group.count], table[group.slot_start + wanted.long()])
        windows = [*range(group.num_sink), *range(group.prefix_len - group.num_recent, group.prefix_len)]
        assert set(windows) & set(range(group.prefix_len)) <= set(wanted[0].tolist())
        assert bool((lists.positions[g, :, group.count :] == -1).all())
    assert bool((lists.slots[3:] == -1).all())


def test_the_best_of_a_list_by_score() -> None:
    """Written otherwise: a score for every position of the prefix, -inf for what is not listed."""
    group = SelectionGroup(5000, 100, 0, WIDTH, 1, 5, 11, num_candidates=500)
    candidates = listed([group])
    scores = torch.randn(HEADS * WIDTH, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    runner = runner_of()
    runner.plan([group])
    lists = runner.new_lists()
    runner.run(scores, lists, candidates=candidates)
    for head in range(HEADS):
        everywhere = torch.full((5000,), -torch.inf, device=DEVICE)
        everywhere[candidates[0, head, :500].long()] = scores[head * WIDTH :][:500]
        everywhere[:5], everywhere[-11:] = torch.inf, torch.inf
        assert torch.equal(lists.positions[0, head, :100].long(), everywhere.topk(100).indices.sort().values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_candidates": 6}, "expected num_candidates from 7 .the windows. to 100 .the prefix. .*, got 6 and 1"),
        ({"num_candidates": 101}, "got 101 and 1"),
        ({"num_candidates": 50, "block_size": 2}, "got 50 and 2"),
        ({"num_candidates": 50, "block_size": (1, 16)}, "got 50 and .1, 16."),
    ],
)
def test_lists_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelectionGroup(100, 20, num_sink=3, num_recent=4, **arguments)


def test_candidates_belong_to_a_plan_that_names_them() -> None:
    runner, scores, candidates = runner_of(), torch.zeros(6 * WIDTH, device=DEVICE), listed(GROUPS)
    lists = runner.new_lists()
    runner.run(scores, lists, candidates=candidates)  # no plan yet, as before a capture
    runner.run(scores, lists)
    with pytest.raises(ValueError, match=r"expected num_candidates of all groups or of none, got .599, None."):
        runner.plan([GROUPS[0], SelectionGroup(40, 9)])
    runner.plan(GROUPS)
    with pytest.raises(ValueError, match="expected candidates and groups with num_candidates both or none"):
        runner.run(scores, lists)
    for wrong in (candidates[:4], candidates.long(), candidates[..., :598], candidates[0], candidates[..., ::2]):
        with pytest.raises(ValueError, match=r"expected candidates .5, 2, 599. or longer, int32 with adjacent"):
            runner.run(scores, lists, candidates=wrong)
    wide = TopKSelection(5, HEADS, WIDTH, WIDTH, DEVICE, num_programs=14)
    wide.plan(GROUPS)
    own = wide.new_lists()
    with pytest.raises(ValueError, match="expected candidates apart from the lists that are written"):
        wide.run(scores, own, candidates=own.positions)
    runner.plan([SelectionGroup(40, 9, 0, WIDTH)])
    with pytest.raises(ValueError, match="both or none of them, got one; plan for what is handed in"):
        runner.run(scores, lists, candidates=candidates)
