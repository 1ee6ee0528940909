"""What the same questions say that were answered twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext.calibration.judge import Z95


@dataclass(frozen=True)
class Paired:
    """The same questions answered twice. Accuracies and the difference (sparse - dense) are fractions.

    `low` and `high` bound the difference with 95% confidence (Agresti and Min, Statistics in Medicine 24, 2005:
    the Wald interval of paired proportions after half a count is added to each cell).
    """

    count: int
    dense: float
    sparse: float
    difference: float
    low: float
    high: float


def paired(dense: Sequence[bool], sparse: Sequence[bool]) -> Paired:
    """Compare paired outcomes.

    Raises:
        ValueError: nothing to compare, or sequences of different lengths.
    """
    if not dense or len(dense) != len(sparse):
        raise ValueError(f"expected two outcomes per question, got {len(dense)} dense and {len(sparse)} sparse")
    count = len(dense)
    gained = sum(s and not d for d, s in zip(dense, sparse, strict=True)) + 0.5
    lost = sum(d and not s for d, s in zip(dense, sparse, strict=True)) + 0.5
    total = count + 2
    center = (gained - lost) / total
    half = Z95 * math.sqrt(max(gained + lost - (gained - lost) ** 2 / total, 0.0)) / total
    accuracy_dense, accuracy_sparse = sum(dense) / count, sum(sparse) / count
    return Paired(
        count, accuracy_dense, accuracy_sparse, accuracy_sparse - accuracy_dense, center - half, center + half
    )
