"""Which recipe wins: the rule that the selection benchmark and the calibration share.

Of the recipes whose index takes at most 15% of the bf16 KV's bytes, the one with the least output error when a step
reads 10% of what dense attention reads: index and selected keys and values together. The error between two measured
keep ratios is interpolated, log against log; a recipe that cannot go down to that many bytes is out.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

MAX_STORED_SHARE = 0.15
"""Bytes of an index over those of the bf16 KV."""

READ_SHARE = 0.10
"""Bytes that a step reads over those that dense attention reads."""

TOLERANCE = 1e-9
"""Shares are sums of rounded quotients: one that exceeds a bound by less than this does not exceed it."""

AREA_FROM, AREA_TO = 0.05, 0.2


class Curve(NamedTuple):
    """A method's means over prompts, by keep ratio ascending.

    Attributes:
        method, kind: of the row.
        stored_share: bytes stored over those of the bf16 KV.
        points: (read_share, error) per keep ratio.
    """

    method: str
    kind: str
    stored_share: float
    points: tuple[tuple[float, float], ...]

    def error_at(self, share: float) -> float:
        """Output error when a step reads that share of dense; infinite below what the method can do."""
        if share < self.points[0][0] - TOLERANCE:
            return math.inf
        best = self.points[0][1]
        for (x0, y0), (x1, y1) in pairwise(self.points):
            if share >= x1:
                best = min(best, y1)
            elif share >= x0:
                part = math.log(share / x0) / math.log(x1 / x0)
                best = min(best, math.exp((1 - part) * math.log(max(y0, 1e-9)) + part * math.log(max(y1, 1e-9))))
        return best

    def area(self) -> float:
        """Mean error over log(bytes read) from 5% to 20% of dense; 1 (nothing read) where it cannot go so low."""
        steps = 200
        ratio = math.log(AREA_TO / AREA_FROM)
        shares = [AREA_FROM * math.exp(ratio * (i + 0.5) / steps) for i in range(steps)]
        return sum(min(1.0, self.error_at(share)) for share in shares) / steps
