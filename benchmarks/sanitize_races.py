"""What racecheck reports of the code with which Triton starts warp groups apart, and why that is no race of ours.

A kernel with `gl.warp_specialize` hands what its warp groups capture, and the number of the group's code, through
shared memory: the first warps write, all threads meet at `barrier.sync 1`, the others read, all meet again. Racecheck
reports the reads and writes on both sides of these barriers as races. `dispatched_kernel` does nothing else: what is
reported of it is the tool's own finding, and the same, at the same two lines of another kernel, is counted apart.
A line of a kernel's body is not among them.
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

_ENTRY = re.compile(r"(?:Error|Warning): Race reported between ")
_END = re.compile(r"\n=========[ ]*(?:\n|$)")
_ACCESS = re.compile(r"(Read|Write) access at (\w+)\+0x[0-9a-f]+ in (\S+?):(\d+)")


@gluon.jit
def _put(out_ptr, value):
    at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(out_ptr + at, at + value)


@gluon.jit
def dispatched_kernel(value_ptr, out_ptr):
    """int32 [256]: two warp groups, each writes its 128 numbers; what they add is handed to them."""
    value = gl.load(value_ptr)
    gl.warp_specialize([(_put, (out_ptr, value)), (_put, (out_ptr + 128, value))], [4], [72])


def dispatch() -> None:
    """Launch it a few times, one program beside another."""
    value, out = torch.ones(1, dtype=torch.int32, device="cuda"), torch.zeros(256, dtype=torch.int32, device="cuda")
    for _ in range(3):
        dispatched_kernel[(8,)](value, out, num_warps=4, maxnreg=256)
    torch.cuda.synchronize()
    wanted = torch.arange(256, dtype=torch.int32, device="cuda") % 128 + 1
    if not torch.equal(out, wanted):
        raise SystemExit(f"expected 1 to 128 twice of two warp groups, got {out.tolist()}")


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
