"""Rows behind host memory, all layers of a forward: the kernel form as if all slots were on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from prefix_kernels.prefill_attention import Reference, Span
from prefix_kernels.prefill_attention.kernels import attend_tiles_kernel
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.offload.attention import PLACES, StagedAttention, StagedStep
from sglang_ext.offload.directory import Offload
from sglang_ext.offload.ring import TwoStreams
from tests.offload.host_memory import PlainPools
from tests.prefix_kernels.triton.conftest import INTERPRETED

HEADS, KV_HEADS, LAYERS, STAGING, SPARE = 8, 2, 3, 64, 3
DIM = 16 if INTERPRETED else 128
SCALE = DIM**-0.5
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}


class Row(NamedTuple):
    """A request: number of its prefix on the host, or None; own tokens, and how many of them are new."""

    prefix: int | None
    own: int
    new: int


class Forward:
    """Rows behind prefixes of so many pages each. Of the first one no two pages lie side by side on the host. Layer 0
    has them on the device, and on the host NaN.
    """

    def __init__(self, prefixes: list[int], rows: list[Row], dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(len(rows))
        own = sum(row.own for row in rows)
        pages, tokens = sum(prefixes), sum(prefixes) * PAGE_TOKENS
        slots = PAGE_TOKENS + tokens + own
        self.pools = PlainPools(slots, 2 * pages, LAYERS, KV_HEADS, DIM, [0], device=device, dtype=dtype)
        order = (torch.randperm(slots - PAGE_TOKENS) + PAGE_TOKENS).to(device)
        self.groups, self.whole, begin = list[tuple[Offload, torch.Tensor]](), [], 0
        copied = list[torch.Tensor]()
        for number, count in enumerate(prefixes):
            places = torch.arange(2 * begin, 2 * begin + count) if number else 2 * torch.arange(count).flip(0)
            offload = Offload(str(number), count * PAGE_TOKENS, places)
            of_prefix = order[begin * PAGE_TOKENS : (begin + count) * PAGE_TOKENS]
            self.pools.backup(of_prefix, offload.pages)
            of_queries = torch.tensor([row.prefix == number for row in rows for _ in range(row.new)])
            self.groups.append((offload, of_queries.nonzero().flatten()))
            self.whole.append(of_prefix)
            copied.append((slots + places[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten().to(device))
            begin += count
        self.spans, self.from_device, seen, at, query = list[Span](), list[Span](), list[Span](), tokens, 0
        for row in rows:
            mine, part = order[at : at + row.own], slice(query, query + row.new)
            self.spans.append(Span(part, mine))
            for of, front in ((seen, self.whole), (self.from_device, copied)):
                of.append(Span(part, mine if row.prefix is None else torch.cat([front[row.prefix], mine])))
            at, query = at + row.own, query + row.new
        self.q = torch.randn(LAYERS, query + SPARE, HEADS, DIM, dtype=dtype, device=device) * 2
        oracle = Reference(seen, [], device)
        self.expected = [oracle.own(self.q[layer], self.pools.kv(layer), SCALE).out for layer in range(LAYERS)]
        # What lay on the device only to be copied is not read again.
        for layer in self.pools.device:
            layer[:, order[:tokens]] = torch.nan
        self.pools.memory[0] = torch.nan

    def attention(self, device: torch.device, **how: object) -> StagedAttention:
        return StagedAttention(self.pools, STAGING, LAYERS, device, **how)

    def step(self, attention: StagedAttention) -> StagedStep:
        return attention.plan(self.spans, self.from_device, [group for group in self.groups if len(group[1])])

    def check(self, attention: StagedAttention, dtype: torch.dtype) -> None:
        """All layers."""
        step = self.step(attention)
        found = [attention.run(step, self.q[layer], self.pools.kv(layer), layer, SCALE) for layer in range(LAYERS)]
        for out, expected in zip(found, self.expected, strict=True):
            torch.testing.assert_close(out.float(), expected, rtol=0, atol=TOLERANCE[dtype])
            assert not out[-SPARE:].any()


EXTEND = [Row(0, 5, 5), Row(None, 70, 33), Row(1, 90, 40), Row(0, 1, 1), Row(0, 200, 130)]
DTYPES = [torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rows",
    [[Row(0, 1, 1)], EXTEND, [Row(0, 9, 1), Row(1, 1, 1), Row(None, 130, 1)]],
    ids=["one row", "extend, some with a cached suffix", "decode"],
)
def test_as_if_all_slots_were_on_the_device(rows: list[Row], dtype: torch.dtype, device: torch.device) -> None:
    forward = Forward([9, 6], rows, dtype, device)
    attention = forward.attention(device, implementation="triton")
    for _ in range(2):
        forward.check(attention, dtype)


def test_after_a_start_no_forward_compiles_anything(device: torch.device) -> None:
    """Nor does what a start reads, NaN among it, stay anywhere."""
    forward = Forward([9, 6], EXTEND, torch.float16, device)
    attention = forward.attention(device, implementation="triton")
    attention.warm(HEADS, DIM, torch.float16)
    compiled = versions()
    assert INTERPRETED or compiled
    forward.check(attention, torch.float16)
    assert versions() == compiled


def versions() -> int:
    """Of the kernel, in this process."""
    if INTERPRETED:
        return 0
    return sum(len(one[0]) for one in attend_tiles_kernel.device_caches.values())


def test_a_forward_that_was_given_up_leaves_nothing_to_the_next(device: torch.device) -> None:
    """Nor does a layer that is attended again."""
    forward = Forward([9, 6], EXTEND, torch.float16, device)
    attention = forward.attention(device, implementation="triton")
    step = forward.step(attention)
    for layer in (0, 2, 1):
        out = attention.run(step, forward.q[layer], forward.pools.kv(layer), layer, SCALE)
        torch.testing.assert_close(out.float(), forward.expected[layer], rtol=0, atol=4e-3)
    forward.check(attention, torch.float16)


class Poisoned(TwoStreams):
    """Before a copy the place is NaN for a while, and work on a place begins late.

    Args:
        waits: for the work on a place, before it is written over.

    Attributes:
        places: of the attention.
    """

    places: torch.Tensor

    def __init__(self, device: torch.device, *, waits: bool) -> None:
        super().__init__(device, PLACES)
        self._waits = waits

    def copy(self, place: int, work: Callable[[], None]) -> None:
        def slowly() -> None:
            self.places[place] = torch.nan
            torch.cuda._sleep(200_000)
            work()

        if not self._waits:
            self._attended[place] = torch.cuda.Event()
        super().copy(place, slowly)

    def attend(self, place: int, work: Callable[[], None]) -> None:
        def late() -> None:
            torch.cuda._sleep(400_000)
            work()

        super().attend(place, late)


@pytest.mark.skipif(INTERPRETED, reason="of two CUDA streams")
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "does not wait"])
def test_no_place_is_written_over_before_it_was_attended(waits: bool, device: torch.device) -> None:
    forward = Forward([40], [Row(0, 30, 30)], torch.float16, device)
    queues = Poisoned(device, waits=waits)
    attention = forward.attention(device, queues=queues)
    queues.places = attention.places
    if waits:
        return forward.check(attention, torch.float16)
    with pytest.raises(AssertionError):
        forward.check(attention, torch.float16)
    return None


@pytest.mark.skipif(INTERPRETED, reason="nothing waits for a CPU")
def test_no_layer_waits_for_the_device(device: torch.device) -> None:
    forward = Forward([9, 6], EXTEND, torch.float16, device)
    attention = forward.attention(device)
    forward.check(attention, torch.float16)
    torch.cuda.synchronize()
    step = forward.step(attention)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for layer in range(LAYERS):
            attention.run(step, forward.q[layer], forward.pools.kv(layer), layer, SCALE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
