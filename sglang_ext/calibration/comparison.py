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


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A calibrated choice and its rival.

    Attributes:
        choice, against: what they are.
        calibrated, rival: share of the attention that they hold, mean over held-out prompts.
        gain: calibrated less rival, paired by prompt.
        low, high: 95% interval of it by bootstrap over groups of prompts; None with fewer than two groups.
        reason: why it does not win, where it does not.
    """

    choice: str
    against: str
    calibrated: float
    rival: float
    gain: float
    low: float | None
    high: float | None
    reason: str


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """The held-out comparison.

    Attributes:
        fitted, held_out: numbers of prompts.
        first_layer: layers before it are dense and take no part.
        num_heads: KV heads that take part.
        blocks: recall of block sizes per head against one size, at equal budgets and bytes.
        anchors: attention kept at the budget, with head maps, by anchors of the programme, which maximizes it, against
            evenly spaced ones: of 1, 2, ... anchors.
        head_maps: the same with the programme's anchors, by head maps against the identity: of 1, 2, ... anchors.
    """

    fitted: int
    held_out: int
    first_layer: int
    num_heads: int
    blocks: Comparison
    anchors: list[Comparison]
    head_maps: list[Comparison]


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
    recovery = torch.stack([one.recovery for one in held])
    anchors, maps = [], []
    for count in range(1, num_layers - first + 1):
        chosen, even = best_anchors(fit, setting, count), evenly_spaced_anchors(num_layers, count, first)
        kept, kept_even = (plan_recovery(recovery, plan, fit.recovery) for plan in (chosen, even))
        reason = _anchor_reason(count, num_layers - first - 1, chosen == even)
        anchors.append(paired(_listed(chosen), _listed(even), kept, kept_even, reason, numbers))
        if count < num_layers - first:
            own = plan_recovery(recovery, chosen, fit.recovery, remap=False)
            reason = "the maps chosen on the fitted prompts do not carry over to the held-out ones"
            if bool((kept == own).all()):
                reason = f"the best map of each of the {num_kv_heads} KV heads is the identity"
            maps.append(paired(f"maps of anchors {_listed(chosen)}", "identity", kept, own, reason, numbers))
    return HeldOut(
        fitted=len(fitted),
        held_out=len(held),
        first_layer=first,
        num_heads=(num_layers - first) * num_kv_heads,
        blocks=_blocks(fit.recall[first:], torch.stack([one.recall for one in held])[:, first:], numbers),
        anchors=anchors,
        head_maps=maps,
    )


def paired(choice: str, against: str, calibrated: Tensor, rival: Tensor, reason: str, groups: Tensor) -> Comparison:
    """Compare by what each of them holds of each prompt, [num_prompts]; the reason is kept where the choice does not
    win. Prompts of one group ([num_prompts] int64: 0, 1, ...) are drawn together.
    """
    differences = calibrated - rival
    gain = float(differences.mean())
    low = high = None
    count = groups.bincount()
    if len(count) > 1:
        total = torch.zeros(len(count), dtype=torch.float64).index_add_(0, groups, differences.double())
        gen = torch.Generator().manual_seed(0)
        drawn = torch.randint(len(count), (RESAMPLES, len(count)), generator=gen)
        means = total[drawn].sum(dim=1) / count[drawn].sum(dim=1)
        low, high = (float(means.quantile(q)) for q in (0.025, 0.975))
    return Comparison(
        choice=choice,
        against=against,
        calibrated=float(calibrated.mean()),
        rival=float(rival.mean()),
        gain=gain,
        low=low,
        high=high,
        reason="" if gain > 0 else reason,
    )


def recall_of(recall: Tensor, sizes: Tensor) -> Tensor:
    """[num_prompts, num_layers, num_kv_heads, num_block_sizes] recall at each head's own size -> [num_prompts]."""
    column = (sizes[..., None] == torch.tensor(BLOCK_SIZES)).int().argmax(dim=-1)
    index = column.expand(recall.shape[:-1])[..., None]
    return recall.gather(3, index).flatten(1).mean(dim=1)


def _blocks(fitted: Tensor, held: Tensor, groups: Tensor) -> Comparison:
    sizes = block_sizes_by_budget(fitted, UNIFORM_SIZE)
    uniform, adaptive = recall_of(held, torch.full_like(sizes, UNIFORM_SIZE)), recall_of(held, sizes)
    reason = "the heads' differences on the fitted prompts do not carry over to the held-out ones"
    if bool((sizes == UNIFORM_SIZE).all()):
        reason = "one size is best at these bytes"
    choice = f"sizes per head, {average_block_size(sizes):.1f} tokens on average"
    return paired(choice, f"{UNIFORM_SIZE} tokens", adaptive, uniform, reason, groups)


def _anchor_reason(count: int, free: int, same: bool) -> str:
    if count in (1, free + 1):
        return "there is one choice of so many anchors: nothing to choose"
    if same:
        return f"the programme chooses the evenly spaced anchors; there are {math.comb(free, count - 1)} choices"
    return "the programme weighs layers by importance; the mean mass compared here does not"


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))
