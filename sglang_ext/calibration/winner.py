"""Which recipe wins: the rule that the selection benchmark and the calibration share.

Of the recipes whose index takes at most 15% of the bf16 KV's bytes, the one that reaches a stated output error in the
least time per layer of a decode step:

    anchor_share * selection + attention of the keep ratio that reaches the error

with the times of `step_time`. The error is that of the worst prompt: the mean over its tokens, heads and layers, then
the greatest over the prompts. A mean over prompts hides a task that a recipe fails at. The keep ratio is read off the
recipe's measured errors: interpolated between two measured keep ratios, log against log, never beyond them. A recipe
that nothing was timed for is left out, and so is one that does not reach the error. Dense layers take the same with
every recipe and do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from sglang_ext.calibration.step_time import SelectionTime, attention_us

MAX_STORED_SHARE = 0.15
"""Bytes of an index over those of the bf16 KV."""

TARGET_ERROR = 0.32
"""Output error that a recipe has to reach in the worst prompt. The first default, CSAttention's candidates ranked by
the token index, has 0.320 at 5% kept in the worst of 56 captured prompts of the shipped model
(`benchmarks/results/selection-h200.jsonl.xz`); with it, in all layers, that model answered as well as dense in 12 of 14
cells, and 0.2 and 0.4 points worse in two, whose 95% intervals hold zero (`accuracy-h200-default.jsonl`). Blocks of 16
at 20% kept have less error than it in the mean over prompts, but 0.509 in the worst one, and lost 10.4 points
(`accuracy-h200-ab_sparse.jsonl`)."""

ANCHOR_SHARE = 1 / 8
"""Layers that select, of those that select or reuse, where a recipe is chosen for a model that is not known yet: 4
of 32, as in plans like Kascade's."""

TOLERANCE = 1e-9
"""Shares are sums of rounded quotients: one that exceeds a bound by less than this does not exceed it."""


class Timed(NamedTuple):
    """What a recipe takes per layer of a decode step at the target error, at `step_time`'s reference point.

    Attributes:
        keep_ratio: the least that reaches the error; infinite where no measured one does.
        least_us, most_us: bounds of the time, equal where the recipe itself was timed; infinite where the error is not
            reached.
    """

    keep_ratio: float
    least_us: float
    most_us: float


def keep_for_error(points: Sequence[tuple[float, float]], error: float = TARGET_ERROR) -> float:
    """The least keep ratio that reaches an error; infinite where no measured one does.

    Args:
        points: (keep ratio, error of the worst prompt) as measured, keep ratio ascending.
        error: to be reached, above 0.
    """
    if points and points[0][1] <= error:
        return points[0][0]
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 <= error < y0:
            part = math.log(y0 / error) / math.log(y0 / max(y1, 1e-9))
            return math.exp((1 - part) * math.log(x0) + part * math.log(x1))
    return math.inf


def timed(
    points: Sequence[tuple[float, float]], selection: SelectionTime, anchor_share: float, error: float = TARGET_ERROR
) -> Timed:
    """What a recipe takes where it reaches the error.

    Args:
        points: see `keep_for_error`.
        selection: of `step_time.selection_time`.
        anchor_share: layers that select, of those that select or reuse; above 0 and at most 1.
        error: to be reached.

    Raises:
        ValueError: no such share.
    """
    if not 0.0 < anchor_share <= 1.0:
        raise ValueError(f"expected an anchor share above 0 and at most 1, got {anchor_share}; a plan has anchors")
    keep = keep_for_error(points, error)
    if math.isinf(keep):
        return Timed(keep, math.inf, math.inf)
    attention = attention_us(keep)
    most = selection.most_us if keep <= selection.most_keep + TOLERANCE else math.inf
    return Timed(keep, anchor_share * selection.least_us + attention, anchor_share * most + attention)
