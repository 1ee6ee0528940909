"""How good a selection is: attention mass, agreement with the oracle, error of the output.

Everything is measured against the full attention of the same queries over the same prefix, which is computed once
(`full_attention`) and then compared with any number of selections. Tokens are independent: each is a group of one
request with a selection of its own.

Sources: recall of attention mass (AB-Sparse, 2.3), Oracle Top-k (Kascade, 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from prefix_kernels.block_scores import block_scores_mean
from prefix_kernels.pooling import Pooling
from prefix_kernels.top_k_selection import top_k_selection
from prefix_kernels.types import Selection
from sglang_ext.calibration.prompt_capture import LayerCapture, check_capture, pool_tokens


@dataclass(frozen=True, eq=False)
class FullAttention:
    """Attention of some tokens over a whole prefix. Read only.

    Attributes:
        mass: [num_tokens, num_kv_heads, gqa, prefix_len] fp32, post-softmax probabilities.
        out: [num_tokens, num_kv_heads, gqa, v_head_dim] fp32.
        pooled: [num_tokens, num_kv_heads, prefix_len] fp32, natural log of the pooled probability.
        values: [num_kv_heads, prefix_len, v_head_dim] fp32.
    """

    mass: Tensor
    out: Tensor
    pooled: Tensor
    values: Tensor

    @property
    def num_kv_heads(self) -> int:
        return self.mass.shape[1]

    @property
    def prefix_len(self) -> int:
        return self.mass.shape[3]


class Oracle(NamedTuple):
    """The best selection at one budget, for `selection_quality`.

    Attributes:
        taken: bool [num_tokens, num_kv_heads, prefix_len].
        recall: [num_tokens] fp32, mean over query heads of the mass in it.
        num_sink, num_recent: windows that every selection of this budget has.
    """

    taken: Tensor
    recall: Tensor
    num_sink: int
    num_recent: int


class SelectionQuality(NamedTuple):
    """Figures of one selection per token; all [num_tokens] fp32.

    Attributes:
        recall: attention mass in the selection, mean over query heads.
        oracle_recall: the same for the oracle at this budget.
        overlap: share of the oracle's positions outside the windows that the selection has, mean over KV heads; 1
            where the windows fill the budget.
        error: |o_sparse - o_full| / |o_full| over the prefix, mean over query heads; o_sparse is normalized over
            the selection.
    """

    recall: Tensor
    oracle_recall: Tensor
    overlap: Tensor
    error: Tensor

    @property
    def oracle_ratio(self) -> Tensor:
        """[num_tokens] recall / oracle_recall. With max pooling it may exceed 1: the oracle ranks by pooled mass."""
        return self.recall / self.oracle_recall

    def means(self) -> dict[str, float]:
        """Means over the tokens, by name, `oracle_ratio` with them. Waits for the device once."""
        rows = torch.stack([*self, self.oracle_ratio]).double().mean(dim=1).tolist()
        return dict(zip([*self._fields, "oracle_ratio"], rows, strict=True))


def full_attention(
    q: Tensor, keys: Tensor, values: Tensor, sm_scale: float, pooling: Pooling = Pooling.MAX
) -> FullAttention:
    """Attention of tokens behind a prefix over all of it.

    Args:
        q: [num_tokens, num_qo_heads, head_dim] post-RoPE queries of tokens behind the prefix.
        keys: [prefix_len, num_kv_heads, head_dim] post-RoPE.
        values: [prefix_len, num_kv_heads, v_head_dim].
        sm_scale: the model's attention scale.
        pooling: how the query heads of a KV head's group share a selection.

    Raises:
        ValueError: shapes do not fit, or a value is NaN or infinite.
    """
    prefix_len, num_kv_heads = keys.shape[0], keys.shape[1]
    behind = torch.full((q.shape[0],), prefix_len, dtype=torch.int64)
    check_capture(LayerCapture(q, keys, behind))
    if values.dim() != 3 or values.shape[:2] != keys.shape[:2] or not bool(torch.isfinite(values).all()):
        raise ValueError(
            f"expected finite values [prefix_len={prefix_len}, num_kv_heads={num_kv_heads}, v_head_dim], got "
            f"{tuple(values.shape)}; capture keys and values of the same layer"
        )
    # A block of one key is its own mean.
    raw = block_scores_mean(q, keys.transpose(0, 1))
    pooled = pool_tokens(raw, sm_scale, pooling).transpose(0, 1).contiguous()
    mass = (raw * sm_scale).softmax(dim=3).transpose(0, 1).contiguous()
    rows = values.transpose(0, 1).float().contiguous()
    return FullAttention(mass, _outputs(mass, rows), pooled, rows)


def oracle_at(attention: FullAttention, budget: int, num_sink: int, num_recent: int) -> Oracle:
    """The positions with the greatest pooled probability, beside the windows: for every selection of that budget.

    Raises:
        ValueError: see `top_k_selection`.
    """
    scores = attention.pooled.flatten(0, 1)
    best = top_k_selection(scores, budget, num_sink, num_recent, 1, attention.prefix_len)
    taken = _taken(attention, best)
    recall = (attention.mass * taken[:, :, None]).sum(dim=3).mean(dim=(1, 2))
    return Oracle(taken, recall, num_sink, num_recent)


def joined_selections(selections: Sequence[Selection]) -> Selection:
    """Selections of several tokens as one: row t * num_kv_heads + h is KV head h of token t.

    Raises:
        ValueError: none, or selections of different widths.
    """
    shapes = {tuple(selection.positions.shape) for selection in selections}
    if len(shapes) != 1:
        raise ValueError(
            f"expected selections of one [num_kv_heads, max_count], got {sorted(shapes) or 'none'}; join selections "
            "of one budget"
        )
    positions = torch.cat([selection.positions for selection in selections])
    return Selection(positions, torch.cat([selection.counts for selection in selections]))


def selection_quality(attention: FullAttention, selection: Selection, oracle: Oracle) -> SelectionQuality:
    """Compare selections, a row for each token and KV head (`joined_selections`), with the full attention and with the
    oracle at the same budget and windows.

    Raises:
        ValueError: another number of rows, or positions outside the prefix.
    """
    taken = _taken(attention, selection)
    kept = attention.mass * taken[:, :, None]
    recall = kept.sum(dim=3)
    sparse = _outputs(kept, attention.values) / recall.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    length = attention.out.norm(dim=3).clamp_min(torch.finfo(torch.float32).tiny)
    error = (sparse - attention.out).norm(dim=3) / length
    free = slice(oracle.num_sink, attention.prefix_len - oracle.num_recent)
    wanted = oracle.taken[:, :, free].sum(dim=2)
    common = (oracle.taken & taken)[:, :, free].sum(dim=2)
    overlap = torch.where(wanted > 0, common / wanted.clamp_min(1), 1.0)
    return SelectionQuality(recall.mean(dim=(1, 2)), oracle.recall, overlap.mean(dim=1), error.mean(dim=(1, 2)))


def _taken(attention: FullAttention, selection: Selection) -> Tensor:
    """bool [num_tokens, num_kv_heads, prefix_len]."""
    num_tokens, num_kv_heads = attention.mass.shape[0], attention.num_kv_heads
    rows = num_tokens * num_kv_heads
    if selection.num_kv_heads != rows:
        raise ValueError(
            f"expected selections of {num_tokens} tokens x {num_kv_heads} KV heads = {rows} rows, got "
            f"{selection.num_kv_heads}; join the selections of all tokens"
        )
    column = torch.arange(selection.max_count, device=selection.positions.device)
    valid = column < selection.counts[:, None]
    outside = valid & ((selection.positions < 0) | (selection.positions >= attention.prefix_len))
    if bool(outside.any()):
        raise ValueError(
            f"expected positions in 0..{attention.prefix_len - 1}, got "
            f"{int(selection.positions[outside][0])}; is the selection of another prefix?"
        )
    taken = attention.mass.new_zeros(rows, attention.prefix_len + 1, dtype=torch.bool)
    # Padding goes to a column of its own.
    taken.scatter_(1, torch.where(valid, selection.positions, attention.prefix_len).long(), True)
    return taken[:, :-1].view(num_tokens, num_kv_heads, -1)


def _outputs(weight: Tensor, values: Tensor) -> Tensor:
    """[num_tokens, num_kv_heads, gqa, prefix_len] x [num_kv_heads, prefix_len, v_head_dim], one matmul per head."""
    num_tokens, num_kv_heads, gqa, prefix_len = weight.shape
    tile = weight.transpose(0, 1).reshape(num_kv_heads, num_tokens * gqa, prefix_len)
    return (tile @ values).view(num_kv_heads, num_tokens, gqa, -1).transpose(0, 1)
