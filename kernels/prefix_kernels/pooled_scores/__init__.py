"""Scores of a prefix's tokens by their index, pooled over the rows of their group; needs Triton.

Parts of `anchor_selection`: device functions (`kernels`), and what is scored, in tables (`tables`).
"""

from prefix_kernels.pooled_scores.tables import ScoredGroup, ScoreInputs, ScoreShape, array_addresses

__all__ = ["ScoreInputs", "ScoreShape", "ScoredGroup", "array_addresses"]
