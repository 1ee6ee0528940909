"""Work per index in the background: one job per digest, one thread, a short queue, and an end that comes in time.

A forked child begins without jobs and without a thread.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from typing import Final, TypeAlias

Check: TypeAlias = Callable[[], None]
"""Raises Cancelled once nobody wants the work any more. A job calls it between its steps."""

MAX_PENDING: Final = 64
_IDLE_S: Final = 5.0
_EXIT_S: Final = 2.0


class Cancelled(Exception):  # noqa: N818 (says what is the matter, like the rest of this package)
    """The promoter was closed while the job ran."""


class Promotion:
    """One job. ``value`` is what its work returned, ``error`` what it raised, once it has ended."""

    def __init__(self, digest: str, *, urgent: bool) -> None:
        self.digest, self.urgent = digest, urgent
        self.value: object = None
        self.error: Exception | None = None
        self._ended = threading.Event()
        self._done = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it was done. Waits up to ``timeout_s`` seconds, until it ends, is dropped, or the store is closed."""
        return self._ended.wait(timeout_s) and self._done

    def end(self, *, done: bool) -> None:
        """Lets the waiting go on. The first call counts."""
        if not self._ended.is_set():
            self._done = done
            self._ended.set()


class Promoter:
    """Runs ``work(digest, check)`` on a thread of its own, one job after the other; a job that raises has failed.

    At most ``MAX_PENDING`` requests wait: the oldest that is not urgent makes room for a new one (``on_drop`` is
    called, which must not block). The thread ends after some idle seconds, so a forgotten promoter keeps nothing alive.
    It is a daemon, since a tier may never answer. A daemon that wakes up in a dying interpreter may crash it:
    ``close()``, or the interpreter's exit, asks it to stop and waits a bounded time.
    """

    def __init__(self, work: Callable[[str, Check], object], *, on_drop: Callable[[], None] = lambda: None) -> None:
        self._work, self._on_drop = work, on_drop
        self._changed = threading.Condition()
        self._pending: dict[str, Promotion] = {}
        self._running: Promotion | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        _living.add(self)

    def settle(self, timeout_s: float) -> bool:
        """Waits up to ``timeout_s`` seconds until no job waits or runs. Returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs(), timeout_s)

    def request(self, digest: str, *, urgent: bool = False) -> Promotion:
        """The job of this digest, if need be a new one. Never blocks. ``urgent``: it goes before the others."""
        with self._changed:
            for job in self._jobs():
                if job.digest == digest:
                    job.urgent = job.urgent or urgent
                    return job
            job = Promotion(digest, urgent=urgent)
            if self._closed:
                job.end(done=False)
                return job
            if len(self._pending) >= MAX_PENDING:
                self._drop_one()
            self._pending[digest] = job
            self._start_thread()
            self._changed.notify()
            return job

    def close(self, timeout_s: float) -> bool:
        """Cancels everything, lets all that wait go on, and joins the thread. Returns whether it ended in time."""
        with self._changed:
            self._closed = True
            jobs, thread = self._jobs(), self._thread
            self._pending.clear()
            self._changed.notify_all()
        for job in jobs:
            job.end(done=False)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        _living.discard(self)
        return thread is None or not thread.is_alive()

    def begin_again(self) -> None:
        """In a forked child: thread and lock are the parent's, and so are the jobs. Nothing of theirs comes here."""
        jobs = self._jobs()
        self._changed = threading.Condition()
        self._pending, self._running, self._thread = {}, None, None
        for job in jobs:
            job._ended = threading.Event()  # the other one's lock may be held by a thread that is no more
            job.end(done=False)

    def _jobs(self) -> list[Promotion]:
        return [*([] if self._running is None else [self._running]), *self._pending.values()]

    def _drop_one(self) -> None:
        waiting = self._pending.values()
        job = next((j for j in waiting if not j.urgent), None) or next(iter(waiting))
        del self._pending[job.digest]
        job.end(done=False)
        self._on_drop()

    def _start_thread(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        thread = threading.Thread(target=self._run, name="prefix_index-promoter", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # no more threads: the system's limit, or the interpreter is ending
            while self._pending:
                self._drop_one()

    def _run(self) -> None:
        while (job := self._take()) is not None:
            done = False
            try:
                job.value = self._work(job.digest, self._check)
                done = True
            except Exception as err:  # whose work it is has counted it
                job.error = err
            finally:
                with self._changed:
                    self._running = None
                    self._changed.notify_all()
                job.end(done=done)
            del job

    def _take(self) -> Promotion | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._pending or self._closed, _IDLE_S) or self._closed:
                self._thread = None
                return None
            waiting = self._pending.values()
            job = next((j for j in waiting if j.urgent), None) or next(iter(waiting))
            self._running = self._pending.pop(job.digest)
            return job

    def _check(self) -> None:
        if self._closed:
            raise Cancelled


_living: weakref.WeakSet[Promoter] = weakref.WeakSet()


def _close_all() -> None:
    for promoter in tuple(_living):
        promoter.close(_EXIT_S)


def _begin_again() -> None:
    for promoter in tuple(_living):
        promoter.begin_again()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_begin_again)
