"""Calls into somebody else's client library that may hang: on threads of their own, none waited for too long.

A Mooncake client asks a dead machine for half a minute, and crashes the process when it is called after its end, or
inside a call when the process ends. So whoever waits gives up, the client is closed when the last call has come back,
and the process's end waits for that (as it does for all threads of ``concurrent.futures``).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from typing import Final, TypeVar

from ..errors import StoreUnavailable, out_of_memory

_T = TypeVar("_T")
_MAX_RUNNING: Final = 16
_PARALLEL: Final = 4


class Calls:
    """Runs calls with a deadline each. ``what`` names the store in messages; times are seconds.

    A call that overran goes on in its thread, which keeps alive what the call refers to. At most 16 can be under way.
    """

    def __init__(self, what: str, *, timeout_s: float) -> None:
        self.what, self.timeout_s = what, timeout_s
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0
        self._opening = threading.Lock()
        self._closing: threading.Thread | None = None

    def run_all(self, calls: Iterable[Callable[[], _T]]) -> list[_T]:
        """All results in order, four calls at a time, each with the whole ``timeout_s``.

        After an error no further call begins; those under way are waited for, then it is raised: a call's own, or
        StoreUnavailable for one that does not end in time.
        """
        waiting: deque[tuple[Future[_T], float]] = deque()
        results: list[_T] = []
        pending = iter(calls)
        try:
            while True:
                while len(waiting) < _PARALLEL and (call := next(pending, None)) is not None:
                    waiting.append((self._start(call), time.monotonic() + self.timeout_s))
                if not waiting:
                    return results
                results.append(self._result(*waiting.popleft()))
        except Exception:
            for under_way in waiting:
                with contextlib.suppress(Exception):
                    self._result(*under_way)
            raise

    def _result(self, future: Future[_T], deadline: float) -> _T:
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except NotInTime as err:
            if future.done() and future.exception() is err:
                raise  # the call's own
            future.cancel()
            raise self._unavailable(f"an answer within {self.timeout_s:g} s", "none") from None

    def close(self, last: Callable[[], None]) -> None:
        """Runs ``last``, which must not raise, once no call is inside. Returns in time, if need be before."""
        with self._opening:
            pool, self._pool = self._pool, None
            self._closing = threading.Thread(target=_close, args=(pool, last), name=f"{self.what} end", daemon=True)
            self._closing.start()
        self._closing.join(self.timeout_s)

    def check_idle(self) -> None:
        """Raises StoreUnavailable while an earlier ``close`` is not through."""
        if self._closing is not None and self._closing.is_alive():
            raise self._unavailable("a client that is open or closed", "one that is being closed")

    def _start(self, call: Callable[[], _T]) -> Future[_T]:
        with self._opening:
            self.check_idle()
            if self._pool is None or self._pid != os.getpid():  # a forked child has none of its parent's threads
                self._pid = os.getpid()
                self._pool = ThreadPoolExecutor(_MAX_RUNNING, thread_name_prefix=f"{self.what} call")
            try:
                return self._pool.submit(call)
            except RuntimeError as err:  # the system's limit of threads
                raise out_of_memory(err, "a thread for the request") from err

    def _unavailable(self, expected: str, found: str) -> StoreUnavailable:
        return StoreUnavailable(self.what, expected, found, "check the store and the network, and ask again later")


def _close(pool: ThreadPoolExecutor | None, last: Callable[[], None]) -> None:
    if pool is not None:
        pool.shutdown()
    last()
