"""CSAttention's lists, codec and search against brute force, bytes, recall beside the paper's layout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_kernels.csa_scores import csa_scores, decode_lists
from prefix_kernels.testing import PlantedConfig, planted_prefix
from sglang_ext.methods import make_builder
from sglang_ext.methods.csattention import CSAttentionSpec
from sglang_ext.methods.csattention.lists import compact_lists, top_lists
from tests.examples import examples
from tests.methods.common import randn, recall, scores, select


def build(keys, samples, **parameters):
    spec = CSAttentionSpec(**{"codec": "paper", "num_subspaces": 8, **parameters})
    return make_builder(spec).build_layer(keys, samples)


@pytest.mark.parametrize("chunk", [1 << 26, 1])
def test_lists_hold_the_best_keys_of_each_centroid(chunk, monkeypatch):
    monkeypatch.setattr("sglang_ext.methods.csattention.lists.SCORES_PER_CHUNK", chunk)
    keys, samples = randn(101, 2, 16), randn(2, 60, 16, seed=1)
    arrays = build(keys, samples, num_subspaces=4, num_centroids=5, list_ratio=0.1, baseline="none")
    centered = build(keys, samples, num_subspaces=4, num_centroids=5, list_ratio=0.1)
    channels = torch.arange(16).view(4, 4)
    assert arrays["positions"].shape == (2, 4, 5, 11)
    for head in range(2):
        for b in range(4):
            partial = arrays["centroids"][head, b].float() @ keys[:, head, channels[b]].T
            best = partial.topk(11)
            order = arrays["scores"][head, b].argsort(descending=True)
            got = arrays["positions"][head, b].gather(1, order).sort().values
            assert torch.equal(got.long(), best.indices.sort().values)
            listed = arrays["scores"][head, b].gather(1, order).float()
            torch.testing.assert_close(listed, best.values, atol=2e-3, rtol=2e-3)
            tail = (partial.sum(1) - best.values.sum(1)) / (101 - 11)
            less = centered["scores"][head, b].sort(descending=True).values.float()
            torch.testing.assert_close(less, best.values - tail[:, None], atol=4e-3, rtol=4e-3)


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


def by_hand(arrays, q, prefix_len):
    """3.3 (1)-(3) of the paper with numpy loops: nearest centroid per subspace, its list, the weighted sum."""
    named = {name: array.double().numpy() for name, array in arrays.items()}
    heads, m, _, _ = named["centroids"].shape
    channels = np.arange(q.shape[2]).reshape(m, -1)
    q, gqa = q.double().numpy(), q.shape[1] // heads
    scores = np.full((heads, q.shape[0], gqa, prefix_len), -np.inf)
    for head, row, part in np.ndindex(heads, q.shape[0], gqa):
        query = q[row, head * gqa + part]
        for b in range(m):
            cosine = [query[channels[b]] @ c / np.linalg.norm(query[channels[b]]) for c in named["centroids"][head, b]]
            nearest = int(np.argmax(cosine))
            weight = cosine[nearest] * np.linalg.norm(query[channels[b]])
            entries = zip(named["positions"][head, b, nearest], named["scores"][head, b, nearest], strict=True)
            for position, score in entries:
                at = (head, row, part, int(position))
                scores[at] = (0.0 if np.isinf(scores[at]) else scores[at]) + weight * score
    return scores


@pytest.mark.parametrize("chunk", [1 << 24, 1])
def test_search_is_that_of_the_paper(chunk, monkeypatch):
    monkeypatch.setattr("prefix_kernels.csa_scores.ELEMENTS_PER_CHUNK", chunk)
    spec = CSAttentionSpec(num_subspaces=4, num_centroids=6, list_ratio=0.2, codec="paper")
    keys, samples, q = randn(77, 2, 16), randn(2, 60, 16, seed=1), randn(2, 6, 16, seed=2)
    arrays = make_builder(spec).build_layer(keys, samples)
    expected = by_hand(arrays, q, 77)
    assert np.isinf(expected).any()
    assert np.isfinite(expected).any()
    channels = torch.arange(16).view(4, 4)
    got = csa_scores(q, arrays["centroids"], arrays["positions"], arrays["scores"], channels, 77)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-4, atol=1e-4)
    # One query head per KV head: its probabilities are the softmax of what was summed up.
    alone = scores(spec, arrays, q[:1, ::3], 77).double()
    top = 0.3 * torch.from_numpy(expected[:, 0, 0])
    torch.testing.assert_close(alone, top - top.logsumexp(1, keepdim=True), rtol=1e-3, atol=1e-3)


def test_heads_of_a_rank_get_the_centroids_of_the_whole():
    """Random numbers do not depend on how many heads there are."""
    builder = make_builder(CSAttentionSpec(num_subspaces=4))
    keys, queries = randn(100, 4, 16), randn(4, 70, 16, seed=1)
    whole, part = builder.build_layer(keys, queries), builder.build_layer(keys[:, 2:], queries[2:])
    for name, array in part.items():
        assert torch.equal(array, whole[name][2:])


@pytest.mark.parametrize("codec", ["paper", "compact"])
@pytest.mark.parametrize("prefix_len", [1, 16, 1009])
@pytest.mark.parametrize("kind", ["random", "constant", "zero", "one-sample"])
def test_degenerate_inputs_make_finite_tables(kind, prefix_len, codec):
    """One page, a prime length, keys or queries without any difference between them."""
    keys, samples = randn(prefix_len, 2, 16), randn(2, 40, 16, seed=1)
    if kind in ("constant", "zero"):
        keys, samples = torch.full_like(keys, 1.5 * (kind == "constant")), torch.zeros_like(samples)
    if kind == "one-sample":
        samples = samples[:, :1]
    spec = CSAttentionSpec(num_subspaces=4, codec=codec)
    arrays = make_builder(spec).build_layer(keys, samples)
    for array in arrays.values():
        assert bool(array.isfinite().all())
    chosen = select(spec, arrays, randn(2, 4, 16, seed=2), prefix_len, 8, 1, 1)
    assert chosen.counts.tolist() == [min(8, prefix_len)] * 2


def test_large_keys_fit_as_long_as_their_scores_do():
    """The bound that spares the check is not the limit itself."""
    samples = randn(2, 30, 16)
    for codec in ("paper", "compact"):
        arrays = build(torch.full((40, 2, 16), 40000.0), samples, codec=codec, baseline="none")
        assert bool(arrays["centroids"].isfinite().all())
        for scale in (1e6, 1e30):
            with pytest.raises(ValueError, match="more than fp16 holds"):
                build(scale * randn(40, 2, 16), samples, codec=codec)


def built_bytes(spec, keys, samples):
    return sum(array.nbytes for array in make_builder(spec).build_layer(keys, samples).values())


@pytest.mark.parametrize(("m", "c", "alpha"), [(8, 64, 0.2), (4, 16, 0.02), (16, 32, 0.4)])
def test_bytes_of_the_papers_tables(m, c, alpha):
    """Eq. B.1, 3 m C alpha / (2 d): bytes that 500 more tokens add to tables and to fp16 keys and values."""
    spec = CSAttentionSpec(num_subspaces=m, num_centroids=c, list_ratio=alpha, codec="paper", iterations=0)
    tables = [built_bytes(spec, randn(n, 1, 32), randn(1, 20, 32, seed=1)) for n in (500, 1000)]
    assert (tables[1] - tables[0]) / (500 * 32 * 2 * 2) == pytest.approx(3 * m * c * alpha / (2 * 32))


def test_the_default_is_small():
    """At most 13% of the keys and values from 4,096 tokens on."""
    keys = randn(4096, 1, 64)
    assert built_bytes(CSAttentionSpec(), keys, randn(1, 40, 64, seed=1)) <= 0.13 * 2 * keys.half().nbytes


def test_compact_tables_hold_the_paper_tables():
    """The same positions; scores at most half a step of a list's span away."""
    keys, samples = randn(3000, 2, 16), randn(2, 300, 16, seed=1)
    paper = make_builder(CSAttentionSpec(codec="paper")).build_layer(keys, samples)
    for bits in (4, 8):
        compact = make_builder(CSAttentionSpec(score_bits=bits)).build_layer(keys, samples)
        assert torch.equal(compact["centroids"], paper["centroids"])
        list_len = paper["positions"].shape[3]
        positions, decoded = decode_lists(compact_lists(compact), list_len, bits)
        assert torch.equal(positions.int(), paper["positions"])
        span = paper["scores"].float().amax(-1) - paper["scores"].float().amin(-1)
        error = (decoded - paper["scores"].float()).abs().amax(-1)
        rounding = 0.001 * paper["scores"].float().abs().amax(-1)  # of the paper's fp16
        assert bool((error <= 0.503 * span / (2**bits - 1) + rounding).all())


@pytest.mark.parametrize("rope_base", [0.0, 1e6], ids=["shift", "rope"])
@pytest.mark.parametrize(
    "parameters",
    [{}, {"num_subspaces": 8, "list_ratio": 0.2}, {"num_subspaces": 8, "num_centroids": 64, "list_ratio": 0.035}],
    ids=["default", "bitmap", "many-centroids"],
)
def test_recall_is_that_of_the_paper_layout(parameters, rope_base):
    planted = planted_prefix(PlantedConfig(prefix_len=4096, num_topics=16, rope_base=rope_base))
    paper, compact = (recall(CSAttentionSpec(codec=c, **parameters), planted, 204) for c in ("paper", "compact"))
    assert paper > 0.7
    assert abs(compact - paper) <= 0.01


def by_sort(values, list_len):
    order = values.argsort(dim=-1, descending=True, stable=True)[..., :list_len].sort(dim=-1).values
    return order.int(), values.gather(-1, order)


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
    expected, highest = by_sort(values, list_len)
    assert positions.dtype == torch.int32
    assert torch.equal(positions, expected)
    assert torch.equal(best, highest)


def test_top_lists_of_a_transposed_input_and_errors():
    values = torch.randn(500, 3, generator=torch.Generator().manual_seed(0)).T
    for list_len in (0, 501):
        with pytest.raises(ValueError, match=f"1\\.\\.500 .*got {list_len}"):
            top_lists(values, list_len)
    got, want = top_lists(values, 5), top_lists(values.contiguous(), 5)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
