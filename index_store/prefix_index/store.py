"""What every store can do, whatever it is made of: memory, a folder, later tiers, a service, another machine.

A store maps an ``IndexIdentity`` to one container (``docs/index-format.md``). ``get`` gives an open
``IndexFile`` in every implementation. All methods may be called from several threads.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from .errors import IndexStoreError, InvalidPayload
from .keys import PAGE_TOKENS, IndexIdentity, ModelFingerprint, is_digest
from .reader import IndexFile
from .writer import IndexPayload

IndexLookup: TypeAlias = str | IndexIdentity
"""An identity, or its ``digest`` (64 hex digits)."""


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


class BuildLease(Protocol):
    """The right to build one index while nobody else does. Ends with ``release()`` or with the holder's life."""

    digest: str

    def release(self) -> None:
        """Gives the right back. Twice does nothing."""
        ...

    def __enter__(self) -> BuildLease: ...

    def __exit__(self, *_: object) -> None: ...


class IndexEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One index as a listing shows it. ``nbytes`` is the whole container; times are seconds."""

    identity: IndexIdentity
    nbytes: int
    created: float
    build_seconds: float
    path: str | None = None
    retention: Retention = Retention()

    @property
    def digest(self) -> str:
        return self.identity.digest


class Problem(NamedTuple):
    """Something that cannot be used, and why. ``path`` is a file, or a digest in a store without files."""

    path: str
    error: IndexStoreError


class IndexStore(Protocol):
    """The protocol. All methods but ``open`` and ``close`` raise StoreClosed on a store that is not open."""

    def open(self) -> None:
        """Starts using the store. Opening twice does nothing. Raises StoreFolderError."""
        ...

    def close(self) -> None:
        """Ends using it. Indexes that were handed out stay usable. Closing twice does nothing."""
        ...

    def put(self, payload: IndexPayload, *, retention: Retention | None = None) -> IndexEntry:
        """Stores an index whole or not at all; an older one of the same identity is replaced.

        ``retention`` None keeps that of the index it replaces, if there is one. When it returns the index is as
        durable as the store is. Others may have been evicted to make room. Raises InvalidPayload, StoreFull,
        StoreFolderError, StoreUnavailable, and what a ``LazyArray`` raises, as it is; after an error the index of
        this identity is what it was before. One exception: where the disk fails after the new index got its name
        (retention, sync of the folder), either version may be there, whole, kept at least as long as both should be.
        """
        ...

    def get(self, key: IndexLookup) -> IndexFile:
        """Opens an index; the caller closes it. Its header is checked now, each array when it is first read.

        Raises IndexNotFound (also when another process deleted it), IndexCorrupt, IndexTooNew, IndexForeign,
        IndexUnreadable, IndexMismatch; for an index that was reported, the error of that report.
        """
        ...

    def contains(self, key: IndexLookup) -> bool:
        """Whether ``get`` would open it now. False for what is damaged, or was reported to be."""
        ...

    def delete(self, key: IndexLookup) -> bool:
        """Removes an index, damaged or not. Returns whether there was one. Open ones stay readable."""
        ...

    def retain(self, key: IndexLookup, retention: Retention) -> IndexEntry:
        """Changes how long an index should stay. Raises IndexNotFound."""
        ...

    def lease(self, key: IndexLookup) -> BuildLease | None:
        """The right to build this index, or None while somebody else holds it. Never blocks.

        Whoever gets it looks first whether the index has come meanwhile (``contains``). A store that nobody else
        can reach arbitrates within this process only.
        """
        ...

    def prefetch(self, key: IndexLookup) -> None:
        """Starts bringing an index to where ``get`` is fastest. Returns at once; what fails is no error here."""
        ...

    def collect(self) -> Sequence[IndexEntry]:
        """Removes what has expired and what exceeds the store's limits; returns what was removed."""
        ...

    def list(self) -> Sequence[IndexEntry]:
        """All usable indexes known now, ordered by digest. Bad files are in ``problems``."""
        ...

    def problems(self) -> Sequence[Problem]:
        """Everything found that is not a usable index, with the error that says why."""
        ...

    def report(self, key: IndexLookup, error: IndexStoreError) -> None:
        """Tells the store that reading an index failed after ``get``: it becomes a problem and is offered no
        more, until it is replaced. Of a digest that the store does not have: nothing happens. Where this store
        has handed out several versions, the report may be about an older one: then the one that is there is read
        whole, and hidden only if it is damaged.
        """
        ...

    def longest(
        self,
        namespace: str,
        page_hashes: Sequence[bytes],
        model: ModelFingerprint,
        profile_digest: str,
        *,
        page_tokens: int = PAGE_TOKENS,
    ) -> IndexEntry | None:
        """The index of the longest prefix of a prompt: its prefix_hash is ``page_hashes[n-1]`` and its length
        n * page_tokens. No I/O: one dict probe per page.
        """
        ...

    def near_miss(
        self,
        namespace: str,
        page_hashes: Sequence[bytes],
        model: ModelFingerprint,
        profile_digest: str,
        *,
        page_tokens: int = PAGE_TOKENS,
    ) -> str | None:
        """Why ``longest`` found nothing although this prompt's prefix is indexed in this namespace: the first
        field that differs, with both values. None where no such index exists.
        """
        ...

    def rescan(self, *, full: bool = False) -> None:
        """Learns what other processes changed. Cheap when nothing did; ``full`` reads all headers."""
        ...

    def check_integrity(self) -> None:
        """Raises StoreInconsistent, with both sides, where the store's books do not balance."""
        ...


def digest_of(key: IndexLookup) -> str:
    """The digest of a lookup. Raises InvalidPayload for anything that is not one, paths above all."""
    digest = key.digest if isinstance(key, IndexIdentity) else key
    if not is_digest(digest):
        raise InvalidPayload(
            "index key",
            "an IndexIdentity or its digest (64 lower-case hex digits)",
            repr(key)[:100],
            "take it from IndexEntry.digest",
        )
    return digest
