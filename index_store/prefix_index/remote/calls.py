"""Calls into somebody else's client library that may hang: each on a thread of its own, none waited for too long.

A Mooncake client asks a dead machine for half a minute, and crashes the process when it is called after its end. So
whoever waits gives up, for ``backoff_s`` nobody asks again, and the client is closed when the last call has come back.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

from ..errors import OutOfMemory, StoreUnavailable, out_of_memory

_T = TypeVar("_T")
_MAX_RUNNING: Final = 16
_LONGEST_HANG_S: Final = 40.0


class _Job(Generic[_T]):
    def __init__(self, call: Callable[[], _T]) -> None:
        self.call: Callable[[], _T] | None = call
        self.begun = time.monotonic()
        self.done = threading.Event()
        self.value: _T | None = None
        self.error: BaseException | None = None


class Calls:
    """Runs calls with a deadline each. ``what`` names the store in messages; times are seconds.

    A call that overran goes on in its thread, which keeps alive what the call refers to. At most 16 can be under way.
    """

    def __init__(self, what: str, *, timeout_s: float, backoff_s: float, parallel: int = 4) -> None:
        self.what, self.timeout_s, self.backoff_s, self.parallel = what, timeout_s, backoff_s, parallel
        self._lock = threading.Condition()
        self._running = 0
        self._resume = 0.0
        self._last: Callable[[], None] | None = None
        _all.add(self)

    def run(self, call: Callable[[], _T]) -> _T:
        """The call's result or exception; StoreUnavailable when it does not come in time, and in the back-off then."""
        return self.run_all([call])[0]

    def run_all(self, calls: Iterable[Callable[[], _T]]) -> list[_T]:
        """All results in order, ``parallel`` calls at a time, each with the whole ``timeout_s``.

        After an error no further call begins; those under way are waited for, then it is raised.
        """
        waiting: deque[_Job[_T]] = deque()
        results: list[_T] = []
        error: BaseException | None = None
        pending = iter(calls)
        while True:
            while error is None and len(waiting) < self.parallel and (call := next(pending, None)) is not None:
                try:
                    waiting.append(self._start(call))
                except (StoreUnavailable, OutOfMemory) as err:
                    error = err
            if not waiting:
                break
            job = waiting.popleft()
            if not job.done.wait(max(0.0, job.begun + self.timeout_s - time.monotonic())):
                error = self._overrun()
            elif job.error is not None:
                error = error or job.error
            else:
                results.append(job.value)  # type: ignore[arg-type]
        if error is not None:
            raise error
        return results

    def close(self, last: Callable[[], None]) -> None:
        """Runs ``last``, which must not raise, once no call is inside. Returns within about twice the timeout."""
        with self._lock:
            self._lock.wait_for(lambda: self._running == 0, self.timeout_s)
            self._last = last
            if self._running:
                return
        job = self._spawn(_Job(self._run_last))
        job.done.wait(self.timeout_s)

    def wait(self, deadline: float) -> None:
        """Until no call is inside, at most until ``deadline`` by the monotonic clock."""
        with self._lock:
            self._lock.wait_for(lambda: self._running == 0, max(0.0, deadline - time.monotonic()))

    def check_idle(self) -> None:
        """Raises StoreUnavailable while an earlier ``close`` is not through."""
        if self._last is not None:
            raise self._unavailable("a client that is open or closed", "one that is being closed", self.backoff_s)

    def _start(self, call: Callable[[], _T]) -> _Job[_T]:
        left = self._resume - time.monotonic()
        if left > 0:
            raise self._unavailable(f"an answer within {self.timeout_s:g} s", "none at the last call", left)
        with self._lock:
            if not self._lock.wait_for(lambda: self._running < _MAX_RUNNING, self.timeout_s):
                raise self._overrun()
            self.check_idle()
            self._running += 1
        try:
            return self._spawn(_Job(call), counted=True)
        except RuntimeError as err:  # the system's limit of threads
            self._leave()
            raise out_of_memory(err, "a thread for the request") from err

    def _leave(self) -> bool:
        """A call has come back. Whether it was the last one before ``close``."""
        with self._lock:
            self._running -= 1
            self._lock.notify_all()
            return self._last is not None and self._running == 0

    def _spawn(self, job: _Job[_T], *, counted: bool = False) -> _Job[_T]:
        threading.Thread(target=self._work, args=(job, counted), name=f"{self.what} call", daemon=True).start()
        return job

    def _work(self, job: _Job[_T], counted: bool) -> None:
        call, job.call = job.call, None
        try:
            assert call is not None
            job.value = call()
        except BaseException as err:
            job.error = err
        del call
        if counted and self._leave():
            self._run_last()
        job.done.set()

    def _run_last(self) -> None:
        last = self._last
        try:
            if last is not None:
                last()
        finally:
            with self._lock:
                self._last = None

    def _overrun(self) -> StoreUnavailable:
        self._resume = time.monotonic() + self.backoff_s
        return self._unavailable(f"an answer within {self.timeout_s:g} s", "none", self.backoff_s)

    def _unavailable(self, expected: str, found: str, left: float) -> StoreUnavailable:
        remedy = f"check the store and the network; it is asked again in {left:.1f} s"
        return StoreUnavailable(self.what, expected, found, remedy)


_all: weakref.WeakSet[Calls] = weakref.WeakSet()


@atexit.register
def _wait_for_all() -> None:
    """A process that ends while Mooncake is inside a call crashes: its end waits for the call's, 30 s at most."""
    deadline = time.monotonic() + _LONGEST_HANG_S
    for calls in tuple(_all):
        calls.wait(deadline)
