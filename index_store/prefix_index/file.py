"""Indexes in a folder, one file each: atomic to write, checked when read, shared by any number of processes."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from .background import Check, Promoter
from .books import FolderBooks
from .copies import Copies, TierCounters
from .errors import IndexCorrupt, IndexNotFound, IndexStoreError, IndexUnreadable, StoreFolderError, StoreFull
from .folder import (
    PARTIAL,
    SUFFIX,
    Access,
    Signature,
    check_folder,
    closing_fd,
    exclusive,
    free_bytes,
    open_named,
    os_errors,
    remove_unlocked,
    shard_fd,
    shard_of,
    touch,
)
from .format import Entry
from .lease import LEASE, FolderLeases
from .reader import IndexFile, IndexLookup, read_entry
from .removals import Why, clean_removals, note_removal
from .retention import (
    Candidate,
    choose_victims,
    publish,
    read_retention,
    remove_orphans,
    remove_retention,
    write_retention,
)
from .store import DEFAULT, BuildLease, IndexEntry, IndexStore, Problem, Retention, digest_of
from .writer import IndexPayload, IndexWriter, PartialFile

_CLOSE_S: Final = 2.0


class FileStore(IndexStore):
    """An ``IndexStore`` in a folder (layout: ``folder.py``). Several processes may use one folder at a time.

    ``open()`` checks the folder, which must exist unless ``create``, removes partial files of dead writers and reads
    the header of every index. Look-ups then do no I/O; ``rescan()`` learns of other processes' changes. Of two writers
    of one identity the last rename wins.

    ``mode`` (a number or its octal digits) and ``group`` (a name or number) are those of folders that are made, and of
    files, without execution; by default those of the folder that is there, else the owner's alone. With ``write=False``
    a folder that cannot be written to is opened all the same: whatever writes then raises StoreFolderError.

    ``max_bytes`` bounds all index files together, those being written included; ``min_free_bytes`` is left free on the
    disk. ``put`` and ``collect`` evict for them, the least recently used first; with neither, nothing is evicted.
    Evicted indexes that are open stay readable. Recency is the files' access time, set by ``get`` and ``touch``.
    ``clock`` gives seconds since the Unix epoch. ``copies`` of hot indexes in DRAM belong to the store.
    """

    kind = "file"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        create: bool = False,
        write: bool = True,
        mode: int | str | None = None,
        group: str | int | None = None,
        partial_grace_s: float = 60.0,
        max_bytes: int | None = None,
        min_free_bytes: int = 0,
        clock: Callable[[], float] = time.time,
        copies: Copies | None = None,
    ) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._create = create
        self._write = write or create
        # Where neither is given, those of the folder that is there when the store is opened.
        self._as_found = mode is None and group is None
        self._access = Access.of(0o700 if mode is None else mode, group)
        self._leases: FolderLeases
        self._partial_grace_s = partial_grace_s
        self._clock = clock
        self.max_bytes, self.min_free_bytes = max_bytes, min_free_bytes
        self._is_limited = max_bytes is not None or min_free_bytes > 0
        self.copies = copies
        self._books = FolderBooks(self.folder, clock)
        self.catalog = self._books.catalog
        self._copier = Promoter(self._copy)

    @property
    def counters(self) -> TierCounters | None:
        """Of the copies, as of now; None without them."""
        return None if self.copies is None else self.copies.counters

    @property
    def being_written(self) -> tuple[int, int]:
        """(number, bytes) of partial files, as the last scan saw them."""
        with self._lock:
            sizes = self._books.partials
        return len(sizes), sum(sizes)

    def open(self) -> None:
        with self._lock:
            if self._is_open:
                return
            if self._as_found:
                self._access = Access.found(self.folder)
            self._leases = FolderLeases(self.folder, self._access)
            check_folder(self.folder, create=self._create, write=self._write, access=self._access)
            try:
                with os_errors(self.folder):
                    self._books.rescan(full=True)
                    if self._write:
                        self._clean(self._partial_grace_s)
                if self.copies is not None:
                    self.copies.open()
                    self._tidy_copies()
            except BaseException:
                self._books.clear()
                raise
            self._copier = Promoter(self._copy)
            self._is_open = True

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            self._books.clear()
        self._copier.close(_CLOSE_S)
        if self.copies is not None:
            self.copies.close()

    def put(self, payload: IndexPayload, *, retention: Retention | None = None) -> IndexEntry:
        self._check_open()
        writer = IndexWriter(payload)
        digest = payload.identity.digest
        with (
            os_errors(self.folder),
            shard_fd(self.folder, shard_of(digest), create=self._access) as fd,
            PartialFile(fd, mode=self._access.file_mode) as partial,
        ):
            with exclusive(self.folder):
                self._make_room(writer.nbytes, digest)
                partial.create(writer.nbytes)
            partial.write(writer)
            with self._lock:
                used = self._books.time_of_use()
            try:
                with exclusive(self.folder):
                    signature, kept = publish(
                        fd, digest, partial, retention, mode=self._access.file_mode, now=self._clock(), used=used
                    )
                os.fsync(fd)
            except OSError:
                with self._lock:
                    self._books.look_again(digest)  # either version may be there
                raise
        with self._lock:
            self._books.retained(digest, kept)
            entry = self._books.learn(digest, Entry(payload.identity, payload.info), signature)
        if self.copies is not None and self.copies.wanted(digest):
            self._copier.request(digest)
        return entry

    def get(self, key: IndexLookup) -> IndexFile:
        digest = self._digest(key)
        path = self.path_of(digest)
        fd, status = self._open_in_time(digest)
        signature = Signature.of(status)
        try:
            used = self._touch(fd, status)
            copy = None if self.copies is None else self.copies.current(digest, fd, used)
            if copy is None:
                index = IndexFile.from_fd(fd, path=path, expected=key)
            else:
                os.close(fd)
                index = copy
                index.tier = "dram"
                index.version = signature  # what it is a copy of
        except IndexUnreadable:
            raise  # what the system refuses now it may give a moment later
        except IndexStoreError as err:
            with self._lock:
                if self._is_open:
                    self._books.report(digest, signature, err.bare())
            raise
        self.served(digest, copy=copy is not None)
        return index

    def touch(self, key: IndexLookup) -> None:
        fd, status = self._open_in_time(self._digest(key))
        with closing_fd(fd):
            self._touch(fd, status)

    def served(self, digest: str, *, copy: bool) -> None:
        """A reader, of whatever process, was given an index of this folder, or its ``copy`` in DRAM."""
        if self.copies is not None and self.copies.served(digest, copy=copy):
            self._copier.request(digest)

    def contains(self, key: IndexLookup) -> bool:
        digest = self._digest(key)
        try:
            fd, _ = self._open_offered(digest)
            with closing_fd(fd):
                entry = read_entry(fd)
        except IndexStoreError:
            return False
        return entry.identity.digest == digest and not self._has_expired(digest)

    def delete(self, key: IndexLookup, *, seen: tuple[Signature, Retention] | None = None) -> bool:
        """As in the protocol; with ``seen`` (version, retention) only where the index still is as it was seen."""
        digest = self._digest(key)
        with os_errors(self.folder), exclusive(self.folder):
            try:
                if seen is not None and not self._is_as_seen(digest, *seen):
                    return False
            except FileNotFoundError:
                return False
            there = self._remove(digest, "removed", sync=True)
        if self.copies is not None:
            self.copies.drop(digest)
        return there

    def retain(self, key: IndexLookup, retention: Retention) -> IndexEntry:
        digest = self._digest(key)
        with os_errors(self.folder), exclusive(self.folder):
            with self._lock:
                self._books.look_again(digest)
                there = digest in self.catalog
            if there:
                with shard_fd(self.folder, shard_of(digest)) as fd:
                    write_retention(fd, digest, retention, mode=self._access.file_mode)
                    os.fsync(fd)
        with self._lock:
            entry = self._books.retained(digest, retention) if there else None
            unread = self._books.unread(digest)
        if entry is None:
            path = self.path_of(digest)
            raise unread or IndexNotFound("index", "a usable file", "none", "build it", path)
        return entry

    def lease(self, key: IndexLookup) -> BuildLease | None:
        return self._leases.acquire(self._digest(key))

    def _copy(self, digest: str, check: Check) -> None:
        assert self.copies is not None
        fd, status = self._open_offered(digest)
        with IndexFile.from_fd(fd, path=self.path_of(digest)) as index:
            copy = self.copies.current(digest, fd, status.st_atime_ns / 1e9)
            if copy is not None:
                copy.close()
                return
            try:
                self.copies.make(index, self.catalog.get(digest), check)
            except IndexCorrupt as err:
                if err.path == index.path:
                    self.report(index, err.bare())
                raise

    def collect(self) -> Sequence[IndexEntry]:
        """As in the protocol; also clears away what the dead left. What cannot be removed is a problem."""
        self._check_open()
        with os_errors(self.folder), exclusive(self.folder):
            with self._lock:
                self._books.rescan()
            self._clean(self._partial_grace_s, builders=True)
            with self._lock:
                self._books.rescan()
                self._books.unremovable.clear()
                expired = self.catalog.expired()
            removed = [entry for entry in expired if self._remove_unchanged(entry)]
            if self._is_limited:
                removed += self._evict(self._shortage(0, None), set())[0]
        self._tidy_copies(collect=True)
        return tuple(removed)

    def problems(self) -> Sequence[Problem]:
        self._check_open()
        with self._lock:
            found = {**self._books.unremovable, **self._books.problems}
            if self.copies is not None and self.copies.problem is not None:
                found[str(self.copies.folder)] = self.copies.problem
        return tuple(Problem(path, error) for path, error in sorted(found.items()))

    def report(self, index: IndexFile, error: IndexStoreError) -> bool:
        """As in the protocol; a copy in DRAM that alone is damaged is removed, and the index stays offered."""
        self._check_open()
        digest = index.identity.digest
        if self.copies is not None and self.copies.blame(digest, error):
            return False
        with self._lock:
            self._books.look_again(digest)
            signature = self._books.signature(digest)
            if signature is None or signature != index.version or self.catalog.is_expired(digest):
                return False
            self._books.report(digest, signature, error)
        return True

    def rescan(self, *, full: bool = False) -> None:
        """As in the protocol; a folder whose mtime stands is skipped. Raises StoreFolderError without a folder."""
        with self._lock:
            self._check_open()
            with os_errors(self.folder):
                self._books.rescan(full=full)
        self._tidy_copies(full=full)

    def _tidy_copies(self, **how: bool) -> None:
        if self.copies is not None:
            with self._lock:
                known = {digest for digest, _ in self.catalog.all_held()}
            self.copies.tidy(known, **how)

    def path_of(self, key: IndexLookup) -> Path:
        """Where the index is, or would be."""
        return Path(self._books.path_of(digest_of(key)))

    def _open_offered(self, digest: str) -> tuple[int, os.stat_result]:
        """As ``open_named``; raises what was reported about this version. What was not found is known from then on."""
        try:
            fd, status = open_named(self.folder, digest)
        except IndexUnreadable:
            raise
        except IndexStoreError as err:
            with self._lock:
                if isinstance(err, IndexNotFound):
                    self._books.forget(digest)
                elif self._is_open:
                    self._books.look_again(digest)
            raise
        with self._lock:
            reported = self._books.verdict(digest, Signature.of(status))
        if reported is not None:
            os.close(fd)
            raise reported.at(self.path_of(digest))
        return fd, status

    def _open_in_time(self, digest: str) -> tuple[int, os.stat_result]:
        """As ``_open_offered``; an index that expired is not found, and asking for it is no use of it."""
        fd, status = self._open_offered(digest)
        if self._has_expired(digest):
            os.close(fd)
            path = self._books.path_of(digest)
            raise IndexNotFound("index", "one in time", "one that expired", "build it again", path)
        return fd, status

    def _touch(self, fd: int, status: os.stat_result) -> float:
        """Writes a use down; gives its time (seconds)."""
        with self._lock:
            before = status.st_atime_ns / 1e9
            used = self._books.time_of_use(before)
        if stat.S_ISREG(status.st_mode) and used != before:
            touch(fd, used)
        return used

    def _has_expired(self, digest: str) -> bool:
        """Of an index whose file is there. What the books do not know, or know as expired, is looked up again."""
        with self._lock:
            if self._is_open and digest not in self.catalog:
                self._books.look_again(digest)
                return self.catalog.is_expired(digest)
            return False

    # ---- what leaves: call it while nobody else changes the folder (``exclusive``). Raises OSError ----

    def _remove(self, digest: str, why: Why, *, sync: bool) -> bool:
        """Removes an index and its retention, and writes that down. Returns whether there was an index."""
        there, entry = False, self.catalog.held(digest)
        with contextlib.suppress(FileNotFoundError), shard_fd(self.folder, shard_of(digest)) as fd:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(digest + SUFFIX, dir_fd=fd)
                there = True
            with contextlib.suppress(OSError):
                remove_retention(fd, digest)
            if sync:
                os.fsync(fd)
        with self._lock:
            self._books.forget(digest)
        if there and entry is not None:
            note_removal(self.folder, entry, why, mode=self._access.file_mode)
        return there

    def _make_room(self, nbytes: int, replaced: str) -> None:
        """Evicts until ``nbytes`` fit. Raises StoreFull, having evicted nothing unless some cannot be removed."""
        if not self._is_limited:
            return
        short = self._shortage(nbytes, replaced)
        if short > 0:
            # Dead writers' partials count as used: no index leaves for them.
            self._clean(0.0)
            short = self._shortage(nbytes, replaced)
        staying = {replaced}
        _, missing = self._evict(short, staying)
        if missing > 0:
            with self._lock:
                evictable = sum(entry.nbytes for digest, entry, _ in self._books.uses() if digest not in staying)
            limits = f"(max_bytes={self.max_bytes}, min_free_bytes={self.min_free_bytes})"
            found = f"{missing} bytes too few and {evictable} to evict"
            remedy = "raise max_bytes or lower min_free_bytes, free disk space, or delete what problems() lists"
            raise StoreFull("index store", f"room for {nbytes} bytes {limits}", found, remedy, self.folder)

    def _clean(self, grace_s: float, *, builders: bool = False) -> None:
        """Removes partial files whose writer is dead and that are older. Always allowed. With ``builders`` also what
        dead builders left, and sidecars without an index that are older: a young one's may be about to get its name,
        by a writer who waited in vain for the folder.
        """
        for shard in tuple(self._books.shards):
            with contextlib.suppress(OSError), shard_fd(self.folder, shard) as fd:
                remove_unlocked(fd, PARTIAL, grace_s=grace_s)
                if builders:
                    remove_unlocked(fd, LEASE, grace_s=grace_s)
                    with self._lock:
                        orphans = self._books.orphans(shard)
                    remove_orphans(fd, orphans, grace_s=grace_s)
        clean_removals(self.folder, grace_s)

    def _shortage(self, nbytes: int, replaced: str | None) -> int:
        """How many bytes must go before ``nbytes`` may come. Raises OSError.

        The index to be replaced counts as gone, but the disk has to hold both for a while.
        """
        with self._lock:
            self._books.rescan()
            old = None if replaced is None else self._books.signature(replaced)
            used = self._books.used_bytes
        gone = 0 if old is None else old.nbytes
        free = free_bytes(self.folder)
        needs = [nbytes - free, nbytes + self.min_free_bytes - free - gone]
        if self.max_bytes is not None:
            needs.append(used + nbytes - gone - self.max_bytes)
        return max(needs)

    def _evict(self, nbytes: int, staying: set[str]) -> tuple[list[IndexEntry], int]:
        """Removes who leaves first for ``nbytes`` bytes: (what was removed, bytes too few). None of ``staying``
        (digests) leaves. Who cannot be removed is added to it, and others leave instead, as long as there are enough.

        Counted by what was removed, not by what the disk has free then: evicted indexes that are open keep theirs.
        """
        removed, begun = list[IndexEntry](), time.perf_counter()
        while nbytes > 0:
            with self._lock:
                known = [*self._books.uses()]
            held = [Candidate(entry, _last_used(entry, used)) for digest, entry, used in known if digest not in staying]
            victims = choose_victims(held, nbytes, now=self._clock())
            if victims is None:
                break
            nbytes = 0
            for entry in victims:
                if self._remove_unchanged(entry):
                    removed.append(entry)
                else:
                    staying.add(entry.digest)
                    nbytes += entry.nbytes
        self._evicted = self._evicted.and_of([entry.nbytes for entry in removed], begun)
        return removed, nbytes

    def _remove_unchanged(self, entry: IndexEntry) -> bool:
        """Removes an index, if its file and its retention are those that the books know. Whether it is gone."""
        digest, path = entry.digest, self._books.path_of(entry.digest)
        with self._lock:
            known = self._books.signature(digest)
        if known is None:
            return True
        try:
            if not self._is_as_seen(digest, known, entry.retention):
                return False
            self._remove(digest, "expired" if self.catalog.is_expired(digest) else "evicted", sync=False)
        except FileNotFoundError:  # a sidecar that is left may be of a writer who is about to name its index
            with self._lock:
                self._books.forget(digest)
        except OSError as err:
            found, remedy = err.strerror or str(err), "remove it, or change the owner or mode of its folder"
            error = StoreFolderError("index that must leave", "a file to remove", found, remedy, path)
            with self._lock:
                self._books.unremovable[path] = error
            return False
        return True

    def _is_as_seen(self, digest: str, version: Signature, known: Retention) -> bool:
        """Whether file and retention on disk are these. Raises FileNotFoundError: there is no file; OSError: nobody can
        tell.
        """
        try:
            with shard_fd(self.folder, shard_of(digest)) as fd:
                if Signature.of(os.stat(digest + SUFFIX, dir_fd=fd, follow_symlinks=False)) != version:
                    return False
                kept = read_retention(fd, digest)
        except IndexUnreadable as err:
            raise OSError(errno.EIO, f"its retention cannot be read: {err.found}") from err
        except IndexStoreError:
            kept = DEFAULT
        if kept != known:
            with self._lock:
                self._books.look_again(digest)
        return kept == known


def _last_used(entry: IndexEntry, known: float) -> float:
    """As the file says now: other processes use it too."""
    try:
        return max(known, os.lstat(entry.path or "").st_atime)
    except OSError:
        return known
