"""A second decode graph of each batch size: `grouped`, beside the one that SGLang captures.

SGLang keeps several graphs of one size apart by a label, made for LoRA. Ours is appended to that one. Capture of the
grouped graph comes first: a backend may keep what it made for the last capture of a size, and that must be its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GROUPED = "grouped"


def grouped_label(label: str | None) -> str:
    """The label of the grouped graph beside the one with SGLang's label."""
    return GROUPED if label is None else f"{label}+{GROUPED}"


def around_capture_one_shape(
    runtime: Any,
    original: Callable[..., Any],
    runner: Any,
    size: int,
    forward: Callable[..., Any],
    stream_idx: int | None = None,
    variant_label: str | None = None,
    *more: Any,
) -> Any:
    """Capture the grouped graph of a size, then SGLang's own.

    Args:
        runtime: of this process, or None.
        original: SGLang's `DecodeCudaGraphRunner.capture_one_shape`.
        runner, size, forward, stream_idx, variant_label, more: its arguments.
    """
    ours = runtime is not None and runtime.view.runner is runner.model_runner and runner.captured_req_width == 1
    if ours and runtime.shared.may_capture(size):
        with runtime.capturing(size):
            original(runner, size, forward, stream_idx, grouped_label(variant_label), *more)
    return original(runner, size, forward, stream_idx, variant_label, *more)


def label_of_step(runtime: Any, runner: Any, label: str | None) -> str | None:
    """The label of the graph that the running step replays.

    Args:
        runtime: of this process, or None.
        runner: SGLang's graph runner.
        label: what SGLang says.
    """
    if runtime is not None and runtime.view.runner is runner.model_runner and runtime.shares:
        return grouped_label(label)
    return label
