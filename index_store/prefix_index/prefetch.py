"""Work per index in the background: one job per digest, a few threads, a short queue, and an end that comes in time.

Knows nothing of stores: ``FileStore`` gives it the copying to do, ``SharedStore`` what goes over the network. A forked
child begins without jobs and without threads.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, TypeAlias

from .errors import InvalidPayload

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
        self.digest = digest
        self.urgent = urgent
        self.value: object = None
        self.error: Exception | None = None
        self._ended = threading.Event()
        self._done = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it was done. Waits at most ``timeout_s`` seconds (None: until it ends, is dropped, or its store is
        closed).
        """
        return self._ended.wait(timeout_s) and self._done

    def end(self, *, done: bool) -> None:
        """Lets the waiting go on. The first call counts."""
        if not self._ended.is_set():
            self._done = done
            self._ended.set()

    def give_up(self) -> None:
        """``end(done=False)`` where another thread, which is no more, may hold the event's lock."""
        self._ended, self._done = threading.Event(), False
        self._ended.set()


class Promoter:
    """Runs ``work(digest, check)`` on up to ``workers`` threads; a job that raises has failed.

    At most ``MAX_PENDING`` requests wait: the oldest that is not urgent makes room for a new one (``on_drop`` is
    called, which must not block). Threads start with the first request and end after some idle seconds, so a forgotten
    promoter keeps nothing alive.
    They are daemons: a tier that never answers must not keep the process from ending. Since a daemon that wakes up
    in a dying interpreter may crash it, ``close()`` (and at the latest the exit of the interpreter) asks them to
    stop and waits a bounded time.
    """

    def __init__(
        self, work: Callable[[str, Check], object], *, workers: int = 1, on_drop: Callable[[], None] = lambda: None
    ) -> None:
        if workers < 1:
            raise InvalidPayload("workers", "1 or more", str(workers), "correct it")
        self._work = work
        self._on_drop = on_drop
        self._workers = workers
        self._changed = threading.Condition()
        self._pending: dict[str, Promotion] = {}
        self._running: dict[str, Promotion] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = False
        _living.add(self)

    def settle(self, timeout_s: float) -> bool:
        """Waits up to ``timeout_s`` seconds until no job waits or runs. Returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending and not self._running, timeout_s)

    def request(self, digest: str, *, urgent: bool = False) -> Promotion:
        """The job of this digest, a new one where there is none. Never blocks. ``urgent``: somebody waits for it,
        so it goes before the others.
        """
        with self._changed:
            job = self._running.get(digest) or self._pending.get(digest)
            if job is not None:
                job.urgent = job.urgent or urgent
                return job
            job = Promotion(digest, urgent=urgent)
            if self._closed:
                job.end(done=False)
                return job
            if len(self._pending) >= MAX_PENDING:
                self._drop(next((j for j in self._pending.values() if not j.urgent), None))
            self._pending[digest] = job
            self._start_thread()
            self._changed.notify()
            return job

    def close(self, timeout_s: float) -> bool:
        """Cancels everything, lets all that wait go on, and joins the threads for ``timeout_s`` seconds.

        Returns whether they ended. One that did not is stuck in a tier; it stops at its next ``check``.
        """
        with self._changed:
            self._closed = True
            jobs = (*self._pending.values(), *self._running.values())
            self._pending.clear()
            threads = self._threads - {threading.current_thread()}
            self._changed.notify_all()
        for job in jobs:
            job.end(done=False)
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        _living.discard(self)
        return not any(thread.is_alive() for thread in threads)

    def begin_again(self) -> None:
        """In a forked child: threads and locks are the parent's, and so are the jobs. Nothing of theirs comes here."""
        jobs = (*self._pending.values(), *self._running.values())
        self._changed = threading.Condition()
        self._pending, self._running, self._threads = {}, {}, set()
        for job in jobs:
            job.give_up()

    def _drop(self, job: Promotion | None) -> None:
        job = job or next(iter(self._pending.values()))
        del self._pending[job.digest]
        job.end(done=False)
        self._on_drop()

    def _start_thread(self) -> None:
        self._threads = {thread for thread in self._threads if thread.is_alive()}
        if len(self._threads) >= self._workers:
            return
        thread = threading.Thread(target=self._run, name="prefix_index-promoter", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: the system's limit, or the interpreter is ending
            if not self._threads:
                while self._pending:
                    self._drop(None)
            return
        self._threads.add(thread)

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
                    self._running.pop(job.digest, None)
                    self._changed.notify_all()
                job.end(done=done)
            del job

    def _take(self) -> Promotion | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._pending or self._closed, _IDLE_S) or self._closed:
                self._threads.discard(threading.current_thread())
                return None
            waiting = self._pending.values()
            job = next((j for j in waiting if j.urgent), None) or next(iter(waiting))
            del self._pending[job.digest]
            self._running[job.digest] = job
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
