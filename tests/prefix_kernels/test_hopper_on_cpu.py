"""Hopper's kernel for the scores of a selection, as it is compiled for sm_90, on the CPU: see `ptx_machine`.

One program has all candidates of a KV head, and both phases. Its scores are compared with fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from prefix_kernels.anchor_selection import AnchorSelection, default_config
from prefix_kernels.anchor_selection.hopper_kernels import score_items_hopper_kernel
from prefix_kernels.launching import Launch, compiled, recording
from prefix_kernels.low_bit import quantize, unpack_codes
from prefix_kernels.pooled_scores import ScoredGroup, ScoreShape, Source
from prefix_kernels.pooled_scores.tables import ScoreInputs
from prefix_kernels.pooling import LEAST_SUMMED, log_shares, sum_step
from prefix_kernels.top_k_selection import SelectionGroup
from tests.prefix_kernels.ptx_machine import Machine, UnknownInstructionError

KV_HEADS, GQA, DIM, CHANNELS = 2, 4, 128, 96
HEAD = 1
"""The KV head whose program runs: neither its rows of codes nor its channels or scores are the first ones."""
SM_SCALE = 0.11
UNTOUCHED = -12345.0
#: Largest error of a log-probability. Seen were 5e-6, and 4e-5 of scores that rise far; a GPU is allowed 1e-3
#: (`benchmarks/kernel_naive.py`).
LIMIT = 2e-4


class Problem:
    """A group of all requests but the first, and codes of its candidates on permuted channels.

    Attributes:
        products: matrix instructions of the last run, of those that its tiles are multiplied with.

    Args:
        requests: of the group.
        count: of candidates.
        sum_every: of how few candidates the sums are, see `log_shares`.
        rising: how far later keys point the way of a row's queries.
    """

    def __init__(self, requests: int, count: int, sum_every: int = 1, rising: float = 0.0) -> None:
        gen = torch.Generator().manual_seed(requests + count)
        heads = KV_HEADS * GQA
        self.shape = ScoreShape(heads, KV_HEADS, Source.LOW_BIT, CHANNELS, listed_channels=True, sum_every=sum_every)
        self.requests, self.count, self.products = requests, count, 0
        self.q = torch.randn(1 + requests, heads, DIM, generator=gen).bfloat16()
        self.channels = torch.stack([torch.randperm(DIM, generator=gen)[:CHANNELS] for _ in range(KV_HEADS)])
        way = self.q[1, ::GQA].float().gather(1, self.channels)
        keys = torch.randn(KV_HEADS, count, CHANNELS, generator=gen)
        self.codes = quantize(keys + torch.linspace(0, rising, count)[None, :, None] * way[:, None], 4)

    def launch(self) -> tuple[Launch, list[torch.Tensor], torch.Tensor]:
        """What a program a KV head would be started with, the index's tensors, and where its scores go."""
        stride = -(-self.count // 4) * 4 + 8
        begins = tuple(4 + head * stride for head in range(KV_HEADS))
        firsts = tuple(head * self.count for head in range(KV_HEADS))
        index = [self.channels.short(), self.codes.packed.flatten(0, 1).contiguous(), self.codes.scale]
        rows, counts, nothing = tuple(range(1, 1 + self.requests)), (self.count,) * KV_HEADS, (0,) * KV_HEADS
        select = AnchorSelection(
            self.shape,
            1 + self.requests,
            1,
            self.count,
            64,
            default_config(self.shape, self.requests, specialized=True),
            self.q.device,
            max_block_size=1,
            num_programs=KV_HEADS,
        )
        select.plan(
            [ScoredGroup(rows, counts, firsts, nothing, begins, tuple(index))],
            [SelectionGroup(self.count, 40, 0, stride, (1,) * KV_HEADS, 5, 20, slot_start=0)],
        )
        arena = torch.full((begins[-1] + stride,), UNTOUCHED)
        with recording() as kept:
            select.run(ScoreInputs(self.q, SM_SCALE), arena, select.new_lists())
        scores, _ = kept.launches
        assert scores.kernel is score_items_hopper_kernel
        assert scores.grid == (1, KV_HEADS)
        return scores, index, arena[begins[HEAD] :][: self.count]

    def run(self, before: str = "", after: str = "") -> torch.Tensor:
        """[count]: what the program of `HEAD` writes. It must write nothing else but what programs tell each other.

        Args:
            before, after: what is replaced in the compiled kernel.
        """
        scores, index, own = self.launch()
        kernel = compiled(scores, 90)
        assert before in kernel.asm["ptx"]
        if before:
            changed = {"ptx": kernel.asm["ptx"].replace(before, after)}
            kernel = SimpleNamespace(asm=changed, src=kernel.src, metadata=kernel.metadata)
        tensors = {name: value for name, value in scores.arguments.items() if isinstance(value, torch.Tensor)}
        told = [tensors.pop("peak_ptr"), tensors.pop("total_ptr"), tensors.pop("all_at_least_ptr")]
        for tensor in told[:2]:
            tensor.fill_(UNTOUCHED)
        kept = [*tensors.values(), *index]
        as_before = [tensor.clone() for tensor in kept]
        done = Machine(scores, kernel, (0, HEAD), index).run()
        self.products = done["wgmma" if self.requests > 8 else "mma"]
        assert self.products > 0
        written = own.clone()
        own.fill_(UNTOUCHED)
        assert all(map(torch.equal, kept, as_before))
        assert all(bool((tensor[1 - HEAD] == UNTOUCHED).all()) for tensor in told[:2])
        return written

    def error(self, scores: torch.Tensor) -> float:
        """The largest one: in fp64, of halves of the queries times the codes' steps, as the kernel multiplies them."""
        queries = self.q[1:, HEAD * GQA : (HEAD + 1) * GQA].flatten(0, 1).float()
        halves = (queries[:, self.channels[HEAD]] * self.codes.scale[HEAD]).half().double()
        products = halves @ unpack_codes(self.codes.packed[HEAD], 4).double().T * SM_SCALE
        wanted = log_shares(products, self.shape.sum_every).amax(dim=0)
        return float((scores.double() - wanted).abs().nan_to_num(nan=torch.inf).max())


@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.parametrize(("count", "sum_every"), [(333, 1), (333, 16), (4203, 16)])
def test_scores_are_those_of_fp64(requests: int, count: int, sum_every: int) -> None:
    """Of more than 4,096 candidates every second one is summed."""
    made = Problem(requests, count, sum_every)
    assert sum_step(count, sum_every) == (2 if count > 2 * LEAST_SUMMED else 1)
    assert made.error(made.run()) < LIMIT


@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.parametrize("count", [41, 64, 128, 193])
def test_few_candidates(requests: int, count: int) -> None:
    made = Problem(requests, count)
    assert made.error(made.run()) < LIMIT


@pytest.mark.parametrize("requests", [1, 8, 32])
def test_scores_that_leave_the_first_step_far_behind(requests: int) -> None:
    """Its sums would leave fp32: they are taken a second time."""
    made, level = Problem(requests, 333, rising=60.0), Problem(requests, 333)
    assert made.error(made.run()) < LIMIT
    assert level.error(level.run()) < LIMIT
    assert made.products > level.products


def _code(made: Problem) -> None:
    made.codes.packed[HEAD, 300, 40] ^= 0x10


def _query(made: Problem) -> None:
    made.q[-1, -1, made.channels[HEAD, 50]] += 1.0


def _step(made: Problem) -> None:
    made.codes.scale[HEAD, 95] *= 1.1


def _channel(made: Problem) -> None:
    made.channels[HEAD, :2] = made.channels[HEAD, :2].flip(0)


@pytest.mark.parametrize("requests", [1, 32])
@pytest.mark.parametrize("change", [_code, _query, _step, _channel])
def test_other_inputs_have_other_scores(change: Callable[[Problem], None], requests: int) -> None:
    made = Problem(requests, 333)
    scores = made.run()
    assert made.error(scores) < LIMIT
    change(made)
    assert made.error(scores) > LIMIT
    assert made.error(made.run()) < LIMIT


@pytest.mark.parametrize("requests", [1, 32])
def test_a_kernel_that_loses_a_bit_of_a_code_is_found(requests: int) -> None:
    made = Problem(requests, 200)
    assert made.error(made.run("0x00F000F0", "0x00F00070")) > LIMIT


def test_what_the_machine_has_not_is_named() -> None:
    made = Problem(1, 200)
    with pytest.raises(UnknownInstructionError, match=r"tanh\.approx"):
        made.run("ex2.approx.ftz", "tanh.approx")
    with pytest.raises(UnknownInstructionError, match=r"shfl\.sync\.up"):
        made.run("shfl.sync.bfly", "shfl.sync.up")


def test_no_address_outside_of_the_tensors_is_read() -> None:
    scores, index, _ = Problem(1, 200).launch()
    with pytest.raises(IndexError, match=r"ld\.global"):
        Machine(scores, compiled(scores, 90), (0, HEAD), index[:1]).run()
