"""What every store can do, and what all kinds share: their life, and look-ups by prefix in a catalog in memory.

A store maps an ``IndexIdentity`` to one container. All methods may be called from several threads.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final, NamedTuple, TypeVar

import msgspec

from .errors import IndexStoreError, InvalidPayload, StoreClosed
from .format import PAGE_TOKENS, Entry, IndexIdentity, ModelFingerprint, is_digest, model_mismatch
from .reader import IndexFile, IndexLookup
from .writer import IndexPayload

_Self = TypeVar("_Self", bound="IndexSource")


class Retention(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How long an index should stay, and what people call it.

    ``pinned``   a soft pin: it leaves only after everything that is not pinned
    ``expires``  seconds since the Unix epoch; from then on it is a miss, and ``collect()`` removes it. None: never
    ``name``     1 to 256 printable characters; several indexes may have one name. None: it has none
    """

    pinned: bool = False
    expires: float | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if type(self.pinned) is not bool:
            raise ValueError(f"pinned: expected True or False, found {self.pinned!r}")
        if self.name is not None and not (0 < len(self.name) <= 256 and self.name.isprintable()):
            raise ValueError(f"name: expected 1 to 256 printable characters, found {repr(self.name)[:200]}")
        if self.expires is None:
            return
        value: object = self.expires
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
            raise ValueError(f"expires: expected finite seconds, 0 or more, found {repr(value)[:200]}")
        msgspec.structs.force_setattr(self, "expires", float(value))


DEFAULT: Final = Retention()


def has_expired(retention: Retention, now: float) -> bool:
    """Whether an index of this retention is a miss at ``now`` (seconds since the Unix epoch)."""
    return retention.expires is not None and retention.expires <= now


class BuildLease:
    """The right to build one index while nobody else does.

    It ends with ``release()``, with the holder's life, or when nobody refers to it any more. ``ends`` are called then,
    the last one first; in the last case only ``forgotten``, where it is given: nobody may be kept waiting then.
    """

    def __init__(self, digest: str, *ends: Callable[[], object], forgotten: Callable[[], object] | None = None) -> None:
        self.digest = digest
        self._ends, self._forgotten = ends, forgotten

    def release(self) -> None:
        """Gives the right back. Twice does nothing."""
        ends, self._ends = self._ends, ()
        with contextlib.ExitStack() as stack:
            for end in ends:
                stack.callback(end)

    def __enter__(self) -> BuildLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            (self._forgotten or self.release)()


class IndexEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One index as a listing shows it. ``nbytes`` is the whole container; times are seconds."""

    identity: IndexIdentity
    nbytes: int
    created: float
    build_seconds: float
    path: str | None = None
    retention: Retention = DEFAULT

    @classmethod
    def of(cls, entry: Entry, nbytes: int, retention: Retention = DEFAULT, path: str | None = None) -> IndexEntry:
        """Of a container's first header section."""
        times = {"created": entry.info.created, "build_seconds": entry.info.build_seconds}
        return cls(identity=entry.identity, nbytes=nbytes, path=path, retention=retention, **times)

    @property
    def digest(self) -> str:
        return self.identity.digest


class Evictions(NamedTuple):
    """What left to make room for others: how many indexes, their bytes, and the seconds that it took."""

    indexes: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def and_of(self, nbytes: Sequence[int], begun: float) -> Evictions:
        """With more: bytes of each, and the ``time.perf_counter()`` at which it began; nothing where none left."""
        if not nbytes:
            return self
        return Evictions(
            self.indexes + len(nbytes), self.nbytes + sum(nbytes), self.seconds + time.perf_counter() - begun
        )


class Problem(NamedTuple):
    """Something that cannot be used, and why. ``path`` is a file, or a digest in a store without files."""

    path: str
    error: IndexStoreError


class Ask(NamedTuple):
    """What a look-up by prefix is about: a prompt's hashes (``format.page_hashes``), and what an index must be of."""

    namespace: str
    page_hashes: Sequence[bytes]
    model: ModelFingerprint
    profile_digest: str
    page_tokens: int = PAGE_TOKENS


class Catalog:
    """Entries by digest and, per namespace, by the hash of the prefix's last page; and what is no usable index.

    Its owner locks, but look-ups may be asked while another thread changes it: a rescan holds up none. ``clock`` gives
    the seconds since the Unix epoch by which entries expire. What has expired is shown by ``held`` and ``all_held``
    only.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._entries: dict[str, IndexEntry] = {}
        self._by_prefix: dict[str, dict[bytes, tuple[str, ...]]] = {}
        self.hides: Callable[[str], bool] = lambda digest: False
        """Digests that no listing and no look-up by prefix shows."""
        self.problems: dict[str, IndexStoreError] = {}
        """By path, or by digest in a store without files: what is not a usable index, and why."""

    def __contains__(self, digest: str) -> bool:
        return self.get(digest) is not None

    def get(self, digest: str) -> IndexEntry | None:
        entry = self._entries.get(digest)
        return None if entry is None or has_expired(entry.retention, self._clock()) else entry

    def held(self, digest: str) -> IndexEntry | None:
        """The entry, expired or not."""
        return self._entries.get(digest)

    def is_expired(self, digest: str) -> bool:
        """Whether it is held, and has expired."""
        return self.held(digest) is not None and self.get(digest) is None

    def expired(self) -> tuple[IndexEntry, ...]:
        """All entries that are held, and have expired."""
        now = self._clock()
        return tuple(entry for entry in tuple(self._entries.values()) if has_expired(entry.retention, now))

    def entries(self) -> tuple[IndexEntry, ...]:
        """All entries that have not expired, ordered by digest."""
        now = self._clock()
        return tuple(entry for digest, entry in self.all_held() if self._is_shown(digest, entry, now))

    def all_held(self) -> tuple[tuple[str, IndexEntry], ...]:
        """(digest, entry) of all entries, expired or not, ordered by digest."""
        return tuple(sorted(self._entries.items()))

    def _is_shown(self, digest: str, entry: IndexEntry, now: float) -> bool:
        return not self.hides(digest) and not has_expired(entry.retention, now)

    def add(self, digest: str, entry: IndexEntry) -> None:
        """Adds or replaces. ``digest`` is the entry's own (the caller has it at hand)."""
        if self._entries.get(digest) is None:
            prefixes = self._by_prefix.setdefault(entry.identity.namespace, {})
            prefix = bytes.fromhex(entry.identity.prefix_hash)
            prefixes[prefix] = tuple(sorted((*prefixes.get(prefix, ()), digest)))
        self._entries[digest] = entry

    def remove(self, digest: str) -> None:
        """Takes an entry out, if it is there."""
        entry = self._entries.pop(digest, None)
        if entry is None:
            return
        namespace, prefix = entry.identity.namespace, bytes.fromhex(entry.identity.prefix_hash)
        prefixes = self._by_prefix[namespace]
        prefixes[prefix] = tuple(d for d in prefixes[prefix] if d != digest)
        if not prefixes[prefix]:
            del prefixes[prefix]
        if not prefixes:
            del self._by_prefix[namespace]

    def clear(self) -> None:
        for book in (self._entries, self._by_prefix, self.problems):
            book.clear()

    def matches(self, ask: Ask) -> Iterator[tuple[IndexEntry, str | None]]:
        """Indexes of a prompt's prefixes, the longest first, each with the first field that differs. No I/O."""
        prefixes = self._by_prefix.get(ask.namespace)
        if prefixes is None:
            return
        now = self._clock()
        num_tokens = len(ask.page_hashes) * ask.page_tokens
        for page_hash in reversed(ask.page_hashes):
            for digest in prefixes.get(page_hash, ()):
                entry = self._entries.get(digest)
                if entry is None or not self._is_shown(digest, entry, now):
                    continue
                identity = entry.identity
                if (identity.page_tokens, identity.num_tokens) == (ask.page_tokens, num_tokens):
                    yield entry, _difference(ask, identity)
            num_tokens -= ask.page_tokens


def _difference(ask: Ask, identity: IndexIdentity) -> str | None:
    if identity.profile_digest != ask.profile_digest and identity.model == ask.model:
        return f"profile_digest: expected {ask.profile_digest}, found {identity.profile_digest}"
    return model_mismatch(ask.model, identity.model)


class IndexSource(ABC):
    """What indexes come from. All methods but ``open`` and ``close`` raise StoreClosed on one that is not open."""

    kind: ClassVar[str]
    catalog: Catalog
    """Its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_open = False

    @abstractmethod
    def open(self) -> None:
        """Starts using the store. Opening twice does nothing. Raises StoreFolderError."""

    @abstractmethod
    def close(self) -> None:
        """Ends using it. Indexes that were handed out stay usable. Closing twice does nothing."""

    @abstractmethod
    def get(self, key: IndexLookup) -> IndexFile:
        """Opens an index; the caller closes it. Its header is checked now, each array when it is first read.

        Raises IndexNotFound, IndexCorrupt, IndexTooNew, IndexForeign, IndexUnreadable, IndexMismatch, and what was
        reported.
        """

    @abstractmethod
    def contains(self, key: IndexLookup) -> bool:
        """Whether ``get`` would open it now. False for what is damaged, or was reported to be."""

    @abstractmethod
    def delete(self, key: IndexLookup) -> bool:
        """Removes an index, damaged or not. Returns whether there was one. Open ones stay readable."""

    @abstractmethod
    def lease(self, key: IndexLookup) -> BuildLease | None:
        """The right to build this index, or None while somebody else holds it. Never blocks.

        Whoever gets it looks first whether the index has come meanwhile (``contains``).
        """

    @abstractmethod
    def rescan(self, *, full: bool = False) -> None:
        """Learns what other processes changed. Cheap when nothing did; ``full`` reads all headers."""

    def list(self) -> Sequence[IndexEntry]:
        """All usable indexes known now, ordered by digest. Bad files are in ``problems``."""
        self._check_open()
        with self._lock:
            return self.catalog.entries()

    def problems(self) -> Sequence[Problem]:
        """Everything found that is not a usable index, with the error that says why."""
        self._check_open()
        with self._lock:
            return tuple(Problem(path, error) for path, error in sorted(self.catalog.problems.items()))

    def __enter__(self: _Self) -> _Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _digest(self, key: IndexLookup) -> str:
        """The lookup's digest, of a store that is open."""
        digest = digest_of(key)
        self._check_open()
        return digest

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreClosed(f"{self.kind} store", "open", "closed", "call open() first")


class IndexStore(IndexSource):
    """A store: what it is given stays as long as its retention and the store's limits say."""

    _evicted = Evictions()

    @abstractmethod
    def put(self, payload: IndexPayload, *, retention: Retention | None = None) -> IndexEntry:
        """Stores an index whole or not at all; an older one of the same identity is replaced.

        ``retention`` None keeps that of the index it replaces. When it returns the index is as durable as the store is.
        Others may have been evicted to make room. Raises InvalidPayload, StoreFull, StoreFolderError, StoreUnavailable,
        and what a ``LazyArray`` raises; after an error the index of this identity is what it was before. One exception:
        where the disk fails after the new index got its name, either version is there, whole, kept at least as long as
        both should be.
        """

    @abstractmethod
    def retain(self, key: IndexLookup, retention: Retention) -> IndexEntry:
        """Changes how long an index should stay. Raises IndexNotFound."""

    @abstractmethod
    def touch(self, key: IndexLookup) -> None:
        """Writes down that an index is in use, as ``get`` does, for one that is long in memory. Raises IndexNotFound,
        and what else keeps ``get`` from finding it.
        """

    @abstractmethod
    def collect(self) -> Sequence[IndexEntry]:
        """Removes what has expired and what exceeds the store's limits; returns what was removed."""

    @abstractmethod
    def report(self, index: IndexFile, error: IndexStoreError) -> bool:
        """Tells the store that reading an index failed after ``get``: it becomes a problem and is offered no more,
        until it is replaced. Returns False, having done nothing, where it has expired, or another version is there by
        now.
        """

    @property
    def evicted(self) -> Evictions:
        """Indexes that this object has removed for the sake of a limit."""
        return self._evicted

    def entry(self, key: IndexLookup) -> IndexEntry | None:
        """What ``list`` shows of one index. No I/O."""
        digest = self._digest(key)
        shown = (c.get(digest) for c in self._catalogs() if not c.hides(digest))
        return next((entry for entry in shown if entry is not None), None)

    def knows(self, digest: str) -> bool:
        """Whether there is an index, be it expired or no usable one. No I/O."""
        catalogs = self._catalogs()
        return any(c.held(digest) is not None or any(digest in path for path in tuple(c.problems)) for c in catalogs)

    def is_fetched(self, digest: str) -> bool:
        """Whether ``get`` waits for another store. No I/O."""
        return False

    def longest(self, ask: Ask) -> IndexEntry | None:
        """The index of a prompt's longest prefix: of hash ``page_hashes[n-1]`` and n * page_tokens tokens. No I/O."""
        self._check_open()
        firsts = [next((e for e, differs in c.matches(ask) if differs is None), None) for c in self._catalogs()]
        found = (entry for entry in firsts if entry is not None)
        return max(found, key=lambda entry: entry.identity.num_tokens, default=None)

    def near_miss(self, ask: Ask) -> str | None:
        """Why ``longest`` found nothing although a prefix of this prompt is indexed in this namespace: the first field
        that differs, with both values. None where no such index exists.
        """
        if self.longest(ask) is not None:
            return None
        return next((differs for catalog in self._catalogs() for _, differs in catalog.matches(ask)), None)

    def _catalogs(self) -> Sequence[Catalog]:
        """What look-ups ask, the nearest first: of equally long prefixes the first one's is the answer."""
        return (self.catalog,)


def digest_of(key: IndexLookup) -> str:
    """The digest of a lookup. Raises InvalidPayload for anything that is not one, paths above all."""
    digest = key.digest if isinstance(key, IndexIdentity) else key
    if not is_digest(digest):
        expected = "an IndexIdentity or its digest (64 lower-case hex digits)"
        raise InvalidPayload("index key", expected, repr(key)[:100], "take it from IndexEntry.digest")
    return digest
