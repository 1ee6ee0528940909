"""Statistics of one layer's attention, and of pairs of layers: what calibration chooses by.

Pure torch over captured queries and keys. Budgets are those of serving: windows that are always attended count as
attended here, too; a sink in a block of 64 would otherwise be charged to the block size.

Sources: recall by block size (AB-Sparse, 2.3: the share of attention in the tokens of the selected blocks, at one token
budget for all block sizes); pairs of layers (Kascade, 3.4, and 3.5 per head; by mass kept at the budget, where its
Eq. 3 takes 64 keys and the worst token); sparsity (Kascade, Figure 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from prefix_kernels.block_scores import block_scores_minmax
from prefix_kernels.pooling import Pooling
from sglang_ext.calibration.prompt_capture import LayerCapture, attention_chunks, pool_tokens
from sglang_ext.methods.ab_sparse import BLOCK_SIZES, block_representation

PROPOSED_RATIOS = (0.05, 0.02)
"""Budgets that are proposed beside the one that is asked for, as fractions of the prefix."""


@dataclass(frozen=True)
class MeasureSetting:
    """What is measured, and of how many tokens; the command line and the server's configuration check it.

    Attributes:
        keep_ratio: budget as a fraction of the prefix, for block recall and reuse recovery.
        min_top_k: fewest tokens of each of these budgets, as served (Kascade, 4.1: 128).
        num_sink, num_recent: positions that serving always attends.
        mass: share of attention whose number of keys is the sparsity (Kascade, Figure 1: 0.95).
        max_tokens: tokens of a prompt that are measured, at most; they are spread evenly.
    """

    keep_ratio: float = 0.05
    min_top_k: int = 128
    num_sink: int = 16
    num_recent: int = 64
    mass: float = 0.95
    max_tokens: int = 32

    @property
    def keep_ratios(self) -> tuple[float, ...]:
        """Budgets that may be recommended, at which heads are judged; `keep_ratio` is the first."""
        return tuple(dict.fromkeys((self.keep_ratio, *PROPOSED_RATIOS)))


# -- recall ------------------------------------------------------------------------------------------------------------


def recall_by_block_size(capture: LayerCapture, sm_scale: float, setting: MeasureSetting) -> Tensor:
    """Recall of every token's own selection, for each block size at the same token budget.

    Blocks are scored by minimum and maximum of each channel (Quest), not quantized.

    A token that sees v keys may read max(int(keep_ratio * v), min_top_k, its windows, 1) of them, or all: the windows,
    then blocks in the order of their scores, the last one cut. A block that a token sees in part is scored by all of
    its keys.

    Args:
        capture: one layer's, finite.
        sm_scale: the model's attention scale.
        setting: budget and windows.

    Returns:
        [num_block_sizes, num_kv_heads, num_tokens] fp64 on the CPU in 0..1, new. The mass of a KV head is the mean over
        its query heads; they share a selection by maximum pooling, as in serving.
    """
    blocks = [(size, block_representation(capture.keys, size, "minmax")) for size in BLOCK_SIZES]
    recall = torch.empty(len(blocks), capture.num_kv_heads, capture.num_tokens, dtype=torch.float64)
    for tokens, log_mass in attention_chunks(capture, sm_scale):
        windows = _Windows.of(capture, tokens, setting, setting.keep_ratio)
        mass = log_mass.exp_()
        fixed, free_mass = (mass * windows.always).sum(dim=2), mass * windows.free
        for i, (size, arrays) in enumerate(blocks):
            raw = block_scores_minmax(capture.queries[tokens], *arrays)
            hidden = torch.arange(raw.shape[3], device=raw.device) * size >= windows.visible[:, None]
            pooled = pool_tokens(raw.masked_fill(hidden[:, None], -torch.inf), sm_scale, Pooling.MAX)
            order = pooled.argsort(dim=2, descending=True, stable=True)
            recall[i, :, tokens] = (fixed + _best_blocks(free_mass, windows, order, size)).double().cpu()
    return recall.clamp_(max=1.0)


def best_recall(capture: LayerCapture, sm_scale: float, setting: MeasureSetting) -> Tensor:
    """Recall of the best single tokens at several budgets, windows included: what no selection exceeds.

    Args:
        capture: one layer's, finite.
        sm_scale: the model's attention scale.
        setting: budgets, windows, fewest tokens of a budget.

    Returns:
        [num_keep_ratios, num_kv_heads, num_tokens] fp64 on the CPU in 0..1, new.
    """
    best = torch.empty(len(setting.keep_ratios), capture.num_kv_heads, capture.num_tokens, dtype=torch.float64)
    for tokens, log_mass in attention_chunks(capture, sm_scale):
        mass = log_mass.exp_()
        for i, ratio in enumerate(setting.keep_ratios):
            windows = _Windows.of(capture, tokens, setting, ratio)
            most = int(windows.wanted.max())
            ranked = (mass * windows.free).topk(most, dim=2).values
            taken = torch.arange(most, device=mass.device) < windows.wanted[:, None]
            best[i, :, tokens] = ((mass * windows.always).sum(dim=2) + (ranked * taken).sum(dim=2)).double().cpu()
    return best.clamp_(max=1.0)


class _Windows(NamedTuple):
    """Per token: keys it sees [t], keys always attended and keys to choose from [t, prefix_len] bool, and how many
    of the latter may be chosen [t]."""

    visible: Tensor
    always: Tensor
    free: Tensor
    wanted: Tensor

    @classmethod
    def of(cls, capture: LayerCapture, tokens: slice, setting: MeasureSetting, keep_ratio: float) -> _Windows:
        key = torch.arange(capture.prefix_len, device=capture.keys.device)
        visible = capture.visible[tokens].to(key.device)
        seen = key < visible[:, None]
        always = seen & ((key < setting.num_sink) | (key >= visible[:, None] - setting.num_recent))
        # In fp64, so that a budget is the same number that Python's int(keep_ratio * v) gives.
        budget = (visible.double() * keep_ratio).long().clamp_min(max(setting.min_top_k, 1)).minimum(visible)
        return cls(visible, always, seen & ~always, (budget - always.sum(dim=1)).clamp_min(0))


def _best_blocks(free_mass: Tensor, windows: _Windows, order: Tensor, size: int) -> Tensor:
    """Mass of the first `wanted` free keys when blocks are read in `order` [num_kv_heads, t, num_blocks]."""
    heads, num_tokens, num_blocks = order.shape
    missing = num_blocks * size - free_mass.shape[2]
    mass = pad(free_mass, (0, missing)).view(heads, num_tokens, num_blocks, size)
    free = pad(windows.free, (0, missing)).view(num_tokens, num_blocks, size)
    count = free.sum(dim=2).expand(heads, -1, -1).gather(2, order)
    whole = count.cumsum(dim=2) <= windows.wanted[:, None]
    total = (mass.sum(dim=3).gather(2, order) * whole).sum(dim=2)
    # The block behind the last whole one is cut. Where all are whole, nothing is left to take from the last.
    num_whole = whole.sum(dim=2)
    left = windows.wanted - (count * whole).sum(dim=2)
    block = order.gather(2, num_whole.clamp_max(num_blocks - 1)[..., None])
    index = block[..., None].expand(-1, -1, -1, size)
    cut_mass = mass.gather(2, index).squeeze(2)
    cut_free = free.expand(heads, -1, -1, -1).gather(2, index).squeeze(2)
    taken = cut_free & (cut_free.cumsum(dim=2) <= left[..., None])
    return total + (cut_mass * taken).sum(dim=2)


def keys_for_mass(capture: LayerCapture, sm_scale: float, mass: float) -> Tensor:
    """Smallest fraction of the visible keys that holds `mass` of a token's attention (Kascade, Figure 1).

    Returns:
        [num_kv_heads, num_tokens] fp64, above 0 and at most 1; attention is the mean over a KV head's query heads.
    """
    found = torch.empty(capture.num_kv_heads, capture.num_tokens, dtype=torch.float64)
    for tokens, log_mass in attention_chunks(capture, sm_scale):
        held = log_mass.exp_().sort(dim=2, descending=True).values.double().cumsum(dim=2)
        count = (held < mass * held[..., -1:]).sum(dim=2) + 1
        found[:, tokens] = (count / capture.visible[tokens].to(count.device)).double().cpu()
    return found


# -- pairs of layers ---------------------------------------------------------------------------------------------------


def reuse_recovery(layers: Iterable[LayerCapture], sm_scale: float, top_k: int) -> Tensor:
    """Attention mass that a layer keeps when it attends the Top-k of another, mean over tokens: what reuse costs.

    For the token t and the KV heads g of layer a and h of layer b, with P the post-softmax attention, mean over
    the head's GQA group, and I the Top-k positions: sum P_b,h[t, I_a,g[t]].

    Args:
        layers: one finite capture per layer in layer order, of the same tokens over the same prefix; read once.
        sm_scale: the model's attention scale.
        top_k: the budget of serving; limited by prefix_len.

    Returns:
        [a, b, h, g] fp64 on the CPU in 0..1: layer a selects, layer b <= its successors attends; 0 where a > b. a == b,
        g == h is the head's own Top-k.
    """
    columns = [one.double().mean(dim=1).cpu() for one in _recovered_mass(layers, sm_scale, top_k)]
    heads = columns[0].shape[1]
    table = torch.zeros(len(columns), len(columns), heads, heads, dtype=torch.float64)
    for layer, column in enumerate(columns):
        table[: layer + 1, layer] = column
    # Sums in another order may exceed the whole by rounding.
    return table.clamp_(max=1.0)


def _recovered_mass(layers: Iterable[LayerCapture], sm_scale: float, top_k: int) -> Iterator[Tensor]:
    """For each layer b its mass in the Top-k keys of every layer up to it: [b + 1, num_tokens, heads of b, of a] fp32.

    In memory at once: the Top-k positions of all layers (int32), one layer's capture and a chunk of its attention.
    """
    chosen: list[Tensor] = []
    for capture in layers:
        heads, num_tokens, top = capture.num_kv_heads, capture.num_tokens, min(top_k, capture.prefix_len)
        chosen.append(torch.empty(num_tokens, heads * top, dtype=torch.int32, device=capture.keys.device))
        taken = torch.empty(len(chosen), num_tokens, heads, heads, device=capture.keys.device)
        for tokens, log_mass in attention_chunks(capture, sm_scale, heads * heads * top):
            chosen[-1][tokens] = log_mass.topk(top, dim=2).indices.transpose(0, 1).flatten(1).int()
            mass = log_mass.exp_()
            for layer, picks in enumerate(chosen):
                part = mass.gather(2, picks[tokens].long().expand(heads, -1, -1))
                taken[layer, tokens] = part.view(heads, -1, heads, top).sum(dim=3).transpose(0, 1)
        yield taken
