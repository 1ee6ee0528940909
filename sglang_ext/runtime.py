"""The plugin's state in one scheduler process: store, directory, residency, requests, recorder, decode.

Knows SGLang only through the view it is given; the hooks that call it live in `compat`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from sglang_ext.config import Settings, needing_indexes
from sglang_ext.decode.drafts import Rounds
from sglang_ext.decode.planner import DecodePlanner
from sglang_ext.decode.quality import Standing
from sglang_ext.decode.trace import StepTrace
from sglang_ext.forwards import Forwards
from sglang_ext.methods import method_specs
from sglang_ext.methods.layer_plan import LayerPlan, heads_of_rank
from sglang_ext.methods.profile import Profile
from sglang_ext.metrics import EVICTED, Counters, Exporter, Figures
from sglang_ext.model_view import ModelView
from sglang_ext.offload.offloading import Offloading
from sglang_ext.options import Build
from sglang_ext.prefill.builder import profile_digest
from sglang_ext.prefill.builds import PrefillBuilds
from sglang_ext.prefill.captures import PrefillCaptures
from sglang_ext.prefill.parts import Parts
from sglang_ext.prefill.recorder import Admission, Recording
from sglang_ext.prefill.shared_builds import SharedBuilds
from sglang_ext.prefix.directory import PrefixDirectory
from sglang_ext.prefix.requests import Attachment, Readiness, RequestTable
from sglang_ext.prefix.residency import Residency, State
from sglang_ext.profiles import check_profile, layer_plan_of_rank
from sglang_ext.ranks import Ranks, build_refusal, check_alike

logger = logging.getLogger(__name__)


class SparseRuntime:
    """Everything of one process. Made when SGLang builds its attention backend; lives as long as the process.

    Attributes:
        config, started: with the budget in force, and as the server was started; `administration` replaces them.
        loaded_profile: in force; None without one.
        index_hits: requests that found an index, by its digest.
        forwards: what each forward of the target model has to do.
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
        RuntimeError: ranks differ in what decode steps are chosen by, or have no folder in common to build in; or
            offload, lossless decode or a cache rank was asked for, and no step could use an index.
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
        self._check_used()
        if self.offload is not None:
            self.offload.serves, self.offload.running = self._serves, self.requests.running
            self.offload.loading = lambda digest: self.residency.state(digest) is State.LOADING
        if self.offload is not None and self.planner.sparse is not None:
            self.offload.select_by(self.planner.sparse)
        guarded = None if self.planner.guard is None else self.planner.guard.records
        self.ready = Readiness(config, self.requests, self.counters, self.ranks, self._release, guarded)
        if self.ranks.size > 1:
            check_alike(self.ranks, self._facts())
        builds = self._recording(profile)
        rounds = Rounds(config.draft_tokens, view.device, forced=self.planner.forced)
        trace = None if config.trace_folder is None else StepTrace(config.trace_folder, plan, view.dtype)
        self.forwards = Forwards(
            view=view,
            ranks=self.ranks,
            requests=self.requests,
            counters=self.counters,
            ready=self.ready,
            planner=self.planner,
            offload=self.offload,
            builds=builds,
            rounds=rounds,
            trace=trace,
        )
        self._exporter = Exporter(self.figures) if prometheus else None
        self.index_hits: Counter[str] = Counter()
        self._misfits: set[str] = set()

    def _check_used(self) -> None:
        """Raise RuntimeError where what is there for steps by indexes was asked for, and no step could be one."""
        serves = self.config.build in (Build.OFF, Build.SHARED)
        needing = ["offload"] if self.offload is not None else needing_indexes(self.config) if serves else []
        if needing and not self.planner.uses_indexes:
            why = self.planner.refusal or "the warning before this says why"
            raise RuntimeError(
                f"--sparse-attn: expected decode steps by indexes with {needing[0]}, which is there for these; got "
                f"none: {why}. Change that, or remove {needing[0]}"
            )

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

    @property
    def builds(self) -> Recording | None:
        """See `Forwards`."""
        return self.forwards.builds

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
        usable = self.planner.uses_indexes
        if self.ready.off and usable and refusal is None:
            refusal = ("by_operator", "indexes are turned off")
        if refusal or not usable:  # nothing is loaded that no step could use
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
        if self.builds is not None and (usable or self.config.build is not Build.SHARED):  # or nobody would use it
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
            self.forwards.refuse(
                "the weights may have been updated in place, and with them the scales of keys and values"
            )
        if self.builds is not None:
            self.builds.close()
            self.forwards.builds = None
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
        attachment.waits_with = 0 if finished else tokens
        if finished and tokens > 1:
            attachment.ended(tokens, self.counters)
        self.ready.forget(attachment.rid)
        self.planner.ended(attachment.serial)
        if self.builds is not None:
            self.builds.finish(attachment.rid, row)
        self._release(attachment)
        self.requests.leave(request, finished=finished)

    def _sweep(self) -> None:
        """Take back what requests held that SGLang forgot without saying that they ended, and count those that were
        retracted before.
        """
        for attachment in self.requests.take_forgotten():
            if attachment.waits_with > 1:
                attachment.ended(attachment.waits_with, self.counters)
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
