"""Reference of the two-level selection: the references of its stages, one after the other."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from prefix_kernels.low_bit import LowBitTensor
from prefix_kernels.pooled_scores.reference import token_scores_reference
from prefix_kernels.pooling import Pooling
from prefix_kernels.top_k_selection.reference import top_k_selection_reference
from prefix_kernels.types import Selection


def two_level_selection_reference(
    first_scores: Tensor,
    second_scores: Callable[[Tensor], Tensor],
    num_candidates: int,
    budget: int,
    num_sink: int,
    num_recent: int,
    block_size: int,
    prefix_len: int,
) -> Selection:
    """The best `budget` of the best `num_candidates` positions; both hold sink and recent window.

    Candidates ascend, so that the windows are the ends of the list, and the second choice is one among places in it.

    Args:
        first_scores: [num_kv_heads, ceil(prefix_len / block_size)], higher is better.
        second_scores: from candidates [num_kv_heads, min(num_candidates, prefix_len)] int32 to scores of that shape.
        num_candidates, budget, num_sink, num_recent, block_size, prefix_len: as in `TwoLevelGroup`.
    """
    named = top_k_selection_reference(first_scores, num_candidates, num_sink, num_recent, block_size, prefix_len)
    scores = second_scores(named.positions)
    best = top_k_selection_reference(scores, budget, num_sink, num_recent, 1, named.max_count)
    return Selection(named.positions.gather(1, best.positions.long()), best.counts)


def listed_token_scores_reference(
    q: Tensor, keys: LowBitTensor, channels: Tensor | None, positions: Tensor, sm_scale: float, pooling: Pooling
) -> Tensor:
    """`token_scores` of listed positions alone: the softmax is over these.

    Args:
        q, keys, channels, sm_scale, pooling: as in `token_scores`.
        positions: [num_kv_heads, n] integer.

    Returns:
        [num_kv_heads, n] fp32, natural log.
    """
    index = positions.long()[:, :, None].expand(-1, -1, keys.packed.shape[2])
    listed = LowBitTensor(keys.packed.gather(1, index), keys.scale, keys.zero)
    return token_scores_reference(q, listed, channels, sm_scale, pooling)
