"""The Top-L lists of CSAttention's centroids, made of a prefix's keys.

Source: CSAttention, 3.2 (2). Making lists waits for the device only where keys are so large that scores might leave
fp16's range.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_ext.methods.base import to_half

TIE_BLOCK = 128
"""Scores whose ties are counted together; their number fits a byte."""

SCORES_PER_CHUNK = 1 << 27
"""Centroid-key scores made at once while building (256 MiB in fp16, 512 in fp32), with three masks of a byte each."""

SAFE_SCORE = 60000.0
"""Bound of scores that surely fit fp16 (65504), whatever was rounded on the way."""


class CentroidLists(NamedTuple):
    """Lists with leading dims [num_kv_heads, num_subspaces, num_centroids].

    Attributes:
        positions: [..., L] int32, ascending and unique within a list.
        scores: [..., L] fp32, centroid . key less the list's baseline; within fp16's range.
        baseline: [...] fp32.
    """

    positions: Tensor
    scores: Tensor
    baseline: Tensor


def centroid_lists(centroids: Tensor, keys: Tensor, list_len: int, tail_mean: bool, largest: float) -> CentroidLists:
    """The `list_len` best keys of every centroid, in chunks of (KV head, subspace) groups.

    Args:
        centroids: [num_kv_heads, num_subspaces, num_centroids, subspace_dim] floating.
        keys: [prefix_len, num_kv_heads, head_dim] floating and finite.
        list_len: L, 1..prefix_len.
        tail_mean: whether the mean score of the positions that a list lacks is its baseline; else 0.
        largest: largest absolute value in the keys.

    Raises:
        ValueError: a score does not fit into fp16.
    """
    prefix_len, num_kv_heads, _ = keys.shape
    m, num_centroids, subspace_dim = centroids.shape[1:]
    num_groups = num_kv_heads * m
    # Products read the keys where they are: the groups' channels lie one after the other, a token's in one row.
    dtype = _score_dtype(keys, largest)
    parts = keys.to(dtype).reshape(prefix_len, num_groups, subspace_dim).permute(1, 2, 0)
    units = centroids.flatten(0, 1)
    shape = (num_groups, num_centroids, list_len)
    positions = torch.empty(shape, dtype=torch.int32, device=keys.device)
    scores = torch.empty(shape, device=keys.device)
    step = max(1, SCORES_PER_CHUNK // (num_centroids * prefix_len))
    for first in range(0, num_groups, step):
        some = slice(first, first + step)
        positions[some], scores[some] = top_lists(torch.bmm(units[some].to(dtype), parts[some]), list_len)
    baseline = torch.zeros(shape[:2], device=keys.device)
    if tail_mean and list_len < prefix_len:
        # The sum of a centroid's scores is its score for the sum of the keys.
        total = torch.bmm(units.float(), parts.sum(dim=2, keepdim=True, dtype=torch.float32)).squeeze(2)
        baseline = (total - scores.sum(dim=2)) / (prefix_len - list_len)
        scores -= baseline[..., None]
    if not 2 * math.sqrt(subspace_dim) * largest <= SAFE_SCORE:
        to_half(scores, "csattention partial score")
    lead = tuple(centroids.shape[:3])
    return CentroidLists(positions.view(*lead, -1), scores.view(*lead, -1), baseline.view(lead))


def _score_dtype(keys: Tensor, largest: float) -> torch.dtype:
    """fp16 for keys of 16 bits on a GPU, whose scores it holds: half of the bytes, and half of topk's passes.

    Scores are kept in 4 or 8 bits, so its 11 are enough; which of two keys comes last into a list may change.
    """
    fits = 2 * math.sqrt(keys.shape[2]) * largest <= SAFE_SCORE
    return torch.float16 if keys.is_cuda and keys.element_size() == 2 and fits else torch.float32


def top_lists(scores: Tensor, list_len: int) -> tuple[Tensor, Tensor]:
    """Positions and scores of exactly `list_len` best entries per row; of equal ones the first positions are taken.

    The threshold comes from `torch.topk` unsorted, which on the device is a radix selection. What topk chose of equal
    scores is not used, as it promises nothing of that: positions are read off a mask in which the ties at the threshold
    are cut behind the last one that fits. On one H200, 512 rows of 131,072 scores and L = 10,486: topk alone 0.9 ms, a
    sort 4.8 ms, a threshold found by bisection 16 ms.

    Args:
        scores: [..., n] floating without NaN. Not written.
        list_len: 1..n.

    Returns:
        positions [..., list_len] int32, ascending, and their scores.
    """
    n = scores.shape[-1]
    rows = scores.reshape(-1, n).contiguous()
    best = rows.topk(list_len, dim=1, sorted=False).values
    least = best.amin(dim=1, keepdim=True)
    tied = rows == least
    last = _last_tie(tied, list_len - (best > least).sum(dim=1, keepdim=True))
    kept = tied.logical_and_(torch.arange(n, device=rows.device) <= last).logical_or_(rows > least)
    # Every row keeps list_len entries, so they come row by row, and how many there are need not be asked.
    flat = torch.nonzero_static(kept.view(-1), size=rows.shape[0] * list_len).view(-1, list_len)
    first = torch.arange(rows.shape[0], device=rows.device)[:, None] * n
    shape = (*scores.shape[:-1], list_len)
    return (flat - first).int().view(shape), rows.take(flat).view(shape)


def _last_tie(tied: Tensor, wanted: Tensor) -> Tensor:
    """Position [num_rows, 1] of the `wanted`-th (1 or more) True of every row of `tied` [num_rows, n]."""
    block = math.gcd(tied.shape[1], TIE_BLOCK)
    blocks = tied.view(tied.shape[0], -1, block)
    # Bytes are added up as bytes: a sum of another dtype than its input would first copy all of it.
    per_block = blocks.view(torch.uint8).sum(dim=2, dtype=torch.uint8)
    upto = per_block.cumsum(dim=1, dtype=torch.int64)
    at = torch.searchsorted(upto, wanted)
    before = upto.gather(1, at) - per_block.gather(1, at)
    inside = blocks.gather(1, at[..., None].expand(-1, 1, block)).squeeze(1).cumsum(dim=1)
    return at * block + torch.searchsorted(inside, wanted - before)
