"""The Top-L lists of CSAttention's centroids: made of a prefix's keys, and grown by new keys.

Source: CSAttention, 3.2 (2) and 3.3 (5). Nothing here waits for the device, but for one check where keys are so large
that scores might leave fp16's range.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_ext.methods.base import to_half
from sglang_ext.methods.csattention.top_lists import top_lists

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


def centroid_lists(
    centroids: Tensor, keys: Tensor, channels: Tensor | None, list_len: int, tail_mean: bool, largest: float
) -> CentroidLists:
    """The `list_len` best keys of every centroid, in chunks of (KV head, subspace) groups.

    Args:
        centroids: [num_kv_heads, num_subspaces, num_centroids, subspace_dim] floating.
        keys: [prefix_len, num_kv_heads, head_dim] floating and finite.
        channels: [head_dim] int64, channels in the subspaces' order; None if they are in order.
        list_len: L, 1..prefix_len.
        tail_mean: whether the mean score of the positions that a list lacks is its baseline; else 0.
        largest: largest absolute value in the keys.

    Raises:
        ValueError: a score does not fit into fp16.
    """
    prefix_len, num_kv_heads, _ = keys.shape
    m, num_centroids, subspace_dim = centroids.shape[1:]
    num_groups = num_kv_heads * m
    if channels is not None:
        keys = keys[:, :, channels]
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


def grown_lists(
    lists: CentroidLists, centroids: Tensor, new_keys: Tensor, channels: Tensor | None, first_position: int
) -> CentroidLists:
    """Lists of the same length after new keys were tried in each: one that exceeds the minimum replaces it.

    Source: CSAttention, 3.3 (5). Trying keys at once is trying them one by one; of equal scores the earlier position
    stays. Centroids and baselines stay those of the build, so a baseline that is the mean of the positions a list
    lacked is their mean then.

    Args:
        lists: their positions are below first_position.
        centroids, channels: as in `centroid_lists`.
        new_keys: [num_new, num_kv_heads, head_dim] floating and finite, of positions first_position and on.

    Raises:
        ValueError: a score does not fit into fp16.
    """
    num_new, num_kv_heads, _ = new_keys.shape
    m, _, subspace_dim = centroids.shape[1:]
    if channels is not None:
        new_keys = new_keys[:, :, channels]
    parts = new_keys.float().reshape(num_new, num_kv_heads, m, subspace_dim).permute(1, 2, 3, 0)
    fresh = to_half(torch.matmul(centroids.float(), parts) - lists.baseline[..., None], "csattention partial score")
    number = torch.arange(first_position, first_position + num_new, dtype=torch.int32, device=new_keys.device)
    positions = torch.cat([lists.positions, number.expand(*fresh.shape)], dim=3)
    kept, scores = top_lists(torch.cat([lists.scores, fresh.float()], dim=3), lists.positions.shape[3])
    return lists._replace(positions=positions.gather(3, kept.long()), scores=scores)
