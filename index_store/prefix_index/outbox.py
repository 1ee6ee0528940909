"""Changes on their way to a store that may be away: the last one of each index, sent in the background, tried again.

Knows nothing of stores: ``SharedStore`` says how a change is sent.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from .errors import IndexStoreError
from .prefetch import Cancelled, Check, Promoter
from .store import Retention

MAX_CHANGES: Final = 10_000
FIRST_RETRY_S: Final = 1.0
_LAST_RETRY_S: Final = 60.0
_DEFAULT: Final = Retention()


class ChangeKind(Enum):
    PUBLISH = "publish"
    RETAIN = "retain"
    DELETE = "delete"
    REPORT = "report"


@dataclass(eq=False)
class Change:
    """What is to happen to one index. ``existed`` is what a deletion found, once it is ``done``."""

    digest: str
    kind: ChangeKind
    retention: Retention = _DEFAULT
    error: IndexStoreError | None = None
    existed: bool = False
    done: bool = False
    tries: int = 0
    not_before: float = 0.0


Send: TypeAlias = Callable[[Change, Check], None]


class Outbox:
    """At most one change per digest, the newest. ``send`` runs on one thread; when it raises, the change stays and
    is due again after a pause that grows from 1 to 60 s; somebody must call ``resend`` then.

    ``on_failure`` is called after each attempt that failed, ``on_drop`` for a change given up because there are more
    than MAX_CHANGES. Changes outlive ``close``; the next ``open`` goes on with them.
    """

    def __init__(self, send: Send, *, on_failure: Callable[[], None], on_drop: Callable[[], None]) -> None:
        self._send, self._on_failure, self._on_drop = send, on_failure, on_drop
        self._changed = threading.Condition()
        self._changes: dict[str, Change] = {}
        self._current: str | None = None
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._promoter = Promoter(self._drain)

    def open(self) -> None:
        self._promoter = Promoter(self._drain)

    def close(self, timeout_s: float) -> None:
        """Gives up what is under way; waits up to ``timeout_s`` seconds for it to stop."""
        self._promoter.close(timeout_s)

    def __contains__(self, digest: str) -> bool:
        return digest in self._changes

    def __len__(self) -> int:
        return len(self._changes)

    def post(self, change: Change) -> Change:
        """Replaces the change of this digest, if there is one, and sends it soon. Never blocks for long.

        Retention of an index whose publication is still to come becomes that publication's.
        """
        with self._changed:
            before = self._changes.pop(change.digest, None)
            if before is not None and (before.kind, change.kind) == (ChangeKind.PUBLISH, ChangeKind.RETAIN):
                change.kind = ChangeKind.PUBLISH
            while len(self._changes) >= MAX_CHANGES:
                del self._changes[next(iter(self._changes))]
                self._on_drop()
            self._changes[change.digest] = change
        self._kick()
        return change

    def withdraw(self, digest: str) -> bool:
        """Forgets the change of this digest. Returns whether one is just being sent: that one goes on."""
        with self._changed:
            self._changes.pop(digest, None)
            self._changed.notify_all()
            return self._current == digest

    def resend(self) -> None:
        """Sends what is due again."""
        with self._changed:
            due = self._next() is not None
        if due:
            self._kick()

    def wait(self, change: Change, timeout_s: float) -> bool:
        """Whether it was sent. Waits for at most ``timeout_s`` seconds, or until an attempt failed."""
        with self._changed:
            self._changed.wait_for(lambda: change.done or change.tries or self._is_replaced(change), timeout_s)
        return change.done

    def flush(self, timeout_s: float) -> bool:
        """Sends all that is due, for at most ``timeout_s`` seconds. Returns whether nothing is left."""
        with self._changed:
            self._changed.wait_for(self._is_settled, timeout_s)
            return not self._changes and self._current is None

    @contextlib.contextmanager
    def paused(self, timeout_s: float) -> Iterator[bool]:
        """Nothing is sent in this block, if that could be had within ``timeout_s`` seconds (else False)."""
        paused = self._sending.acquire(timeout=timeout_s)
        try:
            yield paused
        finally:
            if paused:
                self._sending.release()

    def _is_settled(self) -> bool:
        """Nothing is sent, and nothing due; what is, also what came due since it was tried, is sent soon."""
        if self._current is not None:
            return False
        if self._next() is None:
            return True
        self._kick()
        return False

    def _is_replaced(self, change: Change) -> bool:
        return self._changes.get(change.digest) is not change

    def _kick(self) -> None:
        # A key of its own: the job of an earlier one may have seen the last change and not be over yet.
        self._promoter.request(str(next(self._numbers)))

    def _next(self) -> Change | None:
        """What is due, small changes before whole indexes."""
        now = time.monotonic()
        due = [change for change in self._changes.values() if change.not_before <= now]
        return min(due, key=lambda change: change.kind is ChangeKind.PUBLISH, default=None)

    def _drain(self, _: str, check: Check) -> None:
        while True:
            with self._sending:
                check()
                with self._changed:
                    change = self._next()
                    if change is None:
                        return
                    self._current = change.digest
                try:
                    self._try(change, check)
                finally:
                    with self._changed:
                        self._current = None
                        self._changed.notify_all()

    def _try(self, change: Change, check: Check) -> None:
        try:
            self._send(change, check)
        except Cancelled:
            raise
        except Exception:  # whatever it is, it is the other store's: the change stays, and is tried again
            with self._changed:
                change.tries += 1
                pause = min(_LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(change.tries - 1, 10))
                change.not_before = time.monotonic() + pause
            self._on_failure()
        else:
            with self._changed:
                change.done = True
                if not self._is_replaced(change):
                    del self._changes[change.digest]
