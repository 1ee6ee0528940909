"""PTX as text: the statements of a kernel, taken apart, and the numpy types of its operands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray
LANES = 32
UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
DTYPES = {f"{kind}{bits}": UNSIGNED[bits // 8] for kind in "bu" for bits in (8, 16, 32, 64)}
DTYPES |= {f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)}
DTYPES |= {"f32": np.dtype("f4"), "pred": np.dtype(bool)}
PRED, U32, U64 = (DTYPES[name] for name in ("pred", "u32", "u64"))


@dataclass(frozen=True)
class Instruction:
    """A statement: `@guard` or, negated, `@!guard`, parts of a name between dots, operands as written.

    `{...}` and `[...]` are one operand each. The type is that of the last part, if it names one.
    """

    text: str
    guard: str | None
    negated: bool
    parts: tuple[str, ...]
    operands: tuple[str, ...]
    dtype: Any


def parse(ptx: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions of the only kernel, and the one that each label stands before."""
    body = re.sub(r"//[^\n]*", "", ptx[ptx.index(".entry") :])
    body = body[body.index("\n{") + 2 : body.rindex("\n}")]
    body = re.sub(r"^\s*\.(loc|file)\b[^\n]*", "", body, flags=re.MULTILINE)
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in body.split(";"):
        # Braces around inline assembly, and labels, end without a semicolon.
        while lead := re.match(r"[\s{}]+|(\$\w+):", statement):
            if lead[1]:
                labels[lead[1]] = len(found)
            statement = statement[lead.end() :]
        if not statement or statement.startswith((".reg", ".pragma", ".shared")):
            continue
        negated, guard, name, rest = re.match(r"(?:@(!?)(%?\w+)\s+)?(\S+)\s*(.*)$", statement, re.DOTALL).groups()
        parts, operands = name.split("."), re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        of_type = DTYPES.get(parts[-1])
        found.append(Instruction(statement, guard, bool(negated), tuple(parts), tuple(operands), of_type))
    return found, labels


def shared_arrays(ptx: str) -> dict[str, tuple[int, int]]:
    """Of each array in shared memory that the kernel declares: what its address is a multiple of, and its bytes."""
    found: dict[str, tuple[int, int]] = {}
    for align, kind, name, number in re.findall(r"(?<!extern )\.shared \.align (\d+) \.(\w+) (\w+)\[(\d+)\]", ptx):
        if name in found:
            raise ValueError(f"expected arrays with names of their own, got {name} twice; keep their scopes apart")
        found[name] = int(align), DTYPES[kind].itemsize * int(number)
    return found


@cache
def registers_of(operand: str) -> tuple[str, ...]:
    """One, or those between braces."""
    return tuple(operand.strip("{} ").replace(" ", "").split(","))
