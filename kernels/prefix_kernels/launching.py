"""Launching Triton kernels and sending their tables.

Operations launch through `launch()`. Inside `recording()` nothing runs: each launch is kept with its very arguments, so
that tests can compile it for any target.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

REGISTERS = 65536
"""Of a multiprocessor."""


@dataclass(frozen=True)
class Launch:
    """One launch as it was asked for.

    Attributes:
        kernel: the Triton function.
        grid: programs.
        arguments: by parameter name, compile-time ones included.
        options: of the compiler and the launch: num_warps, num_stages, maxnreg, enable_fp_fusion, launch_pdl,
            launch_cooperative_grid.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, int | None]


@dataclass
class Recording:
    """The launches of a `recording()` block."""

    launches: list[Launch] = field(default_factory=list)


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


def launch(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], **options: int | None) -> None:
    """Start a kernel on the current stream; neither allocates nor waits.

    Args:
        kernel: a Triton function.
        grid: programs, up to three axes; nothing happens where one is 0.
        arguments: by parameter name; those that the kernel does not have are left out.
        options: num_warps, num_stages, maxnreg, enable_fp_fusion; launch_cooperative_grid for programs that wait for
            each other.
    """
    if 0 in grid:
        return
    # Triton 3.10 will have another default: products rounded before they are added, everywhere.
    options = {"enable_fp_fusion": True} | options
    arguments = {name: arguments[name] for name in kernel.arg_names if name in arguments}
    kept = _recording.get()
    if kept is not None:
        kept.launches.append(Launch(kernel, grid, arguments, options))
        return
    kernel[grid](**arguments, **options)


def launch_behind(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], **options: int | None) -> None:
    """As `launch`, but overlapped with the launch before it on the stream, on sm_90; `OVERLAPPED` tells the kernel so.

    That one lets this one's programs come when all of its own are on the GPU and have said so
    (`kernels.let_the_next_kernel_come`): its programs may wait for each other. A graph that was captured so stays so.
    """
    overlapped = _can_overlap()
    if overlapped:
        options["launch_pdl"] = True
    assert "OVERLAPPED" in kernel.arg_names, "it would not wait for what it follows"
    launch(kernel, grid, {**arguments, "OVERLAPPED": overlapped}, **options)


@functools.cache
def _can_overlap() -> bool:
    """Whether kernels can be overlapped here; also where they are only compiled, for any target."""
    from triton import knobs

    if knobs.runtime.interpret:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)


def runs_triton(operation: str, implementation: str | None, device: torch.device) -> bool:
    """Whether "triton" is asked for, or nothing (None) on a GPU. Raises ValueError unless "reference" is otherwise."""
    if implementation not in (None, "reference", "triton"):
        raise ValueError(
            f"{operation} has no implementation {implementation!r}; expected one of: reference, triton. Nothing is "
            "substituted for it"
        )
    return implementation == "triton" or (implementation is None and device.type == "cuda")


def send(table: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy a table of the host into the first rows of a fixed device buffer, without a wait.

    Args:
        table: as many rows as the buffer, or fewer; none: nothing happens.
        buffer: the other rows stay as they are.
    """
    if table.shape[0]:
        source = table.pin_memory() if buffer.device.type == "cuda" else table
        buffer[: table.shape[0]].copy_(source, non_blocking=True)


def sent(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A table of the host on a device, new memory there, without a wait."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def shared_registers(num_warps: int, programs_per_sm: int) -> int:
    """Registers of a thread that let so many programs share those of a multiprocessor, sm_80 and later.

    Raises:
        ValueError: fewer than 64, or no programs.
    """
    found = min(255, REGISTERS // (32 * num_warps * programs_per_sm) // 8 * 8) if programs_per_sm > 0 else 0
    if found < 64:
        raise ValueError(
            "expected programs_per_sm from 1 to what leaves a thread 64 registers, got "
            f"{programs_per_sm} of {num_warps} warps"
        )
    return found


def block_of(size: int, least: int = 1) -> int:
    """The least power of 2 of at least `size` and `least`, as blocks of Triton are."""
    return max(least, 1 << (size - 1).bit_length())


def check_power_of_2(name: str, value: int, least: int) -> None:
    """Raise ValueError unless a block's size is a power of 2 of at least `least`."""
    if value < least or value & (value - 1):
        raise ValueError(f"expected {name} as a power of 2 of at least {least}, got {value}")


def programs_at_once(device: torch.device, programs_per_sm: int) -> int:
    """Programs that run at the same time on a device; 1 where it is no GPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count * programs_per_sm


@contextmanager
def recording() -> Iterator[Recording]:
    """Within the block, launches are kept instead of run. Outputs stay as they were."""
    kept = Recording()
    token = _recording.set(kept)
    try:
        yield kept
    finally:
        _recording.reset(token)
