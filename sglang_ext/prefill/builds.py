"""Indexes that this process makes of the prompts it prefills: who is recorded, under which lease, and what came
of it.

With tensor parallelism rank 0 builds of all KV heads, and the others hand theirs over. For every request that ends,
every rank says whether it has its part, whatever it knows of the request. Where all have, each copies it to host memory
and says so. Only then are the parts exchanged: in one order, of sizes that all know. So what can fail on one rank alone
was done before.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from prefix_index import (
    BuildLease,
    IndexIdentity,
    IndexStore,
    IndexStoreError,
    ModelFingerprint,
    namespace_digest,
    page_hashes,
)
from sglang_ext.config import PAGE_TOKENS, SparseAttnConfig
from sglang_ext.methods.profile import Profile
from sglang_ext.prefill.builder import IndexFactory, covered_tokens, profile_digest, take_lease
from sglang_ext.prefill.recorder import Admission, BuildView, Capture, Recording
from sglang_ext.ranks import OneRank, Ranks

logger = logging.getLogger(__name__)

Inputs: TypeAlias = Generator[Tensor, None, None]
"""Of which an index is built: queries [num_layers, num_kv_heads, num_samples, head_dim], then layer by layer the
post-RoPE keys [prefix_len, num_kv_heads, head_dim]."""


class PrefillBuilds(Recording):
    """All builds of one process. Used by the scheduler thread only.

    Waits for the store, a remote one until its time limits: for leases, and while an index is written. Arguments are
    those of `make_recording`; of several ranks this is the first, the others have a `PrefillHelp` each.
    """

    def __init__(
        self,
        store: IndexStore,
        config: SparseAttnConfig,
        view: BuildView,
        model: ModelFingerprint,
        profile: Profile | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(config, view)
        self._ranks = ranks or OneRank()
        self._store = store
        self._model = model
        self._profile = profile_digest(config, profile)
        self._factory = IndexFactory(store, config, profile)
        self._pending: dict[str, tuple[IndexIdentity, BuildLease]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def admit(self, request: Admission) -> None:
        """Record a prompt from its first token on, unless its index is there, too short, or built elsewhere.

        After a retraction nothing is recorded any more: what there was became an index when the slot was given back.
        """
        rid, prompt, refusal = request.rid, request.prompt, request.refusal
        self.discard(rid)
        if request.again:
            return
        least = self._config.min_sparse_prompt_len
        tokens = covered_tokens(len(prompt), self._config.build_align)
        if refusal is None and tokens < least:
            refusal = "short_prefix", f"expected at least min_sparse_prompt_len={least} tokens, got {len(prompt)}"
        if refusal is not None:
            self._report(rid, status="skipped", reason=refusal[0], detail=refusal[1])
            return
        identity = IndexIdentity.for_prefix(
            namespace=namespace_digest(request.namespace),
            page_hashes=(request.hashes or page_hashes(prompt[:tokens], PAGE_TOKENS))[: tokens // PAGE_TOKENS],
            model=self._model,
            profile_digest=self._profile,
        )
        try:
            lease = take_lease(self._store, identity)
        except Exception as error:  # whatever a store raises, the server must live on
            self._failed(rid, error)
            return
        if isinstance(lease, dict):
            self._report(rid, **lease)
        elif self.recorder.start(rid, len(prompt)):
            self._pending[rid] = identity, lease
        else:
            _give_back(lease)
            detail = "expected fewer prompts being recorded at a time; send it again"
            self._report(rid, status="skipped", reason="capture_memory", detail=detail)

    def discard(self, rid: str) -> None:
        """Forget a request whose prompt will not be indexed; somebody else may."""
        self.recorder.discard(rid)
        _, lease = self._pending.pop(rid, (None, None))
        if lease is not None:
            _give_back(lease)

    def close(self) -> None:
        """Forget all requests."""
        for rid in list(self._pending):
            self.discard(rid)

    def finish(self, rid: str, row: int) -> None:
        """Build, store and report the index of a request that gives its slot back; nothing of one not recorded.

        Blocks while the store takes it: as long as a disk takes, or until the time limits of a service that hangs.
        """
        capture = self.recorder.take(rid)
        identity, lease = self._pending.pop(rid, (None, None))
        try:
            line = self._finish(rid, row, capture, identity)
        finally:
            if lease is not None:
                _give_back(lease)
        if line:
            self._report(rid, **line)

    def _finish(self, rid: str, row: int, capture: Capture | None, identity: IndexIdentity | None) -> dict[str, Any]:
        """What to report of a prompt; nothing where that was done, or is not wanted. With several ranks a collective,
        for each request that ends.
        """
        if capture is None or identity is None:
            gathered(self._ranks, None, self._view.device)
            return {}
        problem = capture.problem()
        own = None if problem else own_inputs(self._view, capture, row, identity.num_tokens)
        inputs = gathered(self._ranks, own, self._view.device)
        if inputs is None:
            none = "expected keys and queries of all tensor-parallel ranks, some had none; send the prompt again"
            return {"status": "failed", "reason": "capture_rejected", "detail": problem or none}
        return self._build(rid, identity, inputs, capture.scale(self._view.head_dim))

    def _build(self, rid: str, identity: IndexIdentity, inputs: Inputs, sm_scale: float) -> dict[str, Any]:
        try:
            queries = next(inputs)
            entry, stats = self._factory.build(identity, lambda layer: next(inputs), queries, sm_scale)
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


def _give_back(lease: BuildLease) -> None:
    try:
        lease.release()
    except Exception:  # one lease that cannot be given back must not keep the others
        logger.exception("sparse attention: a build lease could not be given back")


class PrefillHelp(Recording):
    """What a rank but the first does while indexes are built: record its heads' queries, and hand over."""

    def __init__(self, config: SparseAttnConfig, view: BuildView, ranks: Ranks) -> None:
        super().__init__(config, view)
        self._ranks = ranks
        self._tokens: dict[str, int] = {}

    def admit(self, request: Admission) -> None:
        """Record every prompt that rank 0 may build an index of."""
        self.discard(request.rid)
        tokens = covered_tokens(len(request.prompt), self._config.build_align)
        if request.again or request.refusal or tokens < self._config.min_sparse_prompt_len:
            return
        self.recorder.discard_broken()  # of prompts that were cached: they would keep others from being recorded
        if self.recorder.start(request.rid, len(request.prompt)):
            self._tokens[request.rid] = tokens

    def discard(self, rid: str) -> None:
        """Forget a request; rank 0 hears of it when it ends."""
        self.recorder.discard(rid)
        self._tokens.pop(rid, None)

    def finish(self, rid: str, row: int) -> None:
        """As on rank 0: the same exchanges. Waits while rank 0 builds."""
        capture, tokens = self.recorder.take(rid), self._tokens.pop(rid, 0)
        recorded = capture is not None and tokens > 0 and capture.problem() is None
        hand_over(self._ranks, own_inputs(self._view, capture, row, tokens) if recorded and capture else None)


def own_inputs(view: BuildView, capture: Capture, row: int, num_tokens: int) -> Inputs:
    """Of the KV heads of this rank, on the device: of a complete capture, and a row of `req_to_token`, still filled."""
    if capture.samples is not None and capture.samples.is_cuda:
        # A request may be retracted before the layers of its last prefill step have run.
        torch.cuda.synchronize(capture.samples.device)
    yield capture.queries(view.num_kv_heads)
    slots = view.req_to_token[row, :num_tokens].to(torch.int64)
    for layer in range(view.num_layers):
        yield view.kv(layer).keys(slots, view.dtype)


def gathered(ranks: Ranks, own: Inputs | None, device: torch.device) -> Inputs | None:
    """A request ended, on rank 0: inputs of all KV heads, on a device; None where some rank has no part of it (`own`).

    With several ranks a collective: `hand_over` on the others. So is each item, and `close`: take one item at least,
    then close.
    """
    if ranks.size == 1:
        return own
    parts = _copied(ranks, own)
    return None if parts is None else _exchanged(ranks, parts, device)


def hand_over(ranks: Ranks, own: Inputs | None) -> None:
    """A request ended, on another rank. The other side of `gathered`, and of all that is taken of its inputs."""
    for part, _ in _copied(ranks, own) or ():
        ranks.to_first(part)


_Part: TypeAlias = tuple[Tensor, Sequence[Tensor] | None]
"""A tensor in host memory; on rank 0 also room for those of all ranks."""


def _copied(ranks: Ranks, own: Inputs | None) -> list[_Part] | None:
    """What this rank gives, where all ranks have their part of a request. Never raises an `Exception`: others wait."""
    if not _all(ranks, own is not None) or own is None:
        return None  # nobody has copied anything
    parts: list[_Part] = []
    try:
        given = list(map(_on_host, own))  # of the device's one at a time
        rooms: list[list[Tensor]] = []
        if ranks.rank == 0:  # of queries, and of one layer's keys
            rooms = [[torch.empty_like(part) for _ in range(ranks.size)] for part in given[:2]]
        parts = [(part, rooms[min(place, 1)] if rooms else None) for place, part in enumerate(given)]
    except Exception:
        logger.exception("sparse attention: keys and queries of a prompt cannot be handed over")
    return parts if _all(ranks, bool(parts)) else None


def _on_host(part: Tensor) -> Tensor:
    return part.cpu().contiguous()


def _all(ranks: Ranks, fine: bool) -> bool:
    return ranks.least([int(fine)])[0] > 0


def _exchanged(ranks: Ranks, parts: list[_Part], device: torch.device) -> Inputs:
    try:
        while parts:
            of_ranks = ranks.to_first(*parts.pop(0))
            assert of_ranks is not None
            yield torch.cat(of_ranks, dim=1).to(device)
    finally:  # nothing may be left on any rank
        for part in parts:
            ranks.to_first(*part)
