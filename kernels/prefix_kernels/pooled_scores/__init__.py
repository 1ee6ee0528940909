"""Scores of candidates straight from an index, pooled over the rows of their group.

`token_scores`, `exact_scores` and `low_bit_block_scores` are for one group; `PooledScores` plans several at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefix_kernels.pooled_scores.api import exact_scores, low_bit_block_scores, token_scores

if TYPE_CHECKING:
    from prefix_kernels.pooled_scores.runner import PooledScores, ScoreConfig, ScoredGroup, ScoreShape, Source

__all__ = [
    "PooledScores",
    "ScoreConfig",
    "ScoreShape",
    "ScoredGroup",
    "Source",
    "exact_scores",
    "low_bit_block_scores",
    "token_scores",
]

_NEED_TRITON = ("PooledScores", "ScoreConfig", "ScoreShape", "ScoredGroup", "Source")


def __getattr__(name: str) -> object:
    """The runner's, imported when it is asked for: importing the package must not import Triton."""
    if name not in _NEED_TRITON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prefix_kernels.pooled_scores import runner

    return getattr(runner, name)
