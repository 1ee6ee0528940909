"""Which recipe and which budget a profile recommends, from the quality of selections on held-out prompts.

The recipe is the one that wins by the rule of `winner`: the least output error at equal bytes read, of those whose
index is small enough; the project's default stays unless another one is clearly better. Where the default cannot read
so little (short prompts), recipes are compared at the smallest part of dense that it can read.

The budget is the largest tried one with which a step reads no more than that rule's part of dense, or the smallest one
that holds half of the attention where that is more. Where no tried budget holds half, it is the largest one that reads
so little, else the smallest one. Budgets that serving would raise to its floor are left out: what was measured is not
what the ratio says.
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
from sglang_ext.calibration.winner import MAX_STORED_SHARE, READ_SHARE, TOLERANCE, Curve
from sglang_ext.indexing.base import METHODS, IndexSpec
from sglang_ext.indexing.registry import make_builder, make_selector
from sglang_ext.indexing.traffic import index_read_bytes, kv_bytes, stored_bytes

KEEP_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Budgets that are tried, as fractions of the prefix."""

NUM_TOKENS = 8
"""Tokens of a prompt that recipes are tried on."""

CLEARLY_BETTER = 0.9
"""Another recipe than the default one is recommended where its error is below this part of the default one's."""

FIGURES = ("recall", "oracle_recall", "error", "read_share", "stored_share", "kept_share")
"""What is measured of a recipe at one budget, in this order."""

LEAST_RECALL = 0.5
"""Attention mass that a recommended budget holds at least, if a tried one does."""

AT_FLOOR = 1.2
"""A row whose budgets are more than so many times its keep ratio tells of the floor (`min_top_k`), not of the ratio."""


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
        kept_share: tokens of the budget over those of the prefix; more than `keep_ratio` where the floor is more.
    """

    name: str
    keep_ratio: float
    recall: float
    oracle_recall: float
    error: float
    read_share: float
    stored_share: float
    kept_share: float

    @property
    def at_floor(self) -> bool:
        """Whether the floor of the budgets decided, not the keep ratio."""
        return self.kept_share > AT_FLOOR * self.keep_ratio


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


def quality_tokens(capture: PromptCapture, num_tokens: int = NUM_TOKENS) -> Tensor:
    """Kept tokens that recipes are tried on: only those behind the prefix, which see all of it and nothing later.

    Returns:
        [0..num_tokens] int64, ascending indices of kept tokens; empty where the capture has none behind its prefix.
    """
    rows = measured_tokens(capture, num_tokens)
    return rows[capture.positions[rows] >= capture.prefix_len].cpu()


def served_budget(prefix_len: int, keep_ratio: float, min_top_k: int) -> int:
    """Tokens of the prefix that serving attends at a keep ratio, windows included (`SparseAttnConfig.budget`)."""
    return max(1, min(max(int(keep_ratio * prefix_len), min_top_k), prefix_len))


def measure_quality(
    capture: PromptCapture,
    recipes: Mapping[str, IndexSpec],
    layers: Sequence[int],
    *,
    min_top_k: int,
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
        min_top_k: fewest tokens of a budget, as served.
        keep_ratios: budgets as asked for; see `served_budget`.
        num_sink, num_recent: always attended, as far as the budget has room for them.
        num_tokens: at most so many.
        device: where.

    Returns:
        [num_recipes, num_keep_ratios, 6] fp64 on the CPU: `FIGURES`; means over tokens and layers.

    Raises:
        ValueError: an unusable capture, one without a token behind its prefix, or no sampled query where a recipe
            needs one.
    """
    rows = quality_tokens(capture, num_tokens)
    if len(rows) == 0:
        raise ValueError(
            "expected a captured token behind the prefix, got none; give the prompt a question, or leave it out of "
            "the recipes' quality"
        )
    prefix_len = capture.prefix_len
    samples = capture.samples()
    budgets = [served_budget(prefix_len, ratio, min_top_k) for ratio in keep_ratios]
    # The windows of serving: a budget below both holds the sink first.
    windows = [(min(num_sink, budget), min(num_recent, max(budget - num_sink, 0))) for budget in budgets]
    total = torch.zeros(len(recipes), len(budgets), len(FIGURES), dtype=torch.float64)
    for layer in layers:
        q = capture.queries[layer][rows].to(device)
        keys, values = capture.keys[layer].to(device), capture.values[layer].to(device)
        attention = full_attention(q, keys, values, capture.sm_scale)
        oracles = [oracle_at(attention, budget, *pair) for budget, pair in zip(budgets, windows, strict=True)]
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
                        num_sink=oracle.num_sink,
                        num_recent=oracle.num_recent,
                        sm_scale=capture.sm_scale,
                        pooling=Pooling.MAX,
                    )
                    for row in q
                ]
                quality = selection_quality(attention, joined_selections(chosen), oracle)
                figures = torch.stack([quality.recall, quality.oracle_recall, quality.error]).double().mean(dim=1)
                # CSAttention reads other lists for each token.
                index = sum(index_read_bytes(spec, arrays, row[None], prefix_len, budget) for row in q) / len(q)
                read = (index + kv_bytes(budget, keys.shape[2], values.shape[2])) / dense
                shares = [read, stored, budget / prefix_len]
                total[i, j] += torch.tensor([*figures.tolist(), *shares], dtype=torch.float64)
    return total / len(layers)


def quality_table(
    quality: Tensor, names: Sequence[str], keep_ratios: Sequence[float] = KEEP_RATIOS
) -> list[RecipeQuality]:
    """Rows of [num_prompts, num_recipes, num_keep_ratios, 6], mean over prompts."""
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
        ValueError: an empty table, a recipe without rows, or a figure that is no finite number.
    """
    if not table:
        raise ValueError("expected the quality of at least one recipe, got none; measure it on held-out prompts")
    default = next(iter(recipes))
    rows = {name: _usable(table, name) for name in recipes}
    # Where the default cannot read so little, every finite rival would win: compare where the default can be compared.
    share = max(READ_SHARE, min(row.read_share for row in rows[default]))
    error = {name: _error_at(own, share) for name, own in rows.items()}
    best = min(recipes, key=lambda name: error[name])
    name = best if error[best] < CLEARLY_BETTER * error[default] else default
    chosen = _budget(rows[name])
    reason = (
        f"{_why(name, default, error, share)}; with a budget of {chosen.keep_ratio:.0%} a step reads "
        f"{chosen.read_share:.1%} of dense, and the selection holds {chosen.recall:.3f} of the attention (the best "
        f"tokens: {chosen.oracle_recall:.3f})"
    )
    if not _reads_little(chosen):
        holding = " that holds half of the attention" if any(map(_reads_little, rows[name])) else ""
        reason += f"; no tried budget{holding} reads as little as {READ_SHARE:.0%}"
    if chosen.at_floor:
        reason += (
            f"; the prompts are so short that the smallest budget is {chosen.kept_share:.0%} of them: give prompts as "
            "long as those that will be served"
        )
    return Choice(name=name, spec=recipes[name].to_dict(), keep_ratio=chosen.keep_ratio, reason=reason)


def _usable(table: Sequence[RecipeQuality], name: str) -> list[RecipeQuality]:
    """A recipe's rows, keep ratio ascending, without those at the floor; where all are, the nearest to its ratio."""
    own = sorted((row for row in table if row.name == name), key=lambda row: row.keep_ratio)
    if not own:
        raise ValueError(f"expected the quality of {name}, got none; measure every recipe on held-out prompts")
    for row in own:
        for figure in FIGURES:
            if not math.isfinite(getattr(row, figure)):
                raise ValueError(
                    f"expected a finite {figure} of {name} at {row.keep_ratio:.0%}, got {getattr(row, figure)}; "
                    "measure the held-out prompts again"
                )
    return [row for row in own if not row.at_floor] or own[-1:]


def _error_at(own: Sequence[RecipeQuality], share: float) -> float:
    """Infinite where the index is too large, or the recipe cannot read so little."""
    curve = Curve(own[0].name, "", own[0].stored_share, tuple((row.read_share, row.error) for row in own))
    return curve.error_at(share) if curve.stored_share <= MAX_STORED_SHARE + TOLERANCE else math.inf


def _reads_little(row: RecipeQuality) -> bool:
    return row.read_share <= READ_SHARE + TOLERANCE


def _budget(own: Sequence[RecipeQuality]) -> RecipeQuality:
    """The recommended one of a recipe's rows, keep ratio ascending."""
    good = [row for row in own if row.recall >= LEAST_RECALL] or own
    return next((row for row in reversed(good) if _reads_little(row)), good[0])


def _why(name: str, default: str, error: Mapping[str, float], share: float) -> str:
    """Why this recipe: the first part of the reason."""
    if math.isinf(error[name]):
        return f"{name}'s index takes more than {MAX_STORED_SHARE:.0%} of the KV, but no other recipe can replace it"
    where = f"where a step reads {share:.0%} of dense"
    if share > READ_SHARE + TOLERANCE:
        where = f"where a step reads {share:.1%} of dense ({default} cannot read less with the tried budgets)"
    if name == default:
        return f"no recipe has clearly less than {name}'s output error of {error[name]:.3f} {where}"
    other = f"{default} {error[default]:.3f}"
    if math.isinf(error[default]):
        other = f"{default}'s index takes more than {MAX_STORED_SHARE:.0%} of the KV"
    return f"{name} has an output error of {error[name]:.3f} {where}, {other}"
