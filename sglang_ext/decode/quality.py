"""What the guard's figures say of each index: it serves, its budget is raised, or it decodes dense for a while.

Knows no device. With tensor parallelism all ranks decide alike: by steps that are counted, and by figures that were
exchanged. Only when a dense index is tried again is each rank's own clock asked; ranks then vote on each new request.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from math import fsum
from statistics import mean, stdev
from typing import Any

logger = logging.getLogger(__name__)

LEAST_SAMPLES = 3
"""Guarded steps that a verdict takes, at least."""
EARLY = (2, 4, 8, 32, 128)
"""Steps of an index, from the one on in which it began to serve, that are guarded beside one in `guard_every`."""
TRIAL_STEPS = (1, 9)
"""Of an index on trial these steps of each request are guarded, from the first one on that it could serve; the others
are dense. What an index misses depends on the question: one long answer must not decide."""
PREDICT_EVERY = 4
"""One in so many guarded steps compares next tokens, too."""
LARGEST_FACTOR = 4
"""Of a budget, in steps of 2."""
DEFAULT_SLO = 0.25
"""Bound of an index on trial where `quality_slo` is null."""
_LEAST_COST = 0.1
_WINDOW = 16
"""Guarded steps of an index that count, the latest ones."""
_KEPT, _SHOWN = 1024, 64
"""Indexes that are remembered, and that are shown, at most."""


class Standing(Enum):
    """Whether an index serves: it does; only beside exact attention; or for a while not at all."""

    SERVING = "serving"
    TRIAL = "trial"
    DENSE = "dense"


@dataclass
class Record:
    """What is known of one index.

    Attributes:
        prefix_len: tokens.
        standing: see there.
        epoch: how often its standing changed.
        factor: of its budget.
        created: when the index was made, seconds since the epoch; 0: not known.
        steps: that it served, since its standing changed.
        owed: whether an early step of it has not been guarded yet.
        tried: steps of each request that it could have served on trial, by the request's serial.
        guarded: steps that were compared, ever.
        errors: of the latest ones since its standing changed, relative output error, mean over the selecting layers.
        recall, output_error: per layer, running means; empty before the first guarded step.
        tokens, agreed: next tokens that were compared, and those that were the same.
        until: when it is tried again, seconds of `time.monotonic`.
    """

    prefix_len: int
    standing: Standing
    epoch: int = 0
    factor: int = 1
    created: float = 0.0
    steps: int = 0
    owed: bool = False
    tried: Counter[int] = field(default_factory=Counter)
    guarded: int = 0
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    recall: list[float] = field(default_factory=list)
    output_error: list[float] = field(default_factory=list)
    tokens: int = 0
    agreed: int = 0
    until: float = 0.0

    def become(self, standing: Standing) -> None:
        """Its standing changes: what was measured before does not count."""
        self.standing, self.steps, self.epoch, self.owed = standing, 0, self.epoch + 1, False
        self.errors.clear()
        self.tried.clear()

    def precedes(self, created: float) -> bool:
        """Whether it is of an earlier build than the one that was made then."""
        return 0.0 < self.created < created

    def serve(self) -> None:
        """One step more that it serves."""
        self.steps += 1
        self.owed = self.owed or self.steps in EARLY

    def its_turn(self, serials: Sequence[int]) -> bool:
        """On trial, one step of these requests more: whether it is one to be guarded."""
        if len(self.tried) > _KEPT:
            self.tried.clear()
        self.tried.update(serials)
        return any(self.tried[serial] in TRIAL_STEPS for serial in serials)


@dataclass(frozen=True)
class Sample:
    """Of one guarded step, the rows of one index.

    Attributes:
        epoch: of the index, when the step began.
        recall, output_error: per layer, means over the rows.
        tokens, agreed: next tokens that were compared, and those that were the same.
    """

    epoch: int
    recall: Sequence[float]
    output_error: Sequence[float]
    tokens: int = 0
    agreed: int = 0


class Schedule:
    """Which steps may be guarded, so that the guard's part of the steps' time stays below a share.

    Counts in plain steps, so that all ranks count alike.

    Attributes:
        cost: what a guarded step takes beyond a plain one, in plain steps.
    """

    _BURST = 16
    """Guarded steps that may follow each other at once."""

    def __init__(self, share: float) -> None:
        self._share = share
        self.cost = 4.0
        self._ahead = 0.0  # guarded steps that are not earned yet

    def allows(self) -> bool:
        """Whether the next step may be guarded."""
        return self._ahead < self._BURST

    def took(self, *, guarded: bool) -> None:
        """A decode step is over."""
        cost = max(self.cost, _LEAST_COST)
        earned = self._share * (1.0 + guarded * cost) / cost
        self._ahead = max(0.0, self._ahead + guarded - earned)


class QualityRecords:
    """All indexes that served, or were to, the most recent ones.

    Attributes:
        known: records by digest, the most recent ones last. Written here only.
        clock: seconds.
        events: so far, by kind: `accepted`, `raised`, `dense`, `tried_again`.
        steps: guarded ones whose figures are here.

    Args:
        slo: largest relative output error of an index, mean over the selecting layers; None: it is only measured.
        recovery_s: seconds that an index decodes dense.
        trial: whether an index serves only after it has passed.
        selecting: numbers of the layers that select, one at least.
        budget: (tokens of a prefix, factor) -> tokens of its budget.
        clock: seconds.
    """

    def __init__(
        self,
        slo: float | None,
        recovery_s: float,
        *,
        trial: bool,
        selecting: Sequence[int],
        budget: Callable[[int, int], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slo, self._recovery_s, self._trial = slo, recovery_s, trial
        self._bound = DEFAULT_SLO if slo is None else slo
        self._selecting, self._budget, self.clock = list(selecting), budget, clock
        self.known: OrderedDict[str, Record] = OrderedDict()
        self.events: Counter[str] = Counter()
        self.steps = self._compared = self._agreed = 0

    def of(self, digest: str, prefix_len: int) -> Record:
        """What is known of an index; it is the most recent one now. The least recent one of too many is forgotten."""
        if digest not in self.known:
            self.known[digest] = Record(prefix_len, self._first())
            if len(self.known) > _KEPT:
                self.known.popitem(last=False)
        self.known.move_to_end(digest)
        return self.known[digest]

    def _first(self) -> Standing:
        return Standing.TRIAL if self._trial else Standing.SERVING

    def made(self, digest: str, created: float) -> None:
        """An index that was made then is there: what was found of an earlier one of this digest does not count."""
        record = self.known.get(digest)
        if record is None or created <= record.created:
            return
        if record.precedes(created):
            record = self.known[digest] = Record(record.prefix_len, self._first(), record.epoch + 1)
        record.created = created

    def budget_changed(self) -> None:
        """What was measured by another budget does not count; what did not serve is tried again."""
        for record in self.known.values():
            serves = record.standing is Standing.SERVING and not self._trial
            record.factor = 1
            record.become(Standing.SERVING if serves else Standing.TRIAL)

    def blocks(self, digest: str, created: float, *, may_end: bool = True) -> bool:
        """Whether an index decodes dense now.

        Args:
            digest: of the index.
            created: when it was made: one that is newer than what was measured serves.
            may_end: whether one whose time is over is on trial from here on; else it stays dense until that is asked.
        """
        record = self.known.get(digest)
        if record is None or record.standing is not Standing.DENSE or record.precedes(created):
            return False
        self.known.move_to_end(digest)
        if not may_end or self.clock() < record.until:
            return True
        record.become(Standing.TRIAL)
        self._tell("tried_again", digest, record, "its time is over")
        return False

    def standing(self, digest: str, created: float) -> Standing:
        """Of an index that was made then, as its next request would find it. Changes nothing; `blocks`, `of` do."""
        record = self.known.get(digest)
        if record is None or record.precedes(created):
            return self._first()
        over = record.standing is Standing.DENSE and self.clock() >= record.until
        return Standing.TRIAL if over else record.standing

    def factor(self, digest: str) -> int:
        """Of the budget of an index."""
        record = self.known.get(digest)
        return 1 if record is None else record.factor

    def add(self, digest: str, sample: Sample) -> None:
        """A guarded step compared an index; may change its standing, unless it has changed since then."""
        self._compared, self._agreed = self._compared + sample.tokens, self._agreed + sample.agreed
        record = self.known.get(digest)
        if record is None or sample.epoch != record.epoch:
            return
        record.guarded += 1
        record.tokens, record.agreed = record.tokens + sample.tokens, record.agreed + sample.agreed
        part = 1 / min(record.guarded, _WINDOW)
        record.recall = _moved(record.recall, sample.recall, part)
        record.output_error = _moved(record.output_error, sample.output_error, part)
        record.errors.append(mean(sample.output_error[layer] for layer in self._selecting))
        if len(record.errors) >= LEAST_SAMPLES:
            self._judge(digest, record)

    def _judge(self, digest: str, record: Record) -> None:
        found, several = mean(record.errors), list(record.errors)
        spread = 2 * stdev(several) / len(several) ** 0.5
        said = f"output error {found:.3f} in {len(several)} guarded steps, at most {self._bound:g} is wanted"
        if record.standing is Standing.TRIAL:
            if found + spread <= self._bound:
                record.become(Standing.SERVING)
                self._tell("accepted", digest, record, said)
            elif found > self._bound or len(several) == _WINDOW:
                self._raise(digest, record, said)
        elif self._slo is not None and found - spread > self._bound:
            self._raise(digest, record, said)

    def _raise(self, digest: str, record: Record, why: str) -> None:
        """More budget, on trial; where there is none to give, dense."""
        higher, length = 2 * record.factor, record.prefix_len
        now, then = self._budget(length, record.factor), self._budget(length, higher)
        if higher <= LARGEST_FACTOR and now < then <= length // 2:  # with more, a broken index would hide
            record.factor = higher
            record.become(Standing.TRIAL)
            self._tell("raised", digest, record, why)
        else:
            record.become(Standing.DENSE)
            record.until = self.clock() + self._recovery_s
            self._tell("dense", digest, record, why)

    def _tell(self, event: str, digest: str, record: Record, why: str) -> None:
        self.events[event] += 1
        tokens = self._budget(record.prefix_len, record.factor)
        logger.warning(
            "sparse attention: quality guard: index %s %s: %s; budget %d of %d tokens (x%d)",
            digest[:12], event.replace("_", " "), why, tokens, record.prefix_len, record.factor,
        )  # fmt: skip

    def totals(self) -> dict[str, Any]:
        """Guarded steps, events, next tokens compared and agreed; per layer means of the most recent indexes' figures:
        of so few that the scheduler's thread has time for it.
        """
        known = [one for one in islice(reversed(self.known.values()), _SHOWN) if one.guarded]
        found: dict[str, Any] = {"steps": self.steps, "events": self.events, "compared": self._compared}
        found["agreed"] = self._agreed
        for name in ("recall", "output_error"):
            found[name] = [fsum(of) / len(of) for of in zip(*(getattr(one, name) for one in known), strict=True)]
        return found

    def snapshot(self) -> dict[str, Any]:
        """Figures of the most recent indexes, and events, as plain values. Means are over the layers that select."""
        recent = list(self.known.items())[-_SHOWN:]
        return {
            "steps": self.steps,
            "slo": self._slo,
            "events": dict(self.events),
            "indexes": {digest: self._shown(one) for digest, one in recent if one.guarded},
        }

    def _shown(self, record: Record) -> dict[str, Any]:
        of = {name: getattr(record, name) for name in ("factor", "guarded", "recall", "output_error", "tokens")}
        means = {f"mean_{name}": mean(of[name][i] for i in self._selecting) for name in ("recall", "output_error")}
        return {"standing": record.standing.value, **of, "agreed": record.agreed, **means}


def _moved(before: list[float], values: Sequence[float], part: float) -> list[float]:
    """A running mean, moved by a part of the way."""
    return [old + part * (new - old) for old, new in zip(before or values, values, strict=True)]
