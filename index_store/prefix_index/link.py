"""The way to a store that may be away: what it knows, and what it has to be asked for."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias, TypeVar

from .background import Cancelled
from .errors import IndexStoreError, StoreUnavailable, out_of_memory
from .file import FileStore
from .reader import IndexLookup
from .remote import RemoteStore
from .store import BuildLease, digest_of

FIRST_AWAY_S: Final = 1.0
_LONGEST_AWAY_S: Final = 30.0
_LONGEST_BEHIND_S: Final = 60.0
_LOCAL: Final = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_T = TypeVar("_T")
Source: TypeAlias = FileStore | RemoteStore
"""What indexes are shared through: a store of somebody else's, or a folder on a file system that machines share."""


class Link:
    """The way to a store that may be away: asked again after a growing pause only, and never an unknown error."""

    def __init__(self, store: Source, here: FileStore) -> None:
        self.store = store
        self.deleted: set[str] = set()
        """Digests that it was not told yet to delete."""
        self._here = here
        store.catalog.hides = self.hides
        self._begin()

    def _begin(self) -> None:
        self.is_open = False
        self.is_behind = False
        """Whether it may lack what the folder has, or have what was deleted."""
        self.problem: IndexStoreError | None = None
        self.refusal: IndexStoreError | None = None
        """Why it could not be told something, since all was told last."""
        self._catch_ups = self._failures = 0
        self._due = self._resume = 0.0
        self._error: IndexStoreError | None = None

    def open(self) -> None:
        """Opens the store, or leaves why not in ``problem``. It may lack what the folder has."""
        self.is_behind = True
        if not self.is_away():
            self.look(self.store.open, opening=True)
            self.is_open = self.problem is None

    def close(self) -> None:
        self.is_open = False
        with contextlib.suppress(IndexStoreError):
            self.store.close()
        self.deleted.clear()
        self._begin()

    def hides(self, digest: str) -> bool:
        """Whether what it has of an index is not served here: it is to be deleted, or has expired in the folder."""
        return digest in self.deleted or self._here.catalog.is_expired(digest)  # opening a client renews it

    def lists(self, digest: str) -> bool:
        return self.is_open and digest in self.store.catalog and not self.hides(digest)

    def is_due(self) -> bool:
        """Whether it is to be told now what it was not told yet."""
        return self.is_behind and self.is_open and not self.is_away() and time.monotonic() >= self._due

    def caught_up(self) -> None:
        """It was told all that it was not told yet; what failed is tried again behind a growing pause."""
        self._catch_ups = self._catch_ups + 1 if self.is_behind else 0
        pause = min(_LONGEST_BEHIND_S, FIRST_AWAY_S * 2 ** min(self._catch_ups, 10)) if self.is_behind else 0.0
        self._due = time.monotonic() + pause

    def is_away(self) -> bool:
        return time.monotonic() < self._resume

    def look(self, call: Callable[[], object], *, opening: bool = False) -> None:
        """Asks; what goes wrong is the ``problem`` until the next look."""
        try:
            self.ask(call, opening=opening)
            self.problem = None
        except IndexStoreError as err:
            self.problem = err.bare()

    def ask(self, call: Callable[[], _T], *, opening: bool = False) -> _T:
        """The call's result or IndexStoreError; OutOfMemory of this process; StoreUnavailable for all else."""
        if not (self.is_open or opening) or self.is_away():
            raise (
                self._error.bare() if self._error else unavailable(str(self.problem or "one that could not be opened"))
            )
        try:
            value = call()
        except StoreUnavailable as err:
            self._went_away(err)
            raise
        except (IndexStoreError, Cancelled):
            raise
        except Exception as err:
            if isinstance(err, MemoryError) or getattr(err, "errno", None) in _LOCAL:
                raise out_of_memory(err, "an answer") from err  # the store may be well
            away = unavailable(f"{type(err).__name__}: {err}"[:200])
            self._went_away(away)
            raise away from err
        self._failures = 0
        return value

    def contains(self, digest: str) -> bool:
        """False, too, where it cannot be asked, or what it has is not served here."""
        if self.hides(digest):
            return False
        with contextlib.suppress(IndexStoreError):
            return self.ask(partial(self.store.contains, digest))
        return False

    def lease(self, key: IndexLookup) -> BuildLease | None:
        """The store's; where it cannot be asked, one of nothing."""
        try:
            return self.ask(partial(self.store.lease, key))
        except IndexStoreError:
            return BuildLease(digest_of(key))

    def known(self, call: Callable[[], Sequence[_T]]) -> Sequence[_T]:
        """What the store knows without asking anybody."""
        if self.is_open:
            with contextlib.suppress(IndexStoreError):
                return call()
        return ()

    def _went_away(self, error: StoreUnavailable) -> None:
        self._error = error.bare()
        self._resume = time.monotonic() + min(_LONGEST_AWAY_S, FIRST_AWAY_S * 2 ** min(self._failures, 10))
        self._failures += 1


def unavailable(found: str, *, expected: str = "an answer") -> StoreUnavailable:
    remedy = "look at the remote store; what is in the folder is served meanwhile"
    return StoreUnavailable("remote store", expected, found, remedy)
