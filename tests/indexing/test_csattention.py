"""CSAttention's build against brute force, k-means on degenerate input, layouts."""

import pytest
import torch

from sglang_ext.indexing import make_builder, parse_spec
from sglang_ext.indexing.csattention import CSAttentionSpec, subspace_channels
from sglang_ext.indexing.kmeans import cosine_kmeans


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build(keys, samples, **parameters):
    return make_builder(CSAttentionSpec(**{"codec": "paper", "num_subspaces": 8, **parameters})).build_layer(
        keys, samples
    )


@pytest.mark.parametrize("layout", ["contiguous", "rope_pairs", "strided"])
@pytest.mark.parametrize("chunk", [1 << 26, 1])
def test_lists_hold_the_best_keys_of_each_centroid(layout, chunk, monkeypatch):
    monkeypatch.setattr("sglang_ext.indexing.csattention.SCORES_PER_CHUNK", chunk)
    keys, samples = randn(101, 2, 16), randn(2, 60, 16, seed=1)
    arrays = build(keys, samples, num_subspaces=4, num_centroids=5, list_ratio=0.1, layout=layout, baseline="none")
    centered = build(keys, samples, num_subspaces=4, num_centroids=5, list_ratio=0.1, layout=layout)
    channels = subspace_channels(16, 4, layout)
    assert arrays["positions"].shape == (2, 4, 5, 11)
    for head in range(2):
        for b in range(4):
            partial = arrays["centroids"][head, b].float() @ keys[:, head, channels[b]].T
            best = partial.topk(11)
            order = arrays["scores"][head, b].argsort(descending=True)
            got = arrays["positions"][head, b].gather(1, order).sort().values
            assert torch.equal(got.long(), best.indices.sort().values)
            torch.testing.assert_close(
                arrays["scores"][head, b].gather(1, order).float(), best.values, atol=2e-3, rtol=2e-3
            )
            tail = (partial.sum(1) - best.values.sum(1)) / (101 - 11)
            torch.testing.assert_close(
                centered["scores"][head, b].sort(descending=True).values.float(),
                best.values - tail[:, None],
                atol=4e-3,
                rtol=4e-3,
            )


def test_full_lists_of_exact_centroids_give_exact_scores():
    """With every query direction a centroid and every key listed, CSA is exact up to fp16."""
    from prefix_kernels.ops import csa_scores

    keys, samples = randn(33, 1, 16), randn(1, 6, 16, seed=1)
    arrays = build(keys, samples, num_subspaces=4, num_centroids=6, list_ratio=1.0)
    q = samples.transpose(0, 1).contiguous()
    channels = subspace_channels(16, 4, "contiguous")
    scores = csa_scores(q, arrays["centroids"], arrays["positions"], arrays["scores"], channels, 33)
    torch.testing.assert_close(scores[0, :, 0], q[:, 0] @ keys[:, 0].T, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("layout", ["contiguous", "rope_pairs", "strided"])
def test_layouts_partition_the_channels(layout):
    channels = subspace_channels(64, 8, layout)
    assert channels.shape == (8, 8)
    assert channels.flatten().sort().values.tolist() == list(range(64))
    if layout == "rope_pairs":
        for row in channels.tolist():
            assert {(c + 32) % 64 for c in row} == set(row)
    with pytest.raises(ValueError, match="lower num_subspaces"):
        subspace_channels(64, 7, layout)


def test_list_len_is_a_ceiling():
    spec = CSAttentionSpec(list_ratio=0.1)
    assert [spec.list_len(n) for n in (1, 10, 11, 8192, 30)] == [1, 1, 2, 820, 3]
    assert CSAttentionSpec(list_ratio=1.0).list_len(7) == 7


def test_seed_decides():
    keys, samples = randn(200, 2, 16), randn(2, 300, 16, seed=1)
    first, again = (build(keys, samples, seed=3, max_samples=100) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], again[name])
    other = build(keys, samples, seed=4, max_samples=100)
    assert not torch.equal(first["centroids"], other["centroids"])


def test_kmeans_finds_planted_directions():
    centers = torch.nn.functional.normalize(randn(4, 12, 32), dim=-1)
    label = torch.randint(12, (4, 600), generator=torch.Generator().manual_seed(1))
    points = centers.gather(1, label[..., None].expand(-1, -1, 32)) * (1 + randn(4, 600, 1, seed=2).abs())
    found = cosine_kmeans(points + 0.02 * randn(4, 600, 32, seed=3), 12)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(4, 12))
    assert bool(((centers @ found.transpose(1, 2)).amax(-1) > 0.99).all())


@pytest.mark.parametrize(
    "points",
    [
        randn(2, 3, 4),
        torch.ones(2, 20, 4),
        torch.zeros(2, 20, 4),
        torch.cat([torch.zeros(1, 19, 4), randn(1, 1, 4)], dim=1),
        torch.tensor([1.0, -1.0]).repeat(10)[None, :, None].expand(1, 20, 4),
        1e-30 * randn(1, 20, 4),
        1e15 * randn(1, 20, 4),
    ],
    ids=["few", "equal", "zero", "one-direction", "opposite", "tiny", "huge"],
)
def test_kmeans_on_degenerate_points(points):
    found = cosine_kmeans(points, 8)
    assert found.shape == (points.shape[0], 8, 4)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(found.shape[:2]))
    unit = torch.nn.functional.normalize(points.double(), dim=-1, eps=1e-300).float()
    served = (unit @ found.transpose(1, 2)).amax(-1)
    if unit[0].unique(dim=0).shape[0] <= 8:
        torch.testing.assert_close(served, (unit.norm(dim=-1) > 0).float())


def test_kmeans_splits_what_seeding_missed():
    """An empty cluster moves to a point that is served badly."""
    points = torch.eye(8)[None].repeat(1, 5, 1)
    for seed in range(20):
        found = cosine_kmeans(points, 8, seed=seed)
        assert bool(((points @ found.transpose(1, 2)).amax(-1) > 0.999).all())


def test_kmeans_errors():
    with pytest.raises(ValueError, match="num_points >= 1"):
        cosine_kmeans(torch.zeros(2, 0, 4), 3)
    with pytest.raises(ValueError, match="num_centroids >= 1"):
        cosine_kmeans(torch.zeros(2, 3, 4), 0)


def test_constant_keys_and_fewer_queries_than_centroids():
    arrays = build(torch.ones(40, 2, 16), randn(2, 3, 16), num_centroids=64)
    assert parse_spec({"method": "csattention"}).list_len(40) == arrays["positions"].shape[3]
    for lists in arrays["positions"].flatten(0, 2):
        assert lists.tolist() == list(range(lists.numel()))  # ties: the first positions
