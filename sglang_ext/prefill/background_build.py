"""Indexes built beside the running server: on a thread and a stream of their own, with a bounded share of the GPU, from
keys that the scheduler hands over between two steps, a piece at a time.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefix_index import BuildLease, IndexIdentity, IndexStoreError
from sglang_ext.prefill.builder import IndexAssembly, IndexFactory, give_back
from sglang_ext.prefill.parts import Parts
from sglang_ext.prefill.prefixes import Prefix, QuerySamples, recorded_event, side_stream

logger = logging.getLogger(__name__)

PIECE_TOKENS = 1 << 17
"""Keys, over KV heads, that are taken and built at once: 33 MB of 16 bits at a head dim of 128, half a millisecond."""
MAX_OPEN = 8
"""Builds that are begun or wait, at most. Of a prefix of 131,072 tokens of an 8B shape one holds up to 1.5 GB of host
memory."""
PARTS_S = 0.5
"""How often rank 0 looks for what other ranks are to leave."""
_FIRST_REST_S = 1.0
"""At most, behind a build's first piece: that may take long because kernels are loaded for it."""
IDLE_S = 600.0
"""A build that gets no piece for so long is given up, and with it its lease."""
LOOK_S = 60.0
"""How often it is looked for such builds while nothing else happens."""
REST_S = 60.0
"""For so long no memory of the device is asked for behind an error that says that there is none."""


class Piece(NamedTuple):
    """Keys that a build takes at once: of these KV heads of that layer, in the model's numbers."""

    layer: int
    heads: range


class Build:
    """One index on its way.

    Attributes:
        tokens: of the prefix.
        heads: KV heads of the model that are built here.
        pieces: all of them, in their order.
        given: pieces handed over so far; the scheduler's thread counts them. The builder's takes back one that it had
            no memory for.
        closed: done, failed or given up: what is still handed over is for nobody.
        begun, latest: monotonic seconds when it was added, and when it last went on, or could have.
        built: pieces that are done; the builder's thread counts.
    """

    def __init__(
        self, prefix: Prefix, identity: IndexIdentity, tokens: Sequence[int], heads: range | None = None
    ) -> None:
        model = identity.model
        self.prefix, self.identity, self.tokens = prefix, identity, tokens
        self.heads = heads or range(model.num_kv_heads)
        self.pieces = pieces_of(model.num_layers, self.heads, identity.num_tokens)
        self.given = 0
        self.closed = False
        self.begun = self.latest = time.monotonic()
        self.lease: BuildLease | None = None
        self.assembly: IndexAssembly | None = None
        self.queries: Tensor | None = None
        self.built = 0
        self.least_s = math.inf

    @property
    def wanted(self) -> Piece | None:
        """The next piece; None where all were given."""
        return self.pieces[self.given] if not self.closed and self.given < len(self.pieces) else None


class CannotBuildError(Exception):
    """A build comes to nothing, for a reason that is no fault; the message says why."""


class _Handed(NamedTuple):
    """A piece of a build; or none, and the build is given up."""

    build: Build
    piece: Piece | None = None
    keys: Tensor | None = None
    event: torch.cuda.Event | None = None


class BackgroundBuilder:
    """Builds what it is given, whichever of it keys come for.

    The scheduler's thread adds builds and, in a decode step, gives a piece of one of them when the builder is `ready`.
    All else happens on the builder's own thread. A build never holds slots: between two pieces its prefix may move to
    others, or have none for a while, as positions stay what they are.

    Args:
        factory: of an open store.
        rows: tokens of a sample, at most.
        share: of the GPU's time that building may take, above 0 and at most 1.
        done: called on the builder's thread with (build, fields of the report); a status of `built` means stored, of
            `left` that rank 0 may take the part.
        parts: with tensor parallelism: builds are of this rank's heads, and rank 0 puts them together.

    Attributes:
        ready: whether it takes a piece.
        open: builds that are begun or wait; the scheduler's thread changes the list.
        counts: what became of the others; `left`: parts that this tensor-parallel rank left for rank 0.
    """

    def __init__(
        self,
        factory: IndexFactory,
        samples: QuerySamples,
        rows: int,
        share: float,
        device: torch.device,
        done: Callable[[Build, dict[str, Any]], None],
        parts: Parts | None,
    ) -> None:
        self._parts = parts
        self._waiting: list[Build] = []
        self._factory, self._samples = factory, samples
        self._rows, self._share, self._device, self._done = rows, share, device, done
        self._handed: queue.SimpleQueue[_Handed | None] = queue.SimpleQueue()
        self._ending = threading.Event()
        self.ready = True
        self.open: list[Build] = []
        self.counts = Counter(built=0, failed=0, left=0)
        self._rests_until, self._why_rests = 0.0, ""
        threading.Thread(target=self._work, name="sparse-attn-build", daemon=True).start()

    # -- the scheduler's thread ----------------------------------------------------------------------------

    def add(self, build: Build) -> bool:
        """Build this, too. Of too many, the one with the fewest hits is given up, or is not begun: then False.

        Of equals it is the one added last, on all ranks: how far each of them is, ranks do not agree on.
        """
        self.tidy()
        if len(self.open) >= MAX_OPEN:
            fewest = min(reversed(self.open), key=lambda one: one.prefix.hits)
            if fewest.prefix.hits >= build.prefix.hits:
                return False
            self.open.remove(fewest)
            self._handed.put(_Handed(fewest))
        self.open.append(build)
        return True

    def rest(self, error: Exception) -> None:
        """The device's memory is short: no sample or piece is to be taken for a while. In either thread."""
        logger.warning("sparse attention: building beside serving rests for %g s: %s", REST_S, error)
        self._why_rests = f"rests for {REST_S:g} s: {error}"
        self._rests_until = time.monotonic() + REST_S

    @property
    def rests(self) -> str | None:
        """Why nothing is to be taken now; None: it may."""
        return self._why_rests if time.monotonic() < self._rests_until else None

    def tidy(self) -> None:
        """Forget builds that ended."""
        self.open = [one for one in self.open if not one.closed]

    def hand_over(self, build: Build, piece: Piece, keys: Tensor) -> None:
        """Give a piece that one of `open` wanted to a builder that is ready. Waits for nothing. Its keys [prefix_len,
        number of heads, head_dim] are the builder's memory from now on, being written on the current stream.
        """
        self.ready = False
        build.given += 1
        self._handed.put(_Handed(build, piece, keys, recorded_event(keys)))

    def close(self) -> None:
        """Give up what is being built, and end the thread."""
        self._ending.set()
        self._handed.put(None)

    # -- the builder's thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        stream = side_stream(self._device)
        while not self._ending.is_set():
            with suppress(queue.Empty):
                handed = self._handed.get(timeout=PARTS_S if self._waiting else LOOK_S)
                if handed is None:
                    break
                begun = time.monotonic()
                try:
                    with nullcontext() if stream is None else torch.cuda.stream(stream):
                        self._take(handed, stream)
                finally:
                    now = time.monotonic()
                    for build in list(self.open):  # what waits for this thread is not idle
                        build.latest = min(now, build.latest + now - begun)
                    if handed.piece is not None:
                        self.ready = True
                del handed  # and with it the keys
            self._look_for_parts()
            self._give_up_idle()
        left = list(self.open)
        while not self._handed.empty():
            if (late := self._handed.get()) is not None:
                left.append(late.build)
        for build in left:
            self._close(build)

    def _give_up_idle(self) -> None:
        for build in list(self.open):
            taken = build.given == build.built  # else a piece of it is on its way
            if not build.closed and taken and time.monotonic() - build.latest > IDLE_S:
                detail = f"no request that begins with the prefix decoded for {IDLE_S:g} s"
                if build in self._waiting:
                    detail = f"expected every rank's part of it within {IDLE_S:g} s, some left none"
                elif self._rests_until > build.latest:
                    detail = f"found no memory for a piece within {IDLE_S:g} s: {self._why_rests}"
                self._failed(build, CannotBuildError(detail))

    def _take(self, handed: _Handed, stream: torch.cuda.Stream | None) -> None:
        build, piece, keys, event = handed
        if build.closed:
            return
        try:
            if piece is None or keys is None:
                raise CannotBuildError(f"{MAX_OPEN} others had more hits")
            if build.assembly is None and (refusal := self._begin(build)) is not None:
                self._end(build, refusal)
                return
            if event is not None and stream is not None:
                stream.wait_event(event)
                keys.record_stream(stream)
            self._add(build, piece, keys)
            if build.built == len(build.pieces):
                self._whole(build)
        except Exception as error:  # one prefix must not end the others
            self._failed(build, error)

    def _failed(self, build: Build, error: Exception) -> None:
        reason = "abandoned" if isinstance(error, CannotBuildError) else type(error).__name__
        if reason != "abandoned":
            where = None if isinstance(error, IndexStoreError) else error  # the store's own messages say all
            logger.error("sparse attention: no index was built of a shared prefix: %s", error, exc_info=where)
        self._end(build, {"status": "failed", "reason": reason, "detail": str(error)})

    def _whole(self, build: Build) -> None:
        """All heads of this process are there: store them, leave them for rank 0, or wait for the other ranks'."""
        assert build.assembly is not None
        if self._parts is None:
            self._end(build, self._stored(build))
        elif self._parts.rank == 0:
            build.queries = None
            self._waiting.append(build)
        else:
            self._parts.leave(build.identity.digest, build.assembly.arrays)
            self._end(build, {"status": "left"})

    def _look_for_parts(self) -> None:
        """On rank 0: store what all ranks have their part of."""
        for build in self._waiting:
            assert self._parts is not None
            if build.closed or build.assembly is None:
                continue
            try:
                others = self._parts.taken(build.identity.digest)
                if others is not None:
                    build.assembly.arrays.update(others)
                    self._end(build, self._stored(build))
            except Exception as error:
                self._failed(build, error)
        self._waiting = [build for build in self._waiting if not build.closed]

    def _begin(self, build: Build) -> dict[str, Any] | None:
        """Take the lease (rank 0, for all ranks) and the queries; what to report where there is nothing to build."""
        if self._parts is None or self._parts.rank == 0:
            found = self._factory.take_lease(build.identity)
            if isinstance(found, dict):
                return found
            build.lease = found
        elif self._factory.store.contains(build.identity):
            return {"status": "exists"}
        elif self._parts.has_left(build.identity.digest):
            return {"status": "left"}
        if self._factory.needs_queries(build.identity.model):
            sample = self._samples.of(build.prefix, len(build.heads), self._rows)
            if sample is None:
                raise CannotBuildError(
                    "expected queries of at least half of the prefix, kept from its prefills, found fewer: prefills of "
                    "requests that opt out or compute few tokens leave none, nor do answers. Flush the cache, so that "
                    "it is prefilled again; if samples had to leave host memory, raise sample_host_bytes"
                )
            build.queries = sample
        build.assembly = IndexAssembly(self._factory, build.identity)
        return None

    def _add(self, build: Build, piece: Piece, keys: Tensor) -> None:
        assert build.assembly is not None
        own, before = None, sum(build.assembly.seconds.values())
        try:
            if build.queries is not None:
                first, stop = piece.heads.start - build.heads.start, piece.heads.stop - build.heads.start
                own = build.queries[piece.layer, first:stop].to(self._device)
            build.assembly.add(range(piece.layer, piece.layer + 1), piece.heads, keys, own)
        except torch.OutOfMemoryError as error:
            self.rest(error)
            build.given -= 1  # it is asked for again
            return
        build.built += 1
        build.latest = time.monotonic()
        # Much of a piece's time is waiting for a GPU that serves: the least of them is nearest to what it costs.
        build.least_s = min(build.least_s, sum(build.assembly.seconds.values()) - before)
        rest = build.least_s * (1 / self._share - 1)
        self._ending.wait(min(rest, _FIRST_REST_S) if build.built == 1 else rest)

    def _stored(self, build: Build) -> dict[str, Any]:
        assert build.assembly is not None
        entry, stats = self._factory.keep(build.assembly, {}, build.tokens)
        seconds, tokens, hits = time.monotonic() - build.begun, build.identity.num_tokens, build.prefix.hits
        how = "sparse attention: built an index of %d shared tokens after %d hits: %.1f s, %d bytes"
        logger.info(how, tokens, hits, seconds, entry.nbytes)
        named = {"digest": entry.digest, "num_tokens": tokens, "path": entry.path}
        return {"status": "built", **named, **stats, "seconds": seconds, "hits": hits}

    def _end(self, build: Build, fields: dict[str, Any]) -> None:
        self._close(build)
        try:
            self._done(build, fields)
        except Exception:
            logger.exception("sparse attention: a build could not be reported")
        if fields["status"] in self.counts:
            self.counts[fields["status"]] += 1

    @staticmethod
    def _close(build: Build) -> None:
        build.assembly = build.queries = None
        lease, build.lease = build.lease, None
        give_back(lease)
        build.closed = True  # last: whoever sees it finds the lease given back


def pieces_of(num_layers: int, heads: range, prefix_len: int) -> list[Piece]:
    """These KV heads of all layers, so many heads of a layer at a time that keys are about `PIECE_TOKENS` together."""
    size = max(1, min(len(heads), PIECE_TOKENS // prefix_len))
    return [
        Piece(layer, range(first, min(first + size, heads.stop)))
        for layer in range(num_layers)
        for first in range(heads.start, heads.stop, size)
    ]
