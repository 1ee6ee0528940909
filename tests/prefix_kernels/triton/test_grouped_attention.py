"""Grouped attention against the fp64 oracle: groups, suffixes, both merged, in every head shape.

On a GPU of that kind also Hopper's own kernel; elsewhere it is compiled, no more.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from prefix_kernels import PagedKV
from prefix_kernels.grouped_attention import (
    AttentionConfig,
    AttentionShape,
    Segment,
    default_config,
    passes_for,
    runner,
)
from prefix_kernels.grouped_attention.reference import ReferenceAttention
from prefix_kernels.grouped_attention.runner import GroupedAttention
from sglang_ext.decode.self_test import ERROR_BUDGET
from tests.planted import dense_attention
from tests.prefix_kernels.triton.conftest import DTYPES, paged_kv

LSE_BUDGET = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TALL = AttentionConfig(64, 16, 4, 3, 2)
FLAT = AttentionConfig(16, 16, 4, 3, 2)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
OWN = AttentionConfig(64, 64, 4, 3, 2, 128, specialized=True)
"""Of Hopper's own kernel, in which groups and suffixes share a launch."""
HIGH = AttentionConfig(128, 64, 4, 5, 1, specialized=True)
TILES = {
    "128x64": HIGH,
    "128x32": AttentionConfig(128, 32, 4, 4, 1, specialized=True),
    "64x64": OWN,
    "64x128": AttentionConfig(64, 128, 4, 2, 1, specialized=True),
    "64x32": AttentionConfig(64, 32, 4, 6, 1, specialized=True),
}


class Kernel(NamedTuple):
    """Configurations of a group's pass and of the suffixes', and the dtype that is tried with them."""

    passes: tuple[AttentionConfig, AttentionConfig]
    dtype: torch.dtype


PORTABLE = Kernel((TALL, FLAT), torch.float32)
#: Where passes are of two kernels, a third one merges what they wrote.
HOPPERS = [
    Kernel(passes, torch.bfloat16)
    for passes in ((OWN, OWN), (HIGH, HIGH), (OWN, FLAT), (FLAT, OWN), (OWN, HIGH))
    if HOPPER
]


def of_kernels(*kernels: Kernel) -> pytest.MarkDecorator:
    names = ["-".join(f"{one.block_m}x{one.block_n}" for one in kernel.passes) for kernel in kernels]
    return pytest.mark.parametrize("kernel", kernels, ids=names)


KERNELS = of_kernels(PORTABLE, *HOPPERS[:1])
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")


def inputs(
    prefix_len: int, rows: int, kv_heads: int, gqa: int, dim: int, v_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(prefix_len + rows)
    q = torch.randn(rows, kv_heads * gqa, dim, generator=gen)
    keys = torch.randn(prefix_len, kv_heads, dim, generator=gen)
    values = torch.randn(prefix_len, kv_heads, v_dim, generator=gen)
    return q.to(device, dtype), keys.to(device, dtype), values.to(device, dtype)


def paged(*sizes: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedKV, torch.Tensor]:
    """`inputs`, and their pool and slots."""
    q, keys, values = inputs(*sizes)
    return q, keys, values, *paged_kv(keys, values)


def close(out: torch.Tensor, lse: torch.Tensor, oracle: Any, dtype: torch.dtype) -> None:
    budget = ERROR_BUDGET[dtype]
    torch.testing.assert_close(out.double(), oracle.out, atol=budget, rtol=budget)
    torch.testing.assert_close(lse, oracle.lse, atol=LSE_BUDGET[dtype], rtol=1e-5)


def run(
    attention: GroupedAttention | ReferenceAttention,
    q: torch.Tensor,
    kv: PagedKV,
    slots: torch.Tensor,
    sm_scale: float,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """With outputs that hold NaN before: every element must be written."""
    out = torch.full((*q.shape[:2], kv.v_cache.shape[2]), torch.nan, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], torch.nan, device=q.device)
    attention.run(q, kv, slots, sm_scale, out, lse, **options)
    return out, lse


def attended(
    q: torch.Tensor, kv: PagedKV, slots: torch.Tensor, segments: list[Segment], sm_scale: float,
    config: AttentionConfig | None = None, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """In one pass; without a configuration in the portable kernel, of a tile that holds the first segment's rows."""
    shape = AttentionShape.of(q, kv)
    config = config or default_config(shape, len(segments[0].rows))
    attention = GroupedAttention(shape, q.shape[0], [config], q.device, **options)
    attention.plan(segments)
    return run(attention, q, kv, slots, sm_scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("prefix_len", "rows", "kv_heads", "gqa", "dim", "v_dim"),
    [
        *((77, 3, 2, gqa, 64, 64) for gqa in (1, 2, 4, 5, 6, 7, 8, 16)),
        *((101, 2, 2, 4, *dims) for dims in ((96, 96), (128, 128), (256, 256), (192, 128))),
        *((length, rows, 1, 4, 64, 64) for rows in (1, 2, 9, 33, 64) for length in (1, 16, 65)),
    ],
)
def test_every_group_size_head_width_and_batch(
    prefix_len: int, rows: int, kv_heads: int, gqa: int, dim: int, v_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    q, keys, values, kv, slots = paged(prefix_len, rows, kv_heads, gqa, dim, v_dim, dtype, device)
    found = attended(q, kv, slots, [Segment(tuple(range(rows)), prefix_len)], dim**-0.5)
    close(*found, dense_attention(q, keys, values, dim**-0.5), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "gqa", "dims"),
    [(3, 8, (96, 64)), (1, 20, (80, 64)), (5, 16, (48, 24)), (2, 64, (48, 32)), (3, 16, (576, 512))],
    ids=str,
)
def test_values_that_are_the_first_channels_of_keys(
    rows: int, gqa: int, dims: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    q, keys, _, pool, slots = paged(101, rows, 1, gqa, *dims, dtype, device)
    kv = PagedKV(pool.k_cache, pool.k_cache[..., : dims[1]])
    assert kv.latent
    assert not pool.latent
    shape = AttentionShape.of(q, kv)
    attention = GroupedAttention(shape, rows, passes_for(shape, rows), q.device, num_programs=7)
    suffixes = [Segment((row,), 11, list_begin=90) for row in range(rows)]
    attention.plan([Segment(tuple(range(rows)), 90)], suffixes)
    found = run(attention, q, kv, slots.int(), dims[0] ** -0.5)
    close(*found, dense_attention(q, keys, keys[..., : dims[1]], dims[0] ** -0.5), dtype)


@KERNELS
def test_heads_read_their_own_lists(kernel: Kernel, device: torch.device) -> None:
    q, keys, values, kv, slots = paged(90, 3, 3, 4, 64, 64, kernel.dtype, device)
    own = [[3, 7, *range(40, 90)], [0], []]  # positions up to the end, one alone, and none
    arena = torch.zeros(3, 52, dtype=torch.int32, device=device)
    for head, chosen in enumerate(own):
        arena[head, : len(chosen)] = slots[chosen].int()
    counts = torch.tensor([[52, 1, 0]], dtype=torch.int32, device=device)
    kv.k_cache[slots[1]], kv.v_cache[slots[1]] = torch.nan, torch.nan  # selected by none
    segment = Segment((0, 1, 2), 52, head_stride=52, list_id=0)
    attention = GroupedAttention(AttentionShape.of(q, kv), 3, kernel.passes[:1], q.device)
    attention.plan([segment])
    out, lse = run(attention, q, kv, arena.flatten(), 0.3, counts=counts)
    for head, chosen in enumerate(own[:2]):
        part = slice(head * 4, head * 4 + 4)
        oracle = dense_attention(q[:, part], keys[chosen, head : head + 1], values[chosen, head : head + 1], 0.3)
        close(out[:, part], lse[:, part], oracle, kernel.dtype)
    assert torch.equal(out[:, 8:], torch.zeros_like(out[:, 8:]))
    assert bool((lse[:, 8:] == -torch.inf).all())


class Batch:
    """Two groups on prefixes of their own, one request alone; everyone has a suffix; one arena of slots."""

    prefix_lens = (83, 40)
    members = ((0, 2, 3, 5), (4, 1))
    alone = 6

    def __init__(self, device: torch.device, kernel: Kernel = PORTABLE, dims: tuple[int, int] = (64, 64)) -> None:
        self.kernel = kernel
        suffixes = [3, 17, 1, 0, 5, 9, 50]
        self.lengths = [*self.prefix_lens, *suffixes]
        self.bounds = [0, *itertools.accumulate(self.lengths)]
        self.q, self.keys, self.values = inputs(sum(self.lengths), 7, 2, 4, *dims, kernel.dtype, device)
        self.kv, self.slots = paged_kv(self.keys, self.values)
        self.shape = AttentionShape.of(self.q, self.kv)
        self.groups = [
            Segment(rows, length, list_begin=self.bounds[g])
            for g, (rows, length) in enumerate(zip(self.members, self.prefix_lens, strict=True))
        ]
        self.suffixes = [Segment((r,), suffixes[r], list_begin=self.bounds[2 + r]) for r in range(7)]

    def attention(self, **options: Any) -> GroupedAttention:
        return GroupedAttention(self.shape, 8, self.kernel.passes, self.q.device, **options)

    def check(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        for row in range(7):
            own = [range(self.bounds[2 + row], self.bounds[3 + row])]
            own += [range(*self.bounds[g : g + 2]) for g, rows in enumerate(self.members) if row in rows]
            chosen = sorted(itertools.chain(*own))
            oracle = dense_attention(self.q[row : row + 1], self.keys[chosen], self.values[chosen], 0.1)
            close(out[row : row + 1], lse[row : row + 1], oracle, self.kernel.dtype)


@of_kernels(PORTABLE, *HOPPERS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("num_programs", [2, 9, 64])
def test_groups_and_suffixes_in_one_plan(
    num_programs: int, dims: tuple[int, int], kernel: Kernel, device: torch.device
) -> None:
    batch = Batch(device, kernel, dims)
    attention = batch.attention(num_programs=num_programs)
    attention.plan(batch.groups, batch.suffixes)
    batch.check(*run(attention, batch.q, batch.kv, batch.slots.int(), 0.1))


def test_the_reference_of_a_plan(device: torch.device) -> None:
    batch, reference = Batch(device), ReferenceAttention(8)
    reference.plan(batch.groups, batch.suffixes)
    batch.check(*run(reference, batch.q, batch.kv, batch.slots.int(), 0.1))
    for wrong in (Segment((8,), 3), Segment((1, 1), 3)):
        with pytest.raises(ValueError, match="each batch row below 8 once"):
            reference.plan([wrong])
    reference.plan([Segment((0,), 3, list_id=0)])
    with pytest.raises(ValueError, match="expected counts of the lists that segments name, got none"):
        run(reference, batch.q, batch.kv, batch.slots, 0.1)


@KERNELS
def test_a_plan_replaces_the_one_before(kernel: Kernel, device: torch.device) -> None:
    batch = Batch(device, kernel)
    attention = batch.attention(num_programs=40)
    attention.plan([Segment(tuple(range(7)), 83)], batch.suffixes)
    run(attention, batch.q, batch.kv, batch.slots, 0.1)
    attention.plan(batch.groups, batch.suffixes)
    batch.check(*run(attention, batch.q, batch.kv, batch.slots, 0.1))
    attention.plan()
    out, lse = run(attention, batch.q, batch.kv, batch.slots, 0.1)
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("config", [TALL, *(TILES.values() if HOPPER else [])], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 64, 65, 1000])
def test_a_split_list_gives_what_an_unsplit_one_does(
    length: int, dtype: torch.dtype, dim: int, config: AttentionConfig, device: torch.device
) -> None:
    if config.specialized and dtype is torch.float32:
        pytest.skip("halves only")
    q, keys, values, kv, slots = paged(length, 21, 2, 4, dim, dim, dtype, device)
    oracle = dense_attention(q, keys, values, 0.125)
    for num_programs in (2, 6, 40):
        found = attended(q, kv, slots, [Segment(tuple(range(21)), length)], 0.125, config, num_programs=num_programs)
        close(*found, oracle, dtype)


@pytest.mark.parametrize(
    ("passes", "dtype"),
    [*(((TALL, FLAT), dtype) for dtype in DTYPES), *([((OWN, OWN), torch.bfloat16)] if HOPPER else [])],
)
def test_a_tile_with_no_other_part_writes_the_bits_that_the_merge_would(
    passes: tuple[AttentionConfig, AttentionConfig], dtype: torch.dtype, device: torch.device
) -> None:
    q, _, _, kv, slots = paged(50, 3, 2, 4, 64, 64, dtype, device)
    attention = GroupedAttention(AttentionShape.of(q, kv), 3, passes, q.device, num_programs=2)
    shared = Segment((0, 1, 2), 40)
    attention.plan([shared])
    direct = run(attention, q, replace(kv, v_scale=0.75), slots, 0.125)
    attention.plan([shared], [Segment((2,), 10, list_begin=40)])  # one of the tile has another part: all are merged
    merged = run(attention, q, replace(kv, v_scale=0.75), slots, 0.125)
    for one, other in zip(direct, merged, strict=True):
        assert torch.equal(one[:2], other[:2])
        assert not torch.equal(one[2], other[2])


@KERNELS
def test_reuse_heads_read_another_head_s_list(kernel: Kernel, device: torch.device) -> None:
    q, keys, values, kv, slots = paged(60, 2, 3, 2, 64, 64, kernel.dtype, device)
    lists = torch.stack([slots[:20], slots[20:40], slots[40:60]]).flatten().int()
    attention = GroupedAttention(AttentionShape.of(q, kv), 2, kernel.passes[1:], q.device, num_programs=6)
    attention.plan([Segment((0, 1), 20, head_stride=20, list_id=1)])
    counts = torch.tensor([[9, 9, 9], [5, 20, 7]], dtype=torch.int32, device=device)
    heads = torch.tensor([2, 2, 0], dtype=torch.int32, device=device)
    others = torch.zeros_like(lists)
    for arenas in ({"slots": lists}, {"slots": others, "head_slots": lists}):
        out, lse = run(attention, q, kv, sm_scale=0.1, counts=counts, head_map=heads, **arenas)
        for head, chosen in enumerate((range(40, 47), range(40, 47), range(5))):
            part, listed = slice(head * 2, head * 2 + 2), list(chosen)
            oracle = dense_attention(q[:, part], keys[listed, head : head + 1], values[listed, head : head + 1], 0.1)
            close(out[:, part], lse[:, part], oracle, kernel.dtype)
    with pytest.raises(ValueError, match=r"head_slots in the dtype of slots, torch.int32, got torch.int64"):
        run(attention, q, kv, others, 0.1, counts=counts, head_slots=lists.long())


def test_fp8_keys_and_values_with_scales(device: torch.device) -> None:
    q, keys, values = inputs(70, 3, 2, 4, 64, 64, torch.float16, device)
    kv, slots = paged_kv((keys / 0.5).to(torch.float8_e4m3fn).half(), (values / 2.0).to(torch.float8_e4m3fn).half())
    stored = PagedKV(kv.k_cache.to(torch.float8_e4m3fn), kv.v_cache.to(torch.float8_e4m3fn), 0.5, 2.0)
    found = attended(q, stored, slots, [Segment((0, 1, 2), 70)], 0.1, FLAT, num_programs=8)
    close(*found, dense_attention(q, kv.k_cache[slots] * 0.5, kv.v_cache[slots] * 2.0, 0.1), torch.float16)


def test_strided_pool_and_query(device: torch.device) -> None:
    q, keys, values, kv, slots = paged(40, 3, 2, 4, 64, 64, torch.float32, device)
    both = torch.stack([kv.k_cache, kv.v_cache], dim=1)
    wide = torch.cat([q, q], dim=2)[:, :, :64]
    found = attended(wide, PagedKV(both[:, 0], both[:, 1]), slots, [Segment((0, 1, 2), 40)], 0.25)
    close(*found, dense_attention(q, keys, values, 0.25), torch.float32)


def test_what_does_not_fit_the_plan_is_refused(device: torch.device) -> None:
    """Kernels would read behind what they are given; and a refused plan leaves the one before as it was."""
    batch = Batch(device)
    attention = batch.attention(num_programs=40)
    attention.plan(batch.groups, batch.suffixes)
    for segments, message in (
        (([Segment((8,), 3)],), "each batch row below 8 once"),
        (([Segment((1, 1), 3)],), "each batch row below 8 once"),
        ((batch.groups, batch.suffixes, []), "segments of at most 2 passes"),
        ((batch.groups, [Segment((9,), 3)]), "each batch row below 8 once"),
    ):
        with pytest.raises(ValueError, match=message):
            attention.plan(*segments)
    batch.check(*run(attention, batch.q, batch.kv, batch.slots, 0.1))
    with pytest.raises(ValueError, match="expected q of 7 rows or more, as planned, got 2"):
        run(attention, batch.q[:2], batch.kv, batch.slots, 0.1)
    with pytest.raises(ValueError, match=r"slots \[arena\] int32 or int64 contiguous"):
        run(attention, batch.q, batch.kv, batch.slots[::2], 0.1)
    attention.plan([Segment((0,), 3, list_id=1)])
    for counts in (None, torch.zeros(1, 2, dtype=torch.int32, device=device)):
        with pytest.raises(ValueError, match="expected counts of 2 lists or more, as planned"):
            run(attention, batch.q, batch.kv, batch.slots, 0.1, counts=counts)
    with pytest.raises(ValueError, match=r"expected counts \(2, 2\) int32 contiguous"):
        run(attention, batch.q, batch.kv, batch.slots, 0.1, counts=torch.zeros(2, 2, device=device))
    attention.plan()
    with pytest.raises(ValueError, match=r"expected head_map \(2,\) int32"):
        run(attention, batch.q, batch.kv, batch.slots, 0.1, head_map=torch.zeros(3, dtype=torch.int32, device=device))


def test_a_replayed_plan_for_more_rows_than_were_captured_writes_nothing_behind_them(device: torch.device) -> None:
    q, keys, values, kv, slots = paged(40, 2, 2, 4, 64, 64, torch.float32, device)
    attention = GroupedAttention(AttentionShape.of(q, kv), 8, [FLAT], q.device, num_programs=2)
    attention.plan([Segment((0, 5, 1), 40)])
    attention._most_rows = 0  # a replay checks nothing
    out = torch.full((8, 8, 64), torch.nan, device=device)
    lse = torch.full((8, 8), torch.nan, device=device)
    attention.run(q, kv, slots, 0.1, out[:2], lse[:2])
    close(out[:2], lse[:2], dense_attention(q, keys, values, 0.1), torch.float32)
    assert bool(out[2:].isnan().all())
    assert bool(lse[2:].isnan().all())


@needs_hopper
@pytest.mark.parametrize("rows", [1, 2, 9, 33, 64])
@pytest.mark.parametrize("gqa", [1, 2, 4, 5, 6, 7, 8, 16])
def test_every_group_size_and_batch(gqa: int, rows: int, device: torch.device) -> None:
    q, keys, values, kv, slots = paged(300, rows, 2, gqa, 128, 128, torch.bfloat16, device)
    found = attended(q, kv, slots, [Segment(tuple(range(rows)), 300)], 0.09, OWN)
    close(*found, dense_attention(q, keys, values, 0.09), torch.bfloat16)


@of_kernels(PORTABLE, *HOPPERS[:2])
def test_lists_by_head_lie_in_an_arena_of_their_own(kernel: Kernel, device: torch.device) -> None:
    """Two groups' packed lists of different length, behind others of the same set, and each row's own list."""
    q, keys, values, kv, slots = paged(900, 12, 2, 4, 128, 128, kernel.dtype, device)
    attention = GroupedAttention(AttentionShape.of(q, kv), 12, kernel.passes, device, num_programs=20)
    lists = torch.full((40 + 2 * 300 + 2 * 72,), 0, dtype=slots.dtype, device=device)
    groups = [Segment(tuple(range(7)), 299, 40, 300, 12), Segment(tuple(range(7, 12)), 70, 640, 72, 13)]
    counts = torch.full((14, 2), 1000, dtype=torch.int32, device=device)
    chosen = {}
    for group in groups:
        for head in range(2):
            order = torch.randperm(600, generator=torch.Generator().manual_seed(group.length + head))
            chosen[group, head] = listed = order[: group.length - 3 * head].to(device)
            counts[group.list_id, head] = len(listed)
            lists[group.list_begin + head * group.head_stride :][: len(listed)] = slots[listed]
    attention.plan(groups, [Segment((r,), 10 + r, list_begin=600 + r, list_id=r) for r in range(12)])
    out, lse = run(attention, q, kv, slots, 0.1, counts=counts, head_slots=lists)
    for group in groups:
        for row in group.rows:
            own = torch.arange(600 + row, 610 + 2 * row, device=device)
            for head in range(2):
                part, at = slice(head * 4, head * 4 + 4), torch.cat((chosen[group, head], own))
                wanted = dense_attention(
                    q[row : row + 1, part], keys[at, head][:, None], values[at, head][:, None], 0.1
                )
                close(out[row : row + 1, part], lse[row : row + 1, part], wanted, kernel.dtype)


def test_heads_are_merged_together_or_apart(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 heads, of which 1, 4 or 8 are a program's; rows of many parts, of one, of none and of all that are merged at
    once."""
    q, keys, values, kv, slots = paged(700, 5, 2, 3, 64, 64, torch.float32, device)
    attention = GroupedAttention(AttentionShape.of(q, kv), 5, [FLAT, FLAT], device, num_programs=80)
    attention.plan([Segment((0, 1), 640)], [Segment((1,), 50, list_begin=640), Segment((3,), 5, list_begin=690)])
    found = []
    for most in (1000, 8, 1):
        monkeypatch.setattr(runner, "_MERGE_PROGRAMS", most)
        found.append(run(attention, q, kv, slots, 0.1))
    for out, lse in found:
        for row, chosen in ((0, range(640)), (1, range(690)), (3, range(690, 695))):
            part, listed = slice(row, row + 1), list(chosen)
            close(out[part], lse[part], dense_attention(q[part], keys[listed], values[listed], 0.1), torch.float32)
        assert not out[[2, 4]].any()
        assert (lse[[2, 4]] == -torch.inf).all()


@needs_hopper
def test_many_launches_merge_what_each_of_them_wrote(device: torch.device) -> None:
    """The merge waits for the parts of its own launch: a stale part would be seen."""
    q, _, _, kv, slots = paged(4000, 8, 8, 4, 128, 128, torch.bfloat16, device)
    shape = AttentionShape.of(q, kv)
    attention = GroupedAttention(shape, 8, [OWN, OWN], device)
    attention.plan([Segment(tuple(range(8)), 3900)], [Segment((r,), 9, list_begin=3900 + r) for r in range(8)])
    first = run(attention, q, kv, slots, 0.1)
    outs = [torch.full_like(q, torch.nan) for _ in range(200)]
    lse = torch.empty(8, 32, device=device)
    for n, out in enumerate(outs):
        attention.run(q if n % 2 else -q, kv, slots, 0.1, out, lse)
    assert all(torch.equal(out, first[0]) for out in outs[1::2])
    assert not any(torch.equal(out, first[0]) for out in outs[::2])


@needs_hopper
def test_a_captured_graph_follows_the_plans(device: torch.device) -> None:
    q, keys, values, kv, slots = paged(2000, 16, 2, 4, 128, 128, torch.bfloat16, device)
    attention = GroupedAttention(AttentionShape.of(q, kv), 16, [OWN, OWN], device)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    attention.plan([Segment(tuple(range(16)), 10)])
    attention.run(q, kv, slots, 0.1, out, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(q, kv, slots, 0.1, out, lse)
    for length in (1900, 3, 64, 1):
        attention.plan([Segment(tuple(range(16)), length)], [Segment((r,), 6, list_begin=1900 + r) for r in range(16)])
        out.fill_(torch.nan)
        graph.replay()
        for row in (0, 15):
            chosen = [*range(length), *range(1900 + row, 1906 + row)]
            oracle = dense_attention(q[row, None], keys[chosen], values[chosen], 0.1)
            close(out[row, None], lse[row, None], oracle, torch.bfloat16)
