"""A store that lives in another process of this host: the same protocol, and no call waits for ever."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from ..errors import IndexNotFound, IndexStoreError, IndexUnreadable, StoreClosed, StoreUnavailable
from ..folder import Access, os_errors
from ..keys import PAGE_TOKENS, IndexIdentity, ModelFingerprint
from ..lease import FolderLeases
from ..opening import open_in, path_in
from ..reader import IndexFile
from ..store import BuildLease, IndexEntry, IndexLookup, Problem, Retention, digest_of
from ..writer import IndexPayload, IndexWriter
from .connection import ConnectionPool, closed_error
from .endpoint import socket_path
from .messages import (
    PROTOCOL,
    Answer,
    Check,
    Checked,
    Collect,
    Commit,
    Delete,
    Delta,
    Done,
    Failed,
    GetStatus,
    Hello,
    Locate,
    Located,
    Prefetch,
    ProblemPage,
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
    Welcome,
    error_of,
    error_text,
    unavailable,
)
from .mirror import Mirror
from .patience import Patience
from .writing import SweptError, written_partial

_TRIES: Final = 4
_Answer = TypeVar("_Answer", bound=Answer)


class _Tiers(NamedTuple):
    """The folders that the service announced, fastest first; the last one is where indexes are written."""

    folders: tuple[Path, ...]
    leases: FolderLeases


class StoreClient:
    """An ``IndexStore`` served by ``sglang-ext store serve`` at ``endpoint`` (ipc:///FOLDER/SOCKET).

    Look-ups and ``list`` use a mirror of the service's listing and do no I/O; ``rescan()`` brings it up to date,
    and so does each change made through this client. ``get`` asks the service where the index lies and opens that
    file itself; bytes of indexes never cross the socket. While the service is away, ``get`` and ``contains`` of an
    index of the mirror look into the service's folders directly, which is safe since files are whole and checked;
    everything else raises StoreUnavailable.

    ``timeout_s`` bounds each answer, ``slow_timeout_s`` (None: three times ``timeout_s``) each that waits for a disk:
    those of put (two, and the writing between them is not bounded), delete, retain, report, collect, full rescan and
    check_integrity. After a call that was not answered in time the next ones fail sooner (``Patience``). The client
    finds a restarted service by itself. In a forked child it raises StoreClosed until ``open()`` is called there.
    """

    def __init__(
        self, endpoint: str, *, timeout_s: float = 2.0, slow_timeout_s: float | None = None, name: str = ""
    ) -> None:
        self.endpoint = endpoint
        socket_path(endpoint)
        self._timeouts = timeout_s, slow_timeout_s
        self._patience = Patience(timeout_s, slow_timeout_s)
        self._name = name[:64]
        self._mirror = self._new_mirror()
        self._pool: ConnectionPool | None = None
        self._pid = -1
        self._tiers = _Tiers((), FolderLeases(Path(), Access()))

    def open(self) -> None:
        """Says hello and fetches the listing. Raises StoreUnavailable, and, as every call that asks the service,
        StoreFolderError where another user could answer in its place (``check_place``).
        """
        if self._pool is not None and self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._pool = ConnectionPool(self.endpoint, Hello(version=PROTOCOL, pid=self._pid, name=self._name))
        self._patience = Patience(*self._timeouts)
        self._mirror = self._new_mirror()
        try:
            self._mirror.update()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.close()
        self._mirror = self._new_mirror()

    def __enter__(self) -> StoreClient:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- reading ----

    def get(self, key: IndexLookup) -> IndexFile:
        digest = digest_of(key)
        expected = key if isinstance(key, IndexIdentity) else None
        self._check_open()
        known = self._mirror.knows(digest)
        if known and self._patience.rests:
            return self._get_unasked(digest, expected)
        skip = 0
        for _ in range(_TRIES):
            try:
                tier = self._ask(Locate(digest=digest, skip=skip), Located, patient=not known).tier
            except StoreUnavailable as err:
                if not known:
                    raise
                return self._get_unasked(digest, expected, err)
            except IndexNotFound:
                self._mirror.forget(digest)
                raise
            last = tier >= len(self._tiers.folders) - 1
            try:
                return open_in(self._tiers.folders[tier], digest, expected)
            except IndexNotFound:
                # Evicted between the answer and now. The last tier is asked again: a new one may have come.
                skip |= 0 if last else 1 << tier
            except IndexUnreadable:  # this process's trouble or the disk's: it says nothing about the index
                if last:
                    raise
                skip |= 1 << tier
            except IndexStoreError as err:
                if not self._say_damaged(digest, err, tier):
                    self._mirror.forget(digest)
                    raise
                if skip >> tier & 1:
                    raise  # the service reads it well, again and again
                skip |= 1 << tier
        self._mirror.forget(digest)
        remedy = "ask again, or build it"
        raise IndexNotFound("index", expected=digest, found="files that went before they were opened", remedy=remedy)

    def get_durable(self, key: IndexLookup) -> IndexFile:
        """As ``get``, but always of the durable tier, never of a copy; it is no use of the index (for eviction, for
        copies in DRAM), and reports nothing. For whoever wants to know what the disk holds. Does not ask the service.
        """
        digest = digest_of(key)
        self._check_open()
        if self._mirror.expired(digest):
            raise IndexNotFound("index", expected="one in time", found="one that expired", remedy="build it again")
        expected = key if isinstance(key, IndexIdentity) else None
        return open_in(self._tiers.folders[-1], digest, expected)

    def contains(self, key: IndexLookup) -> bool:
        digest = digest_of(key)
        self._check_open()
        try:
            tier = self._ask(Locate(digest=digest, touch=False), Located).tier
            open_in(self._tiers.folders[tier], digest, None).close()
        except StoreUnavailable:
            if not self._mirror.knows(digest):
                raise
            with contextlib.suppress(IndexStoreError):
                self._get_unasked(digest, None).close()
                return True
            return False
        except IndexStoreError:
            return False
        return True

    def list(self) -> Sequence[IndexEntry]:
        self._check_open()
        with self._mirror.lock:
            return self._mirror.catalog.entries()

    def problems(self) -> Sequence[Problem]:
        """As the service has them. Raises StoreUnavailable."""
        self._check_open()
        found: list[Problem] = []
        start: int | None = 0
        while start is not None:
            page = self._ask(Problems(start=start), ProblemPage)
            found += [self._mirror.own(Problem(path, error_of(text))) for path, text in page.problems]
            start = page.next
        return tuple(found)

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
        with self._mirror.lock:
            return self._mirror.catalog.longest(namespace, page_hashes, model, profile_digest, page_tokens)

    def near_miss(
        self,
        namespace: str,
        page_hashes: Sequence[bytes],
        model: ModelFingerprint,
        profile_digest: str,
        *,
        page_tokens: int = PAGE_TOKENS,
    ) -> str | None:
        self._check_open()
        with self._mirror.lock:
            return self._mirror.catalog.near_miss(namespace, page_hashes, model, profile_digest, page_tokens)

    # ---- writing ----

    def put(self, payload: IndexPayload, *, retention: Retention | None = None) -> IndexEntry:
        """As in the protocol. The index is written by this process, into the service's folder, and named by the
        service. After StoreUnavailable it may be there or not, as after any lost acknowledgement.
        """
        self._check_open()
        writer = IndexWriter.of(payload)
        digest = payload.identity.digest
        for attempt in range(_TRIES):
            try:
                stored = self._put_once(digest, writer, payload, retention)
                break
            except SweptError:
                if attempt == _TRIES - 1:
                    found = "its partial file removed each time"
                    raise unavailable(found, expected="the index that was written") from None
                writer = IndexWriter.of(payload)
        self._mirror.reported(digest, None)
        self._mirror.update_softly()
        return self._mirror.entry(stored.entry, digest)

    def delete(self, key: IndexLookup) -> bool:
        digest = digest_of(key)
        self._check_open()
        deleted = self._ask(Delete(digest=digest), Done, slow=True).value
        self._mirror.reported(digest, None)
        self._mirror.update_softly()
        return deleted

    def retain(self, key: IndexLookup, retention: Retention) -> IndexEntry:
        digest = digest_of(key)
        self._check_open()
        stored = self._ask(Retain(digest=digest, retention=retention), Stored, slow=True)
        self._mirror.update_softly()
        return self._mirror.entry(stored.entry, digest)

    def report(self, key: IndexLookup, error: IndexStoreError) -> None:
        """As in the protocol; where ``error.path`` is a copy in a faster tier, only that copy is dropped."""
        digest = digest_of(key)
        self._check_open()
        if not self._say_damaged(digest, error, self._tier_of(error.path)):
            self._mirror.reported(digest, error)
        self._mirror.update_softly()

    def lease(self, key: IndexLookup) -> BuildLease | None:
        """As in the protocol: among all processes that use the service's folder, and without asking the service.

        The kernel frees it when this process dies.
        """
        digest = digest_of(key)
        self._check_open()
        return self._tiers.leases.acquire(digest)

    def prefetch(self, key: IndexLookup) -> None:
        digest = digest_of(key)
        self._check_open()
        pool = self._pool
        if pool is not None:
            pool.tell(Prefetch(digest=digest))

    def collect(self) -> Sequence[IndexEntry]:
        """As in the protocol. Raises StoreUnavailable too where the service was restarted before it had told all."""
        self._check_open()
        token = secrets.token_hex(8)
        found: list[IndexEntry] = []
        start: int | None = 0
        while start is not None:
            page = self._ask(Collect(token=token, start=start), Removed, slow=True)
            found += [self._mirror.entry(entry, entry.identity.digest) for entry in page.entries]
            start = page.next
        self._mirror.update_softly()
        return tuple(found)

    def rescan(self, *, full: bool = False) -> None:
        """Fetches what changed in the service's listing since the last time; with ``full`` the service first reads
        all headers again. What other processes write into its folder the service finds by itself within seconds.
        """
        self._check_open()
        if full:
            self._ask(Rescan(full=True), Done, slow=True)
        self._mirror.update()

    def check_integrity(self) -> None:
        self._check_open()
        service = self._ask(Check(), Checked, slow=True)
        self._mirror.update()
        self._mirror.check_integrity(service)

    def status(self) -> Status:
        """The service as it is now. Raises StoreUnavailable."""
        self._check_open()
        return self._ask(GetStatus(), Status)

    # ---- what the above is made of ----

    def _new_mirror(self) -> Mirror:
        return Mirror(lambda request: self._ask(request, Delta), self._path_of, self._patience.slow_timeout_s)

    def _check_open(self) -> None:
        if self._pool is None:
            raise closed_error()
        if self._pid != os.getpid():
            found = f"one of process {self._pid}"
            remedy = "call open() first, in this process"
            raise StoreClosed("service store", expected="a client opened by this process", found=found, remedy=remedy)

    def _ask(self, request: Request, kind: type[_Answer], *, slow: bool = False, patient: bool = True) -> _Answer:
        """Raises as ``Patience.call``, and what the service's store raised."""
        pool = self._pool
        if pool is None:
            raise closed_error()
        answer, welcome = self._patience.call(pool, request, slow=slow, patient=patient)
        self._meet(welcome)
        if isinstance(answer, Failed):
            raise error_of(answer.error)
        if not isinstance(answer, kind):
            raise unavailable(type(answer).__name__, expected=f"the answer {kind.__name__}")
        return answer

    def _meet(self, welcome: Welcome) -> None:
        folders = tuple(Path(folder) for folder in welcome.folders)
        if folders != self._tiers.folders:
            self._tiers = _Tiers(folders, FolderLeases(folders[-1], Access.found(folders[-1])))

    def _put_once(self, digest: str, writer: IndexWriter, payload: IndexPayload, retention: Retention | None) -> Stored:
        reserved = self._ask(Reserve(digest=digest, nbytes=writer.nbytes), Reserved, slow=True)
        folder, partial = self._tiers.folders[-1], reserved.partial
        done = False
        try:
            with os_errors(folder), written_partial(folder, digest, partial, writer, payload) as inode:
                request = Commit(digest=digest, partial=partial, nbytes=writer.nbytes, inode=inode, retention=retention)
                try:
                    stored = self._ask(request, Stored, slow=True)
                except IndexNotFound:
                    raise SweptError from None
                done = True
                return stored
        finally:
            pool = self._pool
            if not done and pool is not None and self._pid == os.getpid():  # not in a child forked meanwhile
                pool.tell(Release(digest=digest, partial=partial))

    def _get_unasked(
        self, digest: str, expected: IndexIdentity | None, error: StoreUnavailable | None = None
    ) -> IndexFile:
        """Of the last tier, which is the truth: a copy in a faster one could be of an older index by now."""
        if not self._mirror.knows(digest):
            raise error or IndexNotFound("index", expected=digest, found="none", remedy="build it")
        return open_in(self._tiers.folders[-1], digest, expected)

    def _tier_of(self, path: str | None) -> int | None:
        for tier, folder in enumerate(self._tiers.folders):
            if path is not None and folder in Path(path).parents:
                return tier
        return None

    def _say_damaged(self, digest: str, error: IndexStoreError, tier: int | None) -> bool:
        """Whether the service offers another copy, or this one still, since it reads it well."""
        try:
            return self._ask(Report(digest=digest, error=error_text(error), tier=tier), Done, slow=True).value
        except StoreClosed:
            raise
        except IndexStoreError:
            return False

    def _path_of(self, digest: str) -> str:
        return str(path_in(self._tiers.folders[-1], digest))
