"""A folder that is the truth of this machine, and the remote stores that many machines share and that may lose."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from .background import Cancelled, Check, Promoter, Promotion
from .copies import digest_in
from .errors import (
    IndexFormatError,
    IndexMismatch,
    IndexNotFound,
    IndexStoreError,
    IndexUnreadable,
    StoreFolderError,
    StoreFull,
    StoreUnavailable,
)
from .file import FileStore
from .folder import check_apart
from .format import is_digest
from .link import Link, Source, unavailable
from .reader import IndexFile, IndexLookup, is_damaged, open_in
from .remote import RemoteStore
from .store import Ask, BuildLease, Catalog, Evictions, IndexEntry, IndexStore, Problem, Retention, digest_of
from .writer import IndexPayload

_CLOSE_S: Final = 5.0
_FETCH_AGAIN_S: Final = 30.0
_BEING_CHANGED_S: Final = 1.0
_EVERYTHING: Final = "everything"
DAMAGE: Final = (IndexFormatError, IndexMismatch)
_MISSES: Final = (IndexNotFound, *DAMAGE, IndexUnreadable, StoreUnavailable)


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

    *Writing.* ``put`` ends when the folder has the index, which is then published in the background. One that is there
    already stays. What could not be published is tried again when the store answers again, and at the next start: no
    list of it is kept. ``delete`` waits up to ``timeout_s`` for the remote stores; the index may come back from another
    machine that still holds it. Retention is the folder's alone; what expires there is deleted in the others.

    *Reading.* Look-ups are those of all catalogs, without I/O. An index that the folder lacks, or has damaged, is
    fetched into it; ``get`` waits up to ``timeout_s``, then raises StoreUnavailable while the fetch goes on. Where the
    folder has no room the index is served from memory. A store that does not answer is asked again after 1 to 30 s.

    With ``publish=False``, for who only looks, nothing goes to the remote stores.

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
        publish: bool = True,
    ) -> None:
        super().__init__()
        check_apart(store.folder for store in (local, *remotes) if type(store) is FileStore)
        self.local = local
        self.remotes = tuple(remotes)
        self._links = [Link(remote, local) for remote in remotes]
        self._timeout_s, self._rescan_s, self._publishes = timeout_s, rescan_s, publish
        self._counts = dict.fromkeys(SharedCounters._fields, 0)
        self._counting = threading.Lock()
        self._fetching: str | None = None
        """What is being fetched, until it is outdated."""
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

    @property
    def evicted(self) -> Evictions:
        return self.local.evicted

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
        self._publish(_EVERYTHING)

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
        with self._changing(digest):
            entry = self.local.put(payload, retention=retention)
        self._publish(digest)
        return entry

    def get(self, key: IndexLookup) -> IndexFile:
        digest = self._digest(key)
        try:
            index, where = self.local.get(key), "hits_local"
        except _MISSES as missing:
            index, where = self._get_remote(key, digest, missing), "hits_remote"
            index.tier = "remote"
        self.count(where)
        return index

    def is_fetched(self, digest: str) -> bool:
        return digest not in self.local.catalog

    def touch(self, key: IndexLookup) -> None:
        """As in the protocol, in the folder; remote folders that have the index are told in the background."""
        digest = self._digest(key)
        self._looker.request(digest)
        self.local.touch(digest)

    def contains(self, key: IndexLookup) -> bool:
        digest = self._digest(key)
        return self.local.contains(digest) or any(link.contains(digest) for link in self._links)

    def delete(self, key: IndexLookup) -> bool:
        """As in the protocol, in all of them; the class says what becomes of it where one does not answer."""
        digest = self._digest(key)
        listed = any(link.lists(digest) for link in self._links)
        with self._changing(digest):
            deleted = self.local.delete(digest)
        job = self._delete_there(digest)
        job.wait(self._timeout_s)
        told = not any(digest in link.deleted for link in self._links)
        return deleted or (job.value is True if told else listed)

    def retain(self, key: IndexLookup, retention: Retention) -> IndexEntry:
        """As in the protocol, in the folder, which an index that only a remote store has is fetched into first."""
        digest = self._digest(key)
        if digest not in self.local.catalog and any(link.lists(digest) for link in self._links):
            self.get(digest).close()
        with self._changing(digest):
            return self.local.retain(digest, retention)

    def lease(self, key: IndexLookup) -> BuildLease | None:
        self._check_open()
        with contextlib.ExitStack() as held:
            for ask in (self.local.lease, *(link.lease for link in self._links)):
                lease = ask(key)
                if lease is None:
                    return None
                held.callback(lease.release)
            # Forgotten, each ends as it does by itself: a remote one waits for nobody.
            return BuildLease(digest_of(key), held.pop_all().close, forgotten=lambda: None)

    def collect(self) -> Sequence[IndexEntry]:
        """The folder's collection. What has expired is deleted in the remote stores, too."""
        self._check_open()
        for entry in self.local.catalog.expired():
            self._delete_there(entry.digest)
        return self.local.collect()

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
            seen = known | link.deleted
            found += [p for p in link.known(link.store.problems) if digest_in(p.path) not in seen]
            error = link.problem or link.refusal
            if error is not None:
                found.append(Problem(error.path or "remote store", error))
        return tuple(found)

    def report(self, index: IndexFile, error: IndexStoreError) -> bool:
        """As in the protocol. Where the folder's bytes alone are damaged, the remote stores' are fetched; what is wrong
        although its bytes are as they were written is deleted in the remote stores, for a builder to put it again.
        """
        digest = index.identity.digest
        self._check_open()
        self._end_fetch(digest)
        if not self._is_from_remote(index):
            if not self.local.report(index, error):
                return False
            if is_damaged(self.local.folder, digest):
                return True
        self._delete_there(digest)
        return True

    def _is_from_remote(self, index: IndexFile) -> bool:
        shared = (link.store for link in self._links if isinstance(link.store, FileStore))
        return index.path is None or any(index.path == str(store.path_of(index.identity)) for store in shared)

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

    def _get_remote(self, key: IndexLookup, digest: str, missing: IndexStoreError) -> IndexFile:
        if (known := self._unfetched(digest)) is not None:
            if isinstance(known, Link):
                return known.ask(partial(known.store.get, key))
            raise missing if not isinstance(missing, IndexNotFound) else known.bare()
        job = self._fetcher.request(digest, urgent=True)
        done = job.wait(self._timeout_s)
        self._check_open()
        known = self._unfetched(digest)
        if done or isinstance(job.error, Cancelled):  # by a change of the folder's own
            return known.ask(partial(known.store.get, key)) if isinstance(known, Link) else self.local.get(key)
        if isinstance(job.error, IndexUnreadable):  # the folder's stays; meanwhile a remote store's will do
            for link in self._links:
                if link.lists(digest):
                    with contextlib.suppress(IndexStoreError):
                        return link.ask(partial(link.store.get, key))
        offered = any(link.lists(digest) for link in self._links)
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
            self._fetching = digest  # before the look: what comes after it ends this fetch
        try:
            self.local.get(digest).close()
            return None
        except IndexUnreadable:
            raise
        except IndexStoreError:
            pass  # a remote store's will do
        for link in self._links:
            if not link.hides(digest):
                try:
                    return self._fetch_from(link, digest, check)
                except IndexStoreError as err:
                    error = err if isinstance(error, IndexNotFound) else error
        self.count("fetch_failures")
        if isinstance(error, DAMAGE):
            self._no_fetch[digest] = time.monotonic() + _FETCH_AGAIN_S, error.bare()
        raise error

    def _fetch_from(self, link: Link, digest: str, check: Check) -> None:
        def still_wanted() -> None:
            check()
            if self._fetching != digest:
                raise Cancelled

        with link.ask(partial(link.store.get, digest)) as source:
            changing = self._lock_of(digest)
            if not changing.acquire(blocking=False):  # never wait for who holds it: it is read from where it is
                still_wanted()
                self._no_fetch[digest] = time.monotonic() + _BEING_CHANGED_S, link
                return
            try:
                still_wanted()
                self.local.put(source.payload(still_wanted))
            except DAMAGE as err:
                if isinstance(link.store, FileStore):
                    link.store.report(source, err.bare())
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
            if self._fetching == digest:
                self._fetching = None

    def _look(self, what: str, check: Check) -> None:
        """Lists the remote stores, or opens those that could not be. What expired in the folder is deleted there. A
        digest is touched where it is.
        """
        if is_digest(what):
            for link in self._links:
                if isinstance(link.store, FileStore) and link.lists(what):
                    with contextlib.suppress(IndexStoreError):
                        link.ask(partial(link.store.touch, what))
            return
        for link in self._links:
            check()
            if link.is_open:
                link.look(partial(link.store.rescan, full=what == "rescan fully"))
            else:
                link.open()
        for entry in self.local.catalog.expired():
            if any(entry.digest in link.store.catalog for link in self._links):
                self._delete_there(entry.digest)
        if any(link.is_due() for link in self._links):
            self._publish(_EVERYTHING)

    def _publish(self, what: str) -> None:
        if self._publishes:
            self._post(what)

    def _post(self, what: str, *, urgent: bool = False) -> Promotion:
        # A key of its own: the job of an earlier one may have looked already, and not be over yet.
        return self._teller.request(f"{what} {next(self._numbers)}", urgent=urgent)

    def _delete_there(self, digest: str) -> Promotion:
        """What remote stores have of an index is not served here any more, until they are told to delete it."""
        for link in self._links:
            link.deleted.add(digest)
        return self._post(digest, urgent=True)

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
        for digest in tuple(link.deleted):
            self._tell_one(link, digest, check)
        for entry in self.local.list():
            digest = entry.digest
            if digest in link.store.catalog:
                continue
            if isinstance(link.refusal, StoreFull):
                link.is_behind = True
                break  # nor would the rest have room
            try:
                lease = self.local.lease(digest)
                if lease is None:
                    link.is_behind = True  # another process of this machine is at it, or was
                    continue
                with lease:
                    self._tell_one(link, digest, check)
            except IndexStoreError as err:
                link.is_behind, link.refusal = True, err.bare()
        if isinstance(link.store, RemoteStore):
            with contextlib.suppress(IndexStoreError):
                link.ask(link.store.sweep)
        link.caught_up()

    def _tell_one(self, link: Link, digest: str, check: Check) -> bool:
        """Has a remote store delete an index, or take in the folder's. Returns whether one was deleted there."""
        check()
        existed = False
        try:
            if digest in link.deleted:
                existed = link.ask(partial(link.store.delete, digest))
                link.deleted.discard(digest)
            if digest in self.local.catalog and digest not in link.store.catalog:
                self._send(link, digest, check)
        except Cancelled:
            raise
        except IndexNotFound:
            link.is_behind = True  # the folder's is gone meanwhile: its catalog will know
        except Exception as err:
            # Whatever it is, it is told again, later and later.
            self.count("publish_failures")
            link.is_behind = True
            link.refusal = err.bare() if isinstance(err, IndexStoreError) else link.refusal
        return existed

    def _send(self, link: Link, digest: str, check: Check) -> None:
        if link.ask(partial(link.store.contains, digest)):
            return
        index: IndexFile | None = None
        try:
            with open_in(self.local.folder, digest) as index:
                put = link.ask(partial(link.store.put, index.payload(check)))
        except DAMAGE as err:
            if err.path != str(self.local.path_of(digest)):
                raise
            self.count("publish_failures")
            if index is None:
                self.local.get(digest).close()  # takes note of it
            else:
                self.local.report(index, err.bare())
        else:
            if put:
                self.count("published")

    def _fell_behind(self) -> None:
        self.count("dropped")
        for link in self._links:
            link.is_behind = True
