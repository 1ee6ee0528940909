"""Cosine k-means with k-means++ seeds, batched over independent groups.

Source: CSAttention, 3.2 (1): unit-normalized points, unit centroids, k-means++ seeds, 10-20 iterations.
Points are few (a bounded sample of queries), so every iteration sees all of them; a mini-batch would only add
noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cosine_kmeans(points: Tensor, num_centroids: int, *, iterations: int = 10, seed: int = 0) -> Tensor:
    """Unit centroids that maximize the points' cosine to their nearest one.

    Args:
        points: [num_groups, num_points, dim] floating, num_points >= 1; each group is clustered alone. Points
            of length 0 have no direction and are ignored. Read only.
        num_centroids: at least 1. Where a group has fewer distinct directions, centroids repeat.
        iterations: Lloyd iterations after seeding.
        seed: same seed, same points and same device give the same centroids; the random numbers are drawn on
            the CPU, so that devices differ by rounding only.

    Returns:
        [num_groups, num_centroids, dim] fp32, each of length 1.

    Raises:
        ValueError: shape or sizes out of range.
    """
    if points.dim() != 3 or points.shape[1] == 0:
        raise ValueError(f"expected points [num_groups, num_points >= 1, dim], got {tuple(points.shape)}")
    if num_centroids < 1 or iterations < 0:
        raise ValueError(f"expected num_centroids >= 1 and iterations >= 0, got {num_centroids}, {iterations}")
    points = points.float()
    length = points.norm(dim=2, keepdim=True)
    unit = points / length.clamp_min(torch.finfo(torch.float32).tiny)
    unit = unit.masked_fill(length == 0, 0.0)
    weight = (length.squeeze(2) > 0).float()
    centroids = _seed(unit, weight, num_centroids, seed)
    for _ in range(iterations):
        centroids = _lloyd_step(unit, weight, centroids)
    return centroids


def _seed(unit: Tensor, weight: Tensor, num_centroids: int, seed: int) -> Tensor:
    """Greedy k-means++: of a few points drawn by squared distance, 2 - 2 cos, take the one that helps most.

    Several draws per seed (2 + ln C, as scikit-learn) keep two close seeds from taking one cluster each half.
    When every point coincides with a seed, nothing is left to draw from and points are drawn uniformly.
    """
    num_groups, num_points, dim = unit.shape
    trials = 2 + int(math.log(num_centroids))
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(num_centroids, num_groups, trials, generator=generator).to(unit.device)
    fallback = torch.zeros(dim, device=unit.device)
    fallback[0] = 1.0
    centroids = unit.new_empty(num_groups, num_centroids, dim)
    distance = weight.clone()
    group = torch.arange(num_groups, device=unit.device)
    has_points = weight.sum(dim=1, keepdim=True) > 0
    uniform = torch.where(has_points, weight, torch.ones_like(weight)).cumsum(dim=1)
    for step in range(num_centroids):
        mass = distance.cumsum(dim=1)
        mass = torch.where(mass[:, -1:] > 0, mass, uniform)
        target = draws[step] * mass[:, -1:]
        drawn = torch.searchsorted(mass, target, right=True).clamp_max(num_points - 1)
        candidates = unit[group[:, None], drawn]
        gap = 2.0 - 2.0 * torch.bmm(candidates, unit.transpose(1, 2))
        gap = gap.masked_fill_(gap < 1e-6, 0.0) * weight[:, None]
        left = gap if step == 0 else torch.minimum(distance[:, None], gap)
        best = left.sum(dim=2).argmin(dim=1)
        chosen = candidates[group, best]
        centroids[:, step] = torch.where(chosen.any(dim=1, keepdim=True), chosen, fallback)
        distance = left[group, best]
    return centroids


def _lloyd_step(unit: Tensor, weight: Tensor, centroids: Tensor) -> Tensor:
    """Assign, average, normalize; an empty cluster moves to one of the points that are served worst."""
    num_groups, num_centroids, dim = centroids.shape
    best, assigned = torch.bmm(unit, centroids.transpose(1, 2)).max(dim=2)
    total = centroids.new_zeros(num_groups, num_centroids, dim)
    total.scatter_add_(1, assigned[:, :, None].expand(-1, -1, dim), unit)
    members = centroids.new_zeros(num_groups, num_centroids).scatter_add_(1, assigned, weight)
    length = total.norm(dim=2, keepdim=True)
    moved = torch.where(length > 1e-6, total / length.clamp_min(1e-6), centroids)
    gap = (1.0 - best).masked_fill(weight == 0, 0.0)
    num_spare = min(num_centroids, unit.shape[1])
    spare_gap, spare = gap.topk(num_spare, dim=1)
    empty = members == 0
    rank = (empty.long().cumsum(dim=1) - 1).clamp(0, num_spare - 1)
    candidate = torch.gather(unit, 1, torch.gather(spare, 1, rank)[:, :, None].expand(-1, -1, dim))
    use = empty & (torch.gather(spare_gap, 1, rank) > 1e-6)
    return torch.where(use[:, :, None], candidate, moved)
