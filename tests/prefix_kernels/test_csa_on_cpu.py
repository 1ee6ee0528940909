"""The kernels that score by CSAttention's lists, as they are compiled for sm_90, on the CPU: see `ptx_machine`.

Triton's interpreter adds scores in device memory. What is compiled adds them in shared memory, by assembly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefix_kernels.anchor_selection import Form
from prefix_kernels.csa_selection import CsaShape
from prefix_kernels.csa_selection.kernels import pick_kernel, score_kernel
from prefix_kernels.kernels import COARSE, NUM_BINS
from prefix_kernels.launching import recording
from prefix_kernels.pooling import Pooling
from prefix_kernels.top_k_selection import rank_by_keys
from tests.prefix_kernels.compiling import compiled
from tests.prefix_kernels.ptx_machine import Machine, run_together
from tests.prefix_kernels.selecting import KV_HEADS, check_scores, lists_of
from tests.prefix_kernels.triton.test_csa_selection import GQA, SHAPE, SHORT, CsaProblem, problem, runner


def scored(made: CsaProblem, form: Form, programs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, and counts of keys [max_items, KV_HEADS, COARSE + NUM_BINS], by the launches before the lists'."""
    one, scores = runner(made, form, programs), torch.full((made.room,), torch.nan)
    one.plan(made.scored, made.selected)
    with recording() as kept:
        one.run(made.q, made.sm_scale, scores, lists_of(one), slot_table=made.slot_table)
    tensors = [array for of in made.scored for array in of.arrays]
    *launches, _ = kept.launches
    for launched in launches:
        kernel = compiled(launched, 90)
        for head in range(KV_HEADS):
            run_together([Machine(launched, kernel, (place, head), tensors) for place in range(launched.grid[0])])
    assert [one.kernel for one in launches] == [pick_kernel] + [score_kernel] * (1 if form is Form.FUSED else 2)
    return scores, launches[-1].arguments["at_least_ptr"]


@pytest.mark.parametrize("form", list(Form), ids=lambda form: form.name)
@pytest.mark.parametrize("options", [{}, {"bits": 8, "pooling": Pooling.MEAN}], ids=str)
def test_programs_share_groups(options: dict[str, Any], form: Form) -> None:
    made = problem(torch.device("cpu"), SHORT, CsaShape(KV_HEADS * GQA, KV_HEADS, 32, 4, 5, **options))
    check_scores(made, scored(made, form, 3)[0])


@pytest.mark.parametrize(("subspaces", "centroids", "dim"), [(1, 1, 8), (16, 16, 64), (64, 2, 64)], ids=str)
def test_tables_of_any_size(subspaces: int, centroids: int, dim: int) -> None:
    """Eight warps that share one list, and eight of two and of eight lists each."""
    made = problem(
        torch.device("cpu"), [((0, 1), 2300, 40)], CsaShape(KV_HEADS * GQA, KV_HEADS, dim, subspaces, centroids)
    )
    check_scores(made, scored(made, Form.FUSED, 2)[0])


def test_keys_are_counted() -> None:
    """Of lists that are full in some blocks and empty in others; with the windows' tokens above all."""
    made = problem(torch.device("cpu"), [((0,), 1300, 200)], SHAPE, ratio=0.11, clustered=True)
    scores, counts = scored(made, Form.FUSED, 1)
    check_scores(made, scores)
    for head, begin in enumerate(made.scored[0].score_begins):
        keys = rank_by_keys(scores[begin : begin + 1300][None])[0].long()
        keys[:5] = keys[-20:] = NUM_BINS.value - 1
        wanted = keys.bincount(minlength=NUM_BINS.value).flip(0).cumsum(0)
        assert torch.equal(counts[0, head, COARSE.value :].long(), wanted)


def test_later_steps_may_have_more_entries() -> None:
    """Of long lists a step has more or fewer entries than the one before it: all of them are added."""
    made = problem(torch.device("cpu"), [((0, 1), 2300, 200)], ratio=0.5)
    check_scores(made, scored(made, Form.FUSED, 1)[0])
