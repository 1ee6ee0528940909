"""Hopper's own attention kernel on the host: what it takes, and its launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prefix_kernels.grouped_attention.config import (
    AttentionConfig,
    AttentionShape,
    has_specialized,
    programs_at_once,
    specialized_at_once,
)
from prefix_kernels.grouped_attention.launches import AttentionLaunch
from prefix_kernels.launching import launch
from prefix_kernels.types import PagedKV


def check_fits(config: AttentionConfig, shape: AttentionShape, device: torch.device, num_programs: int | None) -> None:
    """A specialized configuration; on a CPU, where it can be compiled only, the device is not asked."""
    if not shape.fits_specialized(config.block_m):
        raise ValueError(
            "expected a shape that the specialized kernel has (bf16 or fp16, also the KV; 64 or 128 channels; "
            f"at most {config.block_m} query heads to a KV head), got {shape}; use a portable configuration"
        )
    if device.type != "cuda":
        return
    properties = torch.cuda.get_device_properties(device)
    if not has_specialized(device):
        raise ValueError(f"expected sm_90 for the specialized kernel, got {properties.name}; use a portable one")
    item = shape.dtype.itemsize
    at_once = specialized_at_once(
        config,
        config.block_n * (shape.head_dim + shape.v_head_dim) * item,
        config.block_m * shape.head_dim * item,
        properties.shared_memory_per_multiprocessor,
    )
    most = at_once * properties.multi_processor_count
    heads = shape.num_kv_heads
    wanted = heads * max((num_programs or programs_at_once(device, config)) // heads, 1)
    if wanted > most:
        # They wait for each other.
        raise ValueError(
            f"expected at most {most} programs of {config} at a time on this GPU, got {wanted}; lower programs_per_sm, "
            "num_programs or the ring, or use a portable configuration"
        )


def check_inputs(q: Tensor, kv: PagedKV, scale: float) -> None:
    """It copies 16 bytes at a time, and takes the largest score before it scales."""
    if not scale > 0:
        raise ValueError(f"expected a positive scale of the scores, got {scale}; use a portable configuration")
    for name, tensor in (("q", q), ("k_cache", kv.k_cache), ("v_cache", kv.v_cache)):
        if tensor.data_ptr() % 16 or any(stride % 16 for stride in tensor.stride()[:2]):
            raise ValueError(
                f"expected {name} aligned to 16 bytes with strides of multiples of 16 elements, got "
                f"{tensor.data_ptr() % 16} bytes off and strides {tensor.stride()}; use a portable configuration"
            )


def launch_specialized(one: AttentionLaunch, arguments: dict[str, Any], num_kv_heads: int) -> None:
    from prefix_kernels.grouped_attention.hopper_kernels import attend_items_hopper_kernel

    launch(
        attend_items_hopper_kernel,
        (num_kv_heads, one.programs),
        {**arguments, "num_items_ptr": one.num_items, "RING": one.config.num_stages},
        num_warps=one.config.num_warps,
        maxnreg=one.config.max_registers,
        # Its programs wait for each other: started together, or refused with an error where they do not fit.
        launch_cooperative_grid=arguments["NUM_SPANS"] > 0,
    )
