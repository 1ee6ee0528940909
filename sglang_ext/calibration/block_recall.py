"""Attention recall of block selection for each KV head and block size: what block sizes are chosen by.

Source: AB-Sparse, 2.3: the share of attention in the tokens of the selected blocks, at a fixed token budget for all
block sizes. Windows that serving always attends count as attended here too: a sink in a block of 64 would
otherwise be charged to the block size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from prefix_kernels.block_scores import block_scores_mean, block_scores_minmax
from prefix_kernels.pooling import Pooling
from sglang_ext.calibration.capture import (
    LayerCapture,
    check_capture,
    check_state,
    log_attention,
    pool_tokens,
    require_prompts,
    take_layers,
    token_chunks,
)
from sglang_ext.methods.ab_sparse import BLOCK_SIZES, block_representation

BlockScorer = Callable[[Tensor, int], Callable[[Tensor], Tensor]]
"""(keys [prefix_len, num_kv_heads, head_dim], block_size) -> (q [num_tokens, num_qo_heads, head_dim] -> raw scores
[num_kv_heads, num_tokens, gqa, ceil(prefix_len / block_size)])."""


def mean_scorer(keys: Tensor, block_size: int) -> Callable[[Tensor], Tensor]:
    """Scores by the mean key of each block, not quantized."""
    (mean,) = block_representation(keys, block_size, "mean")
    return lambda q: block_scores_mean(q, mean)


def minmax_scorer(keys: Tensor, block_size: int) -> Callable[[Tensor], Tensor]:
    """Quest's upper bound by each block's minimum and maximum, not quantized."""
    low, high = block_representation(keys, block_size, "minmax")
    return lambda q: block_scores_minmax(q, low, high)


@dataclass(frozen=True)
class RecallSetting:
    """How recall is measured.

    Attributes:
        keep_ratio: a token's budget as a fraction of the keys it sees, windows included.
        block_sizes: ascending, tokens per block.
        num_sink: leading positions that are always attended.
        num_recent: positions up to the token's own that are always attended.
        pooling: over the query heads of a group, as in serving.
        min_top_k: fewest keys of a budget, as in serving.

    Raises:
        ValueError: a value out of range.
    """

    keep_ratio: float
    block_sizes: tuple[int, ...] = BLOCK_SIZES
    num_sink: int = 0
    num_recent: int = 0
    pooling: Pooling = Pooling.MAX
    min_top_k: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.keep_ratio <= 1.0:
            raise ValueError(f"expected keep_ratio above 0 and at most 1, got {self.keep_ratio}; choose one")
        check_block_sizes(self.block_sizes)
        if min(self.num_sink, self.num_recent) < 0:
            raise ValueError(f"expected windows of 0 or more tokens, got {self.num_sink} and {self.num_recent}")
        if self.min_top_k < 0:
            raise ValueError(f"expected min_top_k of 0 or more tokens, got {self.min_top_k}")


class BlockRecall(NamedTuple):
    """Recall of one layer and prompt.

    Attributes:
        recall: [num_block_sizes, num_kv_heads, num_tokens] fp64 in 0..1.
        oracle: [num_kv_heads, num_tokens] fp64, the best that a selection of as many single tokens can reach.
    """

    recall: Tensor
    oracle: Tensor


def recall_by_block_size(
    capture: LayerCapture, sm_scale: float, setting: RecallSetting, scorer: BlockScorer = mean_scorer
) -> BlockRecall:
    """Recall of every token's own selection, for each block size at the same token budget.

    A token that sees v keys may read max(int(keep_ratio * v), min_top_k, its windows, 1) of them, or all: the windows,
    then blocks in the order of their scores, the last one cut. A block that a token sees in part is scored by all of
    its keys.

    Args:
        capture: one layer's.
        sm_scale: the model's attention scale.
        setting: budget, block sizes, windows, pooling.
        scorer: block representation and its scores.

    Returns:
        New tensors on the CPU. The mass of a KV head is the mean over its query heads.

    Raises:
        ValueError: an unusable capture.
    """
    check_capture(capture)
    score_by_size = [scorer(capture.keys, size) for size in setting.block_sizes]
    heads, num_tokens = capture.num_kv_heads, capture.num_tokens
    recall = torch.empty(len(score_by_size), heads, num_tokens, dtype=torch.float64)
    oracle = torch.empty(heads, num_tokens, dtype=torch.float64)
    device = capture.keys.device
    for tokens in token_chunks(num_tokens, capture.queries.shape[1] * capture.prefix_len):
        mass = log_attention(capture, tokens, sm_scale).exp_()
        windows = _Windows.of(capture.visible[tokens].to(device), capture.prefix_len, setting)
        fixed = (mass * windows.always).sum(dim=2)
        free_mass = mass * windows.free
        oracle[:, tokens] = (fixed + _best_tokens(free_mass, windows.wanted)).double().cpu()
        for i, (size, score) in enumerate(zip(setting.block_sizes, score_by_size, strict=True)):
            raw = score(capture.queries[tokens])
            hidden = torch.arange(raw.shape[3], device=device) * size >= windows.visible[:, None]
            pooled = pool_tokens(raw.masked_fill(hidden[:, None], -torch.inf), sm_scale, setting.pooling)
            order = pooled.argsort(dim=2, descending=True, stable=True)
            recall[i, :, tokens] = (fixed + _best_blocks(free_mass, windows, order, size)).double().cpu()
    return BlockRecall(recall.clamp_(max=1.0), oracle.clamp_(max=1.0))


def best_recall(capture: LayerCapture, sm_scale: float, settings: Sequence[RecallSetting]) -> Tensor:
    """Recall of the best single tokens at several budgets, windows included: what no selection exceeds.

    Args:
        capture: one layer's.
        sm_scale: the model's attention scale.
        settings: budgets and windows.

    Returns:
        [num_settings, num_kv_heads, num_tokens] fp64 on the CPU, new.

    Raises:
        ValueError: an unusable capture.
    """
    check_capture(capture)
    best = torch.empty(len(settings), capture.num_kv_heads, capture.num_tokens, dtype=torch.float64)
    for tokens in token_chunks(capture.num_tokens, capture.queries.shape[1] * capture.prefix_len):
        mass = log_attention(capture, tokens, sm_scale).exp_()
        for i, setting in enumerate(settings):
            windows = _Windows.of(capture.visible[tokens].to(mass.device), capture.prefix_len, setting)
            fixed = (mass * windows.always).sum(dim=2)
            best[i, :, tokens] = (fixed + _best_tokens(mass * windows.free, windows.wanted)).double().cpu()
    return best.clamp_(max=1.0)


class _Windows(NamedTuple):
    """Per token: keys it sees [t], keys always attended and keys to choose from [t, prefix_len] bool, and how many
    of the latter may be chosen [t]."""

    visible: Tensor
    always: Tensor
    free: Tensor
    wanted: Tensor

    @classmethod
    def of(cls, visible: Tensor, prefix_len: int, setting: RecallSetting) -> _Windows:
        key = torch.arange(prefix_len, device=visible.device)
        seen = key < visible[:, None]
        always = seen & ((key < setting.num_sink) | (key >= visible[:, None] - setting.num_recent))
        # In fp64, so that a budget is the same number that Python's int(keep_ratio * v) gives.
        budget = (visible.double() * setting.keep_ratio).long().clamp_min(max(setting.min_top_k, 1)).minimum(visible)
        wanted = (budget - always.sum(dim=1)).clamp_min(0)
        return cls(visible, always, seen & ~always, wanted)


def _best_tokens(free_mass: Tensor, wanted: Tensor) -> Tensor:
    """Mass of the `wanted` [t] heaviest keys of [num_kv_heads, t, prefix_len]."""
    most = int(wanted.max())
    ranked = free_mass.topk(most, dim=2).values
    taken = torch.arange(most, device=ranked.device) < wanted[:, None]
    return (ranked * taken).sum(dim=2)


def _best_blocks(free_mass: Tensor, windows: _Windows, order: Tensor, size: int) -> Tensor:
    """Mass of the first `wanted` free keys when blocks are read in `order` [num_kv_heads, t, num_blocks]."""
    heads, num_tokens, num_blocks = order.shape
    missing = num_blocks * size - free_mass.shape[2]
    mass = torch.nn.functional.pad(free_mass, (0, missing)).view(heads, num_tokens, num_blocks, size)
    free = torch.nn.functional.pad(windows.free, (0, missing)).view(num_tokens, num_blocks, size)
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


@dataclass
class BlockRecallAccumulator:
    """Mean over tokens, then over prompts, of the recall. Mutable: `add_prompt` adds one prompt.

    Attributes:
        num_layers: layers of the model.
        num_kv_heads: KV heads per layer, before tensor parallelism.
        setting: how recall is measured.
        scorer: block representation; not part of the saved state.
        num_prompts: prompts so far.
        total: [num_layers, num_kv_heads, num_block_sizes + 1] fp64, sums over prompts, the oracle last. Owned.

    Raises:
        ValueError: a size below 1.
    """

    num_layers: int
    num_kv_heads: int
    setting: RecallSetting
    scorer: BlockScorer = mean_scorer
    num_prompts: int = field(default=0, init=False)
    total: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_kv_heads) < 1:
            raise ValueError(
                f"expected num_layers and num_kv_heads >= 1, got {self.num_layers} and {self.num_kv_heads}"
            )
        columns = len(self.setting.block_sizes) + 1
        self.total = torch.zeros(self.num_layers, self.num_kv_heads, columns, dtype=torch.float64)

    def add_prompt(self, layers: Iterable[LayerCapture], sm_scale: float) -> None:
        """Measure one prompt and add it; after an error nothing was added.

        Args:
            layers: one capture per layer in layer order; read once. Take tokens late in the prompt: an early one
                sees few keys, and its recall says little.
            sm_scale: the model's attention scale.

        Raises:
            ValueError: another number of layers or heads, or an unusable capture.
        """
        rows = []
        for capture in take_layers(layers, self.num_layers, self.num_kv_heads):
            recall, oracle = recall_by_block_size(capture, sm_scale, self.setting, self.scorer)
            rows.append(torch.cat([recall.mean(dim=2), oracle.mean(dim=1)[None]]).T)
        self.total += torch.stack(rows)
        self.num_prompts += 1

    def recall(self) -> Tensor:
        """[num_layers, num_kv_heads, num_block_sizes] fp64, new. Raises ValueError before the first prompt."""
        require_prompts(self.num_prompts)
        return self.total[..., :-1] / self.num_prompts

    def oracle_recall(self) -> Tensor:
        """[num_layers, num_kv_heads] fp64, new. Raises ValueError before the first prompt."""
        require_prompts(self.num_prompts)
        return self.total[..., -1] / self.num_prompts

    def state_dict(self) -> dict[str, object]:
        """Plain values that `load_state_dict` of an equally made accumulator goes on from; tensors are copies."""
        return {
            "keep_ratio": self.setting.keep_ratio,
            "block_sizes": list(self.setting.block_sizes),
            "windows": [self.setting.num_sink, self.setting.num_recent],
            "min_top_k": self.setting.min_top_k,
            "pooling": self.setting.pooling.value,
            "num_prompts": self.num_prompts,
            "total": self.total.clone(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a saved state, which is copied.

        Raises:
            ValueError: it is of another accumulator, model or setting.
        """
        check_state(state, self.state_dict())
        num_prompts, total = state["num_prompts"], state["total"]
        assert isinstance(num_prompts, int)
        assert isinstance(total, Tensor)
        self.num_prompts, self.total = num_prompts, total.clone()


def check_block_sizes(block_sizes: Sequence[int]) -> None:
    """Raise unless ascending and at least 1.

    Raises:
        ValueError: otherwise.
    """
    sizes = list(block_sizes)
    if not sizes or sizes[0] < 1 or sizes != sorted(set(sizes)):
        raise ValueError(f"expected ascending block sizes of at least 1 token, got {sizes}; for instance 16, 32, 64")
