"""Microseconds of one piece of GPU work with a cold L2 cache: CUDA graph replays between two events.

Before every replay a kernel reads a buffer of several times the L2 cache. It stands before the first event, so it is
not timed, and the host queues the replay meanwhile, so no host gap is timed either. `triton.testing.do_bench` writes
such a buffer: the timed kernel would wait for dirty lines, which a layer behind a model's matrix products does not.

What the events and the start of a graph cost themselves is measured in the same way with a graph of one tiny kernel
(`null_us`). It is reported beside the rows and never subtracted.
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import torch

Work = Callable[[], Any]

_FLUSH_BYTES = 1 << 28
_SLOW_US = 1e5
_SECONDS = 0.3
"""Of one measurement, roughly."""
_FEWEST, _MOST = 7, 100
"""Repeats."""


def times_of(values: Sequence[float], parts: int) -> dict[str, float]:
    """Microseconds of one of so many equal parts of the work: median, spread (10th and 90th percentile), least, and of
    how many.
    """
    ranked = sorted(value / parts for value in values)
    last = len(ranked) - 1
    times = {
        "us": statistics.median(ranked),
        "us_p10": ranked[round(0.1 * last)],
        "us_p90": ranked[round(0.9 * last)],
        "us_min": ranked[0],
    }
    return {**{name: round(us, 3) for name, us in times.items()}, "repeats": len(ranked)}


class CpuTimer:
    """For `--smoke`: the same path without a GPU. Its times mean nothing."""

    meaningful = False

    def prepare(self, work: Work) -> Work:
        """The work itself."""
        return work

    def time(self, replay: Work, parts: int = 1) -> dict[str, float]:
        """Of two runs; see `times_of`."""
        return times_of([1e6 * seconds for seconds in timeit.repeat(replay, number=1, repeat=2)], parts)

    def null_us(self) -> float:
        """Nothing is started here."""
        return 0.0


class GpuTimer:
    """Times CUDA graphs.

    Args:
        device: a CUDA device.
    """

    meaningful = True

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device=device)

    def prepare(self, work: Work) -> Work:
        """Warm up (which compiles) and capture; returns what replays the work.

        Args:
            work: launches kernels on the current stream, without a wait.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        torch.cuda.synchronize()
        return graph.replay

    def time(self, replay: Work, parts: int = 1) -> dict[str, float]:
        """Replay (see `prepare`) many times, L2 cleared before each; see `times_of`."""
        once = self._between_events(replay, 2)[-1]
        fewest = _FEWEST if once < _SLOW_US else 3
        count = int(min(max(_SECONDS * 1e6 / (once + 100.0), fewest), _MOST))
        return times_of(self._between_events(replay, count), parts)

    def null_us(self) -> float:
        """The same of a graph of one kernel on one element."""
        one = torch.zeros(1, device=self._buffer.device)
        return self.time(self.prepare(lambda: one.fill_(1.0)))["us"]

    def _between_events(self, replay: Work, count: int) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, stop in pairs:
            self._buffer.sum()  # fills L2 with something else
            start.record()
            replay()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) * 1e3 for start, stop in pairs]
