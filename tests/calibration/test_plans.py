"""The anchor programme against exhaustive search, head maps, and the layer plans made of them, published ones too."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.calibration.plans import (
    assigned_anchors,
    best_head_map,
    choose_anchors,
    layer_similarity,
    make_layer_plan,
    plan_from_maps,
)
from sglang_ext.calibration.published import load_published_plan
from sglang_ext.methods import LayerPlan
from tests.examples import examples


@settings(max_examples=examples(80))
@given(data=st.data(), size=st.integers(1, 8))
def test_anchors_against_exhaustive_search(data, size):
    value = st.floats(-1, 1, width=32)
    matrix = data.draw(st.lists(st.lists(value, min_size=size, max_size=size), min_size=size, max_size=size))
    weights = data.draw(st.lists(st.floats(0, 2, width=32), min_size=size, max_size=size))
    first = data.draw(st.integers(0, size - 1))
    count = data.draw(st.integers(1, size - first))

    def objective(anchors):
        """The sum of the paper's 3.3, written with plain loops."""
        return sum(weights[b] * matrix[max(a for a in anchors if a <= b)][b] for b in range(first, size))

    unread = torch.ones(size, size).tril(-1).bool()
    tensors = torch.tensor(matrix).masked_fill(unread, torch.nan), torch.tensor(weights, dtype=torch.float64)
    choice = choose_anchors(*tensors, count, first)
    choices = [(first, *rest) for rest in itertools.combinations(range(first + 1, size), count - 1)]
    best = pytest.approx(max(map(objective, choices)), abs=1e-6)
    assert (len(choice), choice[0], objective(choice)) == (count, first, best)


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=1)))
def test_every_head_has_its_best_partner(rows):
    chosen = best_head_map(torch.tensor(rows, dtype=torch.float32))
    assert len(chosen) == len(rows)
    for head, row in enumerate(rows):
        tied = [other for other, value in enumerate(row) if value == max(row)]
        assert chosen[head] == (head if head in tied else tied[0])


def test_a_layer_takes_the_mean_over_its_heads_best_partners():
    sim = torch.tensor([[0.2, 0.9], [0.3, 0.8]]).expand(1, 1, 2, 2)
    assert layer_similarity(sim).item() == pytest.approx(0.85)


def head_similarity():
    return torch.rand(6, 6, 2, 2, generator=torch.Generator().manual_seed(3))


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
    assert LayerPlan.from_dict(plan.to_dict(), num_layers=6, num_kv_heads=2) == plan


def test_followers_of_a_dense_anchor_select_for_themselves():
    plan = make_layer_plan((0, 3), head_similarity())
    assert plan.dense_layers == (0,)
    assert plan.anchor_layers == (1, 2, 3)
    everything = make_layer_plan((0, 3), head_similarity(), ())
    assert everything.anchor_layers == (0, 3)
    assert everything[2].anchor_layer == 0


def test_a_dense_layer_between_is_skipped():
    plan = make_layer_plan((1,), head_similarity(), (0, 3))
    assert plan.dense_layers == (0, 3)
    assert [plan[layer].anchor_layer for layer in (2, 4, 5)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: assigned_anchors((0, 2, 2), 4), "expected at least one anchor, ascending"),
        (lambda: assigned_anchors((), 4), "expected at least one anchor"),
        (lambda: assigned_anchors((0, 6), 6), r"in 0\.\.5, got \[0, 6\]"),
        (lambda: make_layer_plan((0, 6), head_similarity()), r"in 0\.\.5, got \[0, 6\]"),
        (lambda: plan_from_maps((1,), {2: (0, 7)}, 3, 2), r"layer 2: expected head_map entries in 0\.\.1, got 7"),
    ],
)
def test_what_is_refused(run, message):
    with pytest.raises(ValueError, match=message):
        run()


ANCHORS = (0, 2, 3)
# int32 [num_layers, num_kv_heads]. Rows of the anchors are the identity; layer 1 follows 0, layers 4 and 5 follow 3.
HEAD_MAP = np.array([[0, 1], [0, 0], [0, 1], [0, 1], [1, 0], [1, 1]], dtype=np.int32)
NAME = "Some-Model-8B_layers_0_2_3.npy"
SIZES = {"num_layers": 6, "num_kv_heads": 2}


def test_a_published_file_and_its_name(tmp_path):
    np.save(tmp_path / NAME, HEAD_MAP)
    plan = load_published_plan(tmp_path / NAME, **SIZES)
    assert plan.to_dict()["layers"] == [
        "dense",
        "anchor",  # its anchor, layer 0, is dense here and selects nothing
        "anchor",
        "anchor",
        {"reuse": 3, "head_map": [1, 0]},
        {"reuse": 3, "head_map": [1, 1]},
    ]
    np.save(tmp_path / "map.npy", HEAD_MAP.astype(np.int64))
    assert load_published_plan(tmp_path / "map.npy", **SIZES, anchors=ANCHORS) == plan
    tricky = tmp_path / "odd_layers_9_x_layers_0_2_3.npy"
    np.save(tricky, HEAD_MAP)
    assert load_published_plan(tricky, **SIZES) == plan


def changed(layer, head, value):
    copy = HEAD_MAP.copy()
    copy[layer, head] = value
    return copy


@pytest.mark.parametrize(
    ("head_map", "anchors", "message"),
    [
        (HEAD_MAP[:5], ANCHORS, r"of 6 layers and 2 KV heads .* got \(5, 2\) int32; take"),
        (HEAD_MAP.astype(np.float32), ANCHORS, r"expected an integer array .*float32"),
        (HEAD_MAP[0], ANCHORS, "expected an integer array"),
        (HEAD_MAP.astype(bool), ANCHORS, "expected an integer array"),
        (changed(4, 1, 2), ANCHORS, r"layer 4: expected head_map entries in 0\.\.1, got 2"),
        (changed(5, 0, -1), ANCHORS, "layer 5: .*got -1"),
        (HEAD_MAP, (0, 2, 4), r"layer 4: expected the identity map of an anchor, got \[1, 0\]"),
        (HEAD_MAP, (2, 3), "expected layer 0 among the anchors"),
        (HEAD_MAP, (), "expected layer 0 among the anchors"),
        (HEAD_MAP, (0, 3, 2), "expected at least one anchor, ascending"),
        (HEAD_MAP, (0, 9), r"in 0\.\.5, got \[0, 9\]"),
    ],
)
def test_published_maps_that_are_refused(head_map, anchors, message, tmp_path):
    np.save(tmp_path / NAME, head_map)
    with pytest.raises(ValueError, match=message):
        load_published_plan(tmp_path / NAME, **SIZES, anchors=anchors)


@pytest.mark.parametrize("name", ["map.npy", "Model_layers_.npy", "Model_layers_0_2_3.npz", "Model_layers_0_a.npy"])
def test_a_name_without_anchors(name, tmp_path):
    with pytest.raises(ValueError, match=r"expected a file name like MODEL_layers_0_2_8_13_14\.npy"):
        load_published_plan(tmp_path / name, **SIZES)


@pytest.mark.parametrize("content", ["empty", "text", "cut", "pickled", "huge", "vast", "header"])
def test_files_that_are_no_array(content, tmp_path):
    path = tmp_path / NAME
    np.save(path, np.array([{"a": 1}], dtype=object) if content == "pickled" else HEAD_MAP)
    whole = path.read_bytes()
    if content == "huge":  # a header that promises more than the file holds
        whole = whole.replace(b"(6, 2)", b"(6, 9)")
    if content == "vast":  # more than there is memory
        whole = whole.replace(b"(6, 2), }" + b" " * 13, b"(6, 2" + b"0" * 13 + b"), }")
    if content == "header":
        whole = whole.replace(b"(6, 2), }", b"((((((((}")
    path.write_bytes({"empty": b"", "text": b"no array", "cut": whole[:-3]}.get(content, whole))
    with pytest.raises(ValueError, match=r"expected a \.npy array of integers"):
        load_published_plan(path, **SIZES)
