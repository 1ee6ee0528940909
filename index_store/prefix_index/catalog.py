"""The look-up structure behind every store: entries by digest and by prefix.

Its owner locks, but ``longest`` and ``near_miss`` may be asked while another thread changes it: a rescan, which waits
for a disk, then holds up no look-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from .errors import StoreInconsistent
from .eviction import has_expired
from .keys import IndexIdentity, ModelFingerprint, model_mismatch
from .store import IndexEntry


class Catalog:
    """Entries by digest and, per namespace, by the hash of the prefix's last page.

    ``clock`` gives the seconds since the Unix epoch by which entries expire. One that has expired is held until it
    is removed, but no look-up of the ``IndexStore`` protocol shows it: those that do are ``held`` and ``all_held``.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._entries: dict[str, IndexEntry] = {}
        self._by_prefix: dict[str, dict[bytes, tuple[str, ...]]] = {}

    def __contains__(self, digest: str) -> bool:
        return self.get(digest) is not None

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: str) -> IndexEntry | None:
        entry = self._entries.get(digest)
        return None if entry is None or has_expired(entry.retention, self._clock()) else entry

    def held(self, digest: str) -> IndexEntry | None:
        """The entry, expired or not."""
        return self._entries.get(digest)

    def entries(self) -> tuple[IndexEntry, ...]:
        """All entries that have not expired, ordered by digest."""
        now = self._clock()
        return tuple(entry for _, entry in sorted(self._entries.items()) if not has_expired(entry.retention, now))

    def all_held(self) -> tuple[tuple[str, IndexEntry], ...]:
        """(digest, entry) of all entries, expired or not, ordered by digest."""
        return tuple(sorted(self._entries.items()))

    def add(self, digest: str, entry: IndexEntry) -> None:
        """Adds or replaces. ``digest`` is the entry's own (the caller has it at hand)."""
        known = digest in self._entries
        self._entries[digest] = entry
        if not known:
            prefixes = self._by_prefix.setdefault(entry.identity.namespace, {})
            prefix = bytes.fromhex(entry.identity.prefix_hash)
            prefixes[prefix] = tuple(sorted((*prefixes.get(prefix, ()), digest)))

    def remove(self, digest: str) -> bool:
        """Returns whether it was there."""
        entry = self._entries.pop(digest, None)
        if entry is None:
            return False
        namespace, prefix = entry.identity.namespace, bytes.fromhex(entry.identity.prefix_hash)
        rest = tuple(d for d in self._by_prefix[namespace][prefix] if d != digest)
        if rest:
            self._by_prefix[namespace][prefix] = rest
            return True
        del self._by_prefix[namespace][prefix]
        if not self._by_prefix[namespace]:
            del self._by_prefix[namespace]
        return True

    def clear(self) -> None:
        self._entries.clear()
        self._by_prefix.clear()

    def longest(
        self,
        namespace: str,
        page_hashes: Sequence[bytes],
        model: ModelFingerprint,
        profile_digest: str,
        page_tokens: int,
    ) -> IndexEntry | None:
        """See ``IndexStore.longest``."""
        for entry in self._of_prompt(namespace, page_hashes, page_tokens):
            if _difference(model, profile_digest, entry.identity) is None:
                return entry
        return None

    def near_miss(
        self,
        namespace: str,
        page_hashes: Sequence[bytes],
        model: ModelFingerprint,
        profile_digest: str,
        page_tokens: int,
    ) -> str | None:
        """See ``IndexStore.near_miss``."""
        first: str | None = None
        for entry in self._of_prompt(namespace, page_hashes, page_tokens):
            difference = _difference(model, profile_digest, entry.identity)
            if difference is None:
                return None
            first = first or difference
        return first

    def _of_prompt(self, namespace: str, page_hashes: Sequence[bytes], page_tokens: int) -> Iterator[IndexEntry]:
        prefixes = self._by_prefix.get(namespace)
        if prefixes is None:
            return
        pages = len(page_hashes)
        now = self._clock()
        for i, page_hash in enumerate(reversed(page_hashes)):
            for digest in prefixes.get(page_hash, ()):
                entry = self._entries.get(digest)
                if entry is None or has_expired(entry.retention, now):
                    continue
                identity = entry.identity
                if identity.page_tokens == page_tokens and identity.num_tokens == (pages - i) * page_tokens:
                    yield entry

    def check_integrity(self) -> None:
        """Raises StoreInconsistent where the two look-ups disagree."""
        for digest, entry in self._entries.items():
            if entry.digest != digest:
                raise inconsistent("catalog key", digest, entry.digest)
        by_prefix = {
            (namespace, prefix.hex(), digest)
            for namespace, prefixes in self._by_prefix.items()
            for prefix, entries in prefixes.items()
            for digest in entries
        }
        by_digest = {(e.identity.namespace, e.identity.prefix_hash, d) for d, e in self._entries.items()}
        if by_prefix != by_digest:
            raise inconsistent("catalog by prefix", sorted(by_digest), sorted(by_prefix))


def inconsistent(what: str, expected: object, found: object) -> StoreInconsistent:
    remedy = "this is a defect of prefix_index: report it, and open the store anew"
    return StoreInconsistent(what, expected=str(expected), found=str(found), remedy=remedy)


def _difference(model: ModelFingerprint, profile_digest: str, identity: IndexIdentity) -> str | None:
    if identity.profile_digest != profile_digest and identity.model == model:
        return f"profile_digest: expected {profile_digest}, found {identity.profile_digest}"
    return model_mismatch(model, identity.model)
