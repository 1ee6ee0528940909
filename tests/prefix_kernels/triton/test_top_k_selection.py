"""Top-k selection: the positions of a full sort; the reference by score; chunks, groups and replays."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_kernels.top_k_selection import SelectionGroup, pack_lists, top_k_selection
from prefix_kernels.top_k_selection.runner import TopKConfig, TopKSelection, default_config
from prefix_kernels.types import SelectedLists, Selection
from tests.examples import examples
from tests.prefix_kernels.triton.conftest import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SMALL = TopKConfig(256, 2)
POISON = 1_000_007
#: Largest prefix, entries of a row of scores.
ROW = 1304


def keys_of(scores: torch.Tensor, key_bits: int) -> torch.Tensor:
    """int64 keys, written otherwise than in the kernel: -inf and NaN 0."""
    real = scores > -torch.inf
    if key_bits == 16:
        scale = torch.tensor(65533.0 / 44.0, dtype=torch.float32)
        place = (scores.clamp(-44.0, 0.0).nan_to_num() - -44.0) * scale
        return torch.where(real, (place.long() + 1).clamp_max(65534), 0)
    bits = (scores + 0.0).view(torch.int32).long() & 0xFFFFFFFF
    keys = torch.where(bits >= 2**31, 2**32 - 1 - bits, bits + 2**31)
    return torch.where(real, keys, 0) >> (32 - key_bits)


def expected(row: torch.Tensor, group: SelectionGroup, block_size: int, key_bits: int = 32) -> list[int]:
    """The positions of one KV head: sorted whole by window, then key, then position, the highest first."""
    token = torch.arange(group.prefix_len)
    keys = keys_of(row, key_bits)[token // block_size].tolist()
    recent = group.prefix_len - group.num_recent
    order = sorted(range(group.prefix_len), key=lambda t: (t < group.num_sink or t >= recent, keys[t], t), reverse=True)
    return sorted(order[: group.count])


def select(runner: TopKSelection, groups: list[SelectionGroup], scores: torch.Tensor, **options: Any) -> SelectedLists:
    """Plan and run into lists that hold garbage before."""
    lists = runner.new_lists(with_slots="slot_table" in options)
    for buffer in (lists.positions, lists.counts, lists.slots):
        if buffer is not None:
            buffer.fill_(POISON)
    runner.plan(groups)
    runner.run(scores, lists, **options)
    return lists


def check(
    lists: SelectedLists, groups: list[SelectionGroup], scores: torch.Tensor, runner: TopKSelection, key_bits: int = 32
) -> None:
    counts = lists.counts.tolist()
    for g, group in enumerate(groups):
        assert counts[g] == [group.count] * runner.num_kv_heads
        listed = group.lists_in(lists.positions, runner.num_kv_heads).tolist()
        for head, size in enumerate(group.block_sizes(runner.num_kv_heads)):
            begin = group.score_start + head * group.score_stride
            row = scores[begin : begin + -(-group.prefix_len // size)].cpu()
            assert listed[head] == expected(row, group, size, key_bits)
    assert int((lists.positions != POISON).sum()) == sum(sum(of) for of in counts[: len(groups)]), "nothing else"
    assert bool((lists.counts[len(groups) :] == POISON).all())


def kinds(kind: str, size: tuple[int, ...], seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    scores = torch.randn(size, generator=gen)
    if kind == "ties":
        return scores.round()
    if kind == "one_value":
        return torch.full(size, -2.5)
    if kind == "nothing":
        return torch.full(size, -torch.inf)
    if kind == "nan":
        return torch.where(scores < 0.5, torch.nan, scores)
    if kind == "holes":
        return torch.where(scores < 0.5, -torch.inf, scores)
    if kind == "zeros":
        return torch.where(scores < 0, -0.0, 0.0)
    if kind == "extreme":
        wild = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, -0.0])
        return wild[torch.randint(len(wild), size, generator=gen)]
    if kind == "close":
        return 1.0 + scores * 3e-7  # the digits of the last pass decide
    assert kind == "plain"
    return scores


KINDS = ["plain", "ties", "one_value", "nothing", "nan", "holes", "zeros", "extreme", "close"]


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize(
    ("prefix_len", "budget", "num_sink", "num_recent"),
    [(1, 1, 0, 0), (17, 5, 2, 1), (300, 299, 0, 3), (300, 64, 20, 33), (300, 400, 9, 9), (5000, 700, 16, 64)],
)
def test_equals_the_reference_by_score(
    block_size: int, prefix_len: int, budget: int, num_sink: int, num_recent: int
) -> None:
    num_blocks = -(-prefix_len // block_size)
    scores = kinds("plain", (2, num_blocks + -num_blocks % 4), prefix_len).to(DEVICE)
    runner = TopKSelection(1, 2, prefix_len, 2 * min(budget, prefix_len) + 3, DEVICE, max_block_size=block_size)
    group = SelectionGroup(prefix_len, budget, 0, scores.shape[1], block_size, num_sink, num_recent)
    (group,) = pack_lists([group], 2)
    lists = select(runner, [group], scores.flatten())
    mine = Selection(group.lists_in(lists.positions, 2).contiguous(), lists.counts[0])
    theirs = top_k_selection(scores[:, :num_blocks], budget, num_sink, num_recent, block_size, prefix_len)
    mine.check_integrity(prefix_len)
    assert torch.equal(mine.counts, theirs.counts)
    windows = [*range(num_sink), *range(prefix_len - num_recent, prefix_len)]
    for head in range(2):
        assert set(windows) <= set(mine.positions[head].tolist())
        taken = [scores[head, s.positions[head].long() // block_size].sort().values for s in (mine, theirs)]
        assert torch.equal(*taken)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_programs", [2, 9])
def test_every_kind_of_score(kind: str, num_programs: int) -> None:
    runner = TopKSelection(1, 2, ROW, 800, DEVICE, config=SMALL, num_programs=num_programs, max_block_size=1)
    scores = kinds(kind, (2 * ROW,), 3).to(DEVICE)
    group = SelectionGroup(1301, 333, score_stride=ROW, num_sink=5, num_recent=40, list_begin=9, head_stride=334)
    check(select(runner, [group], scores), [group], scores, runner)


@st.composite
def cases(draw: Any) -> tuple[str, int, SelectionGroup]:
    prefix_len = draw(st.integers(0, 700))
    budget = draw(st.integers(1, 720))
    num_sink = draw(st.integers(0, min(budget, 40)))
    num_recent = draw(st.integers(0, min(budget - num_sink, 70)))
    sizes = tuple(draw(st.sampled_from([1, 2, 16, 32, 64])) for _ in range(2))
    begin, stride = draw(st.integers(0, 40)), 720 + draw(st.integers(0, 9))
    group = SelectionGroup(
        prefix_len, budget, 3, 701, sizes, num_sink, num_recent, list_begin=begin, head_stride=stride
    )
    return draw(st.sampled_from(KINDS)), draw(st.integers(1, 8)), group


@settings(max_examples=examples(25))
@given(cases())
def test_the_positions_of_a_full_sort(case: tuple[str, int, SelectionGroup]) -> None:
    kind, num_programs, group = case
    scores = kinds(kind, (1500,), group.budget).to(DEVICE)
    runner = TopKSelection(1, 2, 700, 1500, DEVICE, config=SMALL, num_programs=num_programs)
    check(select(runner, [group], scores), [group], scores, runner)


BATCH = pack_lists(
    [
        SelectionGroup(1300, 77, 0, ROW, (16, 64, 1), 4, 20, slot_start=9),
        SelectionGroup(0, 5),
        SelectionGroup(513, 600, 3 * ROW, 520, (1, 1, 32), slot_start=1400),
        SelectionGroup(258, 100, 5 * ROW, 300, 2, 0, 100, slot_start=2000),
    ],
    3,
)
"""Four groups and a place that no group takes: ragged blocks, an empty prefix, a budget above the prefix."""


def batch_runner(**options: Any) -> TopKSelection:
    return TopKSelection(5, 3, 1300, 3 * (80 + 516 + 100), DEVICE, config=SMALL, num_programs=12, **options)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("key_bits", [16, 24, 32])
def test_groups_of_different_sizes_and_their_slots(key_bits: int, dtype: torch.dtype) -> None:
    runner = batch_runner(key_bits=key_bits)
    gen = torch.Generator().manual_seed(key_bits)
    scores = torch.randn(8 * ROW, generator=gen)
    if key_bits == 16:
        scores = (scores - 3.0) * 4.0  # of both signs, and some below -44 after the next line
        scores[::7], scores[::11], scores[::13] = -60.0, torch.nan, -torch.inf
    table = torch.randperm(4000, generator=gen).to(DEVICE, dtype)
    lists = select(runner, BATCH, scores.to(DEVICE), slot_table=table)
    check(lists, BATCH, scores, runner, key_bits)
    assert lists.slots is not None
    for group in BATCH:
        positions = group.lists_in(lists.positions, 3).long()
        assert torch.equal(group.lists_in(lists.slots, 3).long(), table[group.slot_start + positions].long())
    assert torch.equal(lists.slots == POISON, lists.positions == POISON)


def test_log_keys_tell_probabilities_apart() -> None:
    scores = torch.tensor([0.0, -0.001, -0.002, -43.9, -44.0, -80.0, -torch.inf, torch.nan, 5.0, -1e30, -22.0, -21.99])
    runner = TopKSelection(1, 1, 12, 12, DEVICE, key_bits=16, max_block_size=1, config=TopKConfig(32, 1))
    taken = []
    for budget in range(1, 12):
        lists = select(runner, [SelectionGroup(12, budget, score_stride=12)], scores.to(DEVICE))
        taken.append(set(lists.positions[:budget].tolist()))
    order = [next(iter(more - less)) for less, more in zip([set(), *taken], taken, strict=False)]
    # 5.0 ties with 0.0, and all below -44 tie; among ties the most recent comes first, and what has no score last.
    assert order == [8, 0, 1, 2, 11, 10, 3, 9, 5, 4, 7]


def test_a_shorter_plan_leaves_nothing_behind() -> None:
    runner = batch_runner()
    scores = kinds("plain", (8 * ROW,), 1).to(DEVICE)
    shorter = pack_lists([SelectionGroup(40, 8, 0, ROW), SelectionGroup(300, 9, 50, 400, 4)], 3)
    for groups in (BATCH, shorter, [], BATCH[2:]):
        check(select(runner, groups, scores), groups, scores, runner)


@pytest.mark.parametrize(("num_programs", "key_bits"), [(1, 16), (7, 24), pytest.param(50, 32, marks=pytest.mark.full)])
def test_chunks_do_not_matter(num_programs: int, key_bits: int) -> None:
    """Up to 41 chunks: more than are added up at once."""
    scores = -kinds("ties", (ROW,), 5).abs()
    one = TopKSelection(1, 1, ROW, 400, DEVICE, key_bits=key_bits, config=TopKConfig(32, 1), num_programs=num_programs)
    group = SelectionGroup(1301, 400, num_sink=33, num_recent=65)
    check(select(one, [group], scores.to(DEVICE)), [group], scores, one, key_bits)


def test_blocks_of_a_long_prefix() -> None:
    """Of 131,072 tokens: windows that cut blocks, a budget that cuts one, blocks of two sizes."""
    runner = TopKSelection(1, 2, 131072, 14000, DEVICE, max_block_size=64)
    scores = kinds("ties", (2 * 8192,), 7).to(DEVICE)
    group = SelectionGroup(131_051, 6553, 0, 8192, (16, 64), 21, 70, head_stride=6553)
    check(select(runner, [group], scores), [group], scores, runner)


def test_default_config_fills_the_device() -> None:
    assert default_config(131072, 33) == TopKConfig(4096, 8)
    assert default_config(131072, 264) == TopKConfig(2048, 4)
    assert default_config(100, 33) == TopKConfig(512, 4)
    assert TopKConfig(4096, 8).max_registers == 128
    assert TopKConfig(512, 1).max_registers == 255


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefix_len": -1, "budget": 1}, "prefix_len >= 0"),
        ({"prefix_len": 1, "budget": 0}, "budget >= 1"),
        ({"prefix_len": 1, "budget": 1, "score_start": -1}, "score_start >= 0"),
        ({"prefix_len": 1, "budget": 1, "slot_start": -1}, "slot_start >= 0"),
        ({"prefix_len": 1, "budget": 1, "list_begin": -1}, "list_begin >= 0"),
        ({"prefix_len": 1, "budget": 1, "head_stride": -1}, "head_stride >= 0"),
        ({"prefix_len": 1, "budget": 1, "block_size": (16, 0)}, "block_size >= 1"),
        ({"prefix_len": 1, "budget": 1, "block_size": ()}, "block_size >= 1"),
        ({"prefix_len": 1, "budget": 1, "block_size": 3}, "power of 2, got 3"),
        ({"prefix_len": 10, "budget": 5, "num_sink": 3, "num_recent": 3}, "shrink the windows"),
    ],
)
def test_groups_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelectionGroup(**arguments)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([SelectionGroup(1, 1, head_stride=1)] * 3, "at most 2 groups, got 3"),
        (
            [SelectionGroup(101, 1, head_stride=1)],
            "at most 100 tokens of a prefix and 50 entries of lists, got 101 and 2",
        ),
        ([SelectionGroup(100, 51, list_begin=3, head_stride=52)], "got 100 and 106"),
        (
            [SelectionGroup(100, 50, head_stride=49)],
            "head_stride of at least 50, the tokens selected, got 49; use pack",
        ),
        ([SelectionGroup(1, 1, block_size=(1,), head_stride=1)], "each of 2 KV heads, got 1"),
        ([SelectionGroup(1, 1, block_size=128, head_stride=1)], "blocks of at most 1 tokens, got 128"),
        ([SelectionGroup(1, 1, score_start=2, head_stride=1)], "multiples of 4, got 2 and 0"),
        ([SelectionGroup(1, 1, score_stride=3, head_stride=1)], "multiples of 4, got 0 and 3"),
    ],
)
def test_plans_that_do_not_fit(groups: list[SelectionGroup], message: str) -> None:
    runner = TopKSelection(2, 2, 100, 50, DEVICE, max_block_size=1)
    with pytest.raises(ValueError, match=message):
        runner.plan(groups)


def test_runs_that_do_not_fit() -> None:
    runner = TopKSelection(2, 2, 100, 50, DEVICE, max_block_size=1)
    runner.plan([SelectionGroup(99, 9, 4, 100, slot_start=7, head_stride=12)])
    lists, table = runner.new_lists(with_slots=True), torch.zeros(200, dtype=torch.int32, device=DEVICE)
    scores = torch.zeros(204, device=DEVICE)
    bare = replace(lists, slots=None)
    for arguments, message in (
        ((scores.half(), bare), "scores .arena. fp32 contiguous, got .204,. torch.float16"),
        ((scores[:203], bare), "arena of 204 scores, got 203"),
        ((scores, replace(bare, positions=lists.positions[:20])), "expected positions .21,. int32"),
        ((scores, replace(bare, counts=lists.counts.long())), "expected counts .2, 2. int32"),
        ((scores, lists), "both or none"),
        ((scores, bare, table), "both or none"),
        ((scores, lists, table.float()), "expected slot_table .arena. int32 or int64"),
        ((scores, lists, table[:105]), "slot_table of 106 entries, got 105"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.run(*arguments[:2], slot_table=arguments[2] if len(arguments) > 2 else None)
    runner.run(scores, lists, slot_table=table[:106])


def test_runners_that_cannot_be() -> None:
    for arguments in ((0, 1, 1, 1), (1, 1, 2**30, 1)):
        with pytest.raises(ValueError, match="of at least 1 and max_prefix_len"):
            TopKSelection(*arguments, DEVICE)
    with pytest.raises(ValueError, match="key_bits 16, 24 or 32, got 8"):
        TopKSelection(1, 1, 1, 1, DEVICE, key_bits=8)
    for tile in (16, 48, 32768):
        with pytest.raises(ValueError, match=f"from 32 .32 a warp. to 16384, got {tile}"):
            TopKConfig(tile, 1)


def test_the_references_are_imported_without_triton() -> None:
    source = Path(__file__).parents[3] / "kernels"
    names = ("block_scores", "csa_scores", "grouped_attention", "low_bit", "pooling", "top_k_selection")
    code = f"import sys, {', '.join(f'prefix_kernels.{n}' for n in names)}; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=source)


#: Places in a list of candidates are chosen as tokens are, then named by their positions.
HEADS, WIDTH = 2, 600
LISTED = pack_lists(
    [
        SelectionGroup(3000, 77, 0, WIDTH, 1, 4, 20, slot_start=9, num_candidates=599),
        SelectionGroup(40, 90, 2 * WIDTH, WIDTH, (1, 1), 4, 20, slot_start=3100, num_candidates=40),
        SelectionGroup(2000, 300, 4 * WIDTH, WIDTH, 1, 0, 33, slot_start=3200, num_candidates=300),
        SelectionGroup(0, 1, num_candidates=0),
    ],
    HEADS,
)
"""Few of many, a prefix below the budget, all candidates, an empty prefix; the fifth place is no group's."""


def listed_runner(**options: Any) -> TopKSelection:
    return TopKSelection(5, HEADS, WIDTH, HEADS * 420, DEVICE, config=TopKConfig(64, 1), num_programs=14, **options)


def listed(groups: list[SelectionGroup], width: int = WIDTH) -> torch.Tensor:
    """int32 [5, HEADS, width]: other ascending positions for every KV head, windows at the ends."""
    gen = torch.Generator().manual_seed(len(groups))
    table = torch.full((5, HEADS, width), POISON, dtype=torch.int32)
    for g, group in enumerate(groups):
        for head in range(HEADS):
            rank = torch.rand(group.prefix_len, generator=gen)
            rank[: group.num_sink], rank[group.prefix_len - group.num_recent :] = 2.0, 2.0
            chosen = rank.topk(group.num_scored).indices.sort().values
            table[g, head, : group.num_scored] = chosen.int()
    return table.to(DEVICE)


@pytest.mark.parametrize("key_bits", [16, 32])
@pytest.mark.parametrize("strided", [False, True])
def test_places_in_a_list_become_its_positions_and_their_slots(key_bits: int, strided: bool) -> None:
    runner = listed_runner(key_bits=key_bits)
    scores = -torch.rand(6 * WIDTH, generator=torch.Generator().manual_seed(1)).mul(30.0).round().to(DEVICE)
    candidates = listed(LISTED, 2 * WIDTH)[..., :WIDTH] if strided else listed(LISTED)
    table = torch.randperm(6000, generator=torch.Generator().manual_seed(2)).int().to(DEVICE)
    places, lists = runner.new_lists(), runner.new_lists(with_slots=True)
    runner.plan([replace(group, prefix_len=group.num_scored, num_candidates=None) for group in LISTED])
    runner.run(scores, places)
    runner.plan(LISTED)
    runner.run(scores, lists, candidates=candidates, slot_table=table)
    assert lists.slots is not None
    assert torch.equal(lists.counts, places.counts)
    assert lists.counts[:, 0].tolist() == [77, 40, 300, 0, 0]
    for g, group in enumerate(LISTED):
        wanted = candidates[g].gather(1, group.lists_in(places.positions, HEADS).long())
        assert torch.equal(group.lists_in(lists.positions, HEADS), wanted)
        assert torch.equal(group.lists_in(lists.slots, HEADS), table[group.slot_start + wanted.long()])
        windows = [*range(group.num_sink), *range(group.prefix_len - group.num_recent, group.prefix_len)]
        assert set(windows) & set(range(group.prefix_len)) <= set(wanted[0].tolist())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_candidates": 6}, "expected num_candidates from 7 .the windows. to 100 .the prefix. .*, got 6 and 1"),
        ({"num_candidates": 101}, "got 101 and 1"),
        ({"num_candidates": 50, "block_size": 2}, "got 50 and 2"),
        ({"num_candidates": 50, "block_size": (1, 16)}, "got 50 and .1, 16."),
    ],
)
def test_lists_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelectionGroup(100, 20, num_sink=3, num_recent=4, **arguments)


def test_candidates_belong_to_a_plan_that_names_them() -> None:
    runner, scores, candidates = listed_runner(), torch.zeros(6 * WIDTH, device=DEVICE), listed(LISTED)
    lists = runner.new_lists()
    runner.run(scores, lists, candidates=candidates)  # no plan yet, as before a capture
    runner.run(scores, lists)
    with pytest.raises(ValueError, match=r"expected num_candidates of all groups or of none, got .599, None."):
        runner.plan([LISTED[0], SelectionGroup(40, 9, head_stride=12)])
    runner.plan(LISTED)
    with pytest.raises(ValueError, match="expected candidates and groups with num_candidates both or none"):
        runner.run(scores, lists)
    for wrong in (candidates[:4], candidates.long(), candidates[..., :598], candidates[0], candidates[..., ::2]):
        with pytest.raises(ValueError, match=r"expected candidates .5, 2, 599. or longer, int32 with adjacent"):
            runner.run(scores, lists, candidates=wrong)
    own = replace(lists, positions=candidates.flatten())
    with pytest.raises(ValueError, match="expected candidates apart from the lists that are written"):
        runner.run(scores, own, candidates=candidates)
    runner.plan([SelectionGroup(40, 9, 0, WIDTH, head_stride=12)])
    with pytest.raises(ValueError, match="both or none of them, got one; plan for what is handed in"):
        runner.run(scores, lists, candidates=candidates)
