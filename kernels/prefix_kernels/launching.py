"""Launching Triton kernels, sending their tables, and compiling what would be launched for a GPU that is not there.

Operations launch through `launch()`. Inside `recording()` nothing runs: each launch is kept, with the types and the
divisibility of its very arguments, and `compiled()` compiles it for any target. So "this kernel compiles for sm_80"
is said of the code that runs, in the shapes that it runs in, on a machine without a GPU.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

logger = logging.getLogger(__name__)

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_DIVISIBLE = 16


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
_overlapped: ContextVar[bool] = ContextVar("overlapped", default=False)


def launch(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], **options: int | None) -> None:
    """Start a kernel on the current stream; neither allocates nor waits.

    Args:
        kernel: a Triton function.
        grid: programs, up to three axes; nothing happens where one is 0.
        arguments: by parameter name, without `OVERLAPPED`, which every kernel has.
        options: num_warps, num_stages, maxnreg, enable_fp_fusion; launch_cooperative_grid for programs that wait for
            each other, which are never overlapped with the kernel before.
    """
    wanted = _overlapped.get() and not options.get("launch_cooperative_grid")
    _start(kernel, grid, arguments, options, wanted and _can_overlap())


def launch_behind(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], **options: int | None) -> None:
    """As `launch`, but always overlapped with the launch before it on the stream, on sm_90.

    That one lets this one's programs come when all of its own are on the GPU
    (`kernels.let_the_next_kernel_come`), so programs of either may wait for each other. Where CUDA refuses
    a launch that is cooperative and overlapped, it is the former alone, and comes a microsecond later.
    """
    _start(kernel, grid, arguments, options, _can_overlap() and _can_overlap_cooperative())


def _start(
    kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], options: dict[str, int | None], overlapped: bool
) -> None:
    if 0 in grid:
        return
    arguments = {**arguments, "OVERLAPPED": overlapped}
    # Triton 3.10 will have another default: products rounded before they are added, everywhere.
    options = {"enable_fp_fusion": True} | options
    if overlapped:
        options["launch_pdl"] = True
    kept = _recording.get()
    if kept is not None:
        kept.launches.append(Launch(kernel, grid, arguments, dict(options)))
        return
    kernel[grid](**arguments, **options)


@functools.cache
def _can_overlap() -> bool:
    """Whether kernels can be overlapped here; also where they are only compiled, for any target."""
    from triton import knobs

    if knobs.runtime.interpret:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)


@functools.cache
def _can_overlap_cooperative() -> bool:
    """Whether a cooperative launch can be overlapped, too: tried once. CUDA 13.0 takes it; nobody says since when."""
    if not torch.cuda.is_available():
        return True
    from prefix_kernels.kernels import nothing

    try:
        nothing[(1,)](OVERLAPPED=True, num_warps=1, launch_cooperative_grid=True, launch_pdl=True)
    except RuntimeError as error:
        logger.warning("a selection's two launches are not overlapped, which is slower by a microsecond: %s", error)
        return False
    return True


def send(table: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy a table of the host into the first rows of a fixed device buffer, without a wait.

    Args:
        table: as many rows as the buffer, or fewer; none: nothing happens.
        buffer: the other rows stay as they are.
    """
    if table.shape[0]:
        source = table.pin_memory() if buffer.device.type == "cuda" else table
        buffer[: table.shape[0]].copy_(source, non_blocking=True)


def block_of(size: int, least: int = 1) -> int:
    """The least power of 2 of at least `size` and `least`, as blocks of Triton are."""
    return max(least, 1 << (size - 1).bit_length())


@contextmanager
def overlapped_launches(overlapped: bool = True) -> Iterator[None]:
    """Within the block, in this thread, kernels are launched while the one before them on the stream still runs.

    Each waits for it before it touches memory, see `kernels`; what `launch_behind` starts is so in and out of
    such a block. A graph that was captured so stays so; the run that compiles before a capture must be in such a block,
    too. Before sm_90 nothing is overlapped.

    Args:
        overlapped: False: not, as outside of any such block.
    """
    token = _overlapped.set(overlapped)
    try:
        yield
    finally:
        _overlapped.reset(token)


@contextmanager
def recording() -> Iterator[Recording]:
    """Within the block, launches are kept instead of run. Outputs stay as they were."""
    kept = Recording()
    token = _recording.set(kept)
    try:
        yield kept
    finally:
        _recording.reset(token)


def compiled(launched: Launch, capability: int) -> Any:
    """Compile a launch for a CUDA target, without a GPU.

    Args:
        launched: from `recording()`.
        capability: 80 for sm_80, 90 for sm_90 (with its own instructions), and so on.

    Returns:
        Triton's compiled kernel: `.asm["ptx"]`, `.asm["cubin"]`, `.metadata.shared` in bytes.

    Raises:
        Exception: whatever Triton or the assembler raises for code that this target cannot run.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for at, parameter in enumerate(launched.kernel.params):
        value = launched.arguments[parameter.name]
        one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or one:
            signature[parameter.name] = "constexpr"
            constants[(at,)] = value
            continue
        signature[parameter.name] = _type_of(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(number, int) and number % _DIVISIBLE == 0 and not parameter.do_not_specialize:
            attributes[(at,)] = [["tt.divisibility", _DIVISIBLE]]
    of_language = _gluon_source() if launched.kernel.is_gluon() else ASTSource
    source = of_language(fn=launched.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launched.options))


def _gluon_source() -> Any:
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    raise TypeError(f"expected a tensor, int or float as a kernel's argument, got {type(value).__name__}")
