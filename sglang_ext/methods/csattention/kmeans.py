"""Cosine k-means with k-means++ seeds, batched over independent groups of points.

Source: CSAttention, 3.2 (1): unit-normalized points, unit centroids, k-means++ seeds, 10-20 iterations.

The problems are tiny and many (512 for 4 layers, 8 KV heads, 16 subspaces), so what costs time is the number of
kernels and of passes over [num_groups, num_centroids, num_points]. All groups go through the same kernels, in chunks
that bound the memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BYTES_PER_CHUNK = 1 << 29
"""Temporaries of one chunk of groups (512 MiB)."""

LEAST_GAP = 1e-6
"""1 - cosine below which two directions are the same: fp32 rounding."""


def cosine_kmeans(points: Tensor, num_centroids: int, *, iterations: int = 10, seed: int = 0) -> Tensor:
    """Unit centroids that maximize the points' cosine to their nearest one.

    Args:
        points: [..., num_groups, num_points, dim] floating, num_points >= 1; each group is clustered alone. Points
            of length 0 have no direction and are ignored. Read only.
        num_centroids: at least 1. Where a group has fewer distinct directions, centroids repeat.
        iterations: Lloyd iterations after seeding.
        seed: of the random numbers. They are drawn on the CPU, the same ones for every leading index (layers, heads):
            clustering some of them alone gives what clustering all at once gives; on a GPU up to rounding, as the
            products' order of summation may depend on how many there are.

    Returns:
        [..., num_groups, num_centroids, dim] fp32, each of length 1.
    """
    num_groups, num_points, dim = points.shape[-3:]
    generator = torch.Generator().manual_seed(seed)
    trials = 2 + int(math.log(num_centroids))
    draws = torch.rand(num_groups, num_centroids, trials, generator=generator).to(points.device)
    sets = points.reshape(-1, num_groups, num_points, dim)
    centroids = torch.empty(sets.shape[0], num_groups, num_centroids, dim, device=points.device)
    # While normalizing, three fp32 copies of the points; later one, and their cosines to centroids or trial seeds.
    per_group = 4 * num_points * (max(3 * dim, dim + max(num_centroids, trials)) + 8)
    step = max(1, BYTES_PER_CHUNK // (per_group * num_groups))
    for first in range(0, sets.shape[0], step):
        unit = _directions(sets[first : first + step].flatten(0, 1))
        weight = unit.abs().amax(dim=1).sign_()
        found = _seed(unit, weight, draws.repeat(unit.shape[0] // num_groups, 1, 1))
        for _ in range(iterations):
            found = _lloyd_step(unit, weight, found)
        centroids[first : first + step] = found.view(-1, num_groups, num_centroids, dim)
    return centroids.view(*points.shape[:-2], num_centroids, dim)


def _directions(points: Tensor) -> Tensor:
    """[num_groups, num_points, dim] -> fp32 [num_groups, dim, num_points] of length 1, or 0 where it was 0."""
    across = points.float().transpose(1, 2)
    # Scaled by the largest channel first: squares of very small or large ones leave fp32's range.
    largest = across.abs().amax(dim=1, keepdim=True)
    scaled = (across / largest.masked_fill(largest == 0, 1.0)).contiguous()
    length = torch.linalg.vector_norm(scaled, dim=1, keepdim=True).clamp_min_(0.5)
    return scaled.div_(length)


def _seed(unit: Tensor, weight: Tensor, draws: Tensor) -> Tensor:
    """Greedy k-means++: of a few points drawn by squared distance, 2 - 2 cos, take the one that helps most.

    Several draws per seed (2 + ln C, as scikit-learn) keep two close seeds from taking one cluster each half.
    When every point coincides with a seed, nothing is left to draw from and points are drawn uniformly.

    Args:
        unit: [num_groups, dim, num_points] of length 1 or 0.
        weight: [num_groups, num_points] 1, or 0 for points of length 0.
        draws: [num_groups, num_centroids, trials] uniform in [0, 1).
    """
    num_groups, dim, num_points = unit.shape
    num_centroids = draws.shape[1]
    fallback = torch.zeros(dim, device=unit.device)
    fallback[0] = 1.0
    centroids = unit.new_empty(num_groups, num_centroids, dim)
    anywhere = weight.cumsum(dim=1)
    mass = anywhere
    served: Tensor | None = None  # cosine of each point to its nearest seed
    for step in range(num_centroids):
        drawn = _draw(mass, draws[:, step])
        if step:
            drawn = torch.where(mass[:, -1:] > 0, drawn, _draw(anywhere, draws[:, step]))
        candidates = unit.gather(2, drawn[:, None].expand(-1, dim, -1)).transpose(1, 2)
        cosine = torch.bmm(candidates, unit)
        if served is not None:
            cosine = torch.maximum(cosine, served[:, None], out=cosine)
        best = cosine.sum(dim=2).argmax(dim=1)[:, None, None]
        chosen = candidates.gather(1, best.expand(-1, 1, dim)).squeeze(1)
        centroids[:, step] = torch.where(chosen.any(dim=1, keepdim=True), chosen, fallback)
        served = cosine.gather(1, best.expand(-1, 1, num_points)).squeeze(1)
        if step + 1 < num_centroids:
            gap = torch.nn.functional.threshold(weight - served, LEAST_GAP, 0.0)
            mass = gap.cumsum(dim=1)
    return centroids


def _draw(mass: Tensor, draws: Tensor) -> Tensor:
    """Indices of points by their share of the cumulative mass [num_groups, num_points]."""
    return torch.searchsorted(mass, draws * mass[:, -1:], right=True).clamp_max(mass.shape[1] - 1)


def _lloyd_step(unit: Tensor, weight: Tensor, centroids: Tensor) -> Tensor:
    """Assign, add up, normalize.

    A point that is equally near to two centroids counts in both. A cluster whose members have no common direction,
    mostly because it has no members, or the same one as an earlier cluster, moves to the point that is served worst:
    one cluster of a group per iteration, so that no two move to the same point.

    Args:
        unit, weight: see `_seed`.
        centroids: [num_groups, num_centroids, dim] of length 1.

    Returns:
        The new centroids.
    """
    cosine = torch.bmm(centroids, unit)
    best = cosine.amax(dim=1)
    member = cosine.ge_(best[:, None])
    total = torch.bmm(member, unit.transpose(1, 2))
    length = torch.linalg.vector_norm(total, dim=2, keepdim=True)
    lost = length.squeeze(2) <= LEAST_GAP
    centroids = torch.where(lost[..., None], centroids, total / length.clamp_min(LEAST_GAP))
    earlier = torch.bmm(centroids, centroids.transpose(1, 2)).tril_(-1)
    lost |= earlier.amax(dim=2) >= 1.0 - LEAST_GAP
    worst_gap, worst = (weight - best).max(dim=1, keepdim=True)
    moves = lost & (lost.cumsum(dim=1) == 1) & (worst_gap > LEAST_GAP)
    target = unit.gather(2, worst[:, None].expand(-1, unit.shape[1], 1)).transpose(1, 2)
    return torch.where(moves[..., None], target, centroids)
