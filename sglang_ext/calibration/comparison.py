"""What each calibrated choice gains over its simple rival, on prompts that it was not fitted on.

Adaptive block sizes against one size at the same average, anchors of the programme against evenly spaced ones, head
maps against the identity. Every measure is linear in a prompt's own tables, so differences are paired by prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from sglang_ext.calibration.block_size import average_block_size, block_sizes_by_budget
from sglang_ext.calibration.fit import FitSetting, best_anchors, plan_recovery
from sglang_ext.calibration.measurement import PromptMeasurement, average
from sglang_ext.calibration.plans import evenly_spaced_anchors
from sglang_ext.methods.ab_sparse import BLOCK_SIZES

RESAMPLES = 2000
UNIFORM_SIZE = 32
"""Tokens: of the sizes the one at whose bytes heads can have others."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A paired difference over held-out prompts.

    Attributes:
        mean: calibrated less rival.
        low, high: 95% interval by bootstrap over groups of prompts; None with fewer than two groups.
        reason: why it does not win, where it does not.
    """

    mean: float
    low: float | None
    high: float | None
    reason: str = ""

    @property
    def wins(self) -> bool:
        return self.mean > 0


class BlockComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out recall of block sizes per head (adaptive) against one size (uniform), at equal budgets and bytes.

    Attributes:
        adaptive_average: of the adaptive sizes, at least `uniform_size`.
        sizes: [num_layers][num_kv_heads] adaptive sizes of the layers that take part, tokens per block.
    """

    uniform_size: int
    adaptive_average: float
    uniform: float
    adaptive: float
    difference: Difference
    sizes: list[list[int]]


class AnchorComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Anchors of the programme, which maximizes the attention mass kept, against evenly spaced ones, held out.

    Attributes:
        recovery_programme, recovery_even: attention mass kept at the budget, with head maps; `difference` is theirs.
    """

    num_anchors: int
    programme: tuple[int, ...]
    even: tuple[int, ...]
    recovery_programme: float
    recovery_even: float
    difference: Difference


class HeadMapComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Head maps against the identity with the programme's anchors: attention mass kept at the budget, held out, over
    all layers that take part."""

    anchors: tuple[int, ...]
    remapped: float
    identity: float
    difference: Difference


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """The held-out comparison; `fitted` and `held_out` are numbers of prompts, `num_heads` KV heads that take part.
    Layers before `first_layer` are dense and take none."""

    fitted: int
    held_out: int
    first_layer: int
    num_heads: int
    blocks: BlockComparison
    anchors: list[AnchorComparison]
    head_maps: list[HeadMapComparison]


def compare(
    fitted: Sequence[PromptMeasurement],
    held: Sequence[PromptMeasurement],
    groups: Sequence[str],
    setting: FitSetting,
) -> HeldOut:
    """Fit on one half, compare on the other; at least one prompt in each.

    Args:
        fitted, held: prompts to choose by, and to compare on.
        groups: of the held-out prompts. Those with the same prefix are one group: they are not independent, and
            intervals draw them together.
        setting: how the profile is fitted.

    Raises:
        ValueError: a setting that does not fit the model.
    """
    names = list(dict.fromkeys(groups))
    numbers = torch.tensor([names.index(name) for name in groups])
    fit = average(fitted)
    num_layers, num_kv_heads = fit.oracle.shape
    first = setting.first_layer(num_layers)
    recalls = torch.stack([one.recall for one in held])[:, first:]
    recovery = torch.stack([one.recovery for one in held])
    anchors, maps = [], []
    for count in range(1, num_layers - first + 1):
        anchors.append(_anchors(count, fit, recovery, setting, numbers))
        if count < num_layers - first:
            maps.append(_head_maps(anchors[-1].programme, fit, recovery, numbers))
    return HeldOut(
        fitted=len(fitted),
        held_out=len(held),
        first_layer=first,
        num_heads=(num_layers - first) * num_kv_heads,
        blocks=_blocks(fit.recall[first:], recalls, numbers),
        anchors=anchors,
        head_maps=maps,
    )


def paired(differences: Tensor, reason: str, groups: Tensor) -> Difference:
    """Mean and 95% bootstrap interval of [num_prompts] differences; the reason is kept where they do not win.

    Prompts of one group ([num_prompts] int64: 0, 1, ...) are drawn together.
    """
    mean = float(differences.mean())
    low = high = None
    count = groups.bincount()
    if len(count) > 1:
        total = torch.zeros(len(count), dtype=torch.float64).index_add_(0, groups, differences.double())
        gen = torch.Generator().manual_seed(0)
        drawn = torch.randint(len(count), (RESAMPLES, len(count)), generator=gen)
        means = total[drawn].sum(dim=1) / count[drawn].sum(dim=1)
        low, high = (float(means.quantile(q)) for q in (0.025, 0.975))
    return Difference(mean=mean, low=low, high=high, reason="" if mean > 0 else reason)


def recall_of(recall: Tensor, sizes: Tensor) -> Tensor:
    """[num_prompts, num_layers, num_kv_heads, num_block_sizes] recall at each head's own size -> [num_prompts]."""
    column = (sizes[..., None] == torch.tensor(BLOCK_SIZES)).int().argmax(dim=-1)
    index = column.expand(recall.shape[:-1])[..., None]
    return recall.gather(3, index).flatten(1).mean(dim=1)


def _blocks(fitted: Tensor, held: Tensor, groups: Tensor) -> BlockComparison:
    sizes = block_sizes_by_budget(fitted, UNIFORM_SIZE)
    uniform, adaptive = recall_of(held, torch.full_like(sizes, UNIFORM_SIZE)), recall_of(held, sizes)
    if bool((sizes == UNIFORM_SIZE).all()):
        reason = "one size is best at these bytes"
    else:
        reason = "the heads' differences on the fitted prompts do not carry over to the held-out ones"
    return BlockComparison(
        uniform_size=UNIFORM_SIZE,
        adaptive_average=average_block_size(sizes),
        uniform=float(uniform.mean()),
        adaptive=float(adaptive.mean()),
        difference=paired(adaptive - uniform, reason, groups),
        sizes=sizes.tolist(),
    )


def _anchors(
    count: int, fit: PromptMeasurement, recovery: Tensor, setting: FitSetting, groups: Tensor
) -> AnchorComparison:
    num_layers = fit.oracle.shape[0]
    first = setting.first_layer(num_layers)
    programme, even = best_anchors(fit, setting, count), evenly_spaced_anchors(num_layers, count, first)
    kept, kept_even = (plan_recovery(recovery, anchors, fit.recovery) for anchors in (programme, even))
    reason = _anchor_reason(count, num_layers - first - 1, programme == even)
    return AnchorComparison(
        num_anchors=count,
        programme=programme,
        even=even,
        recovery_programme=float(kept.mean()),
        recovery_even=float(kept_even.mean()),
        difference=paired(kept - kept_even, reason, groups),
    )


def _anchor_reason(count: int, free: int, same: bool) -> str:
    if count in (1, free + 1):
        return "there is one choice of so many anchors: nothing to choose"
    if same:
        return f"the programme chooses the evenly spaced anchors; there are {math.comb(free, count - 1)} choices"
    return "the programme weighs layers by importance; the mean mass compared here does not"


def _head_maps(anchors: tuple[int, ...], fit: PromptMeasurement, recovery: Tensor, groups: Tensor) -> HeadMapComparison:
    remapped = plan_recovery(recovery, anchors, fit.recovery)
    identity = plan_recovery(recovery, anchors, fit.recovery, remap=False)
    num_kv_heads = recovery.shape[-1]
    if bool((remapped == identity).all()):
        reason = f"the best map of each of the {num_kv_heads} KV heads is the identity"
    else:
        reason = "the maps chosen on the fitted prompts do not carry over to the held-out ones"
    return HeadMapComparison(
        anchors=anchors,
        remapped=float(remapped.mean()),
        identity=float(identity.mean()),
        difference=paired(remapped - identity, reason, groups),
    )
