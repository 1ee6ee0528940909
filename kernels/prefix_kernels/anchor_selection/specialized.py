"""Hopper's own kernel for the scores of a selection, on the host: what it takes, and its launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from prefix_kernels.anchor_selection.config import AnchorConfig, fits_specialized
from prefix_kernels.grouped_attention.config import has_specialized
from prefix_kernels.launching import launch
from prefix_kernels.pooled_scores.tables import ScoredGroup, ScoreInputs, ScoreShape

LISTING = AnchorConfig(num_warps=8)
"""Of the launch that counts and lists what it scored."""
_MOST_ROWS = 2**31
"""Of codes, that it can number; it looks a few steps ahead."""
_STEPS_AHEAD = 6
FEW_ROWS = 32
"""Of so many rows at most, the sums of 64 programs are read at once, else of 32."""


def check_fits(
    config: AnchorConfig, shape: ScoreShape, device: torch.device, listed: bool, max_block_size: int
) -> None:
    """A specialized configuration; on a CPU, where it can be compiled only, the device is not asked."""
    if not fits_specialized(shape, listed) or max_block_size > 1:
        raise ValueError(
            "expected tokens in 4-bit codes on 32, 64, 96 or 128 channels, not listed, pooled by the maximum, for "
            f"sm_90's own kernel, got {shape}, listed={listed}, max_block_size={max_block_size}; use a configuration "
            "that is not specialized"
        )
    if device.type == "cuda" and not has_specialized(device):
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"expected sm_90 for sm_90's own kernel, got {name}; use a configuration not specialized")


def check_rows(config: AnchorConfig, scored: Sequence[ScoredGroup]) -> None:
    """It numbers rows of codes by 32 bits."""
    ends = [first + count for of in scored for first, count in zip(of.first_rows, of.counts, strict=True)]
    if max(ends, default=0) + _STEPS_AHEAD * config.block_n >= _MOST_ROWS:
        raise ValueError(
            f"expected fewer than 2^31 rows of codes for sm_90's own kernel, got {max(ends)}; use a configuration that "
            "is not specialized"
        )


def check_inputs(inputs: ScoreInputs) -> None:
    """It takes the largest score before it scales, multiplies in INT8, and reads no raw scores."""
    if not inputs.sm_scale > 0 or inputs.raw is not None or inputs.q.dtype is torch.float32:
        raise ValueError(
            "expected a positive scale, q in fp16 or bf16 and no raw scores for sm_90's own kernel, got "
            f"{inputs.sm_scale}, {inputs.q.dtype} and raw={inputs.raw is not None}; use a configuration that is not "
            "specialized"
        )


def launch_scores(config: AnchorConfig, grid: tuple[int, int], arguments: dict[str, Any], *, joined: bool) -> None:
    """The first two phases, in one launch or in two. Upper bytes of keys are counted as scores are pooled.

    Args:
        config: a specialized one.
        grid: programs of a KV head, and KV heads.
        arguments: by parameter name, more than it has, with the items of this grid.
        joined: in one launch, whose programs wait for each other.
    """
    from prefix_kernels.anchor_selection.hopper_kernels import score_items_hopper_kernel
    from prefix_kernels.anchor_selection.hopper_product_kernels import words_layout

    arguments = {
        **arguments,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_CHUNKS": 64 if config.block_m <= FEW_ROWS else 32,
        "NUM_WARPS": config.num_warps,
        "LAYOUT": words_layout(config.block_n, config.num_warps),
    }
    for first, last in ((1, 4),) if joined else ((1, 1), (2, 2)):
        arguments |= {"FIRST_PHASE": first, "LAST_PHASE": last}
        names = {parameter.name for parameter in score_items_hopper_kernel.params}
        launch(
            score_items_hopper_kernel,
            grid,
            {name: value for name, value in arguments.items() if name in names},
            **config.launch_options(joined=joined),
        )
