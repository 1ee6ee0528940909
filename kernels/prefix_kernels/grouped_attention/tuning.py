"""Tuning of grouped attention on the GPU at hand: minutes, once; `TunedConfigs` keeps what was found.

Each candidate attends a whole prefix and a selection of it with a full tile of requests. A candidate that cannot be
compiled or launched, or whose result differs from plain torch's, is out. The best one has the least geometric mean of
its times over the fastest ones.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from prefix_kernels.grouped_attention.config import (
    MAX_BLOCK_M,
    SPECIALIZED_ROWS,
    AttentionConfig,
    AttentionShape,
    has_specialized,
    room_for_blocks,
)
from prefix_kernels.grouped_attention.items import Segment
from prefix_kernels.grouped_attention.tuned import TileKey, TunedConfigs, TunedEntry, own_config
from prefix_kernels.types import PagedKV

logger = logging.getLogger(__name__)

Timer = Callable[[Callable[[], None]], float]
"""Microseconds of one run of some work, with a cold L2 cache."""

_FATAL = (torch.AcceleratorError, torch.OutOfMemoryError)
"""After which nothing else runs, or not as it should."""

ERROR_BUDGET = {torch.float64: 1e-6, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest absolute error of an output against fp64 on unit-variance values, by the inputs' dtype, when the operation
computes in fp32 and its output is cast to that dtype."""

PREFIX_LEN = 32768
KEPT = 2048
_PAGE = 16
_SHARED_MEMORY = 163 << 10
"""Of a thread block on sm_80, in bytes; used where the device does not say."""
_LONGEST_RING = 12
_FLUSH_FLOATS = 1 << 26
_SCRATCH = 128 << 20
"""Bytes for captured graphs, kernels and tables, generously."""
_MOST_PROGRAMS = 512
"""Of a launch: 3 on each multiprocessor of the largest GPUs."""


@dataclass(frozen=True)
class Space:
    """Values to combine. `programs_per_sm` costs no compilation.

    `max_registers` is tried with 8 warps and tiles of 64 rows or more, where the compiler takes more than 128 and two
    programs do not fit one multiprocessor.
    """

    block_n: tuple[int, ...] = (32, 64, 128)
    num_warps: tuple[int, ...] = (4, 8)
    num_stages: tuple[int, ...] = (2, 3, 4)
    programs_per_sm: tuple[int, ...] = (1, 2, 3)
    max_registers: tuple[int | None, ...] = (None, 128)


def candidates(
    shape: AttentionShape, block_m: int, space: Space, shared_memory: int, specialized: bool = False
) -> list[AttentionConfig]:
    """Parameters of one height, the package's own first, without those whose keys and values cannot fit.

    Where sm_90's own kernel has the shape, the portable one is tried with the package's own parameters only: on an H200
    it takes 1.1 to 1.8 times as long (docs/kernels.md), and each candidate takes seconds to compile.

    Args:
        shape: of the layers.
        block_m: rows of a tile.
        space: values to combine.
        shared_memory: bytes that a thread block may have.
        specialized: whether the device is one of sm_90.
    """
    own = own_config(shape, block_m)
    if specialized and (of_hopper := _specialized(shape, block_m, shared_memory)):
        return [own, *of_hopper]
    key_bytes = (shape.head_dim + shape.v_head_dim) * shape.kv_dtype.itemsize
    found = [own]
    values = (space.block_n, space.num_warps, space.num_stages, space.programs_per_sm, space.max_registers)
    for block_n, warps, stages, programs, registers in itertools.product(*values):
        many = warps == 8 and own.block_m >= 64
        # One step is in registers or just used while the others are on their way.
        if (stages - 1) * block_n * key_bytes <= shared_memory and (many or registers is None):
            found.append(AttentionConfig(own.block_m, block_n, warps, stages, programs, registers))
    return list(dict.fromkeys(found))


def _specialized(shape: AttentionShape, block_m: int, shared_memory: int) -> list[AttentionConfig]:
    """Rings as long as shared memory allows, for one program a multiprocessor or two."""
    rows = SPECIALIZED_ROWS if block_m <= SPECIALIZED_ROWS else MAX_BLOCK_M
    if not shape.fits_specialized(rows):
        return []
    key_bytes = (shape.head_dim + shape.v_head_dim) * shape.kv_dtype.itemsize
    found = []
    for programs, block_n in itertools.product((1, 2) if rows == SPECIALIZED_ROWS else (1,), (32, 64, 128)):
        left = room_for_blocks(shared_memory // programs, rows, shape.head_dim, shape.dtype.itemsize)
        ring = min(left // (block_n * key_bytes), _LONGEST_RING)
        # 65,536 registers for the 256 threads of each of two programs.
        registers = 128 if programs == 2 else None
        rings = {ring, ring // 2} if programs == 1 else {ring}
        found += [
            AttentionConfig(rows, block_n, 4, length, programs, registers, specialized=True)
            for length in sorted(rings, reverse=True)
            if length >= 2
        ]
    return found


def tune_missing(
    configs: TunedConfigs,
    shape: AttentionShape,
    rows: Iterable[int],
    device: torch.device,
    *,
    space: Space | None = None,
    timer: Timer | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    limit_s: float = math.inf,
) -> list[TunedEntry]:
    """Measure what `configs` does not know of yet, and let it know.

    Compiling takes most of the time, for every distinct kernel once. While it runs it needs `memory_needed` bytes.

    Args:
        configs: gets the entries; `save()` is the caller's.
        shape: of the layers.
        rows: numbers of requests on one prefix that will be met, as range(1, max_batch + 1); each height of tile that
            they need is measured once.
        device: a CUDA device, unless `timer` is given.
        space: values to combine; None: `Space()`.
        timer: None: the median of CUDA graph replays, L2 filled with something else before each.
        progress: called with (done, of how many, what) after each candidate.
        limit_s: seconds after which no other candidate is begun. The best so far of a height that is not finished
            serves, but is not saved with `configs`; the heights above it stay as they are.

    Returns:
        What was found, by height. A height for which nothing could be run is left out, with a warning.

    Raises:
        torch.OutOfMemoryError, torch.AcceleratorError: of the device; heights that were finished before are known.
    """
    deadline = time.monotonic() + limit_s
    heights = configs.missing(shape, rows)
    shared, hopper = shared_memory_of(device), has_specialized(device)
    todo = [(h, candidates(shape, h, space or Space(), shared, hopper)) for h in heights]
    total, done, found = sum(len(of_height) for _, of_height in todo), 0, []
    if not todo:
        return []
    timer = timer or GraphTimer(device)
    for block_m, of_height in todo:
        if time.monotonic() >= deadline:
            break
        problem = _Problem(shape, block_m, device)
        times: dict[AttentionConfig, dict[str, float]] = {}
        finished = True
        for config in of_height:
            if times and time.monotonic() >= deadline:
                finished = False
                break
            us = _measured(problem, config, timer)
            if us:
                times[config] = us
            done += 1
            if progress:
                progress(done, total, f"{block_m} rows")
        if not times:
            logger.warning("no launch parameters for tiles of %d rows could be measured; the own ones stay", block_m)
            continue
        config = fastest(times)
        entry = TunedEntry(TileKey.of(shape, block_m), config, times[config])
        configs.add(entry, keep=finished)
        found.append(entry)
    return found


def memory_needed(shape: AttentionShape, block_m: int) -> int:
    """Bytes of device memory that measuring tiles of so many rows takes at its peak, at most.

    Keys and values, first drawn in fp32; lists of slots; a head's plain attention; the clock's 256 MiB; the parts'
    states of two candidates, as one is made before the last one goes.
    """
    channels = shape.head_dim + shape.v_head_dim
    drawn = 4 * max(shape.head_dim, shape.v_head_dim)
    kv = PREFIX_LEN * shape.num_kv_heads * (channels * shape.kv_dtype.itemsize + drawn)
    lists = 4 * 8 * PREFIX_LEN * shape.num_kv_heads
    rows = max(block_m, shape.gqa)
    oracle = PREFIX_LEN * (channels * (4 + shape.kv_dtype.itemsize) + 3 * 4 * rows)
    parts = max(rows // shape.gqa, 1) * shape.num_kv_heads + _MOST_PROGRAMS
    states = 2 * 4 * parts * max(rows, SPECIALIZED_ROWS) * (shape.v_head_dim + 1)
    return kv + lists + oracle + states + 4 * _FLUSH_FLOATS + _SCRATCH


def fastest(times: dict[AttentionConfig, dict[str, float]]) -> AttentionConfig:
    """The candidate of the least geometric mean, over the cases, of its time over the fastest one's."""
    cases = next(iter(times.values())).keys()
    least = {case: min(us[case] for us in times.values()) for case in cases}
    return min(times, key=lambda config: math.prod(times[config][case] / least[case] for case in cases))


class _Problem:
    """A full tile of requests on one prefix of random pages, and a selection of it; what attention of them gives."""

    def __init__(self, shape: AttentionShape, block_m: int, device: torch.device) -> None:
        gen = torch.Generator(device).manual_seed(block_m)
        self.shape = shape
        self.batch = max(block_m // shape.gqa, 1)
        self.sm_scale = shape.head_dim**-0.5
        length, kept = (PREFIX_LEN, KEPT) if device.type == "cuda" else (64, 20)

        def random(*dims: int) -> Tensor:
            return torch.randn(dims, generator=gen, device=device)

        # Three times as large as usual: weights that differ, so that a key that is left out is seen.
        self.q = (3 * random(self.batch, shape.num_qo_heads, shape.head_dim)).to(shape.dtype)
        k = random(length, shape.num_kv_heads, shape.head_dim).to(shape.kv_dtype)
        self.kv = PagedKV(k, random(length, shape.num_kv_heads, shape.v_head_dim).to(shape.kv_dtype))
        pages = torch.randperm(length // _PAGE, generator=gen, device=device)
        whole = (pages[:, None] * _PAGE + torch.arange(_PAGE, device=device)).flatten()
        chosen = torch.stack([torch.randperm(length, generator=gen, device=device) for _ in range(shape.num_kv_heads)])
        selected = whole[chosen[:, :kept].sort(dim=1).values]
        self.slots = torch.cat([whole, selected.flatten()]).to(torch.int32)
        rows = tuple(range(self.batch))
        whole_of_each = whole.expand(shape.num_kv_heads, -1)
        self.cases = {
            "prefix": (Segment(rows, length), self._oracle(whole_of_each)),
            "selection": (Segment(rows, kept, list_begin=length, head_stride=kept), self._oracle(selected)),
        }

    def _oracle(self, slots: Tensor) -> Tensor:
        """[batch, num_qo_heads, v_head_dim] fp32, of int64 [num_kv_heads, count] slots."""
        q = self.q.float().view(self.batch, self.shape.num_kv_heads, self.shape.gqa, self.shape.head_dim)
        heads = []
        for head, of_head in enumerate(slots):
            scores = q[:, head] @ self.kv.k_cache[of_head, head].float().T * self.sm_scale
            heads.append(scores.softmax(dim=-1) @ self.kv.v_cache[of_head, head].float())
        return torch.stack(heads, dim=1).flatten(1, 2)


def _measured(problem: _Problem, config: AttentionConfig, timer: Timer) -> dict[str, float]:
    """Microseconds by case; none where it cannot run or is wrong."""
    from prefix_kernels.grouped_attention.runner import GroupedAttention

    shape, device = problem.shape, problem.q.device
    out = torch.empty(problem.batch, shape.num_qo_heads, shape.v_head_dim, dtype=shape.dtype, device=device)
    lse = torch.empty(problem.batch, shape.num_qo_heads, device=device)
    budget = ERROR_BUDGET[shape.dtype]
    times = {}
    for case, (segment, expected) in problem.cases.items():
        attention = GroupedAttention(shape, problem.batch, [config], device)
        attention.plan([segment])

        def work(attention: GroupedAttention = attention) -> None:
            attention.run(problem.q, problem.kv, problem.slots, problem.sm_scale, out, lse)

        out.fill_(torch.nan)
        try:
            work()
        except Exception as error:
            # Triton's errors, for what does not compile or does not fit the device, have no common class.
            if isinstance(error, _FATAL):
                raise
            logger.info("left out: %s: %s: %s", config, type(error).__name__, str(error)[:200])
            return {}
        worst = (out.float() - expected).abs().max().item()
        if not worst <= budget:
            logger.warning("expected an error of at most %g, got %g; left out: %s", budget, worst, config)
            return {}
        times[case] = timer(work)
    return times


class GraphTimer:
    """Microseconds of some work: the median of CUDA graph replays, with L2 full of other clean lines before each.

    As a graph, so that the time of the host is not measured. Takes 256 MiB of a CUDA device.
    """

    def __init__(self, device: torch.device, repeats: int = 15) -> None:
        self._other = torch.zeros(_FLUSH_FLOATS, dtype=torch.float32, device=device)
        self._repeats = repeats

    def __call__(self, work: Callable[[], None]) -> float:
        """Of work that was run before, so that it is compiled."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        event = partial(torch.cuda.Event, enable_timing=True)
        pairs = [(event(), event()) for _ in range(self._repeats)]
        graph.replay()
        for start, stop in pairs:
            self._other.sum()
            start.record()
            graph.replay()
            stop.record()
        torch.cuda.synchronize()
        return statistics.median(float(start.elapsed_time(stop)) * 1e3 for start, stop in pairs)


def shared_memory_of(device: torch.device) -> int:
    """Bytes that a thread block of a device may have."""
    if device.type != "cuda":
        return _SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", _SHARED_MEMORY))
