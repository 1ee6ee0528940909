"""Selection whose programs wait for each other: on a GPU only; elsewhere it is compiled, no more.

`tests/prefix_kernels/triton/test_anchor_selection.py` runs in this form there, too, on small sizes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from prefix_kernels.anchor_selection import AnchorSelection, Form
from prefix_kernels.pooled_scores import Source
from prefix_kernels.pooled_scores.runner import ScoreInputs
from prefix_kernels.types import SelectedLists
from tests.prefix_kernels.triton.test_anchor_selection import CONFIG, SM_SCALE, problem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_one_launch_is_four_on_a_whole_gpu(dtype: torch.dtype, device: torch.device) -> None:
    """As many programs as wait for each other in earnest, launch after launch; a replay after another plan."""
    long = [((0, 2), 70_001, 700), ((1,), 30_000, 333)]
    made = problem(Source.LOW_BIT, device, long, dtype=dtype)
    short = replace(made, scored=made.scored[1:], selected=made.selected[1:])
    q, table = made.q, torch.arange(100_100, device=device).int()

    def build(form: Form) -> tuple[AnchorSelection, torch.Tensor, SelectedLists]:
        one = AnchorSelection(made.shape, 8, 4, 70_001, 700, CONFIG, device, max_block_size=1, form=form)
        return one, torch.full((made.room,), torch.nan, device=device), one.new_lists(with_slots=True)

    def same(first: tuple[torch.Tensor, SelectedLists], second: tuple[torch.Tensor, SelectedLists]) -> None:
        assert torch.equal(first[0].view(torch.int32), second[0].view(torch.int32))
        for name in ("positions", "counts", "slots"):
            assert torch.equal(getattr(first[1], name), getattr(second[1], name)), name

    split, joined = build(Form.SPLIT), build(Form.JOINED)
    for plan in (made, short, made):
        for one, _, _ in (split, joined):
            one.plan(plan.scored, plan.selected)
        for step in range(50):
            inputs = ScoreInputs(q if step % 2 else -q, SM_SCALE)
            for one, scores, lists in (split, joined):
                one.run(inputs, scores, lists, slot_table=table)
            same(split[1:], joined[1:])

    one, scores, lists = joined
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.run(ScoreInputs(q, SM_SCALE), scores, lists, slot_table=table)
    for plan in (short, made, short):
        for runs, _, _ in (split, joined):
            runs.plan(plan.scored, plan.selected)
        split[0].run(ScoreInputs(q, SM_SCALE), split[1], split[2], slot_table=table)
        for _ in range(20):
            graph.replay()
        same(split[1:], joined[1:])
