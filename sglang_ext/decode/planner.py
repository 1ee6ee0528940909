"""The one choice of each decode step: groups, costs, backend. And why steps are not attended here, if so."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from prefix_kernels.launching import block_of
from prefix_kernels.types import PagedKV
from sglang_ext.decode.account import StepAccount, note, note_guarded
from sglang_ext.decode.backends import Backends, Given, make_backends, refusal_of
from sglang_ext.decode.base import DecodeBackend
from sglang_ext.decode.cache_rank.client import CacheRank
from sglang_ext.decode.cascade import CascadeDecode, CascadePlan
from sglang_ext.decode.costs import MARGIN, StepCosts
from sglang_ext.decode.grouping import SlotTracker
from sglang_ext.decode.guard import GuardedStep
from sglang_ext.decode.sparse import SparseDecode
from sglang_ext.decode.swap import HostKV
from sglang_ext.decode.types import DecodeBatch, HostPrefix, StepPath
from sglang_ext.methods.base import IndexSpec
from sglang_ext.methods.layer_plan import LayerPlan
from sglang_ext.metrics import Counters
from sglang_ext.model_view import ModelView
from sglang_ext.options import DecodePath, Exactness, SparseAttnConfig
from sglang_ext.prefix.requests import ALONE, CASCADE, Attachment, RequestTable
from sglang_ext.prefix.residency import ResidentIndex
from sglang_ext.prefix.suffix_index import SuffixRules
from sglang_ext.ranks import Ranks

logger = logging.getLogger(__name__)

MAX_BATCH = 128
"""Requests of a batch, at most: the buffers grow with it. Larger batches decode on SGLang's own backend."""

_MEMBERS = 32
"""Requests of the group that decides how little may be shared: fewer must share more to be worth it."""

_LEAST_SHARE = 16
"""A step of groups without an index must save one of so many of its tokens: behind long suffixes, SGLang's kernels
may be the faster ones."""


class Usable(Protocol):
    """The ready index of a request in this step; without one, the reason is counted."""

    def __call__(self, attachment: Attachment | None, *, waits: bool = True) -> ResidentIndex | None:
        """`waits`: for one that is loading, as the settings say."""


class PlannedStep(NamedTuple):
    """A decode step that is attended here.

    Attributes:
        backend: whose tables are written.
        path: which graph is replayed.
        guarded: attends twice and compares, without a graph; None: the step is none of these.
    """

    backend: DecodeBackend[Any]
    path: StepPath
    guarded: GuardedStep | None = None

    @property
    def name(self) -> str:
        """What tells ways apart that other ranks must go, too."""
        if self.guarded is None:
            return self.path.value
        return f"{self.path.value}, guarded{', compared' if self.guarded.predicts else ''}"

    def run(self, q: Tensor, kv: PagedKV, layer: int, sm_scale: float) -> Tensor:
        """One layer; see `DecodeBackend.run`."""
        return (self.guarded or self.backend).run(q, kv, layer, sm_scale)


class DecodePlanner:
    """Decides for each decode step which backend attends it; None: SGLang's own.

    Attributes:
        cascade: attends groups exactly; None where it does not.
        sparse: attends by indexes; None where it does not.
        guard: compares steps with indexes now and then; None where it is off.
        refusal: why no step is attended here; None where some may be.
        forced: whether a ready index is used whatever it costs: `decode_path` is sparse, or there are no decode graphs.
        account: what steps count as.
        drafts: of lossless decode, whether the next step drafts; None where steps by an index answer.
        ahead: whether that step is left out where no index serves it, see `drafting`.
        paused: whether an operator leaves all steps to SGLang for now; what is known of slots is kept up.

    Args:
        config: whether, from how many tokens on, and on which path.
        view: of the model runner.
        requests: the live ones.
        counters: receives the rows.
        spec: of the configured method.
        layer_plan: role of each layer.
        ranks: of this process.
        trial: whether an index serves only after the guard has compared it.
        host: KV of prefixes in host memory; None: there are none.
    """

    def __init__(
        self,
        config: SparseAttnConfig,
        view: ModelView,
        requests: RequestTable,
        counters: Counters,
        spec: IndexSpec,
        layer_plan: LayerPlan,
        ranks: Ranks | None = None,
        *,
        trial: bool = False,
        host: HostKV | None = None,
    ) -> None:
        ranks = ranks or Ranks()
        self.forced = config.decode_path is DecodePath.SPARSE or not view.decode_graphs
        self._min_saved = config.min_shared_tokens
        self._suffix_rules = SuffixRules.of(config)
        self._anchors = layer_plan.anchor_layers
        self._view, self._requests, self.account = view, requests, StepAccount(counters)
        self._costs: dict[int, StepCosts] = {}
        self.drafts = False if config.exactness is Exactness.VERIFY else None
        self.ahead = False
        self._drafted = False
        self._rounds_search = config.search_period is None and not config.select_ahead
        self.paused = False
        self._tracker = SlotTracker(
            min(view.max_requests, MAX_BATCH),
            config.min_shared_tokens // _MEMBERS,
            view.device,
            lockstep=ranks.size > 1,
        )
        self.refusal = refusal_of(config, view)
        made = Backends()
        if self.refusal is None:
            given = Given(config, view, spec, layer_plan, ranks, host, self._tracker, self._costs)
            made = make_backends(given, trial=trial, publish=counters.set_guard)
        self.cascade, self.sparse, self.guard = made

    def refuse(self, why: str) -> None:
        """Serve no step from now on; the log says why, once."""
        if self.guard is not None:
            self.guard.drop()
        if self.cache_rank is not None:
            self.cache_rank.stop()
        if self.refusal is None:
            self.refusal = why
            logger.warning("sparse attention: decode steps are left to SGLang's own backend: %s", why)

    def set_budget(self, config: SparseAttnConfig) -> None:
        """Take the budget of a configuration from the next step on. Raises ValueError: lists have no room for it."""
        assert self.sparse is not None
        self.sparse.set_budget(config)
        if self.guard is not None:
            self.guard.records.budget_changed()
        self._suffix_rules = SuffixRules.of(config)

    @property
    def uses_indexes(self) -> bool:
        """Whether an index could serve a step. After a refusal none does, though the step that runs may end."""
        return self.sparse is not None and self.refusal is None

    def ended(self, serial: int) -> None:
        """A request gave its slots back."""
        self._tracker.ended(serial)

    def step_elsewhere(self, gone: Sequence[int] = ()) -> None:
        """A decode step is not attended here; serials of requests that share nothing from now on."""
        for serial in gone:
            self.ended(serial)
        if self.guard is not None:
            self.guard.drop()
        if self.sparse is not None:
            self.sparse.skip()

    def offloaded(self, rids: Sequence[str]) -> None:
        """A decode step with rows whose prefix lies in host memory is none of `prepare`: all rows attend exactly."""
        for attachment in map(self._requests.get, rids):
            if attachment is not None:
                attachment.count(attachment.reason or "offloaded", self.account.counters)

    # -- a step --------------------------------------------------------------------------------------------

    def prepare(
        self, forward_batch: Any, usable: Usable, hosts: Sequence[HostPrefix | None] = ()
    ) -> PlannedStep | None:
        """How this decode step is attended here; everything that its layers need is then in place. None: not here.

        Args:
            forward_batch: SGLang's, of a decode step.
            usable: the ready index of a request, if it has one.
            hosts: as of `DecodeBatch`. With one of them the step is attended by indexes here, whatever that costs, and
                is none that the guard compares; None: whoever knows such prefixes attends it.
        """
        if self.guard is not None:
            self.guard.collect()
        rids = forward_batch.rids
        if not rids:
            self.step_elsewhere()
            return None
        attachments = [self._requests.get(rid) for rid in rids]
        step = self._prepare(forward_batch, attachments, usable, hosts)
        if step is None and self.ahead:
            return None
        if step is None or step.backend is not self.sparse:
            self.account.counters.count_step(0, len(rids), 0)
        self.account.counters.count_cascade(len(rids) if step is not None and step.backend is self.cascade else 0)
        return step

    @contextmanager
    def drafting(self, *, ahead: bool = False) -> Iterator[None]:
        """Within the block decode steps draft: no request is told what they say.

        Args:
            ahead: the lengths on the host are upper bounds; a step that no index serves is not to be run.
        """
        self.drafts, self.ahead = True, ahead
        try:
            yield
        finally:
            self.drafts = self.ahead = False

    def drafters(self, forward_batch: Any, usable: Usable) -> list[str | None]:
        """Begin a round of lossless decode: digests of the indexes that its requests may draft with. The steps of a
        round are one to what learns of slots, as these may still change between the first two steps of others.

        Args:
            forward_batch: of a step whose rows are the round's requests.
            usable: as for `prepare`.
        """
        attachments = [self._requests.get(rid) for rid in forward_batch.rids]
        batch = self._batch(forward_batch, attachments, usable)
        if batch is None:
            return [None] * len(attachments)
        self._tracker.learn(batch)
        ready = [usable(one) for one in attachments]
        return [None if one is None or self.paused else one.entry.digest for one in ready]

    def _prepare(
        self,
        forward_batch: Any,
        attachments: Sequence[Attachment | None],
        usable: Usable,
        hosts: Sequence[HostPrefix | None],
    ) -> PlannedStep | None:
        batch = self._batch(forward_batch, attachments, usable)
        if batch is None:
            self.step_elsewhere()
            return None
        if self.drafts is None:
            self._tracker.learn(batch)
        ready = [None if self.drafts is False else usable(one) for one in attachments]
        if self.paused:
            self.step_elsewhere()
            return None
        hosted = any(host is not None for host in hosts)
        ready = self._admitted(ready, attachments, hosted=hosted)
        batch = replace(batch, hosts=hosts)
        exact = self.cascade.plan(batch) if self.cascade is not None and not hosted else None
        if self.sparse is not None and any(ready):
            batch = self._with_indexes(batch, attachments, ready)
            step = self._selecting(batch, attachments, exact, hosted=hosted)
            if step is not None:
                return step
        elif self.sparse is not None and (self._rounds_search or not self._drafted):
            self.sparse.skip()
        self._drafted = False
        if self.ahead or exact is None or exact.saved < max(self._min_saved, sum(batch.seq_lens) // _LEAST_SHARE):
            return None
        assert self.cascade is not None
        path = self.cascade.begin(exact, batch)
        if path is None:
            return None
        saved = self._saved_us(batch, self.cascade.cost_us(exact))
        self.account.counters.count_groups(path.counted, len(exact.groups), saved)
        note(CASCADE, range(len(batch.serials)), batch, attachments)
        return PlannedStep(self.cascade, path)

    def _selecting(
        self, batch: DecodeBatch, attachments: Sequence[Attachment | None], exact: CascadePlan | None, *, hosted: bool
    ) -> PlannedStep | None:
        """A step by the batch's indexes; None, and the reason is counted: there is no room, it does not pay, or it must
        be compared and cannot.
        """
        assert self.sparse is not None
        plan, guard = self.sparse.plan(batch), None if hosted else self.guard
        # On trial an index has one step now and then: it is tried where it pays in steps that follow each other.
        tries = plan is not None and guard is not None and guard.tries(plan.indexes)
        cost = None if plan is None else self.sparse.cost_us(plan, lasting=tries)
        pays = hosted or self._pays(cost, exact)
        path = self.sparse.begin(plan, batch) if plan is not None and pays else None
        if plan is None or path is None:
            self.sparse.skip(None if pays else plan)
            if not hosted:  # `offloaded` says more
                self.account.fallback("no_room" if plan is None or pays else "cost_model", attachments, batch.indexes)
            return None
        guarded = None if guard is None else guard.begin(plan, batch)
        if guard is not None and guard.must:
            self.sparse.skip()
            if guarded is None:
                self.account.fallback("quality_guard", attachments, batch.indexes)
                return None
            if guard.exact is self.cascade:
                note(CASCADE, range(len(batch.serials)), batch, attachments)
            note_guarded(guarded, batch, attachments)
            return PlannedStep(guard.exact, StepPath.CASCADE, guarded)
        self._drafted = self.drafts is True
        saved_us = self._saved_us(batch, cost)
        self.account.sparse(self.sparse, plan, path, batch, attachments, saved_us, drafts=self._drafted)
        if guarded is not None:
            note_guarded(guarded, batch, attachments)
        return PlannedStep(self.sparse, path, guarded)

    def _admitted(
        self, ready: list[ResidentIndex | None], attachments: Sequence[Attachment | None], *, hosted: bool
    ) -> list[ResidentIndex | None]:
        """Ready indexes that rows may use in this step; the guard keeps some on trial away, which is counted. With a
        prefix in host memory it compares nothing: no request has its turn.
        """
        if self.guard is None or not any(ready):
            return ready
        admitted = self.guard.admitted(ready, [None if one is None or hosted else one.serial for one in attachments])
        waits = [True if one is not index else None for one, index in zip(ready, admitted, strict=True)]
        self.account.fallback("quality_guard", attachments, waits)
        return admitted

    def costs_alone(self, tokens: int, prefix_len: int, budget: int) -> dict[str, float | None]:
        """Microseconds of attention, all layers, of a step of one request alone: exactly, and by an index, once as many
        steps as may use a search do. None: not measured, as without decode graphs, or there is no index.

        Args:
            tokens: of the request.
            prefix_len: of its index; 0 without one.
            budget: tokens of the prefix that a selecting layer attends.
        """
        size = 1 if self.cascade is None else self.cascade.attentions.padded(1)
        costs = self._costs.get(block_of(size))
        if costs is None:
            return {"exact": None, "sparse": None}
        steps, own = 1 if self.sparse is None else self.sparse.period, max(0, tokens - prefix_len)
        sparse = costs.sparse_us([prefix_len], [budget], own, steps=steps) if prefix_len else None
        return {"exact": costs.exact_us(tokens, 1), "sparse": sparse}

    def _pays(self, selecting: float | None, exact: CascadePlan | None) -> bool:
        """Whether selecting, which takes so many microseconds, is faster than attending all, those of groups once."""
        if self.forced or self.drafts:
            return True
        if self.cascade is None or exact is None:
            return False
        whole = self.cascade.cost_us(exact)
        return whole is not None and selecting is not None and selecting < MARGIN * whole

    def _saved_us(self, batch: DecodeBatch, cost: float | None) -> float:
        """By measured costs, microseconds less than if each row attended its own slots; 0 where none were measured, and
        in lossless decode, whose rows are drafts, too.
        """
        if cost is None or self.cascade is None or self.drafts is not None:
            return 0.0
        alone = self.cascade.cost_us(CascadePlan((), len(batch.seq_lens), sum(batch.seq_lens), 0))
        return 0.0 if alone is None else alone - cost

    def _batch(
        self, forward_batch: Any, attachments: Sequence[Attachment | None], usable: Usable
    ) -> DecodeBatch | None:
        """A decode step as it is described here; None: its rows are not one request each, or too many, or all steps are
        refused: why is counted for each request.
        """
        rids, lens = forward_batch.rids, forward_batch.seq_lens_cpu
        serials = [None if one is None or one.reason in ALONE else one.serial for one in attachments]
        known = [serial for serial in serials if serial is not None]
        several = len(set(known)) < len(known) and self.drafts is not False  # rows of a request and its drafts
        if len(rids) != forward_batch.batch_size or several:  # padded or beam batches
            self.account.fallback("unsupported_mode", attachments, attachments)
            return None
        if lens is None and self._view.decode_graphs:
            self.account.fallback("unsupported_mode", attachments, attachments)
            return None
        if len(rids) > self._tracker.max_batch:
            self.account.fallback("no_room", attachments, [usable(one, waits=False) for one in attachments])
            return None
        if self.refusal is not None:
            for one in attachments:
                usable(one, waits=False)  # counts why not
            return None
        rows, device_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        lens = (lens if lens is not None else device_lens).tolist()
        return DecodeBatch(serials, lens, self._view.req_to_token, rows, device_lens)

    def _with_indexes(
        self, batch: DecodeBatch, attachments: Sequence[Attachment | None], ready: Sequence[ResidentIndex | None]
    ) -> DecodeBatch:
        """A batch with its rows' indexes, and those of their suffixes, with the arrays of all layers."""
        assert self.sparse is not None
        short = [one is not None and n <= one.prefix_len for one, n in zip(ready, batch.seq_lens, strict=True)]
        if any(short):  # rows shorter than their own prompts: nothing we know of does this
            self.account.fallback("index_mismatch", attachments, [True if one else None for one in short])
            ready = [None if one else index for one, index in zip(short, ready, strict=True)]
        batch = replace(batch, indexes=ready)
        if self._suffix_rules is None or not self._anchors:
            return batch
        before = [None if one is None else one.suffix for one in attachments]
        suffix = self._suffix_rules.renew(before, ready, batch.seq_lens)
        del before  # those that have grown go before new ones are made: so many bytes are promised
        for attachment, own in zip(attachments, suffix, strict=True):
            if attachment is not None:
                attachment.suffix = own
        for row, own in enumerate(suffix):
            if own is not None and not own.is_complete:
                begin = own.prefix.prefix_len
                slots = batch.req_to_token[batch.req_pool_indices[row : row + 1]][0, begin : begin + own.prefix_len]
                own.complete(self._anchors, self._view.kv, slots.to(torch.int64), self._view.dtype)
        return replace(batch, suffix=suffix)

    # -- graphs --------------------------------------------------------------------------------------------

    def paths_of(self, size: int) -> tuple[StepPath, ...]:
        """Paths whose graphs of batches of that size are worth capturing, in the order of their captures."""
        if self.refusal is not None or size > self._tracker.max_batch:
            return ()
        return tuple(path for backend in self._backends for path in backend.paths)

    @property
    def _backends(self) -> list[CascadeDecode | SparseDecode]:
        return [one for one in (self.cascade, self.sparse) if one is not None]

    @contextmanager
    def capturing(self, size: int, path: StepPath) -> Iterator[PlannedStep]:
        """Within the block SGLang captures a decode graph of that size; see `paths_of`. Costs are measured before."""
        backend = next(one for one in self._backends if path in one.paths)  # also after a refusal in another capture
        with backend.capturing(size, path):
            if self.sparse is not None and backend is self.sparse:
                costs = self.sparse.measure(size, self._view.kv(0))
                if costs is not None:
                    logger.info(
                        "sparse attention: measured for batches of %d: a layer attends 65,536 tokens in %.0f us, and "
                        "selects among them in %.0f us",
                        size,
                        costs.attend(65536, 1),
                        costs.select(65536, 1),
                    )
            elif self.cascade is not None:
                one = torch.ones(1, dtype=torch.int64, device=self._view.device)
                self.cascade.warm(DecodeBatch([None], [1], self._view.req_to_token, one - 1, one))
            yield PlannedStep(backend, path)

    @property
    def cache_rank(self) -> CacheRank | None:
        """What names candidates on another device."""
        return None if self.sparse is None else self.sparse.cache_rank

    def snapshot(self) -> dict[str, Any]:
        """State as plain values."""
        return {
            "requests": len(self._tracker),
            "compared": len(self._tracker.prefixes),
            "kept_steps": self.account.kept_steps,
            "plans": sum(one.plans for one in self._backends),
            "buffer_bytes": sum(one.nbytes for one in {*self._backends, *([self.guard.exact] if self.guard else ())}),
            "sparse": self.uses_indexes,
            "refusal": self.refusal,
            "cache_rank": None if self.cache_rank is None else self.cache_rank.snapshot(),
        }
