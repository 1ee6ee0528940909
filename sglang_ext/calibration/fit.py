"""From measurements to the model's settings: block sizes, anchors and head maps, channels, dense heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sglang_ext.calibration.block_size import TAU, block_sizes_by_budget, block_sizes_by_tau
from sglang_ext.calibration.channels import NUM_CHANNELS_GQA, channel_contribution, top_channels
from sglang_ext.calibration.measurement import PromptMeasurement
from sglang_ext.calibration.plans import assigned_anchors, choose_anchors, layer_similarity, make_layer_plan
from sglang_ext.methods.layer_plan import LayerPlan

MIN_ORACLE_RECALL = 0.5
"""A head whose best possible selection keeps less than this share of its attention is called near-uniform: no selection
serves it. Uniform attention reaches the keep ratio (0.05 to 0.1); heads that sparse attention is made for, 0.95
(Kascade, Figure 1)."""

REUSE_RETENTION = 0.98
"""Without a given number of anchors: the fewest that keep this share of the attention mass that every layer's own
selection holds."""


@dataclass(frozen=True)
class FitSetting:
    """How a profile follows from measurements; the command line checks it.

    Attributes:
        num_anchors: layers that select; None: the fewest within `REUSE_RETENTION`.
        tau: recall retention of the block sizes (AB-Sparse, Eq. 2).
        block_average: instead of tau: tokens per block, harmonic mean over heads; the sizes with the best recall
            among those with so many blocks.
        dense_layers: layers that read the whole prefix: none, or the first ones (0, 1, ...).
        num_channels: channels of the token index, limited by head_dim.
    """

    num_anchors: int | None = None
    tau: float = TAU
    block_average: float | None = None
    dense_layers: tuple[int, ...] = (0,)
    num_channels: int = NUM_CHANNELS_GQA

    def first_layer(self, num_layers: int) -> int:
        """The first layer that is not dense.

        Raises:
            ValueError: a dense layer that the model does not have, or none that is left.
        """
        if len(self.dense_layers) >= num_layers:
            raise ValueError(
                f"expected dense layers in 0..{num_layers - 1} that leave one sparse, got {list(self.dense_layers)}; "
                "name fewer with --dense-layers"
            )
        return len(self.dense_layers)


@dataclass(frozen=True)
class Fit:
    """What was chosen.

    Attributes:
        block_sizes: [num_layers, num_kv_heads] int64, tokens per block.
        anchors: of the programme.
        plan: layer plan with head maps.
        channels: [num_layers, num_kv_heads, num_channels] int16, ascending.
        flat_heads: [num_layers, num_kv_heads] bool, heads of layers that would select whose attention is too flat to
            select from; none before `with_flat_heads`.
    """

    block_sizes: Tensor
    anchors: tuple[int, ...]
    plan: LayerPlan
    channels: Tensor
    flat_heads: Tensor

    @property
    def dense_heads(self) -> tuple[tuple[int, ...], ...]:
        """[num_layers] flat heads of layers that select all the same, ascending."""
        rows = [tuple(row.nonzero().flatten().tolist()) for row in self.flat_heads]
        return tuple(() if layer in self.plan.dense_layers else row for layer, row in enumerate(rows))

    @property
    def whole_layers(self) -> tuple[int, ...]:
        """Layers of dense heads: a server attends everything there."""
        return tuple(layer for layer, heads in enumerate(self.dense_heads) if heads)


def fit_settings(averages: PromptMeasurement, setting: FitSetting) -> Fit:
    """Choose everything by the averages.

    Raises:
        ValueError: a setting that does not fit the model.
    """
    first = setting.first_layer(averages.oracle.shape[0])
    recall = averages.recall
    if setting.block_average is None:
        sizes = block_sizes_by_tau(recall, setting.tau)
    else:
        # Layers that are dense have no index: their recall must not take part.
        sizes = block_sizes_by_tau(recall, 1.0)
        sizes[first:] = block_sizes_by_budget(recall[first:], setting.block_average)
    anchors = best_anchors(averages, setting)
    contribution = channel_contribution(averages.q_max, averages.k_max)
    return Fit(
        block_sizes=sizes,
        anchors=anchors,
        plan=make_layer_plan(anchors, averages.recovery, setting.dense_layers),
        channels=top_channels(contribution, min(setting.num_channels, contribution.shape[-1])),
        flat_heads=torch.zeros_like(averages.oracle, dtype=torch.bool),
    )


def with_flat_heads(fit: Fit, averages: PromptMeasurement, budget: int = 0) -> Fit:
    """The fit with near-uniform heads judged at the budget that is recommended. Their layers attend everything. Where
    no layer would be left that selects, the plan stays.

    Args:
        fit: of `fit_settings`, by the same averages.
        averages: see there.
        budget: which of the `keep_ratios` that were measured.
    """
    flat = averages.best[budget] < MIN_ORACLE_RECALL
    flat[list(fit.plan.dense_layers)] = False
    plan = fit.plan.with_dense(flat.any(dim=1).nonzero().flatten().tolist())
    return replace(fit, plan=plan if plan.anchor_layers else fit.plan, flat_heads=flat)


def best_anchors(averages: PromptMeasurement, setting: FitSetting) -> tuple[int, ...]:
    """The programme's anchors: as many as the setting says, else the fewest whose reuse keeps `REUSE_RETENTION` of the
    layers' own attention mass.
    """
    num_layers = averages.oracle.shape[0]
    first = setting.first_layer(num_layers)
    similarity = layer_similarity(averages.recovery)
    if setting.num_anchors is not None:
        return choose_anchors(similarity, averages.importance, setting.num_anchors, first)
    everything = tuple(range(first, num_layers))
    wanted = REUSE_RETENTION * plan_recovery(averages.recovery, everything)
    for num_anchors in range(1, len(everything)):
        choice = choose_anchors(similarity, averages.importance, num_anchors, first)
        if plan_recovery(averages.recovery, choice) >= wanted:
            return choice
    return everything


def plan_recovery(recovery: Tensor, anchors: tuple[int, ...]) -> float:
    """Attention mass that the layers keep under a plan, mean over the layers from the first anchor on and KV heads.

    Args:
        recovery: [num_layers a, num_layers b, num_kv_heads of b, of a].
        anchors: ascending; the first layer that takes part is the first of them. In a layer that reuses one, each head
            takes the anchor's best for it.
    """
    kept = []
    for layer, anchor in assigned_anchors(anchors, recovery.shape[0]).items():
        heads = recovery[anchor, layer]
        kept.append((heads.diagonal() if layer == anchor else heads.amax(dim=1)).mean())
    return float(torch.stack(kept).mean())
