"""How the programs of a KV head are shared out among the groups of an anchor layer's selection; configurations."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch

from prefix_kernels.anchor_selection import AnchorConfig, AnchorSelection, default_config
from prefix_kernels.anchor_selection.programs import ITEM_FIELDS, make_items, share_programs
from prefix_kernels.pooled_scores import ScoreShape
from prefix_kernels.types import CandidateForm, SelectionGroup


def test_programs_are_shared_by_length() -> None:
    assert share_programs([100, 100], 4, 4) == [2, 2]
    assert share_programs([100, 900, 10], 10, 10) == [1, 8, 1]
    assert share_programs([100, 900, 10], 20, 10) == [9, 10, 1], "no group has two items on one program"
    assert share_programs([5, 6, 7], 2, 2) == [1, 1, 1]
    assert share_programs([], 5, 5) == []
    assert share_programs([9, 9], 4, 1) == [1, 1]


@pytest.mark.parametrize(
    ("groups", "most"), [(1, 1.0), (8, 1.0), (16, 1.0), (17, 1.0), (20, 1.1), (31, 1.1), (33, 1.0), (40, 1.0)]
)
def test_one_group_more_costs_little_more(groups: int, most: float) -> None:
    """Of 16K each on 32 programs: what the busiest one has, by what it would have if all had the same."""
    items = make_items([SelectionGroup(16384, 2048)] * groups, 32).tolist()
    busy = [0.0] * 32
    for number, item in enumerate(items):
        busy[number % 32] += 16384 / item[2]
    assert max(busy) <= most * groups * 16384 / 32
    for number, item in enumerate(items):
        programs = [(number - item[1] + chunk) % 32 for chunk in range(item[2])]
        assert len(set(programs)) == item[2], "programs that wait for each other are different ones"


def test_items_of_a_group_follow_each_other() -> None:
    groups = [
        SelectionGroup(0, 1),
        SelectionGroup(50, 9, num_sink=2, num_recent=3, slot_start=4, list_begin=8, head_stride=12),
        SelectionGroup(80, 7),
    ]
    items = make_items(groups, 4).tolist()
    assert [item[:3] for item in items[:4]] == [[1, 0, 2], [1, 1, 2], [2, 0, 2], [2, 1, 2]]
    assert items[0][3:] == [50, 9, 2, 47, 4, 8, 12, 5], "the last field is the number of items"
    assert [item[:4] for item in items[4:]] == [[0, 0, 1, 0]]
    assert {len(item) for item in items} == {ITEM_FIELDS}
    few = make_items(groups, 1)
    assert few[:, :3].tolist() == [[1, 0, 1], [2, 0, 1], [0, 0, 1]], "more groups than programs: none is cut"
    every = [replace(group, list_begin=group.list_begin + 100 * n) for n in range(3) for group in groups]
    for programs in (1, 4, 9, 32):
        assert make_items(groups, programs, 3, 100).tolist() == make_items(every, programs).tolist()
    assert make_items([], 4).shape == (0, ITEM_FIELDS)


@pytest.mark.parametrize("seed", range(4))
def test_no_program_waits_for_a_later_item_whatever_the_lengths(seed: int) -> None:
    """All items of a group are there, one behind the other, and on different programs; tables have room for all."""
    rng = random.Random(seed)
    for _ in range(100):
        programs, count = rng.randint(1, 40), rng.randint(1, 120)
        lengths = [rng.choice([16384] * 5 + [0, 16, rng.randint(1, 200_000)]) for _ in range(count)]
        items = make_items([SelectionGroup(length, 64) for length in lengths], programs).tolist()
        assert len(items) <= 2 * programs + count
        found: dict[int, list[tuple[int, int]]] = {}
        for number, (group, chunk, share, *_) in enumerate(items):
            found.setdefault(group, []).append((number - chunk, share))
        assert sorted(found) == list(range(count))
        for of_group in found.values():
            assert len(set(of_group)) == 1
            assert of_group[0][1] == len(of_group) <= programs


def test_many_layers_of_many_groups_are_cut_at_once() -> None:
    """A batch that changes has its items cut anew, between two steps. Group by group and layer by layer, 31 layers take
    31 times as long as one.
    """
    groups = [SelectionGroup(4096, 512)] * 64

    def least(layers: int) -> float:
        times = []
        for _ in range(9):
            begun = time.process_time()
            make_items(groups, 33, layers, 1000)
            times.append(time.process_time() - begun)
        return min(times)

    assert least(31) < 12 * least(1)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        (ScoreShape(16, 1, 256), True),
        (ScoreShape(16, 1, 576), False),
        (ScoreShape(16, 1, 576, form=CandidateForm.LISTED), False),
        (ScoreShape(16, 1, 576, form=CandidateForm.MINMAX), True),
        (ScoreShape(16, 1, 576, 16, form=CandidateForm.MINMAX), False),
    ],
)
def test_rows_of_an_index_that_shared_memory_has_no_room_for_are_refused(
    shape: ScoreShape, fits: bool, capability: tuple[int, int]
) -> None:
    """As all channels of an MLA model's keys are, unless they are blocks'."""
    for rows in (1, 8, 128):
        if fits:
            default_config(shape, rows, capability)
            continue
        with pytest.raises(ValueError, match=f"got {shape.channels} channels of {shape.bits} bits; lower"):
            default_config(shape, rows, capability)


def test_configs() -> None:
    config = AnchorConfig(8, 256, 4, 3, 2, specialized=True)
    with pytest.raises(ValueError, match=r"at most 16384 codes .* got 256 candidates of 96 channels; take a lower"):
        AnchorSelection(ScoreShape(32, 8, 96), 1, 1, 4096, 600, config, torch.device("cpu"))
    tokens, bytes_ = ScoreShape(32, 8, 96), ScoreShape(32, 8, 96, bits=8)
    assert default_config(tokens, 1) == AnchorConfig(8, 128, 4, 3, 2)
    assert default_config(tokens, 32) == AnchorConfig(128, 128, 8, 3, 1, True)
    assert default_config(tokens, 9) == AnchorConfig(64, 128, 4, 3, 2, True)
    assert default_config(tokens, 32, (8, 0)) == AnchorConfig(32, 64, 4, 3, 2)
    served = replace(tokens, channels=64)
    assert default_config(served, 1, specialized=True) == AnchorConfig(8, 256, 4, 3, 2, specialized=True)
    assert default_config(tokens, 32, specialized=True) == AnchorConfig(128, 64, 4, 3, 2, specialized=True)
    assert default_config(bytes_, 9, specialized=True) == default_config(bytes_, 9)
    assert default_config(tokens, 32, (8, 0), specialized=True) == default_config(tokens, 32, (8, 0))
    assert [AnchorConfig(programs_per_sm=n).max_registers for n in (1, 2, 3)] == [255, 255, 168]
    for wrong, message in (
        ({"block_n": 96}, "block_n as a power of 2 of at least 64, got 96"),
        ({"programs_per_sm": 0}, "programs_per_sm from 1"),
        ({"programs_per_sm": 9}, "leaves a thread 64 registers, got 9 of 4 warps"),
        ({"num_warps": 8, "specialized": True}, "expected 4 warps"),
        ({"block_m": 256, "specialized": True}, "expected 4 warps and at most 128 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            AnchorConfig(**wrong)
