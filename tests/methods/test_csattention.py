"""CSAttention's build and search against brute force in numpy, degenerate inputs."""

import numpy as np
import pytest
import torch

from prefix_kernels.csa_scores import csa_scores
from sglang_ext.methods import make_builder
from sglang_ext.methods.csattention import CSAttentionSpec
from tests.methods.common import randn, scores, select


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
