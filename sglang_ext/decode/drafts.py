"""How many tokens lossless decode drafts: by how many of them exact steps have kept, and by what rounds have taken."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from sglang_ext.decode.costs import Watch

MEMORY = 0.98
"""What a round's drafts still count for a round later: some 50 rounds are remembered."""
TRUST = 16.0
"""Kept drafts that an index which nothing is known of begins with."""
LEAST = 0.5
"""A token is drafted where it is likelier kept than dropped."""
AGAIN = 64
"""Of rounds without a draft, one in so many may try one."""
OTHERWISE = 256
"""Of rounds one in so many drafts another number than seems best, the most or each in turn: times may have changed."""
SLOWER = 0.125
"""Part of a round's time in what is known of such rounds, where it took longer than that; else it is all of it."""
STALL = 2.0
"""Times of what is known that a round counts for, at most: now and then everything waits for something else."""
LEARNT = 4
"""Rounds of a number that are measured before it is known: in the first ones kernels are compiled, slots compared."""
TRIES = 4 * LEARNT
"""Rounds that were to draft a number and drafted fewer: behind so many there is no room for it."""
KNOWN = 4096
"""Indexes that are remembered: those that drafted last."""


@dataclass
class _Behind:
    kept: float = TRUST
    tried: float = TRUST
    idle: int = 0


class DraftLengths:
    """Counts drafts by the digest of the index that drafted them.

    Args:
        most: tokens of a round.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._behind: dict[str, _Behind] = {}

    def acceptance(self, digest: str) -> float:
        """Share of drafts that were kept, of those that all drafts before were kept of; 1 of an unknown index."""
        behind = self._behind.get(digest, _Behind())
        return behind.kept / behind.tried

    def wanted(self, digest: str) -> int:
        """Tokens to draft in a request's next round: the last one is kept with a probability of `LEAST` or more."""
        share = self.acceptance(digest)
        most = self._most if share >= 1.0 else int(math.log(LEAST) / math.log(share)) if share > 0.0 else 0
        if most > 0:
            return min(most, self._most)
        behind = self._behind[digest]
        behind.idle = (behind.idle + 1) % AGAIN
        return int(behind.idle == 0)

    def verified(self, digest: str, drafted: int, accepted: int) -> None:
        """A round ended. Drafts behind the first one that was dropped say nothing: they follow another token.

        Args:
            digest: of the index.
            drafted, accepted: tokens.
        """
        if not drafted:
            return
        behind = self._behind[digest] = self._behind.pop(digest, _Behind())  # now the last one
        if len(self._behind) > KNOWN:
            del self._behind[next(iter(self._behind))]
        behind.kept = MEMORY * behind.kept + accepted
        behind.tried = MEMORY * behind.tried + min(drafted, accepted + 1)


class Drafting(NamedTuple):
    """A request that may draft in a round.

    Attributes:
        most: tokens.
        kept: share of drafts that are kept, of those that all drafts before were kept of.
    """

    most: int
    kept: float

    def tokens(self, count: int) -> float:
        """Drafts that are likely to be kept where it makes so many or `most`."""
        return sum(self.kept**n for n in range(1, min(count, self.most) + 1))


@dataclass
class _Alike:
    """Rounds of about as many requests and tokens, of which about as many may draft: by tokens drafted, seconds, how
    many of them were measured, and, by tokens that were to be drafted, how many there were."""

    seconds: dict[int, float] = field(default_factory=dict)
    measured: Counter[int] = field(default_factory=Counter)
    tried: Counter[int] = field(default_factory=Counter)
    rounds: int = 0

    def took(self, count: int, seconds: float) -> None:
        before = self.seconds.get(count, seconds)
        self.seconds[count] = min(seconds, before + SLOWER * (min(seconds, STALL * before) - before))
        self.measured[count] += 1

    def expected(self) -> list[float]:
        """Of rounds of no drafts, one, and so on; of a number not known, what lies between its neighbours."""
        known = [count for count in sorted(self.seconds) if self.measured[count] >= LEARNT]
        if not known or known[0] > 0:
            return []
        counts = np.arange(known[-1] + 1)
        return list(np.interp(counts, known, [self.seconds[count] for count in known]).tolist())

    def is_unknown(self, count: int) -> bool:
        """Whether a number is to be tried because too little is known of it, and may yet be: there is room for it."""
        return self.measured[count] < LEARNT and self.tried[count] < TRIES

    def unknown(self, most: int) -> int | None:
        """A number to be tried before others: the most that a round may draft, and none."""
        known = [count for count in {*self.tried, *self.measured} if not self.is_unknown(count)]
        return most if max(known, default=0) < most else 0 if 0 not in known else None


class RoundTimes:
    """Measures rounds, and says how many tokens the next one drafts.

    Args:
        device: that the model runs on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[int, int, int], _Alike] = {}
        self._watch: Watch | None = None
        self._tokens = self._count = 0
        self._running = _Alike()
        self._measured: deque[tuple[Watch, _Alike, int]] = deque()

    def begin(self, tokens: int, *, anew: bool = True) -> None:
        """A round of requests of so many tokens begins. Never waits for the device.

        Args:
            anew: now; else it began before, with other requests.
        """
        while self._measured and self._measured[0][0].is_over():
            watch, alike, count = self._measured.popleft()
            alike.took(count, watch.seconds())
        if anew or self._watch is None:
            self._watch = Watch(self._device)
        self._tokens = tokens

    def ended(self, drafted: int) -> None:
        """All of the round is launched, in which a request drafted so many tokens, at most."""
        assert self._watch is not None
        self._watch.stop()
        self._measured.append((self._watch, self._running, drafted))
        self._running.tried[self._count] += 1

    def choose(self, size: int, drafting: Sequence[Drafting]) -> int:
        """Tokens that each request of the round drafts, at most: what gives most tokens a second, as far as is known.

        Args:
            size: requests of the round.
            drafting: those that may draft.
        """
        about = size.bit_length(), len(drafting).bit_length(), self._tokens.bit_length()
        self._running = self._known.setdefault(about, _Alike())
        self._count = self._best(size, drafting, self._running) if drafting else 0
        return self._count

    def _best(self, size: int, drafting: Sequence[Drafting], known: _Alike) -> int:
        most = max(one.most for one in drafting)
        unknown = known.unknown(most)
        if unknown is not None:
            return unknown
        known.rounds += 1
        turn, due = divmod(known.rounds, OTHERWISE)
        if not due:
            return most if turn % 2 else turn // 2 % (most + 1)
        times = known.expected()[: most + 1]
        if not times:
            return 0  # the device has not come to the end of those that were tried
        gain = [(size + sum(one.tokens(count) for one in drafting)) / one for count, one in enumerate(times)]
        best = gain.index(max(gain))
        beside = [count for count in (best + 1, best - 1) if 0 <= count <= most and known.is_unknown(count)]
        return beside[0] if beside else best


class Rounds:
    """How many tokens the requests of a round draft.

    Attributes:
        lengths: by what was kept.
        times: by what rounds take.

    Args:
        most: tokens of a request.
        device: that the model runs on.
        forced: whether all draft what is likely to be kept, whatever that costs.
    """

    def __init__(self, most: int, device: torch.device, *, forced: bool) -> None:
        self.lengths, self.times, self._forced = DraftLengths(most), RoundTimes(device), forced

    def begin(self, tokens: int, *, anew: bool = True) -> None:
        """As `RoundTimes.begin`."""
        if not self._forced:
            self.times.begin(tokens, anew=anew)

    def ended(self, drafted: int) -> None:
        """All of the round is launched; tokens that a request drafted, at most."""
        if not self._forced:
            self.times.ended(drafted)

    def may(self, digests: Sequence[str | None]) -> list[Drafting | None]:
        """What requests may draft, by the indexes that they would draft with; None where one has none."""
        lengths = self.lengths
        return [None if one is None else Drafting(lengths.wanted(one), lengths.acceptance(one)) for one in digests]

    def drafts(self, may: Sequence[Drafting | None]) -> list[int]:
        """Tokens that each request of the round drafts, by what it may."""
        most = [0 if one is None else one.most for one in may]
        if self._forced:
            return most
        count = self.times.choose(len(may), [one for one in may if one is not None and one.most])
        return [min(one, count) for one in most]
