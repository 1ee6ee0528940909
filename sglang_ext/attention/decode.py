"""Decode attention of one layer: selected prefix positions per group, the suffix in full or, where it is long, selected
from as well, merged by LSE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prefix_kernels.budget import BudgetGrowth, budget_for_group
from prefix_kernels.ops import merge_state, prefix_attention, suffix_attention
from prefix_kernels.pooling import Pooling
from prefix_kernels.types import AttnState, PagedKV, Selection
from sglang_ext.attention.plan import DecodePlan, Group
from sglang_ext.config import PAGE_TOKENS, SparseAttnConfig
from sglang_ext.indexing.base import Selector
from sglang_ext.indexing.layer_plan import LayerMode, LayerPlan
from sglang_ext.metrics import Counters


class GroupedDecode:
    """Runs decode steps by one configuration. Holds no state between layers but what the plan carries.

    Args:
        config: budgets, pooling, sink and recent window.
        selector: of the configured method.
        layer_plan: role of each layer.
        counters: receives the positions read.
        dense_heads: [num_layers] KV heads that attend the whole prefix although their layer selects; empty for none.

    Raises:
        ValueError: dense heads of another number of layers, or a head that a layer does not have.
    """

    def __init__(
        self,
        config: SparseAttnConfig,
        selector: Selector,
        layer_plan: LayerPlan,
        counters: Counters,
        dense_heads: Sequence[Sequence[int]] = (),
    ) -> None:
        dense = [tuple(sorted(set(heads))) for heads in dense_heads] or [()] * len(layer_plan)
        if len(dense) != len(layer_plan) or any(not 0 <= h < layer_plan.num_kv_heads for heads in dense for h in heads):
            raise ValueError(
                f"expected dense heads of {len(layer_plan)} layers, each in 0..{layer_plan.num_kv_heads - 1}, got "
                f"{dense}; is the profile of another model?"
            )
        self._config = config
        self._selector = selector
        self._layer_plan = layer_plan
        self._counters = counters
        self._dense_heads = dense
        self._reused = {role.anchor_layer for role in layer_plan.layers}
        self._num_recent = config.num_recent_pages * PAGE_TOKENS

    def run(self, q: Tensor, kv: PagedKV, plan: DecodePlan, layer: int, sm_scale: float) -> Tensor:
        """Attention output of one layer for the whole batch.

        Args:
            q: [batch_size, num_qo_heads, head_dim] post-RoPE queries.
            kv: the layer's pool buffers; the new tokens' K and V are already written.
            plan: this step's groups.
            layer: layer number.
            sm_scale: attention scale.

        Returns:
            [batch_size, num_qo_heads, v_head_dim] in q's dtype, new memory.
        """
        state = suffix_attention(q, kv, plan.kv_indptr, plan.kv_indices, sm_scale)
        for group in plan.groups:
            state, selection = self._attended(q, kv, group, layer, sm_scale, state)
            self._counters.count_selection(layer, selection, group.prefix_len, group.num_rows)
        for own in plan.private:
            if self._layer_plan.layers[layer].mode is LayerMode.ANCHOR:
                own.index.build(layer, kv, own.slots, q.dtype)
            state, selection = self._attended(q, kv, own, layer, sm_scale, state)
            self._counters.count_private(selection, own.prefix_len)
        return state.out.to(q.dtype)

    def _attended(
        self, q: Tensor, kv: PagedKV, group: Group[Any], layer: int, sm_scale: float, before: AttnState
    ) -> tuple[AttnState, Selection]:
        """A state of the whole batch with what a group's rows attend of the group's tokens."""
        rows = q[group.rows]
        selection = self.select(rows, group, kv.num_kv_heads, layer, sm_scale)
        found = prefix_attention(rows, kv, group.slots, selection, sm_scale)
        both = merge_state(found, AttnState(before.out[group.rows], before.lse[group.rows]))
        out, lse = (old.index_copy(0, group.rows, new) for old, new in ((before.out, both.out), (before.lse, both.lse)))
        return AttnState(out, lse), selection

    def select(self, q: Tensor, group: Group[Any], num_kv_heads: int, layer: int, sm_scale: float) -> Selection:
        """The positions of one group at one layer, by the layer's role; dense heads of the layer have all of them.

        A reuse layer takes what its anchor layer selected, also from heads that are dense there. Where SGLang ran
        the anchor layer itself (`unsupported_layer`) there is nothing to take, and the reuse layer reads all.

        Args:
            q: [num_rows, num_qo_heads, head_dim] queries of the group's rows.
        """
        role = self._layer_plan.layers[layer]
        prefix_len = group.prefix_len
        dense = self._dense_heads[layer]
        selection = None
        if role.mode is not LayerMode.DENSE and self.budget(group) < prefix_len:
            if role.anchor_layer is not None:
                anchor = group.selections.get(role.anchor_layer)
                if anchor is not None and len(dense) < num_kv_heads:
                    selection = anchor.for_heads(torch.tensor(role.head_map, dtype=torch.int64, device=q.device))
            elif len(dense) < num_kv_heads or layer in self._reused:
                selection = self._anchored(q, group, layer, sm_scale)
        if selection is None or len(dense) == num_kv_heads:
            return Selection.all(prefix_len, num_kv_heads, q.device)
        return with_dense_heads(selection, dense, prefix_len)

    def _anchored(self, q: Tensor, group: Group[Any], layer: int, sm_scale: float) -> Selection:
        """An anchor layer's own selection: a new one, or the group's last one within its search period."""
        selection = group.kept.get(layer)
        if selection is None:
            group.queries[layer] = q
            budget = self.budget(group)
            selection = self._selector.select(
                group.index.layers[layer],
                q,
                prefix_len=group.prefix_len,
                budget=budget,
                num_sink=min(self._config.num_sink_tokens, budget),
                num_recent=min(self._num_recent, max(budget - self._config.num_sink_tokens, 0)),
                sm_scale=sm_scale,
                pooling=Pooling(self._config.pooling),
            )
        group.selections[layer] = selection
        return selection

    def budget(self, group: Group[Any]) -> int:
        """Prefix tokens of a group per KV head, never more than the prefix has."""
        one = self._config.budget(group.prefix_len)
        cap = max(one, int(self._config.max_keep_ratio * group.prefix_len))
        grown = budget_for_group(one, group.num_rows, BudgetGrowth(self._config.group_growth), cap)
        return min(grown, group.prefix_len)


def with_dense_heads(selection: Selection, heads: Sequence[int], prefix_len: int) -> Selection:
    """A selection in which some KV heads have every position of the prefix; the others keep theirs.

    Args:
        selection: positions of all KV heads. Not written.
        heads: KV heads, any number of them.
        prefix_len: tokens of the prefix.
    """
    if not heads:
        return selection
    missing = prefix_len - selection.max_count
    positions = torch.nn.functional.pad(selection.positions, (0, missing), value=-1)
    counts = selection.counts.clone()
    everything = torch.arange(prefix_len, dtype=torch.int32, device=positions.device)
    for head in heads:
        positions[head] = everything
        counts[head] = prefix_len
    return Selection(positions, counts)
