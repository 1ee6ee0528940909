"""One decode step of a layer, attended over a selection, beside dense decode: for `offload_churn.py`.

The predictors of queries that this module compared are gone (docs/selection.md, "Selecting ahead").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_ext.methods.base import SelectArgs


@dataclass(frozen=True)
class Step:
    """One layer at one decode step.

    Attributes:
        keys, values: [num_kv_heads, prefix_len, head_dim].
        own_keys, own_values: [num_kv_heads, tokens behind the prefix, head_dim], the token that is read included.
        query: [num_qo_heads, head_dim], the true one.
        blocks, last, predicted: of the predictors; not read.
        args: sizes of a selection but for the budget.
    """

    keys: Tensor
    values: Tensor
    blocks: dict[str, Tensor]
    own_keys: Tensor
    own_values: Tensor
    query: Tensor
    last: Tensor
    predicted: Tensor
    args: SelectArgs

    def attended(self, selected: Tensor) -> tuple[Tensor, Tensor]:
        """Attention mass and relative output error [..., num_kv_heads], means over the KV head's query heads.

        Args:
            selected: bool [..., num_kv_heads, prefix_len]: the prefix tokens that are attended.
        """
        heads = self.keys.shape[0]
        query = self.query.view(heads, -1, self.query.shape[-1])
        logits = query @ torch.cat([self.keys, self.own_keys], 1).mT * self.args.sm_scale
        shares = logits.softmax(-1)
        prefix, own = shares.split([self.keys.shape[1], self.own_keys.shape[1]], -1)
        behind = own @ self.own_values
        dense = prefix @ self.values + behind
        # As many tokens are read as the fullest selection has: masks are cheap to name, and slow to multiply.
        count = int(selected.sum(-1).amax())
        best = selected.float().topk(count, dim=-1)
        read = best.indices[..., None, :].expand(*best.indices.shape[:-1], query.shape[1], count)
        kept = prefix.expand(*read.shape[:-1], -1).gather(-1, read) * best.values[..., None, :]
        head = torch.arange(heads, device=read.device)[:, None]
        mass = kept.sum(-1) + own.sum(-1)
        out = (kept @ self.values[head, best.indices] + behind) / mass[..., None]
        return mass.mean(-1), ((out - dense).norm(dim=-1) / dense.norm(dim=-1)).mean(-1)
