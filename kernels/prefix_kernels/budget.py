"""How a budget of tokens grows with a group. A server's rule is `SparseAttnConfig.budget` and `group_budget`."""

from __future__ import annotations

import math
from enum import Enum


class BudgetGrowth(str, Enum):
    """How a group's budget follows its size."""

    SQRT = "sqrt"
    """budget * sqrt(num_rows): rows share most of their critical keys, but not all."""
    NONE = "none"
    """The same budget for every group."""


def budget_for_group(
    budget: int, num_rows: int, growth: BudgetGrowth = BudgetGrowth.SQRT, cap: int | None = None
) -> int:
    """Prefix tokens that a group attends per KV head and step.

    Args:
        budget: tokens for one request, sink and recent window included, at least 1.
        num_rows: requests of the group, at least 1.
        growth: how the budget follows num_rows.
        cap: most tokens for any group, at least `budget`; None for no limit.

    Returns:
        Tokens, rounded up, not yet limited by the prefix's length.

    Raises:
        ValueError: a value out of range.
    """
    if budget < 1 or num_rows < 1:
        raise ValueError(f"expected budget >= 1 tokens and num_rows >= 1, got {budget} and {num_rows}")
    if cap is not None and cap < budget:
        raise ValueError(f"expected cap >= budget={budget} tokens, got {cap}; raise the cap or lower the budget")
    factor = math.sqrt(num_rows) if BudgetGrowth(growth) is BudgetGrowth.SQRT else 1.0
    grown = math.ceil(budget * factor)
    return grown if cap is None else min(grown, cap)
