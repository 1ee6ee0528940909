"""How the work of grouped attention is cut: every entry of every row once, no two parts in one place; its tiles.

Tables of plans are read here as Hopper's kernel reads them, block by block, and its results merged.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefix_kernels.grouped_attention import AttentionConfig, AttentionShape, default_config, passes_for
from prefix_kernels.grouped_attention.items import DIRECT, Joined, Segment, cut, join
from prefix_kernels.grouped_attention.reference import ReferenceAttention
from prefix_kernels.grouped_attention.runner import GroupedAttention
from prefix_kernels.types import PagedKV
from sglang_ext.decode.buffers import StepBuffers
from sglang_ext.decode.types import PrefixGroup

BLOCK_M, BLOCK_N, GQA, KV_HEADS = 16, 8, 4, 3
CUTS: dict[str, Any] = {"gqa": GQA, "num_kv_heads": KV_HEADS, "block_m": BLOCK_M, "block_n": BLOCK_N}


@st.composite
def passes(draw: st.DrawFn) -> list[Segment]:
    rows = draw(st.permutations(range(draw(st.integers(1, 24)))))
    segments, begin = [], 0
    while begin < len(rows):
        end = begin + draw(st.integers(1, 9))
        segments.append(Segment(tuple(rows[begin:end]), draw(st.integers(0, 100)), list_begin=1000 * begin, list_id=-1))
        begin = end
    return segments


@given(passes(), st.integers(1, 40), st.sets(st.integers(0, 23)), st.integers(0, 99))
def test_every_entry_of_a_row_is_attended_once(
    segments: list[Segment], target: int, alone: set[int], first_partial: int
) -> None:
    check_cut(segments, target, alone, first_partial)


@pytest.mark.parametrize(("count", "target"), [(17, 33), (9, 16), (35, 33), (70, 33)])
def test_every_entry_of_lists_of_two_chunks_is_attended_once(count: int, target: int) -> None:
    rng = random.Random(count)
    segments = [Segment((row,), rng.choice([2000, 2048]), list_begin=3000 * row) for row in range(count)]
    items = check_cut(segments, target, set(range(0, count, 2)), 48)
    assert len({item[6] - item[5] for item in items if item[5] == 0}) > 1


def check_cut(segments: list[Segment], target: int, alone: set[int], first_partial: int) -> list[tuple[int, ...]]:
    """Items of these segments; what stands in their table is right."""
    items = cut(segments, **CUTS, target=target, first_partial=first_partial, alone=alone)
    attended: Counter[tuple[int, int]] = Counter()
    parts: dict[int, list[int]] = {}
    tiles: list[int] = []
    chunks: dict[int, int] = {}
    for _, _, begin, _, _, start, end, *_ in items.items:
        chunks[begin] = max(chunks.get(begin, 0), end - start)
    cut_lists = [one for one in segments if one.rows and one.length]
    assert len(items.items) <= target + sum(-(-len(one.rows) // (BLOCK_M // GQA)) for one in cut_lists)
    for first, count, begin, _, _, start, end, partial, *joined in items.items:
        assert joined == [0, 0, -1]
        assert start % chunks[begin] == 0
        assert start < end
        for place in range(first, first + count):
            row = items.rows[place]
            attended.update((row, begin + entry) for entry in range(start, end))
            parts.setdefault(row, []).append(partial if partial == DIRECT else partial + (place - first) * GQA)
        if partial != DIRECT:
            tiles.append(partial)
    wanted = Counter((row, s.list_begin + i) for s in segments for row in s.rows for i in range(s.length))
    assert attended == wanted
    tiles.sort()
    height = KV_HEADS * BLOCK_M
    assert all(after - before >= height for before, after in itertools.pairwise(tiles))
    assert not tiles or (tiles[0] >= first_partial and tiles[-1] + height <= first_partial + len(tiles) * height)
    for row, first, stride, head_stride, count in items.spans:
        if count == DIRECT:
            assert parts.pop(row) == [DIRECT]
            assert row in alone
        else:
            assert parts.pop(row) == [first + i * stride for i in range(count)]
            assert head_stride == BLOCK_M
    assert not parts
    return items.items


def test_a_tile_is_direct_where_none_of_its_rows_has_another_part() -> None:
    segments = [Segment((0, 1, 2, 3, 4), 30)]
    for alone, target, partials in (
        ({0, 1, 2, 3, 4}, 1, [DIRECT, DIRECT]),
        ({0, 1, 3, 4}, 1, [0, DIRECT]),
        ((), 1, [0, 48]),
        ({0, 1, 2, 3, 4}, 4, [0, 48, 96, 144]),  # two parts each
    ):
        assert [item[7] for item in cut(segments, **CUTS, target=target, alone=alone).items] == partials
    with pytest.raises(ValueError, match="block_m of at least gqa=4 rows"):
        cut(segments, **{**CUTS, "block_m": 2}, target=1)


def test_lists_that_fill_a_turn_stay_whole_and_what_is_more_is_cut() -> None:
    def parts(lengths: list[int]) -> list[int]:
        segments = [Segment((row,), length) for row, length in enumerate(lengths)]
        sizes = {"gqa": 4, "num_kv_heads": 8, "block_m": 16, "block_n": 64, "target": 33}
        return [item[6] - item[5] for item in cut(segments, **sizes, alone=range(32)).items]

    assert parts([1024] * 32) == [1024] * 32
    assert parts([1024] * 20) == [1024] * 20, "a second turn of half the length would be as long"
    assert max(parts([1024] * 5 + [131072] + [1024] * 26)) < 131072 / 16
    assert parts([2048] * 16) == [1024] * 32
    assert parts([2048] * 17) == [1024] * 32 + [128] * 16, "one list more is shared by programs that have half a list"
    assert parts([2048] * 34) == [2048] * 33 + [64] * 32
    assert parts([2048] * 31) == [2048] * 31


LISTED, OWN = Segment((3,), 100, 50, 100, 7), Segment((3,), 25, 900, list_id=3)


@pytest.mark.parametrize(
    ("passes", "joined"),
    [
        ([[LISTED], [OWN]], True),
        ([[OWN], [LISTED]], True),
        ([[Segment((3,), 400)], [OWN]], True),
        ([[LISTED], [Segment((3,), 32)]], True),
        ([[LISTED], [Segment((3,), 33)]], False),
        ([[Segment((3,), 5)], [OWN]], True),  # the longer one is the list
        ([[LISTED], [Segment((3,), 25, 900, 100)]], False),
        ([[Segment((3, 4), 100)], [OWN]], False),
        ([[LISTED], [Segment((3,), 0)], [OWN]], True),
        ([[LISTED], [Segment((3,), 9)], [OWN]], False),
        ([[LISTED], [Segment((4,), 25)]], False),
    ],
)
def test_a_list_and_a_suffix_that_are_all_of_a_row_are_joined(passes: list[list[Segment]], joined: bool) -> None:
    """Beside others. Not one of two launches, nor a list in parts."""
    beside = [[Segment((8, 9), 100)], *[[] for _ in passes[1:]]]
    every = [both + others for both, others in zip(passes, beside, strict=True)]
    attended = Counter(row for of_pass in every for s in of_pass if s.length for row in s.rows)
    sizes = {"gqa": GQA, "block_m": BLOCK_M, "block_n": BLOCK_N, "target": 1, "longest": 32}
    left = join(every, attended, **sizes)
    found = [one for of_pass in left for one in of_pass if isinstance(one, Joined)]
    if not joined:
        assert left == [[s for s in of_pass if s.length] for of_pass in every]
        return
    both = sorted((s for of_pass in passes for s in of_pass if s.length), key=lambda s: (s.head_stride, s.length))
    (one,) = found
    assert [one.suffix, Segment(**{name: vars(one)[name] for name in vars(LISTED)})] == both
    assert sum(map(len, left)) == 2
    assert not any(isinstance(s, Joined) for of in join(every, attended + Counter([3]), **sizes) for s in of)
    if both[1].length > BLOCK_N:
        assert not any(isinstance(s, Joined) for of in join(every, attended, **{**sizes, "target": 20}) for s in of)
    for of_pass in left:
        items = cut(of_pass, **CUTS, target=1).items
        if one in of_pass:
            own, suffix = one, one.suffix
            fields = (own.list_begin, own.head_stride, own.list_id, 0, own.length, DIRECT)
            assert (*fields, suffix.list_begin, suffix.length, suffix.list_id) in [item[2:] for item in items]


class Mixed(NamedTuple):
    """Segments of two passes, the tensors that a run has, and how many rows may be joined."""

    passes: tuple[list[Segment], list[Segment]]
    q: torch.Tensor
    kv: PagedKV
    slots: torch.Tensor
    head_slots: torch.Tensor
    counts: torch.Tensor
    may_join: int


HOPPER = AttentionConfig(64, 16, 4, 2, 1, specialized=True)
LISTS = 3
"""KV heads, which have lists of their own."""


def mixed(seed: int) -> Mixed:
    """Groups of several rows and rows alone, most of them with a suffix; what has a list_id may have fewer entries."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, batch, begins, may_join = list(range(12)), 12, [0, 0], 0
    rng.shuffle(rows)
    counts = torch.zeros(2 * batch, LISTS, dtype=torch.int32)
    passes: tuple[list[Segment], list[Segment]] = ([], [])

    def add(number: int, members: list[int], length: int, *, of_heads: bool, counted: int | None) -> None:
        list_id = -1 if counted is None else number * batch + members[0]
        for head in range(LISTS):
            few = min(length, rng.choice([length, rng.randint(0, length), 0])) if counted is None else counted
            counts[number * batch + members[0], head] = few if of_heads else (counted or 0)
        passes[number].append(Segment(tuple(members), length, begins[of_heads], length * of_heads, list_id))
        begins[of_heads] += length * (LISTS if of_heads else 1)

    while rows:
        members = [rows.pop() for _ in range(min(len(rows), rng.choice([1, 1, 1, 2, 5])))]
        length, of_heads = rng.choice([0, 1, 16, 100, 190, 200, 256]), rng.random() < 0.7
        bounded = rng.random() < 0.7 and length
        add(0, members, length, of_heads=of_heads, counted=rng.choice([length, length - 1, 0]) if bounded else None)
        for row in members:
            own = rng.choice([0, 1, 16, 31, 32, 32, 33, 300])
            bounded = rng.random() < 0.7 and own
            add(1, [row], own, of_heads=False, counted=rng.choice([own, own // 2, 0]) if bounded else None)
            suffix = own if of_heads else min(own, length)
            may_join += len(members) == 1 and length > 0 and 0 < suffix <= 32
    pool = torch.randn(2, 800, LISTS, 64, generator=generator)
    slots, head_slots = (torch.randint(800, (begin,), generator=generator) for begin in begins)
    q = torch.randn(batch, 2 * LISTS, 64, generator=generator)
    return Mixed(passes, q, PagedKV(*pool), slots, head_slots, counts, may_join)


def blocks(arena: torch.Tensor, begin: int, end: int) -> list[torch.Tensor]:
    """Slots as they are fetched: the last one once more where a block is not full."""
    entries = [
        torch.arange(start, start + HOPPER.block_n).clamp(max=end - 1) for start in range(begin, end, HOPPER.block_n)
    ]
    return [arena[entry] for entry in entries]


def interpreted(attention: GroupedAttention, of: Mixed) -> tuple[torch.Tensor, torch.Tensor, int]:
    """out, lse and how many items are joined, by the tables of a plan; all that is not written is NaN."""
    (one,) = attention._launches
    num_joined, (batch, heads, dim), gqa = 0, of.q.shape, of.q.shape[1] // LISTS
    out, lse = torch.full((batch, heads, dim), torch.nan), torch.full((batch, heads), torch.nan)
    partial_out = torch.full((len(attention._partial_lse), dim), torch.nan)
    partial_lse = torch.full((len(attention._partial_lse),), torch.nan)
    items = one.items[: int(one.num_items)].tolist()
    assert [item[3] > 0 for item in items] == sorted(item[3] > 0 for item in items)
    for (first, count, at, stride, list_id, begin, listed, partial, before, own, own_id), head in itertools.product(
        items, range(LISTS)
    ):
        joined, end = (
            min(length, int(of.counts[number, head])) if number >= 0 else length
            for length, number in ((own, own_id), (listed, list_id))
        )
        num_joined += own > 0 and head == 0
        fetched = blocks(of.slots[before:], 0, joined)
        fetched += blocks((of.head_slots if stride else of.slots)[at + head * stride :], begin, end)
        stop = (joined + HOPPER.block_n - 1) // HOPPER.block_n * HOPPER.block_n + max(end - begin, 0)
        starts = range(0, stop, HOPPER.block_n)
        ends = [joined if start < joined else stop for start in starts]
        seen = [slots[: e - s] for slots, s, e in zip(fetched, starts, ends, strict=True)]
        found = torch.cat([torch.zeros(0, dtype=torch.int64), *seen])
        for place, head_of_group in itertools.product(range(count), range(gqa)):
            row, qo_head = int(one.rows[first + place]), head * gqa + head_of_group
            scores = 0.1 * of.kv.k_cache[found, head] @ of.q[row, qo_head]
            result = scores.softmax(dim=0) @ of.kv.v_cache[found, head]
            if partial == DIRECT:
                assert out[row, qo_head].isnan().all()
                out[row, qo_head], lse[row, qo_head] = result, scores.logsumexp(dim=0)
            else:
                to = partial + head * HOPPER.block_m + place * gqa + head_of_group
                assert partial_lse[to].isnan()
                partial_out[to], partial_lse[to] = result, scores.logsumexp(dim=0)
    for row, qo_head in itertools.product(range(batch), range(heads)):
        spans = attention._spans[row].tolist()
        if any(parts == DIRECT for *_, parts in spans):
            assert [span for span in spans if span[3] != DIRECT] == [[0, 0, 0, 0]]
            continue
        to = [
            first + part * stride + qo_head // gqa * head_stride + qo_head % gqa
            for first, stride, head_stride, parts in spans
            for part in range(parts)
        ]
        lse[row, qo_head] = partial_lse[to].logsumexp(dim=0)
        weights = (partial_lse[to] - lse[row, qo_head]).exp().nan_to_num()
        out[row, qo_head] = weights @ partial_out[to]
    return out, lse, num_joined


@pytest.mark.parametrize("target", [1, 6, 12, 60])
@pytest.mark.parametrize("seed", range(6))
def test_tables_of_a_plan_say_what_is_attended(seed: int, target: int) -> None:
    of = mixed(seed)
    shape = AttentionShape(2 * LISTS, LISTS, 64, 64, torch.bfloat16, torch.bfloat16)
    device = torch.device("cpu")
    attention = GroupedAttention(shape, len(of.q), [HOPPER] * 2, device, num_programs=target * LISTS)
    reference = ReferenceAttention(len(of.q))
    wanted = torch.empty_like(of.q), torch.empty(of.q.shape[:2])
    for form in (attention, reference):
        form.plan(*of.passes)
    out, lse, num_joined = interpreted(attention, of)
    reference.run(of.q, of.kv, of.slots, 0.1, *wanted, counts=of.counts, head_slots=of.head_slots)
    torch.testing.assert_close(lse, wanted[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out, wanted[0], atol=1e-5, rtol=1e-5)
    assert num_joined == of.may_join or (target > 1 and num_joined < of.may_join), "lists in parts are not joined"


@pytest.mark.parametrize("target", [16, 33])
def test_joined_items_do_not_make_the_longest_turn_much_longer(target: int) -> None:
    """Steps of the program that has most of them, each item counted as two more: a start and a part."""
    sizes = {"gqa": 4, "block_m": 64, "block_n": 64, "target": target}

    def busiest(lists: list[Segment], suffixes: list[Segment], longest: int) -> int:
        attended = Counter(row for segment in (*lists, *suffixes) for row in segment.rows)
        passes = join([lists, suffixes], attended, **sizes, longest=longest)
        items = [item for of_pass in passes for item in cut(of_pass, **sizes, num_kv_heads=8).items]
        steps = [2 + -(-item[9] // 64) + -(-(item[6] - item[5]) // 64) for item in items]
        return max(sum(steps[program::target]) for program in range(target))

    ratios = []
    for seed in range(250):
        rng, rows = random.Random(seed), itertools.count()
        groups = [tuple(itertools.islice(rows, rng.choice([1] * 6 + [2, 4]))) for _ in range(rng.randint(1, 40))]
        lengths, own = rng.choice([[2048], [512, 1024, 2048], [4096, 8192, 16384]]), rng.choice([16, 64, 192, 500])
        lists = [Segment(of, int(rng.choice(lengths) * len(of) ** 0.5), 0, rng.choice([0, 1])) for of in groups]
        suffixes = [Segment((row,), own) for of in groups for row in of]
        ratios.append(busiest(lists, suffixes, 192) / busiest(lists, suffixes, 0))
    assert (max(ratios) <= 1.25, sum(ratios) <= 1.01 * len(ratios)) == (True, True), (max(ratios), sum(ratios))


def test_a_request_alone_on_its_prefix_has_one_item() -> None:
    """As the plugin plans it: both counts are on the device."""
    cpu, shape = torch.device("cpu"), AttentionShape(32, 8, 128, 128, torch.bfloat16, torch.bfloat16)
    prefixes = [PrefixGroup("a prompt", (0,), 1000), PrefixGroup("another", (1,), 1030)]
    layout = StepBuffers(2, 8, 4096, cpu).lay_out([1050, 1090], prefixes)
    assert layout is not None
    attention = GroupedAttention(shape, 2, passes_for(shape, 2, specialized=True), cpu, num_programs=16)
    attention.plan([Segment((r,), 600, 4800 * r, 600, 2 + r) for r in range(2)], layout.suffix)
    (launched,) = attention._launches
    assert launched.items[: int(launched.num_items), 2:].tolist() == [
        [4800 * r, 600, 2 + r, 0, 600, DIRECT, own.list_begin, own.length, r] for r, own in enumerate(layout.suffix)
    ]


def shape_of(gqa: int, dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> AttentionShape:
    return AttentionShape(2 * gqa, 2, dim, dim, dtype, kv_dtype or dtype)


@pytest.mark.parametrize(
    ("shape", "rows", "specialized", "config"),
    [
        (shape_of(4, 128, torch.bfloat16), 1, True, AttentionConfig(64, 64, 4, 3, 2, 128, specialized=True)),
        (shape_of(7, 64, torch.float16), 8, True, AttentionConfig(64, 64, 4, 3, 1, specialized=True)),
        (shape_of(4, 128, torch.bfloat16), 32, True, AttentionConfig(128, 64, 4, 3, 1, specialized=True)),
        (shape_of(4, 128, torch.bfloat16), 32, False, AttentionConfig(128, 64, 8, 3, 2)),
        (shape_of(4, 128, torch.bfloat16, torch.float8_e4m3fn), 1, True, AttentionConfig(16, 64, 4, 3, 2)),
        (shape_of(4, 256, torch.bfloat16), 32, True, AttentionConfig(32, 32, 8, 3, 1)),
        (shape_of(4, 128, torch.float32), 32, True, AttentionConfig(16, 16, 8, 3, 1)),
        (shape_of(40, 128, torch.float32), 1, False, AttentionConfig(64, 16, 8, 3, 1)),
        (shape_of(16, 576, torch.bfloat16), 32, True, AttentionConfig(64, 64, 8, 2, 1)),
        (shape_of(16, 576, torch.bfloat16), 32, False, AttentionConfig(32, 64, 8, 2, 1)),
    ],
)
def test_launch_parameters_fit_the_kernel_that_has_the_shape(
    shape: AttentionShape, rows: int, specialized: bool, config: AttentionConfig
) -> None:
    assert default_config(shape, rows, specialized=specialized) == config
    alone = config if config.specialized else default_config(shape, 1)
    assert passes_for(shape, rows, specialized=specialized) == [config, alone]


def test_short_lists_of_many_rows_have_lower_tiles_two_at_a_time() -> None:
    shape, lower = shape_of(4, 128, torch.bfloat16), AttentionConfig(64, 64, 4, 3, 2, 128, specialized=True)
    assert passes_for(shape, 32, specialized=True, short=True) == [lower, lower]
    for rows, specialized in (8, True), (16, True), (32, False):
        options = {"rows": rows, "specialized": specialized}
        assert default_config(shape, **options, short=True) == default_config(shape, **options)
