"""What a decode step counts as: in the counters of the process, in the logs of its requests, and by index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

from sglang_ext.decode.guard import GuardedStep
from sglang_ext.decode.sparse import SparseDecode, SparsePlan
from sglang_ext.decode.types import DecodeBatch, StepPath
from sglang_ext.metrics import Counters
from sglang_ext.prefix.requests import SPARSE, Attachment
from sglang_ext.prefix.residency import ResidentIndex


class StepAccount:
    """Of one process.

    Attributes:
        counters: receives the rows.
        kept_steps: that attended what an earlier step selected.
        saved_us: by digest of an index, microseconds that it saved by measured costs, a step's by the tokens not read.

    Args:
        counters: of the process.
    """

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self.kept_steps = 0
        self.saved_us: defaultdict[str, float] = defaultdict(float)

    def fallback(self, reason: str, attachments: Sequence[Attachment | None], concerned: Sequence[object]) -> None:
        """Requests decode dense.

        Args:
            reason: its name.
            attachments: by row.
            concerned: by row; None: it does not concern the row.
        """
        for one, concerns in zip(attachments, concerned, strict=True):
            if one is not None and concerns is not None:
                one.count(reason, self.counters)

    def sparse(
        self,
        backend: SparseDecode,
        plan: SparsePlan,
        path: StepPath,
        batch: DecodeBatch,
        attachments: Sequence[Attachment | None],
        saved_us: float,
        *,
        drafts: bool,
    ) -> None:
        """A step by indexes has begun.

        Args:
            backend: attends it.
            plan, path: of the step.
            batch: its rows.
            attachments: by row.
            saved_us: microseconds that it saves by measured costs; 0 where none were measured.
            drafts: whether no request is told what it says.
        """
        self.kept_steps += path is StepPath.KEPT
        rows, sparse = len(batch.serials), sum(one.rows for one in plan.reads)
        self.counters.count_groups(path.counted, len(plan.reads), saved_us)
        spared = [one.rows * one.prefix_len - one.budget for one in plan.reads]
        for index, tokens in zip(plan.indexes, spared, strict=False):  # then those of suffixes
            if saved_us and isinstance(index, ResidentIndex):
                self.saved_us[index.entry.digest] += saved_us * tokens / max(1, sum(spared))
        self.counters.count_step(sparse, rows - sparse, max(one.rows for one in plan.reads))
        prefix = sum(one.rows * one.prefix_len for one in plan.reads)
        self.counters.count_attended(backend.attended(plan), prefix)
        self.counters.count_attended_suffix(*backend.attended_suffix(plan))
        found = () if drafts else zip(plan.reads, plan.selects.prefixes, strict=False)
        for read, group in found:  # then those of suffixes
            note(SPARSE, group.rows, batch, attachments, read.budget)
        self.fallback("no_room", attachments, [True if row in plan.surplus else None for row in range(rows)])


def note(
    way: int, rows: Iterable[int], batch: DecodeBatch, attachments: Sequence[Attachment | None], selected: int = 0
) -> None:
    """For the responses: rows of a step that go this way, and the tokens of the prefix that they select."""
    for row in rows:
        one = attachments[row]
        if one is not None and batch.seq_lens[row] > one.prompt_len > 0:
            one.steps.note(batch.seq_lens[row] - one.prompt_len, way, selected)


def note_guarded(guarded: GuardedStep, batch: DecodeBatch, attachments: Sequence[Attachment | None]) -> None:
    """For the responses: rows of a step that the guard compares. Behind `note` of the same step."""
    for row in chain.from_iterable(guarded.rows.values()):
        one = attachments[row]
        if one is not None and batch.seq_lens[row] > one.prompt_len > 0:
            one.steps.guarded(batch.seq_lens[row] - one.prompt_len)
