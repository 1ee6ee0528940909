"""The DRAM tier: a folder on tmpfs into which a store's hot indexes are copied. The page cache does the rest."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from .background import Cancelled, Check
from .errors import IndexNotFound, IndexStoreError, IndexUnreadable, StoreFolderError
from .folder import SUFFIX, os_errors, path_in, pread, touch
from .format import PRELUDE, is_digest
from .reader import IndexFile, is_damaged, open_in
from .store import IndexEntry, IndexStore, Retention

_AGAIN_S: Final = 30.0
_MARK: Final = ".copies"
"""File of a folder of copies, where what the store does not know goes. Indexes of another store must not."""

Tell: TypeAlias = Callable[[str, bool | None], None]
"""(digest, whether a copy served it, or None: it was put): what the process that makes copies learns of a use."""


class TierCounters(NamedTuple):
    """Events since the store was made; they never decrease.

    ``hits_fast``, ``hits_slow``  indexes that ``get`` served, by tier
    ``promotions``, ``promotion_failures``  copies that were made, and those that could not be
    ``stale_dropped``             copies removed because the index is another one now, or gone
    ``damaged_dropped``           copies removed because they could not be read
    """

    hits_fast: int = 0
    hits_slow: int = 0
    promotions: int = 0
    promotion_failures: int = 0
    stale_dropped: int = 0
    damaged_dropped: int = 0


class Copies:
    """Copies of a folder's indexes in another ``folder``, of the same names and bytes; the store says what is hot.

    A copy is served only where its first 64 bytes, which hold the checksums of all that follows, are those of the index
    itself at this moment. So nobody has to be told when an index is replaced, deleted or expires.

    One process makes the copies: ``keeper`` is its store of ``folder``. The others read them, and ``tell`` that process
    of each use. Errors of ``folder`` are never the store's: ``get`` is slower, that is all.
    """

    def __init__(self, folder: Path, *, keeper: IndexStore | None = None, tell: Tell | None = None) -> None:
        self.folder = folder
        self.keeper = keeper
        self.problem: IndexStoreError | None = None
        """Why the folder could not be used when it was looked at last."""
        self._tell = tell
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(TierCounters._fields, 0)
        self.not_before: dict[str, float] = {}
        """When a copy that could not be made is tried again, by the monotonic clock."""

    @property
    def counters(self) -> TierCounters:
        with self._lock:
            return TierCounters(**self._counts)

    def count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def open(self) -> None:
        """Raises StoreFolderError, also of a folder with indexes that are no copies."""
        self.not_before.clear()
        if self.keeper is None:
            return
        with os_errors(self.folder):
            marked = os.path.lexists(self.folder / _MARK)
            holds = not marked and next(self.folder.glob(f"??/*{SUFFIX}"), None) is not None
        if holds:
            raise StoreFolderError(
                "DRAM tier's folder",
                f"an empty one, or one with {_MARK}, which holds copies only",
                "indexes",
                "name another --memory-dir; if these are copies of an earlier release, remove them",
                self.folder,
            )
        self.keeper.open()

    def close(self) -> None:
        if self.keeper is not None:
            self.keeper.close()

    def current(self, digest: str, fd: int, used: float) -> IndexFile | None:
        """The copy of the index that is open as ``fd``, used at ``used`` (seconds); None where there is none."""
        try:
            with contextlib.ExitStack() as owned:
                copy = owned.enter_context(open_in(self.folder, digest))
                if pread(copy.fileno(), PRELUDE.size, 0) != pread(fd, PRELUDE.size, 0):
                    self.drop(digest, "stale_dropped")
                    return None
                touch(copy.fileno(), used)
                owned.pop_all()
                return copy
        except (IndexNotFound, IndexUnreadable):
            return None  # what the system refuses now it may give a moment later
        except IndexStoreError:
            self.drop(digest, "damaged_dropped")
            return None

    def served(self, digest: str, *, copy: bool) -> bool:
        """An index was given to a reader. Whether a copy of it is to be made here."""
        self.count("hits_fast" if copy else "hits_slow")
        if self._tell is not None:
            self._tell(digest, copy)
        return not copy and self.keeper is not None and time.monotonic() >= self.not_before.get(digest, 0.0)

    def wanted(self, digest: str) -> bool:
        """A new index wants a copy, however often making one failed before. Whether it is made here."""
        self.not_before.pop(digest, None)
        if self._tell is not None:
            self._tell(digest, None)
        return self.keeper is not None

    def make(self, index: IndexFile, entry: IndexEntry | None, check: Check) -> None:
        """Copies an open index. Raises where that fails; it is not tried again for a while then."""
        assert self.keeper is not None
        digest = index.identity.digest
        pinned = entry is not None and entry.retention.pinned
        try:
            self.keeper.put(index.payload(check), retention=Retention(pinned=pinned))
        except Cancelled:
            raise
        except Exception:
            self.not_before[digest] = time.monotonic() + _AGAIN_S
            self.count("promotion_failures")
            raise
        self.count("promotions")

    def blame(self, digest: str, error: IndexStoreError) -> bool:
        """Whether an error after ``get`` was the copy's: it names it, or no file and the copy is damaged. Drops it."""
        mine = str(path_in(self.folder, digest))
        guilty = error.path == mine or (error.path is None and is_damaged(self.folder, digest))
        if guilty:
            self.drop(digest, "damaged_dropped")
        return guilty

    def drop(self, digest: str, counter: str | None = None) -> None:
        """Removes the copy. Where even that fails it stays unserved: it is compared at each get."""
        with contextlib.suppress(OSError):
            path_in(self.folder, digest).unlink()
            if counter is not None:
                self.count(counter)

    def tidy(self, known: Collection[str], *, full: bool = False, collect: bool = False) -> None:
        """Removes damaged copies, and those of indexes that are not ``known`` (digests); ``collect``: also what dead
        makers of copies left.
        """
        if self.keeper is None:
            return
        self.problem = None
        try:
            with os_errors(self.folder):
                (self.folder / _MARK).touch(0o600)
            if collect:
                self.keeper.collect()
            self.keeper.rescan(full=full)
            for problem in self.keeper.problems():
                if (digest := digest_in(problem.path)) is not None:
                    self.drop(digest, "damaged_dropped")
            for entry in self.keeper.list():
                if (digest := digest_in(entry.path or "")) is not None and digest not in known:
                    self.drop(digest, "stale_dropped")
        except IndexStoreError as err:
            self.problem = err


def digest_in(path: str) -> str | None:
    """The digest that a path names: the path itself, or that of ``<digest>.pfxindex``."""
    digest = path.rpartition("/")[2].partition(".")[0]
    return digest if is_digest(digest) else None
