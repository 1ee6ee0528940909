"""What a server that builds while it serves knows of prefixes: how often requests share each, and samples of queries of
its tokens.

A prefix becomes known by a request whose prompt begins with tokens that the prefix cache had already: so far two
prompts agree. From then on every request that begins with it is a hit.

Queries at the positions of a prefix are the same in every prompt that begins with it. So its sample may be put together
from several prefills: of what they share, one that computed it, and of the rest those that came later and found the
beginning in the prefix cache.
"""

from __future__ import annotations

import logging
import math
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_ext.config import PAGE_TOKENS
from sglang_ext.prefill.recorder import queries_by_head

logger = logging.getLogger(__name__)

MAX_PREFIXES = 256
"""Known at a time; those that were not hit for longest are forgotten, but not what an operator waits for, up to half of
them. At 128K tokens one takes 0.7 MB."""
BACKOFF, MAX_TRIES = 4, 3
GROWTH = 8
"""An index that is there already must be exceeded by this part of the new one's tokens, at least: 1/8."""
PATIENCE_S = 10.0
"""How long a build waits for samples that are on their way to host memory."""


@dataclass(eq=False)
class Prefix:
    """Leading tokens of some prompts.

    Attributes:
        namespace, hashes: digest of everything that is not tokens; of its pages, chained.
        hits: requests that began with it; the first one, which only prefilled it, is not counted.
        due: whether its index is being built, or was.
        built_at: monotonic seconds when its index was stored here; None before.
        tries: builds that came to nothing, or to an index that left the store before it had served as many requests as
            it had waited for; each makes the next one wait for `BACKOFF` times as many hits.
        served: requests that its index served.
        asked_for: whether an operator wants its index, whatever was counted.
    """

    namespace: str
    hashes: tuple[bytes, ...]
    hits: int = 0
    due: bool = False
    built_at: float | None = None
    tries: int = 0
    served: int = 0
    asked_for: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens, whole pages."""
        return len(self.hashes) * PAGE_TOKENS

    def begins(self, namespace: str, hashes: Sequence[bytes]) -> bool:
        """Whether a prompt of these page hashes begins with it."""
        pages = len(self.hashes)
        return namespace == self.namespace and len(hashes) >= pages and hashes[pages - 1] == self.hashes[-1]


class HitCounter:
    """Counts requests by prefix. Used by the scheduler thread only.

    Args:
        after: hits from which on a prefix is worth an index.
        least: tokens of a prefix, at least.
        align: an index covers a multiple of so many tokens, whole pages.

    Attributes:
        evicted: indexes of known prefixes that were built here and have left the store since.
    """

    def __init__(self, after: int, least: int, align: int) -> None:
        self._after, self._least, self._align = after, least, align
        self.evicted = 0
        self._known: OrderedDict[tuple[str, bytes], Prefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def hit(
        self, namespace: str, hashes: Sequence[bytes], cached: int, indexed: int, admitted: float = math.inf
    ) -> Prefix | None:
        """Count one request: the longest prefix of it that is worth an index now and was not before, one that was asked
        for before others. It is `due` from now on.

        Args:
            namespace, hashes: of its prompt, as of a `Prefix`.
            cached: tokens of it that the prefix cache had.
            indexed: tokens of the index that serves it; 0 without one.
            admitted: monotonic seconds when that was looked up.
        """
        met = [prefix for prefix in self._known.values() if prefix.begins(namespace, hashes)]
        shared = min(cached // self._align * self._align // PAGE_TOKENS, len(hashes))
        if shared * PAGE_TOKENS >= self._least and all(len(one.hashes) != shared for one in met):
            met.append(Prefix(namespace, tuple(hashes[:shared])))
        for prefix in met:
            prefix.hits += 1
            self._remember(prefix)
        for prefix in met:
            if prefix.due and indexed >= prefix.num_tokens:
                prefix.served += 1
            elif prefix.built_at is not None and prefix.built_at < admitted:  # its index has left the store
                self.evicted += 1
                prefix.tries = 0 if prefix.served >= self._wanted(prefix) else prefix.tries + 1
                prefix.due, prefix.built_at, prefix.hits, prefix.served = False, None, 1, 0
        # One that is built, or on its way, is as good as there.
        indexed = max([indexed, *(prefix.num_tokens for prefix in met if prefix.due)])
        worth = [prefix for prefix in met if prefix.hits >= self._wanted(prefix) and self._gains(prefix, indexed)]
        best = max(worth, key=lambda prefix: (prefix.asked_for, len(prefix.hashes)), default=None)
        if best is not None:
            best.due = True
        return best

    def ask_for(self, namespace: str, hashes: Sequence[bytes]) -> Prefix:
        """Have a prefix's index built as soon as a request begins with it, before those of all others.

        Args:
            namespace, hashes: of the prefix, as of a `Prefix`.
        """
        prefix = self._known.get((namespace, hashes[-1])) or Prefix(namespace, tuple(hashes))
        self._remember(prefix)
        prefix.tries, prefix.asked_for = 0, True
        if prefix.built_at is not None:
            # Should its index have left the store, the next request builds it again.
            prefix.due, prefix.built_at, prefix.served = False, None, 0
        prefix.hits = max(
            self._after, *(one.hits + 1 for one in self._known.values() if one is not prefix), prefix.hits
        )
        return prefix

    def _remember(self, prefix: Prefix) -> None:
        key = prefix.namespace, prefix.hashes[-1]
        self._known[key] = prefix
        self._known.move_to_end(key)
        if len(self._known) > MAX_PREFIXES:
            waiting = [key for key, one in self._known.items() if one.asked_for and one.built_at is None]
            spared = set(waiting[-MAX_PREFIXES // 2 :])
            del self._known[next(key for key in self._known if key not in spared)]

    def _gains(self, prefix: Prefix, indexed: int) -> bool:
        """Whether its index would exceed what is there, or on its way, by enough."""
        least = 1 if prefix.asked_for else max(self._least, prefix.num_tokens // GROWTH)
        return prefix.num_tokens - indexed >= least

    def _wanted(self, prefix: Prefix) -> int:
        """Hits from which on it is built."""
        return int(self._after * BACKOFF ** min(prefix.tries, MAX_TRIES))

    @staticmethod
    def failed(prefix: Prefix) -> None:
        """Its index was not built after all: count anew, further."""
        prefix.due, prefix.hits, prefix.tries = False, 0, prefix.tries + 1


@dataclass(eq=False)
class QuerySample:
    """What one prefill left.

    Attributes:
        namespace, hashes: of the prompt, as of a `Prefix`.
        begin: first token that was computed.
        positions: [rows] int64, of tokens that were drawn evenly from those computed.
        queries: [num_layers, rows, num_qo_heads, head_dim] post-RoPE; in host memory once it is kept.
    """

    namespace: str
    hashes: tuple[bytes, ...]
    begin: int
    positions: NDArray[np.int64]
    queries: Tensor

    @property
    def density(self) -> float:
        """Rows for each token that it was drawn from."""
        return len(self.positions) / max(1, len(self.hashes) * PAGE_TOKENS - self.begin)

    def covered(self, prefix: Prefix) -> range:
        """Tokens of a prefix that the sample was drawn from; empty where it knows none of them."""
        if self.namespace != prefix.namespace:
            return range(0)
        pages = min(len(self.hashes), len(prefix.hashes))
        # Hashes are chained: two prompts that differ once differ from there on.
        same = bisect_left(range(pages), True, key=lambda page: self.hashes[page] != prefix.hashes[page])
        return range(min(self.begin, same * PAGE_TOKENS), same * PAGE_TOKENS)


class QuerySamples:
    """Samples within a limit of bytes in host memory; those of no use for longest leave first. May be used in any
    thread. A thread of its own brings them from the device.
    """

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        self._max_bytes, self._device = max_bytes, device
        self._lock = threading.Condition()
        self._coming = 0
        self._closed = False
        self._kept: OrderedDict[QuerySample, None] = OrderedDict()
        self._moving: SimpleQueue[tuple[QuerySample, torch.cuda.Event | None] | None] = SimpleQueue()
        threading.Thread(target=self._move, name="sparse-attn-samples", daemon=True).start()

    @property
    def nbytes(self) -> int:
        """Host memory of all samples."""
        with self._lock:
            return sum(sample.queries.nbytes for sample in self._kept)

    @property
    def coming(self) -> int:
        """Those on their way from the device, which hold memory there."""
        with self._lock:
            return self._coming

    def close(self) -> None:
        """Keep none, from now on, and end the thread."""
        self._moving.put(None)
        with self._lock:
            self._closed = True
            self._kept.clear()

    def take(self, sample: QuerySample) -> None:
        """Keep a sample whose queries are being written on the current stream; `of` waits for it."""
        event = recorded_event(sample.queries)
        with self._lock:
            self._coming += 1
        self._moving.put((sample, event))

    def _move(self) -> None:
        stream, staging = side_stream(self._device), None
        while (found := self._moving.get()) is not None:
            sample, event = found
            kept: QuerySample | None = None
            try:
                if stream is not None and event is not None:
                    with torch.cuda.stream(stream):
                        stream.wait_event(event)
                        size = sample.queries.numel()
                        if staging is None or staging.numel() < size:
                            staging = torch.empty(size, dtype=sample.queries.dtype, pin_memory=True)
                        place = staging[:size].view(sample.queries.shape)
                        place.copy_(sample.queries, non_blocking=True)
                        stream.synchronize()
                    sample.queries = place  # lets go of the device's memory, before the slower copy
                    sample.queries = place.clone()
                kept = sample
            except Exception:  # one sample; the next prefill leaves another
                logger.exception("sparse attention: a query sample could not be kept")
            del found, sample  # of one that is lost, the device's memory
            self._arrived(kept)
            del kept

    def _arrived(self, sample: QuerySample | None) -> None:
        """One came, or is lost (None); others may have to leave."""
        with self._lock:
            self._coming -= 1
            self._lock.notify_all()
            if sample is None or self._closed:
                return
            self._kept[sample] = None
            left = sum(one.queries.nbytes for one in self._kept)
            while left > self._max_bytes:
                gone, _ = self._kept.popitem(last=False)
                left -= gone.queries.nbytes

    def of(self, prefix: Prefix, num_kv_heads: int, rows: int) -> Tensor | None:
        """The sample of a prefix, evenly from all of its tokens that some sample covers, `rows` tokens at most:
        [num_layers, num_kv_heads, samples, head_dim] in host memory, as `queries_by_head`. None where samples cover
        less than half of the prefix's tokens, or have none of them. Waits for those on their way.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._coming <= 0, PATIENCE_S)
            found = [(sample, sample.covered(prefix)) for sample in self._kept]
            used = [(sample, span) for sample, span in found if span]
            for sample, _ in used:
                self._kept.move_to_end(sample)
        chosen = _without_overlap(used)
        covered = sum(len(span) for _, span in chosen)
        if 2 * covered < prefix.num_tokens:
            return None
        parts = []
        for sample, span in chosen:
            inside = np.flatnonzero((sample.positions >= span.start) & (sample.positions < span.stop))
            share = max(1, round(rows * len(span) / covered))
            inside = inside[:: max(1, -(-len(inside) // share))]
            parts.append(sample.queries[:, torch.from_numpy(inside)])
        queries = torch.cat(parts, dim=1)
        return queries_by_head(queries, num_kv_heads) if queries.shape[1] else None


def _without_overlap(used: Sequence[tuple[QuerySample, range]]) -> list[tuple[QuerySample, range]]:
    """Of samples that cover the same tokens, the densest one: a sample of a long prompt has few of its first tokens."""
    chosen: list[tuple[QuerySample, range]] = []
    for begin, end in pairwise(sorted({cut for _, span in used for cut in (span.start, span.stop)})):
        there = [sample for sample, span in used if begin in span]
        if there:
            best = max(there, key=lambda sample: sample.density)
            if chosen and chosen[-1][0] is best:
                begin = chosen.pop()[1].start
            chosen.append((best, range(begin, end)))
    return chosen


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream of its own for a thread; None on a device that has none."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def recorded_event(tensor: Tensor) -> torch.cuda.Event | None:
    """Of what the current stream has been given so far, the writing of a tensor; None on the CPU."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
