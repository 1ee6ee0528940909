"""Indexes that this process makes of the prompts it prefills: who is recorded, under which lease, and what came
of it.

With tensor parallelism every rank builds its own KV heads and leaves them for rank 0 (`parts`), which has the leases,
stores and reports. For every request that ends, every rank says whether it has its part, whatever it knows of the
request. Where all have, each builds, and says what came of it. So nobody waits for a rank that has nothing to give.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from prefix_index import (
    BuildLease,
    IndexIdentity,
    IndexStore,
    IndexStoreError,
    ModelFingerprint,
    namespace_digest,
    page_hashes,
)
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.methods.layer_plan import heads_of_rank
from sglang_ext.methods.profile import Profile
from sglang_ext.model_view import ModelView
from sglang_ext.offload.kv_files import KVFiles, of_slots
from sglang_ext.options import SparseAttnConfig
from sglang_ext.prefill.builder import IndexAssembly, IndexFactory, covered_tokens, give_back, short_refusal
from sglang_ext.prefill.parts import Parts
from sglang_ext.prefill.recorder import Admission, Capture, Chunk, Recording
from sglang_ext.ranks import Ranks

logger = logging.getLogger(__name__)

_ALL = "expected keys and queries of all tensor-parallel ranks, some had none; send the prompt again"


class PrefillBuilds(Recording):
    """All builds of one process. Used by the scheduler thread only.

    Waits for the store, a remote one until its time limits: for leases, and while an index is written. Arguments are
    those of `SparseRuntime`; making it is a collective.
    """

    def __init__(
        self,
        store: IndexStore,
        config: SparseAttnConfig,
        view: ModelView,
        model: ModelFingerprint,
        profile: Profile | None,
        ranks: Ranks,
    ) -> None:
        super().__init__(config, view)
        self._ranks, self._parts = ranks, Parts.of_server(ranks)
        self._heads = heads_of_rank(model.num_kv_heads, ranks.rank, ranks.size)
        self._model = model
        self._factory = IndexFactory(store, config, profile)
        self._files: KVFiles | None = None
        if config.offload is not None and config.offload.folder is not None:
            self._files = KVFiles(config.offload, view)
        self._pending: dict[str, tuple[IndexIdentity, BuildLease | None, Sequence[int]]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def admit(self, request: Admission) -> None:
        """Record a prompt from its first token on, unless its index is there, too short, or built elsewhere.

        After a retraction nothing is recorded any more: what there was became an index when the slot was given back.
        Ranks but the first record every prompt that rank 0 may build an index of: whose index is not there.
        """
        rid, prompt, refusal = request.rid, request.prompt, request.refusal
        self.discard(rid)
        if request.again:
            return
        tokens = covered_tokens(len(prompt), self._config.build_align)
        if refusal is None and (short := short_refusal(len(prompt), self._config)) is not None:
            refusal = "short_prefix", short
        if refusal is not None:
            self._tell(rid, status="skipped", reason=refusal[0], detail=refusal[1])
            return
        hashes = (request.hashes or page_hashes(prompt[:tokens], PAGE_TOKENS))[: tokens // PAGE_TOKENS]
        identity = self._factory.identity(self._model, namespace_digest(request.namespace), hashes)
        found: BuildLease | dict[str, Any] | None = None
        try:
            if self._ranks.rank == 0:
                found = self._factory.take_lease(identity)
            else:
                self.recorder.discard_broken()  # of cached prompts: they would keep others from being recorded
                found = {"status": "exists"} if self._factory.store.contains(identity) else None
        except Exception as error:  # whatever a store raises, the server must live on
            self._failed(rid, error)
            return
        lacks_kv = self._files is not None and not self._files.path(identity.digest).exists()
        if isinstance(found, dict) and not (found["status"] == "exists" and lacks_kv):
            self._tell(rid, **found)
            return
        lease = None if isinstance(found, dict) else found
        self._pending[rid] = identity, lease, prompt
        if not self.recorder.start(rid, len(prompt)):
            self.discard(rid)
            detail = "expected fewer prompts being recorded at a time; send it again"
            self._tell(rid, status="skipped", reason="capture_memory", detail=detail)

    def begin_prefill(self, rids: Sequence[str], firsts: Sequence[int], counts: Sequence[int]) -> list[Chunk]:
        """As in `Recording`. Where the prefix cache had some of a prompt, others may build its index."""
        chunks = super().begin_prefill(rids, firsts, counts)
        for rid in rids:
            if self.recorder.is_broken(rid) and rid in self._pending:
                identity, lease, prompt = self._pending[rid]
                self._pending[rid] = identity, None, prompt
                give_back(lease)
        return chunks

    def discard(self, rid: str) -> None:
        """Forget a request whose prompt will not be indexed; somebody else may."""
        self.recorder.take(rid)
        give_back(self._pending.pop(rid, (None, None, ()))[1])

    def close(self) -> None:
        """Forget all requests."""
        for rid in list(self._pending):
            self.discard(rid)

    def finish(self, rid: str, row: int) -> None:
        """Build, store and report the index of a request that gives its slot back; nothing of one not recorded.

        Blocks while the store takes it: as long as a disk takes, or until the time limits of a service that hangs. With
        several ranks a collective, for each request that ends.
        """
        capture = self.recorder.take(rid)
        identity, lease, prompt = self._pending.pop(rid, (None, None, ()))
        try:
            if capture is None or identity is None:
                self._all_have(False)
                return
            problem = capture.problem()
            if not self._all_have(not problem):
                self._tell(rid, status="failed", reason="capture_rejected", detail=problem or _ALL)
                return
            if self._ranks.rank == 0 and lease is None:
                self._keep_kv(rid, row, identity)
            else:
                self._build(rid, row, capture, identity, prompt)
        finally:
            give_back(lease)

    def _keep_kv(self, rid: str, row: int, identity: IndexIdentity) -> None:
        """Beside an index that exists."""
        try:
            written = self._write_kv(row, identity)
        except Exception as error:  # one prompt must not end the job
            self._failed(rid, error)
            return
        self._tell(rid, status="exists", digest=identity.digest, num_tokens=identity.num_tokens, **written)

    def _write_kv(self, row: int, identity: IndexIdentity) -> dict[str, Any]:
        """What is said of the file; nothing without a folder for such files."""
        if self._files is None:
            return {}
        slots = self._view.req_to_token[row, : identity.num_tokens].to(torch.int64)
        self._files.write(identity.digest, identity.num_tokens, of_slots(self._view.kv, slots))
        return {"kv_file": str(self._files.path(identity.digest))}

    def _all_have(self, mine: bool) -> bool:
        return self._ranks.least([int(mine)])[0] > 0

    def _build(self, rid: str, row: int, capture: Capture, identity: IndexIdentity, prompt: Sequence[int]) -> None:
        """Every rank its KV heads, rank 0 the whole."""
        built = self._own_heads(rid, row, capture, identity)
        of_ranks = self._ranks.gathered(built and built[1])
        if built is None or self._ranks.rank > 0:
            return
        assembly, _ = built
        try:
            if None in of_ranks:
                raise ValueError(_ALL)
            if self._parts is not None:
                assembly.arrays.update(self._parts.taken(identity.digest) or {})
            recall = {name: sum(one[name] for one in of_ranks) / len(of_ranks) for name in of_ranks[0]}
            entry, stats = self._factory.keep(assembly, recall, prompt)
            stats |= self._write_kv(row, identity)
        except Exception as error:  # one prompt must not end the job
            self._failed(rid, error)
            return
        self._tell(rid, status="built", digest=entry.digest, num_tokens=identity.num_tokens, path=entry.path, **stats)

    def _own_heads(
        self, rid: str, row: int, capture: Capture, identity: IndexIdentity
    ) -> tuple[IndexAssembly, dict[str, float]] | None:
        """Built, with their recall; on other ranks than the first handed over. None where that failed, which is said.
        Never raises an `Exception`: others wait.
        """
        view = self._view
        try:
            if capture.samples is not None and capture.samples.is_cuda:
                # A request may be retracted before the layers of its last prefill step have run.
                torch.cuda.synchronize(capture.samples.device)
            slots = view.req_to_token[row, : identity.num_tokens].to(torch.int64)
            built = self._factory.assemble(
                identity,
                lambda layer: view.kv(layer).keys(slots, view.dtype),
                capture.queries(len(self._heads)),
                capture.scale(view.head_dim),
                self._heads,
            )
            if self._parts is not None and self._ranks.rank > 0:
                self._parts.leave(identity.digest, built[0].arrays)
        except Exception as error:
            self._failed(rid, error)
            return None
        return built

    def _failed(self, rid: str, error: Exception) -> None:
        where = None if isinstance(error, IndexStoreError) else error  # the store's own messages say all
        logger.error("sparse attention: no index was built for request %s: %s", rid, error, exc_info=where)
        self._tell(rid, status="failed", reason=type(error).__name__, detail=str(error))

    def _tell(self, rid: str, /, **fields: Any) -> None:
        if self._ranks.rank == 0:
            self._report(rid, **fields)
