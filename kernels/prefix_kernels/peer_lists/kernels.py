"""Triton kernels of an exchange between two GPUs: queries go out, lists come back, words say which are there."""

from __future__ import annotations

import triton
import triton.language as tl

PLAN: tl.constexpr = tl.constexpr(0)
NUMBER: tl.constexpr = tl.constexpr(1)
EXPECTED: tl.constexpr = tl.constexpr(2)
CAME: tl.constexpr = tl.constexpr(3)
SERVED: tl.constexpr = tl.constexpr(4)
MISSED: tl.constexpr = tl.constexpr(5)


@triton.jit
def post_kernel(
    state_ptr,  # int64 [6]
    words,  # address of int64 [3] on the host: what was asked for, answers that came, and that did not
):
    """Ask: whoever sees the word may read what earlier launches wrote.

    The atomic operation on this device's memory is the fence before the word. One on the host's memory would do both,
    but compute-sanitizer's memcheck ends where it comes to one.
    """
    plan, number = tl.load(state_ptr + PLAN), tl.load(state_ptr + NUMBER) + 1
    word = (plan << 32) | (number & 0xFFFFFFFF)
    tl.store(state_ptr + EXPECTED, tl.where(plan > 0, word, 0))  # while graphs are captured there is no plan
    tl.atomic_xchg(state_ptr + NUMBER, number, sem="acq_rel", scope="sys")
    tl.store(words.to(tl.pointer_type(tl.int64)), word)


@triton.jit
def wait_kernel(
    state_ptr,  # int64 [6]
    answer_ptr,  # int64 [1], on this device: the word of the last answer
    words,  # as of `post_kernel`
    most,
):
    """Whether the answer to the last question came, which is looked for so many times."""
    expected = tl.load(state_ptr + EXPECTED)
    asked = expected != 0
    seen = expected - 1
    if asked:
        seen = tl.atomic_add(answer_ptr, 0, sem="acquire", scope="sys")
        tries = 0
        while (seen != expected) & (tries < most):
            seen = tl.atomic_add(answer_ptr, 0, sem="acquire", scope="sys")
            tries += 1
    came = (seen == expected).to(tl.int64)
    served = tl.load(state_ptr + SERVED) + came
    missed = tl.load(state_ptr + MISSED) + asked.to(tl.int64) * (1 - came)
    tl.store(state_ptr + EXPECTED, expected * 0)
    tl.store(state_ptr + CAME, came)
    tl.store(state_ptr + SERVED, served)
    tl.store(state_ptr + MISSED, missed)
    of_host = words.to(tl.pointer_type(tl.int64))
    tl.store(of_host + 1, served)
    tl.store(of_host + 2, missed)


@triton.jit(do_not_specialize=["word"])
def answer_kernel(
    answer,  # address of int64 [1] on the other device
    word,  # int64
):
    """Say that what earlier launches wrote is the answer."""
    tl.atomic_xchg(answer.to(tl.pointer_type(tl.int64)), word, sem="release", scope="sys")


@triton.jit
def copy_words_kernel(
    source,  # address of int32 [count]
    target,  # address of int32 [count]
    count, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs take blocks in turns."""
    read, written = source.to(tl.pointer_type(tl.int32)), target.to(tl.pointer_type(tl.int32))
    for begin in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(written + at, tl.load(read + at, mask=at < count), mask=at < count)


@triton.jit
def copy_lists_kernel(
    came_ptr,  # int64 [1]: nothing is copied where it is 0
    source,  # address of int32 [num_layers, layer_entries]
    target,  # address of the same
    groups_ptr,  # int32 [max_groups, 3]: first entry in a layer, entries, and what each must be below
    layer_entries, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (layer, group, part). An entry that is out of range becomes the nearest one that is not: whatever the
    other process wrote, what reads the lists stays inside the prefix, whose length entries divide.
    """
    fields = groups_ptr + tl.program_id(1) * 3
    begin = tl.program_id(0).to(tl.int64) * layer_entries + tl.load(fields)
    count = tl.load(fields + 1) * tl.load(came_ptr).to(tl.int32)
    highest = tl.load(fields + 2) - 1
    read, written = source.to(tl.pointer_type(tl.int32)) + begin, target.to(tl.pointer_type(tl.int32)) + begin
    for first in range(tl.program_id(2) * BLOCK, count, tl.num_programs(2) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        entries = tl.load(read + at, mask=at < count, other=0)
        tl.store(written + at, tl.minimum(tl.maximum(entries, 0), highest), mask=at < count)
