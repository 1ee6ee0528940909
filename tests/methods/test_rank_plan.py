"""Plans and profiles cut for tensor-parallel ranks, and what builders take from a profile."""

import msgspec
import pytest
import torch

from sglang_ext.methods import LayerPlan, make_builder, parse_spec
from sglang_ext.methods.base import NO_PROFILE
from sglang_ext.methods.layer_plan import heads_of_rank
from sglang_ext.methods.profile import Profile, layer_profile, used_by_builders

PROFILE = msgspec.convert(
    {
        "model": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "config_digest": "a"},
        "block_sizes": [[16, 64], [32, 32]],
        "layer_plan": {},
        "channels": [[[0, 3], [1, 7]], [[2, 4], [5, 6]]],
        "dense_heads": [[], [1]],
        "recommended": {"method": "exact", "spec": {}, "keep_ratio": 0.1},
        "calibration": {"prompts": 1, "tokens": 1, "seed": 0},
    },
    Profile,
)


@pytest.mark.parametrize(
    ("num_kv_heads", "size", "expected"),
    [
        (8, 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 3, [[0], [0], [0]]),
    ],
)
def test_heads_are_dealt_out_in_runs_and_shared_where_ranks_are_more(num_kv_heads, size, expected):
    assert [list(heads_of_rank(num_kv_heads, rank, size)) for rank in range(size)] == expected


def test_ranks_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(ValueError, match="one number divides the other, got 8 and 3"):
        heads_of_rank(8, 0, 3)


def test_a_rank_has_its_own_heads_with_maps_numbered_within_it():
    roles = ["dense", "anchor", {"reuse": 1, "head_map": [1, 1, 2, 2]}]
    plan = LayerPlan.from_dict({"layers": roles}, num_layers=3, num_kv_heads=4)
    assert plan.for_rank(0, 1) == plan
    assert plan.for_rank(0, 2).to_dict() == {"layers": ["dense", "anchor", {"reuse": 1, "head_map": [1, 1]}]}
    assert plan.for_rank(1, 2).to_dict() == {"layers": ["dense", "anchor", {"reuse": 1, "head_map": [0, 0]}]}
    with pytest.raises(
        ValueError, match="layer 2: expected KV head 0 to reuse a selection of its own rank 0 of 4"
    ) as e:
        plan.for_rank(0, 4)
    assert "got KV head 1 of layer 1: ranks do not exchange selections" in str(e.value)


def test_a_layers_profile_is_cut_for_the_ranks_heads():
    assert layer_profile(None, 1) is NO_PROFILE
    whole = layer_profile(PROFILE, 0)
    assert (whole.block_sizes, whole.channels) == ((16, 64), ((0, 3), (1, 7)))
    second = layer_profile(PROFILE, 1, heads_of_rank(2, 1, 2))
    assert (second.block_sizes, second.channels) == ((32,), ((5, 6),))
    without = msgspec.structs.replace(PROFILE, channels=())
    assert layer_profile(without, 0).channels == ()


def _spec(method, **fields):
    return parse_spec({"method": method, **fields})


SIZED = {"method": "ab_sparse", "sizes": "profile"}
SOME = {"method": "token_index", "num_channels": 2}


@pytest.mark.parametrize(
    ("spec", "used"),
    [
        (_spec("exact"), set()),
        (_spec("ab_sparse"), set()),
        (_spec("ab_sparse", sizes="profile"), {"block_sizes"}),
        (_spec("token_index"), set()),
        (_spec("token_index", num_channels=2), {"channels"}),
        (_spec("two_level"), set()),
        (_spec("two_level", first=SIZED, second=SOME), {"block_sizes", "channels"}),
        (_spec("union", first={"method": "two_level", "first": SIZED}), {"block_sizes"}),
    ],
)
def test_only_what_a_builder_reads_counts(spec, used):
    assert set(used_by_builders([spec], PROFILE)) == used
    # And it is what the builder reads: with another profile it builds other arrays, exactly then.
    changed = msgspec.structs.replace(
        PROFILE, block_sizes=((32, 16), (16, 16)), channels=(((1, 2), (3, 4)), ((0, 1), (0, 1)))
    )
    gen = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(128, 2, 8, generator=gen), torch.randn(2, 32, 8, generator=gen)
    one, two = (make_builder(spec, layer_profile(p, 0)).build_layer(keys, queries) for p in (PROFILE, changed))
    same = one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert same == (not used)
