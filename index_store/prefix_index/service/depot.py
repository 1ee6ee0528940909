"""What a service keeps: the tiers of a host, what clients are writing, and the listing that they mirror."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import Final

from ..catalog import inconsistent
from ..errors import IndexNotFound, IndexStoreError, IndexUnreadable, StoreFolderError, StoreInconsistent
from ..eviction import has_expired
from ..folder import SUFFIX, Signature, check_apart, is_shard
from ..lease import LEASE
from ..store import IndexEntry, IndexStore
from ..text import printable
from ..tiered import TieredStore
from .changes import ChangeLog
from .folder import ServedFolder
from .messages import (
    MAX_TEXT,
    Answer,
    Check,
    Checked,
    Collect,
    Commit,
    Delete,
    Done,
    Locate,
    Located,
    Ping,
    Prefetch,
    Problems,
    Release,
    Removed,
    Report,
    Request,
    Rescan,
    Reserve,
    Reserved,
    Retain,
    Status,
    Stored,
    TierStatus,
    entry_out,
    error_of,
    unavailable,
)
from .pages import problem_page, removed_page
from .reservations import Reservations

log = logging.getLogger("prefix_index.service")
_WANT_AGAIN_S: Final = 10.0
_MAX_WANTED: Final = 10_000
_MAX_COLLECTED: Final = 4
_CHECK_WAIT_S: Final = 0.2
_SYNC_TRIES: Final = 20
"""Under a storm of puts a listing may be outdated each time; the next rescan tries again."""


class Depot:
    """``slow`` is the durable tier that clients write into, ``fast`` a folder in memory (tmpfs) for copies of it.

    Owns both. ``grace_s``: seconds that a writer may take to open the file that was reserved for it. ``locate_now``
    and ``log`` are for the service's loop and wait for nothing; ``do`` is for its workers.
    """

    def __init__(self, slow: ServedFolder, fast: ServedFolder | None = None, *, grace_s: float = 5.0) -> None:
        self.log = ChangeLog()
        self.slow = slow
        self.fast = fast
        self.store: IndexStore = slow if fast is None else TieredStore(fast, slow)
        tiers: list[ServedFolder] = [slow] if fast is None else [fast, slow]
        self.folders = [str(tier.folder.absolute()) for tier in tiers]
        self._tiers = tiers
        self._hits = [0] * len(tiers)
        self._evicted = 0
        self._sync_lock = threading.Lock()
        self._reservations = Reservations(slow, grace_s)
        self._copies: dict[str, Signature] = {}
        self._wanted: dict[str, float] = {}
        self._collecting = threading.Lock()
        self._collected: dict[str, list[IndexEntry]] = {}
        self._checking = threading.Lock()
        self._error: str | None = None
        self._fast_error: str | None = None

    def open(self) -> None:
        """Raises StoreFolderError."""
        for folder in self.folders:
            if not folder.isprintable():
                remedy = "give a folder whose name is plain text"
                raise StoreFolderError("index store", expected="a printable path", found=repr(folder), remedy=remedy)
        check_apart(tier.folder for tier in self._tiers)
        self.store.open()
        self.sync()

    def close(self) -> None:
        self._reservations.close()
        self.store.close()

    # ---- for the loop ----

    def locate_now(self, digest: str, skip: int, *, touch: bool) -> int | None:
        """The tier to open, where that takes no more than a look at the files; None: ask ``do``."""
        entry = self.log.get(digest)
        if entry is None or has_expired(entry.retention, time.time()):
            return None
        signature = self.slow.see(digest, use=touch)
        if signature is None:
            return None
        last = len(self._tiers) - 1
        if self.fast is not None and not skip & 1:
            if self._copies.get(digest) == signature and self.fast.see(digest, use=touch) is not None:
                self._hits[0] += 1
                return 0
            self._copies.pop(digest, None)
            if self.fast.see(digest) is not None:
                return None  # is it of this version? That takes reading both headers
            if touch:
                self._want(digest)
        self._hits[last] += 1
        return last

    # ---- for the workers ----

    def do(self, request: Request) -> Answer:
        """Anything that may take a disk's time. Raises what the store raises."""
        match request:
            case Ping():
                return Done()
            case Locate():
                return Located(tier=self._locate(request.digest, touch=request.touch))
            case Reserve():
                return self._reserve(request)
            case Commit():
                return self._commit(request)
            case Release():
                self._reservations.drop(request.partial)
                return Done()
            case Delete():
                deleted = self.store.delete(request.digest)
                self.log.remove(request.digest)
                return Done(value=deleted)
            case Retain():
                entry = self.store.retain(request.digest, request.retention)
                self.log.put(request.digest, entry)
                return Stored(entry=entry_out(entry))
            case Report():
                return Done(value=self._report(request))
            case Prefetch():
                self.store.prefetch(request.digest)
                return Done()
            case Collect():
                return self._collect(request)
            case Rescan():
                self.store.rescan(full=request.full)
                self.sync()
                return Done()
            case Problems():
                return problem_page(self.store.problems(), request.start)
            case Check():
                return self._check()
        raise unavailable(type(request).__name__, expected="a request for the store")

    def sync(self) -> None:
        """Makes the clients' listing that of the store, expired indexes included until they are removed."""
        with self._sync_lock:
            gone = None
            for _ in range(_SYNC_TRIES):
                seq = self.log.totals()[0]
                gone = self.log.become({_digest_in(entry): entry for entry in self.store.list()}, seq)
                if gone is not None:
                    break
        for digest in gone or ():
            self._copies.pop(digest, None)

    def tend(self, *, collect: bool) -> None:
        """What is due from time to time. Raises StoreFolderError while the folder is gone."""
        self._reservations.sweep()
        self._tend_fast()
        try:
            self.store.rescan()
            if collect:
                self._evicted += len(self.store.collect())
            self.sync()
            self._error = None
        except IndexStoreError as err:
            self._error = str(err)
            if not os.path.isdir(self.slow.folder):
                self.log.become({})
            raise

    def _tend_fast(self) -> None:
        """Makes the fast tier's folder again where somebody removed it. Its errors are told, and stop nobody."""
        if self.fast is None:
            return
        error = None
        try:
            if self.fast.come_back():
                self._copies.clear()
                self._wanted.clear()
                log.warning(
                    "%s: the fast tier's folder was gone, with all copies in it; it was made anew", self.folders[0]
                )
            self.fast.rescan()
        except IndexStoreError as err:
            error = str(err)
            if error != self._fast_error:
                log.warning("the fast tier cannot be used: %s", error)
        self._fast_error = error

    def _locate(self, digest: str, *, touch: bool) -> int:
        last = len(self._tiers) - 1
        if not touch:
            if self.store.contains(digest):
                return last
            raise IndexNotFound("index", expected=digest, found="none", remedy="build it")
        before = self.slow.see(digest)
        try:
            with self.store.get(digest) as index:
                tier = 0 if self.fast is not None and index.path == str(self.fast.path_of(digest)) else last
        except IndexStoreError:
            self.sync()
            raise
        if tier < last and before is not None and before == self.slow.see(digest):
            self._copies[digest] = before
        if self.log.get(digest) is None:
            self.sync()
        self._hits[tier] += 1
        return tier

    def _want(self, digest: str) -> None:
        """A copy in the fast tier, please; asked for now and then only, since it may not fit."""
        now = time.monotonic()
        if now >= self._wanted.get(digest, 0.0):
            if len(self._wanted) >= _MAX_WANTED:
                self._wanted.clear()
            self._wanted[digest] = now + _WANT_AGAIN_S
            self.store.prefetch(digest)

    def _reserve(self, request: Reserve) -> Reserved:
        reservation = self._reservations.make(request.digest, request.nbytes)
        if self.slow.evicts:
            self._sync_evicted()
        return Reserved(partial=reservation.name, file_mode=self.slow.file_mode)

    def _commit(self, request: Commit) -> Stored:
        entry = self.slow.adopt(request.digest, request.partial, request.nbytes, request.inode, request.retention)
        self._reservations.drop(request.partial)
        self.log.put(request.digest, entry)
        if self.fast is not None and not has_expired(entry.retention, time.time()):
            self.store.prefetch(request.digest)
        return Stored(entry=entry_out(entry))

    def _sync_evicted(self) -> None:
        before = self.log.totals()[1]
        self.sync()
        self._evicted += max(before - self.log.totals()[1], 0)

    def _report(self, request: Report) -> bool:
        """Whether another copy is offered, or this one still. Says nothing of the fast tier's own troubles."""
        if request.tier is not None and request.tier < len(self._tiers) - 1 and self.fast is not None:
            self._drop_copy(request.digest)
            return True
        if self.slow.see(request.digest) is None:
            return False  # there is nothing that could be damaged, and nothing to remember
        error = error_of(request.error)
        if error.path is not None or isinstance(error, IndexUnreadable):
            found = self._damage(request.digest)
            if found is None:
                return True
            if isinstance(found, (IndexUnreadable, IndexNotFound)):
                return False  # nobody knows; whoever reads it next will see
        self.slow.report(request.digest, error)
        self._drop_copy(request.digest)
        self.sync()
        return self.log.get(request.digest) is not None

    def _damage(self, digest: str) -> IndexStoreError | None:
        """What a full reading of the durable index finds: a client may have met an older version, or its own trouble.

        One at a time, so that there are workers left. Raises StoreUnavailable.
        """
        if not self._checking.acquire(timeout=_CHECK_WAIT_S):
            raise unavailable("another report that is being looked into", expected="a worker that checks an index")
        try:
            self.slow.check_whole(digest)
        except IndexStoreError as err:
            return err
        finally:
            self._checking.release()
        return None

    def _drop_copy(self, digest: str) -> None:
        self._copies.pop(digest, None)
        self._wanted.pop(digest, None)
        if self.fast is not None:
            with contextlib.suppress(IndexStoreError):
                self.fast.delete(digest)

    def _collect(self, request: Collect) -> Removed:
        with self._collecting:
            removed = self._collected.get(request.token)
            if removed is None and request.start:
                raise unavailable("a service that was restarted", expected="the one that collected")
            if removed is None:
                removed = list(self.store.collect())
                self._evicted += len(removed)
                self.sync()
                self._collected[request.token] = removed
                while len(self._collected) > _MAX_COLLECTED:
                    del self._collected[next(iter(self._collected))]
        return removed_page(removed, request.start)

    def _check(self) -> Checked:
        self._tend_fast()  # that its folder was removed a moment ago is no defect of the books
        self._check_store()
        for _ in range(_SYNC_TRIES):
            self.sync()
            seq, count, nbytes = self.log.totals()
            held, listed = self.log.entries().keys(), {_digest_in(entry) for entry in self.store.list()}
            if held == listed:
                return Checked(seq=seq, count=count, nbytes=nbytes)
            if seq == self.log.totals()[0]:
                break
        raise inconsistent("listing of the service", sorted(listed), sorted(held))

    def _check_store(self) -> None:
        """Books are compared with files while clients write: only what does not go away is a defect."""
        for _ in range(_SYNC_TRIES):
            try:
                self.store.check_integrity()
                return
            except StoreInconsistent:
                time.sleep(0.02)
        self.store.check_integrity()

    # ---- what is going on ----

    def status(self, *, endpoint: str, uptime_s: float, clients: list[str], counts: dict[str, int]) -> Status:
        tiers = []
        for tier, hits, name in zip(self._tiers, self._hits, self._names, strict=True):
            listed = tier.list()
            error = self._error if tier is self.slow else self._fast_error
            tiers.append(
                TierStatus(
                    name=name,
                    folder=str(tier.folder),
                    indexes=len(listed),
                    nbytes=sum(entry.nbytes for entry in listed),
                    max_bytes=tier.max_bytes,
                    hits=hits,
                    evicted=self._evicted if tier is self.slow else None,
                    error=None if error is None else printable(error)[:MAX_TEXT],
                )
            )
        reserved = self._reservations.sizes()
        return Status(
            pid=os.getpid(),
            epoch=self.log.epoch,
            uptime_s=uptime_s,
            endpoint=endpoint,
            tiers=tiers,
            indexes=self.log.totals()[1],
            problems=len(self.store.problems()),
            clients=clients,
            reserved_bytes=sum(reserved),
            reservations=len(reserved),
            leases=_leases(self.slow.folder)[:1000],
            promoted=self.store.counters.promotions if isinstance(self.store, TieredStore) else 0,
            counts=counts,
        )

    @property
    def _names(self) -> list[str]:
        return ["ssd"] if self.fast is None else ["dram", "ssd"]


def _digest_in(entry: IndexEntry) -> str:
    """From the file's name: computing the digest of an identity takes longer than all the rest of a listing."""
    return entry.path[-64 - len(SUFFIX) : -len(SUFFIX)] if entry.path else entry.digest


def _leases(folder: Path) -> list[str]:
    """Digests whose lease somebody holds, by the kernel's list of locks: trying a lock could take one away."""
    try:
        fields = Path("/proc/locks").read_text().split()  # of device and inode; lines of those who wait have one more
        locked = {field.split(":")[2] for field in fields if field.count(":") == 2}
        shards = [path for path in folder.iterdir() if is_shard(path.name)]
    except OSError:
        return []
    found = []
    for shard in shards:
        with contextlib.suppress(OSError), os.scandir(shard) as items:
            found += [i.name[len(LEASE) :] for i in items if i.name.startswith(LEASE) and str(i.inode()) in locked]
    return sorted(found)
