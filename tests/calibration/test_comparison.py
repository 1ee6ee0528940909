"""The fitted settings and their held-out comparison, on made-up tables whose best choice is known."""

import re
from dataclasses import replace

import pytest
import torch

from sglang_ext.calibration.comparison import compare, paired, recall_of
from sglang_ext.calibration.fit import (
    FitSetting,
    fewest_anchors,
    fit_settings,
    plan_recovery,
    with_flat_heads,
)
from sglang_ext.calibration.layer_statistics import MeasureSetting
from sglang_ext.calibration.measurement import average, measure_prompt
from tests.calibration.captures import make_capture

LAYERS = 5
BASE = measure_prompt(make_capture(num_layers=LAYERS), MeasureSetting(max_tokens=2))

#: Layers 1, 2 are alike and 3, 4 are; the heads of 4 are those of 3 with their numbers swapped.
FAMILIES = (0, 1, 1, 2, 2)


def reuse_table(swap=True, own=0.9):
    table = torch.zeros(LAYERS, LAYERS, 2, 2, dtype=torch.float64)
    for a in range(LAYERS):
        for b in range(a, LAYERS):
            near, far = (own, 0.3) if a == b else (0.8, 0.3) if FAMILIES[a] == FAMILIES[b] else (0.2, 0.1)
            pair = torch.tensor([[near, far], [far, near]], dtype=torch.float64)
            table[a, b] = pair.flip(1) if swap and (a, b) == (3, 4) else pair
    return table


def made(swap=True, differ=True, noise=0):
    """A measurement: head 0 of each layer needs small blocks, head 1 does not care."""
    flat, steep = [0.6, 0.6, 0.6], [0.6, 0.4, 0.1]
    heads = [steep, flat] if differ else [steep, steep]
    recall = torch.tensor([heads] * LAYERS, dtype=torch.float64) + 0.001 * noise
    return replace(BASE, recall=recall, recovery=reuse_table(swap), importance=torch.ones(LAYERS, dtype=torch.float64))


FITTED = [made(noise=n) for n in range(3)]
HELD = [made(noise=n) for n in (1, 2)]


def compared(fitted=FITTED, held=HELD, groups=("a text", "another")):
    return compare(fitted, held, groups, FitSetting())


def test_recall_takes_each_heads_own_size():
    recall = torch.rand(3, 2, 2, 3, dtype=torch.float64)
    sizes = torch.tensor([[16, 64], [32, 16]])
    column = {16: 0, 32: 1, 64: 2}
    expected = [
        sum(float(one[i, j, column[int(sizes[i, j])]]) for i in range(2) for j in range(2)) / 4 for one in recall
    ]
    assert recall_of(recall, sizes).tolist() == pytest.approx(expected)


def test_adaptive_sizes_win_where_heads_differ():
    """Head 0 takes blocks of 16 and 32 tokens, head 1 of 64: not of fewer bytes than 32 for all."""
    found = compared()
    row = found.blocks
    assert found.num_heads == 8, "layer 0 takes no part"
    average = float(re.fullmatch(r"sizes per head, ([0-9.]+) tokens on average", row.choice)[1])
    assert (average >= 32, row.against) == (True, "32 tokens")
    assert row.rival == pytest.approx(0.5 + 0.0015)
    assert row.calibrated > row.rival
    assert row.gain == pytest.approx(row.calibrated - row.rival)
    assert row.reason == ""
    alike = [made(differ=False)] * 2
    assert compared(alike, alike).blocks.reason == "one size is best at these bytes"


@pytest.mark.parametrize("dim", [1, 2], ids=["other heads", "other sizes"])
def test_what_does_not_carry_over_is_told(dim):
    held = [replace(one, recall=one.recall.flip(dim)) for one in HELD]
    row = compared(held=held).blocks
    assert row.gain < 0
    assert "do not carry over" in row.reason


def test_anchors_of_the_programme_stand_where_families_begin():
    one, two, *_ = compared().anchors
    assert (two.choice, two.against) == ("1, 3", "1, 3")
    assert "evenly spaced anchors; there are 3 choices" in two.reason
    assert "one choice" in one.reason
    three = [replace(one, recovery=shifted()) for one in FITTED]
    row = compared(three, three[:2]).anchors[1]
    assert (row.choice, row.against) == ("1, 4", "1, 3")
    assert row.calibrated == pytest.approx((0.9 + 0.8 + 0.8 + 0.9) / 4)
    assert row.rival == pytest.approx((0.9 + 0.8 + 0.9 + 0.2) / 4)
    assert (row.gain > 0, row.reason) == (True, "")


def shifted():
    """Families 1, 2, 3 and 4."""
    table = reuse_table(swap=False)
    eye = torch.tensor([[0.8, 0.3], [0.3, 0.8]], dtype=torch.float64)
    table[1, 3] = table[2, 3] = eye
    table[3, 4] = table[1, 4].clone()
    return table


def test_head_maps_win_where_heads_are_swapped():
    row = compared().head_maps[1]
    assert (row.choice, row.against) == ("maps of anchors 1, 3", "identity")
    assert row.calibrated == pytest.approx((0.9 + 0.8 + 0.9 + 0.8) / 4)
    assert row.rival == pytest.approx((0.9 + 0.8 + 0.9 + 0.3) / 4)
    assert row.gain > 0
    same = [made(swap=False)] * 2
    row = compared(same, same).head_maps[1]
    assert row.gain == 0.0
    assert "is the identity" in row.reason


def test_plan_recovery_against_loops():
    recovery, table = torch.rand(2, LAYERS, LAYERS, 2, 2, dtype=torch.float64), reuse_table()
    for prompt in range(2):
        total = 0.0
        for layer, anchor in ((1, 1), (2, 1), (3, 3), (4, 3)):
            for head in range(2):
                other = head if layer == anchor else int(table[anchor, layer, head].argmax())
                total += float(recovery[prompt, anchor, layer, head, other])
        assert float(plan_recovery(recovery, (1, 3), table)[prompt]) == pytest.approx(total / 8)


ALONE = torch.arange(10)


def gain(differences, groups):
    """Of a choice that holds so much more of each prompt than its rival."""
    return paired("a", "b", torch.tensor(differences, dtype=torch.float64), torch.zeros(()), "why", groups)


def test_the_interval_covers_the_mean_and_needs_two_groups():
    many = gain([0.1, 0.2, 0.3, 0.4], ALONE[:4])
    assert many.gain == pytest.approx(0.25)
    assert 0.1 <= many.low < many.gain < many.high <= 0.4
    one = gain([-0.1, -0.1], torch.tensor([0, 0]))
    assert (one.low, one.high, one.reason) == (None, None, "why")


def test_the_interval_draws_groups():
    """Ten prompts of two texts hold no more than two independent figures."""
    values = [0.1] * 5 + [0.3] * 5
    grouped = gain(values, torch.tensor([0] * 5 + [1] * 5))
    assert (grouped.low, grouped.high) == (pytest.approx(0.1), pytest.approx(0.3))
    alone = gain(values, ALONE)
    assert 0.1 < alone.low < alone.high < 0.3
    # Of unequal groups the mean is over prompts.
    found = gain([0.0, 1.0, 1.0, 1.0], torch.tensor([0, 1, 1, 1]))
    assert (found.gain, found.low, found.high) == (0.75, 0.0, 1.0)


def test_groups_reach_every_comparison():
    for groups, ends in ((["one text"] * 2, {True}), (["a text", "another"], {False})):
        found = compared(groups=groups)
        assert {row.low is None for row in [found.blocks, *found.anchors, *found.head_maps]} == ends


# -- what is fitted ----------------------------------------------------------------------------------------------------


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
    assert fewest_anchors(average(FITTED), FitSetting()) == (1, 2, 3, 4)
    alike = [replace(one, recovery=reuse_table(own=0.805)) for one in FITTED]
    assert fewest_anchors(average(alike), FitSetting()) == (1, 3)


@pytest.mark.parametrize("dense", [(0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5)])
def test_dense_layers_that_do_not_fit_are_refused(dense):
    with pytest.raises(ValueError, match=r"dense layers in 0\.\.4 that leave one sparse"):
        fit_settings(average(FITTED), FitSetting(dense_layers=dense))
