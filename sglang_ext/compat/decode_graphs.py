"""More decode graphs of each batch size, `cascade`, `sparse` and `kept`, beside the one that SGLang captures.

SGLang keeps several graphs of one size apart by a label, made for LoRA. Ours is appended to that one. Our captures come
first: a backend may keep what it made for the last capture of a size, and that must be its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def label_of(path: str, label: str | None) -> str:
    """The label of a path's graph beside the one with SGLang's label."""
    return path if label is None else f"{label}+{path}"


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
    """Capture our graphs of a size, then SGLang's own. Before the first one, launch parameters may be measured.

    Args:
        runtime: of this process, or None.
        original: SGLang's `DecodeCudaGraphRunner.capture_one_shape`.
        runner, size, forward, stream_idx, variant_label, more: its arguments.
    """
    ours = runtime is not None and runtime.view.runner is runner.model_runner and runner.captured_req_width == 1
    paths = runtime.planner.paths_of(size) if ours else ()
    if paths:
        runtime.planner.tune(runner.capture_bs)
    for path in paths:
        with runtime.capturing(size, path):
            original(runner, size, forward, stream_idx, label_of(path.value, variant_label), *more)
    return original(runner, size, forward, stream_idx, variant_label, *more)


def label_of_step(runtime: Any, runner: Any, label: str | None) -> str | None:
    """The label of the graph that the running step replays.

    Args:
        runtime: of this process, or None.
        runner: SGLang's graph runner.
        label: what SGLang says.
    """
    if runtime is None or runtime.view.runner is not runner.model_runner or runtime.path is None:
        return label
    return label_of(runtime.path.value, label)
