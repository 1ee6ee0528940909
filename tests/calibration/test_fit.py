"""The fitted settings, on made-up tables whose best choice is known."""

from dataclasses import replace

import pytest
import torch

from sglang_ext.calibration.fit import FitSetting, best_anchors, fit_settings, plan_recovery, with_flat_heads
from sglang_ext.calibration.layer_statistics import MeasureSetting
from sglang_ext.calibration.measurement import average, measure_prompt
from tests.calibration.captures import make_capture

LAYERS = 5
BASE = measure_prompt(make_capture(num_layers=LAYERS), MeasureSetting(max_tokens=2))

#: Layers 1, 2 are alike and 3, 4 are; the heads of 4 are those of 3 with their numbers swapped.
FAMILIES = (0, 1, 1, 2, 2)


def reuse_table(families=FAMILIES, own=0.9):
    table = torch.zeros(LAYERS, LAYERS, 2, 2, dtype=torch.float64)
    for a in range(LAYERS):
        for b in range(a, LAYERS):
            near, far = (own, 0.3) if a == b else (0.8, 0.3) if families[a] == families[b] else (0.2, 0.1)
            pair = torch.tensor([[near, far], [far, near]], dtype=torch.float64)
            table[a, b] = pair.flip(1) if (a, b) == (3, 4) else pair
    return table


def made(noise):
    """A measurement: head 0 of each layer needs small blocks, head 1 does not care."""
    heads = [[0.6, 0.4, 0.1], [0.6, 0.6, 0.6]]
    recall = torch.tensor([heads] * LAYERS, dtype=torch.float64) + 0.001 * noise
    return replace(BASE, recall=recall, recovery=reuse_table(), importance=torch.ones(LAYERS, dtype=torch.float64))


FITTED = [made(n) for n in range(3)]


def test_plan_recovery_against_loops():
    table = torch.rand(LAYERS, LAYERS, 2, 2, dtype=torch.float64)
    total = 0.0
    for layer, anchor in ((1, 1), (2, 1), (3, 3), (4, 3)):
        for head in range(2):
            other = head if layer == anchor else int(table[anchor, layer, head].argmax())
            total += float(table[anchor, layer, head, other])
    assert plan_recovery(table, (1, 3)) == pytest.approx(total / 8)


def test_a_profile_is_fitted_on_all_prompts():
    fit = fit_settings(average(FITTED), FitSetting(num_anchors=2, num_channels=4))
    assert fit.block_sizes.tolist() == [[16, 64]] * LAYERS
    assert fit.anchors == (1, 3)
    assert fit.plan.to_dict()["layers"] == [
        "dense",
        "anchor",
        {"reuse": 1, "head_map": [0, 1]},
        "anchor",
        {"reuse": 3, "head_map": [1, 0]},
    ]
    assert fit.channels.shape == (LAYERS, 2, 4)
    assert fit.dense_heads == ((),) * LAYERS


@pytest.mark.parametrize(("families", "heavy", "anchors"), [((0, 1, 1, 1, 2), 1, (1, 4)), ((0, 1, 2, 3, 4), 4, (1, 4))])
def test_anchors_stand_where_families_begin_and_where_layers_weigh(families, heavy, anchors):
    importance = torch.ones(LAYERS, dtype=torch.float64)
    importance[heavy] = 3.0
    made = [replace(one, recovery=reuse_table(families), importance=importance) for one in FITTED]
    assert fit_settings(average(made), FitSetting(num_anchors=2)).anchors == anchors


def judged(flat, budget=1, **setting):
    """The fit where even the best tokens of these (layer, head) hold little at the second budget, else much."""
    best = torch.full_like(BASE.best, 0.9)
    for layer, head in flat:
        best[1, layer, head] = 0.3
    setting = FitSetting(num_anchors=2, **setting)
    averages = average([replace(one, best=best) for one in FITTED])
    return with_flat_heads(fit_settings(averages, setting), averages, budget)


def test_heads_are_judged_at_the_recommended_budget():
    assert judged([(3, 1)], budget=0).flat_heads.nonzero().tolist() == []
    assert judged([(3, 1)], budget=1).flat_heads.nonzero().tolist() == [[3, 1]]


@pytest.mark.parametrize(
    ("flat", "layers"),
    [
        ([(0, 1)], ["dense", "anchor", 1, "anchor", 3]),  # a layer that is dense anyway
        ([(2, 0)], ["dense", "anchor", "dense", "anchor", 3]),
        ([(1, 0), (1, 1)], ["dense", "dense", "anchor", "anchor", 3]),
        ([(1, 0), (2, 1), (4, 0)], ["dense", "dense", "dense", "anchor", "dense"]),
    ],
)
def test_a_layer_with_a_near_uniform_head_is_dense(flat, layers):
    fit = judged(flat)
    assert [role.mode.value if role.anchor_layer is None else role.anchor_layer for role in fit.plan.layers] == layers
    assert fit.dense_heads == ((),) * LAYERS


def test_where_no_layer_could_select_the_plan_stays_and_its_layers_attend_everything():
    fit = judged([(layer, 0) for layer in range(LAYERS)])
    assert fit.plan.anchor_layers == (1, 3)
    assert fit.dense_heads == ((), (0,), (0,), (0,), (0,))
    assert fit.plan.with_dense(fit.whole_layers).anchor_layers == ()


def test_without_dense_layers_all_heads_are_judged():
    fit = judged([(0, 1)], dense_layers=())
    assert fit.flat_heads.nonzero().tolist() == [[0, 1]]
    assert fit.plan.dense_layers == (0,)


def test_block_sizes_of_a_given_average():
    fit = fit_settings(average(FITTED), FitSetting(num_anchors=1, block_average=32.0))
    harmonic = 1 / (1 / fit.block_sizes[1:].double()).mean()
    assert harmonic >= 32 - 1e-9
    assert set(fit.block_sizes[1:, 1].tolist()) == {64}


def test_the_fewest_anchors_keep_most_of_the_mass():
    assert best_anchors(average(FITTED), FitSetting()) == (1, 2, 3, 4)
    alike = [replace(one, recovery=reuse_table(own=0.805)) for one in FITTED]
    assert best_anchors(average(alike), FitSetting()) == (1, 3)


@pytest.mark.parametrize("dense", [(0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5)])
def test_dense_layers_that_do_not_fit_are_refused(dense):
    with pytest.raises(ValueError, match=r"dense layers in 0\.\.4 that leave one sparse"):
        fit_settings(average(FITTED), FitSetting(dense_layers=dense))
