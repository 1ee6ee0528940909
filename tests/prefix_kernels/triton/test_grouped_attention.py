"""Grouped attention against the fp64 oracle: groups, suffixes, both merged, in every head shape.

On a GPU of that kind also Hopper's own kernel; elsewhere it is compiled, no more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
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
TILES = [
    HIGH,
    OWN,
    AttentionConfig(128, 32, 4, 4, 1, specialized=True),
    AttentionConfig(64, 128, 4, 2, 1, specialized=True),
    AttentionConfig(64, 32, 4, 6, 1, specialized=True),
]


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


needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")


def paged(
    prefix_len: int, rows: int, kv_heads: int, gqa: int, dim: int, v_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedKV, torch.Tensor]:
    """Queries, keys and values; their pool, and the slots in it."""
    gen = torch.Generator().manual_seed(prefix_len + rows)
    sizes = (rows, kv_heads * gqa, dim), (prefix_len, kv_heads, dim), (prefix_len, kv_heads, v_dim)
    q, keys, values = (torch.randn(size, generator=gen).to(device, dtype) for size in sizes)
    return q, keys, values, *paged_kv(keys, values)


def close(out: torch.Tensor, lse: torch.Tensor, oracle: Any, dtype: torch.dtype) -> None:
    budget = ERROR_BUDGET[dtype]
    torch.testing.assert_close(out.double(), oracle.out, atol=budget, rtol=budget)
    torch.testing.assert_close(lse, oracle.lse, atol=LSE_BUDGET[dtype], rtol=1e-5)


def check(
    found: tuple[torch.Tensor, torch.Tensor],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    attended: Callable[[int, int], Iterable[int]],
    sm_scale: float = 0.1,
) -> None:
    """What was found of (q, keys, values), against fp64; `attended`: positions of a row and KV head."""
    (out, lse), (q, keys, values) = found, tensors
    gqa = q.shape[1] // keys.shape[1]
    for row, head in itertools.product(range(len(q)), range(keys.shape[1])):
        there, part, at = slice(row, row + 1), slice(head * gqa, (head + 1) * gqa), list(attended(row, head))
        if at:
            oracle = dense_attention(q[there, part], keys[at, head, None], values[at, head, None], sm_scale)
            close(out[there, part], lse[there, part], oracle, q.dtype)
        else:
            assert not out[there, part].any()
            assert bool((lse[there, part] == -torch.inf).all())


def run(
    attention: GroupedAttention | ReferenceAttention,
    q: torch.Tensor,
    kv: PagedKV,
    slots: torch.Tensor,
    sm_scale: float = 0.1,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """With outputs that hold NaN before: every element must be written."""
    out = torch.full((*q.shape[:2], kv.v_cache.shape[2]), torch.nan, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], torch.nan, device=q.device)
    attention.run(q, kv, slots, sm_scale, out, lse, **options)
    return out, lse


def attended(
    q: torch.Tensor, kv: PagedKV, slots: torch.Tensor, sm_scale: float, config: AttentionConfig | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """All rows over all slots, in one pass; without a configuration in the portable kernel, in a tile of all rows."""
    shape, rows = AttentionShape.of(q, kv), len(q)
    attention = GroupedAttention(shape, rows, [config or default_config(shape, rows)], q.device, **options)
    attention.plan([Segment(tuple(range(rows)), len(slots))])
    return run(attention, q, kv, slots, sm_scale)


#: Tokens, rows, KV heads, query heads of each, widths of a key and of a value. Tiles are of 16 to 128 rows, some rows
#: nobody's; a list ends within a step, with one, or behind one.
SIZES = [
    *((77, 3, 2, gqa, 64, 64) for gqa in (1, 5, 8, 16)),
    *((101, 2, 2, 4, *dims) for dims in ((96, 96), (128, 128), (256, 256), (192, 128))),
    *((length, rows, 1, 4, 64, 64) for length, rows in ((1, 1), (16, 9), (65, 33), (16, 64), (1000, 21))),
]
OF_HOPPER = [
    *((300, rows, 2, gqa, 128, 128, OWN) for gqa in (1, 2, 4, 5, 7, 8, 16) for rows in (1, 2, 9, 33, 64)),
    *((length, 21, 2, 4, dim, dim, tile) for length in (1, 64, 65, 1000) for dim in (64, 128) for tile in TILES),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [*((*sizes, None) for sizes in SIZES), *(OF_HOPPER if HOPPER else [])], ids=str)
def test_every_group_size_head_width_and_batch(sizes: Any, dtype: torch.dtype, device: torch.device) -> None:
    """One program, or lists that several of them share."""
    *shape, config = sizes
    if config is not None and dtype is torch.float32:
        pytest.skip("halves only")
    q, keys, values, kv, slots = paged(*shape, dtype, device)
    oracle = dense_attention(q, keys, values, 0.09)
    for num_programs in (1, 6, 40):
        close(*attended(q, kv, slots, 0.09, config, num_programs=num_programs), oracle, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "gqa", "dims"),
    [(3, 8, (96, 64)), (1, 20, (80, 64)), (2, 64, (48, 32)), (3, 16, (576, 512))],
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


@of_kernels(PORTABLE, *HOPPERS[:2])
@pytest.mark.parametrize("head_map", [None, [2, 2, 0]], ids=["own lists", "another head's"])
@pytest.mark.parametrize("apart", [False, True], ids=["one arena", "an arena of their own"])
def test_lists_of_each_head(apart: bool, head_map: list[int] | None, kernel: Kernel, device: torch.device) -> None:
    """Packed lists of two groups, bounded by counts: whole, of one entry, of none. The first rows have own tokens."""
    q, keys, values, kv, slots = paged(900, 12, 3, 2, 128, 128, kernel.dtype, device)
    groups = [Segment(tuple(range(7)), 299, 40, 300, 12), Segment(tuple(range(7, 12)), 70, 940, 72, 13)]
    suffixes = [Segment((r,), 10 + r, list_begin=600 + r, list_id=r) for r in range(7)]
    lists = torch.zeros(1200, dtype=torch.int32, device=device)
    counts = torch.full((14, 3), 1000, dtype=torch.int32, device=device)
    chosen = {}
    for group, lengths in zip(groups, ([299, 1, 296], [67, 70, 0]), strict=True):
        for head, length in enumerate(lengths):
            order = torch.randperm(599, generator=torch.Generator().manual_seed(length))[:length].to(device)
            chosen[group.list_id, head], counts[group.list_id, head] = order.tolist(), length
            lists[group.list_begin + head * group.head_stride :][:length] = slots[order].int()
    own = slots.int()
    if not apart:
        groups = [replace(group, list_begin=len(own) + group.list_begin) for group in groups]
        own = torch.cat([own, lists])
    kv.k_cache[slots[599]], kv.v_cache[slots[599]] = torch.nan, torch.nan  # selected by none
    shape = AttentionShape.of(q, kv)
    options = {"counts": counts, "head_slots": lists if apart else None}
    if head_map is not None:
        options["head_map"] = torch.tensor(head_map, dtype=torch.int32, device=device)
    for form in (GroupedAttention(shape, 12, kernel.passes, device, num_programs=20), ReferenceAttention(12)):
        form.plan(groups, suffixes)
        check(
            run(form, q, kv, own, **options),
            (q, keys, values),
            lambda row, head: [
                *chosen[12 if row < 7 else 13, head if head_map is None else head_map[head]],
                *range(600 + row, 610 + 2 * row if row < 7 else 0),
            ],
        )


@of_kernels(PORTABLE, *HOPPERS[:2])
@pytest.mark.parametrize("num_programs", [3, 18, 60])
@pytest.mark.parametrize(
    ("after_lists", "sources"),
    [(False, [0, 1, 2]), (True, [0, 1, 2]), (True, [2, 0, 0])],
    ids=["lists are there", "after lists", "an anchor's"],
)
def test_requests_that_are_alone_on_their_lists(
    after_lists: bool, sources: list[int], num_programs: int, kernel: Kernel, device: torch.device
) -> None:
    """A list of each head and a suffix, of which one or both may be empty on the device: Hopper's kernel has one item
    for both, unless the suffix is long; beside a group."""
    q, keys, values, kv, slots = paged(1500, 8, 3, 2, 128, 128, kernel.dtype, device)
    lengths = [200, 200, 130, 64, 1, 200, 128]
    owns = [5, 64, 65, 129, 200, 3, 600]
    counts = torch.zeros(17, 3, dtype=torch.int32, device=device)
    lists = torch.zeros(3 * sum(lengths), dtype=torch.int32, device=device)
    chosen, listed, suffixes, at = {}, [], [], 0
    for n, (length, own) in enumerate(zip(lengths, owns, strict=True)):
        rows = (n,) if n != 5 else (5, 7)
        listed.append(Segment(rows, length, at, length, 8 + n))
        for head in range(3):
            count = 0 if n == 3 else (length, length - 1, 0)[(n + head) % 3]
            order = torch.randperm(800, generator=torch.Generator().manual_seed(10 * n + head))[:count].to(device)
            for row in rows:
                chosen[row, head] = order.tolist()
            counts[8 + n, head] = count
            lists[at + head * length :][:count] = slots[order].int()
        at += 3 * length
        counts[n] = 0 if n in (1, 3) else own
        suffixes.append(Segment((n,), own, list_begin=801 + n, list_id=-1 if n % 2 == 0 else n))
    kv.k_cache[slots[800]], kv.v_cache[slots[800]] = torch.nan, torch.nan  # listed by none
    shape = AttentionShape.of(q, kv)
    attention = GroupedAttention(shape, 8, kernel.passes, device, num_programs=num_programs)
    for form in (attention, ReferenceAttention(8)):
        form.plan(listed, suffixes)
        out, lse, own_slots = (
            torch.full_like(q, torch.nan),
            torch.full(q.shape[:2], torch.nan, device=device),
            slots.int(),
        )
        options = {"counts": counts, "head_map": torch.tensor(sources, dtype=torch.int32, device=device)}
        lists.add_(0)  # the launch before
        form.run(q, kv, own_slots, 0.1, out, lse, head_slots=lists, after_lists=after_lists, **options)
        check(
            (out, lse),
            (q, keys, values),
            lambda row, head: [
                *chosen[row, sources[head]],
                *(range(801 + row, 801 + row + owns[row] * (row not in (1, 3))) if row < 7 else ()),
            ],
        )
    joined = sum(int((one.items[:, 9] > 0).sum()) for one in attention._launches)
    assert (joined > 0) == kernel.passes[0].specialized


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
        sizes = (sum(self.lengths), 7, 2, 4, *dims, kernel.dtype, device)
        self.q, self.keys, self.values, self.kv, self.slots = paged(*sizes)
        self.shape = AttentionShape.of(self.q, self.kv)
        self.groups = [
            Segment(rows, length, list_begin=self.bounds[g])
            for g, (rows, length) in enumerate(zip(self.members, self.prefix_lens, strict=True))
        ]
        self.suffixes = [Segment((r,), suffixes[r], list_begin=self.bounds[2 + r]) for r in range(7)]

    def attention(self, **options: Any) -> GroupedAttention:
        return GroupedAttention(self.shape, 8, self.kernel.passes, self.q.device, **options)

    def check(self, found: tuple[torch.Tensor, torch.Tensor]) -> None:
        def attended(row: int, _: int) -> list[int]:
            own = [range(self.bounds[2 + row], self.bounds[3 + row])]
            own += [range(*self.bounds[g : g + 2]) for g, rows in enumerate(self.members) if row in rows]
            return sorted(itertools.chain(*own))

        check(found, (self.q[:7], self.keys, self.values), attended)


@of_kernels(PORTABLE, *HOPPERS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("num_programs", [2, 9, 64])
def test_groups_and_suffixes_in_one_plan(
    num_programs: int, dims: tuple[int, int], kernel: Kernel, device: torch.device
) -> None:
    """A plan replaces the one before."""
    batch = Batch(device, kernel, dims)
    for form in (batch.attention(num_programs=num_programs), ReferenceAttention(8)):
        form.plan([Segment(tuple(range(7)), 83)], batch.suffixes)
        run(form, batch.q, batch.kv, batch.slots)
        form.plan(batch.groups, batch.suffixes)
        batch.check(run(form, batch.q, batch.kv, batch.slots.int()))
        form.plan()
        out, lse = run(form, batch.q, batch.kv, batch.slots)
        assert not out.any()
        assert bool((lse == -torch.inf).all())


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


def test_fp8_keys_and_values_with_scales(device: torch.device) -> None:
    q, _, _, kv, slots = paged(70, 3, 2, 4, 64, 64, torch.float16, device)
    stored = PagedKV(kv.k_cache.to(torch.float8_e4m3fn), kv.v_cache.to(torch.float8_e4m3fn), 0.5, 2.0)
    keys, values = (cache.half()[slots] for cache in (stored.k_cache, stored.v_cache))
    found = attended(q, stored, slots, 0.1, FLAT, num_programs=8)
    close(*found, dense_attention(q, keys * 0.5, values * 2.0, 0.1), torch.float16)


def test_strided_pool_and_query(device: torch.device) -> None:
    q, keys, values, kv, slots = paged(40, 3, 2, 4, 64, 64, torch.float32, device)
    both = torch.stack([kv.k_cache, kv.v_cache], dim=1)
    wide = torch.cat([q, q], dim=2)[:, :, :64]
    found = attended(wide, PagedKV(both[:, 0], both[:, 1]), slots, 0.25)
    close(*found, dense_attention(q, keys, values, 0.25), torch.float32)


def test_what_does_not_fit_the_plan_is_refused(device: torch.device) -> None:
    """Kernels would read behind what they are given; and a refused plan leaves the one before as it was."""
    batch = Batch(device)
    attention, reference = batch.attention(num_programs=40), ReferenceAttention(8)
    attention.plan(batch.groups, batch.suffixes)
    with pytest.raises(ValueError, match="segments of at most 2 passes"):
        attention.plan(batch.groups, batch.suffixes, [])
    for form, wrong in itertools.product((attention, reference), (Segment((8,), 3), Segment((1, 1), 3))):
        with pytest.raises(ValueError, match="each batch row below 8 once"):
            form.plan(batch.groups, [wrong])
    batch.check(run(attention, batch.q, batch.kv, batch.slots))
    for form in (attention, reference):
        form.plan([Segment((1,), 3, list_id=1)])
    few, good = (torch.zeros(n, 2, dtype=torch.int32, device=device) for n in (1, 2))
    for form, q, slots, options, message in (
        (reference, batch.q, batch.slots, {}, "expected counts of the lists that segments name, got none"),
        (attention, batch.q, batch.slots, {}, "expected counts of 2 lists or more, as planned"),
        (attention, batch.q, batch.slots, {"counts": few}, "expected counts of 2 lists or more, as planned"),
        (attention, batch.q, batch.slots, {"counts": good.float()}, r"expected counts \(2, 2\) int32 contiguous"),
        (attention, batch.q, batch.slots, {"counts": good, "head_map": good[0, :1]}, r"expected head_map \(2,\) int32"),
        (attention, batch.q[:1], batch.slots, {"counts": good}, "expected q of 2 rows or more, as planned, got 1"),
        (attention, batch.q, batch.slots[::2], {"counts": good}, r"slots \[arena\] int32 or int64 contiguous"),
        (attention, batch.q, batch.slots, {"counts": good, "head_slots": batch.slots.int()}, "in the dtype of slots"),
    ):
        with pytest.raises(ValueError, match=message):
            run(form, q, batch.kv, slots, **options)


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


def test_heads_are_merged_together_or_apart(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 heads, of which 1, 4 or 8 are a program's; rows of many parts, of one, of none and of all that are merged at
    once."""
    q, keys, values, kv, slots = paged(700, 5, 2, 3, 64, 64, torch.float32, device)
    attention = GroupedAttention(AttentionShape.of(q, kv), 5, [FLAT, FLAT], device, num_programs=80)
    attention.plan([Segment((0, 1), 640)], [Segment((1,), 50, list_begin=640), Segment((3,), 5, list_begin=690)])
    seen = {0: range(640), 1: range(690), 3: range(690, 695)}
    for most in (1000, 8, 1):
        monkeypatch.setattr(runner, "_MERGE_PROGRAMS", most)
        check(run(attention, q, kv, slots), (q, keys, values), lambda row, _: seen.get(row, ()))


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
        check((out, lse), (q, keys, values), lambda row, _, n=length: [*range(n), *range(1900 + row, 1906 + row)])
