"""How long a client waits for its service: not every call may find out anew that nobody answers."""

from __future__ import annotations

import time
from typing import Final

from ..errors import StoreUnavailable
from .connection import ConnectionPool
from .messages import Answer, Changes, Ping, Prefetch, Request, Welcome, unavailable

_PROBE_S: Final = 0.25
_CONNECT_S: Final = 0.1
"""For finding a service that listens; longer only where there is nothing to do without it."""
_PROBE_EVERY_S: Final = 1.0
_ALL: Final = 0.9
"""Of a time limit: waiting ends a little early, by rounding."""
SLOW: Final = 3.0
"""What waits for a disk may take this many times as long as what does not, unless told otherwise."""


class Patience:
    """Calls with time limits, and what they taught: ``away`` when the last one was not answered.

    A service whose loop answers may still have no worker for a request that needs one: they wait for a disk. So
    after a call that came to its time limit, a worker is asked for a sign of life first, within ``_PROBE_S``; and
    where that fails, further such calls fail at once for ``_PROBE_EVERY_S``.
    """

    def __init__(self, timeout_s: float, slow_timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.slow_timeout_s = SLOW * timeout_s if slow_timeout_s is None else max(slow_timeout_s, timeout_s)
        self.away = False
        self._stuck = False
        self._stuck_until = 0.0
        self._probe_at = 0.0

    @property
    def rests(self) -> bool:
        """Away, and too early to try again."""
        return self.away and time.monotonic() < self._probe_at

    def call(self, pool: ConnectionPool, request: Request, *, slow: bool, patient: bool) -> tuple[Answer, Welcome]:
        """Raises StoreUnavailable, soon where nobody listens and it was so before, or if not ``patient``;
        StoreClosed.
        """
        work = not isinstance(request, (Ping, Changes, Prefetch))
        timeout_s = self.slow_timeout_s if slow else self.timeout_s
        try:
            if self.away or (work and self._stuck):
                self._probe(pool, work=work and self._stuck, patient=patient)
            began = time.monotonic()
            try:
                return pool.call(request, timeout_s, self.timeout_s if patient else _CONNECT_S)
            except StoreUnavailable:
                self._stuck |= work and time.monotonic() - began >= _ALL * timeout_s
                raise
        except StoreUnavailable:
            self.away, self._probe_at = True, time.monotonic() + _PROBE_EVERY_S
            raise

    def _probe(self, pool: ConnectionPool, *, work: bool, patient: bool) -> None:
        if work and time.monotonic() < self._stuck_until:
            raise unavailable("none to the last one that took a worker: asked again within a second")
        began = time.monotonic()
        limit = min(_PROBE_S, self.timeout_s)
        try:
            pool.call(Ping(work=work), limit, _PROBE_S if patient else _CONNECT_S)
        except StoreUnavailable:
            if work and time.monotonic() - began >= _ALL * limit:
                self._stuck_until = time.monotonic() + _PROBE_EVERY_S
            raise
        self.away = False
        self._stuck_until = 0.0
        if work:
            self._stuck = False
