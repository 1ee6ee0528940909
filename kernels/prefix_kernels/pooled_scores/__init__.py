"""Scores of a prefix's tokens, or blocks of them, by their index, pooled over the rows of their group; needs Triton.

Parts of `anchor_selection`: device functions (`kernels`), and what is scored, in tables (`tables`).
"""

from prefix_kernels.pooled_scores.tables import (
    ARRAYS,
    HEAD_FIELDS,
    LEAST_BLOCK,
    Layers,
    ScoredGroup,
    ScoreInputs,
    ScoreShape,
    array_addresses,
    check_group,
)
