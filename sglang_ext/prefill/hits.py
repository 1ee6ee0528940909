"""Which prefixes requests share, and how often: what is worth an index in a server that builds while it serves.

A prefix becomes known by a request whose prompt begins with tokens that the prefix cache had already: so far two
prompts agree. From then on every request that begins with it is a hit.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext.config import PAGE_TOKENS

MAX_PREFIXES = 256
"""Known at a time; those that were not hit for longest are forgotten. At 128K tokens one takes 0.7 MB."""
BACKOFF, MAX_TRIES = 4, 3
GROWTH = 8
"""An index that is there already must be exceeded by this part of the new one's tokens, at least: 1/8."""


@dataclass(eq=False)
class Prefix:
    """Leading tokens of some prompts.

    Attributes:
        namespace: digest of everything that is not tokens.
        hashes: of its pages, chained.
        hits: requests that began with it; the first one, which only prefilled it, is not counted.
        due: whether its index is being built, or was.
        built_at: monotonic seconds when its index was stored here; None before.
        tries: builds that came to nothing, or to an index that left the store before it had served as many requests as
            it had waited for; each makes the next one wait for `BACKOFF` times as many hits.
        served: requests that its index served.
    """

    namespace: str
    hashes: tuple[bytes, ...]
    hits: int = 0
    due: bool = False
    built_at: float | None = None
    tries: int = 0
    served: int = 0

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
        self._pages: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._known)

    def hit(
        self, namespace: str, hashes: Sequence[bytes], cached: int, indexed: int, admitted: float = math.inf
    ) -> Prefix | None:
        """Count one request.

        Args:
            namespace: its namespace's digest.
            hashes: of its prompt's pages, chained.
            cached: tokens of it that the prefix cache had.
            indexed: tokens of the index that serves it; 0 without one.
            admitted: monotonic seconds when that was looked up.

        Returns:
            The longest prefix of it that is worth an index now and was not before; it is `due` from now on.
        """
        found = [self._known.get((namespace, hashes[pages - 1])) for pages in self._pages if pages <= len(hashes)]
        met = [prefix for prefix in found if prefix is not None]
        shared = min(cached // self._align * self._align // PAGE_TOKENS, len(hashes))
        if shared * PAGE_TOKENS >= self._least and all(len(one.hashes) != shared for one in met):
            met.append(self._learn(Prefix(namespace, tuple(hashes[:shared]))))
        for prefix in met:
            prefix.hits += 1
            self._known.move_to_end((namespace, prefix.hashes[-1]))
        for prefix in met:
            if prefix.due and indexed >= prefix.num_tokens:
                prefix.served += 1
            elif prefix.built_at is not None and prefix.built_at < admitted:  # its index has left the store
                self.evicted += 1
                prefix.tries = 0 if prefix.served >= self._wanted(prefix) else prefix.tries + 1
                prefix.due, prefix.built_at, prefix.hits, prefix.served = False, None, 1, 0
        # One that is built, or on its way, is as good as there.
        indexed = max([indexed, *(prefix.num_tokens for prefix in met if prefix.due)])
        worth = [prefix for prefix in met if prefix.hits >= self._wanted(prefix)]
        longest = max(worth, key=lambda prefix: len(prefix.hashes), default=None)
        if longest is None or not self._pays(longest, indexed):
            return None
        longest.due = True
        return longest

    def _wanted(self, prefix: Prefix) -> int:
        """Hits from which on it is built."""
        return int(self._after * BACKOFF ** min(prefix.tries, MAX_TRIES))

    def _learn(self, prefix: Prefix) -> Prefix:
        self._known[prefix.namespace, prefix.hashes[-1]] = prefix
        self._pages[len(prefix.hashes)] += 1
        while len(self._known) > MAX_PREFIXES:
            _, oldest = self._known.popitem(last=False)
            self._pages[len(oldest.hashes)] -= 1
            self._pages += Counter()  # drops what is 0
        return prefix

    def _pays(self, prefix: Prefix, indexed: int) -> bool:
        return prefix.num_tokens - indexed >= max(self._least, prefix.num_tokens // GROWTH)

    @staticmethod
    def failed(prefix: Prefix) -> None:
        """Its index was not built after all: count anew, further."""
        prefix.due, prefix.hits, prefix.tries = False, 0, prefix.tries + 1

    @staticmethod
    def later(prefix: Prefix) -> None:
        """Others are built first, or somebody else builds it: the next request that hits it asks again."""
        prefix.due = False
