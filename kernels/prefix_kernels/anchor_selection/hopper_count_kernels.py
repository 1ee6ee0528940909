"""Digits counted in shared memory, as `digit_counts` does it, for kernels in Gluon, whose layouts are written out."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from prefix_kernels.anchor_selection.hopper_product_kernels import barrier
from prefix_kernels.digit_counts import ADD, COUNTS, NUM_DIGITS, READ, RESET


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def places_of_digits(NUM_WARPS: gl.constexpr):
    """All of them, one to a thread or a few."""
    return gl.arange(0, NUM_DIGITS, gl.BlockedLayout([NUM_DIGITS // (32 * NUM_WARPS)], [32], [NUM_WARPS], [0]))


@gluon.jit
def place_of_counts():
    """Where a program counts digits. To be asked for once: each place in the source has numbers of its own."""
    return gl.inline_asm_elementwise(COUNTS, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def begin_counts(at, NUM_WARPS: gl.constexpr):
    """Count from 0 on."""
    # Threads that still read what was counted here before.
    barrier()
    places = places_of_digits(NUM_WARPS) * 4 + at
    gl.inline_asm_elementwise(RESET, "=r,r", [places], dtype=gl.int32, is_pure=False, pack=1)
    barrier()


@gluon.jit
def add_counts(at, digits, mask):
    """Count digits from 0 to 255 where `mask` is set. Each thread counts what it holds, copies, too."""
    # What is not counted goes to a place that nobody reads: a predicate would be a branch.
    places = gl.where(mask, digits, NUM_DIGITS) * 4 + at
    gl.inline_asm_elementwise(ADD, "=r,r", [places], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def at_least_of(at, NUM_WARPS: gl.constexpr):
    """int32 [NUM_DIGITS]: how many have a digit of i or below, at place i."""
    barrier()
    places = places_of_digits(NUM_WARPS) * 4 + at
    counts = gl.inline_asm_elementwise(READ, "=r,r", [places], dtype=gl.int32, is_pure=False, pack=1)
    return gl.associative_scan(counts, 0, _add)


@gluon.jit
def add_up_counts(at, all_at_least_ptr, NUM_WARPS: gl.constexpr):
    """Add `at_least_of` what was counted to what all programs counted: integers, so the order says nothing."""
    gl.atomic_add(all_at_least_ptr + places_of_digits(NUM_WARPS), at_least_of(at, NUM_WARPS), sem="relaxed")
