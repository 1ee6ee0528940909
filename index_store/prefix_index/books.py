"""What a store's folder holds, as the last look at it saw. ``FileStore`` locks around it. Nothing changes there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from .errors import IndexForeign, IndexNotFound, IndexStoreError, IndexUnreadable, StoreFolderError
from .folder import GONE, PARTIAL, SUFFIX, Signature, closing_fd, is_shard, open_fd, shard_fd, shard_of, status_of
from .format import Entry, ModelFingerprint, is_digest
from .reader import check_identity, read_entry
from .retention import KEEP_SUFFIX, read_retention
from .store import DEFAULT, Catalog, IndexEntry, Retention

_SETTLES_S: Final = 2.0
MAX_FOREIGN: Final = 100
"""Names of one folder that mean nothing here and are told one by one."""
_SAME_USE_S: Final = 1.0
UNKNOWN: Final = Retention(pinned=True)
"""What counts for a retention that the system does not give us: its index leaves last, and does not expire."""


@dataclass
class Held:
    """What is there of one digest, as the last scan saw it, and what is known of it. ``used_ns`` is the access time."""

    index: Signature | None = None
    keep: Signature | None = None
    used_ns: int = 0
    retention: Retention = DEFAULT
    reported: Signature | None = None
    """The version of the index's file that readers found damaged."""


class Look:
    """Whether a folder was listed since its last change, by its modification time.

    That must have stood for a while before: a second change in the same tick of the file system's clock leaves it as it
    is. A time that lies in this machine's future is watched instead.
    """

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self._since = 0.0
        self.settled = False
        """Whether the last listing holds until the folder's time changes; else the next scan lists it."""

    def is_current(self, status: os.stat_result) -> bool:
        return self.settled and self._seen == (status.st_ino, status.st_mtime_ns)

    def begin(self, status: os.stat_result) -> bool:
        """The folder is about to be listed. What ``settled`` is to be after that."""
        seen, now = (status.st_ino, status.st_mtime_ns), time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        age_s = (time.time_ns() - status.st_mtime_ns) / 1e9
        self.settled = False
        return max(age_s, now - self._since) > _SETTLES_S


@dataclass
class _Shard:
    """A shard folder: ``held`` by digest, bytes of files that are being written, names that mean nothing here."""

    held: dict[str, Held] = field(default_factory=dict)
    partials: dict[str, int] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)
    look: Look = field(default_factory=Look)


def list_shard(dir_fd: int, shard: str, known: Container[str]) -> _Shard:
    """What is in a shard folder. ``known`` are digests of its last listing. Raises OSError."""
    seen = _Shard()
    with os.scandir(dir_fd) as items:
        for item in items:
            name = item.name
            try:
                if name.startswith("."):
                    if name.startswith(PARTIAL):
                        seen.partials[name] = item.stat(follow_symlinks=False).st_size
                    continue
                digest, suffix = name[:64], name[64:]
                known_or_ours = digest in known or (is_digest(digest) and shard_of(digest) == shard)
                if suffix not in (SUFFIX, KEEP_SUFFIX) or not known_or_ours:
                    seen.foreign.append(name)
                    continue
                status = item.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            held = seen.held.setdefault(digest, Held())
            if suffix == KEEP_SUFFIX:
                held.keep = Signature.of(status)
            else:
                held.index, held.used_ns = Signature.of(status), status.st_atime_ns
    return seen


class FolderBooks:
    """The catalog of a folder (layout: ``folder.py``, ``retention.py``) and its problems, by path."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self.catalog = Catalog(clock)
        self.problems = self.catalog.problems
        self.unremovable: dict[str, IndexStoreError] = {}
        """By path: usable indexes that should have left and could not be removed."""
        self._foreign: dict[str, tuple[str, ...]] = {}
        self._root = str(folder)
        self._folder = folder
        self.shards: dict[str, _Shard] = {}
        self._root_look = Look()
        self._models: dict[ModelFingerprint, ModelFingerprint] = {}
        self._clock = clock
        self.latest_use = 0.0
        """When any index was used last (seconds), as far as this process knows."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all index files, usable or not, and of those that are being written."""
        every = (held.index for shard in self.shards.values() for held in shard.held.values())
        return sum(signature.nbytes for signature in every if signature is not None) + sum(self.partials)

    @property
    def partials(self) -> list[int]:
        """Bytes of each file that is being written, or whose writer died."""
        return [nbytes for shard in self.shards.values() for nbytes in shard.partials.values()]

    def clear(self) -> None:
        for book in (self.catalog, self.unremovable, self._foreign, self.shards, self._models):
            book.clear()
        self._root_look = Look()
        self.latest_use = 0.0

    def time_of_use(self, before: float = 0.0) -> float:
        """The time (seconds) to write down for a use now of what was last used at ``before``: the clock's.

        ``before`` itself where that is less than a second ago. Where the clock was set back behind the last use that is
        known, a second after that one: the order of uses stays what it was.
        """
        now = self._clock()
        if self.latest_use < now + _SAME_USE_S:
            used = before if abs(now - before) < _SAME_USE_S else now
        else:
            used = before if before > self.latest_use - _SAME_USE_S else self.latest_use + _SAME_USE_S
        self.latest_use = max(self.latest_use, used)
        return used

    def path_of(self, digest: str, suffix: str = SUFFIX) -> str:
        return f"{self._root}/{shard_of(digest)}/{digest}{suffix}"

    def _held(self, digest: str) -> Held | None:
        shard = self.shards.get(shard_of(digest))
        return None if shard is None else shard.held.get(digest)

    def _hold(self, digest: str) -> Held:
        return self.shards.setdefault(shard_of(digest), _Shard()).held.setdefault(digest, Held())

    def signature(self, digest: str) -> Signature | None:
        """Of the index's file, when it was last seen."""
        held = self._held(digest)
        return None if held is None else held.index

    def uses(self) -> Iterator[tuple[str, IndexEntry, float]]:
        """(digest, entry, last use that is known, in seconds: it may be more recent) of every usable index."""
        for digest, entry in self.catalog.all_held():
            yield digest, entry, self._hold(digest).used_ns / 1e9

    def orphans(self, shard: str) -> list[str]:
        """Digests of the sidecars in a shard folder beside which no index file lies."""
        return [d for d, held in self.shards[shard].held.items() if held.index is None and held.keep is not None]

    def report(self, digest: str, signature: Signature, error: IndexStoreError) -> None:
        """Hides an index for as long as its file is this version."""
        self.catalog.remove(digest)
        self.problems[self.path_of(digest)] = error
        self._hold(digest).reported = signature

    def verdict(self, digest: str, signature: Signature) -> IndexStoreError | None:
        """What was reported about this version of an index's file."""
        held = self._held(digest)
        if held is None or held.reported is None or held.reported != signature:
            return None
        return self.problems.get(self.path_of(digest))

    def learn(self, digest: str, entry: Entry, signature: Signature) -> IndexEntry:
        """Takes in an index whose header was read, or just written. The next scan looks whether it is still there."""
        held = self._hold(digest)
        listed = IndexEntry.of(entry, signature.nbytes, held.retention, self.path_of(digest))
        self._clear_problem(digest)
        self.catalog.add(digest, listed)
        held.index = signature
        self.shards[shard_of(digest)].look.settled = False
        return listed

    def _clear_problem(self, digest: str) -> None:
        path = self.path_of(digest)
        self.problems.pop(path, None)
        self.unremovable.pop(path, None)
        if (held := self._held(digest)) is not None:
            held.reported = None

    def retained(self, digest: str, retention: Retention) -> IndexEntry | None:
        """Takes in a retention that was just written. Returns the entry that has it now, if there is one."""
        self._hold(digest).keep = None  # the next scan reads what is really there
        return self._set_retention(digest, retention)

    def _set_retention(self, digest: str, retention: Retention) -> IndexEntry | None:
        self.problems.pop(self.path_of(digest, KEEP_SUFFIX), None)
        self._hold(digest).retention = retention
        entry = self.catalog.held(digest)
        if entry is not None and entry.retention != retention:
            entry = msgspec.structs.replace(entry, retention=retention)
            self.catalog.add(digest, entry)
        return entry

    def forget(self, digest: str) -> None:
        """Takes out an index whose file has gone. The next scan looks whether it is back."""
        self.catalog.remove(digest)
        self._clear_problem(digest)
        shard = self.shards.get(shard_of(digest))
        if shard is not None:
            shard.look.settled = False
            if (held := shard.held.get(digest)) is not None:
                held.index, held.used_ns = None, 0

    def rescan(self, *, full: bool = False) -> None:
        """Reads headers of files that are new; a folder whose mtime stands is skipped. Raises OSError without one."""
        status = os.stat(self._root)
        if full or not self._root_look.is_current(status):
            settled = self._root_look.begin(status)
            self._list_root()
            self._root_look.settled = settled
        for name in sorted(self.shards):
            self.scan_shard(name, full=full)

    def _list_root(self) -> None:
        names: set[str] = set()
        foreign = []
        with os.scandir(self._root) as items:
            for item in items:
                if is_shard(item.name) and item.is_dir(follow_symlinks=False):
                    names.add(item.name)
                elif not item.name.startswith("."):
                    foreign.append(item.name)
        self._tell_foreign(self._root, "a folder named by two hex digits", foreign)
        for gone in self.shards.keys() - names:
            self.problems.pop(f"{self._root}/{gone}", None)
            self._take_in(gone, -1, _Shard(), full=True)
            del self.shards[gone]
        for name in names - self.shards.keys():
            self.shards[name] = _Shard()

    def _tell_foreign(self, folder: str, expected: str, names: list[str]) -> None:
        """Problems of a folder's names that mean nothing here, in place of those told before."""
        for path in self._foreign.pop(folder, ()):
            self.problems.pop(path, None)
        told = {f"{folder}/{name}": name for name in sorted(names)[:MAX_FOREIGN]}
        if len(names) > MAX_FOREIGN:
            told[f"{folder}/*"] = f"{len(names) - MAX_FOREIGN:,} beside the {MAX_FOREIGN} listed"
        for path, found in told.items():
            error = IndexForeign("name in the store's folder", expected, found[:100], "move it elsewhere", path)
            self.problems[path] = error
        self._foreign[folder] = tuple(told)

    def look_again(self, digest: str) -> None:
        """Lists the digest's shard folder now, whatever its mtime says."""
        self.shards.setdefault(shard_of(digest), _Shard()).look.settled = False
        self.scan_shard(shard_of(digest))

    def unread(self, digest: str, suffix: str = SUFFIX) -> IndexUnreadable | None:
        """Why a file of the index is not known, where the system did not give its bytes when asked last."""
        problem = self.problems.get(self.path_of(digest, suffix))
        return problem if isinstance(problem, IndexUnreadable) else None

    def scan_shard(self, name: str, *, full: bool = False) -> None:
        """Brings one shard's part up to date. One that cannot be listed is a problem, and stays as it was known."""
        shard = self.shards.setdefault(name, _Shard())
        path = f"{self._root}/{name}"
        try:
            with shard_fd(self._folder, name) as fd:
                status = os.fstat(fd)
                if shard.look.is_current(status) and not full:
                    return
                settled = shard.look.begin(status)
                found = list_shard(fd, name, shard.held)
                self.problems.pop(path, None)
                self._take_in(name, fd, found, full=full)
        except OSError as err:
            settled = False
            if err.errno in GONE:
                self.problems.pop(path, None)
                self._take_in(name, -1, _Shard(), full=full)
            else:
                remedy = "check its permissions and the disk; until then it counts as it was"
                what, expected = "folder of indexes", "one that can be listed"
                self.problems[path] = StoreFolderError(what, expected, err.strerror or str(err), remedy, path)
        # What the system did not give is asked for again by the next scan.
        shard.look.settled = settled and not any(self.unread(d) or self.unread(d, KEEP_SUFFIX) for d in shard.held)

    def _take_in(self, name: str, dir_fd: int, found: _Shard, *, full: bool) -> None:
        shard = self.shards[name]
        shard.partials = found.partials
        folder = f"{self._root}/{name}"
        self._tell_foreign(folder, f"{name}<62 hex digits>{SUFFIX} or {KEEP_SUFFIX}", found.foreign)
        for digest in shard.held.keys() | found.held.keys():
            held, seen = self._hold(digest), found.held.get(digest, Held())
            index_is_new = full or held.index != seen.index or self.unread(digest) is not None
            keep_is_new = full or held.keep != seen.keep or self.unread(digest, KEEP_SUFFIX) is not None
            held.index, held.keep, held.used_ns = seen.index, seen.keep, seen.used_ns
            self.latest_use = max(self.latest_use, seen.used_ns / 1e9)
            if seen.keep is None:
                self._set_retention(digest, DEFAULT)
            elif keep_is_new:
                self._read_retention(dir_fd, digest)
            if seen.index is None:
                self.catalog.remove(digest)
                self._clear_problem(digest)
                if seen.keep is None:
                    del shard.held[digest]
            elif index_is_new and self.verdict(digest, seen.index) is None:
                self._read_header(dir_fd, digest)  # which says nothing about what was reported

    def _read_retention(self, dir_fd: int, digest: str) -> None:
        try:
            self._set_retention(digest, read_retention(dir_fd, digest))
        except IndexStoreError as err:
            kept, held = DEFAULT, self._hold(digest)
            if isinstance(err, IndexUnreadable):
                kept = UNKNOWN if held.retention == DEFAULT else held.retention
            self._set_retention(digest, kept)
            path = self.path_of(digest, KEEP_SUFFIX)
            self.problems[path] = err.at(path)

    def _read_header(self, dir_fd: int, digest: str) -> None:
        try:
            with closing_fd(open_fd(digest + SUFFIX, dir_fd=dir_fd, follow=False)) as fd:
                entry = read_entry(fd)
                signature = Signature.of(status_of(fd))
            check_identity(digest, entry.identity)
            # Thousands of indexes belong to a handful of models: one copy of those.
            model = self._models.setdefault(entry.identity.model, entry.identity.model)
            msgspec.structs.force_setattr(entry.identity, "model", model)
            self.learn(digest, entry, signature)
        except IndexNotFound:
            self.catalog.remove(digest)
        except IndexStoreError as err:
            self.catalog.remove(digest)
            self._clear_problem(digest)
            path = self.path_of(digest)
            self.problems[path] = err.at(path)
