"""How many positions a group attends, and which of them in any case."""

from __future__ import annotations

from prefix_kernels.budget import BudgetGrowth, budget_for_group
from prefix_kernels.top_k_selection.plan import SelectionGroup
from sglang_ext.config import PAGE_TOKENS, SparseAttnConfig


def group_budget(config: SparseAttnConfig, prefix_len: int, num_rows: int) -> int:
    """Tokens of a prefix per KV head that a group of so many requests attends, never more than the prefix has."""
    one = config.budget(prefix_len)
    cap = max(one, int(config.max_keep_ratio * prefix_len))
    return min(budget_for_group(one, num_rows, BudgetGrowth(config.group_growth), cap), prefix_len)


def selection_group(config: SparseAttnConfig, prefix_len: int, budget: int, slot_start: int = 0) -> SelectionGroup:
    """A group as an operation selects for it: sink and recent window count towards the budget.

    Args:
        config: of the windows.
        prefix_len: tokens of the prefix.
        budget: from `group_budget`.
        slot_start: where its table of slots begins in the arena.
    """
    num_sink = min(config.num_sink_tokens, budget)
    recent = min(config.num_recent_pages * PAGE_TOKENS, max(budget - num_sink, 0))
    return SelectionGroup(prefix_len, budget, num_sink=num_sink, num_recent=recent, slot_start=slot_start)
