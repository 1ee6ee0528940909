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
LEAST_SUMMED = 2048
"""Of so many or more behind them a sample is taken, never of fewer."""


def sum_step(num_candidates: int, sum_every: int) -> int:
    """From one summed candidate to the next, behind the first `FIRST_SUMMED`."""
    return max(1, min(sum_every, num_candidates // LEAST_SUMMED))


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
        sum_every: of the candidates behind the first `FIRST_SUMMED`, one in at most so many is summed, in the middle of
            its stretch and with that weight; 1: all. At least about `LEAST_SUMMED` are. A share may then exceed 1.

    Returns:
        [num_kv_heads, num_candidates] fp32, natural log; -inf where no row has a score for the candidate.

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
    step = sum_step(rows.shape[2], sum_every)
    if step == 1:
        log_prob = rows.log_softmax(dim=2)
        silent = rows.amax(dim=2, keepdim=True) == -torch.inf
    else:
        sampled = rows[..., FIRST_SUMMED + step // 2 :: step].logsumexp(dim=2, keepdim=True) + math.log(step)
        total = rows[..., :FIRST_SUMMED].logsumexp(dim=2, keepdim=True).logaddexp(sampled)
        log_prob, silent = rows - total, total == -torch.inf
    # Such a row became NaN or infinite above; it says nothing.
    log_prob.masked_fill_(silent, -torch.inf)
    if Pooling(pooling) is Pooling.MAX:
        return log_prob.amax(dim=1)
    return log_prob.logsumexp(dim=1) - math.log(rows.shape[1])
