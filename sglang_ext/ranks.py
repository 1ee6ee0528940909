"""What the processes of one tensor-parallel group tell each other: a few numbers, on the host.

A call is a collective: it ends when every rank has made it. So calls stand only where all ranks come by in the same
order, whatever each of them knows by itself: at the start, in a decode step by a rule on what SGLang gives to all ranks
alike (`prefix.agreement`), and where a control request is served that SGLang broadcasts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks(Protocol):
    """The group, as one of its processes sees it.

    Attributes:
        rank, size: its place, and how many there are.
    """

    rank: int
    size: int

    def least(self, values: Sequence[int]) -> list[int]:
        """Per place the least that any rank gives; as many values on all of them, within 64 bits."""

    def most(self, values: Sequence[float]) -> list[float]:
        """Per place the most that any rank gives; as many values on all of them."""

    def gathered(self, value: Any) -> list[Any]:
        """What each rank gives, by rank; small plain values."""

    def to_first(self, tensor: Tensor, room: Sequence[Tensor] | None = None) -> list[Tensor] | None:
        """A tensor on the host of each rank, of one shape and dtype on all: by rank on rank 0, None elsewhere.

        Args:
            tensor: this rank's, contiguous.
            room: on rank 0, where they go: one like it for each rank, contiguous. So nothing is allocated here, where
                the others wait already.
        """


class OneRank:
    """A process without others: agrees with itself."""

    rank, size = 0, 1

    def least(self, values: Sequence[int]) -> list[int]:
        """As given."""
        return list(values)

    def most(self, values: Sequence[float]) -> list[float]:
        """As given."""
        return list(values)

    def gathered(self, value: Any) -> list[Any]:
        """Of the one."""
        return [value]

    def to_first(self, tensor: Tensor, room: Sequence[Tensor] | None = None) -> list[Tensor] | None:
        """Of the one."""
        return [tensor]


class ProcessRanks:
    """Ranks that talk through a process group on the host.

    Args:
        group: of the gloo backend, and nobody else's: two users of one group would mix up their calls.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def least(self, values: Sequence[int]) -> list[int]:
        """See `Ranks`. Raises RuntimeError where another rank has gone."""
        return self._reduced(torch.tensor(values, dtype=torch.int64), dist.ReduceOp.MIN)

    def most(self, values: Sequence[float]) -> list[float]:
        """See `Ranks`. Raises RuntimeError where another rank has gone."""
        return self._reduced(torch.tensor(values, dtype=torch.float64), dist.ReduceOp.MAX)

    def _reduced(self, values: Tensor, operation: Any) -> list[Any]:
        dist.all_reduce(values, operation, group=self._group)
        found: list[Any] = values.tolist()
        return found

    def gathered(self, value: Any) -> list[Any]:
        """See `Ranks`. Raises RuntimeError where another rank has gone."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def to_first(self, tensor: Tensor, room: Sequence[Tensor] | None = None) -> list[Tensor] | None:
        """See `Ranks`. Raises RuntimeError where another rank has gone."""
        found = None
        if self.rank == 0:
            found = list(room) if room is not None else [torch.empty_like(tensor) for _ in range(self.size)]
        # gloo does not know every dtype.
        data = None if found is None else [one.view(torch.uint8) for one in found]
        dist.gather(tensor.view(torch.uint8), data, group_dst=0, group=self._group)
        return found


def check_alike(ranks: Ranks, facts: Mapping[str, Any]) -> None:
    """A collective at the start: what decode steps are chosen by must be the same on all ranks.

    Args:
        ranks: of this process.
        facts: small plain values, by name.

    Raises:
        RuntimeError: on all ranks, naming the first fact that differs.
    """
    found = ranks.gathered(dict(facts))
    for name in facts:
        values = [of_rank.get(name) for of_rank in found]
        if any(value != values[0] for value in values):
            raise RuntimeError(
                f"--sparse-attn: expected the same {name} on all {ranks.size} tensor-parallel ranks, got {values}. "
                "Ranks must choose the same decode graph in every step: give them one kind of GPU, one model folder, "
                "one configuration"
            )
