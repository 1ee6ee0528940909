"""One program of a compiled kernel on the CPU: its PTX, all threads at once as numpy arrays.

For kernels that no interpreter of Triton runs, such as those in Gluon. A register is an array with an entry for each
thread, and every instruction is done for all threads before the next one.

What is modelled:

- integers, fp32 and predicates; branches that all threads take together, instructions under a predicate;
- the threads' places in `mma.sync` and `wgmma` of INT8, in `ldmatrix`, `stmatrix` and `shfl`;
- descriptors of shared memory and its swizzle, for a right side whose rows lie along the summed dimension;
- atomic adds, to shared memory and to the launch's tensors;
- `cp.async` to shared memory: it comes when its group is waited for, and until then nothing may be read there;
- bounds: an address must lie in a tensor of the launch or in one array of the program's shared memory, and be aligned.
  Of shared memory only what was written may be read; what is added to anything else stays unknown. A register that
  nothing was written to has all bits set, which is no number as fp32.

What is not:

- time, and all that goes on at the same time. Barriers, fences and waits do nothing, as threads never drift apart: one
  that is missing is not found, nor is memory that is read before it was there;
- other programs at the same time: they run one after the other, or in turns of a few instructions (`run_together`);
- how instructions round inside. `ex2.approx` is numpy's, fp32 `fma` goes through fp64, and nothing is flushed to 0.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import torch

from prefix_kernels.launching import Launch

Array = np.ndarray
LANES = 32
UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
DTYPES = {f"{kind}{bits}": UNSIGNED[bits // 8] for kind in "bu" for bits in (8, 16, 32, 64)}
DTYPES |= {f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)}
DTYPES |= {"f32": np.dtype("f4"), "pred": np.dtype(bool)}
PRED, U32, U64 = (DTYPES[name] for name in ("pred", "u32", "u64"))
_S8, _S32 = DTYPES["s8"], DTYPES["s32"]
TURN = 1000
"""Instructions of a program while others wait, where some run together."""
SHARED_BASE = 1024
"""Address of shared memory: not 0, and a multiple of what swizzles repeat after."""


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


class UnknownInstructionError(LookupError):
    """An instruction, or a form of one, that this machine does not have."""


class Memory:
    """Ranges, each a first address and bytes. All addresses of an access must lie within one of them.

    Args:
        ranges: apart from each other.
        blank: whether nothing is in them so far. Then only what was written may be read.
    """

    def __init__(self, ranges: Iterable[tuple[int, Array]], *, blank: bool = False) -> None:
        self._ranges = sorted(ranges, key=lambda item: item[0])
        self._bases = [base for base, _ in self._ranges]
        self._known = [np.full(content.size, not blank) for _, content in self._ranges]

    def read(self, addresses: Array, dtype: np.dtype[Any], text: str) -> Array:
        """Numbers of a type; `text` is for an error."""
        content, known, where = self._at(addresses, dtype, text)
        if not known[where].all():
            raise IndexError(f"expected addresses that something was written to, got {addresses}: {text}")
        return content[where]

    def write(self, addresses: Array, values: Array, text: str) -> None:
        """Of those for the same address the last one stays."""
        content, known, where = self._at(addresses, values.dtype, text)
        content[where], known[where] = values, True

    def add(self, addresses: Array, values: Array, text: str) -> None:
        """All of those for the same address. What nothing was written to stays so."""
        content, _, where = self._at(addresses, values.dtype, text)
        np.add.at(content, where, values)

    def forget(self, addresses: Array, dtype: np.dtype[Any], text: str) -> None:
        """What is there may not be read until it is written again."""
        _, known, where = self._at(addresses, dtype, text)
        known[where] = False

    def _at(self, addresses: Array, dtype: np.dtype[Any], text: str) -> tuple[Array, Array, Array]:
        """A range as numbers of a type, which of their bytes are known, and which of them the addresses are."""
        number = max(1, bisect_right(self._bases, int(addresses[0]))) - 1
        (base, content), size = self._ranges[number], dtype.itemsize
        offsets, whole = addresses.astype(np.int64) - base, content.size // size * size
        if offsets.min() < 0 or offsets.max() + size > content.size or (addresses % np.uint64(size)).any():
            raise IndexError(f"expected multiples of {size} in one tensor, got addresses {addresses}: {text}")
        return content[:whole].view(dtype), self._known[number][:whole].reshape(-1, size), offsets // size


class Machine:
    """The registers and memory of one program of a launch.

    Args:
        launched: from `launching.recording()`, with tensors on the CPU.
        kernel: what `compiling.compiled` made of it.
        program: its place in the grid.
        tensors: more of them, which it reaches by addresses in tables.
    """

    def __init__(
        self, launched: Launch, kernel: Any, program: Sequence[int], tensors: Iterable[torch.Tensor] = ()
    ) -> None:
        ptx = kernel.asm["ptx"]
        self._instructions, self._labels = parse(ptx)
        head = ptx[: ptx.index("\n{")]
        self.threads = int(re.findall(r"\.reqntid (\d+)", head)[0])
        self.lanes, self.warps = np.arange(self.threads) % LANES, self.threads // LANES
        self.first = np.arange(self.threads) - self.lanes  # thread of the first lane of each thread's warp
        self.active: Array | None = None  # threads that the instruction is done for; None: all
        self.text = ""
        self.copies: list[list[tuple[Array, Array]]] = [[]]  # on their way, by groups: into, from, words of 32 bits
        arguments = [launched.arguments[name] for name, kind in kernel.src.signature.items() if kind != "constexpr"]
        numbers = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
        reached = [one.untyped_storage() for one in (*tensors, *arguments) if isinstance(one, torch.Tensor)]
        storages = {storage.data_ptr(): storage for storage in reached}
        content = {at: torch.empty(0, dtype=torch.uint8).set_(storage).numpy() for at, storage in storages.items()}
        names: dict[str, Any] = {"%tid.x": np.arange(self.threads)}
        shared, at = {}, SHARED_BASE
        # Triton's own comes behind all others. Whatever its size, no array ends where the next one begins.
        arrays = shared_arrays(ptx) | {"global_smem": (SHARED_BASE, kernel.metadata.shared)}
        for name, (align, size) in arrays.items():
            names[name] = at = -(-at // align) * align
            shared[at] = np.full(size, 0xFF, np.uint8)
            at += size + 1
        self.memory = {"global": Memory(content.items()), "shared": Memory(shared.items(), blank=True)}
        for axis, place, programs in zip("xyz", (*program, 0, 0), (*launched.grid, 1, 1), strict=False):
            names |= {f"%ctaid.{axis}": place, f"%nctaid.{axis}": programs}
        self.registers = {name: np.full(self.threads, value, np.uint32) for name, value in names.items()}
        parameters = re.findall(r"\.param \.(\w+)[^,)]* (\w+_param_\d+)", head)
        # The last ones are room for Triton itself, of which these kernels use none.
        numbers += [0] * (len(parameters) - len(numbers))
        for (kind, name), number in zip(parameters, numbers, strict=True):
            self.registers[name] = np.full(self.threads, number, DTYPES[kind])

    def turns(self, done: Counter[str]) -> Iterator[None]:
        """Up to `ret`, counting in `done` how often each instruction is done, by its name's first part; to be asked for
        again and again, for some instructions each time."""
        at = 0
        for step in count():
            if step % TURN == TURN - 1:
                yield
            one = self._instructions[at]
            at += 1
            name, self.text, self.active = one.parts[0], one.text, None
            if one.guard:
                active = self.read(one.guard, PRED) ^ one.negated
                if not active.any():
                    continue
                self.active = None if active.all() else active
            done[name] += 1
            self.expect(name in FAMILIES or (name in ("bra", "ret") and self.active is None))
            if name == "ret":
                return
            if name == "bra":
                at = self._labels[one.operands[0]]
            else:
                FAMILIES[name](self, one)

    def expect(self, holds: bool) -> None:
        """Raise unless this machine has the instruction, for threads that do not part at a branch."""
        if not holds:
            raise UnknownInstructionError(f"expected an instruction that is modelled, got {self.text}; add it")

    def read(self, operand: str, dtype: Any) -> Array:
        """A register's, or a constant's, values for all threads; of a wider one the lowest bits."""
        self.expect(dtype is not None)
        value = self.registers.get(operand)
        if value is None:
            return self._constant(operand, dtype)
        if value.dtype.itemsize != dtype.itemsize:
            value = value.astype(UNSIGNED[dtype.itemsize])
        return value.view(dtype)

    def _constant(self, text: str, dtype: np.dtype[Any]) -> Array:
        self.expect(re.fullmatch(r"%(p|rs?|rd|f)\d+|0f[0-9A-F]{8}|-?\d+|0x[0-9A-Fa-f]+", text) is not None)
        # A register that nothing was written to: all bits set.
        number = -1 if text[0] == "%" else int(text[2:], 16) if text.startswith("0f") else int(text, 0)
        number = bool(number) if dtype == PRED else number % 2 ** (8 * dtype.itemsize)
        return np.full(self.threads, number, UNSIGNED[dtype.itemsize]).view(dtype)

    def read_all(self, operand: str, dtype: Any) -> list[Array]:
        """Of the registers between braces."""
        return [self.read(register, dtype) for register in registers_of(operand)]

    def write(self, register: str, value: Array) -> None:
        """For the threads that the instruction is done for."""
        value = value if value.dtype == PRED else value.view(UNSIGNED[value.dtype.itemsize])
        if self.active is not None:
            value = np.where(self.active, value, self.read(register, value.dtype))
        self.registers[register] = value

    def addresses(self, operand: str) -> Array:
        """`[register + offset]`. Addresses wrap around, so an offset may be negative."""
        base, _, offset = operand.strip("[] ").replace(" ", "").partition("+")
        return self.read(base, U64) + np.uint64(int(offset or "0", 0) % 2**64)

    def load(self, space: str, addresses: Array, dtype: np.dtype[Any]) -> Array:
        """A number for each thread; 0 for those that the instruction is not done for."""
        active = slice(None) if self.active is None else self.active
        loaded = np.zeros(self.threads, dtype)
        loaded[active] = self.memory[space].read(addresses[active], dtype, self.text)
        return loaded

    def store(self, space: str, addresses: Array, value: Array, *, adds: bool = False) -> None:
        """A number of each thread that the instruction is done for; `adds`: to what is there."""
        active = slice(None) if self.active is None else self.active
        memory = self.memory[space]
        (memory.add if adds else memory.write)(addresses[active], value[active], self.text)


def run_together(programs: Sequence[Machine]) -> Counter[str]:
    """Programs of one launch that may wait for each other, in turns, writing its tensors: how often they did what.

    Raises UnknownInstructionError, or IndexError for an address outside of all tensors, not aligned, or in shared
    memory that nothing was written to.
    """
    done = Counter[str]()
    left = [program.turns(done) for program in programs]
    with np.errstate(all="ignore"):
        while left:
            # A turn that is not the last one is None.
            left = [turns for turns in left if next(turns, done) is None]
    return done


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
    "popc": lambda x: np.bitwise_count(x).astype(x.dtype),
    # Towards 0; fp64 has enough digits for integers of 32 bits.
    "div": lambda x, y: x / y if x.dtype.kind == "f" else np.trunc(x / y).astype(x.dtype),
    "rem": np.fmod,
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
    """Operands and result of one type, but for some last ones. `relu`: what is below 0 becomes 0."""
    name, last = one.parts[0], len(one.operands) - 1
    machine.expect((_ROUNDED | {"relu"}).issuperset(one.parts[1:-1]))
    machine.expect(name not in ("bfe", "div") or one.dtype.itemsize == 4)
    kinds = [one.dtype] * (last - 1) + [_LAST.get(name, one.dtype)]
    values = [machine.read(operand, kind) for operand, kind in zip(one.operands[1:], kinds, strict=True)]
    result = _PLAIN[name](*values)
    machine.write(one.operands[0], np.maximum(result, 0) if "relu" in one.parts else result)


def _multiply(machine: Machine, one: Instruction) -> None:
    """`mul`, `mad` and `fma`: of integers the lower half or, of at most 32 bits, both."""
    into, first, second, *added = one.operands
    if one.dtype == np.float32:
        machine.expect(_ROUNDED.issuperset(one.parts[1:-1]))
        result = machine.read(first, one.dtype).astype(np.float64) * machine.read(second, one.dtype)
        result = sum((machine.read(x, one.dtype) for x in added), result).astype(np.float32)
    else:
        machine.expect(one.parts[1] == "lo" or (one.parts[1] == "wide" and one.dtype.itemsize <= 4))
        wide = one.dtype if one.parts[1] == "lo" else np.dtype(f"{one.dtype.kind}{2 * one.dtype.itemsize}")
        result = machine.read(first, one.dtype).astype(wide) * machine.read(second, one.dtype).astype(wide)
        for x in added:
            result = result + machine.read(x, wide)
    machine.write(into, result)


_COMPARED = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}


def _compare(machine: Machine, one: Instruction) -> None:
    """`setp`; `u` behind a comparison of fp32: also where one is no number; `num`: both are; `and` behind it: and a
    predicate.
    """
    _, how, *joined, _ = one.parts
    into, first, second, *others = one.operands
    known = how == "num" or (how[:2] in _COMPARED and how[2:] in ("", "u"))
    machine.expect(known and joined == ["and"] * len(others))
    x, y = (machine.read(operand, one.dtype) for operand in (first, second))
    if how == "num":
        result = ~(np.isnan(x) | np.isnan(y))
    else:
        result = getattr(np, _COMPARED[how[:2]])(x, y)
    if one.dtype.kind == "f" and how != "num":
        no_number = np.isnan(x) | np.isnan(y)
        result = result | no_number if how[2:] else result & ~no_number
    for other in others:
        result = result & machine.read(other, PRED)
    machine.write(into, result)


def _convert(machine: Machine, one: Instruction) -> None:
    """`cvt`: of integers, also to fp32, from 16 bits to fp32, and of fp32 down to whole numbers or towards 0 to s32."""
    into, source = one.parts[-2:]
    if (into, source) == ("f32", "f16"):
        result = machine.read(one.operands[1], DTYPES["u16"]).view(np.float16).astype(np.float32)
        return machine.write(one.operands[0], result)
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


def _funnel(machine: Machine, one: Instruction) -> None:
    """`shf`: the upper word of two that are moved to the left."""
    low, high, by = (machine.read(x, U32).astype(np.uint64) for x in one.operands[1:])
    machine.expect(one.parts[1:3] == ("l", "wrap"))
    machine.write(one.operands[0], ((high << np.uint64(32) | low) << by % np.uint64(32) >> np.uint64(32)).astype(U32))


def _reduce(machine: Machine, one: Instruction) -> None:
    """`redux.sync` of whole warps, each lane of which gets the result."""
    value, lanes = machine.read(one.operands[1], one.dtype), machine.read(one.operands[2], U32)
    machine.expect(bool((lanes == 2**LANES - 1).all()) and machine.active is None)
    how = {"add": np.add, "min": np.minimum, "max": np.maximum}[one.parts[2]]
    machine.write(one.operands[0], how.reduce(value.reshape(-1, LANES), axis=1, dtype=one.dtype).repeat(LANES))


def _copy_later(machine: Machine, one: Instruction) -> None:
    """`cp.async`, by words, of all threads; groups are waited for up to the latest few."""
    if one.parts[2] == "commit_group":
        machine.copies.append([])
    elif one.parts[2] == "wait_group":
        kept = len(machine.copies) - 1 - int(one.operands[0])
        waited, machine.copies = machine.copies[: max(kept, 0)], machine.copies[max(kept, 0) :]
        for into, source in (copy for group in waited for copy in group):
            machine.store("shared", into, machine.load("global", source, U32))
    else:
        machine.expect(one.parts[2:] == ("ca", "shared", "global") and machine.active is None)
        into, source = map(machine.addresses, one.operands[:2])
        nbytes = int(one.operands[2])
        machine.expect(nbytes in (4, 8, 16) and not (into % np.uint64(nbytes)).any())
        machine.expect(not (source % np.uint64(nbytes)).any())
        for word in np.arange(0, nbytes, 4).astype(np.uint64):
            machine.memory["shared"].forget(into + word, U32, machine.text)
            machine.copies[-1].append((into + word, source + word))


def _matrices(machine: Machine, one: Instruction) -> None:
    """`ldmatrix` and `stmatrix`: 8 rows of 16 bytes a matrix, at the addresses of 8 lanes; 4 bytes of a row a lane."""
    name = one.parts[0]
    machine.expect("trans" not in one.parts and one.parts[-1] == "b16" and machine.active is None)
    place, values = one.operands if name == "stmatrix" else one.operands[::-1]
    rows = machine.addresses(place)
    for matrix, register in enumerate(registers_of(values)):
        addresses = rows[machine.first + 8 * matrix + machine.lanes // 4] + (machine.lanes % 4 * 4).astype(np.uint64)
        if name == "stmatrix":
            machine.store("shared", addresses, machine.read(register, U32))
        else:
            machine.write(register, machine.load("shared", addresses, U32))


def _tiles(machine: Machine, operand: str) -> Array:
    """fp64 [registers, warps, 8, 16]: of each register the INT8 numbers that 8 rows of 4 lanes hold, 4 a lane."""
    registers = [x.view(_S8).reshape(machine.warps, 8, 16) for x in machine.read_all(operand, U32)]
    return np.stack(registers).astype(np.float64)


def _write_products(
    machine: Machine, one: Instruction, left: str, right: Array, added: Sequence[Array], *, saturates: bool
) -> None:
    """A warp's 16 rows times [(warps,) 32, columns], as integers of 32 bits: fp64 has enough digits for their sums.

    Of the left side a lane has four numbers of the upper rows, of the lower ones, then of both further to the right. Of
    8 columns of the result it has 2 neighbours, in a row of the upper ones and one of the lower.
    """
    upper, lower, upper_right, lower_right = _tiles(machine, left)
    products = np.block([[upper, upper_right], [lower, lower_right]]) @ right
    for at, register in enumerate(registers_of(one.operands[0])):
        row, column = at // 2 % 2 * 8, at // 4 * 8
        result = products[:, row : row + 8, column + at % 2 : column + 8 : 2].reshape(-1)
        result = result + added[at] if added else result
        result = result.clip(-(2**31), 2**31 - 1) if saturates else result
        machine.write(register, result.astype(np.int64).astype(_S32))


def _warp_product(machine: Machine, one: Instruction) -> None:
    """`mma.sync` of 16 rows, 8 columns and 32 numbers."""
    machine.expect(one.parts[3:7] == ("m16n8k32", "row", "col", "satfinite") and machine.active is None)
    machine.expect(one.parts[7:] == ("s32", "s8", "s8", "s32"))
    right = np.concatenate(_tiles(machine, one.operands[2]), axis=2).swapaxes(1, 2)
    _write_products(machine, one, one.operands[1], right, machine.read_all(one.operands[3], _S32), saturates=True)


def _group_product(machine: Machine, one: Instruction) -> None:
    """`wgmma.mma_async` of a left side in registers; what orders such instructions does nothing."""
    if one.parts[1] == "mma_async":
        into, left, descriptor, scale = one.operands
        columns = 2 * len(registers_of(into))
        machine.expect(one.parts[4:] == (f"m64n{columns}k32", "s32", "s8", "s8") and machine.active is None)
        adds = machine.read(scale, PRED)
        machine.expect(bool((adds == adds[0]).all()) and machine.warps == 4)
        right = _described(machine, machine.read(descriptor, U64), columns)
        added = machine.read_all(into, _S32) if adds[0] else []
        _write_products(machine, one, left, right.T, added, saturates=False)


def _described(machine: Machine, descriptors: Array, rows: int) -> Array:
    """fp64 [rows, 32]: INT8 numbers of shared memory, whose rows lie along the summed dimension.

    Of a descriptor, bits 0 to 13 are the first address and bits 32 to 45 the distance of 8 rows, both over 16; bits 62
    and 63 are the swizzle, of 128, 64 or 32 bytes, which is also what a row takes. Its pieces of 16 bytes change places
    as bits 7 to 9 of their addresses say.
    """
    described = int(descriptors[0])
    swizzle = {1: 128, 2: 64, 3: 32}.get(described >> 62, 0)
    machine.expect(bool((descriptors == descriptors[0]).all()) and swizzle > 0 and not described >> 49 & 7)
    start, apart = (described & 0x3FFF) << 4, (described >> 32 & 0x3FFF) << 4
    row, byte = np.arange(rows)[:, None], np.arange(32)[None, :]
    addresses = start + row // 8 * apart + row % 8 * swizzle + byte
    addresses ^= (addresses >> 7 & swizzle // 16 - 1) << 4
    numbers = machine.memory["shared"].read(addresses.reshape(-1).astype(np.uint64), _S8, machine.text)
    return numbers.reshape(rows, 32).astype(np.float64)


FAMILIES: dict[str, Callable[[Machine, Instruction], None]] = {
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
    "redux": _reduce,
    "shf": _funnel,
    "red": _add_to_memory,
    "atom": _add_to_memory,
    "cp": _copy_later,
    "ldmatrix": _matrices,
    "stmatrix": _matrices,
    "mma": _warp_product,
    "wgmma": _group_product,
}
"""What does an instruction, by its name's first part."""
