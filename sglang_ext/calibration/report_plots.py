"""The plots of a calibration's report, each as PNG bytes. Imports matplotlib, without a display."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
import torch
from torch import Tensor

matplotlib.use("Agg")

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from sglang_ext.calibration.judge import Verdict, percent
from sglang_ext.calibration.plans import assigned_anchors
from sglang_ext.methods.ab_sparse import BLOCK_SIZES

DPI = 110
CALIBRATED, ORACLE, NEUTRAL = "#1f6fb4", "#c9772b", "#6b7280"


def sparsity_plot(sparsity: Tensor, oracle: Tensor, mass: float, keep_ratio: float) -> bytes:
    """Heat maps, layer x KV head: keys for most of the attention, and what the best tokens of the budget hold."""
    figure = Figure(figsize=(9.5, 1.6 + 0.32 * sparsity.shape[0]))
    panels = figure.subplots(1, 2)
    titles = (
        f"fraction of keys that hold {mass:.0%} of attention",
        f"attention in the best {percent(keep_ratio)} of keys",
    )
    for axes, table, title, colours in zip(panels, (sparsity, oracle), titles, ("viridis_r", "viridis"), strict=True):
        _heat(figure, axes, table, colours)
        axes.set(title=title, xlabel="KV head", ylabel="layer")
    return _png(figure)


def block_recall_plot(recall: Tensor, oracle: Tensor, first_layer: int) -> bytes:
    """A line per KV head over the block size, the mean on top."""
    figure = Figure(figsize=(5.5, 3.8))
    axes = figure.subplots()
    rows, places = recall[first_layer:].flatten(0, 1), range(len(BLOCK_SIZES))
    for row in rows.tolist():
        axes.plot(places, row, color=NEUTRAL, alpha=0.35, linewidth=0.9)
    axes.plot(places, rows.mean(dim=0).tolist(), color=CALIBRATED, linewidth=2.5, label="mean")
    axes.axhline(float(oracle[first_layer:].mean()), color=ORACLE, linestyle="--", label="best tokens (oracle)")
    axes.set(title="blocks by minimum and maximum", xlabel="tokens per block", ylabel="attention recall", ylim=(0, 1))
    axes.set_xticks(places, [str(size) for size in BLOCK_SIZES])
    axes.legend(loc="lower left", fontsize=8)
    return _png(figure)


def recovery_plot(recovery: Tensor, anchors: Sequence[int]) -> bytes:
    """The matrix over layers; a frame marks the anchor that each layer takes."""
    num_layers = recovery.shape[0]
    side = 2.6 + 0.3 * num_layers
    figure = Figure(figsize=(side + 0.8, side))
    axes = figure.subplots()
    # A layer selects for itself and those behind it; the rest of the matrix says nothing.
    _heat(figure, axes, recovery.masked_fill(torch.ones_like(recovery).tril(-1).bool(), torch.nan), "viridis")
    for layer, anchor in assigned_anchors(anchors, num_layers).items():
        colour = "#e11d48" if layer == anchor else "#fb923c"
        axes.add_patch(Rectangle((layer - 0.47, anchor - 0.47), 0.94, 0.94, fill=False, color=colour, linewidth=2.2))
    axes.set(
        title=f"attention kept; anchors {', '.join(map(str, anchors))} (red), reuse (orange)",
        xlabel="layer that attends",
        ylabel="layer that selects",
    )
    axes.title.set_fontsize(9)
    return _png(figure)


def importance_plot(importance: Tensor) -> bytes:
    """A bar per layer."""
    figure = Figure(figsize=(9.5, 2.8))
    axes = figure.subplots()
    axes.bar(range(len(importance)), importance.tolist(), color=CALIBRATED)
    axes.set(xlabel="layer", ylabel="1 - cos(x, y)", title="importance: how much attention changes the hidden state")
    return _png(figure)


def judged_plot(verdict: Verdict) -> bytes:
    """KL from dense against the time of a step, of all candidates, with the bound."""
    figure = Figure(figsize=(7.5, 4.2))
    axes = figure.subplots()
    for one in verdict.judged:
        low, high = one.interval
        spread = [[one.mean_kl - low], [min(high, 10 * one.mean_kl) - one.mean_kl]]
        chosen = one.candidate == verdict.chosen
        axes.errorbar(one.step_ms, one.mean_kl, yerr=spread, marker="*" if chosen else "o", capsize=3)
        axes.annotate(one.candidate.name, (one.step_ms, one.mean_kl), fontsize=7)
    axes.axhline(verdict.max_kl, color="k", linestyle="--", linewidth=0.8)
    axes.set(xlabel="ms a step", ylabel="KL from dense, nats", yscale="log")
    return _png(figure)


def _heat(figure: Any, axes: Any, table: Tensor, colours: str) -> None:
    image = axes.imshow(table.tolist(), cmap=colours, vmin=0.0, vmax=1.0, aspect="auto")
    figure.colorbar(image, ax=axes, fraction=0.05)
    rows, columns = table.shape
    axes.set_yticks(range(0, rows, max(1, rows // 16)))
    axes.set_xticks(range(0, columns, max(1, columns // 16)))


def _png(figure: Any) -> bytes:
    figure.tight_layout()
    buffer = io.BytesIO()
    # Without the version of matplotlib the bytes do not change with it.
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()
