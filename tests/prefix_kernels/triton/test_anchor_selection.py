"""Selection in two launches (three, where no program can wait): scores of the torch reference, lists of a full sort."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_kernels.anchor_selection import AnchorConfig, AnchorSelection, Form, default_config
from prefix_kernels.anchor_selection.kernels import list_kernel
from prefix_kernels.anchor_selection.programs import make_items
from prefix_kernels.launching import recording
from prefix_kernels.pooled_scores import ScoreInputs, ScoreShape
from prefix_kernels.pooling import HEADROOM, Pooling
from prefix_kernels.top_k_selection import rank_by_keys, top_k_selection
from prefix_kernels.types import CandidateForm, SelectedLists
from tests.examples import examples
from tests.prefix_kernels.selecting import (
    FP16_LIMIT,
    GQA,
    KV_HEADS,
    TokenProblem,
    check,
    lists_of,
    problem,
    select,
)
from tests.prefix_kernels.triton.conftest import DTYPES, FORMS, INTERPRETED

SM_SCALE = 0.3
CONFIG = AnchorConfig(block_n=64)


def runner(
    made: TokenProblem, form: Form, num_chunks: int = 3, max_groups: int = 4, config: AnchorConfig = CONFIG
) -> AnchorSelection:
    most = max(5000, *(group.prefix_len for group in made.selected))
    batch, programs = max(8, made.q.shape[0]), num_chunks * KV_HEADS
    return AnchorSelection(
        made.shape, batch, max_groups, most, KV_HEADS * 1400, config, made.q.device, form=form, num_programs=programs
    )


SHORT = [((0, 3), 330, 61), ((2,), 601, 151), ((1,), 90, 90)]
"""Rows, prefix and budget of groups: the longest is not the first, and the last is attended whole."""


#: By name: groups, options of the problem, and of the runner.
PLAIN: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    **{f"{length} tokens": ([((0, 1, 2), length, length // 3)], {}, {}) for length in (65, 700)},
    # No key outside of them is as high as the threshold, the highest one there is.
    "windows that take the whole budget": ([((0, 1), 1301, 25)], {"windows": (5, 20)}, {}),
    "rows of codes of four tokens": ([((0, 1, 2), 701, 233), ((3,), 90, 20)], {"row_tokens": 4}, {}),
    "more rows than a tile": ([((5, 0, 3, 2, 4, 6, 1), 500, 99)], {}, {}),
    # Stretches are numbered beyond what times 40,503 fits into 31 bits.
    "a sample of a long prefix": (
        [((0,), 120_000, 40)],
        {"sum_every": 2, "dim": 16, "channels": 16},
        {"config": AnchorConfig(block_n=1024 if INTERPRETED else 64)},
    ),
    **{
        f"the default, {rows}": (
            [(tuple(range(rows)), 700, 90)],
            {"dim": 96, "channels": 96, "dtype": torch.float16},
            {"config": default_config(ScoreShape(KV_HEADS * GQA, KV_HEADS, 96), rows), "num_chunks": 2},
        )
        for rows in (1, 8, 32)
    },
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "options", "how"), PLAIN.values(), ids=PLAIN)
def test_scores_and_lists(
    sizes: Any, options: dict[str, Any], how: dict[str, Any], dtype: torch.dtype, form: Form, device: torch.device
) -> None:
    made = problem(device, sizes, **{"dtype": dtype, **options})
    check(made, *select(runner(made, form, **how), made))


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


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize(
    ("length", "sum_every", "num_chunks"),
    [(1023, 16, 3), (1027, 16, 3), (6147, 2, 2), pytest.param(8195, 16, 40, marks=pytest.mark.full)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_a_sample(
    dtype: torch.dtype, length: int, sum_every: int, num_chunks: int, pooling: Pooling, form: Form, device: torch.device
) -> None:
    """Of the first group one token in 2 or 16 is summed, of the others, which are short, all. Some chunks have none."""
    sizes = [((0, 3), length, 333), ((2,), 601, 151), ((1,), 90, 90)]
    made = problem(device, sizes, pooling=pooling, dtype=dtype, sum_every=sum_every)
    one = runner(made, form, num_chunks)
    scores, lists = select(one, made)
    check(made, scores, lists)
    all_summed = replace(made, shape=replace(made.shape, sum_every=1)).wanted(0)[0]
    far = float((all_summed - HEADROOM - scores[:length]).abs().max())
    assert (far > 2 * FP16_LIMIT) == (length > 1023)


@pytest.mark.parametrize("entry_tokens", [1, 16])
@pytest.mark.parametrize(("length", "sum_every"), [(703, 1), (4303, 16)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_listed_candidates(
    dtype: torch.dtype, length: int, sum_every: int, entry_tokens: int, form: Form, device: torch.device
) -> None:
    """Their sums are of a sample of each list."""
    sizes = [((0, 3), length, 333), ((2,), 601, 151), ((1,), 90, 90)]
    made = problem(device, sizes, dtype=dtype, sum_every=sum_every, by_list=True, entry_tokens=entry_tokens)
    check(made, *select(runner(made, form), made))


@pytest.mark.parametrize("windows", [(0, 0), (16, 0), (5, 20), (150, 60)], ids=str)
def test_where_all_tie_the_most_recent_are_chosen(windows: tuple[int, int], form: Form, device: torch.device) -> None:
    made = problem(device, [((0, 1), 1301, 211)], windows=windows, same=True)
    scores, lists = select(runner(made, form), made)
    check(made, scores, lists)
    sink, last = windows[0], 211 - windows[0]
    assert made.selected[0].lists_in(lists.positions, KV_HEADS)[1].tolist() == [*range(sink), *range(1301 - last, 1301)]


@pytest.mark.parametrize("pooling", list(Pooling))
def test_shares_that_keys_do_not_tell_apart(pooling: Pooling, form: Form, device: torch.device) -> None:
    """Beyond e^-44 of a row's attention: of such tokens the most recent come first."""
    made = problem(device, [((0, 1), 700, 300)], pooling=pooling)
    made.q *= 30
    made.limit = 1e-2
    scores, lists = select(runner(made, form), made)
    assert int((scores[:700] < -44).sum()) > 500
    check(made, scores, lists)


@pytest.mark.parametrize("num_chunks", [2, 3])
def test_a_row_with_a_score_that_is_no_number_leaves_the_word_to_others(
    num_chunks: int, form: Form, device: torch.device
) -> None:
    """It gives no share to any token, however they are cut: a sum without that score would make shares of the rest."""
    made = problem(device, [((0, 1), 170, 60)], pooling=Pooling.MEAN)
    # Times the highest codes of a channel that is beyond fp32, times low ones it is not.
    made.q[0, 0, 7] = 3e38
    check(made, *select(runner(made, form, num_chunks), made))


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


@pytest.mark.parametrize("num_chunks", [2, pytest.param(9, marks=pytest.mark.full)])
def test_groups_share_the_programs(num_chunks: int, form: Form, device: torch.device) -> None:
    """Fewer programs than groups, and more; a place that no group takes; plans one after another."""
    made = problem(device, SHORT, bits=2, pooling=Pooling.MEAN)
    one = runner(made, form, num_chunks)
    for part in (slice(0, 3), slice(2, 3), slice(0, 0), slice(1, 3)):
        some = made.part(part)
        check(some, *select(one, some))


def test_a_group_is_scored_beside_others_as_alone(form: Form, device: torch.device) -> None:
    """Bit for bit, cut into as many chunks."""
    made = problem(device, SHORT)
    scores, lists = select(runner(made, form, 9), made)
    for g, share in {item[0]: item[2] for item in make_items(made.selected, 9).tolist()}.items():
        alone, own = select(runner(made, form, share), some := made.part(slice(g, g + 1)))
        for begin in some.scored[0].score_begins:
            there = slice(begin, begin + some.scored[0].count)
            assert torch.equal(scores[there].view(torch.int32), alone[there].view(torch.int32))
        listed = [some.selected[0].lists_in(of.positions, KV_HEADS) for of in (lists, own)]
        assert torch.equal(*listed)


def test_a_last_few_chunks_are_not_worth_a_round_of_their_own(device: torch.device) -> None:
    """What programs read of all chunks they read 32 at a time."""
    made = problem(device, SHORT)
    runners = [runner(made, Form.UNFUSED, chunks) for chunks in (16, 31, 33, 36, 37, 49, 66)]
    assert [one.programs.of_a_head for one in runners] == [16, 31, 32, 32, 37, 49, 64]
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
    if INTERPRETED:
        with pytest.raises(ValueError, match=r"expected Form.UNFUSED in Triton's interpreter"):
            select(runner(made, Form.FUSED), made)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "bits of 2, 4, 8 or 16"),
        ({"num_kv_heads": 3}, "num_qo_heads as a multiple"),
        ({"sum_every": 0}, "1 to 64, got 0"),
        ({"sum_every": 65}, "1 to 64, got 65"),
        ({"channels": 18}, "channels as a multiple of 4"),
        ({"entry_tokens": 16}, "entry_tokens of 1 for candidates of form TOKEN, got 16"),
        ({"entry_tokens": 8, "form": CandidateForm.LISTED}, "1 or 16 for candidates of form LISTED, got 8"),
    ],
)
def test_shapes_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScoreShape(**{"num_qo_heads": 4, "num_kv_heads": 1, "channels": 16, **options})


def test_sizes_that_cannot_be(device: torch.device) -> None:
    for sizes, message in (((0, 1, 1, 1), "sizes of at least 1"), ((1, 1, 2**30, 1), "max_prefix_len < 2.30 / 1, got")):
        with pytest.raises(ValueError, match=message):
            AnchorSelection(ScoreShape(4, 1, 16), *sizes, CONFIG, device)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    made = problem(device, [((0,), 301, 30)])
    one = AnchorSelection(made.shape, 1, 1, 301, 62, CONFIG, device, form=FORMS[0])
    (scored,), (selected,) = made.scored, made.selected
    _, codes, scale = scored.arrays
    shifted = torch.zeros(codes.numel() + 8, dtype=torch.uint8, device=device)[8:].view(codes.shape)
    for of, group, message in (
        ([scored], [], "as many groups scored as selected, got 1 and 0"),
        ([scored], [replace(selected, prefix_len=302)], r"at most .301, 62. tokens of a prefix and entries of"),
        ([scored], [replace(selected, list_begin=1)], "got .301, 63."),
        ([scored], [replace(selected, head_stride=29)], "head_stride of at least 30, the tokens selected, got 29"),
        ([replace(scored, score_begins=(0, 301))], [selected], r"multiples of 4, .* got .0, 301."),
        ([replace(scored, score_begins=(0,))], [selected], "for each of 2 KV heads"),
        ([scored] * 2, [selected] * 2, "at most 1 groups"),
        ([replace(scored, rows=(0, 0))], [selected], "expected at most 1 groups of 1 rows"),
        ([replace(scored, rows=(1,))], [selected], "1 to 1 each, below 1, got 1 groups"),
        ([replace(scored, rows=())], [selected], "expected at most 1 groups of 1 rows together, 1 to 1 each"),
        ([replace(scored, first_rows=(1, 302))], [selected], "expected 603 rows of codes, got .*; are they of all KV"),
        ([replace(scored, arrays=(None, codes))], [selected], "expected 3 arrays"),
        ([replace(scored, arrays=(None, None, scale))], [selected], "expected codes of a group's arrays, got none"),
        ([replace(scored, arrays=(None, codes, scale.half()))], [selected], "expected scale"),
        ([replace(scored, arrays=(None, codes.int(), scale))], [selected], "expected codes"),
        ([replace(scored, arrays=(None, shifted, scale))], [selected], "at a multiple of 16 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            one.plan(of, group)
    # Scores of tokens are read four at a time.
    inputs, scores = ScoreInputs(made.q, SM_SCALE), torch.zeros(608, device=device)
    one.plan(made.scored, made.selected)
    lists, bare = lists_of(one), lists_of(one, with_slots=False)
    for arguments, table, message in (
        ((inputs, scores[:605], bare), None, "contiguous float32 arena of 608 entries or more"),
        ((inputs, torch.zeros(609, device=device)[1:], bare), None, "at a multiple of 16 bytes"),
        ((inputs, scores.half(), bare), None, "contiguous float32 arena of 608 entries or more"),
        ((inputs, scores, lists), None, "both or none"),
        ((inputs, scores, lists), made.slot_table[:300], "a slot_table of 301 entries, got 300"),
        ((replace(inputs, q=made.q[:0]), scores, bare), None, "q .1 to 1, 8, 64. as planned"),
        ((replace(inputs, q=made.q[..., :32]), scores, bare), None, "q .1 to 1, 8, 64. as planned, in fp32"),
        ((replace(inputs, q=made.q.double()), scores, bare), None, "q .1 to 1, 8, 64. as planned, in fp32"),
        ((replace(inputs, arrays=torch.zeros(1, 5).int()), scores, bare), None, "arrays .1, 5. int64 contiguous, got"),
    ):
        with pytest.raises(ValueError, match=message):
            one.run(*arguments, slot_table=table)


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
        return one, torch.full((made.room,), torch.nan, device=device), lists_of(one)

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
