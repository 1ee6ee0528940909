"""Specs and layer plans: round trips, and a message for every rule."""

import itertools
import json

import pytest

from sglang_ext.methods import METHODS, LayerMode, LayerPlan, LayerRole, make_builder, make_selector, parse_spec


def needs_queries(**data):
    return make_builder(parse_spec(data)).needs_queries(64)


def test_a_method_made_of_others_needs_queries_where_one_of_them_does():
    parts = {False: {"method": "token_index", "channel_ratio": 1.0}, True: {"method": "token_index"}}
    for first, second in itertools.product(parts, parts):
        assert needs_queries(method="union", first=parts[first], second=parts[second]) == (first or second)


@pytest.mark.parametrize("name", METHODS)
def test_registry_and_round_trip(name):
    spec = parse_spec({"method": name})
    assert parse_spec(json.loads(json.dumps(spec.to_dict()))) == spec
    assert METHODS[name].spec.from_dict({}) == spec
    assert make_builder(spec).spec == spec
    assert needs_queries(method=name) == (name in ("csattention", "token_index", "two_level", "union"))
    assert hasattr(make_selector(spec), "select")


#: (words of the message, method, parameters that are refused with them, one by one).
REFUSED = [
    ("unknown parameter", "exact", {"budget": 3}),
    ("expected one of: num_subspaces", "csattention", {"m": 3}),
    (r"num_subspaces as int, got .* \((str|bool|float)\)", "csattention", {"num_subspaces": ("8", True, 8.0)}),
    ("list_ratio as float", "csattention", {"list_ratio": "a"}),
    ("to be finite", "csattention", {"list_ratio": float("nan")}),
    ("above 0 and at most 1", "csattention", {"list_ratio": (0, 1.5)}),
    (
        "in [01]..",
        "csattention",
        {"num_subspaces": 0, "num_centroids": 0, "max_samples": 0, "iterations": -1, "seed": -1},
    ),
    ("to be one of (tail_mean, none|4, 8)", "csattention", {"baseline": "x", "score_bits": 2}),
    ("in 0..", "token_index", {"num_channels": -2}),
    ("2, 4, 8, got 3", "token_index", {"bits": 3}),
    ("above 0 and at most 1, got", "token_index", {"channel_ratio": (0.0, 1.5)}),
    ("multiple of 2", "ab_sparse", {"num_channels": 3}),
    ("to be one of .*, got", "ab_sparse", {"sizes": "x", "block_size": 24, "representation": "x", "quantization": "x"}),
    ("of at least 1, got 0.9; .*among the candid", "two_level", {"candidate_factor": 0.9}),
    ("candidate_ratio above 0", "two_level", {"candidate_ratio": 0}),
    ("two_level.first as an object", "two_level", {"first": "exact"}),
    ("two_level.first: expected method", "two_level", {"first": {"method": "x"}}),
    ("union.second: unknown parameter 'k'", "union", {"second": {"method": "exact", "k": 1}}),
]


@pytest.mark.parametrize(("message", "method", "refused"), REFUSED, ids=str)
def test_spec_errors(message, method, refused):
    for name, values in refused.items():
        for value in values if isinstance(values, tuple) else (values,):
            with pytest.raises((TypeError, ValueError), match=message):
                parse_spec({"method": method, name: value})


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], TypeError, "expected an object"),
        ({}, ValueError, "one of csattention, ab_sparse, token_index, two_level, union, exact, got None"),
        ({"method": ["exact"]}, ValueError, "one of csattention"),
        ({"method": "token_index", "num_channels": 6, "bits": 2}, ValueError, "multiple of 4"),
        ({"method": "ab_sparse", "channel_ratio": 0.5, "num_channels": 8}, ValueError, r"both \(8 and 0.5\); remove"),
    ],
)
def test_errors_of_the_whole(data, error, message):
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
        assert named.items() <= parse_spec({"method": "ab_sparse", **named}).to_dict().items()


def test_specs_nest():
    data = {
        "method": "two_level",
        "first": {"method": "union", "first": {"method": "ab_sparse", "block_size": 32}},
        "candidate_ratio": 1,
    }
    spec = parse_spec(data)
    assert (spec.first.first.block_size, spec.candidate_ratio) == (32, 1.0)
    assert spec.first.second == parse_spec({"method": "ab_sparse"})
    assert parse_spec(json.loads(json.dumps(spec.to_dict()))) == spec
    assert METHODS["union"].spec(first=spec.first) == parse_spec({"method": "union", "first": spec.first})


def test_spec_of_another_method():
    with pytest.raises(ValueError, match="expected parameters of method 'exact', got those of 'ab_sparse'"):
        METHODS["exact"].spec.from_dict({"method": "ab_sparse"})
    with pytest.raises(TypeError, match="expected an object of exact parameters"):
        METHODS["exact"].spec.from_dict([])


def test_plan_round_trip():
    default = LayerPlan.from_dict({}, num_layers=4, num_kv_heads=2)
    assert (len(default), default.dense_layers, default.anchor_layers) == (4, (0,), (1, 2, 3))
    data = {"layers": ["dense", "anchor", {"reuse": 1, "head_map": [1, 1]}, {"reuse": 1}, "anchor"]}
    plan = LayerPlan.from_dict(data, num_layers=5, num_kv_heads=2)
    assert [role.mode for role in plan.layers[:2]] == [LayerMode.DENSE, LayerMode.ANCHOR]
    assert plan[2] == LayerRole(LayerMode.REUSE, 1, (1, 1))
    assert plan[3].head_map == (0, 1)
    written = json.loads(json.dumps(plan.to_dict()))
    assert LayerPlan.from_dict(written, num_layers=5, num_kv_heads=2) == plan


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ("dense", TypeError, "list of 3 entries"),
        (["dense"], ValueError, "expected 3 layers"),
        (["dense", "anchor", 1], TypeError, "layer 2: .*got int"),
        (["dense", "anchor", "reuse"], ValueError, "layer 2: .*got 'reuse'"),
        (["dense", "anchor", {"anchor": 1}], ValueError, "keys reuse and head_map, got anchor"),
        (["dense", "anchor", {"reuse": 1, "map": []}], ValueError, "got map, reuse"),
        (["dense", "anchor", {"reuse": True}], TypeError, "layer number, got True"),
        (["dense", "anchor", {"reuse": 2}], ValueError, r"earlier layer \(0..1\), got 2"),
        (["dense", "anchor", {"reuse": -1}], ValueError, "earlier layer"),
        (["dense", "anchor", {"reuse": 0}], ValueError, "layer 0, which is dense"),
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
