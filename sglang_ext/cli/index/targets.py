"""The store that a command works on, and the indexes that its arguments name."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from prefix_index import FileStore, IndexEntry, IndexFile, IndexStore, IndexStoreError, Retention, canonical_digest
from prefix_index.connect import open_store
from prefix_index.copies import digest_in
from prefix_index.folder import Signature
from prefix_index.reader import open_in
from sglang_ext.cli.index.text import SHORT, TAG, retention, size, span, table, width
from sglang_ext.storage import ENV_STORE, LEAST_DIGITS, default_store, is_meant


class UnknownIndex(Exception):  # noqa: N818 (as in prefix_index: a name says what is the matter)
    """An argument names no index, or several."""


class Target(NamedTuple):
    """An index that was named: usable (`entry`), or damaged (`error`, and what the store calls the place: `path`). One
    that was chosen by what it is has that with it: `seen`, its file's version and its retention.
    """

    digest: str
    entry: IndexEntry | None
    error: IndexStoreError | None
    path: str | None = None
    seen: tuple[Signature, Retention] | None = None


def store_address(args: argparse.Namespace) -> str:
    """--store, even an empty one; else the environment's store, else the default folder."""
    return args.store if args.store is not None else os.environ.get(ENV_STORE) or default_store()


def opened(args: argparse.Namespace, *, create: bool = False) -> FileStore:
    """The store of a command, opened by `with`; for what only reads, another user's folder will do."""
    store = open_store(store_address(args), create=create, write=create)
    assert isinstance(store, FileStore), "a folder's, or the client of a service, which sees the folder"
    return store


def open_unused(entry: IndexEntry) -> IndexFile:
    """Opens the durable copy of a folder's index, without this counting as a use. The caller closes it. Raises as
    `IndexStore.get`, which would keep a stale index from leaving, and may answer from a faster tier.
    """
    assert entry.path is not None, "a folder's, or a service's"
    return open_in(Path(entry.path).parent.parent, entry.digest, entry.identity)


def length(path: str | os.PathLike[str]) -> int:
    """Bytes of a file; 0 where there is none to ask."""
    with suppress(OSError):
        return os.lstat(path).st_size
    return 0


def find(store: IndexStore, words: Sequence[str], *, several: bool = False, least: int = LEAST_DIGITS) -> list[Target]:
    """The indexes that names, digests, or beginnings of digests of at least so many digits name; each once.

    Raises:
        UnknownIndex: a word names none, or, unless it may name `several`, more than one.
    """
    known = {entry.digest: Target(entry.digest, entry, None) for entry in store.list()}
    for path, error in store.problems():
        digest = digest_in(path)
        if digest is not None and digest not in known:
            known[digest] = Target(digest, None, error, path)
    found: dict[str, Target] = {}
    for word in words:
        fits = sorted(
            digest
            for digest, target in known.items()
            if is_meant(word, digest, None if target.entry is None else target.entry.retention.name, least)
        )
        if not fits:
            raise UnknownIndex(
                f"expected the name of an index, its digest, or {least} or more digits of its beginning, found "
                f"{word[:80]!r}, which fits none; `sglang-ext index ls` lists them"
            )
        if len(fits) > 1 and not several:
            is_start = fits[0].startswith(word.lower())
            some = ", ".join(digest[: max(SHORT, len(word) + 4 if is_start else 0)] for digest in fits[:4])
            raise UnknownIndex(
                f"expected one index that {word[:80]!r} fits, found {len(fits)} of them "
                f"({some}{', ...' if len(fits) > 4 else ''}); give more digits"
            )
        found.update({digest: known[digest] for digest in fits})
    return list(found.values())


HEADER = ("INDEX", "TOKENS", "SIZE", "AGE", "BUILD", "MODEL", "PROFILE", "KEPT")
RIGHT = (1, 2, 3, 4)


def row(entry: IndexEntry, now: float) -> tuple[str, ...]:
    """One index in a table: 80 columns at most."""
    return (
        entry.digest[:SHORT],
        str(entry.identity.num_tokens),
        size(entry.nbytes),
        span(now - entry.created),
        span(entry.build_seconds),
        canonical_digest(entry.identity.model)[:TAG],
        entry.identity.profile_digest[:TAG],
        retention(entry.retention.pinned, entry.retention.expires, now),
    )


def listing(entries: Sequence[IndexEntry], now: float) -> Iterator[str]:
    """Lines of a table of indexes. Where one has a name, names are the last column, cut to the terminal."""
    rows = [row(entry, now) for entry in entries]
    names = [entry.retention.name or "-" for entry in entries]
    if all(entry.retention.name is None for entry in entries):
        return table(HEADER, rows, RIGHT)
    room = max(4, width() - 2 - max(map(len, table(HEADER, rows, RIGHT))))
    cut = [name if len(name) <= room else f"{name[: room - 2]}.." for name in names]
    return table((*HEADER, "NAME"), [(*cells, name) for cells, name in zip(rows, cut, strict=True)], RIGHT)


def fields(entry: IndexEntry) -> dict[str, object]:
    """One index in JSON. The keys are documented (docs/operating.md) and stay."""
    identity = entry.identity
    return {
        "digest": entry.digest,
        "name": entry.retention.name,
        "num_tokens": identity.num_tokens,
        "nbytes": entry.nbytes,
        "created": entry.created,
        "build_seconds": entry.build_seconds,
        "namespace": identity.namespace,
        "model": canonical_digest(identity.model),
        "profile": identity.profile_digest,
        "pinned": entry.retention.pinned,
        "expires": entry.retention.expires,
        "path": entry.path,
    }
