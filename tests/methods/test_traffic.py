"""Bytes stored and read, against arithmetic by hand on the methods' own layouts."""

import pytest

from sglang_ext.methods import make_builder, parse_spec
from sglang_ext.methods.arrays import kv_bytes, num_heads, stored_bytes
from sglang_ext.methods.base import LayerProfile
from tests.methods.common import randn

N, HEADS, DIM = 640, 2, 16
CHANNEL = DIM * 4 * 2
"""Scale and zero of all channels, fp32."""


KEYS, SAMPLES, Q = randn(N, HEADS, DIM), randn(HEADS, 50, DIM, seed=1), randn(3, HEADS * 2, DIM, seed=2)


LAYER = LayerProfile(block_sizes=(16, 64))


def built(data):
    spec = parse_spec(data)
    return spec, make_builder(spec, LAYER).build_layer(KEYS, SAMPLES)


def read(data, budget=64):
    spec, arrays = built(data)
    return spec.read_bytes(arrays, Q, N, budget)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"method": "ab_sparse"}, 40 * 8 + CHANNEL),
        ({"method": "ab_sparse", "quantization": "none"}, 40 * DIM * 2),
        ({"method": "ab_sparse", "representation": "minmax", "block_size": 32}, 2 * (20 * 8 + CHANNEL)),
        ({"method": "ab_sparse", "representation": "ball"}, 40 * 8 + CHANNEL + 40 * 2),
        # Blocks of 16 in one head, of 64 in the other; row_indptr of 3 and block_sizes of 2 int32 for both.
        ({"method": "ab_sparse", "sizes": "profile"}, (40 * 8 + 10 * 8 + 2 * CHANNEL + 3 * 4 + 2 * 4) / 2),
        ({"method": "token_index"}, N * 6 + 12 * 4 * 2 + 12 * 2),
        ({"method": "token_index", "channel_ratio": 1.0}, N * 8 + CHANNEL + DIM * 2),
        ({"method": "token_index", "num_channels": 8, "bits": 2}, N * 2 + 8 * 4 * 2 + 8 * 2),
        ({"method": "exact"}, N * DIM * 4),
    ],
    ids=str,
)
def test_these_are_read_whole(data, expected):
    _, arrays = built(data)
    assert stored_bytes(arrays) == expected
    assert read(data) == expected
    assert num_heads(arrays) == HEADS


CSA = {"method": "csattention", "num_subspaces": 4, "num_centroids": 8, "list_ratio": 0.05}
CENTROIDS = 8 * DIM * 2
OFFSET_LIST = 32 + 3 * 2 + 16 + 4
"""32 entries of a byte, counts of three blocks of 256 positions, 4-bit scores, fp16 scale and zero."""


def lists_by_loops(arrays):
    """Different (subspace, centroid) pairs per KV head, mean."""
    count = 0
    for head in range(HEADS):
        wanted = set()
        for row in Q:
            for q in row[2 * head : 2 * head + 2]:
                for sub in range(4):
                    cosine = [float(q[4 * sub : 4 * sub + 4] @ c.float()) for c in arrays["centroids"][head, sub]]
                    wanted.add((sub, cosine.index(max(cosine))))
        count += len(wanted)
    return count / HEADS


def test_csattention_reads_each_wanted_list_once():
    spec, arrays = built(CSA)
    lists = lists_by_loops(arrays)
    assert 4 <= lists < 4 * 6
    assert spec.lists_read(arrays["centroids"], Q) == lists
    kept_for_inserts = 4 * 8 * 4 if "baseline" in arrays else 0
    assert stored_bytes(arrays) == 4 * 8 * OFFSET_LIST + CENTROIDS + kept_for_inserts
    assert read(CSA) == lists * OFFSET_LIST + CENTROIDS
    one = spec.read_bytes(arrays, Q[:1, [0, 0, 2, 2]], N, 64)
    assert one == 4 * OFFSET_LIST + CENTROIDS


def test_two_level_reads_the_first_whole_and_candidates_of_the_second():
    minmax = {"method": "ab_sparse", "representation": "minmax"}
    tokens = {"method": "token_index", "channel_ratio": 1.0}
    data = {"method": "two_level", "first": minmax, "second": tokens, "candidate_ratio": 0.25}
    growing, data = data, {**data, "candidate_factor": 1.0}
    first, rest = 2 * (40 * 8 + CHANNEL), CHANNEL + DIM * 2
    assert stored_bytes(built(data)[1]) == first + N * 8 + rest
    assert read(data) == first + 160 * 8 + rest
    assert read(data, budget=320) == first + 320 * 8 + rest
    assert read(growing, budget=50) == first + 200 * 8 + rest, "four candidates per token of the budget"
    # Lists and blocks cannot be read in part.
    nested = {**data, "first": {"method": "ab_sparse"}, "second": CSA}
    assert read(nested) == 40 * 8 + CHANNEL + read(CSA)
    ranked = {**data, "first": CSA, "second": {"method": "exact"}}
    assert read(ranked) == read(CSA) + 160 * DIM * 4


def test_what_does_not_fit_is_refused():
    spec, arrays = built(CSA)
    with pytest.raises(ValueError, match="expected query heads as a multiple of num_kv_heads=2, got 3"):
        spec.lists_read(arrays["centroids"], Q[:, :3])
    with pytest.raises(ValueError, match="pass all arrays"):
        num_heads({"ragged_mean": KEYS})
    assert stored_bytes({}) == 0.0
    assert kv_bytes(10, 16, 8) == 10 * 24 * 2
