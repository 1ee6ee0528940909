"""Indexes in a folder, one file each: atomic to write, mapped to read, shared by any number of processes."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .books import FolderBooks, renamed
from .errors import IndexNotFound, IndexStoreError, StoreClosed
from .eviction import has_expired, policy_of
from .folder import (
    SUFFIX,
    PartialFile,
    Signature,
    check_folder,
    exclusive,
    open_index,
    os_errors,
    read_ahead,
    remove_partials,
    shard_fd,
    shard_of,
    touch,
)
from .format import Entry
from .keys import PAGE_TOKENS, IndexIdentity, ModelFingerprint
from .lease import FolderLeases, remove_leases
from .reader import IndexFile, read_entry
from .retention import publish, remove_orphans, remove_retention, write_retention
from .room import FolderLimits
from .store import BuildLease, IndexEntry, IndexLookup, Problem, Retention, digest_of
from .writer import IndexPayload, IndexWriter


class FileStore:
    """An ``IndexStore`` in a folder (layout: ``folder.py``). Several processes may use one folder at a time.

    ``open()`` checks the folder, which must exist unless ``create``, removes partial files of dead writers
    and reads the header of every index. Look-ups then do no I/O; ``rescan()`` learns of other processes'
    changes. Files are made with ``file_mode``: an index may hold keys and values of a prompt, so by default
    they are the owner's alone. Two writers of one identity: the last rename wins, both files are valid.

    ``max_bytes`` bounds all index files together, those being written included (an index that is replaced counts as
    gone, but stays until the new one is whole); ``min_free_bytes`` is left free on the disk. ``put`` and
    ``collect`` evict for them in the order of ``eviction`` (``lru`` or ``cost_aware``, ``eviction.py``); with
    neither, nothing is ever evicted. Evicted indexes that are open stay readable, and keep their disk space, until
    they are closed. Recency is the files' access time, set by ``get``. ``clock`` gives seconds since the Unix epoch.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        create: bool = False,
        file_mode: int = 0o600,
        partial_grace_s: float = 60.0,
        max_bytes: int | None = None,
        min_free_bytes: int = 0,
        eviction: str = "lru",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = Path(folder)
        self._create = create
        self._file_mode = file_mode
        self._partial_grace_s = partial_grace_s
        self._clock = clock
        self._limits = FolderLimits(max_bytes, min_free_bytes, policy_of(eviction), clock)
        self._lock = threading.RLock()
        self._books = FolderBooks(self.folder, clock)
        self._leases = FolderLeases(self.folder, file_mode=file_mode)
        self._prefetches: ThreadPoolExecutor | None = None
        self._is_open = False

    @property
    def used_bytes(self) -> int:
        """Bytes of all index files and of those being written, as the last scan saw them."""
        with self._lock:
            return self._books.used_bytes

    def open(self) -> None:
        with self._lock:
            if self._is_open:
                return
            check_folder(self.folder, create=self._create)
            self._is_open = True
            self.rescan(full=True)
            self.clean_partials()

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            self._books.clear()
            if self._prefetches is not None:
                self._prefetches.shutdown(wait=False, cancel_futures=True)
                self._prefetches = None

    def __enter__(self) -> FileStore:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, payload: IndexPayload, *, retention: Retention | None = None) -> IndexEntry:
        self._check_open()
        writer = IndexWriter.of(payload)
        digest = payload.identity.digest
        with (
            os_errors(self.folder),
            shard_fd(self.folder, shard_of(digest), create=True) as fd,
            PartialFile(fd, writer, mode=self._file_mode) as partial,
        ):
            with exclusive(self.folder):
                self._make_room(writer.nbytes, digest)
                partial.reserve()
            partial.write(payload)
            with self._lock:
                used = self._books.time_of_use()
            with exclusive(self.folder):
                signature, kept = publish(
                    fd, digest, partial, retention, mode=self._file_mode, now=self._clock(), used=used
                )
            os.fsync(fd)
        with self._lock:
            self._books.retained(digest, kept)
            return self._books.learn(digest, Entry(payload.identity, payload.info), signature)

    def get(self, key: IndexLookup) -> IndexFile:
        digest = digest_of(key)
        self._check_open()
        path = self.path_of(digest)
        try:
            fd = self._open_file(digest)
            self._touch(fd)
            index = IndexFile.from_fd(fd, path=path, expected=key if isinstance(key, IndexIdentity) else None)
            if index.identity.digest != digest:
                index.close()
                raise renamed(digest, index.identity).at(path)
        except IndexNotFound:
            with self._lock:
                self._books.forget(digest)
            raise
        except IndexStoreError as err:
            self.report(digest, err)
            raise
        if self._has_expired(digest):
            index.close()
            remedy = "build it again"
            raise IndexNotFound("index", expected="one in time", found="one that expired", remedy=remedy, path=path)
        return index

    def contains(self, key: IndexLookup) -> bool:
        digest = digest_of(key)
        self._check_open()
        try:
            fd = self._open_file(digest)
            try:
                return read_entry(fd)[0].identity.digest == digest and not self._has_expired(digest)
            finally:
                os.close(fd)
        except IndexStoreError:
            return False

    def delete(self, key: IndexLookup) -> bool:
        digest = digest_of(key)
        self._check_open()
        with os_errors(self.folder), exclusive(self.folder):
            return self._remove(digest, sync=True)

    def retain(self, key: IndexLookup, retention: Retention) -> IndexEntry:
        digest = digest_of(key)
        self._check_open()
        with os_errors(self.folder), exclusive(self.folder):
            with self._lock:
                self._books.look_again(digest)
                there = digest in self._books.catalog
            if there:
                with shard_fd(self.folder, shard_of(digest)) as fd:
                    write_retention(fd, digest, retention, mode=self._file_mode)
                    os.fsync(fd)
        with self._lock:
            entry = self._books.retained(digest, retention) if there else None
        if entry is None:
            path = self.path_of(digest)
            raise IndexNotFound("index", expected="a usable file", found="none", remedy="build it", path=path)
        return entry

    def lease(self, key: IndexLookup) -> BuildLease | None:
        digest = digest_of(key)
        self._check_open()
        return self._leases.acquire(digest)

    def prefetch(self, key: IndexLookup) -> None:
        """Asks the kernel, from a thread of its own, to read the file into the page cache."""
        digest = digest_of(key)
        with self._lock:
            self._check_open()
            if self._prefetches is None:
                self._prefetches = ThreadPoolExecutor(1, thread_name_prefix="prefix_index-prefetch")
            self._prefetches.submit(self._read_ahead, digest)

    def _read_ahead(self, digest: str) -> None:
        with contextlib.suppress(IndexStoreError, OSError):
            fd = self._open_file(digest)
            try:
                read_ahead(fd)
            finally:
                os.close(fd)

    def collect(self) -> Sequence[IndexEntry]:
        """As in the protocol; also clears away what dead writers, builders and deleters left."""
        with os_errors(self.folder), exclusive(self.folder) as alone:
            self.rescan()
            self._clean_leftovers(alone=alone)
            self.rescan()
            with self._lock:
                now = self._clock()
                expired = [e for _, e in self._books.catalog.all_held() if has_expired(e.retention, now)]
            removed = [entry for entry in expired if self._remove_unchanged(entry)]
            if self._limits.any:
                with self._lock:
                    victims = self._limits.victims(self._books, self.folder, 0, None)
                removed += [entry for entry in victims or () if self._remove_unchanged(entry)]
        return tuple(removed)

    def list(self) -> Sequence[IndexEntry]:
        with self._lock:
            self._check_open()
            return self._books.catalog.entries()

    def problems(self) -> Sequence[Problem]:
        with self._lock:
            self._check_open()
            return tuple(Problem(path, error) for path, error in sorted(self._books.problems.items()))

    def report(self, key: IndexLookup, error: IndexStoreError) -> None:
        digest = digest_of(key)
        with self._lock:
            self._check_open()
            self._books.catalog.remove(digest)
            self._books.problems[self._books.path_of(digest)] = error

    def longest(
        self,
        namespace: str,
        page_hashes: Sequence[bytes],
        model: ModelFingerprint,
        profile_digest: str,
        *,
        page_tokens: int = PAGE_TOKENS,
    ) -> IndexEntry | None:
        with self._lock:
            self._check_open()
            return self._books.catalog.longest(namespace, page_hashes, model, profile_digest, page_tokens)

    def near_miss(
        self,
        namespace: str,
        page_hashes: Sequence[bytes],
        model: ModelFingerprint,
        profile_digest: str,
        *,
        page_tokens: int = PAGE_TOKENS,
    ) -> str | None:
        with self._lock:
            self._check_open()
            return self._books.catalog.near_miss(namespace, page_hashes, model, profile_digest, page_tokens)

    def rescan(self, *, full: bool = False) -> None:
        """Reads the headers of files that are new since the last scan; a folder whose mtime stands is
        skipped.

        Raises StoreFolderError when the store's folder has gone.
        """
        with self._lock:
            self._check_open()
            with os_errors(self.folder):
                self._books.rescan(full=full)

    def check_integrity(self) -> None:
        """As in the protocol: books against files. Meaningful while no other process changes the folder."""
        with self._lock:
            self.rescan()
            self._books.check_integrity()

    def clean_partials(self, *, grace_s: float | None = None) -> int:
        """Removes partial files whose writer is dead and that are older than the grace. Returns how many."""
        with self._lock:
            self._check_open()
            shards = self._books.shards
        removed = 0
        for shard in shards:
            with contextlib.suppress(OSError), shard_fd(self.folder, shard) as fd:
                removed += remove_partials(fd, grace_s=self._partial_grace_s if grace_s is None else grace_s)
        return removed

    def path_of(self, key: IndexLookup) -> Path:
        """Where the index is, or would be."""
        return Path(self._books.path_of(digest_of(key)))

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreClosed("file store", expected="open", found="closed", remedy="call open() first")

    def _open_file(self, digest: str) -> int:
        path = self.path_of(digest)
        try:
            with shard_fd(self.folder, shard_of(digest)) as fd:
                return open_index(path.name, fd)
        except IndexStoreError as err:
            raise err.at(path) from None
        except OSError as err:
            found = err.strerror or str(err)
            raise IndexNotFound("index", expected="a file", found=found, remedy="build it", path=path) from None

    def _touch(self, fd: int) -> None:
        status = os.fstat(fd)
        with self._lock:
            before = status.st_atime_ns / 1e9
            used = self._books.time_of_use(before)
        if stat.S_ISREG(status.st_mode) and used != before:
            touch(fd, used)

    def _has_expired(self, digest: str) -> bool:
        """Of an index whose file is there. What the books do not know, or know as expired, is looked up again."""
        with self._lock:
            if self._is_open and digest not in self._books.catalog:
                self._books.look_again(digest)
                return self._books.catalog.held(digest) is not None and digest not in self._books.catalog
            return False

    def _remove(self, digest: str, *, sync: bool) -> bool:
        """Removes an index and its retention. Returns whether there was an index. Raises OSError."""
        try:
            with shard_fd(self.folder, shard_of(digest)) as fd:
                try:
                    os.unlink(digest + SUFFIX, dir_fd=fd)
                    there = True
                except FileNotFoundError:
                    there = False
                with contextlib.suppress(OSError):
                    remove_retention(fd, digest)
                if sync:
                    os.fsync(fd)
        except FileNotFoundError:
            there = False
        with self._lock:
            self._books.forget(digest)
        return there

    def _remove_unchanged(self, entry: IndexEntry) -> bool:
        """Removes what the books know, but not what has replaced it meanwhile."""
        digest = entry.digest
        with self._lock:
            known = self._books.signature(digest)
        try:
            if known is None or Signature.of(os.lstat(self.path_of(digest))) != known:
                return False
            return self._remove(digest, sync=False)
        except OSError:
            return False

    def _make_room(self, nbytes: int, replaced: str) -> None:
        """Evicts until ``nbytes`` fit within the limits. Raises StoreFull, having evicted nothing."""
        if not self._limits.any:
            return
        self.rescan()
        with self._lock:
            short = self._limits.shortage(self._books, self.folder, nbytes, replaced)
        if short > 0:
            # Dead writers' partials count as used: no index leaves for them.
            self.clean_partials(grace_s=0.0)
            self.rescan()
        with self._lock:
            victims = self._limits.victims(self._books, self.folder, nbytes, replaced)
            if victims is None:
                raise self._limits.full(self._books, self.folder, nbytes, replaced)
        for entry in victims:
            self._remove_unchanged(entry)

    def _clean_leftovers(self, *, alone: bool) -> None:
        self.clean_partials()
        for shard in self._books.shards:
            with contextlib.suppress(OSError), shard_fd(self.folder, shard) as fd:
                remove_leases(fd, grace_s=self._partial_grace_s)
                with self._lock:
                    keeps, indexes = self._books.keeps(shard), self._books.indexes(shard)
                # Alone, nobody is between writing a retention and naming its index.
                remove_orphans(fd, keeps, indexes, grace_s=0.0 if alone else self._partial_grace_s)
