"""One index at a time, built beside the running server: on a thread and a stream of its own, with a bounded share of
the time, from keys that the scheduler hands over between two steps.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefix_index import IndexIdentity, IndexStore
from sglang_ext.prefill.builder import IndexAssembly, IndexFactory
from sglang_ext.prefill.claims import Claim
from sglang_ext.prefill.hits import Prefix
from sglang_ext.prefill.samples import QuerySamples

logger = logging.getLogger(__name__)

PIECE_TOKENS = 1 << 17
"""Keys, over KV heads, that are taken and built at once: 33 MB of 16 bits at a head dim of 128, about a millisecond."""
PATIENCE_S = 60.0
"""How long a build waits for a request whose slots hold its prefix, before it gives way to another one that waits."""


class Piece(NamedTuple):
    """Keys that a build wants next: of these KV heads of that layer."""

    layer: int
    heads: range


@dataclass(frozen=True, eq=False)
class Asked:
    """A piece of the running build, of which no two are equal."""

    prefix: Prefix
    piece: Piece


class Work(NamedTuple):
    """One build: its prefix, and the identity of the index."""

    prefix: Prefix
    identity: IndexIdentity


@dataclass
class BuildCounts:
    """What became of the builds so far, and what the running one has."""

    built: int = 0
    failed: int = 0
    pieces_done: int = 0
    pieces: int = 0


class AbandonedError(Exception):
    """A build that cannot go on now; the message says why."""


class BackgroundBuilder:
    """Builds what it is given, one after the other.

    The scheduler's thread asks `wanted()` between steps and answers with `hand_over`; all else happens on the builder's
    own thread. It never holds slots: between two pieces the prefix may move to others, as positions stay what they are.

    Args:
        factory: of the configuration.
        store: open; not owned.
        samples: of queries.
        rows: tokens of a sample, at most.
        share: of the time that building may take while requests decode, above 0 and at most 1.
        device: of the keys.
        done: called on the builder's thread with (work, fields of the report); a status of `built` means stored.
    """

    def __init__(
        self,
        factory: IndexFactory,
        store: IndexStore,
        samples: QuerySamples,
        rows: int,
        share: float,
        device: torch.device,
        done: Callable[[Work, dict[str, Any]], None],
    ) -> None:
        self._factory, self._store, self._samples = factory, store, samples
        self._rows, self._share, self._device, self._done = rows, share, device, done
        self._todo: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._handed: queue.SimpleQueue[tuple[Asked, Tensor, torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._asked: Asked | None = None
        self._closed = threading.Event()
        self.counts = BuildCounts()
        self.running: Work | None = None
        threading.Thread(target=self._work, name="sparse-attn-build", daemon=True).start()

    def add(self, work: Work) -> None:
        """Build this, too."""
        self._todo.put(work)

    @property
    def waiting(self) -> int:
        """Builds that have not begun."""
        return self._todo.qsize()

    def wanted(self) -> Asked | None:
        """What the running build waits for; None while it has work. For the scheduler's thread."""
        return self._asked

    def hand_over(self, asked: Asked, keys: Tensor) -> None:
        """Give what is wanted. For the scheduler's thread; waits for nothing.

        Args:
            asked: what `wanted` returned.
            keys: [prefix_len, number of heads, head_dim], memory of the builder's from now on, being written on the
                current stream.
        """
        if self._asked is asked:  # else the build gave up meanwhile, and another one asks
            self._asked = None
        event = None
        if keys.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._handed.put((asked, keys, event))

    def close(self) -> None:
        """Give up what is being built, and end the thread."""
        self._closed.set()
        self._todo.put(None)
        self._handed.put(None)

    def _work(self) -> None:
        stream = side_stream(self._device)
        while (work := self._todo.get()) is not None and not self._closed.is_set():
            on: AbstractContextManager[Any] = nullcontext() if stream is None else torch.cuda.stream(stream)
            with on:
                self._one(work, stream)

    def _one(self, work: Work, stream: torch.cuda.Stream | None) -> None:
        claim = Claim(work.identity)
        claim.settle(self._store)
        self.running = work
        try:
            if isinstance(claim.refusal, Exception):
                raise claim.refusal
            fields = dict(claim.refusal) if claim.refusal is not None else self._built(work, stream)
        except AbandonedError as error:
            fields = {"status": "failed", "reason": "abandoned", "detail": str(error)}
        except Exception as error:  # one prefix must not end the others
            logger.error("sparse attention: no index was built of a shared prefix", exc_info=error)
            fields = {"status": "failed", "reason": type(error).__name__, "detail": str(error)}
        finally:
            claim.release()
            self.running, self._asked = None, None
        self.counts.built += fields["status"] == "built"
        self.counts.failed += fields["status"] == "failed"
        self._done(work, fields)

    def _built(self, work: Work, stream: torch.cuda.Stream | None) -> dict[str, Any]:
        begun = time.monotonic()
        model, prefix_len = work.identity.model, work.identity.num_tokens
        queries, sm_scale = None, None
        if self._factory.needs_queries:
            sample = self._samples.of(work.prefix, model.num_kv_heads, self._rows)
            if sample is None:
                raise AbandonedError("expected queries of at least half of the prefix, fewer are kept in host memory")
            queries, sm_scale = sample
        assembly = IndexAssembly(self._factory, work.identity)
        pieces = list(pieces_of(model.num_layers, model.num_kv_heads, prefix_len))
        self.counts.pieces_done, self.counts.pieces = 0, len(pieces)
        busy = 0.0
        for piece in pieces:
            keys = self._keys(work.prefix, piece, stream)
            at = time.perf_counter()
            own = None
            if queries is not None:
                own = queries[piece.layer, piece.heads.start : piece.heads.stop].to(self._device)
            assembly.add(range(piece.layer, piece.layer + 1), piece.heads, keys, own)
            del keys, own
            took = time.perf_counter() - at
            busy += took
            self.counts.pieces_done += 1
            if self._closed.wait(took * (1 / self._share - 1)):
                raise AbandonedError("the server ends, or its weights changed")
        entry, stats = self._factory.store(assembly, {})
        seconds = time.monotonic() - begun
        logger.info(
            "sparse attention: built an index of %d shared tokens after %d hits: %.1f s, %.2f s of them busy, %d bytes",
            prefix_len,
            work.prefix.hits,
            seconds,
            busy,
            entry.nbytes,
        )
        named = {"digest": entry.digest, "num_tokens": prefix_len, "path": entry.path, "sm_scale": sm_scale}
        return {"status": "built", **named, **stats, "seconds": seconds, "hits": work.prefix.hits}

    def _keys(self, prefix: Prefix, piece: Piece, stream: torch.cuda.Stream | None) -> Tensor:
        asked = self._asked = Asked(prefix, piece)
        while True:
            try:
                handed = self._handed.get(timeout=PATIENCE_S)
            except queue.Empty:
                if self._todo.empty():
                    self._asked = asked
                    continue
                self._asked = None
                raise AbandonedError(
                    f"no request that begins with the prefix decoded for {PATIENCE_S:g} s, and others wait; its hits "
                    "are counted anew"
                ) from None
            if handed is None:
                raise AbandonedError("the server ends, or its weights changed")
            answered, keys, event = handed
            if answered is asked:  # else an answer that came too late, to a build that gave up
                break
        if event is not None and stream is not None:
            stream.wait_event(event)
            keys.record_stream(stream)
        return keys


def pieces_of(num_layers: int, num_kv_heads: int, prefix_len: int) -> list[Piece]:
    """All KV heads of all layers, so many heads of a layer at a time that keys are about `PIECE_TOKENS` together."""
    size = max(1, min(num_kv_heads, PIECE_TOKENS // prefix_len))
    return [
        Piece(layer, range(first, min(first + size, num_kv_heads)))
        for layer in range(num_layers)
        for first in range(0, num_kv_heads, size)
    ]


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream of its own for a thread; None on a device that has none."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
