"""How many tokens lossless decode drafts behind each prefix, by how many of them exact steps have kept there."""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY = 0.98
"""What a round's drafts still count for a round later: some 50 rounds are remembered."""
TRUST = 16.0
"""Kept drafts that an index which nothing is known of begins with."""
LEAST = 0.5
"""A token is drafted where it is likelier kept than dropped."""
AGAIN = 64
"""Of rounds without a draft, one in so many tries one."""
KNOWN = 4096
"""Indexes that are remembered: those that drafted last."""


@dataclass
class _Behind:
    kept: float = TRUST
    tried: float = TRUST
    idle: int = 0


class DraftLengths:
    """Counts drafts by the digest of the index that drafted them. Known by rounds alone, so alike on all ranks.

    Args:
        most: tokens of a round.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._behind: dict[str, _Behind] = {}

    def acceptance(self, digest: str) -> float:
        """Share of drafts that were kept, of those that all drafts before were kept of; 1 of an unknown index."""
        behind = self._behind.get(digest, _Behind())
        return behind.kept / behind.tried

    def wanted(self, digest: str) -> int:
        """Tokens to draft in a request's next round: the last one is kept with a probability of `LEAST` or more."""
        share = self.acceptance(digest)
        most = self._most if share >= 1.0 else int(math.log(LEAST) / math.log(share)) if share > 0.0 else 0
        if most > 0:
            return min(most, self._most)
        behind = self._behind[digest]
        behind.idle = (behind.idle + 1) % AGAIN
        return int(behind.idle == 0)

    def verified(self, digest: str, drafted: int, accepted: int) -> None:
        """A round ended. Drafts behind the first one that was dropped say nothing: they follow another token.

        Args:
            digest: of the index.
            drafted, accepted: tokens.
        """
        if not drafted:
            return
        behind = self._behind[digest] = self._behind.pop(digest, _Behind())  # now the last one
        if len(self._behind) > KNOWN:
            del self._behind[next(iter(self._behind))]
        behind.kept = MEMORY * behind.kept + accepted
        behind.tried = MEMORY * behind.tried + min(drafted, accepted + 1)
