"""Public `top_k_selection`: validation and dispatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from prefix_kernels.dispatch import resolve
from prefix_kernels.top_k_selection.reference import top_k_selection_reference
from prefix_kernels.types import Selection

_IMPLEMENTATIONS: Mapping[str, Callable[..., Selection] | str] = {
    "reference": top_k_selection_reference,
    "triton": "prefix_kernels.top_k_selection.triton:top_k_selection_triton",
}


def top_k_selection(
    scores: Tensor,
    budget: int,
    num_sink: int,
    num_recent: int,
    block_size: int,
    prefix_len: int,
    *,
    implementation: str = "reference",
) -> Selection:
    """Exactly min(budget, prefix_len) positions per KV head: sink, recent window, then the best blocks.

    The K_h = ceil(T / B_h) best blocks (AB-Sparse, 3.4, T the tokens that the windows leave) are taken in the
    order of their scores and the last one is cut, so that every method and block size reads the same number
    of tokens, and counts are known without asking the device.

    Args:
        scores: [num_kv_heads, ceil(prefix_len / block_size)] floating, higher is better; any monotone scale.
            -inf and NaN rank last, among themselves the most recent first.
        budget: tokens, at least 1; sink and recent window count towards it.
        num_sink: leading positions always taken.
        num_recent: trailing positions of the prefix always taken.
        block_size: tokens per score; 1 is token granularity. The last block may be shorter.
        prefix_len: tokens of the prefix, 0 allowed.
        implementation: "reference", or "triton": on a GPU, the same up to the order of equal scores, where the most
            recent token comes first.

    Returns:
        A new `Selection` of max_count = min(budget, prefix_len) without padding.

    Raises:
        ValueError: sizes out of range, scores of another shape, or windows that do not fit the budget.
    """
    run = resolve("top_k_selection", implementation, _IMPLEMENTATIONS)
    for name, value, least in (
        ("budget", budget, 1),
        ("num_sink", num_sink, 0),
        ("num_recent", num_recent, 0),
        ("block_size", block_size, 1),
        ("prefix_len", prefix_len, 0),
    ):
        if value < least:
            raise ValueError(f"expected {name} >= {least} tokens, got {value}")
    num_blocks = -(-prefix_len // block_size)
    if scores.dim() != 2 or scores.shape[1] != num_blocks or not scores.dtype.is_floating_point:
        raise ValueError(
            f"expected scores [num_kv_heads, ceil({prefix_len} / {block_size}) = {num_blocks}] in a floating "
            f"dtype, got {tuple(scores.shape)} {scores.dtype}; pool them over rows and query heads first"
        )
    if budget < prefix_len and num_sink + num_recent > budget:
        raise ValueError(
            f"expected num_sink + num_recent <= budget={budget} tokens, got {num_sink} + {num_recent}; "
            "raise the budget or shrink the windows"
        )
    return run(scores, budget, num_sink, num_recent, block_size, prefix_len)
