"""Indexes in a folder, one file each: atomic to write, mapped to read, shared by any number of processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .catalog import Catalog, inconsistent
from .errors import IndexForeign, IndexMismatch, IndexNotFound, IndexStoreError, StoreClosed
from .folder import (
    SUFFIX,
    Signature,
    check_folder,
    is_shard,
    os_errors,
    remove_partials,
    replace_file,
    shard_fd,
    shard_of,
)
from .format import Entry
from .keys import PAGE_TOKENS, IndexIdentity, ModelFingerprint, is_digest
from .reader import IndexFile, open_fd, read_entry
from .store import IndexEntry, IndexLookup, Problem, digest_of
from .writer import IndexPayload, IndexWriter

_MTIME_SETTLES_NS: Final = 2_000_000_000


@dataclass
class _Shard:
    """What the last scan saw. ``mtime_ns`` is None while a change in the same clock tick could go unseen."""

    mtime_ns: int | None = None
    files: dict[str, Signature] = field(default_factory=dict)


class FileStore:
    """An ``IndexStore`` in a folder (layout: ``folder.py``). Several processes may use one folder at a time.

    ``open()`` checks the folder, which must exist unless ``create``, removes partial files of dead writers
    and reads the header of every index. Look-ups then do no I/O; ``rescan()`` learns of other processes'
    changes. Files are made with ``file_mode``: an index may hold keys and values of a prompt, so by default
    they are the owner's alone. Two writers of one identity: the last rename wins, both files are valid.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        create: bool = False,
        file_mode: int = 0o600,
        partial_grace_s: float = 60.0,
    ) -> None:
        self.folder = Path(folder)
        self._create = create
        self._file_mode = file_mode
        self._partial_grace_s = partial_grace_s
        self._lock = threading.RLock()
        self._catalog = Catalog()
        self._shards: dict[str, _Shard] = {}
        self._problems: dict[str, IndexStoreError] = {}
        self._is_open = False

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
            self._catalog.clear()
            self._shards.clear()
            self._problems.clear()

    def __enter__(self) -> FileStore:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, payload: IndexPayload) -> IndexEntry:
        self._check_open()
        writer = IndexWriter.of(payload)
        digest = payload.identity.digest
        with os_errors(self.folder), shard_fd(self.folder, shard_of(digest), create=True) as fd:
            signature = replace_file(fd, digest + SUFFIX, writer, payload, mode=self._file_mode)
        with self._lock:
            return self._learn(digest, Entry(payload.identity, payload.info), signature)

    def get(self, key: IndexLookup) -> IndexFile:
        digest = digest_of(key)
        self._check_open()
        path = self.path_of(digest)
        try:
            index = IndexFile.from_fd(
                self._open_file(digest), path=path, expected=key if isinstance(key, IndexIdentity) else None
            )
            if index.identity.digest != digest:
                index.close()
                raise _renamed(digest, index.identity).at(path)
        except IndexNotFound:
            with self._lock:
                self._forget(digest)
            raise
        except IndexStoreError as err:
            self.report(digest, err)
            raise
        if digest not in self._catalog:
            self._look_again(digest)
        return index

    def contains(self, key: IndexLookup) -> bool:
        digest = digest_of(key)
        self._check_open()
        try:
            fd = self._open_file(digest)
            try:
                return read_entry(fd)[0].identity.digest == digest
            finally:
                os.close(fd)
        except IndexStoreError:
            return False

    def delete(self, key: IndexLookup) -> bool:
        digest = digest_of(key)
        self._check_open()
        with self._lock:
            self._forget(digest)
            with os_errors(self.folder):
                try:
                    with shard_fd(self.folder, shard_of(digest)) as fd:
                        os.unlink(digest + SUFFIX, dir_fd=fd)
                        os.fsync(fd)
                except FileNotFoundError:
                    return False
            return True

    def list(self) -> Sequence[IndexEntry]:
        with self._lock:
            self._check_open()
            return self._catalog.entries()

    def problems(self) -> Sequence[Problem]:
        with self._lock:
            self._check_open()
            return tuple(Problem(path, error) for path, error in sorted(self._problems.items()))

    def report(self, key: IndexLookup, error: IndexStoreError) -> None:
        digest = digest_of(key)
        with self._lock:
            self._check_open()
            self._catalog.remove(digest)
            self._problems[str(self.path_of(digest))] = error

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
            return self._catalog.longest(namespace, page_hashes, model, profile_digest, page_tokens)

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
            return self._catalog.near_miss(namespace, page_hashes, model, profile_digest, page_tokens)

    def rescan(self, *, full: bool = False) -> None:
        """Reads the headers of files that are new since the last scan; a folder whose mtime stands is
        skipped.

        Raises StoreFolderError when the store's folder has gone.
        """
        with self._lock:
            self._check_open()
            with os_errors(self.folder), os.scandir(self.folder) as items:
                found = {item.name: item.is_dir(follow_symlinks=False) for item in items}
            names = {name for name, is_folder in found.items() if is_shard(name) and is_folder}
            for path in [p for p in self._problems if Path(p).parent == self.folder]:
                del self._problems[path]
            for name in found:
                if name not in names and not name.startswith("."):
                    path = str(self.folder / name)
                    self._problems[path] = _foreign("a folder named by two hex digits", name).at(path)
            for gone in self._shards.keys() - names:
                self._scan_shard(gone, full=True)
                del self._shards[gone]
            for name in sorted(names):
                self._scan_shard(name, full=full)

    def check_integrity(self) -> None:
        """As in the protocol: books against files. Meaningful while no other process changes the folder."""
        with self._lock:
            self._check_open()
            self.rescan()
            self._catalog.check_integrity()
            on_disk = {
                str(path): path.lstat().st_size
                for path in self.folder.glob(f"[0-9a-f][0-9a-f]/*{SUFFIX}")
                if str(path) not in self._problems and not path.name.startswith(".")
            }
            listed = {str(self.path_of(e.digest)): e.nbytes for e in self._catalog.entries()}
            if listed != on_disk:
                raise inconsistent("files", on_disk, listed)

    def clean_partials(self) -> int:
        """Removes partial files whose writer is dead and that are older than the grace. Returns how many."""
        with self._lock:
            self._check_open()
            removed = 0
            for shard in tuple(self._shards):
                try:
                    with shard_fd(self.folder, shard) as fd:
                        removed += remove_partials(fd, grace_s=self._partial_grace_s)
                except OSError:
                    continue
            return removed

    def path_of(self, key: IndexLookup) -> Path:
        """Where the index is, or would be."""
        digest = digest_of(key)
        return self.folder / shard_of(digest) / (digest + SUFFIX)

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreClosed("file store", expected="open", found="closed", remedy="call open() first")

    def _open_file(self, digest: str) -> int:
        path = self.path_of(digest)
        try:
            with shard_fd(self.folder, shard_of(digest)) as fd:
                return open_fd(path.name, dir_fd=fd, follow=False)
        except IndexStoreError as err:
            raise err.at(path) from None
        except OSError as err:
            found = err.strerror or str(err)
            raise IndexNotFound("index", expected="a file", found=found, remedy="build it", path=path) from None

    def _learn(self, digest: str, entry: Entry, signature: Signature) -> IndexEntry:
        path = self.path_of(digest)
        listed = IndexEntry(
            identity=entry.identity,
            nbytes=signature.nbytes,
            created=entry.info.created,
            build_seconds=entry.info.build_seconds,
            path=str(path),
        )
        self._problems.pop(str(path), None)
        self._catalog.add(digest, listed)
        self._shards.setdefault(shard_of(digest), _Shard()).files[path.name] = signature
        return listed

    def _forget(self, digest: str) -> None:
        path = self.path_of(digest)
        self._catalog.remove(digest)
        self._problems.pop(str(path), None)
        shard = self._shards.get(shard_of(digest))
        if shard is not None:
            shard.files.pop(path.name, None)

    def _look_again(self, digest: str) -> None:
        with self._lock:
            if self._is_open:
                self._shards.setdefault(shard_of(digest), _Shard()).mtime_ns = None
                self._scan_shard(shard_of(digest), full=False)

    def _scan_shard(self, name: str, *, full: bool) -> None:
        known = self._shards.setdefault(name, _Shard())
        try:
            with shard_fd(self.folder, name) as fd:
                mtime_ns = os.fstat(fd).st_mtime_ns
                if mtime_ns == known.mtime_ns and not full:
                    return
                age_ns = time.time_ns() - mtime_ns
                found = _signatures(fd)
                self._take_in(name, fd, found, full=full)
        except OSError:
            found, mtime_ns, age_ns = {}, 0, 0
            self._take_in(name, -1, found, full=full)
        known.files = found
        known.mtime_ns = mtime_ns if age_ns > _MTIME_SETTLES_NS else None

    def _take_in(self, shard: str, dir_fd: int, found: dict[str, Signature], *, full: bool) -> None:
        known = self._shards[shard].files
        for name in known.keys() - found.keys():
            self._problems.pop(str(self.folder / shard / name), None)
            self._catalog.remove(name.removesuffix(SUFFIX))
        for name, signature in found.items():
            if full or known.get(name) != signature:
                self._read_header(shard, dir_fd, name, signature)

    def _read_header(self, shard: str, dir_fd: int, name: str, signature: Signature) -> None:
        path = self.folder / shard / name
        digest = name.removesuffix(SUFFIX)
        try:
            if digest == name or not is_digest(digest) or shard_of(digest) != shard:
                raise _foreign(f"{shard}<62 hex digits>{SUFFIX}", name)
            fd = open_fd(name, dir_fd=dir_fd, follow=False)
            try:
                entry, _ = read_entry(fd)
                signature = Signature.of(os.fstat(fd))
            finally:
                os.close(fd)
            if entry.identity.digest != digest:
                raise _renamed(digest, entry.identity)
            self._learn(digest, entry, signature)
        except IndexNotFound:
            self._catalog.remove(digest)
        except IndexStoreError as err:
            self._catalog.remove(digest)
            self._problems[str(path)] = err.at(path)


def _signatures(dir_fd: int) -> dict[str, Signature]:
    found = {}
    with os.scandir(dir_fd) as items:
        for item in items:
            if not item.name.startswith("."):
                try:
                    found[item.name] = Signature.of(item.stat(follow_symlinks=False))
                except FileNotFoundError:
                    continue
    return found


def _foreign(expected: str, found: str) -> IndexForeign:
    return IndexForeign("name in the store's folder", expected=expected, found=found[:100], remedy="move it elsewhere")


def _renamed(digest: str, found: IndexIdentity) -> IndexMismatch:
    remedy = "delete the file: it was renamed or misplaced"
    return IndexMismatch("identity digest", expected=digest, found=found.digest, remedy=remedy)
