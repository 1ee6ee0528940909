"""The look-up structure behind every store: entries by digest and by prefix, problems, and what stores make of them.

A catalog's owner locks, but ``longest`` and ``near_miss`` may be asked while another thread changes it: a rescan, which
waits for a disk, then holds up no look-up.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

from .errors import IndexStoreError, StoreClosed, StoreInconsistent
from .eviction import has_expired
from .keys import PAGE_TOKENS, IndexIdentity, ModelFingerprint, model_mismatch
from .store import IndexEntry, Problem

_Self = TypeVar("_Self", bound="CatalogStore")


class Catalog:
    """Entries by digest and, per namespace, by the hash of the prefix's last page.

    ``clock`` gives the seconds since the Unix epoch by which entries expire. One that has expired is held until it
    is removed, but no look-up of the ``IndexStore`` protocol shows it: those that do are ``held`` and ``all_held``.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._entries: dict[str, IndexEntry] = {}
        self._by_prefix: dict[str, dict[bytes, tuple[str, ...]]] = {}
        self._served: dict[str, object] = {}
        self.hidden: dict[str, int] = {}
        """Digests that no listing and no look-up by prefix shows: what the store has of them is outdated. Outlives
        ``clear()``.
        """
        self.problems: dict[str, IndexStoreError] = {}
        """By path, or by digest in a store without files: what is not a usable index, and why."""

    def __contains__(self, digest: str) -> bool:
        return self.get(digest) is not None

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: str) -> IndexEntry | None:
        entry = self._entries.get(digest)
        return None if entry is None or has_expired(entry.retention, self._clock()) else entry

    def _is_shown(self, digest: str, entry: IndexEntry, now: float) -> bool:
        return digest not in self.hidden and not has_expired(entry.retention, now)

    def held(self, digest: str) -> IndexEntry | None:
        """The entry, expired or not."""
        return self._entries.get(digest)

    def entries(self) -> tuple[IndexEntry, ...]:
        """All entries that have not expired, ordered by digest."""
        now = self._clock()
        return tuple(entry for digest, entry in sorted(self._entries.items()) if self._is_shown(digest, entry, now))

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
        for book in (self._entries, self._by_prefix, self._served, self.problems):
            book.clear()

    def gave(self, digest: str, version: object) -> None:
        """A reader has this version of an index. Of several versions, a reader of an old one may still be at it."""
        if self._served.setdefault(digest, version) != version:
            self._served[digest] = None

    def gave_only(self, digest: str, version: object) -> bool:
        """Whether nobody was given another version than this one."""
        return self._served.get(digest, version) == version

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
                if entry is None or not self._is_shown(digest, entry, now):
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


class CatalogStore(ABC):
    """What every kind of store shares: its life, and the part of ``IndexStore`` that asks only its catalogs.

    ``_catalogs()`` gives them, the nearest first: of equally long prefixes the first one's is the answer.
    """

    kind: ClassVar[str]
    catalog: Catalog
    """Its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_open = False

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def _catalogs(self) -> Sequence[Catalog]:
        return (self.catalog,)

    def __enter__(self: _Self) -> _Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreClosed(f"{self.kind} store", "open", "closed", "call open() first")

    def list(self) -> Sequence[IndexEntry]:
        self._check_open()
        with self._lock:
            return self.catalog.entries()

    def problems(self) -> Sequence[Problem]:
        self._check_open()
        with self._lock:
            return tuple(Problem(path, error) for path, error in sorted(self.catalog.problems.items()))

    def longest(
        self,
        namespace: str,
        page_hashes: Sequence[bytes],
        model: ModelFingerprint,
        profile_digest: str,
        *,
        page_tokens: int = PAGE_TOKENS,
    ) -> IndexEntry | None:
        self._check_open()
        ask = (namespace, page_hashes, model, profile_digest, page_tokens)
        found = [entry for catalog in self._catalogs() if (entry := catalog.longest(*ask)) is not None]
        return max(found, key=lambda entry: entry.identity.num_tokens, default=None)

    def near_miss(
        self,
        namespace: str,
        page_hashes: Sequence[bytes],
        model: ModelFingerprint,
        profile_digest: str,
        *,
        page_tokens: int = PAGE_TOKENS,
    ) -> str | None:
        ask = (namespace, page_hashes, model, profile_digest)
        if self.longest(*ask, page_tokens=page_tokens) is not None:
            return None
        misses = (catalog.near_miss(*ask, page_tokens) for catalog in self._catalogs())
        return next((miss for miss in misses if miss is not None), None)


def inconsistent(what: str, expected: object, found: object) -> StoreInconsistent:
    remedy = "this is a defect of prefix_index: report it, and open the store anew"
    return StoreInconsistent(what, str(expected), str(found), remedy)


def _difference(model: ModelFingerprint, profile_digest: str, identity: IndexIdentity) -> str | None:
    if identity.profile_digest != profile_digest and identity.model == model:
        return f"profile_digest: expected {profile_digest}, found {identity.profile_digest}"
    return model_mismatch(model, identity.model)
