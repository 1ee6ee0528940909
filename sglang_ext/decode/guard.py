"""The live quality guard: now and then a step that selects is attended exactly, too, and both are compared.

A guarded step runs eagerly, also where decode steps replay graphs: it is rare, and a graph of its own for each size of
batch would take memory for good. In each layer both attend by the same queries. Figures stay on the device until two
steps later, when they are there, so nothing waits for them.

Of each row and layer: `recall`, the part of exact attention's weights that the step attended, over the whole context,
mean over the query heads (exp of the difference of both log-sum-exps); `output_error`, |selected - exact| / |exact| of
the layer's attention output, Euclidean over all heads. And the next token, by one forward more that attends exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefix_kernels.types import PagedKV
from sglang_ext.decode.cascade import CascadeDecode
from sglang_ext.decode.costs import Watch
from sglang_ext.decode.quality import PREDICT_EVERY, QualityRecords, Sample, Schedule, Standing
from sglang_ext.decode.sparse import SparseDecode, SparsePlan
from sglang_ext.decode.types import DecodeBatch, Index
from sglang_ext.methods.layer_plan import LayerMode, LayerPlan
from sglang_ext.options import SparseAttnConfig
from sglang_ext.prefix.residency import ResidentIndex
from sglang_ext.ranks import Ranks

logger = logging.getLogger(__name__)

_LATER = 2
"""Steps after which figures are taken, on every rank; the host prepares a step when the one before the last has run."""
_MOST_ERROR = 10.0
"""Of an output error; also what one that is no number counts as."""
_MOST_COST = 32.0
"""Plain steps that a guarded one may count as: the first one may compile."""
_MOVED = 0.25
"""Of the running mean of what a guarded step costs."""


class Figures:
    """What guarded steps write: one buffer of fixed place, sent to the host when a step is over.

    Attributes:
        recall, output_error: [num_layers, max_batch] fp32.
        agrees: [max_batch] fp32, 1 where both next tokens are the same.
    """

    def __init__(self, num_layers: int, max_batch: int, device: torch.device) -> None:
        self._all = torch.zeros(2 * num_layers + 1, max_batch, dtype=torch.float32, device=device)
        self.recall, self.output_error, self.agrees = self._all[:num_layers], self._all[num_layers:-1], self._all[-1]

    def send(self) -> Tensor:
        """A copy on its way to the host: [2 * num_layers + 1, max_batch]."""
        if self._all.device.type != "cuda":
            return self._all.clone()
        copy = torch.empty(self._all.shape, dtype=torch.float32, pin_memory=True)
        return copy.copy_(self._all, non_blocking=True)


@dataclass(frozen=True, eq=False)
class GuardedStep:
    """A step that both backends have begun.

    Attributes:
        sparse: attends by the step's indexes.
        exact: attends all of it.
        figures: are written.
        rows: of each index, by its digest.
        epochs: of each index.
        serves_exact: whether its answer counts: an index of the step is on trial.
        predicts: whether next tokens are compared.
    """

    sparse: SparseDecode
    exact: CascadeDecode
    figures: Figures
    rows: dict[str, list[int]]
    epochs: dict[str, int]
    serves_exact: bool
    predicts: bool

    def run(self, q: Tensor, kv: PagedKV, layer: int, sm_scale: float) -> Tensor:
        """As `DecodeBackend.run`."""
        rows = q.shape[0]
        selected, exact = (one.run(q, kv, layer, sm_scale) for one in (self.sparse, self.exact))
        lost = self.sparse.lse[:rows] - self.exact.lse[:rows]
        self.figures.recall[layer, :rows] = lost.exp().clamp(max=1.0).nan_to_num(0.0).mean(dim=1)
        wanted = exact.float().flatten(1)
        error = (selected.float().flatten(1) - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-20)
        self.figures.output_error[layer, :rows] = error.nan_to_num(_MOST_ERROR).clamp(max=_MOST_ERROR)
        return exact if self.serves_exact else selected

    def compare(self, expected: Tensor, tokens: Tensor) -> None:
        """Next tokens [rows] of the forward that attended exactly, and of the one that counts."""
        self.figures.agrees[: len(tokens)] = (tokens == expected).float()


class _Pending(NamedTuple):
    number: int
    step: GuardedStep
    copy: Tensor
    watch: Watch


@dataclass
class _Now:
    """The step that is being prepared, or runs.

    Attributes:
        trial: digests of indexes on trial whose turn it is.
        selects: whether indexes are used.
        waits: whether it must be guarded.
        guarded, watch: what it is, if it is.
    """

    trial: set[str] = field(default_factory=set)
    selects: bool = False
    waits: bool = False
    guarded: GuardedStep | None = None
    watch: Watch | None = None


class QualityGuard:
    """The guard of one process. Used by the scheduler's thread only.

    Attributes:
        records: what was found of each index.
        exact: attends exactly in guarded steps.

    Args:
        config: how often, and what follows.
        layer_plan: role of each layer.
        sparse, exact: attend.
        max_batch: requests of a batch, at most.
        device: of the model.
        trial: whether an index serves only after it has passed.
        ranks: of this process.
        publish: receives `QualityRecords.totals` when they change.
    """

    def __init__(
        self,
        config: SparseAttnConfig,
        layer_plan: LayerPlan,
        sparse: SparseDecode,
        exact: CascadeDecode,
        max_batch: int,
        device: torch.device,
        *,
        trial: bool,
        ranks: Ranks | None = None,
        publish: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._publish = publish
        self._every, self._ranks, self._device = config.guard_every, ranks or Ranks(), device
        self._sparse, self.exact = sparse, exact
        self._num_layers = len(layer_plan)
        selecting = [number for number, role in enumerate(layer_plan.layers) if role.mode is not LayerMode.DENSE]
        self.records = QualityRecords(
            config.quality_slo, config.quality_recovery_s, trial=trial, selecting=selecting, budget=sparse.budget
        )
        sparse.factor_of = self.records.factor
        self._figures = Figures(self._num_layers, max_batch, device)
        self._schedule = Schedule(config.guard_share)
        self._pending: list[_Pending] = []
        self._now = _Now()
        self._plain: Watch | None = None  # of a step with indexes that was not guarded
        self._plain_wanted, self._plain_s = False, 0.0
        self._step = self._since = self._begun = 0

    # -- a step is prepared --------------------------------------------------------------------------------

    def collect(self) -> None:
        """A decode step begins: take figures that are there. A collective, with several ranks, in such a step."""
        self._step += 1
        self._now = _Now()
        while self._pending and self._step - self._pending[0].number >= _LATER:
            self._take(self._pending.pop(0))

    def admitted(
        self, ready: Sequence[ResidentIndex | None], serials: Sequence[int | None]
    ) -> list[ResidentIndex | None]:
        """Per row, the index that it may use in this step: one on trial only where the step may be guarded.

        Args:
            ready: per row, its index.
            serials: per row, of its request.
        """
        found = {index.entry.digest: index for index in ready if index is not None}
        allowed = set()
        for digest, index in found.items():
            self.records.of(digest, index.prefix_len)
            if self._ranks.size == 1:  # others may hold another build of it for a while
                self.records.made(digest, index.entry.created)
            record = self.records.known[digest]
            if record.standing is Standing.SERVING:
                allowed.add(digest)
            elif record.standing is Standing.TRIAL:
                pairs = zip(ready, serials, strict=True)
                own = [serial for one, serial in pairs if one and one.entry.digest == digest and serial is not None]
                if self._schedule.allows() and record.its_turn(own):
                    allowed.add(digest)
                    self._now.trial.add(digest)
        return [index if index is not None and index.entry.digest in allowed else None for index in ready]

    def begin(self, plan: SparsePlan, batch: DecodeBatch) -> GuardedStep | None:
        """A step that selects as planned has begun: the guarded step, if it is one; see `must`."""
        rows: dict[str, list[int]] = {}
        for prefix, index in zip(plan.selects.prefixes, plan.indexes, strict=True):
            if isinstance(index, ResidentIndex):
                rows.setdefault(index.entry.digest, []).extend(prefix.rows)
        self._now.selects, trial = True, self.tries(plan.indexes)
        self._now.waits = trial
        self._since += 1
        due = self._since >= self._every
        records = [self.records.of(digest, 0) for digest in rows]
        for record in records:
            if record.standing is Standing.SERVING:
                record.serve()
                due = due or record.owed
        if not trial and not (due and self._schedule.allows()):
            return None
        exact = self.exact.plan(batch)
        if exact is None or self.exact.begin(exact, batch) is None:
            return None
        predicts = not trial and self._begun % PREDICT_EVERY == 0
        self._begun, self._since = self._begun + 1, 0
        for record in records:
            record.owed = False
        self._now.guarded = GuardedStep(
            self._sparse,
            self.exact,
            self._figures,
            rows,
            {digest: record.epoch for digest, record in zip(rows, records, strict=True)},
            serves_exact=trial,
            predicts=predicts,
        )
        return self._now.guarded

    def tries(self, indexes: Sequence[Index | None]) -> bool:
        """Whether one of the indexes that this step uses is on trial."""
        return any(isinstance(one, ResidentIndex) and one.entry.digest in self._now.trial for one in indexes)

    @property
    def must(self) -> bool:
        """Whether the step that has begun may not be served unless it is guarded: an index of it is on trial."""
        return self._now.waits

    # -- it runs -------------------------------------------------------------------------------------------

    def runs(self) -> None:
        """The forward of the step begins."""
        if self._now.guarded is not None or (self._plain_wanted and self._now.selects):
            self._now.watch = Watch(self._device)

    def drop(self) -> None:
        """The step that was prepared, or runs, is attended otherwise."""
        self._now = _Now()

    def ran(self) -> None:
        """The forward of the step has been launched."""
        step, watch = self._now.guarded, self._now.watch
        self._schedule.took(guarded=step is not None)
        if watch is None:
            return
        if step is not None:
            try:
                self._pending.append(_Pending(self._step, step, self._figures.send(), watch))
            except RuntimeError as error:  # no memory for the copy: the answer is there, and counts
                if self._ranks.size > 1:
                    raise  # which exchange their figures
                logger.warning("sparse attention: quality guard: figures of a step are lost: %s", error)
        else:
            self._plain = watch
        watch.stop()  # behind the copy: who waits for the end of the step has it
        self._plain_wanted = step is not None

    # -- two steps later -----------------------------------------------------------------------------------

    def _take(self, one: _Pending) -> None:
        one.watch.wait()
        if self._plain is not None:
            self._plain_s = self._plain.seconds() or self._plain_s
        # The worst rank counts. Of each index: what recall lacks, the error, both by layer; next tokens that agree.
        values: list[float] = []
        layers = self._num_layers
        for rows in one.step.rows.values():
            means = one.copy[:, rows].double().mean(dim=1).tolist()
            values += [1.0 - value for value in means[:layers]] + means[layers:]
        values = self._ranks.most([*values, one.watch.seconds(), self._plain_s])
        *values, guarded, plain = values
        if guarded and plain:
            self._schedule.cost += _MOVED * (min(max(0.0, guarded / plain - 1.0), _MOST_COST) - self._schedule.cost)
        width = 2 * layers + 1
        for number, (digest, rows) in enumerate(one.step.rows.items()):
            own, compared = values[number * width :][:width], len(rows) if one.step.predicts else 0
            recall, agreed = [1.0 - lost for lost in own[:layers]], round(own[-1] * compared)
            self.records.add(digest, Sample(one.step.epochs[digest], recall, own[layers:-1], compared, agreed))
        self.records.steps += 1
        if self._publish is not None:
            self._publish(self.records.totals())

    def snapshot(self) -> dict[str, Any]:
        """Figures as plain values; `cost`: of a guarded step beyond a plain one, in plain steps."""
        return {**self.records.snapshot(), "cost": self._schedule.cost}
