"""Which recipe and which budget a profile recommends, from the quality of selections on held-out prompts.

The recipe is the one that wins by the rule of `winner`: the least time per layer of a decode step where it reaches the
target error in the worst prompt, of those whose index is small enough; the project's default stays unless another one
surely takes less than 0.9 of its time. Where no recipe reaches the error with the tried budgets, those that were timed
are compared by their error at the largest tried one.

The budget is the least tried one that reaches the error, else the largest. Budgets that serving would raise to its
floor are left out: what was measured is not what the ratio says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
import torch
from torch import Tensor

from sglang_ext.calibration.layer_statistics import MeasureSetting, served_budget
from sglang_ext.calibration.measurement import measured_tokens
from sglang_ext.calibration.prompt_capture import PromptCapture
from sglang_ext.calibration.selection_quality import (
    full_attention,
    joined_selections,
    oracle_at,
    selection_quality,
)
from sglang_ext.calibration.step_time import EXACT_US, HEAD_DIM, REFERENCE, selection_time
from sglang_ext.calibration.winner import MAX_STORED_SHARE, TARGET_ERROR, TOLERANCE, Timed, timed
from sglang_ext.methods.ab_sparse import ABSparseSpec
from sglang_ext.methods.arrays import kv_bytes, stored_bytes
from sglang_ext.methods.base import METHODS, IndexSpec, SelectArgs
from sglang_ext.methods.registry import make_builder, make_selector
from sglang_ext.methods.token_index import TokenIndexSpec
from sglang_ext.methods.two_level import TwoLevelSpec

NUM_TOKENS = 8
"""Tokens of a prompt that recipes are tried on."""

CLEARLY_BETTER = 0.9
"""Another recipe than the default one is recommended where its time is below this part of the default one's."""

FIGURES = ("recall", "oracle_recall", "error", "read_share", "stored_share", "kept_share")
"""What is measured of a recipe at one budget, in this order."""

AT_FLOOR = 1.2
"""A row whose budgets are more than so many times its keep ratio tells of the floor (`min_top_k`), not of the ratio."""

_REACHED = f"an output error of {TARGET_ERROR:g} in the worst prompt"


class RecipeQuality(msgspec.Struct, frozen=True, kw_only=True):
    """One recipe at one budget; means over prompts, tokens and the layers that are not dense, but for `worst_error`.

    Attributes:
        recall: attention mass that the selection holds.
        oracle_recall: what the best tokens of that budget hold.
        error: relative error of the attention output over the prefix.
        worst_error: the same of the prompt that has the greatest; what the rule goes by.
        read_share: bytes of index, keys and values that a step reads, over those that dense attention reads (bf16).
        stored_share: bytes of the index over those of the bf16 keys and values.
        kept_share: tokens of the budget over those of the prefix; more than `keep_ratio` where the floor is more.
    """

    name: str
    keep_ratio: float
    recall: float
    oracle_recall: float
    error: float
    worst_error: float
    read_share: float
    stored_share: float
    kept_share: float

    @property
    def at_floor(self) -> bool:
        """Whether the floor of the budgets decided, not the keep ratio."""
        return self.kept_share > AT_FLOOR * self.keep_ratio


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The recommended recipe, its parameters, its budget, and why: one sentence."""

    name: str
    spec: dict[str, Any]
    keep_ratio: float
    reason: str


def default_recipes(default_method: str) -> dict[str, IndexSpec]:
    """Recipes to try, by method, the default method with its default parameters first.

    The others are those whose selection was timed: the token index, blocks by minimum and maximum, two levels.

    Raises:
        KeyError: no method of that name.
    """
    others: dict[str, IndexSpec] = {
        "token_index": TokenIndexSpec(),
        "ab_sparse": ABSparseSpec(representation="minmax"),
        "two_level": TwoLevelSpec(),
    }
    default = METHODS[default_method].spec()
    return {default_method: default, **{name: spec for name, spec in others.items() if name != default_method}}


def quality_tokens(capture: PromptCapture) -> Tensor:
    """Kept tokens that recipes are tried on: only those behind the prefix, which see all of it and nothing later.

    Returns:
        [0..NUM_TOKENS] int64, ascending indices of kept tokens; empty where the capture has none behind its prefix.
    """
    rows = measured_tokens(capture, NUM_TOKENS)
    return rows[capture.positions[rows] >= capture.prefix_len].cpu()


def measure_quality(
    capture: PromptCapture,
    recipes: Mapping[str, IndexSpec],
    layers: Sequence[int],
    setting: MeasureSetting,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Build every recipe's index of the prompt, select for some of its tokens, compare with all of the attention.

    Args:
        capture: cut to its prefix.
        recipes: by name.
        layers: to measure.
        setting: budgets, and windows: always attended, as far as the budget has room for them.
        device: where to measure.

    Returns:
        [num_recipes, num_keep_ratios, 6] fp64 on the CPU: `FIGURES`; means over tokens and layers.

    Raises:
        ValueError: an unusable capture, one without a token behind its prefix, or no sampled query where a recipe
            needs one.
    """
    rows = quality_tokens(capture)
    if len(rows) == 0:
        raise ValueError(
            "expected a captured token behind the prefix, got none; give the prompt a question, or leave it out of "
            "the recipes' quality"
        )
    prefix_len = capture.prefix_len
    samples = capture.samples()
    budgets = [served_budget(prefix_len, ratio, setting.min_top_k) for ratio in setting.keep_ratios]
    # The windows of serving: a budget below both holds the sink first.
    sinks = [min(setting.num_sink, budget) for budget in budgets]
    windows = [(sink, min(setting.num_recent, budget - sink)) for sink, budget in zip(sinks, budgets, strict=True)]
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
                args = SelectArgs(
                    prefix_len=prefix_len,
                    budget=budget,
                    num_sink=oracle.num_sink,
                    num_recent=oracle.num_recent,
                    sm_scale=capture.sm_scale,
                )
                chosen = [selector.select(arrays, row[None], args) for row in q]
                means = selection_quality(attention, joined_selections(chosen), oracle).means()
                # CSAttention reads other lists for each token.
                index = sum(spec.read_bytes(arrays, row[None], prefix_len, budget) for row in q) / len(q)
                read = (index + kv_bytes(budget, keys.shape[2], values.shape[2])) / dense
                row_of = {**means, "read_share": read, "stored_share": stored, "kept_share": budget / prefix_len}
                total[i, j] += torch.tensor([row_of[name] for name in FIGURES], dtype=torch.float64)
    return total / len(layers)


def quality_table(quality: Tensor, names: Sequence[str], keep_ratios: Sequence[float]) -> list[RecipeQuality]:
    """Rows of [num_prompts, num_recipes, num_keep_ratios, 6]: means over prompts, and the error of the worst one."""
    means = quality.mean(dim=0).tolist()
    worst = quality[..., FIGURES.index("error")].amax(dim=0).tolist()
    return [
        RecipeQuality(name=name, keep_ratio=ratio, worst_error=error, **dict(zip(FIGURES, row, strict=True)))
        for name, per_ratio, errors in zip(names, means, worst, strict=True)
        for ratio, row, error in zip(keep_ratios, per_ratio, errors, strict=True)
    ]


def recommend(
    table: Sequence[RecipeQuality],
    recipes: Mapping[str, IndexSpec],
    *,
    anchor_share: float,
    head_dim: int = HEAD_DIM,
) -> Choice:
    """Choose a recipe and a budget, see the module.

    Args:
        table: of `quality_table`.
        recipes: by name, the default one first.
        anchor_share: layers that select under the plan, of those that select or reuse; above 0 and at most 1.
        head_dim: of the model.

    Raises:
        ValueError: a figure that is no finite number.
    """
    default = next(iter(recipes))
    rows = {name: _usable(table, name) for name in recipes}
    small = {name for name, own in rows.items() if own[0].stored_share <= MAX_STORED_SHARE + TOLERANCE}
    times = {
        name: timed([(row.kept_share, row.worst_error) for row in rows[name]], time, anchor_share)
        for name, spec in recipes.items()
        if name in small and (time := selection_time(spec, head_dim)) is not None
    }
    name, why = _recipe(default, rows, small, times, anchor_share)
    chosen = next((row for row in rows[name] if row.worst_error <= TARGET_ERROR), rows[name][-1])
    reason = (
        f"{why}; with a budget of {chosen.keep_ratio:.0%} its error is {chosen.worst_error:.3f} in the worst "
        f"prompt and {chosen.error:.3f} in the mean, a step reads {chosen.read_share:.1%} of dense, and the selection "
        f"holds {chosen.recall:.3f} of the attention (the best tokens: {chosen.oracle_recall:.3f})"
    )
    if chosen.worst_error > TARGET_ERROR:
        reason += f"; no tried budget of it reaches {_REACHED}"
    if chosen.at_floor:
        reason += (
            f"; the prompts are so short that the smallest budget is {chosen.kept_share:.0%} of them: give prompts as "
            "long as those that will be served"
        )
    return Choice(name=name, spec=recipes[name].to_dict(), keep_ratio=chosen.keep_ratio, reason=reason)


def _usable(table: Sequence[RecipeQuality], name: str) -> list[RecipeQuality]:
    """A recipe's rows, keep ratio ascending, without those at the floor; where all are, the nearest to its ratio."""
    own = sorted((row for row in table if row.name == name), key=lambda row: row.keep_ratio)
    for row in own:
        for figure in (*FIGURES, "worst_error"):
            if not math.isfinite(found := getattr(row, figure)):
                raise ValueError(
                    f"expected a finite {figure} of {name} at {row.keep_ratio:.0%}, got {found}; measure the held-out "
                    "prompts again"
                )
    return [row for row in own if not row.at_floor] or own[-1:]


def _recipe(
    default: str,
    rows: Mapping[str, Sequence[RecipeQuality]],
    small: AbstractSet[str],
    times: Mapping[str, Timed],
    anchor_share: float,
) -> tuple[str, str]:
    """The recipe and why: the first part of the reason."""
    if default in small and default not in times:
        return default, f"{default} stays: its selection has no measured time, so it cannot be compared"
    fastest = min(times, key=lambda name: times[name].most_us, default=default)
    if default not in small:
        large = f"{default}'s index takes more than {MAX_STORED_SHARE:.0%} of the KV"
        if fastest == default or math.isinf(times[fastest].most_us):
            return default, f"{large}, but no other recipe of a measured time reaches {_REACHED} in its place"
        return fastest, f"{_takes(fastest, times[fastest], anchor_share)}; {large}"
    own = times[default]
    if not math.isinf(times[fastest].most_us) and times[fastest].most_us < CLEARLY_BETTER * own.least_us:
        other = f"{default} {_us(own)}" if math.isfinite(own.keep_ratio) else f"{default} does not reach it"
        return fastest, f"{_takes(fastest, times[fastest], anchor_share)}; {other}"
    if math.isfinite(own.keep_ratio):
        return default, f"no recipe surely takes clearly less; {_takes(default, own, anchor_share)}"
    error = {name: rows[name][-1].worst_error for name in times}
    best = min(error, key=lambda name: error[name])
    name = best if error[best] < CLEARLY_BETTER * error[default] else default
    kept = rows[name][-1].keep_ratio
    why = (
        f"no recipe whose time is known there reaches {_REACHED} with the tried budgets; at {kept:.0%} {name} has "
        f"{error[name]:.3f}"
    )
    return name, why if name == default else f"{why}, {default} {error[default]:.3f}"


def _takes(name: str, time: Timed, anchor_share: float) -> str:
    slow = f", no less than exact attention's {EXACT_US:.1f}" if time.least_us >= EXACT_US else ""
    return (
        f"{name} reaches {_REACHED} with {time.keep_ratio:.1%} kept and takes {_us(time)} per layer of a step "
        f"then{slow} ({anchor_share:.1%} of the layers select; {REFERENCE})"
    )


def _us(time: Timed) -> str:
    if time.least_us == time.most_us:
        return f"{time.least_us:.1f} us"
    if math.isinf(time.most_us):
        return f"at least {time.least_us:.1f} us"
    return f"{time.least_us:.1f} to {time.most_us:.1f} us"
