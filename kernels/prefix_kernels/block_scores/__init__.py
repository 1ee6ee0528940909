"""Scores of blocks of keys from their representations."""

from prefix_kernels.block_scores.api import block_scores_ball, block_scores_mean, block_scores_minmax
from prefix_kernels.block_scores.reference import (
    block_scores_ball_reference,
    block_scores_mean_reference,
    block_scores_minmax_reference,
)

__all__ = [
    "block_scores_ball",
    "block_scores_ball_reference",
    "block_scores_mean",
    "block_scores_mean_reference",
    "block_scores_minmax",
    "block_scores_minmax_reference",
]
