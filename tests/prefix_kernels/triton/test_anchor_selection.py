"""Selection in two launches (three, where no program can wait): scores of the torch reference, lists of a full sort."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prefix_kernels.anchor_selection import AnchorConfig, AnchorSelection, Form, default_config
from prefix_kernels.anchor_selection.kernels import list_kernel
from prefix_kernels.anchor_selection.runner import make_items
from prefix_kernels.launching import recording
from prefix_kernels.low_bit import dequantize, quantize
from prefix_kernels.pooled_scores import ScoredGroup, ScoreInputs, ScoreShape
from prefix_kernels.pooling import HEADROOM, Pooling, pool_scores
from prefix_kernels.top_k_selection import SelectionGroup, pack_lists, rank_by_keys, top_k_selection
from prefix_kernels.types import SelectedLists
from tests.examples import examples
from tests.prefix_kernels.triton.conftest import INTERPRETED

KV_HEADS, GQA, DIM = 2, 4, 64
HEADS = KV_HEADS * GQA
FORMS = [Form.UNFUSED] if INTERPRETED else [Form.UNFUSED, Form.FUSED]
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
#: Largest error of a log-probability, natural log, where queries times steps are fp32, and where they are fp16.
FP32_LIMIT, FP16_LIMIT = 1e-4, 1e-2
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
        keys: of each group, [KV_HEADS, prefix_len, head_dim] that the codes stand for, 0 on channels that they do not
            keep.
        room: entries of the arena of scores.
    """

    shape: ScoreShape
    q: Tensor
    scored: list[ScoredGroup]
    selected: list[SelectionGroup]
    keys: list[Tensor]
    room: int

    def part(self, groups: slice) -> Problem:
        """The same with some of the groups."""
        return replace(self, scored=self.scored[groups], selected=self.selected[groups], keys=self.keys[groups])

    def wanted(self, group: int) -> Tensor:
        """[KV_HEADS, prefix_len]: scores of the reference."""
        q = self.q[list(self.scored[group].rows)].float().unflatten(1, (KV_HEADS, GQA)).transpose(0, 1)
        raw = (q.flatten(1, 2) @ self.keys[group].transpose(1, 2)).unflatten(1, (-1, GQA))
        return pool_scores(raw, SM_SCALE, self.shape.pooling, sum_every=self.shape.sum_every)


def problem(
    device: torch.device,
    sizes: list[tuple[tuple[int, ...], int, int]],
    *,
    bits: int = 4,
    pooling: Pooling = Pooling.MAX,
    dtype: torch.dtype = torch.float32,
    same: bool = False,
    windows: tuple[int, int] = (5, 20),
    dim: int = DIM,
    channels: int = DIM,
    sum_every: int = 1,
) -> Problem:
    """Groups of (rows, prefix_len, budget). With `same` all tokens are one and the same, so all of them tie."""
    gen = torch.Generator().manual_seed(len(sizes) + sizes[0][1])
    batch = sum(len(rows) for rows, _, _ in sizes)
    q = torch.randn(batch, HEADS, dim, generator=gen).to(device, dtype)
    scored, selected, keys = [], [], []
    at = table_at = 0
    for rows, length, budget in sizes:
        values = torch.randn(KV_HEADS, 1 if same else length, channels, generator=gen) + 0.7
        codes = quantize(values.expand(-1, length, -1).to(device), bits)
        order = torch.rand(KV_HEADS, dim, generator=gen).argsort(dim=1)
        kept = order[:, :channels].sort(dim=1).values.to(device)
        listed = kept.short() if channels < dim else None
        full = torch.zeros(KV_HEADS, length, dim, device=device)
        keys.append(full.scatter_(2, kept[:, None].expand(-1, length, -1), dequantize(codes)))
        stride = -(-length // 4) * 4
        firsts = tuple(head * length for head in range(KV_HEADS))
        begins = tuple(at + head * stride for head in range(KV_HEADS))
        scored.append(ScoredGroup(rows, length, firsts, begins, (listed, codes.packed, codes.scale)))
        sink, recent = windows if budget >= sum(windows) else (0, 0)
        selected.append(SelectionGroup(length, budget, sink, recent, slot_start=table_at))
        at += KV_HEADS * stride
        table_at += length
    shape = ScoreShape(HEADS, KV_HEADS, channels, bits, channels < dim, pooling, sum_every)
    return Problem(shape, q, scored, pack_lists(selected, KV_HEADS), keys, at + 4)


def runner(
    made: Problem, form: Form, num_chunks: int = 3, max_groups: int = 4, config: AnchorConfig = CONFIG
) -> AnchorSelection:
    most = max(5000, *(group.prefix_len for group in made.selected))
    batch, programs = max(8, made.q.shape[0]), num_chunks * KV_HEADS
    return AnchorSelection(
        made.shape, batch, max_groups, most, KV_HEADS * 1400, config, made.q.device, form=form, num_programs=programs
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
    one.run(ScoreInputs(made.q, SM_SCALE, raw), scores, lists, slot_table=slot_table(made))
    return scores, lists


def slot_table(made: Problem) -> Tensor:
    """Of all groups."""
    size = max((group.slot_start + group.prefix_len for group in made.selected), default=0)
    return torch.randperm(size, generator=torch.Generator().manual_seed(9)).to(made.q.device, torch.int32)


def keys_of(scores: Tensor) -> Tensor:
    """int64 keys of 11 bits, written otherwise than in the kernel: -inf and NaN 0."""
    steps = torch.tensor(2045.0 / 44.0, dtype=torch.float32, device=scores.device)
    place = (scores.clamp(-44.0, 0.0).nan_to_num() - -44.0) * steps
    return torch.where(scores > -torch.inf, place.long() + 1, 0)


def best(scores: Tensor, group: SelectionGroup) -> list[int]:
    """The positions of one KV head: sorted whole by window, then key, then position, the highest first."""
    keys, recent = keys_of(scores).tolist(), group.prefix_len - group.num_recent
    order = sorted(range(group.prefix_len), key=lambda t: (t < group.num_sink or t >= recent, keys[t], t), reverse=True)
    return sorted(order[: group.count])


def check(made: Problem, scores: Tensor, lists: SelectedLists) -> None:
    """Scores of the reference, none of a prefix that is attended whole; the best of these very scores."""
    limit = FP32_LIMIT if made.q.dtype is torch.float32 else FP16_LIMIT
    written, table = torch.zeros_like(scores, dtype=torch.bool), slot_table(made)
    groups = len(made.selected)
    assert lists.counts[:groups].tolist() == [[group.count] * KV_HEADS for group in made.selected]
    assert bool((lists.counts[groups:] == POISON).all())
    assert lists.slots is not None
    for g, (of, group) in enumerate(zip(made.scored, made.selected, strict=True)):
        positions = group.lists_in(lists.positions, KV_HEADS)
        slots = group.lists_in(lists.slots, KV_HEADS)
        assert torch.equal(slots, table[group.slot_start + positions.long()])
        wanted = made.wanted(g)
        for head, begin in enumerate(of.score_begins):
            own = scores[begin : begin + group.prefix_len]
            if group.budget < group.prefix_len:
                torch.testing.assert_close(own, wanted[head], atol=limit, rtol=1e-5)
                written[begin : begin + group.prefix_len] = True
            assert positions[head].tolist() == best(own, group), (g, head)
    assert bool((scores.isnan() | written).all()), "nothing else"
    for buffer in (lists.positions, lists.slots):
        assert int((buffer != POISON).sum()) == KV_HEADS * sum(group.count for group in made.selected), "nothing else"


SHORT = [((0, 3), 330, 61), ((2,), 601, 151), ((1,), 90, 90)]
"""Rows, prefix and budget of groups: the longest is not the first, and the last is attended whole."""


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("length", [65, pytest.param(700, marks=pytest.mark.full), 1301])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens(dtype: torch.dtype, length: int, form: Form, device: torch.device) -> None:
    made = problem(device, [((0, 1, 2), length, length // 3)], dtype=dtype)
    check(made, *select(runner(made, form), made))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("rows", [1, 3, 5, 11])
def test_codes_on_some_channels(
    rows: int, bits: int, pooling: Pooling, dtype: torch.dtype, form: Form, device: torch.device
) -> None:
    """Of 5 requests and more the rows are several tiles."""
    sizes = [(tuple(range(rows)), 203, 60)]
    made = problem(device, sizes, bits=bits, pooling=pooling, dtype=dtype, channels=48)
    check(made, *select(runner(made, form), made))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_one_and_a_half_blocks(dtype: torch.dtype, form: Form, device: torch.device) -> None:
    """96 channels as 64 and 32: what 128 with padding gives, up to the order of sums."""
    made = problem(device, [((0, 1, 2), 203, 60)], dtype=dtype, dim=128, channels=96)
    found = []
    for halves in (False, True):
        one = runner(made, form, config=replace(CONFIG, halves=halves))
        with recording() as kept:
            select(one, made)
        assert {launch.arguments["BLOCK_K"] for launch in kept.launches[:-1]} == {16 if halves else 32}
        found.append(select(one, made))
        check(made, *found[-1])
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-4, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize(
    ("length", "sum_every", "num_chunks"),
    [(4095, 16, 3), (4099, 16, 3), (6147, 2, 2), pytest.param(8195, 16, 40, marks=pytest.mark.full)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_a_sample(
    dtype: torch.dtype,
    length: int,
    sum_every: int,
    num_chunks: int,
    pooling: Pooling,
    form: Form,
    device: torch.device,
) -> None:
    """Of the first group every second, third or fourth token is summed, of the others, which are short, all. Some
    chunks have none."""
    sizes = [((0, 3), length, 333), ((2,), 601, 151), ((1,), 90, 90)]
    made = problem(device, sizes, pooling=pooling, dtype=dtype, sum_every=sum_every)
    one = runner(made, form, num_chunks)
    scores, lists = select(one, made)
    check(made, scores, lists)
    all_summed = replace(made, shape=replace(made.shape, sum_every=1)).wanted(0)[0]
    far = float((all_summed - HEADROOM - scores[:length]).abs().max())
    assert (far > 2 * FP16_LIMIT) == (length > 4095)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_sums_of_a_sample_of_a_long_prefix(form: Form, device: torch.device) -> None:
    """Stretches are numbered beyond what times 40,503 fits into 31 bits."""
    made = problem(device, [((0,), 120_000, 40)], sum_every=2, dim=16, channels=16)
    one = runner(made, form, config=AnchorConfig(block_n=1024 if INTERPRETED else 64))
    check(made, *select(one, made))


def test_sums_of_a_sample_keep_no_raw_scores(device: torch.device) -> None:
    for every in (0, 65):
        with pytest.raises(ValueError, match=f"1 to 64, got {every}"):
            AnchorSelection(ScoreShape(8, 2, 32, sum_every=every), 1, 1, 100, 100, CONFIG, device)
    made = problem(device, [((0,), 4100, 40)], sum_every=2)
    with pytest.raises(ValueError, match=r"sum_every 2.*leave it out"):
        select(runner(made, FORMS[0], max_groups=1), made, raw=torch.zeros(1, KV_HEADS, GQA, 4100, device=device))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_windows_that_take_the_whole_budget(form: Form, device: torch.device) -> None:
    """No key outside of them is as high as the threshold, the highest one there is."""
    made = problem(device, [((0, 1), 1301, 25)])
    assert made.selected[0].num_sink + made.selected[0].num_recent == 25
    check(made, *select(runner(made, form), made))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("windows", [(0, 0), (16, 0), (5, 20), (150, 60)], ids=str)
def test_where_all_tie_the_most_recent_are_chosen(windows: tuple[int, int], form: Form, device: torch.device) -> None:
    made = problem(device, [((0, 1), 1301, 211)], windows=windows, same=True)
    scores, lists = select(runner(made, form), made)
    check(made, scores, lists)
    sink, last = windows[0], 211 - windows[0]
    assert made.selected[0].lists_in(lists.positions, KV_HEADS)[1].tolist() == [*range(sink), *range(1301 - last, 1301)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("pooling", list(Pooling))
def test_shares_that_keys_do_not_tell_apart(pooling: Pooling, form: Form, device: torch.device) -> None:
    """Beyond e^-44 of a row's attention: of such tokens the most recent come first."""
    made = problem(device, [((0, 1), 700, 300)], pooling=pooling)
    made.q *= 30
    scores, lists = select(runner(made, form), made)
    assert int((scores[:700] < -44).sum()) > 500
    for head, begin in enumerate(made.scored[0].score_begins):
        own = scores[begin : begin + 700]
        torch.testing.assert_close(own, made.wanted(0)[head], atol=1e-2, rtol=1e-4)
        assert made.selected[0].lists_in(lists.positions, KV_HEADS)[head].tolist() == best(own, made.selected[0])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("num_chunks", [2, 3])
def test_a_score_that_is_no_number_leaves_no_share_to_its_head(
    num_chunks: int, form: Form, device: torch.device
) -> None:
    """To none of its tokens, however they are cut: a sum without that score would make shares of the rest."""
    made = problem(device, [((0, 1), 170, 60)], pooling=Pooling.MEAN)
    # Times the highest codes of a channel that is beyond fp32, times low ones it is not.
    made.q[0, 0, 7] = 3e38
    scores, lists = select(runner(made, form, num_chunks), made)
    assert not scores[:170].isfinite().any()
    group = made.selected[0]
    assert group.lists_in(lists.positions, KV_HEADS)[0].tolist() == best(torch.full((170,), torch.nan), group)
    own = scores[made.scored[0].score_begins[1] :][:170]
    torch.testing.assert_close(own, made.wanted(0)[1], atol=FP32_LIMIT, rtol=1e-5)


@st.composite
def cases(draw: Any) -> tuple[int, int, int, tuple[int, int], int, bool]:
    length = draw(st.integers(1, 700))
    budget = draw(st.integers(1, 720))
    sink = draw(st.integers(0, min(budget, 40)))
    recent = draw(st.integers(0, min(budget - sink, 70)))
    return length, budget, draw(st.integers(1, 8)), (sink, recent), draw(st.sampled_from([2, 4])), draw(st.booleans())


@settings(max_examples=examples(25, 8))
@given(cases())
def test_the_positions_of_a_full_sort(case: tuple[int, int, int, tuple[int, int], int, bool]) -> None:
    length, budget, num_chunks, windows, bits, same = case
    device = torch.device("cpu" if INTERPRETED else "cuda")
    made = problem(device, [((0,), length, budget)], windows=windows, bits=bits, same=same)
    scores, lists = select(runner(made, Form.UNFUSED, num_chunks), made)
    check(made, scores, lists)
    group = made.selected[0]
    if budget < length:
        own = torch.stack([scores[begin : begin + length] for begin in made.scored[0].score_begins])
        theirs = top_k_selection(rank_by_keys(own), budget, *windows)
        assert torch.equal(group.lists_in(lists.positions, KV_HEADS), theirs.positions)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="4 bits", marks=pytest.mark.full),
        pytest.param({"bits": 2, "pooling": Pooling.MEAN}, id="2 bits, mean"),
        pytest.param({"same": True}, id="all tie"),
    ],
)
@pytest.mark.parametrize("num_chunks", [2, pytest.param(9, marks=pytest.mark.full)])
def test_groups_share_the_programs(num_chunks: int, options: dict[str, Any], form: Form, device: torch.device) -> None:
    """Fewer programs than groups, as many, and more; a place that no group takes; plans one after another."""
    made = problem(device, SHORT, **options)
    one = runner(made, form, num_chunks)
    for part in (slice(0, 3), slice(2, 3), slice(0, 0), slice(1, 3)):
        some = made.part(part)
        check(some, *select(one, some))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_group_is_scored_beside_others_as_alone(form: Form, device: torch.device) -> None:
    """Bit for bit, cut into as many chunks."""
    made = problem(device, SHORT)
    scores, lists = select(runner(made, form, 9), made)
    for g, share in {item[0]: item[2] for item in make_items(made.selected, 9)}.items():
        alone, own = select(runner(made, form, share), some := made.part(slice(g, g + 1)))
        for begin in some.scored[0].score_begins:
            there = slice(begin, begin + some.scored[0].count)
            assert torch.equal(scores[there].view(torch.int32), alone[there].view(torch.int32))
        listed = [some.selected[0].lists_in(of.positions, KV_HEADS) for of in (lists, own)]
        assert torch.equal(*listed)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("rows", [1, 3])
def test_raw_scores_of_few_rows_are_kept(rows: int, pooling: Pooling, form: Form, device: torch.device) -> None:
    made = problem(device, [(tuple(range(rows)), 1301, 300)], pooling=pooling)
    raw = torch.full((1, KV_HEADS, 1301, rows * GQA), torch.nan, device=device).transpose(2, 3)
    one = runner(made, form, max_groups=1)
    check(made, *select(one, made, raw=raw))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_more_rows_than_a_tile(form: Form, device: torch.device) -> None:
    made = problem(device, [((5, 0, 3, 2, 4, 6, 1), 500, 99)])
    one = runner(made, form)
    check(made, *select(one, made))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_many_more_groups_than_programs(form: Form, device: torch.device) -> None:
    """Lists of all lengths, one behind the other, where programs take groups in turns."""
    made = problem(device, [((n,), 40 + 11 * n, 7 + 5 * n) for n in range(20)], windows=(2, 4))
    one = runner(made, form, max_groups=24)
    check(made, *select(one, made))
    some = made.part(slice(4, 7))
    check(some, *select(one, some))


def test_a_last_few_chunks_are_not_worth_a_round_of_their_own(device: torch.device) -> None:
    """What programs read of all chunks they read 32 at a time."""
    made = problem(device, SHORT)
    runners = [runner(made, Form.UNFUSED, chunks) for chunks in (16, 31, 33, 36, 37, 49, 66)]
    assert [one.programs_of_a_head for one in runners] == [16, 31, 32, 32, 37, 49, 64]
    with recording() as kept:
        for one in runners:
            select(one, made)
    scoring = [one for one in kept.launches if "FIRST_PHASE" in one.arguments]
    assert {one.arguments["BLOCK_CHUNKS"] for one in scoring} == {32}, "sums have one order"


def test_one_launch_or_one_for_each_phase(device: torch.device) -> None:
    made = problem(device, SHORT)
    with recording() as kept:
        select(runner(made, Form.UNFUSED), made)
    *scoring, listing = kept.launches
    assert [(one.arguments["FIRST_PHASE"], one.arguments["LAST_PHASE"]) for one in scoring] == [(1, 1), (2, 2)]
    assert listing.kernel is list_kernel
    assert all("launch_cooperative_grid" not in one.options for one in kept.launches)
    assert all(one.grid == (3, KV_HEADS) for one in kept.launches)


@pytest.mark.skipif(not INTERPRETED, reason="what Triton's interpreter cannot do")
def test_the_interpreter_refuses_programs_that_wait(device: torch.device) -> None:
    made = problem(device, SHORT)
    with pytest.raises(ValueError, match=r"expected Form.UNFUSED in Triton's interpreter"):
        select(runner(made, Form.FUSED), made)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((0, 1, 1, 1), {}, "list_entries of at least 1"),
        ((1, 1, 2**30, 1), {}, "max_prefix_len < 2.30, got"),
        ((1, 1, 1, 1), {"bits": 3}, "bits of 2, 4, 8 or 16"),
        ((1, 1, 1, 1), {"bits": 32}, "bits of 2, 4, 8 or 16"),
        ((1, 1, 1, 1), {"num_kv_heads": 3}, "num_qo_heads as a multiple"),
        ((1, 1, 1, 1), {"channels": 18}, "channels as a multiple of 4"),
    ],
)
def test_runners_that_cannot_be(
    sizes: tuple[int, int, int, int], options: dict[str, Any], message: str, device: torch.device
) -> None:
    with pytest.raises(ValueError, match=message):
        AnchorSelection(replace(ScoreShape(4, 1, 16), **options), *sizes, CONFIG, device)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_what_runs_where_nothing_was_tuned(num_rows: int, form: Form, device: torch.device) -> None:
    made = problem(device, [(tuple(range(num_rows)), 700, 90)], dtype=torch.float16, dim=96, channels=96)
    one = runner(made, form, num_chunks=2, config=default_config(made.shape, num_rows))
    check(made, *select(one, made))


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    made = problem(device, [((0,), 300, 30)])
    one = AnchorSelection(made.shape, 1, 1, 300, 62, CONFIG, device, form=FORMS[0])
    (scored,), (selected,) = made.scored, made.selected
    for of, group, message in (
        ([scored], [], "as many groups scored as selected, got 1 and 0"),
        ([scored], [replace(selected, prefix_len=301)], r"at most .300, 62. tokens of a prefix and entries of"),
        ([scored], [replace(selected, list_begin=1)], "got .300, 63."),
        ([scored], [replace(selected, head_stride=29)], "head_stride of at least 30, the tokens selected, got 29"),
        ([scored], [replace(selected, prefix_len=299)], "expected 299 candidates, .* got 300"),
        ([replace(scored, score_begins=(0, 301))], [selected], r"multiples of 4, got .0, 301."),
        ([scored] * 2, [selected] * 2, "at most 1 groups"),
        ([replace(scored, rows=(0, 0))], [selected], "expected at most 1 groups of 1 rows"),
        ([replace(scored, rows=(1,))], [selected], "expected at most 1 groups of 1 rows"),
        ([replace(scored, rows=(-1,))], [selected], "expected at most 1 groups of 1 rows"),
        ([replace(scored, rows=())], [selected], "expected a row or more in each group"),
        ([replace(scored, first_rows=(0,))], [selected], "for each of 2 KV heads"),
        ([replace(scored, first_rows=(1, 301))], [selected], "expected 601 rows of codes, got .*; are they of all KV"),
    ):
        with pytest.raises(ValueError, match=message):
            one.plan(of, group)
    _, codes, scale = scored.arrays
    assert codes is not None
    assert scale is not None
    shifted = torch.zeros(codes.numel() + 8, dtype=torch.uint8, device=device)[8:].view(codes.shape)
    for arrays, message in (
        ((), "expected 3 arrays"),
        ((None, None, scale), "expected codes of a group's arrays, got none"),
        ((None, codes, scale.half()), "expected scale"),
        ((None, codes.int(), scale), "expected codes"),
        ((None, shifted, scale), "at a multiple of 16 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            one.plan([replace(scored, arrays=arrays)], [selected])
    one.plan(made.scored, made.selected)
    inputs, scores = ScoreInputs(made.q, SM_SCALE), torch.zeros(600, device=device)
    room = torch.zeros(1, KV_HEADS, GQA, 300, device=device)
    lists, bare = one.new_lists(with_slots=True), one.new_lists()
    for arguments, table, message in (
        ((inputs, scores[:599], bare), None, "arena of 600 entries or more"),
        ((inputs, torch.zeros(601, device=device)[1:], bare), None, "at a multiple of 16 bytes"),
        ((inputs, scores, lists), None, "both or none"),
        ((inputs, scores, lists), slot_table(made)[:299], "a slot_table of 300 entries, got 299"),
        ((inputs, scores.half(), bare), None, "contiguous float32 arena of 600 entries or more"),
        ((replace(inputs, q=made.q[:0]), scores, bare), None, "q of 1 rows or more, as planned, got 0"),
        ((replace(inputs, q=made.q[..., :32]), scores, bare), None, "q .at most 1, 8, 64. in fp32, fp16 or bf16"),
        ((replace(inputs, q=made.q.double()), scores, bare), None, "q .at most 1, 8, 64. in fp32, fp16 or bf16"),
        ((replace(inputs, q=made.q.expand(2, -1, -1)), scores, bare), None, "q .at most 1, 8, 64. in fp32"),
        ((replace(inputs, raw=room[:, :, :3]), scores, bare), None, "raw .* of .1, 2, 4, 300. or more, as planned"),
        ((replace(inputs, raw=room[..., :299]), scores, bare), None, "raw .* of .1, 2, 4, 300. or more, as planned"),
        ((replace(inputs, arrays=torch.zeros(1, 5).int()), scores, bare), None, "arrays .1, 5. int64 contiguous, got"),
    ):
        with pytest.raises(ValueError, match=message):
            one.run(*arguments, slot_table=table)
    # Scores of tokens are read four at a time.
    odd = problem(device, [((0,), 301, 30)])
    other = AnchorSelection(odd.shape, 1, 1, 301, 62, CONFIG, device, form=FORMS[0])
    other.plan([replace(odd.scored[0], score_begins=(0, 304))], odd.selected)
    with pytest.raises(ValueError, match=r"scores .arena. of 608 entries or more"):
        other.run(ScoreInputs(odd.q, SM_SCALE), torch.zeros(605, device=device), other.new_lists())


@pytest.mark.parametrize("tile", [(8, 128, 8), (8, 128, 2), (256, 64, 4)])
def test_tiles_that_hoppers_own_kernel_has_not_are_refused(tile: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected 4 warps"):
        AnchorConfig(*tile, specialized=True)


@pytest.mark.skipif(INTERPRETED, reason="programs wait for each other on a GPU only")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_one_launch_is_four_on_a_whole_gpu(dtype: torch.dtype, device: torch.device) -> None:
    """As many programs as wait for each other in earnest, launch after launch; a replay after another plan."""
    long = [((0, 2), 70_001, 700), ((1,), 30_000, 333)]
    made = problem(device, long, dtype=dtype)
    short = made.part(slice(1, 2))
    q, table = made.q, torch.arange(100_100, device=device).int()

    def build(form: Form) -> tuple[AnchorSelection, torch.Tensor, SelectedLists]:
        one = AnchorSelection(made.shape, 8, 4, 70_001, KV_HEADS * 1036, CONFIG, device, form=form)
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
