"""Cosine k-means: planted directions, Lloyd's step by hand, batching, degenerate points."""

import itertools

import numpy as np
import pytest
import torch

from sglang_ext.methods.csattention.kmeans import _lloyd_step, cosine_kmeans
from tests.methods.common import randn


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


def lloyd_by_hand(points, centroids):
    """One iteration for one group, point by point."""
    total = np.zeros_like(centroids)
    for point in points / np.linalg.norm(points, axis=1, keepdims=True):
        total[int(np.argmax(centroids @ point))] += point
    return total / np.linalg.norm(total, axis=1, keepdims=True)


def test_iterations_are_those_of_lloyd():
    points = randn(3, 200, 6)
    found = [cosine_kmeans(points, 5, iterations=i).double().numpy() for i in range(4)]
    for group in range(3):
        for before, after in itertools.pairwise(found):
            expected = lloyd_by_hand(points[group].double().numpy(), before[group])
            np.testing.assert_allclose(after[group], expected, atol=1e-5)
    assert not np.allclose(found[2], found[3])


def test_groups_together_or_alone(monkeypatch):
    """Layers and heads in one call, each alone, and in chunks: the same centroids, bit for bit on the CPU."""
    points = randn(3, 2, 4, 150, 8)
    together = cosine_kmeans(points, 6)
    assert together.shape == (3, 2, 4, 6, 8)
    for layer in range(3):
        assert torch.equal(cosine_kmeans(points[layer], 6), together[layer])
        for head in range(2):
            assert torch.equal(cosine_kmeans(points[layer, head], 6), together[layer, head])
    monkeypatch.setattr("sglang_ext.methods.csattention.kmeans.BYTES_PER_CHUNK", 1)
    assert torch.equal(cosine_kmeans(points, 6), together)
    strided = points.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(cosine_kmeans(strided, 6), together)


def test_points_are_read_only_and_their_length_does_not_matter():
    points = randn(2, 3, 90, 4)
    before = points.clone()
    first = cosine_kmeans(points, 5)
    assert torch.equal(points, before)
    torch.testing.assert_close(cosine_kmeans(points * 2.0**40, 5), first)


def test_zero_points_change_nothing():
    """They are neither seeds nor members: the centroids serve the others as well as without them."""
    points = torch.nn.functional.normalize(randn(2, 6, 4), dim=-1).repeat_interleave(10, dim=1)
    mixed = torch.cat([torch.zeros(2, 50, 4), points, torch.zeros(2, 50, 4)], dim=1)
    served = (points @ cosine_kmeans(mixed, 6).transpose(1, 2)).amax(-1)
    torch.testing.assert_close(served, torch.ones_like(served))


@pytest.mark.parametrize("start", [[0, 0, 0, 0], [0, 1, 1, 1], [3, 2, 2, 3]])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_clusters_that_serve_nobody_move(start, sign):
    """Four orthogonal points, centroids that coincide or (with sign -1) look away: each point gets its own."""
    unit = torch.eye(4)[None]
    centroids = sign * torch.eye(4)[start][None]
    served = [float((centroids @ unit).amax(1).sum())]
    for _ in range(6):
        centroids = _lloyd_step(unit, torch.ones(1, 4), centroids)
        torch.testing.assert_close(centroids.norm(dim=2), torch.ones(1, 4))
        served.append(float((centroids @ unit).amax(1).sum()))
    assert served[0] < 3.0
    assert served[-1] == pytest.approx(4.0)
