"""Specs and layer plans: round trips, and a message for every rule."""

import json

import pytest

from sglang_ext.methods import METHODS, LayerMode, LayerPlan, LayerRole, make_builder, make_selector, parse_spec


@pytest.mark.parametrize("name", METHODS)
def test_registry_and_round_trip(name):
    spec = parse_spec({"method": name})
    assert parse_spec(json.loads(json.dumps(spec.to_dict()))) == spec
    assert METHODS[name].spec.from_dict({}) == spec
    assert make_builder(spec).spec == spec
    assert make_builder(spec).needs_queries(64) == (name in ("csattention", "token_index", "two_level", "union"))
    assert hasattr(make_selector(spec), "select")


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], TypeError, "expected an object"),
        ({}, ValueError, "one of csattention, ab_sparse, token_index, two_level, union, exact, got None"),
        ({"method": "quest"}, ValueError, "got 'quest'"),
        ({"method": ["exact"]}, ValueError, "one of csattention"),
        ({"method": "exact", "budget": 3}, ValueError, "unknown parameter 'budget'"),
        ({"method": "csattention", "m": 3}, ValueError, "expected one of: num_subspaces"),
        ({"method": "csattention", "num_subspaces": "8"}, TypeError, r"num_subspaces as int, got '8' \(str\)"),
        ({"method": "csattention", "num_subspaces": True}, TypeError, "as int, got True"),
        ({"method": "csattention", "num_subspaces": 8.0}, TypeError, "as int, got 8.0"),
        ({"method": "csattention", "list_ratio": "a"}, TypeError, "list_ratio as float"),
        ({"method": "csattention", "list_ratio": float("nan")}, ValueError, "finite"),
        ({"method": "csattention", "list_ratio": 0}, ValueError, "above 0"),
        ({"method": "csattention", "list_ratio": 1.5}, ValueError, "at most 1"),
        ({"method": "csattention", "num_subspaces": 0}, ValueError, "num_subspaces in 1.."),
        ({"method": "csattention", "num_centroids": 0}, ValueError, "num_centroids in 1.."),
        ({"method": "csattention", "iterations": -1}, ValueError, "iterations in 0.."),
        ({"method": "csattention", "max_samples": 0}, ValueError, "max_samples in 1.."),
        ({"method": "csattention", "seed": -1}, ValueError, "seed in 0.."),
        ({"method": "csattention", "baseline": "x"}, ValueError, "tail_mean, none"),
        ({"method": "csattention", "score_bits": 2}, ValueError, "score_bits to be one of 4, 8, got 2"),
        ({"method": "token_index", "bits": 3}, ValueError, "2, 4, 8, got 3"),
        ({"method": "token_index", "num_channels": 6, "bits": 2}, ValueError, "multiple of 4"),
        ({"method": "token_index", "num_channels": -2}, ValueError, "num_channels in 0.."),
        ({"method": "token_index", "channel_ratio": 0.0}, ValueError, "channel_ratio above 0 and at most 1, got 0.0"),
        ({"method": "token_index", "channel_ratio": 1.5}, ValueError, "channel_ratio above 0 and at most 1, got 1.5"),
        (
            {"method": "token_index", "channel_ratio": 0.25, "num_channels": 8},
            ValueError,
            r"or token_index.channel_ratio, got both \(8 and 0.25\); remove one",
        ),
        ({"method": "ab_sparse", "num_channels": 3}, ValueError, r"ab_sparse.num_channels to be a multiple of 2"),
        ({"method": "ab_sparse", "num_channels": 6, "quantization": "int2"}, ValueError, "multiple of 4"),
        ({"method": "ab_sparse", "channel_ratio": 0}, ValueError, "ab_sparse.channel_ratio above 0 and at most 1"),
        ({"method": "ab_sparse", "channel_ratio": 0.5, "num_channels": 8}, ValueError, r"got both \(8 and 0.5\)"),
        ({"method": "two_level", "candidate_factor": 0.9}, ValueError, "of at least 1, got 0.9; .*among the candid"),
        ({"method": "two_level", "candidate_ratio": 0}, ValueError, "candidate_ratio above 0"),
        ({"method": "two_level", "first": "exact"}, TypeError, "two_level.first as an object"),
        ({"method": "two_level", "first": {"method": "x"}}, ValueError, "two_level.first: expected method"),
        ({"method": "union", "second": {"method": "exact", "k": 1}}, ValueError, "union.second: unknown parameter 'k'"),
        ({"method": "ab_sparse", "sizes": "x"}, ValueError, "uniform, profile"),
        ({"method": "ab_sparse", "block_size": 24}, ValueError, "16, 32, 64 tokens, got 24"),
        ({"method": "ab_sparse", "representation": "x"}, ValueError, "mean, minmax, ball"),
        ({"method": "ab_sparse", "quantization": "x"}, ValueError, "int2, int4, int8, none"),
    ],
)
def test_spec_errors(data, error, message):
    with pytest.raises(error, match=message):
        parse_spec(data)


def test_channels_of_blocks_are_named_where_they_are_not_the_default():
    """Indexes that were built when blocks had no channels to choose keep their identity."""
    assert parse_spec({"method": "ab_sparse"}).to_dict() == {
        "method": "ab_sparse",
        "block_size": 16,
        "sizes": "uniform",
        "representation": "mean",
        "quantization": "int4",
    }
    for named in ({"num_channels": 32}, {"channel_ratio": 0.5}):
        spec = parse_spec({"method": "ab_sparse", **named})
        assert named.items() <= spec.to_dict().items()
        assert parse_spec(json.loads(json.dumps(spec.to_dict()))) == spec


def test_specs_nest():
    data = {
        "method": "two_level",
        "first": {"method": "union", "first": {"method": "ab_sparse", "block_size": 32}},
        "candidate_ratio": 1,
    }
    spec = parse_spec(data)
    assert spec.first.first.block_size == 32
    assert spec.first.second == parse_spec({"method": "ab_sparse"})
    assert spec.candidate_ratio == 1.0
    assert parse_spec(json.loads(json.dumps(spec.to_dict()))) == spec
    assert METHODS["union"].spec(first=spec.first) == parse_spec({"method": "union", "first": spec.first})


def test_spec_of_another_method():
    with pytest.raises(ValueError, match="expected parameters of method 'exact', got those of 'ab_sparse'"):
        METHODS["exact"].spec.from_dict({"method": "ab_sparse"})
    with pytest.raises(TypeError, match="expected an object of exact parameters"):
        METHODS["exact"].spec.from_dict([])


def test_default_plan():
    plan = LayerPlan.default(4, 2)
    assert plan == LayerPlan.from_dict({}, num_layers=4, num_kv_heads=2)
    assert plan.dense_layers == (0,)
    assert plan.anchor_layers == (1, 2, 3)
    assert len(plan) == 4
    assert plan[0].mode is LayerMode.DENSE


def test_plan_round_trip():
    data = {"layers": ["dense", "anchor", {"reuse": 1, "head_map": [1, 1]}, {"reuse": 1}, "anchor"]}
    plan = LayerPlan.from_dict(data, num_layers=5, num_kv_heads=2)
    assert plan[2] == LayerRole(LayerMode.REUSE, 1, (1, 1))
    assert plan[3].head_map == (0, 1)
    written = json.loads(json.dumps(plan.to_dict()))
    assert LayerPlan.from_dict(written, num_layers=5, num_kv_heads=2) == plan


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ("dense", TypeError, "list of 3 entries"),
        (["dense"], ValueError, "expected 3 layers"),
        (["dense", "anchor", "sparse"], ValueError, "layer 2: .*got 'sparse'"),
        (["dense", "anchor", "reuse"], ValueError, "layer 2: .*got 'reuse'"),
        (["dense", "anchor", 1], TypeError, "layer 2: .*got int"),
        (["dense", "anchor", {"anchor": 1}], ValueError, "keys reuse and head_map, got anchor"),
        (["dense", "anchor", {"reuse": 1, "map": []}], ValueError, "got map, reuse"),
        (["dense", "anchor", {"reuse": "1"}], TypeError, "layer number, got '1'"),
        (["dense", "anchor", {"reuse": True}], TypeError, "layer number, got True"),
        (["dense", "anchor", {"reuse": 2}], ValueError, r"earlier layer \(0..1\), got 2"),
        (["dense", "anchor", {"reuse": -1}], ValueError, "earlier layer"),
        (["dense", "anchor", {"reuse": 0}], ValueError, "layer 0, which is dense"),
        (["anchor", {"reuse": 0}, {"reuse": 1}], ValueError, "layer 1, which is reuse"),
        (["dense", "anchor", {"reuse": 1, "head_map": [0]}], ValueError, "2 KV heads, got 1"),
        (["dense", "anchor", {"reuse": 1, "head_map": [0, 2]}], ValueError, r"entries in 0..1, got 2"),
        (["dense", "anchor", {"reuse": 1, "head_map": [0, "1"]}], TypeError, "list of KV head numbers"),
    ],
)
def test_plan_errors(layers, error, message):
    with pytest.raises(error, match=message):
        LayerPlan.from_dict({"layers": layers}, num_layers=3, num_kv_heads=2)


def test_plan_object_errors():
    with pytest.raises(TypeError, match="layer plan like"):
        LayerPlan.from_dict([], num_layers=1, num_kv_heads=1)
    with pytest.raises(ValueError, match="unknown key 'default'"):
        LayerPlan.from_dict({"default": "anchor"}, num_layers=1, num_kv_heads=1)
