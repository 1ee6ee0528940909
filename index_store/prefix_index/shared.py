"""A local store that is the truth of this machine, and a remote one that many machines share and that may lose."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from .copies import digest_in, entry_of
from .errors import IndexNotFound, IndexStoreError, IndexUnreadable, StoreClosed, StoreUnavailable
from .exchange import DAMAGE, Exchange, SharedCounters
from .keys import PAGE_TOKENS, ModelFingerprint
from .outbox import Change, ChangeKind
from .reader import IndexFile
from .store import BuildLease, IndexEntry, IndexLookup, IndexStore, Problem, Retention, digest_of
from .waits import Wait, check_seconds, wait_of
from .writer import IndexPayload

_CLOSE_S: Final = 5.0
_MISSES: Final = (IndexNotFound, *DAMAGE, IndexUnreadable, StoreUnavailable)
_NO_ENTRIES: Sequence[IndexEntry] = ()
_NO_PROBLEMS: Sequence[Problem] = ()


class SharedStore:
    """An ``IndexStore`` of two. Owns both: ``open()`` and ``close()`` are theirs too. ``local`` may be shared itself.

    *Local is the truth.* What it holds is what is served, and nothing that remote does, lacks or loses removes or
    replaces any of it. Its errors are the answer, in ``put`` above all; its eviction stays local. Remote is a source
    of what local lacks: empty, wiped, exchanged, damaged or away, it makes for misses only, and ``open()`` succeeds
    without it (``problems()`` says so, ``rescan()`` looks for it again).

    *Writing.* ``put`` ends when local has the index. Remote is then told in the background (``publish``; retention
    and deletion always), from local's bytes, and again after a failure, at the next ``put`` or ``rescan`` once a
    pause (1 to 60 s) is over. ``flush`` waits for that. Until remote knows, what it offers of that index is hidden
    here. What is not published when the process ends stays local: put it again, or carry it there.
    ``delete`` waits up to ``timeout_s`` for remote; where remote is away until this process ends, and where another
    machine still holds and publishes the index, it may come back from there.

    *Reading.* Look-ups are those of both catalogs, without I/O. An index that local lacks, or has damaged, is
    fetched into local: ``wait`` as for ``TieredStore``, where ``best_effort`` downloads twice. Where local has no
    room it is served from remote. While remote does not answer it is asked again after 1 to 30 s only, and look-ups
    prefer what local has, be it shorter.

    A build lease is local's and, where remote answers, remote's. ``rescan`` lists remote at most every ``rescan_s``
    seconds, or with ``full``. ``close()`` gives remote up to ``timeout_s`` to take what is under way.
    """

    def __init__(
        self,
        local: IndexStore,
        remote: IndexStore,
        *,
        wait: Wait | str = Wait.TIMEOUT,
        timeout_s: float = 5.0,
        publish: bool = True,
        rescan_s: float = 2.0,
    ) -> None:
        self._wait = wait_of(wait)
        check_seconds("timeout_s", timeout_s)
        check_seconds("rescan_s", rescan_s)
        self.local = local
        self.remote = remote
        self._timeout_s, self._publish, self._rescan_s = timeout_s, publish, rescan_s
        self._lock = threading.Lock()
        self._exchange = Exchange(local, remote)
        self._lifetime = threading.Lock()
        self._next_rescan = 0.0
        self._is_open = False

    @property
    def counters(self) -> SharedCounters:
        """What happened so far, as of now."""
        return self._exchange.counters

    def open(self) -> None:
        with self._lifetime:
            if self._is_open:
                return
            self.local.open()
            try:
                self._exchange.open()
            except BaseException:
                self.local.close()
                raise
            self._next_rescan = time.monotonic() + self._rescan_s
            self._is_open = True

    def close(self) -> None:
        with self._lifetime:
            if self._is_open:
                self._exchange.outbox.flush(self._timeout_s)
            self._is_open = False
            self._exchange.close(_CLOSE_S)
            self.local.close()

    def __enter__(self) -> SharedStore:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def flush(self, timeout_s: float) -> bool:
        """Waits up to ``timeout_s`` seconds until remote knows all changes made here, or cannot be told now. Returns
        whether it does.
        """
        self._check_open()
        return self._exchange.outbox.flush(timeout_s)

    def put(self, payload: IndexPayload, *, retention: Retention | None = None) -> IndexEntry:
        self._check_open()
        digest = payload.identity.digest
        if retention is None and digest not in self._exchange.outbox and entry_of(self.local.list(), digest) is None:
            replaced = self._exchange.offered(digest)
            retention = None if replaced is None else replaced.retention
        with self._exchange.changing(digest):
            entry = self.local.put(payload, retention=retention)
            if self._publish:
                self._exchange.outbox.post(Change(digest, ChangeKind.PUBLISH, entry.retention))
        return entry

    def get(self, key: IndexLookup) -> IndexFile:
        digest = digest_of(key)
        self._check_open()
        try:
            index = self.local.get(key)
        except _MISSES as missing:
            index = self._get_remote(key, digest, missing)
            self._exchange.count("hits_remote")
        else:
            self._exchange.count("hits_local")
        return index

    def contains(self, key: IndexLookup) -> bool:
        digest = digest_of(key)
        self._check_open()
        if self.local.contains(digest):
            return True
        if digest in self._exchange.outbox:
            return False
        try:
            return self._exchange.link.ask(partial(self.remote.contains, digest))
        except IndexStoreError:
            return False

    def delete(self, key: IndexLookup) -> bool:
        """As in the protocol, in both; the class says what becomes of it while remote is away."""
        digest = digest_of(key)
        self._check_open()
        offered = digest not in self._exchange.outbox and self._exchange.offered(digest) is not None
        with self._exchange.changing(digest):
            deleted = self.local.delete(digest)
            change = self._exchange.outbox.post(Change(digest, ChangeKind.DELETE))
        told = self._exchange.outbox.wait(change, self._timeout_s)
        return deleted or (change.existed if told else offered)

    def retain(self, key: IndexLookup, retention: Retention) -> IndexEntry:
        digest = digest_of(key)
        self._check_open()
        with self._exchange.changing(digest):
            try:
                entry = self.local.retain(digest, retention)
            except (IndexNotFound, StoreUnavailable) as err:
                missing = err
            else:
                self._exchange.outbox.post(Change(digest, ChangeKind.RETAIN, retention))
                return entry
        if self._exchange.hides(digest):
            raise missing
        try:
            return self._exchange.link.ask(partial(self.remote.retain, digest, retention))
        except StoreUnavailable as err:
            if self._exchange.offered(digest) is None:
                raise missing from err
            raise

    def lease(self, key: IndexLookup) -> BuildLease | None:
        self._check_open()
        ours = self.local.lease(key)
        if ours is None:
            return None
        try:
            theirs = self._exchange.link.ask(partial(self.remote.lease, key))
        except IndexStoreError:
            return ours
        except BaseException:
            ours.release()
            raise
        if theirs is None:
            ours.release()
            return None
        return _BothLeases(ours, theirs)

    def prefetch(self, key: IndexLookup) -> None:
        digest = digest_of(key)
        self._check_open()
        self._exchange.wanted(digest)
        self._exchange.fetcher.request(digest)

    def collect(self) -> Sequence[IndexEntry]:
        """Both stores' collections. Returns what left either and local does not have still."""
        self._check_open()
        removed = {entry.digest: entry for entry in self.local.collect()}
        with contextlib.suppress(IndexStoreError):
            there = self._exchange.link.ask(self.remote.collect)
            here = {entry.digest for entry in self.local.list()} if there else frozenset()
            removed.update((entry.digest, entry) for entry in there if entry.digest not in here)
        return tuple(entry for _, entry in sorted(removed.items()))

    def list(self) -> Sequence[IndexEntry]:
        self._check_open()
        entries = {entry.digest: entry for entry in self.local.list()}
        for entry in self._exchange.link.known(self.remote.list, _NO_ENTRIES):
            if entry.digest not in entries and entry.digest not in self._exchange.outbox:
                entries[entry.digest] = entry
        return tuple(entry for _, entry in sorted(entries.items()))

    def problems(self) -> Sequence[Problem]:
        """Local's, then those of remote that are about something else, then why remote cannot be used."""
        self._check_open()
        found = [*self.local.problems()]
        known = {digest_in(problem.path) for problem in found} - {None}
        for problem in self._exchange.link.known(self.remote.problems, _NO_PROBLEMS):
            digest = digest_in(problem.path)
            if digest is None or (digest not in known and digest not in self._exchange.outbox):
                found.append(problem)
        if self._exchange.link.problem is not None:
            found.append(Problem(self._exchange.link.problem.path or "remote store", self._exchange.link.problem))
        return tuple(found)

    def report(self, key: IndexLookup, error: IndexStoreError) -> None:
        """As in the protocol; but where only local's copy is damaged (the error names its file, or a full check of
        it fails), remote's stays offered, and is fetched. An error that names no file is otherwise taken to be about
        both; where local's is a problem already, to be about that one.
        """
        digest = digest_of(key)
        self._check_open()
        self._exchange.end_fetch(digest)
        entry = entry_of(self.local.list(), digest)
        if entry is None:
            known = [problem.path for problem in self.local.problems() if digest_in(problem.path) == digest]
            if error.path in known or (known and error.path is None):
                return
        if entry is not None:
            ours = error.path is not None and error.path == entry.path
            ours = ours or not self._is_whole(digest)
            self.local.report(digest, error)
            if entry_of(self.local.list(), digest) is not None:
                return  # local has looked: it was about an older one, and says nothing of what remote is told
            if ours:
                self._exchange.outbox.withdraw(digest)
                return
        elif self._exchange.hides(digest):
            return
        if self._exchange.outbox.withdraw(digest):
            self._exchange.outbox.post(Change(digest, ChangeKind.REPORT, error=error))
        else:
            self._exchange.link.known(partial(self.remote.report, digest, error), None)

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
        here = self.local.longest(namespace, page_hashes, model, profile_digest, page_tokens=page_tokens)
        if here is not None and self._exchange.link.is_away():
            return here
        hashes = page_hashes
        while True:
            look_up = partial(self.remote.longest, namespace, hashes, model, profile_digest, page_tokens=page_tokens)
            there = self._exchange.link.known(look_up, None)
            if there is None or there.digest not in self._exchange.outbox:
                break
            hashes = page_hashes[: there.identity.num_tokens // page_tokens - 1]
        if here is None or (there is not None and there.identity.num_tokens > here.identity.num_tokens):
            return there
        return here

    def near_miss(
        self,
        namespace: str,
        page_hashes: Sequence[bytes],
        model: ModelFingerprint,
        profile_digest: str,
        *,
        page_tokens: int = PAGE_TOKENS,
    ) -> str | None:
        """As in the protocol; remote's are left out while it is being told of changes."""
        self._check_open()
        found = self.longest(namespace, page_hashes, model, profile_digest, page_tokens=page_tokens)
        if found is not None:
            return None
        ask = (namespace, page_hashes, model, profile_digest)
        here = self.local.near_miss(*ask, page_tokens=page_tokens)
        if here is not None or len(self._exchange.outbox):
            return here
        return self._exchange.link.known(partial(self.remote.near_miss, *ask, page_tokens=page_tokens), None)

    def rescan(self, *, full: bool = False) -> None:
        """Local's, whose errors are raised; then, if it is due, remote's, which takes as long as remote's limit."""
        self._check_open()
        self.local.rescan(full=full)
        with self._lock:
            due = full or time.monotonic() >= self._next_rescan
            if due:
                self._next_rescan = math.inf
        if due:
            try:
                self._rescan_remote(full)
            finally:
                self._next_rescan = time.monotonic() + self._rescan_s
        self._exchange.outbox.resend()

    def check_integrity(self) -> None:
        """Both stores' books, remote's where it answers; nothing is published meanwhile."""
        self._check_open()
        self.local.check_integrity()
        with self._exchange.outbox.paused(self._timeout_s) as paused, contextlib.suppress(StoreUnavailable):
            if paused:
                self._exchange.link.ask(self.remote.check_integrity)

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreClosed("shared store", expected="open", found="closed", remedy="call open() first")

    def _is_whole(self, digest: str) -> bool:
        try:
            with self.local.get(digest) as index:
                index.verify()
        except DAMAGE:
            return False
        except IndexStoreError:
            pass
        return True

    def _get_remote(self, key: IndexLookup, digest: str, missing: IndexStoreError) -> IndexFile:
        if self._exchange.hides(digest):
            return self.local.get(key)  # a change may have come between: local knows
        fetch = self._exchange.due(digest)
        if fetch and self._wait is not Wait.BEST_EFFORT:
            limit = self._timeout_s if self._wait is Wait.TIMEOUT else None
            arrived = self._exchange.fetcher.request(digest, urgent=True).wait(limit)
            self._check_open()
            if arrived or self._exchange.hides(digest):
                with contextlib.suppress(*_MISSES):
                    return self.local.get(key)
            if self._exchange.hides(digest):
                raise missing
        try:
            index = self._exchange.link.ask(partial(self.remote.get, key))
        except IndexStoreError as err:
            unknown = isinstance(err, StoreUnavailable) and self._exchange.offered(digest) is None
            if unknown or not isinstance(missing, IndexNotFound):
                raise missing from err
            raise
        if fetch and self._wait is Wait.BEST_EFFORT:
            self._exchange.fetcher.request(digest)
        return index

    def _rescan_remote(self, full: bool) -> None:
        if not self._exchange.link.is_open:
            with self._lifetime:
                if self._is_open:
                    self._exchange.link.open()
            return
        self._exchange.link.look(partial(self.remote.rescan, full=full))


class _BothLeases:
    def __init__(self, ours: BuildLease, theirs: BuildLease) -> None:
        self.digest = ours.digest
        self._ours, self._theirs = ours, theirs

    def release(self) -> None:
        try:
            self._theirs.release()
        finally:
            self._ours.release()

    def __enter__(self) -> BuildLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
