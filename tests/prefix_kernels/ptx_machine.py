"""One program of a compiled kernel on the CPU: its PTX, all threads at once as numpy arrays.

For kernels that no interpreter of Triton runs, such as those in Gluon. A register is an array with an entry for each
thread, and every instruction is done for all threads before the next one.

What is modelled:

- integers, fp32 and predicates; branches that all threads take together, instructions under a predicate;
- the threads' places in `mma.sync` and `wgmma` of INT8, in `ldmatrix`, `stmatrix` and `shfl`;
- descriptors of shared memory and its swizzle, for a right side whose rows lie along the summed dimension;
- atomic adds, to shared memory and to the launch's tensors;
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
from typing import Any

import numpy as np
import torch

from prefix_kernels.launching import Launch
from tests.prefix_kernels.ptx_instructions import PLAIN_FAMILIES
from tests.prefix_kernels.ptx_products import MATRIX_FAMILIES
from tests.prefix_kernels.ptx_text import (
    DTYPES,
    LANES,
    PRED,
    U64,
    UNSIGNED,
    Array,
    Instruction,
    parse,
    registers_of,
    shared_arrays,
)

FAMILIES: dict[str, Callable[[Machine, Instruction], None]] = PLAIN_FAMILIES | MATRIX_FAMILIES
"""What does an instruction, by its name's first part."""
MOST_STEPS = 5_000_000
TURN = 1000
"""Instructions of a program while others wait, where some run together."""
SHARED_BASE = 1024
"""Address of shared memory: not 0, and a multiple of what swizzles repeat after."""


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
        kernel: what `launching.compiled()` made of it.
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
        self._constants: dict[tuple[str, Any], Array] = {}

    def run(self) -> Counter[str]:
        """Up to `ret`, writing the launch's tensors: how often each instruction was done, by its name's first part.

        Raises UnknownInstructionError, or IndexError for an address outside of all tensors, not aligned, or in shared
        memory that nothing was written to.
        """
        return run_together([self])

    def turns(self, done: Counter[str]) -> Iterator[None]:
        """As `run`, adding to `done`; to be asked for again and again, for some instructions each time."""
        at = 0
        for step in range(MOST_STEPS):
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
        raise RuntimeError(f"expected an end after {MOST_STEPS} instructions, got none")

    def expect(self, holds: bool) -> None:
        """Raise unless this machine has the instruction, for threads that do not part at a branch."""
        if not holds:
            raise UnknownInstructionError(f"expected an instruction that is modelled, got {self.text}; add it")

    def read(self, operand: str, dtype: Any) -> Array:
        """A register's, or a constant's, values for all threads; of a wider one the lowest bits."""
        self.expect(dtype is not None)
        value = self.registers.get(operand)
        if value is None:
            if (operand, dtype) not in self._constants:
                self._constants[operand, dtype] = self._constant(operand, dtype)
            return self._constants[operand, dtype]
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
    """Programs of one launch that may wait for each other, in turns: how often all of them did each instruction."""
    done = Counter[str]()
    left = [program.turns(done) for program in programs]
    with np.errstate(all="ignore"):
        while left:
            # A turn that is not the last one is None.
            left = [turns for turns in left if next(turns, done) is None]
    return done
