"""Races that racecheck reports of the code with which Triton starts warp groups apart.

A kernel with `gl.warp_specialize` hands what its warp groups capture, and the number of the group's code, through
shared memory: the first warps write, all threads meet at `barrier.sync 1`, the others read, all meet again. In kernels
that have barriers in memory, too, racecheck reports these reads and writes as races of each other. Whether they are is
told by the code itself: `phases` counts the barriers before each of them, along all ways through what was compiled. If
reads and writes are never in the same phase, a race of two of them is none, and `sanitize.py` counts it apart. Nothing
at a line of a kernel's body is among them.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

_ENTRY = re.compile(r"(?:Error|Warning): Race reported between ")
_END = re.compile(r"\n=========[ ]*(?:\n|$)")
_REPORTED = re.compile(r"(Read|Write) access at (\w+)\+0x[0-9a-f]+ in (\S+?):(\d+)")
_LABEL = re.compile(r"^([\w$]+):")
_JUMP = re.compile(r"^(@!?%\w+ )?bra(?:\.uni)?\s+([\w$]+);")
_ACCESS = re.compile(r"^(?:@!?%\w+ )?(ld|st)\.shared\S*\s")
START_TO_END = 3
"""Barriers from one start of the warp groups to the next: they begin, have read what they were handed, have ended."""
APART = {"ld": {1}, "st": {0}}
"""Phases of reads and of writes, as Triton has them."""


def phases(ptx: str, path: Path, lines: Collection[int]) -> dict[str, set[int]]:
    """When shared memory is read and written where warp groups are started.

    Args:
        ptx: of a kernel.
        path: of its source file.
        lines: of that file, as `parts` names them.

    Returns:
        Of reads ("ld") and writes ("st") at these lines, how many `barrier.sync 1` there are before them, modulo
        `START_TO_END`, on any way from the beginning. All threads take part in each of them, so what is in another
        phase is at another time.

    Raises:
        ValueError: that barrier is used by some of the threads, or the file is not in the text once.
    """
    numbers = re.findall(rf'^\s*\.file\s+(\d+) "[^"]*{path.parent.name}/{path.name}"', ptx, re.MULTILINE)
    if len(numbers) != 1:
        raise ValueError(f"expected {path.name} in the PTX's table of files, once, got it {len(numbers)} times")
    code = [re.sub(r"\s*//.*", "", line).strip() for line in ptx[ptx.index("\n{") :].splitlines()]
    labels: dict[str, list[int]] = defaultdict(list)
    here: list[bool] = []
    for at, line in enumerate(code):
        if found := _LABEL.match(line):
            labels[found[1]].append(at)
        if re.match(r"barrier\.sync\s+1,|bar\.sync\s+1\b|barrier\.cta", line):
            raise ValueError(f"expected barrier 1 as one of all threads, got {line}")
        place = re.match(r"\.loc\s+(\d+) (\d+)", line)
        here.append((place[1] == numbers[0] and int(place[2]) in lines) if place else bool(here) and here[-1])
    known: list[set[int]] = [set() for _ in code]
    todo = [(0, 0)]
    while todo:
        at, phase = todo.pop()
        if at >= len(code) or phase in known[at]:
            continue
        known[at].add(phase)
        if re.match(r"barrier\.sync\s+1;", code[at]):
            phase = (phase + 1) % START_TO_END
        jump = _JUMP.match(code[at])
        if jump:
            # A label of an inline block is there once for each block.
            todo.append((min(labels[jump[2]], key=lambda to, at=at: abs(to - at)), phase))
        if not (jump and not jump[1]) and not re.match(r"(ret|trap|exit);", code[at]):
            todo.append((at + 1, phase))
    found_in: dict[str, set[int]] = {"ld": set(), "st": set()}
    for line, ours, of in zip(code, here, known, strict=True):
        if ours and (access := _ACCESS.match(line)):
            found_in[access[1]] |= of
    return found_in


def parts(source: str, kernel: str) -> set[int]:
    """Lines of a source file at which a kernel starts its warp groups; none for a kernel without."""
    for one in ast.walk(ast.parse(source)):
        if isinstance(one, ast.FunctionDef) and one.name == kernel:
            # The call, and an `if` that chooses between two: the compiler names either, or the beginning.
            calls = {part.lineno for part in ast.walk(one) if _dispatches(part)}
            calls |= {part.lineno for part in ast.walk(one) if isinstance(part, ast.If) and _dispatches(part.body[0])}
            return calls and calls | {one.lineno}
    return set()


def _dispatches(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and re.match(r"\w+\.warp_specialize\(", ast.unparse(node)) is not None


def dispatched(told: str, kernel: str, folder: Path) -> int:
    """Races of racecheck's report whose accesses all stand where the kernel starts its warp groups.

    Args:
        told: the report.
        kernel: that it looked at.
        folder: of source files, searched with all below it for the kernel's.
    """
    sources = {path.name: path.read_text() for path in sorted(folder.rglob("*.py"))}
    found = {name: parts(text, kernel) for name, text in sources.items() if f"\ndef {kernel}(" in text}
    count = 0
    for entry in _ENTRY.split(told)[1:]:
        text = _END.split(entry)[0]
        named = _REPORTED.findall(text)
        at_start = [name == kernel and int(line) in found.get(Path(file).name, ()) for _, name, file, line in named]
        count += 1 < len(re.findall(r"\baccess at\b", text)) == len(named) and all(at_start)
    return count
