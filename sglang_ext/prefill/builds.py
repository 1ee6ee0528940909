"""Indexes that this process makes of the prompts it prefills: who is recorded, under which lease, and what came
of it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from prefix_index import IndexIdentity, IndexStore, IndexStoreError, ModelFingerprint, namespace_digest, page_hashes
from sglang_ext.config import PAGE_TOKENS, SparseAttnConfig
from sglang_ext.methods.profile import Profile
from sglang_ext.prefill.builder import IndexFactory, covered_tokens, profile_digest
from sglang_ext.prefill.claims import Claim, ClaimDesk
from sglang_ext.prefill.handover import Inputs, OwnInputs, gathered
from sglang_ext.prefill.recorder import Capture, QueryRecorder
from sglang_ext.prefill.recording import Admission, BuildView, Recording
from sglang_ext.prefill.report import report
from sglang_ext.ranks import OneRank, Ranks

logger = logging.getLogger(__name__)


class PrefillBuilds(Recording):
    """All builds of one process. Used by the scheduler thread only.

    Nothing here waits for the store but `finish`, which writes the index.

    Args:
        store: open store; not owned.
        config: checked configuration.
        view: the target model runner.
        model: its fingerprint.
        profile: the model's profile, where there is one.
        ranks: of this process, the first of them; the others have a `PrefillHelp` each.
        device: where indexes are built, with several ranks.
    """

    def __init__(
        self,
        store: IndexStore,
        config: SparseAttnConfig,
        view: BuildView,
        model: ModelFingerprint,
        profile: Profile | None = None,
        *,
        ranks: Ranks | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._ranks, self._device = ranks or OneRank(), device or torch.device("cpu")
        gqa = view.num_qo_heads // view.num_kv_heads
        self.recorder = QueryRecorder(view.num_layers, view.num_qo_heads, config.query_samples, gqa, config.seed)
        self._desk = ClaimDesk(store)
        self._config = config
        self._view = view
        self._model = model
        self._profile = profile_digest(config, profile)
        self._factory = IndexFactory(store, config, profile)
        self._pending: dict[str, Claim] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def admit(self, request: Admission) -> None:
        """Record a prompt from its first token on, unless its index is there, too short, or built elsewhere.

        A store that takes its time to say so is asked on the side, and the prompt recorded until it has. After a
        retraction nothing is recorded any more: what there was became an index when the slot was given back.
        """
        rid, prompt, refusal = request.rid, request.prompt, request.refusal
        self.discard(rid)
        self.settle()
        if request.again:
            return
        least = self._config.min_sparse_prompt_len
        tokens = covered_tokens(len(prompt), self._config.build_align)
        if refusal or tokens < least:
            reason, detail = refusal or (
                "short_prefix",
                f"expected at least min_sparse_prompt_len={least} tokens, got {len(prompt)}",
            )
            self._report(rid, status="skipped", reason=reason, detail=detail)
            return
        identity = IndexIdentity.for_prefix(
            namespace=namespace_digest(request.namespace),
            page_hashes=(request.hashes or page_hashes(prompt[:tokens], PAGE_TOKENS))[: tokens // PAGE_TOKENS],
            model=self._model,
            profile_digest=self._profile,
        )
        claim = self._desk.claim(identity)
        if claim.known and self._refused(rid, claim):
            return
        if not self.recorder.start(rid, len(prompt)):
            self._desk.give_back(claim)
            detail = "expected fewer prompts being recorded at a time; send it again"
            self._report(rid, status="skipped", reason="capture_memory", detail=detail)
            return
        self._pending[rid] = claim

    def _refused(self, rid: str, claim: Claim) -> bool:
        """Whether there is nothing to build; reported then."""
        if isinstance(claim.refusal, Exception):
            self._failed(rid, claim.refusal)
        elif claim.refusal is not None:
            self._report(rid, **claim.refusal)
        return claim.refusal is not None

    def settle(self) -> None:
        """Stop recording the prompts that turned out to be indexed already, or to be built elsewhere."""
        for rid, claim in list(self._pending.items()):
            if claim.known and self._refused(rid, claim):
                self.discard(rid)

    def discard(self, rid: str) -> None:
        """Forget a request whose prompt will not be indexed; somebody else may."""
        self.recorder.discard(rid)
        claim = self._pending.pop(rid, None)
        if claim is not None:
            self._desk.give_back(claim)

    def close(self) -> None:
        """Forget all requests."""
        for rid in list(self._pending):
            self.discard(rid)
        self._desk.close()

    def finish(self, rid: str, row: int) -> None:
        """Build, store and report the index of a request that gives its slot back; nothing of one not recorded.

        Blocks while the store takes it: as long as a disk takes, or until the time limits of a service that hangs.

        Args:
            rid: the request.
            row: its row of `req_to_token`, still filled.
        """
        capture = self.recorder.take(rid)
        claim = self._pending.pop(rid, None)
        try:
            line = self._finish(rid, row, capture, claim)
        finally:
            if claim is not None:
                self._desk.give_back(claim)
        if line:
            self._report(rid, **line)

    def _finish(self, rid: str, row: int, capture: Capture | None, claim: Claim | None) -> dict[str, Any]:
        """What to report of a prompt; nothing where that was done, or is not wanted. With several ranks a collective,
        for each request that ends.
        """
        missing = {} if claim is None else self._missing(rid, capture, claim)
        own = None
        if missing is None and claim is not None and capture is not None:
            own = OwnInputs(self._view, capture, row, claim.identity.num_tokens)
        inputs = gathered(self._ranks, own, self._device)
        if missing is not None:
            return missing
        if inputs is None or claim is None or capture is None:
            detail = "expected keys and queries of all tensor-parallel ranks, some had none; send the prompt again"
            return {"status": "failed", "reason": "capture_rejected", "detail": detail}
        return self._build(rid, claim.identity, inputs, capture.scale(self._view.head_dim))

    def _missing(self, rid: str, capture: Capture | None, claim: Claim) -> dict[str, Any] | None:
        """Why no index can be built of a prompt, to report, if it was not yet; None where it can."""
        seconds = self._config.store_timeout_s
        if not claim.wait(seconds):
            detail = f"expected the store to give the lease within {seconds:g} s, it did not; send the prompt again"
            return {"status": "failed", "reason": "store_unavailable", "detail": detail}
        if self._refused(rid, claim) or capture is None:
            return {}
        problem = capture.problem()
        return {"status": "failed", "reason": "capture_rejected", "detail": problem} if problem else None

    def _build(self, rid: str, identity: IndexIdentity, inputs: Inputs, sm_scale: float) -> dict[str, Any]:
        try:
            entry, stats = self._factory.build(identity, inputs.keys, inputs.queries(), sm_scale)
        except Exception as error:  # one prompt must not end the job
            self._failed(rid, error)
            return {}
        finally:
            inputs.close()
        named = {"digest": entry.digest, "num_tokens": identity.num_tokens, "path": entry.path}
        return {"status": "built", **named, **stats}

    def _failed(self, rid: str, error: Exception) -> None:
        where = None if isinstance(error, IndexStoreError) else error  # the store's own messages say all
        logger.error("sparse attention: no index was built for request %s: %s", rid, error, exc_info=where)
        self._report(rid, status="failed", reason=type(error).__name__, detail=str(error))

    def _report(self, rid: str, **fields: Any) -> None:
        report(self._config.build_report, rid, **fields)
