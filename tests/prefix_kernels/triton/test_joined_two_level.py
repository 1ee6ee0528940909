"""Two levels as two selections that score and choose at once: against the references, by score."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from prefix_kernels.anchor_selection import AnchorConfig, AnchorSelection, Form
from prefix_kernels.pooled_scores import ScoreShape, Source
from prefix_kernels.pooling import Pooling
from prefix_kernels.two_level_selection import JoinedTwoLevelSelection
from prefix_kernels.types import SelectedLists
from tests.prefix_kernels.triton.conftest import INTERPRETED
from tests.prefix_kernels.triton.test_two_level_selection import (
    BATCH,
    DEVICE,
    DIM,
    GQA,
    HEADS,
    KEPT,
    LAYERS,
    MAX_BUDGET,
    MAX_CANDIDATES,
    MAX_GROUPS,
    MAX_PREFIX,
    SM_SCALE,
    TABLE,
    check,
    check_replays,
    groups_of,
    randn,
)

FORMS = pytest.mark.parametrize("form", [Form.SPLIT] if INTERPRETED else list(Form), ids=lambda form: form.name)
CONFIG = AnchorConfig(block_n=64)
MAX_BLOCKS = MAX_PREFIX // 16


def shapes(pooling: Pooling) -> tuple[ScoreShape, ScoreShape]:
    blocks = ScoreShape(HEADS * GQA, HEADS, Source.MINMAX, DIM, pooling=pooling)
    return blocks, ScoreShape(HEADS * GQA, HEADS, Source.LOW_BIT, KEPT, 4, True, pooling)


def stage(shape: ScoreShape, form: Form = Form.SPLIT, num_chunks: int = 1, **options: Any) -> AnchorSelection:
    second = {"max_prefix_len": MAX_CANDIDATES, "max_budget": MAX_BUDGET, "listed": True, "max_block_size": 1}
    first = {"max_prefix_len": MAX_PREFIX, "max_budget": MAX_CANDIDATES, "listed": False, "max_block_size": 32}
    sizes: dict[str, Any] = {
        "max_groups": MAX_GROUPS,
        **(first if shape.source is Source.MINMAX else second),
        **options,
    }
    return AnchorSelection(
        shape, max_batch=BATCH, config=CONFIG, device=DEVICE, form=form, num_programs=num_chunks * HEADS, **sizes
    )


def joined(form: Form = Form.SPLIT, num_chunks: int = 1, pooling: Pooling = Pooling.MAX) -> JoinedTwoLevelSelection:
    first, second = (stage(shape, form, num_chunks) for shape in shapes(pooling))
    return JoinedTwoLevelSelection(first, second, MAX_BLOCKS, num_layers=LAYERS)


def run(selection: Any, q: Tensor, layer: int, **options: Any) -> SelectedLists:
    lists = selection.new_lists(with_slots=True)
    for buffer in (lists.positions, lists.counts, lists.slots):
        buffer.fill_(1_000_007)
    selection.run(q, lists, SM_SCALE, slot_table=TABLE.to(DEVICE), layer=layer, **options)
    return lists


def poison(selection: JoinedTwoLevelSelection) -> None:
    """What no run may read before it is written."""
    selection.candidates.positions.fill_(1_000_007)
    for scores in (selection.first_scores, selection.second_scores):
        scores.fill_(torch.nan)


@FORMS
@pytest.mark.parametrize("pooling", [pytest.param(Pooling.MAX, marks=pytest.mark.full), Pooling.MEAN])
def test_the_positions_of_the_stages(pooling: Pooling, form: Form) -> None:
    """As the references choose by score: as many programs as groups; layer after layer, and plan after plan."""
    selection, planned = joined(form, 1, pooling), groups_of("blocks")
    q = randn(BATCH, HEADS * GQA, DIM, seed=4)
    plans = (planned, planned[::-1], planned[1:2], [], planned[:1])
    for some in plans if pooling is Pooling.MAX else plans[:1]:
        selection.plan([group for group, _ in some])
        for layer in range(LAYERS):
            poison(selection)
            check(selection, run(selection, q, layer), some, q, layer, pooling, key_bits=16)


@pytest.mark.full
@FORMS
@pytest.mark.parametrize("kept", [False, True], ids=["again", "raw kept"])
def test_groups_shared_out_among_programs(kept: bool, form: Form) -> None:
    selection, planned = joined(form, 7), groups_of("blocks")
    selection.plan([group for group, _ in planned])
    rooms = [
        torch.full((MAX_GROUPS, HEADS, n, 6 * GQA), torch.nan, device=DEVICE) for n in (MAX_BLOCKS, MAX_CANDIDATES)
    ]
    raw = tuple(room.transpose(2, 3) if kept else None for room in rooms)
    q = randn(BATCH, HEADS * GQA, DIM, seed=6)
    for layer in range(LAYERS):
        poison(selection)
        check(selection, run(selection, q, layer, raw=raw), planned, q, layer, key_bits=16)
    assert all(bool(room.isfinite().any()) == kept for room in rooms)


def test_a_replay_sees_the_plan() -> None:
    check_replays(joined(), [group for group, _ in groups_of("blocks")], 4 + 4)


def test_stages_and_tables_that_do_not_fit() -> None:
    blocks, tokens = shapes(Pooling.MAX)
    first, second = stage(blocks), stage(tokens)
    with pytest.raises(ValueError, match=r"stages of the same max_groups and num_kv_heads, got .*4, 2.*5, 2"):
        JoinedTwoLevelSelection(first, stage(tokens, max_groups=5), MAX_BLOCKS)
    with pytest.raises(ValueError, match="a first level of all rows, got listed=True"):
        JoinedTwoLevelSelection(second, second, MAX_BLOCKS)
    with pytest.raises(ValueError, match="got listed=False and LOW_BIT; it scores the candidates alone"):
        JoinedTwoLevelSelection(first, stage(tokens, listed=False), MAX_BLOCKS)
    with pytest.raises(ValueError, match="among 410 candidates, got one among 409; raise its max_prefix_len"):
        JoinedTwoLevelSelection(first, stage(tokens, max_prefix_len=409), MAX_BLOCKS)
    selection, (group, _) = joined(), groups_of("blocks")[0]
    with pytest.raises(ValueError, match="expected indexes of 2 layers, got 1; name every layer's"):
        selection.plan([dataclasses.replace(group, layers=group.layers[:1])])
    for size, message in ((8, "expected at most 48 blocks a head"), (16, "and 88 in each layer's index")):
        with pytest.raises(ValueError, match=message):
            selection.plan([dataclasses.replace(group, block_size=size)])
    with pytest.raises(ValueError, match="expected arrays of blocks as a layer's first index, got CsaTables"):
        selection.plan([groups_of("csa")[0][0]])
    selection.plan([group])
    lists, q = selection.new_lists(with_slots=True), randn(BATCH, HEADS * GQA, DIM, seed=1)
    with pytest.raises(ValueError, match="expected a slot_table of 703 entries, got 702"):
        selection.run(q, lists, SM_SCALE, slot_table=TABLE[:702].to(DEVICE))
