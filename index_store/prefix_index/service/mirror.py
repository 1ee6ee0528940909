"""A client's copy of the service's listing: what ``longest`` and ``list`` look into."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..catalog import Catalog, inconsistent
from ..errors import IndexStoreError, StoreUnavailable
from ..eviction import has_expired
from ..store import IndexEntry, Problem
from .messages import Changes, Checked, Delta, TierEntry, unavailable


class Mirror:
    """Entries as of change ``seq`` of the service of that ``epoch``. ``lock`` guards ``catalog``.

    ``ask`` sends a Changes request and gives its answer; ``path_of`` says where a digest's index lies.
    """

    def __init__(self, ask: Callable[[Changes], Delta], path_of: Callable[[str], str], timeout_s: float) -> None:
        self.catalog = Catalog()
        self.lock = threading.Lock()
        self._ask = ask
        self._path_of = path_of
        self._timeout_s = timeout_s
        self._updating = threading.Lock()
        self._reported: dict[str, IndexStoreError] = {}
        self._hidden: dict[str, IndexEntry] = {}
        """What this client could not open. The service has the last word: what it still lists is back with the next
        update.
        """
        self._epoch, self._seq = "", 0

    def knows(self, digest: str) -> bool:
        with self.lock:
            return digest in self.catalog

    def forget(self, digest: str) -> None:
        with self.lock:
            self._hide(digest)

    def expired(self, digest: str) -> bool:
        with self.lock:
            entry = self.catalog.held(digest) or self._hidden.get(digest)
        return entry is not None and has_expired(entry.retention, time.time())

    def reported(self, digest: str, error: IndexStoreError | None) -> None:
        """Remembers what this client said of an index; None: it was replaced or deleted."""
        with self.lock:
            self._reported.pop(digest, None)
            if error is not None:
                self._hide(digest)
                self._reported[digest] = error

    def own(self, problem: Problem) -> Problem:
        """A problem that this client reported comes back as the very error, with its traceback."""
        with self.lock:
            error = self._reported.get(Path(problem.path).stem)
        return Problem(problem.path, error) if error is not None and str(error) == str(problem.error) else problem

    def entry(self, entry: TierEntry, digest: str) -> IndexEntry:
        return IndexEntry(
            identity=entry.identity,
            nbytes=entry.nbytes,
            created=entry.created,
            build_seconds=entry.build_seconds,
            path=self._path_of(digest),
            retention=entry.retention,
        )

    def update_softly(self) -> None:
        """After an acknowledged change: it stands, whether or not the mirror can show it now."""
        with contextlib.suppress(StoreUnavailable):
            self.update()

    def update(self) -> None:
        """Applies what changed; a listing that starts over is taken in whole, once its last page is there.

        Raises StoreUnavailable.
        """
        deadline = time.monotonic() + self._timeout_s
        if not self._updating.acquire(timeout=self._timeout_s):
            raise unavailable(f"none within {self._timeout_s:g} s", expected="the end of another thread's rescan")
        try:
            epoch, seq, whole = self._epoch, self._seq, False
            with self.lock:
                hidden = dict(self._hidden)
            fresh: dict[str, IndexEntry] = {}
            while True:
                delta = self._ask(Changes(epoch=epoch, since=seq))
                epoch, seq = delta.epoch, delta.seq
                if delta.reset:
                    whole, fresh = True, {}
                entries = {d: self.entry(e, d) for e in delta.entries for d in [e.identity.digest]}
                if whole:
                    for digest in delta.removed:
                        fresh.pop(digest, None)
                    fresh |= entries
                else:
                    self._apply(entries, delta.removed, epoch, seq)
                if not delta.more:
                    break
                if time.monotonic() > deadline:
                    raise unavailable(f"none within {self._timeout_s:g} s", expected="the end of the listing")
            if whole:
                with self.lock:
                    held = self._hidden.keys() | {digest for digest, _ in self.catalog.all_held()}
                    gone = [digest for digest in held if digest not in fresh]
                self._apply(fresh, gone, epoch, seq)
            self._show(hidden)
        finally:
            self._updating.release()

    def check_integrity(self, service: Checked) -> None:
        """Raises StoreInconsistent."""
        with self.lock:
            self.catalog.check_integrity()
            held = self.catalog.all_held()
            if self._seq == service.seq:
                mirror = len(held), sum(entry.nbytes for _, entry in held)
                if mirror != (service.count, service.nbytes):
                    raise inconsistent("mirror of the listing", (service.count, service.nbytes), mirror)

    def _hide(self, digest: str) -> None:
        entry = self.catalog.held(digest)
        if entry is not None:
            self.catalog.remove(digest)
            self._hidden[digest] = entry

    def _show(self, hidden: Mapping[str, IndexEntry]) -> None:
        """Of what was hidden before an update, that of which the update said nothing."""
        with self.lock:
            for digest, entry in hidden.items():
                if self._hidden.get(digest) is entry:
                    del self._hidden[digest]
                    self.catalog.add(digest, entry)

    def _apply(self, entries: dict[str, IndexEntry], removed: Sequence[str], epoch: str, seq: int) -> None:
        with self.lock:
            for digest in removed:
                self.catalog.remove(digest)
                self._hidden.pop(digest, None)
            for digest, entry in entries.items():
                self.catalog.add(digest, entry)
                self._hidden.pop(digest, None)
                self._reported.pop(digest, None)
            self._epoch, self._seq = epoch, seq
