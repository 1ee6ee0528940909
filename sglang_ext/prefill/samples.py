"""Queries sampled from prefills, in host memory, until an index is built of a prefix that they belong to.

Queries at the positions of a prefix are the same in every prompt that begins with it. So the sample of a prefix may be
put together from several prefills: of what they share, one that computed it, and of the rest those that came later and
found the beginning in the prefix cache.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_ext.config import PAGE_TOKENS
from sglang_ext.prefill.hits import Prefix

PATIENCE_S = 10.0
"""How long a build waits for samples that are on their way to host memory."""


@dataclass(eq=False)
class QuerySample:
    """What one prefill left.

    Attributes:
        namespace: digest of everything of the prompt that is not tokens.
        hashes: of the prompt's pages, chained.
        begin: first token that was computed.
        positions: [rows] int64, of tokens that were drawn evenly from those computed.
        queries: [num_layers, rows, num_qo_heads, head_dim] post-RoPE, in host memory.
    """

    namespace: str
    hashes: tuple[bytes, ...]
    begin: int
    positions: NDArray[np.int64]
    queries: Tensor

    def covered(self, prefix: Prefix) -> range:
        """Tokens of a prefix that the sample was drawn from; empty where it knows none of them."""
        if self.namespace != prefix.namespace:
            return range(0)
        pages = min(len(self.hashes), len(prefix.hashes))
        # Hashes are chained: two prompts that differ once differ from there on.
        same = bisect_left(range(pages), True, key=lambda page: self.hashes[page] != prefix.hashes[page])
        return range(min(self.begin, same * PAGE_TOKENS), same * PAGE_TOKENS)


class QuerySamples:
    """Samples within a byte limit; those of no use for longest leave first. May be used in any thread.

    Args:
        max_bytes: of host memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Condition()
        self._coming = 0
        self._closed = False
        self._kept: OrderedDict[QuerySample, None] = OrderedDict()

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

    def clear(self) -> None:
        """Keep none, from now on."""
        with self._lock:
            self._closed = True
            self._kept.clear()

    def announce(self) -> None:
        """One is on its way from the device: `of` waits for it. Then call `add` once."""
        with self._lock:
            self._coming += 1

    def add(self, sample: QuerySample | None) -> None:
        """Keep one that was announced, or None where it is lost after all; others may have to leave."""
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
        """The sample of a prefix, evenly from all of its tokens that some sample covers. Waits for those on their way.

        Args:
            prefix: whose.
            num_kv_heads: of the model.
            rows: tokens, at most.

        Returns:
            [num_layers, num_kv_heads, samples, head_dim] in host memory, as `Capture.queries`; None where samples cover
            less than half of the prefix's tokens.
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
        joined = torch.cat(parts, dim=1)
        layers, kept, heads, dim = joined.shape
        grouped = joined.reshape(layers, kept, num_kv_heads, heads // num_kv_heads, dim)
        return grouped.permute(0, 2, 1, 3, 4).reshape(layers, num_kv_heads, -1, dim)


def _without_overlap(used: Sequence[tuple[QuerySample, range]]) -> list[tuple[QuerySample, range]]:
    """Of samples that cover the same tokens, one: the longest first, each for what no other one has."""
    chosen: list[tuple[QuerySample, range]] = []
    for sample, span in sorted(used, key=lambda one: -len(one[1])):
        free = span
        for _, taken in chosen:
            if taken.start <= free.start < taken.stop:
                free = range(min(taken.stop, free.stop), free.stop)
            elif free.start < taken.start < free.stop:
                free = range(free.start, taken.start)
        if free:
            chosen.append((sample, free))
    return chosen
