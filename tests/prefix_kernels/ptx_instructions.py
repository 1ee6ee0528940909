"""All instructions of `ptx_machine` but those of matrices: a function for each family."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.prefix_kernels.ptx_text import DTYPES, LANES, PRED, U32, UNSIGNED, Array, Instruction, registers_of

if TYPE_CHECKING:
    from tests.prefix_kernels.ptx_machine import Machine


def _move(machine: Machine, one: Instruction) -> None:
    """`mov`: also between a register and its parts, the lowest of which is first."""
    into, source = map(registers_of, one.operands)
    if len(into) == len(source) == 1:
        return machine.write(into[0], machine.read(source[0], one.dtype))
    parts = machine.read_all(one.operands[1], UNSIGNED[one.dtype.itemsize // len(source)])
    bits = np.stack(parts, axis=1).view(UNSIGNED[one.dtype.itemsize // len(into)])
    for register, part in zip(into, bits.T, strict=True):
        machine.write(register, part.copy())
    return None


_SPACES = ("global", "shared", "param")


def _space(one: Instruction) -> str:
    """The memory that an instruction is for, wherever its name has it: behind it may stand of whom it is seen."""
    return next((name for part in one.parts for name in [part.partition("::")[0]] if name in _SPACES), "")


def _transfer(machine: Machine, one: Instruction) -> None:
    """`ld` and `st`: one to four neighbours a thread."""
    name, space = one.parts[0], _space(one)
    place, values = one.operands if name == "st" else one.operands[::-1]
    if space == "param":
        return machine.write(values, machine.read(place.strip("[] "), one.dtype))
    addresses = machine.addresses(place)
    for at, register in enumerate(registers_of(values)):
        where = addresses + np.uint64(at * one.dtype.itemsize)
        if name == "st":
            machine.store(space, where, machine.read(register, one.dtype))
        else:
            machine.write(register, machine.load(space, where, one.dtype))
    return None


def _add_to_memory(machine: Machine, one: Instruction) -> None:
    """`red` of integers; `atom` by one thread, which gets what was there. Who sees it when says nothing here."""
    how = set(one.parts[1:-1]) - {"gpu", "relaxed", "release", "acquire", "acq_rel"}
    machine.expect(how == {_space(one), "add"} and one.dtype.kind == "u")
    *into, place, value = one.operands
    addresses, added = machine.addresses(place), machine.read(value, one.dtype)
    for register in into:
        machine.expect(machine.active is not None and machine.active.sum() == 1)
        machine.write(register, machine.load(_space(one), addresses, one.dtype))
    machine.store(_space(one), addresses, added, adds=True)


_PLAIN: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "neg": np.negative,
    "abs": np.abs,
    "min": np.fmin,
    "max": np.fmax,
    "ex2": np.exp2,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    # Towards 0; fp64 has enough digits for integers of 32 bits.
    "div": lambda x, y: x / y if x.dtype.kind == "f" else np.trunc(x / y).astype(x.dtype),
    # By any number: like PTX, numpy shifts in zeros, or the sign, without end.
    "shl": lambda x, by: x << by.astype(x.dtype),
    "shr": lambda x, by: x >> by.astype(x.dtype),
    # Some of 32 bits, of which the highest one is the sign.
    "bfe": lambda x, first, count: x << 32 - first - count >> 32 - count,
    "selp": lambda x, y, first: np.where(first, x, y),
}
_LAST = {"shl": U32, "shr": U32, "selp": PRED}
_ROUNDED = {"rn", "ftz", "approx", "full"}


def _plain(machine: Machine, one: Instruction) -> None:
    """Operands and result of one type, but for some last ones."""
    name, last = one.parts[0], len(one.operands) - 1
    machine.expect(_ROUNDED.issuperset(one.parts[1:-1]))
    machine.expect(name not in ("bfe", "div") or one.dtype.itemsize == 4)
    kinds = [one.dtype] * (last - 1) + [_LAST.get(name, one.dtype)]
    values = [machine.read(operand, kind) for operand, kind in zip(one.operands[1:], kinds, strict=True)]
    machine.write(one.operands[0], _PLAIN[name](*values))


def _multiply(machine: Machine, one: Instruction) -> None:
    """`mul`, `mad` and `fma`: of integers the lower half or, of 32 bits, both."""
    into, first, second, *added = one.operands
    if one.dtype == np.float32:
        machine.expect(_ROUNDED.issuperset(one.parts[1:-1]))
        result = machine.read(first, one.dtype).astype(np.float64) * machine.read(second, one.dtype)
        result = sum((machine.read(x, one.dtype) for x in added), result).astype(np.float32)
    else:
        machine.expect(one.parts[1] == "lo" or (one.parts[1] == "wide" and one.dtype.itemsize == 4))
        wide = one.dtype if one.parts[1] == "lo" else np.dtype(f"{one.dtype.kind}8")
        result = machine.read(first, one.dtype).astype(wide) * machine.read(second, one.dtype).astype(wide)
        for x in added:
            result = result + machine.read(x, wide)
    machine.write(into, result)


_COMPARED = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}


def _compare(machine: Machine, one: Instruction) -> None:
    """`setp`; `u` behind a comparison of fp32: also where one is not a number; `and` behind it: and a predicate."""
    _, how, *joined, _ = one.parts
    into, first, second, *others = one.operands
    machine.expect(how[:2] in _COMPARED and how[2:] in ("", "u") and joined == ["and"] * len(others))
    x, y = (machine.read(operand, one.dtype) for operand in (first, second))
    result = getattr(np, _COMPARED[how[:2]])(x, y)
    if one.dtype.kind == "f":
        no_number = np.isnan(x) | np.isnan(y)
        result = result | no_number if how[2:] else result & ~no_number
    for other in others:
        result = result & machine.read(other, PRED)
    machine.write(into, result)


def _convert(machine: Machine, one: Instruction) -> None:
    """`cvt`: of integers, also to fp32, from bf16 to fp32, and of fp32 down to whole numbers or towards 0 to s32."""
    into, source = one.parts[-2:]
    if (into, source) == ("f32", "bf16"):
        result = machine.read(one.operands[1], DTYPES["u16"]).astype(np.uint32) << np.uint32(16)
        return machine.write(one.operands[0], result)
    value = machine.read(one.operands[1], one.dtype)
    if one.parts[1:] == ("rmi", "ftz", "f32", "f32"):
        result = np.floor(value)
    elif one.parts[1:] == ("rzi", "s32", "f32"):
        # No number becomes 0, and what is too large the largest.
        result = np.nan_to_num(value.astype(np.float64)).clip(-(2**31), 2**31 - 1).astype(np.int32)
    else:
        machine.expect(value.dtype.kind in "iu" and (into[0] in "su" or one.parts[1:-1] == ("rn", "f32")))
        result = value.astype(DTYPES[into])
    return machine.write(one.operands[0], result)


def _shuffle(machine: Machine, one: Instruction) -> None:
    """`shfl.sync` of whole warps. `up`: the first lanes, which have none so far below, keep what they have."""
    value, other, bound, lanes = (machine.read(x, one.dtype) for x in one.operands[1:])
    how = one.parts[2]
    machine.expect(how in ("bfly", "idx", "up") and bool((bound == (0 if how == "up" else LANES - 1)).all()))
    machine.expect("|" not in one.operands[0] and bool((lanes == 2**LANES - 1).all()) and machine.active is None)
    source = machine.lanes ^ other if how == "bfly" else other % LANES
    if how == "up":
        source = np.where(machine.lanes < other, machine.lanes, machine.lanes - other)
    machine.write(one.operands[0], value[machine.first + source])


PLAIN_FAMILIES: dict[str, Callable[[Machine, Instruction], None]] = {
    **dict.fromkeys(("bar", "barrier", "fence", "griddepcontrol"), lambda machine, one: None),
    **dict.fromkeys(_PLAIN, _plain),
    "mov": _move,
    "ld": _transfer,
    "st": _transfer,
    "mul": _multiply,
    "mad": _multiply,
    "fma": _multiply,
    "setp": _compare,
    "cvt": _convert,
    "shfl": _shuffle,
    "red": _add_to_memory,
    "atom": _add_to_memory,
}
