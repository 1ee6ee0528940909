"""Public `merge_state`: validation and dispatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prefix_kernels.dispatch import resolve
from prefix_kernels.merge_state.reference import merge_state_reference
from prefix_kernels.types import AttnState

_IMPLEMENTATIONS: Mapping[str, Callable[..., AttnState] | str] = {
    "reference": merge_state_reference,
    "triton": "prefix_kernels.merge_state.triton:merge_state_triton",
}


def merge_state(*states: AttnState, implementation: str = "reference") -> AttnState:
    """Attention over a union of disjoint key sets, from the states over each of them.

    Associative and commutative up to rounding. Source: FlashInfer's attention states (arXiv 2501.01005, 2.2),
    here with the **natural** logarithm (FlashInfer's own `merge_state` takes base 2).

    Args:
        *states: one or more states of equal shapes, out [num_rows, num_qo_heads, v_head_dim], lse
            [num_rows, num_qo_heads]. Read only. A row with lse -inf is empty; its `out` may hold anything.
        implementation: "reference" or "triton" (on a GPU, or in Triton's interpreter).

    Returns:
        A new state with out in fp32. Rows empty in every state have out 0 and lse -inf; no NaN arises.

    Raises:
        ValueError: no state, unequal shapes, or an unknown implementation.

    Example:
        >>> import torch
        >>> from prefix_kernels.types import AttnState
        >>> full = AttnState(torch.ones(1, 1, 2), torch.zeros(1, 1))
        >>> empty = AttnState(torch.zeros(1, 1, 2), torch.full((1, 1), -torch.inf))
        >>> merge_state(full, empty).out
        tensor([[[1., 1.]]])
    """
    run = resolve("merge_state", implementation, _IMPLEMENTATIONS)
    if not states:
        raise ValueError("expected at least one state to merge, got none")
    shapes = {tuple(state.out.shape) for state in states}
    if len(shapes) > 1:
        raise ValueError(f"expected states of one shape [num_rows, num_qo_heads, head_dim], got {sorted(shapes)}")
    return run(states)
