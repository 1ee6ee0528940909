"""Two-level selection and union against sets built by hand from the parts' own selections."""

import math

import pytest
import torch

from prefix_kernels.top_k_selection import LOWEST_LOG, NUM_KEYS, keys_of
from prefix_kernels.types import SelectionGroup
from sglang_ext.methods import SelectArgs, make_builder, make_selector, parse_spec
from sglang_ext.methods.base import LayerProfile
from tests.methods.common import randn, scores, select

PARTS = [
    {"method": "csattention", "num_subspaces": 4, "num_centroids": 8, "list_ratio": 0.05},
    {"method": "ab_sparse", "block_size": 16},
    {"method": "ab_sparse", "sizes": "profile"},
    {"method": "token_index", "num_channels": 8},
    {"method": "exact"},
]
#: In another order: the few pairs that run by day are of two different methods.
OTHERS = [*PARTS[1:], PARTS[0]]
STEP = -LOWEST_LOG / (NUM_KEYS - 3)
"""Of a key."""
LAYER = LayerProfile(block_sizes=(32, 16))


def name_of(value):
    return value.get("sizes", value["method"]) if isinstance(value, dict) else str(value)


KEYS, SAMPLES, Q = randn(300, 2, 16), randn(2, 90, 16, seed=1), randn(3, 8, 16, seed=2)


def built(data):
    spec = parse_spec(data)
    return spec, make_builder(spec, LAYER).build_layer(KEYS, SAMPLES)


def choose(data, budget=40):
    chosen = select(*built(data), Q, 300, budget, num_sink=3, sm_scale=0.3)
    return [set(row.tolist()) for row in chosen.positions]


WINDOWS = set(range(3)) | set(range(295, 300))


def named_by(first, count):
    """Candidates of each KV head. Blocks name 16 tokens that follow each other, whole, those with windows first: among
    them is the last one, which lacks 4."""
    if first["method"] != "ab_sparse":
        return choose(first, budget=count)
    keys = keys_of(scores(*built(first), Q, 300)[:, ::16])
    keys[:, [0, 18]] = NUM_KEYS
    wanted = math.ceil((count + 4) / 16)
    best = [sorted(range(19), key=lambda run, own=own: (own[run], run))[-wanted:] for own in keys.tolist()]
    return [{token for run in runs for token in range(16 * run, min(300, 16 * run + 16))} for runs in best]


@pytest.mark.parametrize("second", OTHERS, ids=name_of)
@pytest.mark.parametrize("first", PARTS, ids=name_of)
@pytest.mark.parametrize("ratio", [0.05, 0.3, 1.0])
def test_two_levels_by_hand(first, second, ratio):
    data = {"method": "two_level", "first": first, "second": second, "candidate_ratio": ratio, "candidate_factor": 2}
    got = choose(data)
    count = max(40 * 2, round(300 * ratio))
    candidates = named_by(first, count)
    mask = torch.zeros(2, 300, dtype=torch.bool)
    for head, allowed in enumerate(candidates):
        mask[head, sorted(allowed)] = True
    ranked = scores(*built(second), Q, 300, mask)
    for head, allowed in enumerate(candidates):
        assert WINDOWS <= got[head] <= allowed
        assert len(got[head]) == 40
        inside = [float(ranked[head, p]) for p in got[head] - WINDOWS]
        outside = [float(ranked[head, p]) for p in allowed - got[head] - WINDOWS]
        assert not outside or max(min(inside), LOWEST_LOG) >= max(outside) - STEP


@pytest.mark.parametrize("second", OTHERS, ids=name_of)
@pytest.mark.parametrize("first", PARTS, ids=name_of)
@pytest.mark.parametrize("budget", [8, 40, 41, 250, 300])
def test_union_by_hand(first, second, budget):
    """A position comes at the smaller one of its depths in the two lists, in which windows are not counted."""
    got = choose({"method": "union", "first": first, "second": second}, budget=budget)
    depths = torch.full((2, 300), 1e9)
    for part in (first, second):
        keys = keys_of(scores(*built(part), Q, 300))
        for head in range(2):
            for p in set(range(300)) - WINDOWS:
                if keys[head, p]:
                    deeper = {int(q) for q in (keys[head] >= keys[head, p]).nonzero()} - WINDOWS
                    depths[head, p] = min(depths[head, p], len(deeper))
    for head in range(2):
        assert len(got[head]) == budget
        assert got[head] >= WINDOWS
        inside = [float(depths[head, p]) for p in got[head] - WINDOWS]
        outside = [float(depths[head, p]) for p in set(range(300)) - got[head]]
        assert not outside or not inside or max(inside) <= min(outside) * math.exp(STEP)


def test_candidates_alone_are_summed_one_in_so_many():
    """By each KV head's own list of them, in its order."""
    data = {"method": "two_level", "first": {"method": "ab_sparse"}, "second": {"method": "token_index"}}
    spec, length = parse_spec({**data, "candidate_ratio": 0.5}), 9000
    arrays = make_builder(spec).build_layer(randn(length, 2, 16), SAMPLES)
    args = SelectArgs(prefix_len=length, budget=40, sm_scale=0.3)
    second = {name.removeprefix("second."): array for name, array in arrays.items() if name.startswith("second")}
    found = []
    for sum_every in (1, 16):
        selector = make_selector(spec, sum_every)
        found.append(selector.token_scores(arrays, Q, args))
        for head, allowed in enumerate(found[-1] > -torch.inf):
            assert int(allowed.sum()) == 282 * 16 - 8, "half of them, in whole entries, the last one of 8"
            own = {name: array[head : head + 1] for name, array in second.items()}
            listed = {**own, "keys_packed": own["keys_packed"][:, allowed]}
            alone = make_selector(spec.second, sum_every)
            wanted = alone.token_scores(listed, Q[:, 4 * head : 4 * head + 4], args)[0]
            torch.testing.assert_close(found[-1][head, allowed], wanted)
    assert bool((found[0] - found[1] > 1).any()), "a sample's shares are lowered"


@pytest.mark.parametrize(
    ("budget", "expected"), [(0, 75), (18, 75), (19, 76), (50, 200), (75, 300), (300, 300)], ids=str
)
def test_candidates_grow_with_the_budget(budget, expected):
    assert parse_spec({"method": "two_level"}).num_candidates(300, budget) == expected


@pytest.mark.parametrize("windows", [(0, 0), (4, 16)])
@pytest.mark.parametrize("length", [15, 16, 17, 1009, 1025])
def test_the_first_level_names_a_budget_of_tokens_whatever_the_last_block_lacks(length, windows):
    spec = parse_spec({"method": "two_level", "candidate_ratio": 0.01, "candidate_factor": 1.0})
    for budget in {sum(windows) + 1, min(64, length), length}:
        group = SelectionGroup(length, min(budget, length), *(min(one, length // 4) for one in windows))
        assert group.count <= spec.tokens_of(spec.first_level(group), length) <= length
