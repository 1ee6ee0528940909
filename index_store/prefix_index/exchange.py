"""What goes between a local store and a remote one: indexes fetched, changes told. ``SharedStore`` says when."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from .copies import entry_of
from .errors import (
    IndexFormatError,
    IndexMismatch,
    IndexNotFound,
    IndexStoreError,
    IndexUnreadable,
    StoreUnavailable,
)
from .link import Link
from .outbox import Change, ChangeKind, Outbox
from .prefetch import Cancelled, Check, Promoter
from .store import IndexEntry, IndexStore, Retention
from .writer import IndexPayload, LazyArray

DAMAGE: Final = (IndexFormatError, IndexMismatch)
_FETCH_AGAIN_S: Final = 30.0
_STRIPES: Final = 256


class SharedCounters(NamedTuple):
    """Events since the store was made; they never decrease.

    ``hits_local``, ``hits_remote``  indexes that ``get`` served: local had it, or only remote did
    ``fetched``                      indexes copied from remote to local
    ``fetch_failures``               attempts at that which failed
    ``published``                    indexes copied from local to remote
    ``publish_failures``             attempts to tell remote of a change (of any kind) which failed
    ``dropped``                      background work given up because too much of it waited
    """

    hits_local: int = 0
    hits_remote: int = 0
    fetched: int = 0
    fetch_failures: int = 0
    published: int = 0
    publish_failures: int = 0
    dropped: int = 0


class Exchange:
    """Copies between ``local`` and ``remote``, on threads of its own between ``open`` and ``close``.

    What is newer in ``local`` wins: a change there ends a fetch of that index, and is in ``outbox`` until remote knows.
    """

    def __init__(self, local: IndexStore, remote: IndexStore) -> None:
        self.local, self.remote = local, remote
        self.link = Link(remote)
        self.outbox = Outbox(
            self._send, on_failure=partial(self.count, "publish_failures"), on_drop=partial(self.count, "dropped")
        )
        self.fetcher = self._new_fetcher()
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(SharedCounters._fields, 0)
        self._fetching: dict[str, bool] = {}
        self._no_fetch_before: dict[str, float] = {}
        self._stripes = tuple(threading.RLock() for _ in range(_STRIPES))

    @property
    def counters(self) -> SharedCounters:
        with self._lock:
            return SharedCounters(**self._counts)

    def count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def open(self) -> None:
        """Of remote: or why it cannot be used is in ``link.problem``."""
        self.link.open()
        self.fetcher = self._new_fetcher()
        self.outbox.open()

    def close(self, timeout_s: float) -> None:
        """Gives up what is under way; waits up to ``timeout_s`` seconds for it. Closes remote."""
        deadline = time.monotonic() + timeout_s
        self.outbox.close(timeout_s)
        self.fetcher.close(max(0.0, deadline - time.monotonic()))
        self.link.close()

    def wanted(self, digest: str) -> None:
        """Ends the while of ``due``."""
        self._no_fetch_before.pop(digest, None)

    def due(self, digest: str) -> bool:
        """False for a while after fetching failed: what does not fit is not downloaded again at each get."""
        return time.monotonic() >= self._no_fetch_before.get(digest, 0.0)

    def hides(self, digest: str) -> bool:
        """Whether remote's index is not to be served: it is about to change, or there is no remote."""
        return digest in self.outbox or not self.link.is_open

    def offered(self, digest: str) -> IndexEntry | None:
        return entry_of(self.link.known(self.remote.list, ()), digest)

    @contextlib.contextmanager
    def changing(self, digest: str) -> Iterator[None]:
        """One change of local's index at a time. A fetch of it that is under way gives up."""
        self.end_fetch(digest)
        with self._stripes[_stripe_of(digest)]:
            self.end_fetch(digest)
            yield

    def end_fetch(self, digest: str) -> None:
        """What is being fetched is outdated."""
        with self._lock:
            if digest in self._fetching:
                self._fetching[digest] = False

    def _fetch(self, digest: str, check: Check) -> None:
        """Copies remote's index to local, unless that has one. Raises where local has none afterwards, and where it
        has one that the system does not give us now: that is not damage, and not replaced.
        """
        if self._is_here(digest):
            self.local.prefetch(digest)
            return
        with self._lock:
            self._fetching[digest] = True
        try:
            if digest not in self.outbox:
                self._copy_here(digest, check)
                self.count("fetched")
                return
        except Cancelled:
            raise
        except Exception as err:
            if not isinstance(err, (IndexNotFound, StoreUnavailable)):
                # What does not fit, or is damaged, is not downloaded again at each get.
                self._no_fetch_before[digest] = time.monotonic() + _FETCH_AGAIN_S
            self.count("fetch_failures")
            raise
        finally:
            with self._lock:
                self._fetching.pop(digest, None)
        raise Cancelled

    def _is_here(self, digest: str) -> bool:
        """Raises IndexUnreadable."""
        if self.local.contains(digest):
            return True
        try:
            self.local.get(digest).close()
        except IndexUnreadable:
            raise
        except IndexStoreError:
            return False
        return True

    def _copy_here(self, digest: str, check: Check) -> None:
        def still_wanted() -> None:
            check()
            if not self._fetching.get(digest, False):
                raise Cancelled

        with self.link.ask(partial(self.remote.get, digest)) as source:
            entry = self.offered(digest)
            stripe = self._stripes[_stripe_of(digest)]
            if not stripe.acquire(blocking=False):
                raise Cancelled  # somebody changes the index, or one that shares its lock: never wait for them
            try:
                still_wanted()
                retention = Retention() if entry is None else entry.retention
                self.local.put(_checked(source.payload(), still_wanted), retention=retention)
            except DAMAGE as err:
                self.link.known(partial(self.remote.report, digest, err), None)
                raise
            finally:
                stripe.release()

    def _send(self, change: Change, check: Check) -> None:
        ask, digest = self.link.ask, change.digest
        if change.kind is ChangeKind.DELETE:
            change.existed = ask(partial(self.remote.delete, digest))
        elif change.kind is ChangeKind.RETAIN:
            with contextlib.suppress(IndexNotFound):
                ask(partial(self.remote.retain, digest, change.retention))
        elif change.kind is ChangeKind.REPORT and change.error is not None:
            self.remote.report(digest, change.error)
        else:
            self._send_index(change, check)

    def _send_index(self, change: Change, check: Check) -> None:
        ask, digest = self.link.ask, change.digest
        try:
            index = self.local.get(digest)
        except IndexNotFound:
            # Evicted, or expired already: then what remote has expires, too.
            with contextlib.suppress(IndexNotFound):
                ask(partial(self.remote.retain, digest, change.retention))
            return
        except DAMAGE:
            self.count("publish_failures")
            return
        with index:
            payload = _checked(index.payload(), check)
            try:
                ask(partial(self.remote.put, payload, retention=change.retention))
            except DAMAGE as err:
                self.local.report(digest, err)
                self.count("publish_failures")
                return
        self.count("published")

    def _new_fetcher(self) -> Promoter:
        return Promoter(self._fetch, on_drop=partial(self.count, "dropped"))


def _checked(payload: IndexPayload, check: Check) -> IndexPayload:
    """The same payload; ``check`` may stop it between two arrays."""

    def load(array: LazyArray) -> NDArray[Any]:
        check()
        return array.load()

    lazy = {key: array for key, array in payload.arrays.items() if isinstance(array, LazyArray)}
    arrays = {key: LazyArray(array.dtype, array.shape, partial(load, array)) for key, array in lazy.items()}
    return dataclasses.replace(payload, arrays={**payload.arrays, **arrays})


def _stripe_of(digest: str) -> int:
    return int(digest[:8], 16) % _STRIPES
