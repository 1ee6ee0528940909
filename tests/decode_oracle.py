"""One layer of a sparse step by its definition: selection per group, softmax per row and KV head, in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from prefix_kernels.budget import BudgetGrowth, budget_for_group
from prefix_kernels.pooling import Pooling
from prefix_kernels.types import PagedKV, Selection
from sglang_ext.config import PAGE_TOKENS, SparseAttnConfig
from sglang_ext.methods.base import SelectArgs, Selector
from sglang_ext.methods.layer_plan import LayerMode, LayerPlan


@dataclass(eq=False)
class OracleGroup:
    """Requests on the slots of one index; `kept` holds, by anchor layer, what is attended in place of a selection, and
    `before` the queries that name its candidates in place of its own."""

    index: Any
    slots: torch.Tensor
    rows: list[int]
    kept: dict[int, Selection] = field(default_factory=dict)
    before: dict[int, torch.Tensor] = field(default_factory=dict)
    selections: dict[int, Selection] = field(default_factory=dict)
    asked: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def prefix_len(self) -> int:
        return len(self.slots)


class Oracle:
    def __init__(self, config: SparseAttnConfig, selector: Selector[Any], layer_plan: LayerPlan) -> None:
        self.config, self.selector, self.plan = config, selector, layer_plan

    def budget(self, prefix_len: int, num_rows: int) -> int:
        one = self.config.budget(prefix_len)
        cap = max(one, int(self.config.max_keep_ratio * prefix_len))
        return min(budget_for_group(one, num_rows, BudgetGrowth(self.config.group_growth), cap), prefix_len)

    def select(self, q: torch.Tensor, group: OracleGroup, num_kv_heads: int, layer: int, sm_scale: float) -> Selection:
        """By the queries of the group's rows."""
        role, config = self.plan.layers[layer], self.config
        budget = self.budget(group.prefix_len, len(group.rows))
        if role.mode is LayerMode.DENSE or budget == group.prefix_len:
            return Selection.all(group.prefix_len, num_kv_heads, q.device)
        if role.anchor_layer is not None:
            anchor, heads = group.selections[role.anchor_layer], list(role.head_map)
            return Selection(anchor.positions[heads], anchor.counts[heads])
        sink = min(config.num_sink_tokens, budget)
        args = SelectArgs(
            prefix_len=group.prefix_len, budget=budget, num_sink=sink,
            num_recent=min(config.num_recent_pages * PAGE_TOKENS, budget - sink), sm_scale=sm_scale,
            pooling=Pooling(config.pooling),
        )  # fmt: skip
        found, arrays = group.kept.get(layer), group.index.layers[layer]
        if found is None and layer in group.before:
            named = self.selector.candidates(arrays, group.before[layer], args)
            found = self.selector.select_among(arrays, q, args, named)
        group.selections[layer], group.asked[layer] = found or self.selector.select(arrays, q, args), q
        return group.selections[layer]

    def run(
        self, q: torch.Tensor, kv: PagedKV, groups: Sequence[OracleGroup], own: Sequence[torch.Tensor], layer: int,
        sm_scale: float,
    ) -> torch.Tensor:  # fmt: skip
        """[num_rows, num_qo_heads, v_head_dim] fp32; `own` has the slots that each row attends in any case."""
        chosen = [self.select(q[one.rows], one, kv.num_kv_heads, layer, sm_scale) for one in groups]
        out = torch.zeros(*q.shape[:2], kv.v_cache.shape[2], device=q.device)
        gqa = q.shape[1] // kv.num_kv_heads
        for row, mine in enumerate(own):
            for head in range(kv.num_kv_heads):
                listed = [mine.long()]
                for group, selection in zip(groups, chosen, strict=True):
                    if row in group.rows:
                        listed.append(group.slots[selection.positions[head, : selection.counts[head]].long()].long())
                slots, part = torch.cat(listed), slice(head * gqa, (head + 1) * gqa)
                scores = sm_scale * kv.k_scale * q[row, part].float() @ kv.k_cache[slots, head].float().T
                out[row, part] = scores.softmax(dim=1) @ (kv.v_scale * kv.v_cache[slots, head].float())
        return out
