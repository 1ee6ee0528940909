"""What a selection and attention of what it chose take on a GPU: times that were measured, and bounds that follow.

The reference point: 8 requests of one group behind a shared prefix of 131,072 tokens, 32 query heads and 8 KV heads of
128 in bf16, one layer, NVIDIA H200, cold L2, CUDA graph replays; medians in us, an empty graph's 4.0 to 4.5 us in each.
The figures are rows of `benchmarks/results/kernels-h200-selection.jsonl` and `kernels-h200-attention.jsonl`, of each
recipe the fastest form that sums all tokens, as the errors have it that times are weighed against (`sum_every` takes
less). Selections were timed at a budget of 18,538 tokens for the group (14.1%). What was not timed has no time here:
nothing is estimated, but a launch that does less work than a timed one takes no longer.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from sglang_ext.methods.ab_sparse import ABSparseSpec
from sglang_ext.methods.base import IndexSpec
from sglang_ext.methods.csattention import CSAttentionSpec
from sglang_ext.methods.token_index import TokenIndexSpec
from sglang_ext.methods.two_level import TwoLevelSpec

REFERENCE = "131,072 tokens, 8 requests, 32 query heads and 8 KV heads of 128, NVIDIA H200"
"""Where the times were taken, for people."""

PREFIX_LEN, HEAD_DIM = 131_072, 128

TIMED_BUDGET = 18_538
"""Tokens that a group of 8 attended when selections were timed: 5% times the square root of 8."""


class SelectionTime(NamedTuple):
    """What one selection takes, from queries to lists, in us.

    Attributes:
        least_us, most_us: bounds; equal where this recipe itself was timed, `most_us` infinite where nothing says.
        cases: rows that it comes from.
        how: where the recipe was not timed itself, how the bounds follow; else empty.
        most_keep: `most_us` holds up to this share of the prefix kept.
    """

    least_us: float
    most_us: float
    cases: tuple[str, ...]
    how: str = ""
    most_keep: float = 1.0

    @property
    def measured(self) -> bool:
        """Whether this recipe itself was timed."""
        return self.least_us == self.most_us


_TOKENS, _BLOCKS, _BLOCKS_OF_16 = 57.904, 34.976, 40.736
_LISTS, _TOP_K = 460.144, 34.272
_TWO_LEVEL_CSA, _TWO_LEVEL_BLOCKS = 558.64, 114.144
_CANDIDATES = "timed with 56.6% of the prefix as candidates, 4 times the budget; a smaller budget has fewer"

TIMES: tuple[tuple[IndexSpec, SelectionTime], ...] = (
    (TokenIndexSpec(channel_ratio=0.75), SelectionTime(_TOKENS, _TOKENS, ("anchor/tokens_index_joined",))),
    (
        TokenIndexSpec(channel_ratio=1.0),
        SelectionTime(
            _TOKENS,
            _TOKENS / 0.75,
            ("anchor/tokens_index_joined",),
            "timed on 75% of the channels: at least that, at most in proportion",
        ),
    ),
    (TokenIndexSpec(channel_ratio=0.25), SelectionTime(67.008, 67.008, ("anchor/tokens",))),
    (
        ABSparseSpec(representation="minmax"),
        SelectionTime(_BLOCKS_OF_16, _BLOCKS_OF_16, ("anchor/blocks16_joined",)),
    ),
    (
        TwoLevelSpec(),
        SelectionTime(
            _LISTS, _TWO_LEVEL_CSA, ("csa/ours", "anchor/two_level_csa"), _CANDIDATES, TIMED_BUDGET / PREFIX_LEN
        ),
    ),
    (
        TwoLevelSpec(first=ABSparseSpec(representation="minmax")),
        SelectionTime(
            _BLOCKS,
            _TWO_LEVEL_BLOCKS,
            ("anchor/blocks_joined", "anchor/two_level_blocks"),
            _CANDIDATES,
            TIMED_BUDGET / PREFIX_LEN,
        ),
    ),
    (
        CSAttentionSpec(list_ratio=0.02),
        SelectionTime(_LISTS + _TOP_K, _LISTS + _TOP_K, ("csa/ours", "top_k/ours")),
    ),
    (
        CSAttentionSpec(),
        SelectionTime(
            _LISTS + _TOP_K,
            math.inf,
            ("csa/ours", "top_k/ours"),
            "timed with lists of 2% of the prefix: at least that",
        ),
    ),
)
"""Recipes and their times. `_TOP_K` is the selection of tokens behind CSAttention's scores."""

EXACT_US = 135.2
"""Exact grouped attention of the whole prefix, `exact`: what every recipe has to beat."""

ATTENTION_US: tuple[tuple[int, float], ...] = (
    (1_160, 14.24),
    (4_633, 17.248),
    (9_269, 22.880),
    (TIMED_BUDGET, 31.616),
    (PREFIX_LEN, EXACT_US),
)
"""Tokens that the group attends, and what attention of them takes: `sparse` behind 8,192, 32,768, 65,536 and 131,072
tokens (the kernel reads only what was selected), then `exact`."""


def selection_time(spec: IndexSpec, head_dim: int = HEAD_DIM) -> SelectionTime | None:
    """What a recipe's selection takes at the reference point; None where nothing was measured that says it.

    Args:
        spec: of the recipe. Channels count as a share of the head's.
        head_dim: of the model that the spec was made for.
    """
    for timed, time in TIMES:
        if spec.same_at(timed, head_dim):
            return time
    return None


def attention_us(keep_ratio: float) -> float:
    """What attention of a selection takes at the reference point: a line between neighbouring measured points.

    Fewer tokens than the least measured ones take as long as those.

    Args:
        keep_ratio: tokens that the group attends over those of the prefix, above 0 and at most 1.

    Raises:
        ValueError: no such ratio.
    """
    if not 0.0 < keep_ratio <= 1.0:
        raise ValueError(f"expected a keep ratio above 0 and at most 1, got {keep_ratio}; choose one")
    tokens = keep_ratio * PREFIX_LEN
    for (low, low_us), (high, high_us) in pairwise(ATTENTION_US):
        if tokens <= high:
            return low_us + (high_us - low_us) * max(tokens - low, 0.0) / (high - low)
    return EXACT_US
