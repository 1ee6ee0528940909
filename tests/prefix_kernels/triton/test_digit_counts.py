"""Counts of digits in shared memory against torch's."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from prefix_kernels.kernels import NUM_DIGITS, add_counts, begin_counts, end_counts


@triton.jit
def count_kernel(digits_ptr, mask_ptr, counts_ptr, size, rounds, TILE: tl.constexpr):  # noqa: N803
    """Program p counts `rounds` stretches of `size` digits, one after the other in the same memory."""
    for turn in range(rounds):
        first = (tl.program_id(0) * rounds + turn) * size
        counts, at = begin_counts()
        for start in range(0, size, TILE):
            place = start + tl.arange(0, TILE)
            there = place < size
            digits = tl.load(digits_ptr + first + place, mask=there, other=0)
            wanted = tl.load(mask_ptr + first + place, mask=there, other=0) != 0
            counts = add_counts(counts, at, digits, wanted & there)
        row = counts_ptr + (tl.program_id(0) * rounds + turn) * NUM_DIGITS
        tl.store(row + tl.arange(0, NUM_DIGITS), end_counts(counts, at))


@pytest.mark.parametrize(
    ("size", "tile", "num_warps"),
    [(1, 256, 4), (700, 512, 4), (3000, 1024, 8), (700, 64, 2), (100, 32, 1), (3000, 2048, 16)],
)
@pytest.mark.parametrize("few", [1, 256])
def test_counts_are_those_of_torch(device: torch.device, size: int, tile: int, num_warps: int, few: int) -> None:
    """Also where all values are the same digit, nothing is masked in, and the same memory is used again."""
    programs, rounds = 3, 2
    gen = torch.Generator().manual_seed(size + few)
    digits = torch.randint(256 - few, 256, (programs, rounds, size), generator=gen, dtype=torch.int32)
    mask = torch.randint(0, 2, (programs, rounds, size), generator=gen, dtype=torch.int32)
    mask[0, 0] = 1
    mask[1, 0] = 0
    counts = torch.full((programs, rounds, 256), -7, dtype=torch.int32, device=device)
    count_kernel[(programs,)](digits.to(device), mask.to(device), counts, size, rounds, TILE=tile, num_warps=num_warps)
    for own, chosen, counted in zip(digits.flatten(0, 1), mask.flatten(0, 1), counts.flatten(0, 1).cpu(), strict=True):
        assert torch.equal(counted.long(), own[chosen.bool()].long().bincount(minlength=256))
