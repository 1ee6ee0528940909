"""Import of published head maps, from arrays and files made in their format (int32 [num_layers, num_kv_heads])."""

import numpy as np
import pytest

from sglang_ext.calibration import load_published_plan, plan_from_published

ANCHORS = (0, 2, 3)
# Rows of the anchors are the identity; layer 1 follows 0, layers 4 and 5 follow 3.
HEAD_MAP = np.array([[0, 1], [0, 0], [0, 1], [0, 1], [1, 0], [1, 1]], dtype=np.int32)
NAME = "Some-Model-8B_layers_0_2_3.npy"
SIZES = {"num_layers": 6, "num_kv_heads": 2}


def test_a_file_and_its_name(tmp_path):
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
    assert plan == plan_from_published(HEAD_MAP, ANCHORS, **SIZES)


def test_with_a_selecting_layer_0_the_published_plan_is_complete():
    plan = plan_from_published(HEAD_MAP, ANCHORS, **SIZES, dense_layers=())
    assert plan.anchor_layers == ANCHORS
    assert (plan[1].anchor_layer, plan[1].head_map) == (0, (0, 0))


def test_anchors_can_be_given_and_the_model_name_may_look_like_them(tmp_path):
    np.save(tmp_path / "map.npy", HEAD_MAP.astype(np.int64))
    given = load_published_plan(tmp_path / "map.npy", **SIZES, anchors=ANCHORS)
    tricky = tmp_path / "odd_layers_9_x_layers_0_2_3.npy"
    np.save(tricky, HEAD_MAP)
    assert load_published_plan(tricky, **SIZES) == given


def changed(layer, head, value):
    copy = HEAD_MAP.copy()
    copy[layer, head] = value
    return copy


@pytest.mark.parametrize(
    ("head_map", "anchors", "message"),
    [
        (HEAD_MAP[:5], ANCHORS, "expected a head map of 6 layers and 2 KV heads .* got 5 and 2; take the file"),
        (np.zeros((6, 8), np.int32), ANCHORS, "got 6 and 8"),
        (HEAD_MAP.astype(np.float32), ANCHORS, r"expected an integer array .*float32"),
        (HEAD_MAP[0], ANCHORS, "expected an integer array"),
        (HEAD_MAP.astype(bool), ANCHORS, "expected an integer array"),
        (changed(4, 1, 2), ANCHORS, r"layer 4, KV head 1: expected a KV head in 0\.\.1, got 2"),
        (changed(5, 0, -1), ANCHORS, "layer 5, KV head 0: .*got -1"),
        (HEAD_MAP, (0, 2, 4), r"layer 4: expected the identity map of an anchor, got \[1, 0\]"),
        (HEAD_MAP, (2, 3), "expected layer 0 among the anchors"),
        (HEAD_MAP, (), "expected layer 0 among the anchors"),
        (HEAD_MAP, (0, 3, 2), "expected ascending anchors"),
        (HEAD_MAP, (0, 9), "below num_layers=6"),
    ],
)
def test_what_is_refused(head_map, anchors, message):
    with pytest.raises(ValueError, match=message):
        plan_from_published(head_map, anchors, **SIZES)


@pytest.mark.parametrize("name", ["map.npy", "Model_layers_.npy", "Model_layers_0_2_3.npz", "Model_layers_0_a.npy"])
def test_a_name_without_anchors(name, tmp_path):
    np.save(tmp_path / "map.npy", HEAD_MAP)
    with pytest.raises(ValueError, match=r"expected a file name like MODEL_layers_0_2_8_13_14\.npy"):
        load_published_plan(tmp_path / name, **SIZES)


@pytest.mark.parametrize("content", ["empty", "text", "cut", "pickled", "huge"])
def test_files_that_are_no_array(content, tmp_path):
    path = tmp_path / NAME
    np.save(path, np.array([{"a": 1}], dtype=object) if content == "pickled" else HEAD_MAP)
    whole = path.read_bytes()
    if content == "huge":  # a header that promises more than the file holds
        whole = whole.replace(b"(6, 2)", b"(6, 9)")
    path.write_bytes({"empty": b"", "text": b"no array", "cut": whole[:-3]}.get(content, whole))
    with pytest.raises(ValueError, match=r"expected a \.npy array of integers"):
        load_published_plan(path, **SIZES)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_published_plan(tmp_path / NAME, **SIZES)
