"""Indexes that a server makes while it serves, of prefixes that requests turn out to share."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from prefix_index import IndexStore, ModelFingerprint, namespace_digest, page_hashes
from sglang_ext.config import PAGE_TOKENS
from sglang_ext.methods.layer_plan import heads_of_rank
from sglang_ext.methods.profile import Profile
from sglang_ext.model_view import ModelView
from sglang_ext.options import SparseAttnConfig
from sglang_ext.prefill.background_build import IDLE_S, BackgroundBuilder, Build, Piece
from sglang_ext.prefill.builder import IndexFactory, covered_tokens, short_refusal
from sglang_ext.prefill.parts import Parts
from sglang_ext.prefill.prefixes import HitCounter, QuerySample, QuerySamples
from sglang_ext.prefill.recorder import Admission, Chunk, Recording

logger = logging.getLogger(__name__)

LEAST_COMPUTED = 8
"""A prefill leaves a sample if it computed one of so many of its prompt's tokens; the others were in the cache."""
MAX_CAPTURES = 4
"""Prefills recorded at a time, and samples on their way to host memory: as long as they lie in device memory."""
SHOWN_S = 60.0
"""In which a store shows to look-ups what another process has put into it: a remote one is listed now and then."""
_SETTLED = 2
"""Decode steps after which a request's slots no longer change: the prefix cache may replace those of a duplicate."""


@dataclass(eq=False)
class _Request:
    """One that may share a prefix; fields as of `Admission`.

    Attributes:
        prompt: SGLang's own list, not a copy.
        counted: whether its prefill has begun, or did before a retraction, and with that its hit is counted; or that of
            the request which prefilled the prompt for it.
        steps: decode steps since its last prefill.
    """

    namespace: str
    hashes: tuple[bytes, ...]
    prompt: Sequence[int]
    indexed: int
    admitted: float
    counted: bool
    steps: int = 0


class SharedBuilds(Recording):
    """Builds indexes of prefixes that were hit often enough. Scheduler thread only; arguments as of `SparseRuntime`.

    A prefill that computes `min_sparse_prompt_len` tokens or more, and an eighth of its prompt, leaves a sample of its
    queries in host memory, where the methods need one and fewer than `MAX_CAPTURES` others are on their way. What a
    request finds in the prefix cache counts as a hit of that prefix.

    With tensor parallelism (`parts`) every rank builds its own KV heads; rank 0 stores and reports.
    """

    def __init__(
        self,
        store: IndexStore,
        config: SparseAttnConfig,
        view: ModelView,
        model: ModelFingerprint,
        profile: Profile | None,
        parts: Parts | None,
    ) -> None:
        super().__init__(config, view)
        self._model = model
        rank, size = (parts.rank, parts.size) if parts is not None else (0, 1)
        self._stores = rank == 0
        self._heads = heads_of_rank(model.num_kv_heads, rank, size)
        self._factory = IndexFactory(store, config, profile)
        self._records = self._factory.needs_queries(model)
        self._hits = HitCounter(config.build_after_hits, config.min_sparse_prompt_len, config.build_align)
        self._samples = QuerySamples(config.sample_host_bytes, view.device)
        rows, share = self.recorder.capacity, config.build_share
        self._builder = BackgroundBuilder(self._factory, self._samples, rows, share, view.device, self._finished, parts)
        self._ended: SimpleQueue[tuple[Build, str]] = SimpleQueue()
        self._requests: dict[str, _Request] = {}
        self._off: str | None = None
        self._told: set[str] = set()
        self._in_vain: tuple[list[str], list[Build]] | None = None

    def __len__(self) -> int:
        return len(self._requests)

    # -- the life of a request -----------------------------------------------------------------------------

    def admit(self, request: Admission) -> None:
        """Watch a request, unless it is refused or too short."""
        self.discard(request.rid)
        prompt = request.prompt
        if request.refusal is None and not self._off and len(prompt) >= self._config.min_sparse_prompt_len:
            pages = tuple(request.hashes or page_hashes(prompt, PAGE_TOKENS))
            namespace = namespace_digest(request.namespace)
            seen = (request.at, request.again or request.repeats)
            self._requests[request.rid] = _Request(namespace, pages, prompt, request.indexed, *seen)

    def begin_prefill(self, rids: Sequence[str], firsts: Sequence[int], counts: Sequence[int]) -> list[Chunk]:
        """As in `Recording`. A request's first step tells what the prefix cache had of it: that is counted as a hit."""
        if self._off:
            return []
        with self._surviving():
            self.settle()
            new = []
            for rid, first in zip(rids, firsts, strict=True):
                request = self._requests.get(rid)
                if request is None:
                    continue
                if first < len(request.prompt):  # else a decode row of a mixed batch
                    request.steps = 0
                if not request.counted:
                    request.counted = True
                    self._count(request, first)
                    new.append((rid, request, first))
            for one in new:  # all are counted, on all ranks, whether or not memory is short on one
                self._record(*one)
            chunks = super().begin_prefill(rids, firsts, counts)
            self.recorder.discard_broken()
            return chunks
        return []

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Where memory is short in the block, no sample or piece is taken for a while. Another error ends all builds.
        Serving goes on.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._builder.rest(error)
            for rid in self._requests:
                self.recorder.take(rid)
        except Exception as error:
            logger.error("sparse attention: no more indexes are built beside serving", exc_info=error)
            self._off = f"{type(error).__name__}: {error}"
            self.close()

    def _record(self, rid: str, request: _Request, first: int) -> None:
        """Sample a prefill's queries from its first computed token on, if they are of use."""
        prompt_len = len(request.prompt)
        least = max(self._config.min_sparse_prompt_len, prompt_len // LEAST_COMPUTED)
        room = self.recorder.num_captures + self._samples.coming < MAX_CAPTURES
        if self._records and room and not self._builder.rests and prompt_len - first >= least:
            self.recorder.start(rid, prompt_len, first)
            self.recorder.allocate(rid, self._view.head_dim, self._view.dtype, self._view.device)

    def _count(self, request: _Request, cached: int) -> None:
        evicted = self._hits.evicted
        prefix = self._hits.hit(request.namespace, request.hashes, cached, request.indexed, request.admitted)
        if self._stores and not evicted and self._hits.evicted:
            logger.warning(
                "sparse attention: an index of shared tokens has left the store again. The store may be too small for "
                "what requests share: raise store_max_bytes. What leaves before it has paid is built ever more seldom"
            )
        if prefix is not None:
            identity = self._factory.identity(self._model, prefix.namespace, prefix.hashes)
            tokens = list(request.prompt[: prefix.num_tokens])  # the request may end before
            if not self._builder.add(Build(prefix, identity, tokens, self._heads)):
                prefix.due = False  # the next request that hits it asks again

    def prefilled(self, chunks: Sequence[Chunk]) -> None:
        """Behind a prefill step: samples that are complete leave the device."""
        with self._surviving():
            for chunk in chunks:
                capture = chunk.capture
                request = self._requests.get(capture.rid)
                if capture.problem() or self.recorder.take(capture.rid) is None or request is None:
                    continue
                queries, capture.samples = capture.samples, None
                assert queries is not None
                positions = capture.positions[: capture.reservoir_rows]
                self._samples.take(QuerySample(request.namespace, request.hashes, capture.begin, positions, queries))
            self.recorder.discard_broken()

    def decoding(self, rids: Sequence[str], rows: Tensor) -> None:
        """As in `Recording`: give the builder a piece of an index whose prefix a request here has, if it is ready."""
        if not self._off:
            with self._surviving():
                self._decoding(rids, rows)

    def _decoding(self, rids: Sequence[str], rows: Tensor) -> None:
        settled, known = [], 0
        for place, rid in enumerate(rids):
            request = self._requests.get(rid)
            if request is not None:
                known, request.steps = known + 1, request.steps + 1
                if request.steps > _SETTLED:
                    settled.append((place, request))
        waits = not self._builder.ready or self._builder.rests
        if waits or not self._builder.open or self._in_vain == (rids, self._builder.open):
            return
        found: tuple[Build, Piece, int] | None = None
        for build in sorted(self._builder.open, key=lambda one: -one.prefix.hits):  # of use to most
            holders = (place for place, one in settled if build.prefix.begins(one.namespace, one.hashes))
            holder, piece = next(holders, None), build.wanted
            if holder is None or piece is None:
                continue
            if found is None:
                found = build, piece, holder
            else:
                build.latest = time.monotonic()  # it could go on, whoever's turn it is
        if found is not None:
            build, piece, holder = found
            table = self._view.req_to_token.index_select(0, rows[holder : holder + 1])
            slots = table[0, : build.identity.num_tokens].to(torch.int64)
            heads = slice(piece.heads.start - self._heads.start, piece.heads.stop - self._heads.start)
            self._builder.hand_over(build, piece, self._view.kv(piece.layer).keys(slots, self._view.dtype, heads))
        elif len(settled) == known:  # the same batch need not be searched again
            self._in_vain = (list(rids), list(self._builder.open))

    def finish(self, rid: str, row: int) -> None:
        """Forget it: a build takes its keys from whoever has them."""
        self.discard(rid)

    def discard(self, rid: str) -> None:
        """Forget a request."""
        self.recorder.take(rid)
        self._requests.pop(rid, None)
        self._in_vain = None

    def ask_for(self, namespace: str, prompt: Sequence[int]) -> str | None:
        """Have an index built of a prompt's tokens, rounded down to `build_align`, from the next request that begins
        with them, whatever was counted.

        Args:
            namespace: digest of everything of such requests that is not tokens.
            prompt: [num_tokens] token ids.

        Returns:
            Why not; None: it is built as soon as there are keys, and, where a method needs them, queries.
        """
        tokens = covered_tokens(len(prompt), self._config.build_align)
        if self._off:
            return f"builds ended with an error: {self._off}; restart the server"
        if (short := short_refusal(len(prompt), self._config)) is not None:
            return short
        self._hits.ask_for(namespace, page_hashes(prompt[:tokens], PAGE_TOKENS))
        return None

    # -- builds --------------------------------------------------------------------------------------------

    def _finished(self, build: Build, fields: dict[str, Any]) -> None:
        """On the builder's thread."""
        if self._stores:
            self._report(f"prefix-{build.identity.digest[:12]}", **fields)
        if fields["status"] == "failed" and (why := fields["detail"]) not in self._told:
            more, abandoned = "", fields["reason"] == "abandoned"
            if abandoned:  # each turn of a conversation may be
                self._told.add(why)
                more = " (said once; build_report has a line of each)"
            logger.warning("sparse attention: no index of %d shared tokens: %s%s", build.prefix.num_tokens, why, more)
        self._ended.put((build, fields["status"]))

    def settle(self) -> None:
        """Take note of builds that ended."""
        self._builder.tidy()
        while not self._ended.empty():
            build, status = self._ended.get()
            if status == "built":
                build.prefix.built_at = time.monotonic()
            elif status == "exists":  # somebody else's, which look-ups may not find yet
                build.prefix.built_at = time.monotonic() + SHOWN_S
            elif status == "left":  # rank 0 stores it as soon as all ranks have left theirs
                build.prefix.built_at = time.monotonic() + IDLE_S
            elif status == "skipped":  # somebody else builds it: the next request that hits it asks again
                build.prefix.due = False
            else:
                self._hits.failed(build.prefix)

    def snapshot(self) -> dict[str, Any]:
        """State as plain values."""
        return {
            "off": self._off or self._builder.rests,
            "prefixes": len(self._hits),
            "evicted": self._hits.evicted if self._stores else 0,  # what others left may never have been stored
            "sample_bytes": self._samples.nbytes,
            "open": [
                {"tokens": one.identity.num_tokens, "pieces": one.built, "of": len(one.pieces)}
                for one in self._builder.open
                if not one.closed
            ],
            **self._builder.counts,
        }

    def close(self) -> None:
        """Give up what is being built, and forget all requests."""
        for rid in list(self._requests):
            self.discard(rid)
        self._builder.close()
        self._samples.close()
