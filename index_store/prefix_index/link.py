"""The way to a store that may be away: what it knows, and what it has to be asked for."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable
from typing import Final, TypeVar

from .errors import IndexStoreError, StoreUnavailable, out_of_memory
from .prefetch import Cancelled
from .store import IndexStore

FIRST_AWAY_S: Final = 1.0
_LONGEST_AWAY_S: Final = 30.0
_LOCAL: Final = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_T = TypeVar("_T")


class Link:
    """The way to a store that may be away: asked again after a growing pause only, and never an unknown error."""

    def __init__(self, store: IndexStore) -> None:
        self.store = store
        self.is_open = False
        self.problem: IndexStoreError | None = None
        self._error: StoreUnavailable | None = None
        self._failures = 0
        self._resume = 0.0

    def open(self) -> None:
        """Opens the store, or leaves why not in ``problem``."""
        if self.is_away():
            return
        self.look(self.store.open, opening=True)
        self.is_open = self.problem is None

    def close(self) -> None:
        self.is_open = False
        with contextlib.suppress(IndexStoreError):
            self.store.close()
        self.problem = self._error = None
        self._failures, self._resume = 0, 0.0

    def is_away(self) -> bool:
        return time.monotonic() < self._resume

    def look(self, call: Callable[[], object], *, opening: bool = False) -> None:
        """Asks; what goes wrong is the ``problem`` until the next look."""
        try:
            self.ask(call, opening=opening)
            self.problem = None
        except IndexStoreError as err:
            self.problem = err

    def ask(self, call: Callable[[], _T], *, opening: bool = False) -> _T:
        """The call's result or its IndexStoreError; OutOfMemory where this process cannot ask; StoreUnavailable for
        everything else, and at once while away.
        """
        if not (self.is_open or opening) or self.is_away():
            raise self._error or self._unavailable(self.problem or "one that could not be opened")
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
            away = self._unavailable(f"{type(err).__name__}: {err}"[:200])
            self._went_away(away)
            raise away from err
        self._failures = 0
        return value

    def known(self, call: Callable[[], _T], default: _T) -> _T:
        """What the store knows without asking anybody."""
        if not self.is_open:
            return default
        try:
            return call()
        except IndexStoreError:
            return default

    def _went_away(self, error: StoreUnavailable) -> None:
        self._error = error
        self._resume = time.monotonic() + min(_LONGEST_AWAY_S, FIRST_AWAY_S * 2 ** min(self._failures, 10))
        self._failures += 1

    def _unavailable(self, found: object) -> StoreUnavailable:
        remedy = "look at the remote store; what is local is served meanwhile"
        return StoreUnavailable("remote store", expected="an answer", found=str(found), remedy=remedy)
