"""From the scores of every query row and head of a group to one score per candidate and KV head.

Pooling happens after the softmax (Kascade, 3.4: pooling queries before it loses accuracy with the tile's
size), so that a row with large raw scores does not drown the others: each row hands in how much of *its*
attention a candidate has.

That takes every row's sum of exponentials before anything can be pooled: a pass over all candidates. It may be taken of
a sample (`sum_every`), as it does no more than weigh the rows of a group against each other.
"""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import Tensor


class Pooling(str, Enum):
    """How a group's rows and GQA heads share one selection."""

    MAX = "max"
    """The largest probability over rows: keeps every request's own critical keys."""
    MEAN = "mean"
    """The mean probability over rows: keeps what most of the group attends."""


FIRST_SUMMED = 64
"""So many leading candidates are always in the sums: among them are the sinks, which may have most of the attention."""
LEAST_SUMMED = 512
"""So many are summed at least, or all."""
MOST_APART = 64
"""Candidates of a stretch of which one is summed, at most."""
HEADROOM = 20.0
"""Shares by a sample's sums are so much lower, natural log: one above 1 must still rank where keys end at 1."""
GOLDEN = 40503
"""2^16 over the golden ratio: i x GOLDEN / 2^16 modulo 1 is spread evenly over [0, 1), however many there are of i."""


def sum_step(num_candidates: int, sum_every: int) -> int:
    """Candidates of a stretch of which one is summed, behind the first `FIRST_SUMMED`."""
    return max(1, min(sum_every, num_candidates // LEAST_SUMMED))


def sampled(num_candidates: int, step: int, device: torch.device | None = None) -> Tensor:
    """int64, ascending: which candidates behind the first `FIRST_SUMMED` are summed, each for a stretch of `step`.

    Its place in its stretch is not the same in all of them, so that a text that repeats itself every few tokens (rows
    of a table) is not sampled at one column only. What is left of a last stretch is not summed.
    """
    stretch = torch.arange(max(num_candidates - FIRST_SUMMED, 0) // step, device=device)
    return FIRST_SUMMED + stretch * step + (((stretch * GOLDEN) & 0xFFFF) * step >> 16)


def log_shares(scores: Tensor, sum_every: int = 1) -> Tensor:
    """Each candidate's share of a row's attention.

    Args:
        scores: [..., num_candidates >= 1] floating, -inf for none. Not written.
        sum_every: of the candidates behind the first `FIRST_SUMMED`, one in at most so many is summed (`sampled`), with
            that weight, at least about `LEAST_SUMMED`; 1: all. Above 1 a share may exceed 1, and is lowered by
            `HEADROOM`, however many are summed.

    Returns:
        The same shape and dtype, natural log; -inf throughout where no summed candidate has a score, or one is no
        number.
    """
    if sum_every == 1:
        log_share = scores.log_softmax(dim=-1)
        total = scores.amax(dim=-1, keepdim=True)
    else:
        step = sum_step(scores.shape[-1], sum_every)
        some = scores[..., sampled(scores.shape[-1], step, scores.device)]
        behind = some.logsumexp(dim=-1, keepdim=True) + math.log(step)
        total = scores[..., :FIRST_SUMMED].logsumexp(dim=-1, keepdim=True).logaddexp(behind)
        log_share = scores - total - HEADROOM
    # Such a row became NaN or infinite above; it says nothing, so that others of its group are heard.
    return log_share.masked_fill_(~total.isfinite(), -torch.inf)


def pool_scores(scores: Tensor, sm_scale: float, pooling: Pooling = Pooling.MAX, *, sum_every: int = 1) -> Tensor:
    """Softmax over candidates per row and head, then pool over rows and heads, as log-probabilities.

    The logarithm is returned because a probability of exp(-100) is 0 in fp32 and would no longer rank; the
    order is the same.

    Args:
        scores: [num_kv_heads, num_rows, gqa, num_candidates] fp32, raw q.k estimates, num_rows and gqa >= 1.
            -inf marks a candidate without a score in that row; a row with none at all says nothing. Not
            written.
        sm_scale: multiplies the scores before the softmax.
        pooling: over rows and heads together.
        sum_every: of how few candidates the sums are, see `log_shares`.

    Returns:
        [num_kv_heads, num_candidates] fp32, natural log, lowered as `log_shares` says; -inf where no row has a score
        for the candidate.

    Raises:
        ValueError: another shape or an empty group.
    """
    if scores.dim() != 4 or 0 in scores.shape[:3]:
        raise ValueError(
            f"expected scores [num_kv_heads, num_rows >= 1, gqa >= 1, num_candidates], got {tuple(scores.shape)}"
        )
    rows = scores.flatten(1, 2).float() * sm_scale
    if rows.shape[2] == 0:
        return rows.new_empty(rows.shape[0], 0)
    log_prob = log_shares(rows, sum_every)
    if Pooling(pooling) is Pooling.MAX:
        return log_prob.amax(dim=1)
    return log_prob.logsumexp(dim=1) - math.log(rows.shape[1])
