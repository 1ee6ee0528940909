"""Calibration: what is measured once per model over a development set and written into its profile.

Pure torch: inputs are tensors of captured queries and keys, results are plain values; running the model is the
command's part. The accumulators take one prompt at a time, either whole or not at all, and their `state_dict` can be
saved after any prompt and loaded to go on.

The command's own steps are modules here: `prompts` (the data), `measurement` (one file per prompt), `fit` (from
measurements to settings), `comparison` (held-out gains over simple rivals), `winner` and `step_time` (the rule by
which a recipe wins, and what was timed for it), `recommend` (recipe and budget), `report` and `report_plots` (the only
one that imports matplotlib).
"""

from sglang_ext.calibration.anchors import (
    AnchorChoice,
    anchor_total,
    assigned_anchors,
    choose_anchors,
    evenly_spaced_anchors,
)
from sglang_ext.calibration.block_recall import BlockRecallAccumulator, recall_by_block_size
from sglang_ext.calibration.block_size import (
    Average,
    average_block_size,
    block_sizes_by_budget,
    block_sizes_by_tau,
    near_uniform_heads,
    tau_for_average,
)
from sglang_ext.calibration.capture import LayerCapture
from sglang_ext.calibration.channels import ChannelAccumulator, ChannelStatistic, top_channels
from sglang_ext.calibration.head_map import best_head_map, identity_head_map, kascade_budget, make_layer_plan
from sglang_ext.calibration.importance import ImportanceAccumulator, attention_importance
from sglang_ext.calibration.published import load_published_plan, plan_from_published
from sglang_ext.calibration.similarity import SimilarityAccumulator, layer_similarity, prompt_similarity

__all__ = [
    "AnchorChoice",
    "Average",
    "BlockRecallAccumulator",
    "ChannelAccumulator",
    "ChannelStatistic",
    "ImportanceAccumulator",
    "LayerCapture",
    "SimilarityAccumulator",
    "anchor_total",
    "assigned_anchors",
    "attention_importance",
    "average_block_size",
    "best_head_map",
    "block_sizes_by_budget",
    "block_sizes_by_tau",
    "choose_anchors",
    "evenly_spaced_anchors",
    "identity_head_map",
    "kascade_budget",
    "layer_similarity",
    "load_published_plan",
    "make_layer_plan",
    "near_uniform_heads",
    "plan_from_published",
    "prompt_similarity",
    "recall_by_block_size",
    "tau_for_average",
    "top_channels",
]
