"""What racecheck reports of the code with which Triton starts warp groups apart, and why that is no race of ours.

A kernel with `gl.warp_specialize` hands what its warp groups capture, and the number of the group's code, through
shared memory: the first warps write, all threads meet at `barrier.sync 1`, the others read, all meet again. Racecheck
may report the reads and writes on both sides of these barriers as races where there are barriers in memory as well.
`dispatched_kernel` shares nothing but a ring of copies behind such barriers: what is reported of its start is the
tool's own finding, and the same, at the same two lines of another kernel, is counted apart. A line of a kernel's body
is not among them, nor is anything that was not reported of this kernel.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

_copy_to_shared = getattr(hopper.async_copy, "async_load", None) or hopper.async_copy.async_copy_global_to_shared
"""Renamed after Triton 3.6."""
ROWS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
RING = gl.constexpr(3)
COLUMNS = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
_ENTRY = re.compile(r"(?:Error|Warning): Race reported between ")
_END = re.compile(r"\n=========[ ]*(?:\n|$)")
_ACCESS = re.compile(r"(Read|Write) access at (\w+)\+0x[0-9a-f]+ in (\S+?):(\d+)")


@gluon.jit
def _exchanged(numbers):
    """Through shared memory and back, behind barriers of this warp group alone."""
    for _ in range(3):
        numbers = gl.convert_layout(gl.convert_layout(numbers, COLUMNS) + 1, ROWS)
    return numbers


@gluon.jit
def _fetch(numbers_ptr, ring, full, free, handed, blocks):
    at = gl.arange(0, 512, ROWS)
    for block in range(blocks):
        place = block % RING
        hopper.mbarrier.wait(free.index(place), (block // RING + 1) % 2)
        _copy_to_shared(ring.index(place), numbers_ptr + block * 512 + at)
        hopper.async_copy.mbarrier_arrive(full.index(place), increment_count=False)
    gl.store(numbers_ptr + blocks * 512 + at, _exchanged(at + handed))


@gluon.jit
def _take(numbers_ptr, ring, full, free, handed, blocks):
    total = gl.zeros([512], gl.int32, ROWS)
    for block in range(blocks):
        place = block % RING
        hopper.mbarrier.wait(full.index(place), block // RING % 2)
        total += ring.index(place).load(ROWS)
        hopper.mbarrier.arrive(free.index(place), count=1)
    gl.store(numbers_ptr + (blocks + 1) * 512 + gl.arange(0, 512, ROWS), _exchanged(total + handed))


@gluon.jit
def dispatched_kernel(handed_ptr, numbers_ptr, blocks):
    """int32 [programs, blocks + 2, 512]: one warp group copies the first `blocks` into a ring and writes the last row
    but one; the other one adds them up and writes the last one. What both add to them is handed to them."""
    handed = gl.load(handed_ptr)
    numbers_ptr += gl.program_id(0) * (blocks + 2) * 512
    barrier: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    ring = gl.allocate_shared_memory(gl.int32, [RING, 512], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], barrier)
    free = gl.allocate_shared_memory(gl.int64, [RING, 1], barrier)
    for place in gl.static_range(RING):
        hopper.mbarrier.init(full.index(place), count=128)
        hopper.mbarrier.init(free.index(place), count=1)
    arguments = (numbers_ptr, ring, full, free, handed, blocks)
    gl.warp_specialize([(_take, arguments), (_fetch, arguments)], [4], [72])


def dispatch() -> None:
    """Launch it, several programs beside each other, three times."""
    handed = torch.ones(1, dtype=torch.int32, device="cuda")
    first = torch.arange(512, dtype=torch.int32, device="cuda")
    numbers = first.expand(8, 9, -1).contiguous()
    for _ in range(3):
        dispatched_kernel[(8,)](handed, numbers, 7, num_warps=4, maxnreg=256)
    torch.cuda.synchronize()
    for row, wanted in ((7, first + 4), (8, 7 * first + 4)):
        if not torch.equal(numbers[:, row], wanted.expand(8, -1)):
            raise SystemExit(
                f"expected {wanted[:3].tolist()}... of a warp group, got {numbers[:, row, :3].tolist()}..."
            )


@dataclass(frozen=True)
class Access:
    """Attributes:
    kind: "Read" or "Write".
    part: "start" (the line of the kernel's `def`), "dispatch" (that of a `gl.warp_specialize`), or "body".
    """

    kind: str
    part: str


def parts(source: str, kernel: str) -> dict[int, str]:
    """By line of a source file, which part of a kernel's dispatch stands there. Other lines are its body."""
    for one in ast.walk(ast.parse(source)):
        if isinstance(one, ast.FunctionDef) and one.name == kernel:
            # The call, and an `if` that chooses between two: the compiler names either.
            calls = {part.lineno for part in ast.walk(one) if _dispatches(part)}
            calls |= {part.lineno for part in ast.walk(one) if isinstance(part, ast.If) and _dispatches(part.body[0])}
            return {one.lineno: "start"} | dict.fromkeys(calls, "dispatch") if calls else {}
    return {}


def _dispatches(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "warp_specialize"
    )


def races(told: str, kernel: str, folder: Path) -> Iterator[frozenset[Access]]:
    """What is told of each race of a kernel.

    Args:
        told: racecheck's report.
        kernel: that it looked at.
        folder: of source files, searched with all below it for the kernel's.
    """
    found = {path.name: parts(path.read_text(), kernel) for path in sorted(folder.rglob("*.py")) if _has(path, kernel)}
    for entry in _ENTRY.split(told)[1:]:
        accesses = _ACCESS.findall(_END.split(entry)[0])
        yield frozenset(
            Access(kind, found.get(Path(file).name, {}).get(int(line), "body") if name == kernel else "body")
            for kind, name, file, line in accesses
        )


def _has(path: Path, kernel: str) -> bool:
    return re.search(rf"^def {kernel}\(", path.read_text(), re.MULTILINE) is not None
