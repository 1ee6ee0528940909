"""Everything that calibration measures of one prompt, as a file of its own, and its mean over prompts.

One small file per prompt makes a job resumable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sglang_ext.calibration.channels import channel_maxima
from sglang_ext.calibration.layer_statistics import (
    MeasureSetting,
    best_recall,
    keys_for_mass,
    recall_by_block_size,
    reuse_recovery,
)
from sglang_ext.calibration.prompt_capture import LayerCapture, PromptCapture
from sglang_ext.files import write_whole
from sglang_ext.methods.base import check_finite
from sglang_ext.options import SparseAttnConfig

MEASUREMENT_VERSION = 5


@dataclass(frozen=True, eq=False)
class PromptMeasurement:
    """One prompt's, or the mean over several. CPU tensors, fp64; means are over the measured tokens.

    Attributes:
        recall: [num_layers, num_kv_heads, num_block_sizes] of block selection.
        best: [num_keep_ratios, num_layers, num_kv_heads] recall of the best tokens at each of the setting's budgets.
        sparsity: [num_layers, num_kv_heads] fraction of the keys that hold `mass` of the attention.
        recovery: [num_layers a, num_layers b, num_kv_heads of b, of a], see `reuse_recovery`.
        importance: [num_layers].
        q_max, k_max: see `channel_maxima`.
    """

    recall: Tensor
    best: Tensor
    sparsity: Tensor
    recovery: Tensor
    importance: Tensor
    q_max: Tensor
    k_max: Tensor

    @property
    def oracle(self) -> Tensor:
        """[num_layers, num_kv_heads] recall of the best tokens at the budget of `recall`."""
        return self.best[0]


class PromptInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which prompt was measured.

    Attributes:
        held_out: proposals are judged on it, and not fitted.
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
    capture: PromptCapture, setting: MeasureSetting, *, device: torch.device | str = "cpu"
) -> PromptMeasurement:
    """Measure one prompt, whose capture is cut to its prefix; layers go to the device one by one.

    Raises:
        ValueError: an unusable capture (NaN, infinity).
    """
    rows = measured_tokens(capture, setting.max_tokens).cpu()
    scale = capture.sm_scale

    def layers() -> Iterator[LayerCapture]:
        for layer in range(capture.num_layers):
            yield LayerCapture(*(tensor.to(device) for tensor in capture.layer(layer, rows)))

    # This one checks every layer.
    q_max, k_max = channel_maxima(capture.layer(layer) for layer in range(capture.num_layers))
    recall, best, sparsity = [], [], []
    for part in layers():
        recall.append(recall_by_block_size(part, scale, setting).mean(dim=2).T)
        best.append(best_recall(part, scale, setting).mean(dim=2))
        sparsity.append(keys_for_mass(part, scale, setting.mass).mean(dim=1))
    importance = capture.importance.double().mean(dim=1).cpu()
    check_finite(importance=importance)
    served = SparseAttnConfig(keep_ratio=setting.keep_ratio, min_top_k=setting.min_top_k)
    return PromptMeasurement(
        recall=torch.stack(recall),
        best=torch.stack(best, dim=1),
        sparsity=torch.stack(sparsity),
        recovery=reuse_recovery(layers(), scale, served.budget(capture.prefix_len)),
        importance=importance,
        q_max=q_max,
        k_max=k_max,
    )


def average(measurements: Sequence[PromptMeasurement]) -> PromptMeasurement:
    """Means over at least one prompt, every one weighs the same; of channels the maxima.

    Raises:
        ValueError: prompts of different models.
    """
    if len({(one.q_max.shape, one.k_max.shape) for one in measurements}) != 1:
        raise ValueError("expected prompts of one model, got different numbers of layers or heads; measure them again")
    means = {}
    for field in fields(PromptMeasurement):
        stacked = torch.stack([getattr(one, field.name) for one in measurements])
        means[field.name] = stacked.amax(dim=0) if field.name in ("q_max", "k_max") else stacked.mean(dim=0)
    return PromptMeasurement(**means)


def save_measurement(measurement: PromptMeasurement, info: PromptInfo, path: str | Path) -> None:
    """Write one prompt's file: all of it or nothing, also when the machine stops meanwhile.

    Raises:
        OSError: the folder is missing or full.
    """
    tensors = {field.name: getattr(measurement, field.name).contiguous() for field in fields(PromptMeasurement)}
    write_whole(path, save(tensors, {"info": msgspec.json.encode(info).decode()}))  # save_file hides a full disk


def load_measurement(path: str | Path) -> tuple[PromptMeasurement, PromptInfo]:
    """Read a file of `save_measurement` of this `MEASUREMENT_VERSION`, which the state's settings tell.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no measurement, has a value that is NaN or infinite, or does not say of which prompt.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors = {field.name: file.get_tensor(field.name) for field in fields(PromptMeasurement)}
            info = msgspec.json.decode((file.metadata() or {}).get("info", ""), type=PromptInfo)
        check_finite(**tensors)
    except (SafetensorError, ValueError) as error:  # msgspec's among them
        raise ValueError(
            f"expected a measurement of a prompt in {path}, got {error}; remove it, and the prompt is measured again"
        ) from error
    return PromptMeasurement(**tensors), info
