"""CSAttention's lists and search against brute force, bytes, recall."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_kernels.csa_scores import CompactLists, decode_lists
from sglang_ext.methods import make_builder
from sglang_ext.methods.csattention import CSAttentionSpec
from sglang_ext.methods.csattention.lists import centroid_lists, top_lists
from tests.examples import examples
from tests.methods.common import randn, scores, select
from tests.prefix_kernels.test_compact_lists import by_loop


def build(keys, samples, **parameters):
    spec = CSAttentionSpec(**{"num_subspaces": 8, **parameters})
    return make_builder(spec).build_layer(keys, samples)


def lists_of(arrays, spec, prefix_len):
    """Positions and scores."""
    compact = CompactLists(*(arrays[name] for name in CompactLists._fields))
    return decode_lists(compact, spec.list_len(prefix_len), spec.score_bits)


@pytest.mark.parametrize("chunk", [1 << 26, 1])
def test_lists_hold_the_best_keys_of_each_centroid(chunk, monkeypatch):
    monkeypatch.setattr("sglang_ext.methods.csattention.lists.SCORES_PER_CHUNK", chunk)
    keys, units = randn(101, 2, 16), torch.nn.functional.normalize(randn(2, 4, 5, 4, seed=1), dim=-1)
    plain, centered = (centroid_lists(units, keys, 11, tail_mean, 5.0) for tail_mean in (False, True))
    assert not plain.baseline.any()
    for head in range(2):
        for b in range(4):
            partial = units[head, b] @ keys[:, head, 4 * b : 4 * b + 4].T
            positions = partial.topk(11).indices.sort().values
            best = partial.gather(1, positions)
            assert torch.equal(plain.positions[head, b].long(), positions)
            assert torch.equal(centered.positions[head, b].long(), positions)
            torch.testing.assert_close(plain.scores[head, b], best)
            tail = (partial.sum(1) - best.sum(1)) / (101 - 11)
            torch.testing.assert_close(centered.baseline[head, b], tail)
            torch.testing.assert_close(centered.scores[head, b], best - tail[:, None])


@pytest.mark.parametrize("baseline", ["tail_mean", "none"])
@pytest.mark.parametrize("bits", [4, 8])
def test_tables_hold_these_lists(bits, baseline):
    """The same positions; scores at most half a step of a list's span away."""
    keys, samples = randn(3000, 2, 16), randn(2, 300, 16, seed=1)
    spec = CSAttentionSpec(score_bits=bits, baseline=baseline)
    arrays = make_builder(spec).build_layer(keys, samples)
    lists = centroid_lists(arrays["centroids"], keys, spec.list_len(3000), baseline == "tail_mean", 10.0)
    positions, decoded = lists_of(arrays, spec, 3000)
    assert torch.equal(positions.int(), lists.positions)
    assert torch.equal(arrays["baseline"], lists.baseline)
    span = lists.scores.amax(-1) - lists.scores.amin(-1)
    error = (decoded - lists.scores).abs().amax(-1)
    assert bool((error <= 0.503 * span / (2**bits - 1) + 1e-6).all())


def test_list_len_is_a_ceiling():
    spec = CSAttentionSpec(list_ratio=0.1)
    assert [spec.list_len(n) for n in (1, 10, 11, 8192, 30)] == [1, 1, 2, 820, 3]
    assert CSAttentionSpec(list_ratio=1.0).list_len(7) == 7
    with pytest.raises(ValueError, match=r"multiple of csattention\.num_subspaces=7, got 64; lower num_subspaces"):
        CSAttentionSpec(num_subspaces=7).subspace_dim(64)


def test_seed_decides():
    keys, samples = randn(200, 2, 16), randn(2, 300, 16, seed=1)
    first, again = (build(keys, samples, seed=3, max_samples=100) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], again[name])
    other = build(keys, samples, seed=4, max_samples=100)
    assert not torch.equal(first["centroids"], other["centroids"])


@pytest.mark.parametrize("parameters", [{"list_ratio": 0.2}, {"list_ratio": 0.05, "score_bits": 8}], ids=str)
def test_probabilities_are_the_softmax_of_the_sums(parameters):
    """Of one query head per KV head; the sums themselves: tests/prefix_kernels/test_compact_lists.py."""
    spec = CSAttentionSpec(num_subspaces=4, num_centroids=6, **parameters)
    keys, samples, q = randn(77, 2, 16), randn(2, 60, 16, seed=1), randn(1, 2, 16, seed=2)
    arrays = make_builder(spec).build_layer(keys, samples)
    sums = by_loop(q, arrays["centroids"], *lists_of(arrays, spec, 77), 77)[:, 0, 0]
    assert bool(sums.isinf().any())
    wanted = (0.3 * sums).log_softmax(1)
    torch.testing.assert_close(scores(spec, arrays, q, 77).double(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("prefix_len", [1, 16, 1009])
@pytest.mark.parametrize("kind", ["random", "constant", "zero", "one-sample"])
def test_degenerate_inputs_make_finite_tables(kind, prefix_len):
    """One page, a prime length, keys or queries without any difference between them."""
    keys, samples = randn(prefix_len, 2, 16), randn(2, 40, 16, seed=1)
    if kind in ("constant", "zero"):
        keys, samples = torch.full_like(keys, 1.5 * (kind == "constant")), torch.zeros_like(samples)
    if kind == "one-sample":
        samples = samples[:, :1]
    spec = CSAttentionSpec(num_subspaces=4)
    arrays = make_builder(spec).build_layer(keys, samples)
    for array in arrays.values():
        assert bool(array.isfinite().all())
    chosen = select(spec, arrays, randn(2, 4, 16, seed=2), prefix_len, 8, 1, 1)
    assert chosen.counts.tolist() == [min(8, prefix_len)] * 2


def test_large_keys_fit_as_long_as_their_scores_do():
    """The bound that spares the check is not the limit itself."""
    samples = randn(2, 30, 16)
    arrays = build(torch.full((40, 2, 16), 40000.0), samples, baseline="none")
    assert bool(arrays["centroids"].isfinite().all())
    for scale in (1e6, 1e30):
        with pytest.raises(ValueError, match="more than fp16 holds"):
            build(scale * randn(40, 2, 16), samples)


def test_the_default_is_small():
    """At most 13% of the keys and values from 4,096 tokens on."""
    keys = randn(4096, 1, 64)
    arrays = make_builder(CSAttentionSpec()).build_layer(keys, randn(1, 40, 64, seed=1))
    assert sum(array.nbytes for array in arrays.values()) <= 0.13 * 2 * keys.half().nbytes


@settings(max_examples=examples(200, 30))
@given(
    st.integers(1, 3000),
    st.floats(0, 1),
    st.sampled_from(
        ["normal", "few", "constant", "huge", "tiny", "zeros", "skew", "rising", "falling", "spikes", "half"]
    ),
    st.integers(0, 2**31),
)
def test_top_lists_are_those_of_a_stable_sort(n, ratio, kind, seed):
    values = torch.randn(3, 2, n, generator=torch.Generator().manual_seed(seed))
    rising = torch.arange(n).float().expand(3, 2, n)
    values = {
        "normal": values,
        "few": (values * 2).round(),
        "constant": torch.full_like(values, -1.5),
        "huge": values * 1e38,
        "tiny": values * 1e-40,
        "zeros": torch.where(values > 0, 0.0, -0.0),
        "skew": values.exp() ** 5,
        "rising": rising,
        "falling": -rising,
        "spikes": torch.where(rising % 100 == 1, rising, 0.0),
        "half": values.half(),
    }[kind]
    list_len = max(1, int(ratio * n))
    positions, best = top_lists(values, list_len)
    order = values.argsort(dim=-1, descending=True, stable=True)[..., :list_len].sort(dim=-1).values
    assert positions.dtype == torch.int32
    assert torch.equal(positions, order.int())
    assert torch.equal(best, values.gather(-1, order))
