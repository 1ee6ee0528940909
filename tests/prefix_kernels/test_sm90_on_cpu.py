"""Hopper's kernel for the scores of a selection, and what lists them, compiled for sm_90, on the CPU: `ptx_machine`.

One program has all candidates of a KV head, and both phases; or some have them, one after the other in a launch for
each phase, or together in one launch where they wait for each other. Scores are compared with fp64, of queries and sums
that are rounded to whole units as the kernel rounds them; counts of keys with the keys of the very scores
that were written, and lists with these keys.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefix_kernels.anchor_selection import AnchorSelection, Form, ScoredTokens, default_config
from prefix_kernels.anchor_selection.programs import Programs
from prefix_kernels.anchor_selection.sm90_kernels import score_items_sm90_kernel
from prefix_kernels.kernels import ARRIVALS, COARSE, FINE, LOWEST_LOG, NUM_BINS
from prefix_kernels.launching import Launch, recording
from prefix_kernels.low_bit import unpack_codes
from prefix_kernels.pooled_scores import ScoreInputs
from prefix_kernels.pooling import log_shares, sum_step
from prefix_kernels.types import ALIGNED, CandidateForm, SelectionGroup, new_lists, pack_lists
from tests.prefix_kernels.compiling import compiled
from tests.prefix_kernels.ptx_machine import Machine, run_together
from tests.prefix_kernels.selecting import GQA, KV_HEADS, hopper_problem, keys_of, lists_of

CPU = torch.device("cpu")
HEAD = 1
"""The KV head whose programs run: neither its rows of codes nor its channels or scores are the first ones."""
UNTOUCHED = -12345.0
#: Largest error of a log-probability, and of the logarithm of a row's sum. Seen were 4e-6, and 6e-6 of sums of scores
#: that rise far; a GPU is allowed 1e-3 (`benchmarks/kernel_selection.py`).
LIMIT = 2e-5
MOST = 65504
"""Of a query times a step. What is more, or no number, counts as 0."""
MEETINGS = 3
"""That there have been on each counter."""


class Problem:
    """A group of all requests but the first, and codes of its candidates on permuted channels.

    Attributes:
        products: matrix instructions of the last run, of those that its tiles are multiplied with.
        counted: [NUM_BINS] by the last run: how many keys are 2,047 or more, 2,046 or more, and on.
        slots: [count], of each candidate.

    Args:
        requests: of the group.
        count: of candidates.
        beside: more requests of the batch, which are in other groups: tiles are of all.
        programs: of a KV head, in two launches; 0: one, in one.
        joined: all programs in one launch.
        size: of the queries.
        budget: candidates that are listed; 0: a few.
        windows: the first and the last candidates that are taken whatever their scores.
        options: of the index.
    """

    def __init__(
        self,
        requests: int,
        count: int,
        sum_every: int = 1,
        *,
        beside: int = 0,
        programs: int = 0,
        joined: bool = False,
        windows: tuple[int, int] = (5, 20),
        size: float = 1.0,
        budget: int = 0,
        **options: Any,
    ) -> None:
        self.budget = budget or min(sum(windows) + 15, count - 1)
        sizes = [(tuple(range(1, 1 + requests)), count, self.budget)]
        self.made = hopper_problem(torch.device("cpu"), sizes, sum_every=sum_every, windows=windows, **options)
        self.config = default_config(self.made.shape, requests + beside, specialized=True)
        self.requests, self.count, self.programs, self.windows = requests, count, programs, windows
        self.joined, self.row_tokens = joined or not programs, options.get("row_tokens", 1)
        self.products, self.counted = 0, torch.empty(0)
        self.channels, self.codes, self.scale = (array[HEAD] for array in self.made.scored[0].arrays)
        self.q = self.made.q.mul_(size)

    def launches(self) -> tuple[list[Launch], list[torch.Tensor], torch.Tensor]:
        """What scores would be launched, the index's tensors, and where the scores go."""
        made, programs = self.made, max(1, self.programs)
        form = Form.FUSED if self.joined else Form.UNFUSED
        select = AnchorSelection(
            made.shape, len(made.q), 1, self.count, 2 * self.count, self.config, made.q.device,
            form=form, num_programs=KV_HEADS * programs,
        )  # fmt: skip
        select.plan(made.scored, made.selected)
        arena = torch.full((made.room,), UNTOUCHED)
        self._lists, (group,) = lists_of(select), made.selected
        self.slots = torch.randperm(group.slot_start + self.count, dtype=torch.int32)
        with recording() as kept:
            inputs = ScoreInputs(made.q, made.sm_scale, candidates=made.candidates)
            select.run(inputs, arena, self._lists, slot_table=self.slots)
        self.slots = self.slots[group.slot_start :]
        self._own, self._listing = arena[made.scored[0].score_begins[HEAD] :][: self.count], kept.launches[-1]
        scores = [one for one in kept.launches if one.kernel is score_items_sm90_kernel]
        assert [one.grid for one in scores] == [(programs, KV_HEADS)] * (1 if self.joined else 2)
        return scores, list(made.scored[0].arrays), self._own

    def run(self, before: str = "", after: str = "") -> torch.Tensor:
        """[count]: scores that programs of `HEAD` write. They must write nothing else but what they tell each other.

        Args:
            before, after: what is replaced in the compiled kernel.
        """
        launches, index, own = self.launches()
        tensors = {name: value for name, value in launches[0].arguments.items() if isinstance(value, torch.Tensor)}
        told = [tensors.pop(f"{name}_ptr") for name in ("peak", "total", "at_least")]
        arrived = tensors.pop("arrived_ptr")
        arrived[:] = MEETINGS * ARRIVALS.value
        for tensor in told:
            tensor.fill_(UNTOUCHED)
        kept = [*tensors.values(), *index]
        as_before = [tensor.clone() for tensor in kept]
        product, self.products = "wgmma" if self.requests > 8 else "mma", 0
        for one in launches:
            kernel = compiled(one, 90)
            assert before in kernel.asm["ptx"]
            if before:
                changed = {"ptx": kernel.asm["ptx"].replace(before, after)}
                kernel = SimpleNamespace(asm=changed, src=kernel.src, metadata=kernel.metadata)
            done = run_together([Machine(one, kernel, (place, HEAD), index) for place in range(one.grid[0])])
            assert done[product] > 0
            self.products += done[product]
        written = own.clone()
        own.fill_(UNTOUCHED)
        # As bytes: some may be no numbers.
        assert all(torch.equal(*(x.view(torch.uint8) for x in both)) for both in zip(kept, as_before, strict=True))
        meetings = arrived[0] - MEETINGS * ARRIVALS.value
        meetings[HEAD] -= ARRIVALS.value * (self.joined and self.programs > 1)
        assert not meetings.any()
        counts = told.pop().transpose(0, 1)
        assert all(bool((tensor[1 - HEAD] == UNTOUCHED).all()) for tensor in (*told, counts))
        coarse, fine = counts[HEAD, : max(1, self.programs)].sum(dim=0).split([COARSE.value, NUM_BINS.value])
        assert torch.equal(coarse, fine[FINE.value - 1 :: FINE.value])
        assert bool((counts[HEAD, max(1, self.programs) :] == UNTOUCHED).all())
        self.counted = fine
        assert before or torch.equal(self.counted, self.counts_of(written))
        return written

    def keys_of(self, scores: torch.Tensor) -> torch.Tensor:
        """[count] of these scores, exactly: keys are made in fp32, as in the kernel."""
        keys, (sink, recent) = keys_of(scores), self.windows
        keys[:sink] = keys[self.count - recent :] = NUM_BINS.value - 1
        return keys

    def counts_of(self, scores: torch.Tensor) -> torch.Tensor:
        """What must be `counted` of these scores."""
        return (NUM_BINS.value - 1 - self.keys_of(scores)).bincount(minlength=NUM_BINS.value).cumsum(0).int()

    def list(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and slots that are listed of what the last run wrote; nothing else is written."""
        self._own.copy_(scores)
        kernel = compiled(self._listing, 90)
        run_together([Machine(self._listing, kernel, (place, HEAD)) for place in range(self._listing.grid[0])])
        (group,), found = self.made.selected, []
        begin = group.list_begin + HEAD * group.head_stride
        for arena in (self._lists.positions, self._lists.slots):
            assert arena is not None
            found.append(arena[begin : begin + self.budget].clone())
            arena[begin : begin + self.budget] = -1
            assert bool((arena == -1).all())
        return found[0].long(), found[1]

    def error(self, scores: torch.Tensor) -> float:
        """How far the worst score is from what it may be, as fp64 says."""
        rows = self.q[1:, HEAD * GQA : (HEAD + 1) * GQA].flatten(0, 1)
        tiles = [self._range_of(tile) for tile in rows.split(self.config.block_m)]
        least, most = (torch.stack(bounds).amax(dim=0) for bounds in zip(*tiles, strict=True))
        outside = torch.maximum(least - scores, scores - most).clamp_min(0)
        return float(outside.nan_to_num(nan=torch.inf).max())

    def _range_of(self, tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """fp64 [count] each: the least and the largest score that rows of a tile may make of each candidate.

        Queries times the codes' steps are rounded to whole units, and so are the logarithms of sums, to the nearer one.
        Where an error of `LIMIT` decides which that is, either may be.
        """
        scaled = tile[:, self.channels.long()].float() * self.scale
        scaled = torch.where(scaled.abs() <= MOST, scaled, 0.0)
        # In fp32, as in the kernel: another last bit would round other queries up.
        unit = (scaled.abs().amax() * (1 / 127)).clamp_min(self.made.least_unit)
        queries = (scaled.double() * (1 / unit).double()).round()
        tokens = self.made.tokens(0, HEAD, torch.arange(self.count)) // self.row_tokens
        whole = queries @ unpack_codes(self.codes, 4).double()[tokens].T
        log_unit = unit.double() * self.made.sm_scale
        exact = whole * log_unit
        log_sums = (exact - log_shares(exact, self.made.shape.sum_every))[:, :1]
        higher, lower = ((0.5 - (log_sums + error) / log_unit).floor() for error in (-LIMIT, LIMIT))
        return (whole + lower).amax(dim=0) * log_unit, (whole + higher).amax(dim=0) * log_unit


#: Of 4,203 candidates one in 8 is summed. Queries may all be 0, or some of the least unit that there
#: is; the last ones are in a larger one.
SIZES: list[dict[str, Any]] = [
    *({"count": count} for count in (41, 128, 193, 333)),
    *({"count": count, "sum_every": 16} for count in (333, 4203)),
    *({"count": count, "sum_every": every, "programs": 3} for count, every in ((333, 1), (4203, 16))),
    *({"count": count, "by_list": True, "entry_tokens": each} for count, each in ((41, 1), (41, 16), (333, 16))),
    {"count": 4203, "sum_every": 16, "by_list": True},
    {"count": 4203, "sum_every": 16, "by_list": True, "entry_tokens": 16, "programs": 3},
    {"count": 333, "row_tokens": 4},
    {"count": 4203, "sum_every": 16, "row_tokens": 2},
    *({"count": 333, "size": size} for size in (0.0, 2.0**-22, 2.0**-14)),
]


@pytest.mark.parametrize("requests", [1, 8, 32, 33])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_scores_are_those_of_fp64(sizes: dict[str, Any], requests: int) -> None:
    """In one launch, or with `programs` in one for each phase; 33 requests are two tiles, each in its own unit."""
    made = Problem(requests, **sizes)
    assert sum_step(made.count, made.made.shape.sum_every) == (8 if "sum_every" in sizes and made.count == 4203 else 1)
    assert made.error(made.run()) < LIMIT


@pytest.mark.parametrize(("requests", "channels"), [(1, 64), (1, 96), (8, 96), (33, 96)])
@pytest.mark.parametrize(
    ("count", "sum_every", "programs"), [(41, 1, 2), (333, 1, 0), (333, 1, 3), (4203, 16, 3), (900, 1, 5)]
)
@pytest.mark.parametrize("beside", [0, 7, 24])
def test_programs_that_wait_for_each_other(
    beside: int, count: int, sum_every: int, programs: int, requests: int, channels: int
) -> None:
    """Also where the last ones have nothing to score. Few rows in a batch of many have tiles of their own, and the same
    scores as in a batch of few."""
    made = Problem(requests, count, sum_every, programs=programs, joined=True, beside=beside, channels=channels)
    few = Problem(requests, count, sum_every, programs=programs, channels=channels)
    assert made.config.block_m == 128 or beside < 24
    assert made.config.block_m > few.config.block_m or not beside or requests > 8
    scores = made.run()
    assert made.error(scores) < LIMIT
    assert torch.equal(scores, few.run())
    if channels == 64:
        assert made.products <= 2 * few.products, "expected the tile of one request; a step may end behind a stretch"


@pytest.mark.parametrize("requests", [1, 8, 32])
def test_scores_that_leave_the_first_step_far_behind(requests: int) -> None:
    """Its sums would leave fp32: they are taken a second time."""
    made, level = Problem(requests, 333, rising=60.0), Problem(requests, 333)
    assert made.error(made.run()) < LIMIT
    assert level.error(level.run()) < LIMIT
    assert made.products > level.products


@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.parametrize(("count", "sum_every", "way"), [(41, 1, -8.0), (41, 16, 8.0), (200, 1, 8.0)])
def test_scores_that_are_all_far_from_zero(way: float, count: int, sum_every: int, requests: int) -> None:
    """Exponentials of them would all be 0, or leave fp32. Of few candidates many threads have none."""
    made = Problem(requests, count, sum_every)
    made.q[:] = made.q.abs() * way
    assert made.error(made.run()) < LIMIT


@pytest.mark.parametrize("requests", [1, 8, 33])
@pytest.mark.parametrize(
    ("count", "windows"), [(41, (0, 0)), (200, (0, 0)), (333, (1, 0)), (333, (70, 130)), (333, (250, 0))]
)
@pytest.mark.parametrize("programs", [0, 3])
def test_keys_are_counted(programs: int, count: int, windows: tuple[int, int], requests: int) -> None:
    """Of scores that rise from below what keys can tell: rows' queries point one way."""
    made = Problem(requests, count, programs=programs, windows=windows, rising=60.0)
    sizes = torch.linspace(1, 0.5, 1 + requests).bfloat16()
    made.q[:] = made.q[1, ::GQA].repeat_interleave(GQA, 0) * sizes[:, None, None]
    lowest = made.run() <= LOWEST_LOG.value
    assert 0 < int(lowest.sum()) < count
    assert int(made.counted[-1]) == count
    assert len(made.counted.unique()) > 5


@pytest.mark.parametrize("requests", [1, 33])
@pytest.mark.parametrize(
    ("count", "budget", "programs"), [(333, 40, 3), (333, 332, 0), (4203, 2900, 1), (9000, 3000, 2)]
)
def test_lists_are_those_of_the_keys(count: int, budget: int, programs: int, requests: int) -> None:
    """In one tile and in several, of which the last ties are taken."""
    made = Problem(requests, count, 16, programs=programs, budget=budget)
    scores = made.run()
    keys = made.keys_of(scores)
    wanted = (keys * count + torch.arange(count)).topk(budget).indices.sort().values
    last = keys[wanted].min()
    assert count < 999 or int((keys == last).sum()) > int((keys[wanted] == last).sum())
    positions, slots = made.list(scores)
    assert torch.equal(positions, wanted)
    assert torch.equal(slots, made.slots[wanted])


@pytest.mark.parametrize("shift", [None, 0, 1, 4, 6], ids=lambda shift: "tokens" if shift is None else f"2^{shift}")
@pytest.mark.parametrize(
    ("budget", "windows", "programs"), [(40, (0, 0), 2), (700, (70, 5), 3), (4990, (0, 0), 1), (64, (30, 34), 2)]
)
def test_lists_are_those_of_any_scores(budget: int, windows: tuple[int, int], programs: int, shift: int | None) -> None:
    """Of tokens, and of blocks of 2^shift, with many that tie, and what is no logarithm or no number."""
    count, every, scored_by = 5000, 1 << (shift or 0), Programs(KV_HEADS, programs, 1, 64, CPU)
    (group,) = pack_lists([SelectionGroup(count, budget, *windows, slot_start=7)], KV_HEADS)
    scored_by.plan([group])
    generator, blocks = torch.Generator().manual_seed(budget), -(-count // every)
    few = torch.tensor([math.nan, -math.inf, math.inf, 0.5, 0.0, -44.0, -44.01, -3.4025e38, -20.0, -20.02])
    scores = torch.rand(blocks, generator=generator) * 50 - 49
    rare = torch.rand(blocks, generator=generator) < 0.4
    scores[rare] = few[torch.randint(len(few), (int(rare.sum()),), generator=generator)]
    room = -(-blocks // ALIGNED) * ALIGNED
    arena, heads = torch.full((2, room), UNTOUCHED), torch.zeros(1, KV_HEADS, 4, dtype=torch.int64)
    arena[HEAD, :blocks], heads[0, HEAD] = scores, torch.tensor([blocks, 0, shift or 0, HEAD * room])
    keys = keys_of(scores)[torch.arange(count) // every]
    keys[: windows[0]] = keys[count - windows[1] :] = NUM_BINS.value - 1
    ((_, share),) = scored_by.stretches.values()
    each = (blocks + share - 1) // share
    for chunk, stretch in enumerate(keys.split((each + 63) // 64 * 64 * every)):
        counted = (NUM_BINS.value - 1 - stretch).bincount(minlength=NUM_BINS.value).cumsum(0)
        scored_by.at_least[chunk, HEAD] = torch.cat([counted[FINE.value - 1 :: FINE.value], counted])
    lists, slots = (
        new_lists(KV_HEADS * group.head_stride, (1, KV_HEADS), CPU, with_slots=True),
        torch.randperm(6000).int(),
    )
    form = CandidateForm.TOKEN if shift is None else CandidateForm.MINMAX
    with recording() as kept:
        scored_by.make_lists(ScoredTokens(arena, heads, scored_by.at_least, form), lists, slots)
    (listing,) = kept.launches
    kernel = compiled(listing, 90)
    run_together([Machine(listing, kernel, (place, HEAD)) for place in range(programs)])
    wanted = (keys * count + torch.arange(count)).topk(budget).indices.sort().values
    positions, found = (group.lists_in(of, KV_HEADS)[HEAD] for of in (lists.positions, lists.slots))
    assert torch.equal(positions.long(), wanted)
    assert torch.equal(found, slots[7 + wanted])
    assert bool((group.lists_in(lists.positions, KV_HEADS)[1 - HEAD] == -1).all())


@pytest.mark.parametrize("requests", [1, 8, 33])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38, -1e5])
def test_a_query_out_of_range_counts_as_nothing(value: float, requests: int) -> None:
    """In one channel of one row: the rest of this row, and all others, keep their unit and their scores."""
    made, zero, within = Problem(requests, 333), Problem(requests, 333), Problem(requests, 333)
    channel, step = made.channels[50].long(), float(made.scale[50])
    for problem, product in ((made, value), (zero, 0.0), (within, 6e4)):
        problem.q[-1, HEAD * GQA + 1, channel] = product if abs(product) > 1e6 else product / step
    scores = made.run()
    assert made.error(scores) < LIMIT
    assert torch.equal(scores, zero.run())
    assert not torch.equal(scores, within.run())


@pytest.mark.parametrize("requests", [1, 32])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("0x0F0F0F0F", "0x0F0F0F07", id="a code's bit"),
        pytest.param("0f3C010204", "0f3C020821", id="126 levels"),
        pytest.param("0f4B400000", "0f4B400001", id="a query's rounding"),
        pytest.param("0f3F000000", "0f3F800000", id="a sum's rounding"),
    ],
)
def test_a_kernel_with_another_constant_is_found(before: str, after: str, requests: int) -> None:
    made = Problem(requests, 200)
    assert made.error(made.run(before, after)) > LIMIT
