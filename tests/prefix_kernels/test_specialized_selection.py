"""An anchor layer's selection on Hopper's own kernel against the one for all GPUs: on a GPU of that kind only."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from prefix_kernels.anchor_selection import AnchorConfig, AnchorSelection, Form, default_config
from prefix_kernels.low_bit import dequantize, quantize
from prefix_kernels.pooled_scores import ScoredGroup, ScoreInputs, ScoreShape
from prefix_kernels.pooling import FIRST_SUMMED, HEADROOM, Pooling, sampled, sum_step
from prefix_kernels.top_k_selection.plan import SelectionGroup, pack_lists
from prefix_kernels.types import SelectedLists

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU (sm_90)"
)

KV_HEADS, DIM = 2, 128
MOST_ENTRIES, POISON = 100_000, 1_000_007
SM_SCALE = 0.11
FORMS = [Form.FUSED, Form.UNFUSED]
CONFIGS = {
    "8x128": AnchorConfig(8, 128, 4, 3, 4, specialized=True),
    "16x64": AnchorConfig(16, 64, 4, 3, 4, specialized=True),
    "32x128": AnchorConfig(32, 128, 4, 3, 3, specialized=True),
    "64x64": AnchorConfig(64, 64, 4, 3, 3, specialized=True),
    "128x64": AnchorConfig(128, 64, 4, 3, 2, specialized=True),
    "8x256": AnchorConfig(8, 256, 4, 3, 2, specialized=True),
}


class Problem:
    """Groups of (batch rows, prefix_len, budget), each with an index of its own on some of the channels."""

    def __init__(
        self,
        sizes: list[tuple[tuple[int, ...], int, int]],
        *,
        gqa: int = 4,
        channels: int = 96,
        dtype: torch.dtype = torch.bfloat16,
        rising: float = 0.0,
        sum_every: int = 1,
    ) -> None:
        gen = torch.Generator().manual_seed(channels + gqa + sizes[0][1])
        batch = sum(len(rows) for rows, _, _ in sizes)
        self.shape = ScoreShape(KV_HEADS * gqa, KV_HEADS, channels, listed_channels=True, sum_every=sum_every)
        self.q = torch.randn(batch, KV_HEADS * gqa, DIM, generator=gen).to("cuda", dtype)
        self.scored: list[ScoredGroup] = []
        self.selected: list[SelectionGroup] = []
        self.keys: list[torch.Tensor] = []
        at = table_at = 0
        for rows, length, budget in sizes:
            keys = torch.randn(KV_HEADS, length, channels, generator=gen)
            kept = torch.stack([torch.randperm(DIM, generator=gen)[:channels].sort().values for _ in range(KV_HEADS)])
            if rising:
                # Later keys point more and more the way of the first row's queries: scores leave any first step behind.
                way = self.q[rows[0]].float().cpu().view(KV_HEADS, gqa, DIM).mean(1)
                steps = torch.linspace(0, rising, length)[None, :, None]
                keys = keys + steps * way.gather(1, kept)[:, None]
            codes = quantize(keys, 4)
            self.keys.append(self._full(dequantize(codes), kept))
            arrays = (kept.short().cuda(), codes.packed.flatten(0, 1).cuda(), codes.scale.cuda())
            stride = -(-length // 4) * 4
            begins = tuple(at + head * stride for head in range(KV_HEADS))
            firsts = tuple(head * length for head in range(KV_HEADS))
            self.scored.append(ScoredGroup(rows, length, firsts, begins, arrays))
            sink, recent = (5, 20) if budget > 25 else (0, 0)
            self.selected.append(SelectionGroup(length, budget, sink, recent, slot_start=table_at))
            at += KV_HEADS * stride
            table_at += length
        self.selected = pack_lists(self.selected, KV_HEADS)
        self.room = at
        self.slots = torch.randperm(table_at, generator=gen).int().cuda()

    @staticmethod
    def _full(keys: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        full = torch.zeros(*keys.shape[:2], DIM)
        return full.scatter_(2, kept[:, None].expand_as(keys).long(), keys).cuda().double()

    def _rounded(self, queries: torch.Tensor, group: int, head: int, block_m: int) -> torch.Tensor:
        """fp64 queries as the kernel has them: times the channels' steps in INT8, one unit for each tile of rows."""
        channels, _, steps = self.scored[group].arrays[:3]
        kept, steps = channels[head].long(), steps[head].double()
        full = torch.zeros_like(queries)
        for begin in range(0, len(queries), block_m):
            tile = queries[begin : begin + block_m, kept] * steps
            unit = (tile.abs().amax() / 127).clamp_min(2**-24 / (SM_SCALE * math.log2(math.e)))
            full[begin : begin + block_m, kept] = (tile / unit).round() * unit / steps
        return full

    def run(
        self, config: AnchorConfig, form: Form, num_programs: int | None = None, times: int = 1
    ) -> tuple[torch.Tensor, SelectedLists]:
        select = AnchorSelection(
            self.shape, self.q.shape[0], len(self.scored) + 1, 130_000, MOST_ENTRIES, config, self.q.device,
            form=form, num_programs=num_programs,
        )  # fmt: skip
        lists = select.new_lists(with_slots=True)
        scores = torch.full((self.room,), torch.nan, device="cuda")
        select.plan(self.scored, self.selected)
        for _ in range(times):
            for buffer in (lists.positions, lists.counts, lists.slots):
                assert buffer is not None
                buffer.fill_(POISON)
            select.run(ScoreInputs(self.q, SM_SCALE), scores, lists, slot_table=self.slots)
        return scores, lists

    def scores_of(self, group: int, head: int, block_m: int) -> torch.Tensor:
        """fp64 [prefix_len]: natural log of the largest share of attention."""
        of, gqa = self.scored[group], self.shape.gqa
        queries = self.q[list(of.rows), head * gqa : (head + 1) * gqa].flatten(0, 1).double()
        queries = self._rounded(queries, group, head, block_m)
        scores = queries @ self.keys[group][head].T * SM_SCALE
        total, step = scores.logsumexp(dim=1), sum_step(scores.shape[1], self.shape.sum_every)
        if self.shape.sum_every > 1:
            sample = scores[:, sampled(scores.shape[1], step).cuda()].logsumexp(dim=1) + math.log(step)
            total = scores[:, :FIRST_SUMMED].logsumexp(dim=1).logaddexp(sample) + HEADROOM
        return (scores - total[:, None]).amax(dim=0)


def check(made: Problem, config: AnchorConfig, form: Form, num_programs: int | None = None, times: int = 1) -> None:
    """Scores against fp64; the lists against a stable sort of the scores' keys."""
    scores, lists = made.run(config, form, num_programs, times)
    assert lists.slots is not None
    for g, (of, group) in enumerate(zip(made.scored, made.selected, strict=True)):
        for head in range(KV_HEADS):
            own = scores[of.score_begins[head] :][: group.prefix_len]
            positions = group.lists_in(lists.positions, KV_HEADS)[head].long()
            assert int(lists.counts[g, head]) == group.count
            slots = group.lists_in(lists.slots, KV_HEADS)[head]
            assert torch.equal(slots, made.slots[group.slot_start + positions])
            if group.count == group.prefix_len:
                assert torch.equal(positions, torch.arange(group.prefix_len, device="cuda"))
                continue
            wanted = made.scores_of(g, head, config.block_m)
            near = wanted > (-25 if made.shape.sum_every == 1 else -25 - HEADROOM)
            torch.testing.assert_close(own[near].double(), wanted[near], atol=2e-2, rtol=0)
            assert not own.isnan().any()
            steps = torch.tensor(2045 / 44.0, device="cuda")
            keys = ((own.clamp(-44.0, 0.0) + 44.0) * steps).floor().long()
            keys[: group.num_sink] = 70000
            keys[group.prefix_len - group.num_recent :] = 70000
            best = torch.sort(keys * 2**18 + torch.arange(group.prefix_len, device="cuda"), descending=True).indices
            assert torch.equal(positions, best[: group.count].sort().values)
    assert (lists.counts[len(made.scored) :] == POISON).all()
    written = KV_HEADS * sum(group.count for group in made.selected)
    assert int((lists.positions != POISON).sum()) == int((lists.slots != POISON).sum()) == written


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 129, 1000, 4999])
def test_every_tile_and_length(length: int, config: AnchorConfig, form: Form) -> None:
    made = Problem([((0, 1, 2), length, max(1, length // 7))])
    for num_programs in (2, 2 * 7, None):
        check(made, config, form, num_programs)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("sum_every", [2, 16])
def test_sums_of_a_sample(sum_every: int, config: AnchorConfig, form: Form) -> None:
    """Of the longer prefix every second token is summed, of the other one all; of 64 programs some have none."""
    made = Problem([((0, 1, 2), 4999, 300), ((3,), 4000, 300)], sum_every=sum_every)
    for num_programs in (2, 2 * 7, 2 * 64, None):
        check(made, config, form, num_programs)
    check(Problem([(tuple(range(33)), 4500, 700)], sum_every=sum_every, rising=10.0), config, form)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("length", "sum_every"), [(40_001, 3), (40_001, 16), (120_000, 2)])
def test_sums_of_a_sample_of_long_prefixes(length: int, sum_every: int, form: Form) -> None:
    made = Problem([((0, 1, 2), length, 900)], sum_every=sum_every)
    for config in (CONFIGS["16x64"], CONFIGS["64x64"]):
        check(made, config, form)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [32, 64, 96, 128])
def test_every_number_of_channels(channels: int, dtype: torch.dtype) -> None:
    check(Problem([((0,), 777, 99)], channels=channels, dtype=dtype), CONFIGS["8x128"], Form.FUSED)


@pytest.mark.parametrize("gqa", [1, 2, 5, 7, 8, 16])
@pytest.mark.parametrize("rows", [1, 2, 9, 33])
def test_every_group_size_and_batch(rows: int, gqa: int) -> None:
    made = Problem([(tuple(range(rows)), 1234, 200)], gqa=gqa)
    config = default_config(made.shape, rows, specialized=True)
    assert config.specialized
    check(made, config, Form.FUSED)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_groups_of_other_lengths(form: Form) -> None:
    made = Problem([((0, 3), 3001, 500), ((1,), 40, 40), ((2, 4, 5), 1800, 26), ((6,), 1, 1)])
    for config in CONFIGS.values():
        check(made, config, form, times=3)


@pytest.mark.parametrize("rising", [2.0, 10.0, 60.0])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_scores_that_leave_the_first_step_far_behind(config: AnchorConfig, rising: float) -> None:
    made = Problem([((0, 1), 4000, 300)], rising=rising)
    for num_programs in (2, 10):
        check(made, config, Form.FUSED, num_programs)


def test_the_same_in_every_run() -> None:
    made = Problem([(tuple(range(32)), 4999, 700)])
    first, lists = made.run(CONFIGS["128x64"], Form.FUSED)
    for _ in range(5):
        again, others = made.run(CONFIGS["128x64"], Form.FUSED)
        # What lies between two KV heads' scores stays as it was: not a number.
        assert torch.equal(first.nan_to_num(), again.nan_to_num())
        assert torch.equal(lists.positions, others.positions)


def test_a_captured_run_follows_its_plan() -> None:
    made, other = Problem([((0, 1), 4000, 300)]), Problem([((0,), 2500, 250), ((1,), 1200, 26)])
    config = CONFIGS["8x128"]
    select = AnchorSelection(made.shape, 2, 2, 5000, MOST_ENTRIES, config, made.q.device)
    lists, scores = select.new_lists(with_slots=True), torch.zeros(made.room + other.room, device="cuda")
    queries, slots = made.q.clone(), torch.zeros(8000, dtype=torch.int32, device="cuda")
    slots[: len(made.slots)] = made.slots
    select.plan(made.scored, made.selected)
    select.run(ScoreInputs(queries, SM_SCALE), scores, lists, slot_table=slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select.run(ScoreInputs(queries, SM_SCALE), scores, lists, slot_table=slots)
    for problem in (other, made, other):
        select.plan(problem.scored, problem.selected)
        queries.copy_(problem.q)
        slots[: len(problem.slots)] = problem.slots
        graph.replay()
        _, wanted = problem.run(config, Form.FUSED)
        groups = len(problem.scored)
        for group in problem.selected:
            mine, theirs = (group.lists_in(of.positions, KV_HEADS) for of in (lists, wanted))
            assert torch.equal(mine, theirs)
        assert torch.equal(lists.counts[:groups], wanted.counts[:groups])


def test_what_it_has_not_is_refused() -> None:
    made = Problem([((0,), 100, 30)])
    for other in ({"bits": 8}, {"channels": 48}, {"pooling": Pooling.MEAN}):
        with pytest.raises(ValueError, match="own kernel"):
            AnchorSelection(replace(made.shape, **other), 1, 1, 100, 64, CONFIGS["8x128"], made.q.device)
    select = AnchorSelection(made.shape, 1, 1, 100, 64, CONFIGS["8x128"], made.q.device)
    select.plan(made.scored, made.selected)
    scores = torch.zeros(made.room, device="cuda")
    with pytest.raises(ValueError, match="positive scale"):
        select.run(ScoreInputs(made.q, -1.0), scores, select.new_lists())
