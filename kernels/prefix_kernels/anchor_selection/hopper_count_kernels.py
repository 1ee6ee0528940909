"""Digits counted in shared memory, as `digit_counts` does it, for kernels in Gluon, whose layouts are written out."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from prefix_kernels.anchor_selection.hopper_product_kernels import barrier
from prefix_kernels.kernels import ADD, COUNTS, NUM_DIGITS, READ, RESET


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _places(NUM_WARPS: gl.constexpr):
    return gl.arange(0, NUM_DIGITS, gl.BlockedLayout([NUM_DIGITS // (32 * NUM_WARPS)], [32], [NUM_WARPS], [0]))


@gluon.jit
def begin_counts(NUM_WARPS: gl.constexpr):
    """Where digits are counted from now on; the program has one place for that."""
    at = gl.inline_asm_elementwise(COUNTS, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    # Threads that still read what was counted here before.
    barrier()
    places = _places(NUM_WARPS) * 4 + at
    gl.inline_asm_elementwise(RESET, "=r,r", [places], dtype=gl.int32, is_pure=False, pack=1)
    barrier()
    return at


@gluon.jit
def add_counts(at, digits, mask):
    """Count digits from 0 to 255 where `mask` is set. Each thread counts what it holds, copies, too."""
    # What is not counted goes to a place that nobody reads: a predicate would be a branch.
    places = gl.where(mask, digits, NUM_DIGITS) * 4 + at
    gl.inline_asm_elementwise(ADD, "=r,r", [places], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def add_up_counts(at, all_at_least_ptr, NUM_WARPS: gl.constexpr):
    """Add how many have a digit of i or below to place i: atomically, and integers, so the order says nothing."""
    barrier()
    places = _places(NUM_WARPS)
    counts = gl.inline_asm_elementwise(READ, "=r,r", [places * 4 + at], dtype=gl.int32, is_pure=False, pack=1)
    gl.atomic_add(all_at_least_ptr + places, gl.associative_scan(counts, 0, _add), sem="relaxed")
