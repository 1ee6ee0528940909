"""Indexes that this process makes of the prompts it prefills: who is recorded, under which lease, and what came
of it.

With tensor parallelism rank 0 builds of all KV heads, and the others hand theirs over. For every request that ends,
every rank says whether it has its part, whatever it knows of the request. Where all have, each copies it to host memory
and says so. Only then are the parts exchanged: in one order, of sizes that all know. So what can fail on one rank alone
was done before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Sequence
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch
from torch import Tensor

from prefix_index import (
    BuildLease,
    FileStore,
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

#: What an admission waits for a store that is quick as a rule; the answer may as well come while the prompt runs.
_PATIENCE_S = 0.02

Inputs: TypeAlias = Generator[Tensor, None, None]
"""Of which an index is built: queries [num_layers, num_kv_heads, num_samples, head_dim], then layer by layer the
post-RoPE keys [prefix_len, num_kv_heads, head_dim]."""


class PrefillBuilds(Recording):
    """All builds of one process. Used by the scheduler thread only.

    Nothing here waits for the store but `finish`, which writes the index. Arguments are those of `make_recording`; of
    several ranks this is the first, the others have a `PrefillHelp` each.
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
        self._desk = ClaimDesk(store)
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
        claim = self._desk.claim(identity)
        if claim.known.is_set() and self._refused(rid, claim):
            return
        if self.recorder.start(rid, len(prompt)):
            self._pending[rid] = claim
            return
        self._desk.give_back(claim)
        detail = "expected fewer prompts being recorded at a time; send it again"
        self._report(rid, status="skipped", reason="capture_memory", detail=detail)

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
            if claim.known.is_set() and self._refused(rid, claim):
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
            own = own_inputs(self._view, capture, row, claim.identity.num_tokens)
        inputs = gathered(self._ranks, own, self._view.device)
        if missing is not None:
            return missing
        if inputs is None or claim is None or capture is None:
            detail = "expected keys and queries of all tensor-parallel ranks, some had none; send the prompt again"
            return {"status": "failed", "reason": "capture_rejected", "detail": detail}
        return self._build(rid, claim.identity, inputs, capture.scale(self._view.head_dim))

    def _missing(self, rid: str, capture: Capture | None, claim: Claim) -> dict[str, Any] | None:
        """Why no index can be built of a prompt, to report, if it was not yet; None where it can."""
        seconds = self._config.store_timeout_s
        if not claim.known.wait(seconds):
            detail = f"expected the store to give the lease within {seconds:g} s, it did not; send the prompt again"
            return {"status": "failed", "reason": "store_unavailable", "detail": detail}
        if self._refused(rid, claim) or capture is None:
            return {}
        problem = capture.problem()
        return {"status": "failed", "reason": "capture_rejected", "detail": problem} if problem else None

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


class Claim:
    """Whether this process builds one index: not known yet, then a lease, or why not.

    Attributes:
        identity: of the index.
        known: set once the store has answered.
        refusal: once known, what to report where there is no lease: the fields of a report's line, or the error. None
            with a lease.
    """

    def __init__(self, identity: IndexIdentity) -> None:
        self.identity = identity
        self.known = threading.Event()
        self.refusal: dict[str, Any] | Exception | None = None
        self._lease: BuildLease | None = None

    def settle(self, store: IndexStore) -> None:
        """Asks the store; may block until its time limits."""
        try:
            found = take_lease(store, self.identity)
            if isinstance(found, dict):
                self.refusal = found
            else:
                self._lease = found
        except Exception as error:  # whatever a store raises, the server must live on
            self.refusal = error
        self.known.set()

    def release(self) -> None:
        """Gives the lease of a settled claim back. Twice does nothing."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


class ClaimDesk:
    """Makes claims: at once in a folder, else on a thread of its own. That gives them back, too, in the order of calls.

    Args:
        store: open store; not owned.
    """

    def __init__(self, store: IndexStore) -> None:
        self._store = store
        self._at_once = isinstance(store, FileStore)
        self._last: Claim | None = None
        # A SimpleQueue may be filled in the middle of anything, in a garbage collection too.
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), name="sparse-attn-claims", daemon=True).start()

    def claim(self, identity: IndexIdentity) -> Claim:
        """A claim, known already where the store is quick."""
        claim, last = Claim(identity), self._last
        if self._at_once:
            claim.settle(self._store)
            return claim
        self._last = claim
        self._jobs.put(lambda: claim.settle(self._store))
        if last is None or last.known.is_set():
            claim.known.wait(_PATIENCE_S)
        return claim

    def give_back(self, claim: Claim) -> None:
        """Ends a claim, without waiting for a store that is not a folder."""
        if self._at_once:
            claim.release()
        else:
            self._jobs.put(claim.release)

    def close(self) -> None:
        """Ends the thread once it has done what it was given."""
        self._jobs.put(None)


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:  # one lease that cannot be given back must not keep the others
            logger.exception("sparse attention: a build lease could not be given back")
        del job  # holds a claim, and so a lease


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
