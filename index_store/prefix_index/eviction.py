"""Which indexes leave a full store first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from .errors import InvalidPayload
from .store import IndexEntry, has_expired

Rank: TypeAlias = tuple[float, float]
"""Of two indexes, the one of the smaller rank leaves first."""

_SHORTEST_IDLE_S: Final = 1e-3


class Candidate(NamedTuple):
    """An index that could leave. ``last_used`` is in seconds, by the clock that also gives ``now``."""

    entry: IndexEntry
    last_used: float


def lru(candidate: Candidate, now: float) -> Rank:
    """The least recently used first."""
    return candidate.last_used, 0.0


def cost_aware(candidate: Candidate, now: float) -> Rank:
    """First what costs least to build again, per byte held and second since its last use (GreedyDual-Size)."""
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
    candidates: Iterable[Candidate], nbytes: int, *, policy: EvictionPolicy, now: float, latest: float = 0.0
) -> Sequence[IndexEntry] | None:
    """The fewest first leavers that hold ``nbytes`` bytes together; None where all of them do not.

    Order: expired, then not pinned, then pinned; within each by ``policy``. Idle times count from ``latest``, the last
    use of all, where it lies after ``now``: the clock was set back.
    """

    def rank(candidate: Candidate) -> tuple[int, Rank]:
        retention = candidate.entry.retention
        group = 0 if has_expired(retention, now) else 2 if retention.pinned else 1
        return group, policy(candidate, max(now, latest))

    victims: list[IndexEntry] = []
    for entry, _ in sorted(candidates, key=rank):
        if nbytes <= 0:
            break
        victims.append(entry)
        nbytes -= entry.nbytes
    return victims if nbytes <= 0 else None


class FolderLimits(NamedTuple):
    """``max_bytes`` for all index files together (None: any), ``min_free_bytes`` to leave free on the disk."""

    max_bytes: int | None
    min_free_bytes: int
    policy: EvictionPolicy

    @property
    def any(self) -> bool:
        return self.max_bytes is not None or self.min_free_bytes > 0
