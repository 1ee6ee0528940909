"""What a layer of a decode step costs on this GPU: measured at the start, for the choice between paths.

Two lists of different length give a line: microseconds of a launch, and microseconds per token of a list. A list is
read once, whoever attends it, so the lengths of a batch's lists add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch

_REPEATS = 7
_FLUSH_BYTES = 1 << 28
"""Several times any L2 cache: a layer's KV is not there when its turn comes."""
MARGIN = 0.97
"""Of the time of exact attention that a sparse step may take, at most: within the rest, nothing is won."""


class Line(NamedTuple):
    """us = base + per_token * tokens.

    Attributes:
        base: microseconds of a launch.
        per_token: microseconds.
    """

    base: float
    per_token: float

    def __call__(self, tokens: float) -> float:
        return self.base + self.per_token * tokens

    @classmethod
    def through(cls, near: tuple[int, float], far: tuple[int, float]) -> Line:
        """Of two measured points (tokens, us); never falling."""
        slope = max(0.0, (far[1] - near[1]) / (far[0] - near[0]))
        return cls(max(0.0, near[1] - slope * near[0]), slope)


@dataclass(frozen=True)
class StepCosts:
    """Of one size of batch.

    Attributes:
        attend: a layer's attention, by the tokens of all its lists.
        select: a selection, by the tokens of all prefixes.
        num_dense, num_anchors, num_reuse: layers of each role.
    """

    attend: Line
    select: Line
    num_dense: int
    num_anchors: int
    num_reuse: int

    def exact_us(self, tokens: int) -> float:
        """A step that attends so many tokens in each layer, each read once."""
        return (self.num_dense + self.num_anchors + self.num_reuse) * self.attend(tokens)

    def sparse_us(self, prefixes: Sequence[int], budgets: Sequence[int], suffix: int, steps: int = 1) -> float:
        """A step that selects: as the layers' roles say; of a selection each of its steps has its part.

        Args:
            prefixes: tokens of each.
            budgets: tokens selected of each.
            suffix: tokens of the requests' own lists together.
            steps: that share a selection.
        """
        dense = self.num_dense * self.attend(sum(prefixes) + suffix)
        selecting = self.num_anchors * self.select(sum(prefixes)) / steps
        return dense + selecting + (self.num_anchors + self.num_reuse) * self.attend(sum(budgets) + suffix)


def measure_us(run: Callable[[], None], device: torch.device) -> float:
    """Median time of some launches, replayed as a CUDA graph, nothing of their data in the L2 cache. Waits.

    Args:
        run: launches them on the current stream, without a wait or an allocation.
        device: a CUDA device.
    """
    run()  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    times = []
    for _ in range(_REPEATS):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * float(begin.elapsed_time(end)))
    return median(times)
