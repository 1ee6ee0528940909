"""Selection in one launch (in four, where no program can wait): scores and positions of the operations it joins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from prefix_kernels.anchor_selection import AnchorConfig, AnchorSelection, Form, default_config
from prefix_kernels.anchor_selection.runner import share_programs
from prefix_kernels.launching import recording
from prefix_kernels.low_bit import quantize
from prefix_kernels.pooled_scores import PooledScores, ScoredGroup, ScoreShape, Source
from prefix_kernels.pooled_scores.runner import ScoreInputs
from prefix_kernels.pooling import Pooling
from prefix_kernels.top_k_selection.plan import SelectionGroup, pack_lists
from prefix_kernels.top_k_selection.runner import TopKConfig, TopKSelection
from prefix_kernels.types import SelectedLists
from tests.prefix_kernels.triton.conftest import INTERPRETED

KV_HEADS, GQA, DIM = 2, 4, 64
HEADS = KV_HEADS * GQA
FORMS = [Form.UNFUSED] if INTERPRETED else [Form.UNFUSED, Form.FUSED]
SM_SCALE = 0.3
POISON = 1_000_007
CONFIG = AnchorConfig(block_n=64)


@dataclass(eq=False)
class Problem:
    """Groups with an index of their own each, all scores in one arena.

    Attributes:
        shape: heads and index.
        q: queries of the batch.
        scored, selected: the plan.
        room: entries of the arena of scores.
        lists: what is listed, or slots with KEYS.
        k_cache: with KEYS.
        block_size: of the largest block.
    """

    shape: ScoreShape
    q: Tensor
    scored: list[ScoredGroup]
    selected: list[SelectionGroup]
    room: int
    lists: Tensor | None = None
    k_cache: Tensor | None = None
    block_size: int = 1

    @property
    def listed(self) -> bool:
        return self.lists is not None


def problem(
    source: Source,
    device: torch.device,
    sizes: list[tuple[tuple[int, ...], int, int]],
    *,
    block_sizes: tuple[int, ...] = (1, 1),
    listed: bool = False,
    bits: int = 4,
    pooling: Pooling = Pooling.MAX,
    dtype: torch.dtype = torch.float32,
    same: bool = False,
    windows: tuple[int, int] = (5, 20),
    dim: int = DIM,
    sum_every: int = 1,
) -> Problem:
    """Groups of (rows, prefix_len, budget). With `same` all candidates are one and the same, so all of them tie."""
    gen = torch.Generator().manual_seed(len(sizes) + sizes[0][1])

    def rand(*of: int) -> Tensor:
        return torch.randn(*of, generator=gen)

    batch = sum(len(rows) for rows, _, _ in sizes)
    q = rand(batch, HEADS, dim).to(device, dtype)
    scored, selected, arena_of_lists = [], [], []
    at = listed_at = table_at = 0
    longest = max(length for _, length, _ in sizes)
    k_cache = rand(longest + 7, KV_HEADS, dim).to(device, dtype) if source is Source.KEYS else None
    for rows, length, budget in sizes:
        counts = tuple(-(-length // size) for size in block_sizes)
        spread = 3 * max(counts) if listed else max(counts)
        firsts = tuple(head * spread for head in range(KV_HEADS))
        arrays: tuple[Tensor | None, ...] = ()
        begins = (0,) * KV_HEADS
        if source is not Source.KEYS:
            keys = rand(1, dim).expand(KV_HEADS * spread, -1) if same else rand(KV_HEADS * spread, dim)
            parts = [quantize(keys + 0.7, bits)] if source is Source.LOW_BIT else []
            if source is Source.MINMAX:
                parts = [quantize(keys + 0.7, bits), quantize(keys - 0.7, bits)]
            arrays = (None,)
            for part in parts:
                scale = part.scale.expand(KV_HEADS, -1).contiguous()
                arrays += (part.packed.to(device), scale.to(device))
        if listed or k_cache is not None:
            for head in range(KV_HEADS):
                of = spread if listed else longest + 7
                own = torch.randperm(of, generator=gen)[: counts[head]]
                arena_of_lists.append(own.sort().values if listed else own)
            begins = tuple(listed_at + head * counts[0] for head in range(KV_HEADS))
            listed_at += KV_HEADS * counts[0]
        stride = -(-max(counts) // 4) * 4
        scores = tuple(at + head * stride for head in range(KV_HEADS))
        scored.append(ScoredGroup(rows, counts, firsts, begins, scores, arrays))
        sink, recent = windows if budget >= sum(windows) else (0, 0)
        selected.append(
            SelectionGroup(length, budget, at, stride, block_sizes, sink, recent, slot_start=0 if listed else table_at)
        )
        at += KV_HEADS * stride
        table_at += length
    shape = ScoreShape(HEADS, KV_HEADS, source, dim, bits, pooling=pooling, sum_every=sum_every)
    lists = torch.cat(arena_of_lists).int().to(device) if arena_of_lists else None
    return Problem(shape, q, scored, pack_lists(selected, KV_HEADS), at + 4, lists, k_cache, max(block_sizes))


def runner(
    made: Problem, form: Form, num_chunks: int = 3, max_groups: int = 4, config: AnchorConfig = CONFIG
) -> AnchorSelection:
    return AnchorSelection(
        made.shape,
        max(8, made.q.shape[0]),
        max_groups,
        5000,
        KV_HEADS * 1400,
        config,
        made.q.device,
        listed=made.listed,
        max_block_size=made.block_size,
        form=form,
        num_programs=num_chunks * KV_HEADS,
    )


def select(one: AnchorSelection, made: Problem, *, raw: Tensor | None = None) -> tuple[Tensor, SelectedLists]:
    """Plan and run into buffers that hold garbage before."""
    device = made.q.device
    lists = one.new_lists(with_slots=True)
    for buffer in (lists.positions, lists.counts, lists.slots):
        assert buffer is not None
        buffer.fill_(POISON)
    scores = torch.full((made.room,), torch.nan, device=device)
    one.plan(made.scored, made.selected)
    inputs = ScoreInputs(made.q, SM_SCALE, made.k_cache, made.lists, raw)
    one.run(inputs, scores, lists, slot_table=slot_table(device))
    return scores, lists


def slot_table(device: torch.device) -> Tensor:
    """Of all groups, and for listed candidates of all positions."""
    return torch.randperm(8000, generator=torch.Generator().manual_seed(9)).to(device, torch.int32)


def scored_in_two_launches(made: Problem, num_chunks: list[int], config: AnchorConfig) -> Tensor:
    """Each group by itself, cut as the anchor's programs are shared out."""
    scores = torch.full((made.room,), torch.nan, device=made.q.device)
    for group, chunks, chosen in zip(made.scored, num_chunks, made.selected, strict=True):
        if chosen.budget >= chosen.prefix_len:
            continue
        batch, listed = max(8, made.q.shape[0]), made.lists is not None
        scoring = PooledScores(made.shape, batch, 1, config.scoring(chunks), made.q.device, listed=listed)
        scoring.plan([group])
        scoring.run(made.q, scores, SM_SCALE, k_cache=made.k_cache, lists=made.lists)
    return scores


def check(made: Problem, scores: Tensor, lists: SelectedLists, one: AnchorSelection, *, exactly: bool = True) -> None:
    """Scores of `PooledScores`; the lists that `TopKSelection` makes of them."""
    programs = one.programs_of_a_head
    filled = [group for group in made.selected if group.prefix_len]
    shares = iter(share_programs([group.prefix_len for group in filled], programs))
    chunks = [next(shares) if group.prefix_len else 1 for group in made.selected]
    wanted = scored_in_two_launches(made, chunks, one.config)
    if exactly:
        assert torch.equal(scores.view(torch.int32), wanted.view(torch.int32)), "bit for bit, unwritten ones too"
    else:
        torch.testing.assert_close(scores, wanted, atol=1e-4, rtol=1e-5, equal_nan=True)
    device = scores.device
    top_k = TopKSelection(
        one.max_groups,
        KV_HEADS,
        one.max_prefix_len,
        one.list_entries,
        device,
        key_bits=16,
        max_block_size=one.max_block_size,
        config=TopKConfig(256, 2),
        num_programs=8,
    )
    top_k.plan(made.selected)
    theirs = top_k.new_lists()
    top_k.run(scores.nan_to_num(nan=0.0), theirs)
    groups = len(made.selected)
    assert torch.equal(lists.counts[:groups], theirs.counts[:groups])
    assert bool((lists.counts[groups:] == POISON).all())
    table = slot_table(device)
    assert lists.slots is not None
    for g, group in enumerate(made.selected):
        for head, places in enumerate(group.lists_in(theirs.positions, KV_HEADS).long()):
            if made.lists is not None and made.k_cache is None:
                begin = made.scored[g].list_begins[head]
                places = made.lists[begin + places].long()
            assert torch.equal(group.lists_in(lists.positions, KV_HEADS)[head].long(), places), (g, head)
            assert torch.equal(group.lists_in(lists.slots, KV_HEADS)[head], table[group.slot_start + places])
    for buffer in (lists.positions, lists.slots):
        assert int((buffer != POISON).sum()) == KV_HEADS * sum(group.count for group in made.selected), "nothing else"


THREE = [((0, 3), 700, 111), ((2,), 1301, 333), ((1,), 90, 90)]
"""Rows, prefix and budget of groups: the longest is not the first, and the last is attended whole."""
SHORT = [((0, 3), 330, 61), ((2,), 601, 151), ((1,), 90, 90)]
"""As `THREE`, where every token is a candidate: chunks of several blocks all the same."""


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("length", [65, pytest.param(700, marks=pytest.mark.full), 1301])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_tokens(dtype: torch.dtype, length: int, form: Form, device: torch.device) -> None:
    made = problem(Source.LOW_BIT, device, [((0, 1, 2), length, length // 3)], dtype=dtype)
    one = runner(made, form)
    check(made, *select(one, made), one)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("num_chunks", [3, pytest.param(20, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_sums_of_a_sample(dtype: torch.dtype, num_chunks: int, form: Form, device: torch.device) -> None:
    """Of the first group every second token is summed, of the others, which are short, all. Some chunks have none."""
    sizes = [((0, 3), 4099, 333), ((2,), 601, 151), ((1,), 90, 90)]
    made = problem(Source.LOW_BIT, device, sizes, dtype=dtype, sum_every=16)
    one = runner(made, form, num_chunks, config=AnchorConfig(block_n=128))
    check(made, *select(one, made), one)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_windows_that_take_the_whole_budget(form: Form, device: torch.device) -> None:
    """No key outside of them is as high as the threshold, the highest one there is."""
    made = problem(Source.LOW_BIT, device, [((0, 1), 1301, 25)])
    assert made.selected[0].num_sink + made.selected[0].num_recent == 25
    one = runner(made, form)
    check(made, *select(one, made), one)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("block_sizes", [(16, 16), (16, 64), (4, 1)], ids=str)
@pytest.mark.parametrize(
    "windows",
    [(5, 20), (150, 60), (150, 61), *(pytest.param(two, marks=pytest.mark.full) for two in ((0, 0), (16, 0)))],
    ids=str,
)
@pytest.mark.parametrize("same", [False, True], ids=["", "all tie"])
def test_blocks(
    same: bool, windows: tuple[int, int], block_sizes: tuple[int, int], form: Form, device: torch.device
) -> None:
    """Windows, budgets and the prefix's end cut blocks; heads differ in the number of blocks."""
    made = problem(Source.MINMAX, device, [((0, 1), 1301, 211)], block_sizes=block_sizes, windows=windows, same=same)
    one = runner(made, form)
    check(made, *select(one, made), one)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(
    ("source", "options"),
    [
        pytest.param(Source.LOW_BIT, {"listed": True}, id="listed", marks=pytest.mark.full),
        pytest.param(Source.LOW_BIT, {"block_sizes": (16, 32)}, id="means of blocks", marks=pytest.mark.full),
        pytest.param(Source.LOW_BIT, {"bits": 2, "pooling": Pooling.MEAN}, id="2 bits, mean"),
        pytest.param(Source.LOW_BIT, {"same": True}, id="all tie", marks=pytest.mark.full),
        pytest.param(
            Source.MINMAX, {"block_sizes": (64, 16), "bits": 8, "same": True, "windows": (70, 66)}, id="blocks tie"
        ),
        pytest.param(Source.KEYS, {}, id="keys", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("num_chunks", [2, pytest.param(9, marks=pytest.mark.full)])
def test_groups_share_the_programs(
    num_chunks: int, source: Source, options: dict[str, Any], form: Form, device: torch.device
) -> None:
    """Fewer programs than groups, as many, and more; a place that no group takes; plans one after another."""
    made = problem(source, device, THREE if "block_sizes" in options else SHORT, **options)
    one = runner(made, form, num_chunks)
    for part in (slice(0, 3), slice(2, 3), slice(0, 0), slice(1, 3)):
        some = replace(made, scored=made.scored[part], selected=made.selected[part])
        check(some, *select(one, some), one)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("rows", [1, 3])
def test_raw_scores_of_few_rows_are_kept(rows: int, pooling: Pooling, form: Form, device: torch.device) -> None:
    made = problem(Source.LOW_BIT, device, [(tuple(range(rows)), 1301, 300)], pooling=pooling)
    raw = torch.full((1, KV_HEADS, 1301, rows * GQA), torch.nan, device=device).transpose(2, 3)
    one = runner(made, form, max_groups=1)
    # Sums over rows are made in another order there.
    check(made, *select(one, made, raw=raw), one, exactly=pooling is Pooling.MAX)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_more_rows_than_a_tile(form: Form, device: torch.device) -> None:
    made = problem(Source.LOW_BIT, device, [((5, 0, 3, 2, 4, 6, 1), 500, 99)])
    one = runner(made, form)
    check(made, *select(one, made), one)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_many_more_groups_than_programs(form: Form, device: torch.device) -> None:
    """Lists of all lengths, one behind the other, where programs take groups in turns."""
    made = problem(Source.LOW_BIT, device, [((n,), 40 + 11 * n, 7 + 5 * n) for n in range(20)], windows=(2, 4))
    one = runner(made, form, max_groups=24)
    check(made, *select(one, made), one)
    some = replace(made, scored=made.scored[4:7], selected=made.selected[4:7])
    check(some, *select(one, some), one)


def test_a_last_few_chunks_are_not_worth_a_round_of_their_own(device: torch.device) -> None:
    """What programs read of all chunks they read 32 at a time."""
    made = problem(Source.LOW_BIT, device, THREE)
    programs = [runner(made, Form.UNFUSED, chunks).programs_of_a_head for chunks in (16, 31, 33, 36, 37, 49, 66)]
    assert programs == [16, 31, 32, 32, 37, 49, 64]


def test_one_launch_or_one_for_each_phase(device: torch.device) -> None:
    made = problem(Source.LOW_BIT, device, THREE)
    with recording() as kept:
        select(runner(made, Form.UNFUSED), made)
    assert [(one.arguments["FIRST_PHASE"], one.arguments["LAST_PHASE"]) for one in kept.launches] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
    ]
    assert all("launch_cooperative_grid" not in one.options for one in kept.launches)
    assert all(one.grid == (3, KV_HEADS) for one in kept.launches)


@pytest.mark.skipif(not INTERPRETED, reason="what Triton's interpreter cannot do")
def test_the_interpreter_refuses_programs_that_wait(device: torch.device) -> None:
    made = problem(Source.LOW_BIT, device, THREE)
    with pytest.raises(ValueError, match=r"expected Form.UNFUSED in Triton's interpreter"):
        select(runner(made, Form.FUSED), made)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((0, 1, 1, 1), {}, "list_entries of at least 1"),
        ((1, 1, 2**30, 1), {}, "max_prefix_len < 2.30, got"),
        ((1, 1, 1, 1), {"source": Source.RAW}, "got Source.RAW; use TopKSelection"),
        ((1, 1, 1, 1), {"listed": True, "max_block_size": 16}, "1 token where they are listed, got 16"),
        ((1, 1, 1, 1), {"source": Source.KEYS}, "1 token where they are listed, got 64"),
    ],
)
def test_runners_that_cannot_be(
    sizes: tuple[int, int, int, int], options: dict[str, Any], message: str, device: torch.device
) -> None:
    shape = ScoreShape(4, 1, options.pop("source", Source.LOW_BIT), 16)
    with pytest.raises(ValueError, match=message):
        AnchorSelection(shape, *sizes, CONFIG, device, **options)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 8, 32])
@pytest.mark.parametrize(("source", "dim"), [(Source.LOW_BIT, 96), (Source.MINMAX, 128)], ids=["tokens", "blocks"])
def test_what_runs_where_nothing_was_tuned(
    source: Source, dim: int, num_rows: int, form: Form, device: torch.device
) -> None:
    sizes = (1, 1) if source is Source.LOW_BIT else (16, 32)
    group = [(tuple(range(num_rows)), 700, 90)]
    made = problem(source, device, group, block_sizes=sizes, dtype=torch.float16, dim=dim)
    one = runner(made, form, num_chunks=2, config=default_config(made.shape, num_rows))
    scores, lists = select(one, made)
    check(made, scores, lists, one)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    made = problem(Source.LOW_BIT, device, [((0,), 300, 30)])
    one = AnchorSelection(made.shape, 1, 1, 300, 62, CONFIG, device, max_block_size=1, form=FORMS[0])
    (scored,), (selected,) = made.scored, made.selected
    for of, group, message in (
        ([scored], [], "as many groups scored as selected, got 1 and 0"),
        ([scored], [replace(selected, prefix_len=301)], r"at most .300, 62, 1. tokens of a prefix, entries of"),
        ([scored], [replace(selected, list_begin=1)], "got .300, 63, 1."),
        ([scored], [replace(selected, block_size=2)], "got .300, 62, 2."),
        ([scored], [replace(selected, head_stride=29)], "head_stride of at least 30, the tokens selected, got 29"),
        ([scored], [replace(selected, prefix_len=299)], r"expected .299, 299. candidates, .* got .300, 300."),
        ([replace(scored, score_begins=(0, 301))], [selected], r"multiples of 4, got .0, 301."),
        ([scored] * 2, [selected] * 2, "at most 1 groups"),
        ([scored], [replace(selected, num_candidates=300)], "expected no num_candidates, got 300"),
    ):
        with pytest.raises(ValueError, match=message):
            one.plan(of, group)
    one.plan(made.scored, made.selected)
    inputs, scores = ScoreInputs(made.q, SM_SCALE), torch.zeros(600, device=device)
    lists, bare = one.new_lists(with_slots=True), one.new_lists()
    for arguments, table, message in (
        ((inputs, scores[:599], bare), None, "arena of 600 entries or more"),
        ((inputs, torch.zeros(601, device=device)[1:], bare), None, "at a multiple of 16 bytes"),
        ((inputs, scores, lists), None, "both or none"),
        ((inputs, scores, lists), slot_table(device)[:299], "a slot_table of 300 entries, got 299"),
        ((replace(inputs, q=made.q[:0]), scores, bare), None, "q of 1 rows or more"),
    ):
        with pytest.raises(ValueError, match=message):
            one.run(*arguments, slot_table=table)
    # Scores of tokens are read four at a time.
    odd = problem(Source.LOW_BIT, device, [((0,), 301, 30)])
    other = AnchorSelection(odd.shape, 1, 1, 301, 62, CONFIG, device, max_block_size=1, form=FORMS[0])
    other.plan([replace(odd.scored[0], score_begins=(0, 304))], odd.selected)
    with pytest.raises(ValueError, match=r"scores .arena. of 608 entries or more"):
        other.run(ScoreInputs(odd.q, SM_SCALE), torch.zeros(605, device=device), other.new_lists())


@pytest.mark.parametrize("tile", [(8, 64, 8), (8, 128, 2), (256, 64, 4)])
def test_tiles_that_hoppers_own_kernel_has_not_are_refused(tile: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected 4 or 8 warps"):
        AnchorConfig(*tile, specialized=True)


@pytest.mark.skipif(INTERPRETED, reason="programs wait for each other on a GPU only")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_one_launch_is_four_on_a_whole_gpu(dtype: torch.dtype, device: torch.device) -> None:
    """As many programs as wait for each other in earnest, launch after launch; a replay after another plan."""
    long = [((0, 2), 70_001, 700), ((1,), 30_000, 333)]
    made = problem(Source.LOW_BIT, device, long, dtype=dtype)
    short = replace(made, scored=made.scored[1:], selected=made.selected[1:])
    q, table = made.q, torch.arange(100_100, device=device).int()

    def build(form: Form) -> tuple[AnchorSelection, torch.Tensor, SelectedLists]:
        one = AnchorSelection(made.shape, 8, 4, 70_001, KV_HEADS * 1036, CONFIG, device, max_block_size=1, form=form)
        return one, torch.full((made.room,), torch.nan, device=device), one.new_lists(with_slots=True)

    def same(first: tuple[torch.Tensor, SelectedLists], second: tuple[torch.Tensor, SelectedLists]) -> None:
        assert torch.equal(first[0].view(torch.int32), second[0].view(torch.int32))
        for name in ("positions", "counts", "slots"):
            assert torch.equal(getattr(first[1], name), getattr(second[1], name)), name

    split, joined = build(Form.UNFUSED), build(Form.FUSED)
    for plan in (made, short, made):
        for one, _, _ in (split, joined):
            one.plan(plan.scored, plan.selected)
        for step in range(50):
            inputs = ScoreInputs(q if step % 2 else -q, SM_SCALE)
            for one, scores, lists in (split, joined):
                one.run(inputs, scores, lists, slot_table=table)
            same(split[1:], joined[1:])

    one, scores, lists = joined
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.run(ScoreInputs(q, SM_SCALE), scores, lists, slot_table=table)
    for plan in (short, made, short):
        for runs, _, _ in (split, joined):
            runs.plan(plan.scored, plan.selected)
        split[0].run(ScoreInputs(q, SM_SCALE), split[1], split[2], slot_table=table)
        for _ in range(20):
            graph.replay()
        same(split[1:], joined[1:])
