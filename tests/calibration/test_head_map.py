"""Head maps and the layer plans made of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.calibration import best_head_map, identity_head_map, kascade_budget, make_layer_plan
from sglang_ext.calibration.head_map import plan_from_maps
from sglang_ext.methods import LayerPlan


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=1)))
def test_every_head_has_its_best_partner(rows):
    chosen = best_head_map(torch.tensor(rows, dtype=torch.float32))
    assert len(chosen) == len(rows)
    for head, row in enumerate(rows):
        assert row[chosen[head]] == max(row)
        if head < len(row) and row[head] == max(row):
            assert chosen[head] == head


def test_many_to_one_and_ties():
    assert best_head_map(torch.tensor([[0.1, 0.9, 0.2], [0.1, 0.9, 0.2], [0.5, 0.5, 0.1]])) == (1, 1, 0)
    assert identity_head_map(3) == (0, 1, 2)


def head_similarity(num_layers=6, heads=2):
    return torch.rand(num_layers, num_layers, heads, heads, generator=torch.Generator().manual_seed(3))


def test_a_plan_of_every_role():
    sim = head_similarity()
    sim[1, 2] = torch.tensor([[0.1, 0.9], [0.2, 0.8]])  # both heads of layer 2 follow head 1 of layer 1
    sim[4, 5] = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    plan = make_layer_plan((1, 3, 4), sim)
    assert plan.to_dict()["layers"] == [
        "dense",
        "anchor",
        {"reuse": 1, "head_map": [1, 1]},
        "anchor",
        "anchor",
        {"reuse": 4, "head_map": [1, 0]},
    ]
    plain = make_layer_plan((1, 3, 4), sim, remap=False)
    assert [plain[layer].head_map for layer in (2, 5)] == [(0, 1), (0, 1)]
    assert LayerPlan.from_dict(plan.to_dict(), num_layers=6, num_kv_heads=2) == plan


def test_followers_of_a_dense_anchor_select_for_themselves():
    plan = make_layer_plan((0, 3), head_similarity())
    assert plan.dense_layers == (0,)
    assert plan.anchor_layers == (1, 2, 3)
    everything = make_layer_plan((0, 3), head_similarity(), dense_layers=())
    assert everything.anchor_layers == (0, 3)
    assert everything[2].anchor_layer == 0


def test_a_dense_layer_between_is_skipped():
    plan = make_layer_plan((1,), head_similarity(), dense_layers=(0, 3))
    assert plan.dense_layers == (0, 3)
    assert [plan[layer].anchor_layer for layer in (2, 4, 5)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("prefix_len", "keep_ratio", "expected"), [(100, 0.1, 100), (1000, 0.1, 128), (4096, 0.1, 409), (128, 1.0, 128)]
)
def test_budget_of_the_paper(prefix_len, keep_ratio, expected):
    assert kascade_budget(prefix_len, keep_ratio) == expected


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: best_head_map(torch.ones(3)), "expected finite similarity"),
        (lambda: best_head_map(torch.full((2, 2), torch.nan)), "expected finite similarity"),
        (lambda: make_layer_plan((0,), torch.ones(2, 2, 2)), "expected head_similarity"),
        (lambda: make_layer_plan((), head_similarity()), "expected ascending anchors"),
        (lambda: make_layer_plan((0, 6), head_similarity()), "below num_layers=6"),
        (lambda: make_layer_plan((2,), head_similarity()), "got layer 1 with nothing to reuse"),
        (
            lambda: make_layer_plan((0,), head_similarity(), dense_layers=(6,)),
            r"expected dense layers in 0\.\.5, got 6",
        ),
        (lambda: plan_from_maps((1,), {2: (0, 7)}, 3, 2), r"layer 2: expected head_map entries in 0\.\.1, got 7"),
        (lambda: kascade_budget(0, 0.1), "expected prefix_len >= 1"),
        (lambda: kascade_budget(10, 0.0), "keep_ratio above 0"),
        (lambda: kascade_budget(10, 0.1, 0), "min_top_k >= 1"),
    ],
)
def test_what_is_refused(run, message):
    with pytest.raises(ValueError, match=message):
        run()
