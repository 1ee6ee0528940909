"""Indexes that this process makes of the prompts it prefills: who is recorded, under which lease, and what came
of it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
from prefix_kernels.types import PagedKV
from sglang_ext.config import PAGE_TOKENS, SparseAttnConfig
from sglang_ext.prefill.builder import IndexFactory, covered_tokens, profile_digest
from sglang_ext.prefill.recorder import QueryRecorder

logger = logging.getLogger(__name__)


class BuildView(Protocol):
    """What is read of the model runner."""

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def req_to_token(self) -> Tensor: ...
    def kv(self, layer: int) -> PagedKV: ...


@dataclass(frozen=True)
class _Pending:
    """A prompt that is being prefilled. The lease keeps other processes from building the same index."""

    identity: IndexIdentity
    lease: BuildLease


class PrefillBuilds:
    """All builds of one process. Used by the scheduler thread only.

    Args:
        store: open store; not owned.
        config: checked configuration.
        view: the target model runner.
        model: its fingerprint.
    """

    def __init__(self, store: IndexStore, config: SparseAttnConfig, view: BuildView, model: ModelFingerprint) -> None:
        gqa = view.num_qo_heads // view.num_kv_heads
        self.recorder = QueryRecorder(view.num_layers, view.num_qo_heads, config.query_samples, gqa, config.seed)
        self._store = store
        self._config = config
        self._view = view
        self._model = model
        self._profile = profile_digest(config)
        self._factory = IndexFactory(store, config, view.head_dim**-0.5)
        self._pending: dict[str, _Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def admit(
        self,
        rid: str,
        prompt: Sequence[int],
        namespace: Mapping[str, str | None],
        refusal: tuple[str, str] | None,
    ) -> None:
        """Record a prompt from its first token on, unless its index is there, too short, or built elsewhere."""
        self.discard(rid)
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
            namespace=namespace_digest(namespace),
            page_hashes=page_hashes(prompt[:tokens], PAGE_TOKENS),
            model=self._model,
            profile_digest=self._profile,
        )
        try:
            lease = self._lease(rid, identity)
        except IndexStoreError as error:  # the server must live on
            self._failed(rid, error)
            return
        if lease is None:
            return
        if self.recorder.start(rid, len(prompt)):
            self._pending[rid] = _Pending(identity, lease)
        else:
            lease.release()
            detail = "expected fewer prompts being recorded at a time; send it again"
            self._report(rid, status="skipped", reason="capture_memory", detail=detail)

    def _lease(self, rid: str, identity: IndexIdentity) -> BuildLease | None:
        exists = {"status": "exists", "digest": identity.digest, "num_tokens": identity.num_tokens}
        if self._store.contains(identity):
            self._report(rid, **exists)
            return None
        lease = self._store.lease(identity)
        if lease is None:
            detail = "expected nobody else to build this index, found its lease held; wait for it, or ask again"
            self._report(rid, status="skipped", reason="building_elsewhere", digest=identity.digest, detail=detail)
            return None
        if self._store.contains(identity):  # its last holder was done a moment ago
            lease.release()
            self._report(rid, **exists)
            return None
        return lease

    def discard(self, rid: str) -> None:
        """Forget a request whose prompt will not be indexed; somebody else may."""
        self.recorder.discard(rid)
        pending = self._pending.pop(rid, None)
        if pending is not None:
            pending.lease.release()

    def close(self) -> None:
        """Forget all requests."""
        for rid in list(self._pending):
            self.discard(rid)

    def finish(self, rid: str, row: int) -> None:
        """Build, store and report the index of a request that ended; nothing for one that was not recorded.

        Args:
            rid: the request.
            row: its row of `req_to_token`, still filled.
        """
        capture = self.recorder.take(rid)
        pending = self._pending.pop(rid, None)
        if pending is None:
            return
        with pending.lease:
            if capture is None:
                return
            problem = capture.problem()
            if problem:
                self._report(rid, status="failed", reason="capture_rejected", detail=problem)
                return
            identity = pending.identity
            try:
                queries = capture.queries(self._view.num_kv_heads)
                slots = self._view.req_to_token[row, : identity.num_tokens].to(torch.int64)
                entry, stats = self._factory.build(identity, lambda layer: self._view.kv(layer).k_cache[slots], queries)
            except Exception as error:  # one prompt must not end the job
                self._failed(rid, error)
                return
        self._report(rid, status="built", digest=entry.digest, num_tokens=identity.num_tokens, path=entry.path, **stats)

    def _failed(self, rid: str, error: Exception) -> None:
        logger.error("sparse attention: no index was built for request %s", rid, exc_info=error)
        self._report(rid, status="failed", reason=type(error).__name__, detail=str(error))

    def _report(self, rid: str, **fields: Any) -> None:
        if self._config.build_report:
            try:
                with open(self._config.build_report, "a") as file:
                    file.write(json.dumps({"rid": rid, **fields}) + "\n")
            except OSError as error:  # the server must live on
                logger.error("sparse attention: build_report cannot be written (%s): %s %s", error, rid, fields)
