"""Everything that calibration measures of one prompt, as a file of its own, and its mean over prompts.

One small file per prompt makes a job resumable, lets any split of the prompts be compared later without the model,
and gives intervals over prompts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sglang_ext.calibration.block_recall import BlockRecall, RecallSetting, best_recall, mean_scorer, minmax_scorer
from sglang_ext.calibration.block_recall import recall_by_block_size as block_recall
from sglang_ext.calibration.capture import LayerCapture, log_attention, token_chunks
from sglang_ext.calibration.channels import ChannelAccumulator
from sglang_ext.calibration.head_map import MIN_TOP_K, kascade_budget
from sglang_ext.calibration.prompt_capture import PromptCapture
from sglang_ext.calibration.similarity import TOP_K, prompt_similarity
from sglang_ext.methods.ab_sparse import BLOCK_SIZES

MEASUREMENT_VERSION = 4

KEEP_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Budgets that may be recommended, as fractions of the prefix."""

SCORERS = {"mean": mean_scorer, "minmax": minmax_scorer}
"""Block representations that recall is measured with, in the order of `PromptMeasurement.recall`."""


@dataclass(frozen=True)
class MeasureSetting:
    """What is measured, and of how many tokens.

    Attributes:
        keep_ratio: budget as a fraction of the prefix, for block recall and reuse recovery.
        keep_ratios: those that may be recommended, at which heads are judged.
        min_top_k: fewest tokens of each of these budgets, as served.
        block_sizes: ascending, tokens per block.
        num_sink, num_recent: positions that serving always attends.
        top_k: keys that the similarity of layers compares (Kascade, 3.3).
        mass: share of attention whose number of keys is the sparsity (Kascade, Figure 1: 0.95).
        max_tokens: tokens of a prompt that are measured, at most; they are spread evenly.

    Raises:
        ValueError: a value out of range.
    """

    keep_ratio: float = 0.05
    keep_ratios: tuple[float, ...] = KEEP_RATIOS
    min_top_k: int = MIN_TOP_K
    block_sizes: tuple[int, ...] = BLOCK_SIZES
    num_sink: int = 16
    num_recent: int = 64
    top_k: int = TOP_K
    mass: float = 0.95
    max_tokens: int = 32

    def __post_init__(self) -> None:
        self.recall_setting()
        if not 0.0 < self.mass < 1.0 or min(self.top_k, self.max_tokens) < 1:
            raise ValueError(
                "expected mass above 0 and below 1, top_k and max_tokens >= 1, got "
                f"{self.mass}, {self.top_k} and {self.max_tokens}"
            )

    def recall_setting(self) -> RecallSetting:
        """For `recall_by_block_size`. Raises ValueError as `RecallSetting` does."""
        return RecallSetting(
            self.keep_ratio, self.block_sizes, self.num_sink, self.num_recent, min_top_k=self.min_top_k
        )

    def served_settings(self) -> list[RecallSetting]:
        """For `best_recall`, one for each of `keep_ratios`."""
        return [replace(self.recall_setting(), keep_ratio=ratio) for ratio in self.keep_ratios]


@dataclass(frozen=True, eq=False)
class PromptMeasurement:
    """One prompt's. CPU tensors, fp64; means are over the measured tokens.

    Attributes:
        recall: [num_representations (`SCORERS`), num_layers, num_kv_heads, num_block_sizes] of block selection.
        oracle: [num_layers, num_kv_heads] recall of the best tokens at the same budget.
        best: [num_keep_ratios, num_layers, num_kv_heads] the same at each budget that may be recommended.
        sparsity: [num_layers, num_kv_heads] fraction of the keys that hold `mass` of the attention.
        similarity: [num_layers a, num_layers b, num_kv_heads of b, of a], see `prompt_similarity`.
        recovery: same shape, attention mass of b in the Top-k of a at the budget (not relative to b's own Top-k).
        importance: [num_layers].
        q_sum, q_max, k_sum, k_max: see `ChannelAccumulator`.
        quality: [num_recipes, num_keep_ratios, 6] or empty, see `recommend.measure_quality`.
    """

    recall: Tensor
    oracle: Tensor
    best: Tensor
    sparsity: Tensor
    similarity: Tensor
    recovery: Tensor
    importance: Tensor
    q_sum: Tensor
    q_max: Tensor
    k_sum: Tensor
    k_max: Tensor
    quality: Tensor


class PromptInfo(NamedTuple):
    """Which prompt was measured.

    Attributes:
        id: of the prompt.
        task: what kind of prompt it is.
        held_out: not fitted in the held-out comparison.
        prompt_tokens: with the question.
        prefix_tokens: whose keys were measured.
        measured_tokens: queries that were measured.
    """

    id: str
    task: str
    held_out: bool
    prompt_tokens: int
    prefix_tokens: int
    measured_tokens: int


def measured_tokens(capture: PromptCapture, max_tokens: int) -> Tensor:
    """Which kept tokens are measured: those behind the prefix, which is where an index serves; else the latest.

    Args:
        capture: of a prompt, cut to its prefix.
        max_tokens: at most so many, evenly spread.

    Returns:
        [1..max_tokens] int64, ascending indices of kept tokens.
    """
    rows = capture.asked()
    if len(rows) == 0:
        # No question and no decode step: the prompt's end is the nearest to one.
        rows = torch.arange(len(capture.positions), device=capture.positions.device)[-max_tokens:]
    if len(rows) <= max_tokens:
        return rows
    # The last token always: it asks the whole prompt.
    place = torch.linspace(len(rows) - 1, 0, max_tokens, dtype=torch.float64).round().long().flip(0)
    return rows[place.to(rows.device)]


def measure_prompt(
    capture: PromptCapture,
    setting: MeasureSetting,
    *,
    device: torch.device | str = "cpu",
    quality: Tensor | None = None,
) -> PromptMeasurement:
    """Measure one prompt; layers go to the device one by one.

    Args:
        capture: cut to its prefix.
        setting: what to measure.
        device: where.
        quality: of the recipes, if they were measured.

    Raises:
        ValueError: an unusable capture (NaN, infinity, no token).
    """
    if len(capture.positions) == 0:
        raise ValueError("expected a capture of at least one token, got none; take it again")
    rows = measured_tokens(capture, setting.max_tokens).cpu()
    num_layers, num_kv_heads = capture.num_layers, capture.num_kv_heads

    def layers() -> list[LayerCapture]:
        return [_to(capture.layer(layer, rows), device) for layer in range(num_layers)]

    recall_of = setting.recall_setting()
    best = torch.empty(len(setting.keep_ratios), num_layers, num_kv_heads, dtype=torch.float64)
    oracle = torch.empty(num_layers, num_kv_heads, dtype=torch.float64)
    sparsity = torch.empty_like(oracle)
    recall = torch.empty(len(SCORERS), num_layers, num_kv_heads, len(setting.block_sizes), dtype=torch.float64)
    for layer, part in enumerate(layers()):
        result: BlockRecall | None = None
        for i, scorer in enumerate(SCORERS.values()):
            result = block_recall(part, capture.sm_scale, recall_of, scorer)
            recall[i, layer] = result.recall.mean(dim=2).T
        assert result is not None
        oracle[layer] = result.oracle.mean(dim=1)
        best[:, layer] = best_recall(part, capture.sm_scale, setting.served_settings()).mean(dim=2)
        sparsity[layer] = keys_for_mass(part, capture.sm_scale, setting.mass).mean(dim=1)
    channels = ChannelAccumulator(num_layers, capture.queries.shape[2], num_kv_heads, capture.queries.shape[3])
    channels.add_prompt(capture.layer(layer) for layer in range(num_layers))
    return PromptMeasurement(
        recall=recall,
        oracle=oracle,
        best=best,
        sparsity=sparsity,
        similarity=prompt_similarity(layers(), capture.sm_scale, setting.top_k),
        recovery=reuse_recovery(layers(), capture.sm_scale, setting.keep_ratio, setting.min_top_k),
        importance=_importance(capture),
        q_sum=channels.q_sum,
        q_max=channels.q_max,
        k_sum=channels.k_sum,
        k_max=channels.k_max,
        quality=torch.empty(0, dtype=torch.float64) if quality is None else quality.double().cpu(),
    )


def keys_for_mass(capture: LayerCapture, sm_scale: float, mass: float) -> Tensor:
    """Smallest fraction of the visible keys that holds `mass` of a token's attention (Kascade, Figure 1).

    Returns:
        [num_kv_heads, num_tokens] fp64, above 0 and at most 1; attention is the mean over a KV head's query heads.
    """
    found = torch.empty(capture.num_kv_heads, capture.num_tokens, dtype=torch.float64)
    for tokens in token_chunks(capture.num_tokens, capture.queries.shape[1] * capture.prefix_len):
        attention = log_attention(capture, tokens, sm_scale).exp_()
        held = attention.sort(dim=2, descending=True).values.double().cumsum(dim=2)
        wanted = mass * held[..., -1:]
        count = (held < wanted).sum(dim=2) + 1
        found[:, tokens] = (count / capture.visible[tokens].to(count.device)).double().cpu()
    return found


def reuse_recovery(
    layers: Sequence[LayerCapture], sm_scale: float, keep_ratio: float, min_top_k: int = MIN_TOP_K
) -> Tensor:
    """Attention mass that a layer keeps when it attends the Top-k of another, mean over tokens.

    As `prompt_similarity`, but at the budget of serving (`kascade_budget`), for the mean token, and as a share of
    all attention: this is what reuse costs.

    Returns:
        [a, b, h, g] fp64 on the CPU in 0..1; a == b, g == h is the head's own Top-k; 0 where a > b.
    """
    num_layers, num_kv_heads = len(layers), layers[0].num_kv_heads
    num_tokens, prefix_len = layers[0].num_tokens, layers[0].prefix_len
    budget = kascade_budget(prefix_len, keep_ratio, min_top_k)
    total = torch.zeros(num_layers, num_layers, num_kv_heads, num_kv_heads, dtype=torch.float64)
    elements = max(layers[0].queries.shape[1] * prefix_len, num_layers * num_kv_heads * budget)
    for tokens in token_chunks(num_tokens, elements):
        chosen: list[Tensor] = []
        for layer, capture in enumerate(layers):
            log_mass = log_attention(capture, tokens, sm_scale)
            chosen.append(log_mass.topk(budget, dim=2).indices.transpose(0, 1).flatten(1))
            mass = log_mass.exp_()
            for anchor, picks in enumerate(chosen):
                taken = mass.gather(2, picks.expand(num_kv_heads, *picks.shape))
                taken = taken.view(num_kv_heads, -1, num_kv_heads, budget).sum(dim=3)
                total[anchor, layer] += taken.sum(dim=1).double().cpu()
    return (total / num_tokens).clamp_(max=1.0)


def _importance(capture: PromptCapture) -> Tensor:
    """Mean over kept tokens of 1 - cos(x, y)."""
    weights = capture.importance.double().mean(dim=1).cpu()
    if not bool(torch.isfinite(weights).all()):
        raise ValueError("expected finite importance, got NaN or infinity; the capture is unusable, take it again")
    return weights


def _to(capture: LayerCapture, device: torch.device | str) -> LayerCapture:
    return LayerCapture(*(tensor.to(device) for tensor in capture))


class Averages(NamedTuple):
    """Means over prompts; every prompt weighs the same. Fields as in `PromptMeasurement`."""

    recall: Tensor
    oracle: Tensor
    best: Tensor
    sparsity: Tensor
    similarity: Tensor
    recovery: Tensor
    importance: Tensor
    channels: ChannelAccumulator


def average(measurements: Sequence[PromptMeasurement]) -> Averages:
    """Means over at least one prompt.

    Raises:
        ValueError: no prompt, or prompts of different models.
    """
    if not measurements:
        raise ValueError("expected at least one measured prompt, got none; add prompts")
    first = measurements[0]
    if any(other.q_sum.shape != first.q_sum.shape for other in measurements):
        raise ValueError("expected prompts of one model, got different numbers of layers or heads; measure them again")
    means = {
        name: torch.stack([getattr(one, name) for one in measurements]).mean(dim=0)
        for name in Averages._fields
        if name != "channels"
    }
    num_layers, num_qo_heads, head_dim = first.q_sum.shape
    channels = ChannelAccumulator(num_layers, num_qo_heads, first.k_sum.shape[1], head_dim)
    channels.num_prompts = len(measurements)
    for one in measurements:
        channels.q_sum += one.q_sum
        channels.k_sum += one.k_sum
        channels.q_max = torch.maximum(channels.q_max, one.q_max)
        channels.k_max = torch.maximum(channels.k_max, one.k_max)
    return Averages(**means, channels=channels)


def save_measurement(measurement: PromptMeasurement, info: PromptInfo, path: str | Path) -> None:
    """Write one prompt's file: all of it or nothing, also when the machine stops meanwhile.

    Raises:
        OSError: the folder is missing or full.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    tensors = {field.name: getattr(measurement, field.name).contiguous() for field in fields(PromptMeasurement)}
    meta = {"version": str(MEASUREMENT_VERSION), "info": json.dumps(info._asdict())}
    try:
        save_file(tensors, str(partial), meta)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_measurement(path: str | Path) -> tuple[PromptMeasurement, PromptInfo]:
    """Read a file of `save_measurement`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no measurement, one of another version, or it does not say of which prompt.
    """
    try:
        with safe_open(str(path), "pt") as file:
            meta = file.metadata() or {}
            if meta.get("version") != str(MEASUREMENT_VERSION):
                raise ValueError(
                    f"expected a measurement of version {MEASUREMENT_VERSION} in {path}, got "
                    f"{meta.get('version')!r}; remove the state folder and calibrate again"
                )
            tensors = {field.name: file.get_tensor(field.name) for field in fields(PromptMeasurement)}
    except SafetensorError as error:
        raise ValueError(
            f"expected a measurement in {path}, got a file that cannot be read ({error}); remove it, and the prompt "
            "is measured again"
        ) from error
    return PromptMeasurement(**tensors), _read_info(meta.get("info", ""), path)


def _read_info(text: str, path: str | Path) -> PromptInfo:
    """Inverse of what `save_measurement` writes. Raises ValueError where it is something else."""
    kinds = get_type_hints(PromptInfo)
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if (
        not isinstance(values, dict)
        or values.keys() != kinds.keys()
        or any(type(values[name]) is not kind for name, kind in kinds.items())
    ):
        raise ValueError(
            f"expected a measurement with the fields {', '.join(kinds)} of its prompt in {path}, got {text!r}; remove "
            "it, and the prompt is measured again"
        )
    return PromptInfo(**values)
