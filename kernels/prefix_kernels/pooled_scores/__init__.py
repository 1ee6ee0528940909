"""Scores of candidates straight from an index, pooled over the rows of their group; needs Triton.

References of one group are `token_scores`, `exact_scores` and `low_bit_block_scores` in `block_scores`.
"""

from prefix_kernels.pooled_scores.runner import (
    PooledScores,
    ScoreConfig,
    ScoredGroup,
    ScoreInputs,
    ScoreShape,
    Source,
    array_addresses,
)

__all__ = ["PooledScores", "ScoreConfig", "ScoreInputs", "ScoreShape", "ScoredGroup", "Source", "array_addresses"]
