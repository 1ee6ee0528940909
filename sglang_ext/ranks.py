"""What the processes of one tensor-parallel group tell each other, and what they agree on before each decode step.

A call is a collective: it ends when every rank has made it. So calls stand only where all ranks come by in the same
order, whatever each of them knows by itself: at the start, in a decode step and before a batch by a rule on what SGLang
gives to all ranks alike (`Agreement`, `offload.agreement`), and where a control request is served that SGLang
broadcasts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sglang_ext.options import Build


class Ranks:
    """The group, as one of its processes sees it. By itself that of a process without others, which agrees with itself.

    Attributes:
        rank, size: its place, and how many there are.
    """

    rank, size = 0, 1

    def least(self, values: Sequence[int]) -> list[int]:
        """Per place the least that any rank gives; as many values on all of them, within 64 bits."""
        return list(values)

    def most(self, values: Sequence[float]) -> list[float]:
        """Per place the most that any rank gives; as many values on all of them."""
        return list(values)

    def gathered(self, value: Any) -> list[Any]:
        """What each rank gives, by rank; small plain values."""
        return [value]


class ProcessRanks(Ranks):
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


def ranks_of(rank: int, size: int) -> Ranks:
    """The ranks of this server, by the place in SGLang's tensor-parallel group. A collective with more than one: every
    scheduler process builds its backend once.

    The group is our own, so that no call of SGLang's, from whatever thread, comes between ours.

    Raises:
        RuntimeError: SGLang's processes are not the tensor-parallel ranks alone.
    """
    if size == 1:
        return Ranks()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != size or dist.get_rank() != rank:
        raise RuntimeError(
            f"--sparse-attn: expected {size} processes, one for each tensor-parallel rank; got {world}. Use no other "
            "parallelism beside --tp-size."
        )
    return ProcessRanks(dist.new_group(list(range(size)), backend="gloo"))


def check_alike(ranks: Ranks, facts: Mapping[str, Any]) -> None:
    """A collective at the start: what decode steps are chosen by, small plain values by name, must be the same on all
    ranks.

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


EVERY = 8
"""Decode steps between two votes while only indexes that are being loaded are asked for."""

KEPT = 4096
"""Requests that are remembered, at most, beside the batch's: of some SGLang never gives a slot back (sessions)."""

READY, LOADING = 2, 1
"""States of an index. Lesser ones are reasons for which a request decodes dense, by their numbers, negative."""
_HEADER = 3
_DIGEST_DIGITS = 15
"""Of a digest in hex: 60 bits, so that its negative is a 64-bit integer, too."""


class Word(NamedTuple):
    """What a rank, or all of them, say of one request.

    Attributes:
        state: READY, LOADING, or 0 and less: a reason.
        shares: whether it may be attended in a group.
        digest: hex digest of the index that the rank holds for it; empty without one.
    """

    state: int
    shares: bool
    digest: str = ""


class Agreement:
    """The votes of one process. Used by the scheduler's thread only.

    Attributes:
        votes: so far.
        history: checksum of all steps' paths: the same on all ranks, or they went apart.

    Args:
        ranks: of this process.
        mismatch: state of a request for which ranks hold different indexes.
    """

    def __init__(self, ranks: Ranks, mismatch: int) -> None:
        self._ranks = ranks
        self._mismatch = mismatch
        self._agreed: dict[str, Word] = {}
        self._steps = 0
        self.votes = 0
        self.history = 0

    def settle(
        self, rids: Sequence[str], word: Callable[[str], Word], *, refused: bool
    ) -> tuple[dict[str, Word], str | None]:
        """A decode step begins: vote, where there is something to vote on.

        A collective, or none on any rank. `word` may wait for this rank's own disk, but for no other rank, and must not
        raise: the others are waiting.

        Args:
            rids: of the batch.
            word: this rank's, of one request.
            refused: whether this rank serves no step in groups any more.

        Returns:
            What was agreed of the requests that were asked for; and why no rank may serve another step in groups, if
            any of them refuses, or they took different paths before.
        """
        self._steps += 1
        if len(self._agreed) > KEPT:
            self._agreed = {rid: self._agreed[rid] for rid in rids if rid in self._agreed}
        asked = [rid for rid in dict.fromkeys(rids) if rid not in self._agreed]
        if asked or self._steps % EVERY == 0:
            asked += [rid for rid in dict.fromkeys(rids) if rid in self._agreed and self.loading(rid)]
        if not asked:
            return {}, None
        values = [self.history, -self.history, 0 if refused else 1]
        for one in map(word, asked):
            number = int(one.digest[:_DIGEST_DIGITS] or "0", 16)
            values += [one.state, int(one.shares), number, -number]
        least = self._ranks.least(values)
        self.votes += 1
        for place, rid in enumerate(asked):
            state, shares, low, high = least[_HEADER + 4 * place :][:4]
            self._agreed[rid] = Word(self._mismatch if state > 0 and low != -high else state, bool(shares))
        problem = None if least[2] else "another tensor-parallel rank does not attend in groups"
        if least[0] != -least[1]:
            problem = "tensor-parallel ranks took different decode paths: answers since then may be wrong"
        return {rid: self._agreed[rid] for rid in asked}, problem

    def ready(self, rid: str) -> bool:
        """Whether all ranks may use the index that they hold for this request."""
        return rid in self._agreed and self._agreed[rid].state == READY

    def loading(self, rid: str) -> bool:
        """Whether some rank has not loaded its part yet, or nothing was agreed."""
        return rid not in self._agreed or self._agreed[rid].state == LOADING

    def forget(self, rid: str) -> None:
        """SGLang took a request's slot back, on all ranks: should it decode again, it is new."""
        self._agreed.pop(rid, None)

    def took(self, path: str, rows: int) -> None:
        """A decode step of so many rows goes this way."""
        self.history = zlib.crc32(f"{path} {rows}".encode(), self.history)


def build_refusal(build: Build, ranks: int, heads: int) -> str | None:
    """Why a server of so many tensor-parallel ranks cannot build indexes of a model of so many KV heads; None if it
    can, or does not.
    """
    if build is Build.OFF or ranks <= heads:
        return None
    return (
        f"--sparse-attn: expected at most {heads} tensor-parallel ranks (KV heads) to build indexes; got {ranks}. "
        "Build with a smaller --tp-size: any reads the indexes"
    )
