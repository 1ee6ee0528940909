"""The plugin's state in one scheduler process: store, directory, residency, requests, recorder, decode.

Knows SGLang only through the view it is given; the hooks that call it live in `compat`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from sglang_ext.config import Settings
from sglang_ext.decode.drafts import Drafting, Rounds
from sglang_ext.decode.planner import DecodePlanner, PlannedStep
from sglang_ext.decode.quality import Standing
from sglang_ext.decode.trace import StepTrace
from sglang_ext.decode.types import HostPrefix, StepPath
from sglang_ext.methods import method_specs
from sglang_ext.methods.layer_plan import LayerPlan, heads_of_rank
from sglang_ext.methods.profile import Profile
from sglang_ext.metrics import EVICTED, Counters, Exporter, Figures
from sglang_ext.model_view import ModelView
from sglang_ext.offload.attention import StagedStep
from sglang_ext.offload.offloading import Offloading
from sglang_ext.options import Build
from sglang_ext.prefill.builder import profile_digest
from sglang_ext.prefill.builds import PrefillBuilds
from sglang_ext.prefill.captures import PrefillCaptures
from sglang_ext.prefill.parts import Parts
from sglang_ext.prefill.recorder import Admission, Chunk, Recording
from sglang_ext.prefill.shared_builds import SharedBuilds
from sglang_ext.prefix.directory import PrefixDirectory
from sglang_ext.prefix.requests import Attachment, Readiness, RequestTable
from sglang_ext.prefix.residency import Residency, State
from sglang_ext.profiles import check_profile, layer_plan_of_rank
from sglang_ext.ranks import Ranks, build_refusal, check_alike

logger = logging.getLogger(__name__)


@dataclass
class Step:
    """The forward that runs now: what its layers have to do.

    Attributes:
        planned: of a decode step that is attended here.
        chunks: of what is recorded.
        staged: of a step with rows whose prefix lies in host memory, that is attended exactly.
        virtual: whether it has such rows: nothing but what was planned may attend them.
    """

    planned: PlannedStep | None = None
    chunks: Sequence[Chunk] = ()
    staged: StagedStep | None = None
    virtual: bool = False


class SparseRuntime:
    """Everything of one process. Made when SGLang builds its attention backend; lives as long as the process.

    Attributes:
        config, started: with the budget in force, and as the server was started; `administration` replaces them.
        loaded_profile: in force; None without one.
        took: how the last decode step was attended here; None: it was not.
        index_hits: requests that found an index, by its digest.
        rounds: of lossless decode.
        offload: prefixes in host memory; None: there are none.
        index_bytes: most device bytes of resident indexes, as `index_gpu_bytes` or the KV pool says.
        trial: whether an index serves only after the guard has compared it.

    Args:
        settings: checked settings.
        view: the target model runner.
        prometheus: export counters.
        ranks: of the tensor-parallel group; None: this process is the only one.
        offloading: makes what keeps prefixes in host memory, of the layer plan; None: nothing does.

    Raises:
        IndexStoreError: the store cannot be used, or its service does not answer.
        ValueError: the profile is of another model, the layer plan does not fit this one, or more ranks build than
            there are KV heads.
        RuntimeError: ranks differ in what decode steps are chosen by, or have no folder in common to build in.
    """

    def __init__(
        self,
        settings: Settings,
        view: ModelView,
        *,
        prometheus: bool = False,
        ranks: Ranks | None = None,
        offloading: Callable[[LayerPlan], Offloading] | None = None,
    ) -> None:
        config, profile = settings.config, settings.profile
        self.config = self.started = config
        self.loaded_profile = profile
        self.view = view
        self.ranks = ranks or Ranks()
        self.counters = Counters(view.num_layers)
        self.requests = RequestTable()
        self.model = view.fingerprint()
        if profile is not None:
            check_profile(profile, self.model)
            logger.info("sparse attention: profile %s of this model", config.profile)
        self.profile = profile_digest(config, profile)
        self.directory = PrefixDirectory(settings, self.model, self.profile, self.counters.set_store)
        self.store = self.directory.store
        plan = layer_plan_of_rank(config.layer_plan, profile, self.model, view.tp_rank, view.tp_size)
        first = heads_of_rank(self.model.num_kv_heads, view.tp_rank, view.tp_size).start
        spec, limit = method_specs(config)[config.method], config.index_bytes(view.kv_bytes)
        self.index_bytes = limit
        self.residency = Residency(self.store, spec, view.num_layers, view.num_kv_heads, view.device, limit, first)
        self.trial = trial = config.build is Build.SHARED and profile is None
        self.offload = None if offloading is None else offloading(plan)
        host = None if self.offload is None else self.offload.host_kv()
        self.planner = DecodePlanner(
            config, view, self.requests, self.counters, spec, plan, self.ranks, trial=trial, host=host
        )
        if self.offload is not None:
            self.offload.serves, self.offload.running = self._serves, self.requests.running
            self.offload.loading = lambda digest: self.residency.state(digest) is State.LOADING
        if self.offload is not None and self.planner.sparse is not None:
            self.offload.select_by(self.planner.sparse)
        guarded = None if self.planner.guard is None else self.planner.guard.records
        self.ready = Readiness(config, self.requests, self.counters, self.ranks, self._release, guarded)
        if self.ranks.size > 1:
            check_alike(self.ranks, self._facts())
        self._looks_up = self.planner.uses_indexes  # nothing that no step could use
        self.builds = self._recording(profile)
        self._trace = None if config.trace_folder is None else StepTrace(config.trace_folder, plan, view.dtype)
        self._step = Step()
        self.rounds = Rounds(config.draft_tokens, view.device, forced=self.planner.forced)
        self.took: StepPath | None = None
        self._exporter = Exporter(self.figures) if prometheus else None
        self.index_hits: Counter[str] = Counter()
        self._misfits: set[str] = set()

    def _recording(self, profile: Profile | None) -> Recording | None:
        """What this process makes of the prompts that it prefills; None for nothing. May be a collective."""
        build, config, ranks, heads = self.config.build, self.config, self.ranks, self.model.num_kv_heads
        if message := build_refusal(build, ranks.size, heads):
            raise ValueError(message)
        if build is Build.PREFILL:
            return PrefillBuilds(self.store, config, self.view, self.model, profile, ranks)
        if build is Build.SHARED and self.planner.uses_indexes:
            return SharedBuilds(self.store, config, self.view, self.model, profile, Parts.of_server(ranks))
        if build is Build.SHARED:
            logger.warning("sparse attention: no index is built: none could be used (see above)")
        return PrefillCaptures(config, self.view) if build is Build.CAPTURE else None

    def _facts(self) -> dict[str, Any]:
        """What all ranks must have in common, so that equal batches take equal paths."""
        view, planner = self.view, self.planner
        return {
            "model": msgspec.to_builtins(self.model),
            "configuration": msgspec.json.encode(self.config).decode(),
            "number of KV slots": view.num_slots,
            "number of running requests": view.max_requests,
            "use of decode graphs": (view.decode_graphs, planner.uses_indexes, planner.refusal),
            "kind of device": view.device.type,
            "pages of host memory": None if self.offload is None else self.offload.host_kv().num_pages,
        }

    # -- admission and the life of a request ---------------------------------------------------------------

    def admit(
        self,
        request: Hashable,
        rid: str,
        prompt: Sequence[int],
        namespace: Mapping[str, str | None],
        refusal: tuple[str, str] | None = None,
        *,
        counted: bool = True,
        repeats: bool = False,
    ) -> None:
        """Look a request up, once, and begin to load what is found. Called at each prefix match of a waiting request.

        Args:
            request: SGLang's request object; held weakly.
            rid: its id.
            prompt: its own prompt's token ids.
            namespace: everything in its RadixKey that is not tokens.
            refusal: (reason, detail) of a request that stays dense in any case.
            counted, repeats: whether an index that is found counts as a hit; as of `Admission`.
        """
        if self.requests.of(request) is not None:
            return
        if self.ready.stale:
            refusal = ("index_mismatch", self.ready.stale)
        hashes: Sequence[bytes] = ()
        if self.ready.off and self._looks_up and refusal is None:
            refusal = ("by_operator", "indexes are turned off")
        if refusal or not self._looks_up:
            attachment = Attachment(rid, refusal[0] if refusal else None)
        else:
            found = self.directory.lookup(namespace, prompt)
            hashes = found.hashes
            attachment = Attachment(rid, found.reason, found.entry)
            if found.entry is not None and self._kept_away(found.entry.digest, found.entry.created):
                attachment.reason = "quality_guard"  # nothing is loaded for it
            elif found.entry is not None:
                if counted:
                    self.counters.hits += 1
                    self.index_hits[found.entry.digest] += 1
                self.residency.prefetch(found.entry, hit=counted)
            elif found.detail is not None and found.detail not in self._misfits:
                self._misfits.add(found.detail)  # few: of another model or configuration
                logger.warning("sparse attention: request %s stays dense: %s", rid, found.detail)
        indexed = 0 if attachment.entry is None else attachment.entry.identity.num_tokens
        if self.builds is not None:
            attachment.admission = Admission(rid, prompt, namespace, refusal, indexed, hashes, repeats)
        attachment.prompt_len = len(prompt)
        self.requests.add(request, attachment)

    def _kept_away(self, digest: str, created: float) -> bool:
        """Whether the guard has an index decode dense now. Several ranks vote on that instead (`Readiness`)."""
        if self.planner.guard is None or self.ranks.size > 1:
            return False
        return self.planner.guard.records.standing(digest, created) is Standing.DENSE

    def _serves(self, attachment: Attachment) -> bool:
        """Whether steps select by a request's index, as far as is known now."""
        planner, entry = self.planner, attachment.entry
        if entry is None or planner.paused or not planner.uses_indexes or self.ready.off or self.ready.stale:
            return False
        if attachment.index is None and self.residency.state(entry.digest) is State.FAILED:
            return False  # of one with a slot, `ready` knows
        return planner.guard is None or planner.guard.records.standing(entry.digest, entry.created) is Standing.SERVING

    def slot_taken(self, request: Hashable, *, offloaded: bool = False) -> Attachment | None:
        """A request has a slot: until it gives it back it holds its index, and its prefill may be recorded. One that
        waits holds nothing: it may be aborted, and nobody says so. Called at each chunk of a prefill; the first counts.

        Args:
            request: SGLang's request object.
            offloaded: whether it has virtual slots, which no build may read.

        Returns:
            What is known of it; None where it was not admitted.
        """
        attachment = self.requests.of(request)
        if attachment is None or self.requests.has_slot(attachment):
            return attachment
        self._sweep()
        rid, admission = attachment.rid, attachment.admission
        self.ready.forget(rid)  # SGLang may never have told that a request of this id gave its slot back (sessions)
        twins = self.requests.enter(request)
        for twin in twins:
            self._release(twin)
            self._forget_capture(rid)
        if attachment.entry is not None and attachment.reason is None:
            attachment.index = self.residency.acquire(attachment.entry, retry=False)
        if self.builds is not None and admission is not None and not twins and not offloaded:
            self.builds.admit(replace(admission, again=attachment.runs_again))
        return attachment

    def refuse(self, request: Hashable, rid: str) -> None:
        """Keep a request dense that could not be looked up."""
        self.requests.add(request, Attachment(rid, "unsupported_mode"))

    def weights_updated(self) -> None:
        """SGLang was told to replace the weights in place, on all ranks. One that failed may have changed some of them:
        nothing is looked up, used or built any more, whatever came of it.
        """
        if self.ready.stale:
            return
        self.ready.stale = "the weights may have been updated in place; restart the server to use indexes"
        logger.warning("sparse attention: off until a restart: %s", self.ready.stale)
        if self.view.has_kv_scales:  # numbers in our graphs
            self._refuse("the weights may have been updated in place, and with them the scales of keys and values")
        if self.builds is not None:
            self.builds.close()
            self.builds = None
        if self.offload is not None:
            self.offload.drop(forever=True)

    def slot_freed(self, request: Hashable, row: int, *, finished: bool, tokens: int = 0) -> None:
        """A request gives its slot back, and with it all that it held; its index is built if it was recorded.

        Args:
            request: SGLang's request object.
            row: its row of `req_to_token`, still filled.
            finished: finished or aborted; False for a retraction, after which it waits, and will be prefilled again.
            tokens: that it was answered. One without a decode step is not counted among those that ended, as checks
                of health, what is only scored, and the prefill for several answers to one prompt.
        """
        if self.offload is not None:
            self.offload.slot_freed(row)
        attachment = self.requests.of(request)
        if attachment is None:
            return
        attachment.steps.keep(tokens)
        if finished and tokens > 1:
            attachment.ended(tokens, self.counters)
        self.ready.forget(attachment.rid)
        self.planner.ended(attachment.serial)
        if self.builds is not None:
            self.builds.finish(attachment.rid, row)
        self._release(attachment)
        self.requests.leave(request, finished=finished)

    def _sweep(self) -> None:
        """Take back what requests held that SGLang forgot without saying that they gave their slot back."""
        for attachment in self.requests.take_forgotten():
            self.planner.ended(attachment.serial)
            self._release(attachment)
            if self.requests.get(attachment.rid) is None:
                self._forget_capture(attachment.rid)

    def _forget_capture(self, rid: str) -> None:
        if self.builds is not None:
            self.builds.discard(rid)

    def _release(self, attachment: Attachment) -> None:
        attachment.start_over()
        if attachment.index is not None:
            self.residency.release(attachment.index)
            attachment.index = None

    # -- the running forward -------------------------------------------------------------------------------

    @contextmanager
    def step(self, forward_batch: Any) -> Iterator[None]:
        """Around one forward of the target model: plan a decode batch, arm the recorder for a prefill."""
        mode = forward_batch.forward_mode
        staged = None
        if mode.is_decode():
            if self.planner.drafts is None:
                self._settle(forward_batch.rids)
            if self.offload is not None and forward_batch.rids:
                self.offload.decoding(forward_batch, self.ready.serving(forward_batch.rids))
            hosts = [] if self.offload is None else self.offload.hosts(forward_batch)
            planned = self._planned(forward_batch, hosts)
            if self.offload is not None and hosts and planned is None:
                self.planner.offloaded(forward_batch.rids or ())
                staged = self.offload.begin(forward_batch)
            self.ready.took("stock" if planned is None else planned.name, forward_batch.batch_size)
            counted = (self.planner.cascade, self.planner.sparse)  # others' rows count as dense
            path = planned.path.counted if planned is not None and planned.backend in counted else "dense"
            if planned is not None or not self.planner.ahead:
                self.counters.begin_step(path, timed=planned is None or planned.guarded is None)
            builds = self.builds if self.planner.drafts is None else None
            chunks = () if builds is None else builds.decode(forward_batch)
            self._step = Step(planned, chunks, staged, virtual=bool(hosts))
            self.took = self.path
        else:
            self.counters.begin_step(None)
            if mode.is_mixed():  # running requests get a token of SGLang's here
                self.planner.step_elsewhere()
            if self.offload is not None:
                staged = self.offload.begin(forward_batch, list(map(self.requests.get, forward_batch.rids or ())))
            builds = self.builds if mode.is_extend() else None
            self._step = Step(None, () if builds is None else builds.prefill(forward_batch), staged)
        guard = self.planner.guard if mode.is_decode() else None
        try:
            if guard is not None:
                guard.runs()
            yield
            if guard is not None:
                guard.ran()
            if self.offload is not None and staged is not None:
                self.offload.ended(staged)
            if self._trace is not None:
                sparse = self.planner.sparse
                self._trace.note(forward_batch, self.path, sparse.copies if sparse is not None else None)
        finally:
            self._step = Step()

    def forward(self, original: Callable[[], Any], tokens_of: Callable[[Any], Tensor | None]) -> Any:
        """The forward of the running step; before it, where next tokens are compared, one that attends exactly. The one
        that counts then writes over the K and V that the other wrote.

        Args:
            original: SGLang's forward of the batch.
            tokens_of: [rows], the most probable next tokens by what it gives, new memory.
        """
        step = self._step
        guarded = None if step.planned is None else step.planned.guarded
        if guarded is None or not guarded.predicts:
            return original()
        self._step = Step(PlannedStep(guarded.exact, StepPath.CASCADE))
        try:
            expected = tokens_of(original())
        finally:
            failed = self._step.planned is None
            self._step = Step(None, step.chunks) if failed else step
        output = original()
        tokens = tokens_of(output)
        if expected is not None and tokens is not None:
            guarded.compare(expected, tokens)
        return output

    def begin_round(self, forward_batch: Any) -> list[Drafting | None]:
        """A round of lossless decode begins (see docs/lossless.md): what is done once for each decode step of others.

        Args:
            forward_batch: as of a decode step whose rows are the round's requests.

        Returns:
            Per row, what it may draft; None where no index of its prefix is ready.
        """
        self.requests.are_as_long(forward_batch.rids, forward_batch.seq_lens_cpu.tolist())
        self._settle(forward_batch.rids)
        if self.builds is not None:
            self.builds.decode(forward_batch)
        try:
            digests = self.planner.drafters(forward_batch, self.ready.usable)
        except Exception as error:
            self._step_failed(forward_batch.rids, error)
            return [None] * forward_batch.batch_size
        return self.rounds.may(digests)

    def verified(self, rids: Sequence[str], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """A round ended: tokens that each request drafted, and how many of them the exact step said, too. Of a request
        that ended before, as the overlap schedule runs a round ahead, nothing is counted.
        """
        for rid, *tokens in zip(rids, drafted, accepted, strict=True):
            attachment = self.requests.get(rid)
            if attachment is not None and attachment.index is not None:
                attachment.drafts = tuple(map(sum, zip(attachment.drafts, tokens, strict=True)))
                self.rounds.lengths.verified(attachment.index.entry.digest, *tokens)
                self.counters.count_drafts(*tokens)

    def _settle(self, rids: Sequence[str] | None) -> None:
        """A collective with several ranks: nothing that differs between them decides whether this line is reached."""
        if problem := self.ready.settle(rids or (), refused=self.planner.refusal is not None):
            self._refuse(problem)

    def _refuse(self, why: str, reason: str = "unsupported_mode") -> None:
        """No step is attended here any more: from now on requests decode dense for this named reason."""
        self.planner.refuse(why)
        self._looks_up, self.ready.refused = False, self.ready.refused or reason

    def _planned(self, forward_batch: Any, hosts: Sequence[HostPrefix | None]) -> PlannedStep | None:
        try:
            return self.planner.prepare(forward_batch, self.ready.usable, hosts)
        except Exception as error:
            self._step_failed(forward_batch.rids, error)
            self.counters.count_step(0, 0 if self.planner.ahead else forward_batch.batch_size, 0)
            return None

    def _step_failed(self, rids: Sequence[str] | None, error: Exception) -> None:
        """SGLang's own backend attends a decode step, and from now on its requests, but no others."""
        if self.ranks.size > 1:
            raise error  # other ranks may have prepared it, and would replay another graph: wrong answers
        self.planner.step_elsewhere(self.ready.step_failed(rids or (), error))

    @contextmanager
    def capturing(self, size: int, path: StepPath) -> Iterator[None]:
        """Within the block SGLang captures a decode graph of a path, for batches of that size."""
        with self.planner.capturing(size, path) as planned:
            self._step = Step(planned)
            try:
                yield
            finally:
                self._step = Step()

    @property
    def path(self) -> StepPath | None:
        """How the running decode step is attended here; None where it is not."""
        return None if self._step.planned is None else self._step.planned.path

    def prefilled(self, *, in_graph: bool) -> None:
        """The running forward is done; counts recorded prefill steps that a CUDA graph replayed."""
        if self._step.chunks:
            assert self.builds is not None
            self.builds.prefilled(self._step.chunks)
            self.counters.recorded_steps += 1
            self.counters.recorded_graph_steps += in_graph

    def observe(self, layer: int, x: Tensor, y: Tensor) -> None:
        """The residual stream around one layer's attention block, in a process that captures.

        Args:
            x, y: [num_tokens, hidden_size] before and behind the block.
        """
        if self._step.chunks and isinstance(self.builds, PrefillCaptures):
            self.builds.observe(self._step.chunks, layer, x, y)

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        refusal: str | None,
    ) -> Tensor | None:
        """One layer of the running forward; None means that SGLang's own backend has to run it.

        Args:
            q: [num_tokens, num_qo_heads * head_dim] or with the heads apart; likewise k and v.
            refusal: why this layer must stay dense, from `RunnerView.layer_refusal`.
        """
        step = self._step
        if step.chunks and self.builds is not None:
            self.builds.record(step.chunks, layer, q)
        if (step.staged is not None or step.virtual) and refusal is not None:
            raise RuntimeError(
                f"offload: expected layer {layer.layer_id} to be attended from host memory; it has {refusal}. Remove "
                "offload from --sparse-attn-config"
            )
        if step.staged is None and (step.planned is None or not forward_batch.forward_mode.is_decode()):
            return None
        if refusal is not None:
            self._refuse(f"layer {layer.layer_id} has {refusal}", "unsupported_layer")
            for one in map(self.requests.get, forward_batch.rids or ()):
                self.ready.usable(one, waits=False)  # counts it
            self._step = Step(None, step.chunks)  # what a later layer would reuse is not there
            return None
        if k is not None and v is not None and save_kv_cache:
            k, v = (x.view(x.shape[0], self.view.num_kv_heads, -1) for x in (k, v))
            self.view.write_kv(layer, forward_batch, k, v)
        heads = q.reshape(q.shape[0], self.view.num_qo_heads, -1)
        if step.staged is not None:
            assert self.offload is not None
            return self.offload.attend(step.staged, heads, layer.layer_id, float(layer.scaling)).flatten(1)
        assert step.planned is not None
        kv, scale = self.view.kv(layer.layer_id), float(layer.scaling)
        try:
            return step.planned.run(heads, kv, layer.layer_id, scale).flatten(1)
        except Exception as error:
            if step.virtual or (self.view.decode_graphs and step.planned.guarded is None):
                raise  # no one else may attend it; or a graph is being captured: the start fails
            self._step_failed(forward_batch.rids, error)
            self._step = Step(None, step.chunks)
            return None

    @property
    def eager(self) -> bool:
        """Whether no graph holds the running forward: it attends twice, or exactly behind host memory."""
        step = self._step
        return step.staged is not None or (step.planned is not None and step.planned.guarded is not None)

    @property
    def planned(self) -> bool:
        """Whether the running forward is attended here."""
        return self._step.planned is not None or self._step.staged is not None

    # -- what others see -----------------------------------------------------------------------------------

    def figures(self) -> Figures:
        """What is exported, by metric; in any thread."""
        builds = self.builds
        return {
            **self.counters.figures(),
            **self.residency.figures(),
            **({} if builds is None else builds.figures()),
            **({} if self.offload is None else self.offload.figures()),
            **({} if self.planner.cache_rank is None else {"cache_rank": self.planner.cache_rank.counted()}),
            **{
                name: {"device": device, "store": store}
                for name, device, store in zip(EVICTED, self.residency.evicted, self.store.evicted, strict=True)
            },
            "device_bytes": self.residency.resident_bytes(),
        }

    def snapshot(self) -> dict[str, Any]:
        """State and counters as plain values, for `/get_server_info`. Waits for the device, and for all ranks: it is
        called on each, as SGLang hands a question to all of them.
        """
        self._sweep()
        mine = {name: getattr(self.counters, name) for name in ("sparse_steps", "sparse_rows", "cascade_steps")}
        held: dict[str, Any] = {"builds": {} if self.builds is None else self.builds.snapshot()}
        held["offload"] = None if self.offload is None else self.offload.snapshot()
        held |= {"resident_bytes": self.residency.resident_bytes(), "index_users": self.residency.num_users()}
        held["allocated_bytes"] = torch.cuda.memory_allocated() if torch.cuda.is_available() else None
        return {
            "ranks": self.ranks.gathered({**mine, **held, **self.ready.snapshot()}),
            **self.counters.snapshot(),
            "method": self.config.method,
            "model": msgspec.to_builtins(self.model),
            "profile": self.profile,
            "decode": self.planner.snapshot(),
            "guard": None if self.planner.guard is None else self.planner.guard.snapshot(),
            **self.directory.snapshot(),
            "metrics": self.figures(),
            **held,
            "requests": len(self.requests),
        }

    def close(self) -> None:
        """Stop loading and building, and close the store. SGLang never does: a process that ends needs none of it."""
        if self._exporter is not None:
            self._exporter.close()
        if self.builds is not None:
            self.builds.close()
        if self.planner.cache_rank is not None:
            self.planner.cache_rank.close()
        self.residency.close()
        self.directory.close()
