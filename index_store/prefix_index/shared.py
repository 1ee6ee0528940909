"""A folder that is the truth of this machine, and the remote stores that many machines share and that may lose."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from .background import Cancelled, Check, Promoter, Promotion
from .copies import checked, digest_in
from .errors import (
    IndexFormatError,
    IndexMismatch,
    IndexNotFound,
    IndexStoreError,
    IndexTooNew,
    IndexUnreadable,
    InvalidPayload,
    StoreFolderError,
    StoreFull,
    StoreUnavailable,
)
from .file import FileStore
from .folder import check_apart
from .link import Link, Source, unavailable
from .reader import IndexFile, IndexLookup, is_damaged, open_in
from .store import Ask, BuildLease, Catalog, IndexEntry, IndexStore, Problem, Retention, digest_of
from .writer import IndexPayload

_CLOSE_S: Final = 5.0
_FETCH_AGAIN_S: Final = 30.0
_BEING_CHANGED_S: Final = 1.0
_EVERYTHING: Final = "everything"
DAMAGE: Final = (IndexFormatError, IndexMismatch)
_MISSES: Final = (IndexNotFound, *DAMAGE, IndexUnreadable, StoreUnavailable)


class _Leases(BuildLease):
    """Of several stores. Forgotten, each ends as it does by itself: a remote one waits for nobody."""

    def __del__(self) -> None:
        self._ends = ()


class SharedCounters(NamedTuple):
    """Events since the store was made; they never decrease.

    ``hits_local``, ``hits_remote``  indexes that ``get`` served: the folder had it, or only a remote store did
    ``fetched``, ``fetch_failures``  indexes copied into the folder, and attempts at that which failed
    ``published``, ``publish_failures``  the same in the other direction
    ``dropped``                      background work given up because too much of it waited
    """

    hits_local: int = 0
    hits_remote: int = 0
    fetched: int = 0
    fetch_failures: int = 0
    published: int = 0
    publish_failures: int = 0
    dropped: int = 0


class SharedStore(IndexStore):
    """An ``IndexStore`` of a folder and of remote stores, the fastest first. Owns them all.

    *The folder is the truth.* What it holds is served, and nothing that a remote store does, lacks or loses changes
    that. Its errors are the answer. A remote store is a source of what the folder lacks: empty, wiped, damaged or away,
    it makes for misses only; ``open()`` succeeds without it, ``problems()`` says so.

    *Writing.* ``put`` ends when the folder has the index, which is then published in the background. What could not be
    is tried again when the store answers again, and at the next start: no list of it is kept. ``delete`` waits up to
    ``timeout_s`` for the remote stores; the index may come back from another machine that still holds it.

    *Reading.* Look-ups are those of all catalogs, without I/O. An index that the folder lacks, or has damaged, is
    fetched into it; ``get`` waits up to ``timeout_s``, then raises StoreUnavailable while the fetch goes on. Where the
    folder has no room the index is served from memory. A store that does not answer is asked again after 1 to 30 s.

    A build lease is the folder's and, where they answer, the remote stores', which are listed every ``rescan_s``
    seconds.
    """

    kind = "shared"

    def __init__(
        self,
        local: FileStore,
        remotes: Sequence[Source],
        *,
        timeout_s: float = 5.0,
        rescan_s: float = 2.0,
    ) -> None:
        super().__init__()
        for name, seconds in (("timeout_s", timeout_s), ("rescan_s", rescan_s)):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise InvalidPayload(name, "finite seconds, 0 or more", repr(seconds), "correct it")
        check_apart(store.folder for store in (local, *remotes) if type(store) is FileStore)
        self.local = local
        self.remotes = tuple(remotes)
        self._links = [Link(remote) for remote in remotes]
        self._timeout_s, self._rescan_s = timeout_s, rescan_s
        self._counts = dict.fromkeys(SharedCounters._fields, 0)
        self._counting = threading.Lock()
        self._fetching: dict[str, bool] = {}
        self._no_fetch: dict[str, tuple[float, Link | IndexStoreError]] = {}
        self._locks: WeakValueDictionary[str, threading.RLock] = WeakValueDictionary()
        self._next_rescan = 0.0
        self._numbers = itertools.count()
        self._begin()

    def _begin(self) -> None:
        dropped = partial(self.count, "dropped")
        self._fetcher = Promoter(self._fetch, on_drop=dropped)
        self._teller = Promoter(self._tell, on_drop=self._fell_behind)
        self._looker = Promoter(self._look, on_drop=dropped)

    @property
    def counters(self) -> SharedCounters:
        with self._counting:
            return SharedCounters(**self._counts)

    def count(self, name: str) -> None:
        with self._counting:
            self._counts[name] += 1

    def open(self) -> None:
        with self._lock:
            if self._is_open:
                return
            self.local.open()
            self._begin()
            for link in self._links:
                link.open()
            self._next_rescan = time.monotonic() + self._rescan_s
            self._is_open = True
        self._post(_EVERYTHING)

    def close(self) -> None:
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            self._teller.settle(self._timeout_s)
        for promoter in (self._teller, self._fetcher, self._looker):
            promoter.close(_CLOSE_S)
        for link in self._links:
            link.close()
        self.local.close()

    def flush(self, timeout_s: float) -> bool:
        """Waits for what is being published. Returns whether every remote store has what the folder has."""
        self._check_open()
        return self._teller.settle(timeout_s) and not any(link.is_behind for link in self._links)

    def _catalogs(self) -> Sequence[Catalog]:
        return (self.local.catalog, *(link.store.catalog for link in self._links if link.is_open))

    def put(self, payload: IndexPayload, *, retention: Retention | None = None) -> IndexEntry:
        self._check_open()
        digest = payload.identity.digest
        if retention is None and self.local.catalog.get(digest) is None:
            retention = next((there.retention for _, there in self._offers(digest)), None)
        with self._changing(digest):
            entry = self.local.put(payload, retention=retention)
            self._outdate(digest)
        self._post(digest)
        return entry

    def get(self, key: IndexLookup) -> IndexFile:
        digest = self._digest(key)
        try:
            index, where = self.local.get(key), "hits_local"
        except _MISSES as missing:
            index, where = self._get_remote(key, digest, missing), "hits_remote"
        self.count(where)
        return index

    def contains(self, key: IndexLookup) -> bool:
        digest = self._digest(key)
        links = [link for link in self._links if digest not in link.store.catalog.hidden]
        return self.local.contains(digest) or any(link.contains(digest) for link in links)

    def delete(self, key: IndexLookup) -> bool:
        """As in the protocol, in all of them; the class says what becomes of it where one does not answer."""
        digest = self._digest(key)
        offered = any(True for _ in self._offers(digest))
        with self._changing(digest):
            deleted = self.local.delete(digest)
            self._outdate(digest)
        job = self._post(digest, urgent=True)
        job.wait(self._timeout_s)
        told = not any(digest in link.store.catalog.hidden for link in self._links)
        return deleted or (job.value is True if told else offered)

    def retain(self, key: IndexLookup, retention: Retention) -> IndexEntry:
        digest = self._digest(key)
        with self._changing(digest):
            try:
                entry = self.local.retain(digest, retention)
            except IndexNotFound as err:
                missing = err
            else:
                for link in self._links:
                    hidden = link.store.catalog.hidden
                    if digest in link.retention or digest not in hidden:  # else the index is sent, with all of it
                        link.retention[digest] = retention
                    hidden[digest] = next(self._numbers)
                self._post(digest)
                return entry
        for link, _ in self._offers(digest):
            return link.ask(partial(link.store.retain, digest, retention))
        raise missing

    def lease(self, key: IndexLookup) -> BuildLease | None:
        self._check_open()
        with contextlib.ExitStack() as held:
            for ask in (self.local.lease, *(link.lease for link in self._links)):
                lease = ask(key)
                if lease is None:
                    return None
                held.callback(lease.release)
            return _Leases(digest_of(key), held.pop_all().close)

    def collect(self) -> Sequence[IndexEntry]:
        """All stores' collections. Returns what left one of them and the folder does not have still."""
        self._check_open()
        removed = {entry.digest: entry for entry in self.local.collect()}
        for link in self._links:
            with contextlib.suppress(IndexStoreError):
                there = {entry.digest: entry for entry in link.ask(link.store.collect)}
                removed.update((d, entry) for d, entry in there.items() if self.local.catalog.get(d) is None)
        return tuple(entry for _, entry in sorted(removed.items()))

    def list(self) -> Sequence[IndexEntry]:
        self._check_open()
        entries = {entry.digest: entry for entry in self.local.list()}
        for link in self._links:
            for entry in link.known(link.store.list):
                entries.setdefault(entry.digest, entry)
        return tuple(entry for _, entry in sorted(entries.items()))

    def problems(self) -> Sequence[Problem]:
        """The folder's, then those of remote stores that are about something else, then why one cannot be used."""
        self._check_open()
        found = [*self.local.problems()]
        known = {digest_in(problem.path) for problem in found} - {None}
        for link in self._links:
            seen = known | link.store.catalog.hidden.keys()
            found += [p for p in link.known(link.store.problems) if digest_in(p.path) not in seen]
            error = link.problem or link.refusal
            if error is not None:
                found.append(Problem(error.path or "remote store", error))
        return tuple(found)

    def report(self, key: IndexLookup, error: IndexStoreError) -> None:
        """As in the protocol; where only the folder's index is damaged, the remote stores' are fetched."""
        digest = self._digest(key)
        self._end_fetch(digest)
        here = self.local.catalog.get(digest)
        if here is not None:
            damaged = (error.path is not None and error.path == here.path) or is_damaged(self.local.folder, digest)
            self.local.report(digest, error)
            if damaged or self.local.catalog.get(digest) is not None:
                return  # or the folder has looked: it was about an older one
        elif self.local.catalog.held(digest) is not None:
            return  # it has expired: a miss already
        elif any(digest_in(problem.path) == digest for problem in self.local.problems()):
            return
        for link in self._links:
            if link.is_open and digest not in link.store.catalog.hidden:
                with contextlib.suppress(IndexStoreError):
                    link.store.report(digest, error)
            else:  # on its way there, or nobody knows what is there
                link.store.catalog.hidden[digest] = next(self._numbers)
                link.reports[digest], link.is_behind = error, True
                self._post(digest)

    def longest(self, ask: Ask) -> IndexEntry | None:
        if any(link.is_away() for link in self._links):
            here = self.local.longest(ask)
            if here is not None:
                return here
        return super().longest(ask)

    def rescan(self, *, full: bool = False) -> None:
        """The folder's, whose errors are raised. Remote stores are listed behind it; ``full`` waits for that."""
        self._check_open()
        self.local.rescan(full=full)
        if full or time.monotonic() >= self._next_rescan:
            self._next_rescan = time.monotonic() + self._rescan_s
            job = self._looker.request("rescan fully" if full else "rescan")
            if full:
                job.wait(self._timeout_s)

    # ---- from remote stores ----

    def _offers(self, digest: str) -> Iterator[tuple[Link, IndexEntry]]:
        """The remote stores that list an index."""
        for link in self._links:
            entry = link.store.catalog.get(digest) if link.is_open else None
            if entry is not None and digest not in link.store.catalog.hidden:
                yield link, entry

    def _get_remote(self, key: IndexLookup, digest: str, missing: IndexStoreError) -> IndexFile:
        if (known := self._unfetched(digest)) is not None:
            if isinstance(known, Link):
                return known.ask(partial(known.store.get, key))
            raise missing if not isinstance(missing, IndexNotFound) else known
        job = self._fetcher.request(digest, urgent=True)
        done = job.wait(self._timeout_s)
        self._check_open()
        known = self._unfetched(digest)
        if done or isinstance(job.error, Cancelled):  # by a change of the folder's own
            return known.ask(partial(known.store.get, key)) if isinstance(known, Link) else self.local.get(key)
        if isinstance(job.error, IndexUnreadable):  # the folder's stays; meanwhile a remote store's will do
            for link, _ in self._offers(digest):
                with contextlib.suppress(IndexStoreError):
                    return link.ask(partial(link.store.get, key))
        offered = any(True for _ in self._offers(digest))
        error = job.error if isinstance(job.error, IndexStoreError) else missing
        if job.error is None and offered:
            error = unavailable(f"it still on its way after {self._timeout_s:g} s", expected="the index")
        if not isinstance(missing, IndexNotFound) or (isinstance(error, StoreUnavailable) and not offered):
            raise missing from error
        raise error

    def _unfetched(self, digest: str) -> Link | IndexStoreError | None:
        """Why an index is not fetched for a while: damaged there, or the folder cannot take what this store has."""
        until, known = self._no_fetch.get(digest, (0.0, None))
        return known if time.monotonic() < until else None

    def _fetch(self, digest: str, check: Check) -> None:
        """Copies an index into the folder, unless that has one. Raises where nobody has it, and where the folder's
        cannot be read now: that is not damage, and not replaced.
        """
        error: IndexStoreError = IndexNotFound("index", digest, "none", "build it")
        with self._counting:
            self._fetching[digest] = True  # before the look: what comes after it ends this fetch
        try:
            try:
                self.local.get(digest).close()
                return None
            except IndexUnreadable:
                raise
            except IndexStoreError:
                pass  # a remote store's will do
            for link in self._links:
                if digest not in link.store.catalog.hidden:
                    try:
                        return self._fetch_from(link, digest, check)
                    except IndexStoreError as err:
                        error = err if isinstance(error, IndexNotFound) else error
        finally:
            with self._counting:
                self._fetching.pop(digest, None)
        self.count("fetch_failures")
        if isinstance(error, DAMAGE):
            self._no_fetch[digest] = time.monotonic() + _FETCH_AGAIN_S, error
        raise error

    def _fetch_from(self, link: Link, digest: str, check: Check) -> None:
        def still_wanted() -> None:
            check()
            if not self._fetching.get(digest, False):
                raise Cancelled

        with link.ask(partial(link.store.get, digest)) as source:
            entry = link.store.catalog.get(digest)
            changing = self._lock_of(digest)
            if not changing.acquire(blocking=False):  # never wait for who holds it: it is read from where it is
                still_wanted()
                self._no_fetch[digest] = time.monotonic() + _BEING_CHANGED_S, link
                return
            try:
                still_wanted()
                retention = Retention() if entry is None else entry.retention
                self.local.put(checked(source.payload(), still_wanted), retention=retention)
            except DAMAGE as err:
                link.store.report(digest, err)
                raise
            except (StoreFull, StoreFolderError):
                self.count("fetch_failures")
                self._no_fetch[digest] = time.monotonic() + _FETCH_AGAIN_S, link
                return
            finally:
                changing.release()
        self._no_fetch.pop(digest, None)
        self.count("fetched")

    def _lock_of(self, digest: str) -> threading.RLock:
        with self._counting:
            return self._locks.setdefault(digest, threading.RLock())

    @contextlib.contextmanager
    def _changing(self, digest: str) -> Iterator[None]:
        """One change of the folder's index at a time. A fetch of it that is under way gives up."""
        self._end_fetch(digest)
        with self._lock_of(digest):
            self._end_fetch(digest)
            yield

    def _end_fetch(self, digest: str) -> None:
        """What is being fetched is outdated."""
        with self._counting:
            if digest in self._fetching:
                self._fetching[digest] = False

    # ---- to remote stores ----

    def _look(self, what: str, check: Check) -> None:
        """Lists the remote stores, or opens those that could not be."""
        for link in self._links:
            check()
            if link.is_open:
                link.look(partial(link.store.rescan, full=what == "rescan fully"))
            else:
                link.open()
        if any(link.is_due() for link in self._links):
            self._post(_EVERYTHING)

    def _post(self, what: str, *, urgent: bool = False) -> Promotion:
        # A key of its own: the job of an earlier one may have looked already, and not be over yet.
        return self._teller.request(f"{what} {next(self._numbers)}", urgent=urgent)

    def _outdate(self, digest: str) -> None:
        """What remote stores have of an index is not to be served here, until they know better."""
        for link in self._links:
            link.store.catalog.hidden[digest] = next(self._numbers)
            link.retention.pop(digest, None)
            link.reports.pop(digest, None)

    def _tell(self, what: str, check: Check) -> bool:
        """Returns whether a remote store had an index that was deleted."""
        digest, existed = what.split()[0], False
        for link in self._links:
            if digest != _EVERYTHING:
                existed |= self._tell_one(link, digest, check)
            elif link.is_due():
                self._catch_up(link, check)
        return existed

    def _catch_up(self, link: Link, check: Check) -> None:
        link.is_behind, link.refusal = False, None
        for digest in tuple(link.store.catalog.hidden):
            sends = digest not in {*link.retention, *link.reports} and self.local.catalog.get(digest) is not None
            if sends and isinstance(link.refusal, StoreFull):
                link.is_behind = True  # nor would this one have room
            else:
                self._tell_one(link, digest, check)
        newer = {digest_in(problem.path) for problem in link.store.problems() if isinstance(problem.error, IndexTooNew)}
        for entry in self.local.list():
            digest = entry.digest
            there = link.store.catalog.get(digest)
            if digest in newer or (there is not None and there.created >= entry.created):
                continue
            if isinstance(link.refusal, StoreFull):
                break  # nor would the rest have room
            with contextlib.suppress(IndexStoreError):
                lease = self.local.lease(digest)
                if lease is None:
                    link.is_behind = True  # another process of this machine is at it, or was
                    continue
                with lease:
                    if there is not None:  # an older build
                        link.store.catalog.hidden.setdefault(digest, next(self._numbers))
                    self._tell_one(link, digest, check)
        link.caught_up()

    def _tell_one(self, link: Link, digest: str, check: Check) -> bool:
        """Makes a remote store's index what the folder's is. Returns whether one was deleted there."""
        check()
        store, entry, existed = link.store, self.local.catalog.get(digest), False
        outdated = store.catalog.hidden.get(digest)
        try:
            if digest in link.reports:
                link.ask(partial(store.report, digest, link.reports[digest]))
            elif digest in link.retention:
                with contextlib.suppress(IndexNotFound):
                    link.ask(partial(store.retain, digest, link.retention[digest]))
            elif outdated is not None and entry is None:
                existed = link.ask(partial(store.delete, digest))
            elif outdated is not None or (entry is not None and store.catalog.get(digest) is None):
                self._send(link, digest, entry, check)
            if store.catalog.hidden.get(digest) == outdated:  # else it has changed once more meanwhile
                store.catalog.hidden.pop(digest, None)
                link.retention.pop(digest, None)
                link.reports.pop(digest, None)
        except Cancelled:
            raise
        except IndexNotFound:
            link.is_behind = True  # the folder's is gone meanwhile: its catalog will know
        except Exception as err:
            self.count("publish_failures")
            here = self.local.catalog.held(digest)
            if isinstance(err, DAMAGE) and here is not None and err.path == here.path:
                self.local.report(digest, err)
            else:  # whatever it is, it is the other store's: it is told again, later and later
                link.is_behind = True
                link.refusal = err if isinstance(err, IndexStoreError) else link.refusal
        return existed

    def _send(self, link: Link, digest: str, entry: IndexEntry | None, check: Check) -> None:
        if digest not in link.store.catalog.hidden and link.ask(partial(link.store.contains, digest)):
            return
        with open_in(self.local.folder, digest) as index:
            payload = checked(index.payload(), check)
            retention = Retention() if entry is None else entry.retention
            link.ask(partial(link.store.put, payload, retention=retention))
        self.count("published")

    def _fell_behind(self) -> None:
        self.count("dropped")
        for link in self._links:
            link.is_behind = True
