"""Which indexes leave a full store first. Pure functions: no clock, no I/O, no state."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from .errors import InvalidPayload
from .store import IndexEntry, Retention

Rank: TypeAlias = tuple[float, float]
"""Of two indexes, the one of the smaller rank leaves first."""

_SHORTEST_IDLE_S: Final = 1e-3


class Candidate(NamedTuple):
    """An index that could leave. ``last_used`` is in seconds, by the clock that also gives ``now``."""

    entry: IndexEntry
    last_used: float


def has_expired(retention: Retention, now: float) -> bool:
    """Whether an index of this retention is a miss at ``now`` (seconds since the Unix epoch)."""
    return retention.expires is not None and retention.expires <= now


def lru(candidate: Candidate, now: float) -> Rank:
    """The least recently used first."""
    return candidate.last_used, 0.0


def cost_aware(candidate: Candidate, now: float) -> Rank:
    """First what costs least to build again, per byte held and per second since its last use.

    The order of GreedyDual-Size-Frequency caches without the frequency: build_seconds / (nbytes * idle seconds).
    """
    idle = max(now - candidate.last_used, _SHORTEST_IDLE_S)
    return candidate.entry.build_seconds / (max(candidate.entry.nbytes, 1) * idle), candidate.last_used


EvictionPolicy: TypeAlias = Callable[[Candidate, float], Rank]
POLICIES: Final[Mapping[str, EvictionPolicy]] = MappingProxyType({"lru": lru, "cost_aware": cost_aware})


def policy_of(name: str) -> EvictionPolicy:
    """The policy of that name. Raises InvalidPayload."""
    try:
        return POLICIES[name]
    except (KeyError, TypeError):
        raise InvalidPayload("eviction", " or ".join(POLICIES), repr(name), "choose one of them") from None


def choose_victims(
    candidates: Iterable[Candidate],
    nbytes: int,
    *,
    policy: EvictionPolicy,
    now: float,
    latest: float | None = None,
    last_used: Callable[[Candidate], float] | None = None,
) -> Sequence[IndexEntry] | None:
    """The fewest first leavers that hold ``nbytes`` bytes together; None where all of them do not.

    Order: expired, then not pinned, then pinned; within each by ``policy``. ``last_used`` looks up a candidate's
    true last use, asked only of those about to leave: for a store that knows only at least how recent it is.
    ``latest`` is when anything was used last; idle times count from it where it lies after ``now``, because the clock
    was set back.
    """
    present = now if latest is None else max(now, latest)
    heap = [(*_rank(c, policy, now, present), i, c) for i, c in enumerate(candidates)]
    if sum(c.entry.nbytes for *_, c in heap) < nbytes:
        return None
    heapq.heapify(heap)
    victims: list[IndexEntry] = []
    freed = 0
    while freed < nbytes:
        *_, i, candidate = heap[0]
        if last_used is not None:
            used = last_used(candidate)
            if used > candidate.last_used:
                fresh = candidate._replace(last_used=used)
                heapq.heapreplace(heap, (*_rank(fresh, policy, now, present), i, fresh))
                continue
        heapq.heappop(heap)
        victims.append(candidate.entry)
        freed += candidate.entry.nbytes
    return victims


def _rank(candidate: Candidate, policy: EvictionPolicy, now: float, present: float) -> tuple[int, Rank]:
    retention = candidate.entry.retention
    group = 0 if has_expired(retention, now) else 2 if retention.pinned else 1
    return group, policy(candidate, present)
