"""What a layer of a decode step costs on this GPU: measured at the start, for the choice between paths.

Lists of two lengths give a line: microseconds of a launch, and microseconds per token of all lists. A list is read
once, whoever attends it, so the lengths of a batch's lists add up. A list of one request costs less per token than one
of a whole batch, and many lists more than one to begin with: each number of groups has a line of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

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


class Lines(dict[int, Line]):
    """A line for each number of groups that was measured; between two of them, what lies between their lines."""

    def __call__(self, tokens: float, groups: int) -> float:
        low = max((one for one in self if one <= groups), default=min(self))
        high = min((one for one in self if one >= groups), default=max(self))
        part = (groups - low) / (high - low) if low < groups < high else float(groups >= high)
        return (1 - part) * self[low](tokens) + part * self[high](tokens)


def numbers_of_groups(size: int) -> list[int]:
    """That costs of a batch of `size` requests are measured with: 1, 4, 16, and so on, and as many as requests."""
    return [*(4**n for n in range(size.bit_length()) if 4**n < size), size]


def _nothing() -> Lines:
    return Lines({1: Line(0.0, 0.0)})


@dataclass(frozen=True)
class StepCosts:
    """Of one size of batch.

    Attributes:
        attend: a layer's attention, by the tokens of all its lists and the number of lists that are not suffixes.
        select: a selection, by the tokens and the number of all prefixes.
        behind: one among candidates that the step before named; nothing where it attends what that one selected.
        ahead: naming the candidates of the next step, for all layers; nothing where no step does.
        num_dense, num_anchors, num_reuse: layers of each role.
        elsewhere: whether another device names them, but for steps that name their own.
    """

    attend: Lines
    select: Lines
    num_dense: int
    num_anchors: int
    num_reuse: int
    behind: Lines = field(default_factory=_nothing)
    ahead: Lines = field(default_factory=_nothing)
    elsewhere: bool = False

    def exact_us(self, tokens: int, lists: int) -> float:
        """A step that attends so many tokens of so many groups and single requests in each layer, each read once."""
        return (self.num_dense + self.num_anchors + self.num_reuse) * self.attend(tokens, lists)

    def sparse_us(
        self, prefixes: Sequence[int], budgets: Sequence[int], suffix: int, others: int = 0, steps: int = 1
    ) -> float:
        """A step that selects: as the layers' roles say; of what only the first of its steps does each has its part.

        Args:
            prefixes: tokens of each.
            budgets: tokens selected of each.
            suffix: tokens of the requests' own lists together.
            others: requests that are in no prefix's group.
            steps: that share a selection.
        """
        lists = len(prefixes) + others
        dense = self.num_dense * self.attend(sum(prefixes) + suffix, lists)
        select, behind, ahead = (of(sum(prefixes), len(prefixes)) for of in (self.select, self.behind, self.ahead))
        selecting = self.num_anchors * (behind + (select - behind) / steps) + ahead / (steps if self.elsewhere else 1)
        return dense + selecting + (self.num_anchors + self.num_reuse) * self.attend(sum(budgets) + suffix, lists)


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


class Watch:
    """Times what runs from its making on, on the current stream where the device has one."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._begin = self._now()
        self._end: Any = None

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def stop(self) -> None:
        """All of it is launched."""
        self._end = self._now()

    def wait(self) -> None:
        """Until the device has come to its end."""
        if self._on_gpu and self._end is not None:
            self._end.synchronize()

    def is_over(self) -> bool:
        """Whether the device has come to its end. Never waits."""
        return self._end is not None and (not self._on_gpu or bool(self._end.query()))

    def seconds(self) -> float:
        """What it took; 0 where that is not known yet."""
        if not self.is_over():
            return 0.0
        return 1e-3 * float(self._begin.elapsed_time(self._end)) if self._on_gpu else float(self._end - self._begin)
