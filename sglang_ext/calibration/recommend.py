"""Which recipe and which budget a profile recommends, from the quality of selections on held-out prompts.

The recipe is the one that wins by the rule of `winner`: the least output error at equal bytes read, of those whose
index is small enough; the project's default stays unless another one is clearly better. The budget is the largest
tried one with which a step reads no more than that rule's part of dense, or the smallest one that holds half of the
attention where that is more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from prefix_kernels.pooling import Pooling
from sglang_ext.calibration.measurement import measured_tokens
from sglang_ext.calibration.prompt_capture import PromptCapture
from sglang_ext.calibration.selection_quality import (
    full_attention,
    joined_selections,
    oracle_at,
    selection_quality,
)
from sglang_ext.calibration.winner import MAX_STORED_SHARE, READ_SHARE, Curve
from sglang_ext.indexing.base import METHODS, IndexSpec
from sglang_ext.indexing.registry import make_builder, make_selector
from sglang_ext.indexing.traffic import index_read_bytes, kv_bytes, stored_bytes

KEEP_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Budgets that are tried, as fractions of the prefix."""

NUM_TOKENS = 8
"""Tokens of a prompt that recipes are tried on."""

CLEARLY_BETTER = 0.9
"""Another recipe than the default one is recommended where its error is below this part of the default one's."""

FIGURES = ("recall", "oracle_recall", "error", "read_share", "stored_share")
"""What is measured of a recipe at one budget, in this order."""

LEAST_RECALL = 0.5
"""Attention mass that a recommended budget holds at least, if a tried one does."""


class RecipeQuality(msgspec.Struct, frozen=True, kw_only=True):
    """One recipe at one budget; means over prompts, tokens and the layers that are not dense.

    Attributes:
        name: of the recipe.
        keep_ratio: budget as a fraction of the prefix.
        recall: attention mass that the selection holds.
        oracle_recall: what the best tokens of that budget hold.
        error: relative error of the attention output over the prefix.
        read_share: bytes of index, keys and values that a step reads, over those that dense attention reads (bf16).
        stored_share: bytes of the index over those of the bf16 keys and values.
    """

    name: str
    keep_ratio: float
    recall: float
    oracle_recall: float
    error: float
    read_share: float
    stored_share: float


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What is recommended and why.

    Attributes:
        name: of the recipe.
        spec: its parameters.
        keep_ratio: recommended budget.
        reason: one sentence.
    """

    name: str
    spec: dict[str, Any]
    keep_ratio: float
    reason: str


def default_recipes(default_method: str) -> dict[str, IndexSpec]:
    """Recipes to try, by name, the default method first. All with their default parameters.

    Raises:
        KeyError: no method of that name.
    """
    tried = ("two_level", "token_index", "csattention", "ab_sparse")
    names = [default_method, *(name for name in tried if name != default_method)]
    return {name: METHODS[name].spec() for name in names}


def measure_quality(
    capture: PromptCapture,
    recipes: Mapping[str, IndexSpec],
    layers: Sequence[int],
    *,
    keep_ratios: Sequence[float] = KEEP_RATIOS,
    num_sink: int = 16,
    num_recent: int = 64,
    num_tokens: int = NUM_TOKENS,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Build every recipe's index of the prompt, select for some of its tokens, compare with all of the attention.

    Args:
        capture: cut to its prefix.
        recipes: by name.
        layers: to measure.
        keep_ratios: budgets; never fewer tokens than the windows.
        num_sink, num_recent: always attended.
        num_tokens: at most so many.
        device: where.

    Returns:
        [num_recipes, num_keep_ratios, 5] fp64 on the CPU: `FIGURES`; means over tokens and layers.

    Raises:
        ValueError: an unusable capture, or no sampled query where a recipe needs one.
    """
    rows = measured_tokens(capture, num_tokens).cpu()
    prefix_len = capture.prefix_len
    samples = capture.samples()
    budgets = [min(max(int(ratio * prefix_len), num_sink + num_recent, 1), prefix_len) for ratio in keep_ratios]
    total = torch.zeros(len(recipes), len(budgets), len(FIGURES), dtype=torch.float64)
    for layer in layers:
        q = capture.queries[layer][rows].to(device)
        keys, values = capture.keys[layer].to(device), capture.values[layer].to(device)
        attention = full_attention(q, keys, values, capture.sm_scale)
        oracles = [oracle_at(attention, budget, num_sink, num_recent) for budget in budgets]
        for i, spec in enumerate(recipes.values()):
            arrays = make_builder(spec).build_layer(keys, samples[layer].to(device))
            selector = make_selector(spec)
            dense = kv_bytes(prefix_len, keys.shape[2], values.shape[2])
            stored = stored_bytes(arrays) / dense
            for j, (budget, oracle) in enumerate(zip(budgets, oracles, strict=True)):
                chosen = [
                    selector.select(
                        arrays,
                        row[None],
                        prefix_len=prefix_len,
                        budget=budget,
                        num_sink=num_sink,
                        num_recent=num_recent,
                        sm_scale=capture.sm_scale,
                        pooling=Pooling.MAX,
                    )
                    for row in q
                ]
                quality = selection_quality(attention, joined_selections(chosen), oracle)
                figures = torch.stack([quality.recall, quality.oracle_recall, quality.error]).double().mean(dim=1)
                index = index_read_bytes(spec, arrays, q[:1], prefix_len, budget)
                read = (index + kv_bytes(budget, keys.shape[2], values.shape[2])) / dense
                total[i, j] += torch.tensor([*figures.tolist(), read, stored], dtype=torch.float64)
    return total / len(layers)


def quality_table(
    quality: Tensor, names: Sequence[str], keep_ratios: Sequence[float] = KEEP_RATIOS
) -> list[RecipeQuality]:
    """Rows of [num_prompts, num_recipes, num_keep_ratios, 5], mean over prompts."""
    means = quality.mean(dim=0).tolist()
    return [
        RecipeQuality(name=name, keep_ratio=ratio, **dict(zip(FIGURES, row, strict=True)))
        for name, per_ratio in zip(names, means, strict=True)
        for ratio, row in zip(keep_ratios, per_ratio, strict=True)
    ]


def recommend(table: Sequence[RecipeQuality], recipes: Mapping[str, IndexSpec]) -> Choice:
    """Choose a recipe and a budget, see the module.

    Args:
        table: of `quality_table`.
        recipes: by name, the default one first.

    Raises:
        ValueError: an empty table.
    """
    if not table:
        raise ValueError("expected the quality of at least one recipe, got none; measure it on held-out prompts")
    default = next(iter(recipes))
    error = {name: _error_at_equal_bytes(table, name) for name in recipes}
    best = min(recipes, key=lambda name: error[name])
    better = error[best] < CLEARLY_BETTER * error[default]
    name = best if better else default
    why = f"an output error of {error[name]:.3f} where a step reads {READ_SHARE:.0%} of dense"
    if better:
        why = f"{name} has {why}, {default} {error[default]:.3f}"
    else:
        why = f"no recipe has clearly less than {name}'s {why.removeprefix('an ')}"
    own = sorted((row for row in table if row.name == name), key=lambda row: row.keep_ratio)
    good = [row for row in own if row.recall >= LEAST_RECALL] or own[-1:]
    chosen = next((row for row in reversed(good) if row.read_share <= READ_SHARE), good[0])
    reason = (
        f"{why}; with a budget of {chosen.keep_ratio:.0%} a step reads {chosen.read_share:.1%} of dense, and the "
        f"selection holds {chosen.recall:.3f} of the attention (the best tokens: {chosen.oracle_recall:.3f})"
    )
    return Choice(name=name, spec=recipes[name].to_dict(), keep_ratio=chosen.keep_ratio, reason=reason)


def _error_at_equal_bytes(table: Sequence[RecipeQuality], name: str) -> float:
    """Infinite where the index is too large, or the recipe cannot read so little."""
    own = sorted((row for row in table if row.name == name), key=lambda row: row.keep_ratio)
    curve = Curve(name, "", own[0].stored_share, tuple((row.read_share, row.error) for row in own))
    return curve.error_at(READ_SHARE) if curve.stored_share <= MAX_STORED_SHARE else math.inf
