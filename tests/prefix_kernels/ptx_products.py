"""Matrix instructions of `ptx_machine`: where the threads of a warp, or of four, have their parts of INT8 matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tests.prefix_kernels.ptx_text import DTYPES, PRED, U32, U64, Array, Instruction, registers_of

if TYPE_CHECKING:
    from tests.prefix_kernels.ptx_machine import Machine

_S8, _S32 = DTYPES["s8"], DTYPES["s32"]


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


MATRIX_FAMILIES: dict[str, Callable[[Machine, Instruction], None]] = {
    "ldmatrix": _matrices,
    "stmatrix": _matrices,
    "mma": _warp_product,
    "wgmma": _group_product,
}
