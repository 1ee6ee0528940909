"""Background work of a store across a fork, and at the end of a process."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from prefix_index import FileStore, file, prefetch
from tests.prefix_index.faults.tools import fork, opened, reap
from tests.prefix_index.samples import sample_payload
from tests.prefix_index.small_stores import IDS, python


class SlowInParent(FileStore):
    """Copying from it begins, and does not end before ``go``; not so in a child."""

    parent = os.getpid()
    began, go = threading.Event(), threading.Event()

    def _bring(self, digest: str, check: prefetch.Check) -> None:
        if os.getpid() == self.parent and threading.current_thread().name.startswith("prefix_index-promoter"):
            self.began.set()
            assert self.go.wait(200)  # longer than the child may take
        super()._bring(digest, check)


def test_a_child_does_not_wait_for_its_parent_s_jobs(folder: Path) -> None:
    with opened(folder) as writer:
        writer.put(sample_payload(IDS[0]))
    slow = SlowInParent(folder)
    with slow as store:
        store.prefetch(IDS[0])
        assert slow.began.wait(60)
        job = store._prefetches.request(IDS[0].digest)

        def work() -> None:
            signal.alarm(60)
            assert not job.wait()
            store.prefetch(IDS[0])
            assert store._prefetches.settle(60)
            store.get(IDS[0]).close()
            store.close()

        assert reap(fork(work), 120) == 0
        slow.go.set()


def test_a_child_reads_ahead_and_queues_no_more_than_its_parent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(folder) as store:
        store.put(sample_payload(IDS[0]))
        store.prefetch(IDS[0])
        assert store._prefetches.settle(60)

        def work() -> None:
            done = threading.Event()
            real = file.read_ahead
            file.read_ahead = lambda fd: (done.set(), *real(fd))  # type: ignore[assignment, return-value]
            store.prefetch(IDS[0])
            assert done.wait(60)

        assert reap(fork(work), 120) == 0


def test_prefetches_are_one_a_digest_few_and_cancelled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, go = threading.Semaphore(0), threading.Event()
    begun: list[int] = []

    def slow(fd: int) -> object:
        begun.append(fd)
        steps.release()
        assert go.wait(60)
        yield 0
        begun.append(-1)

    monkeypatch.setattr(file, "read_ahead", slow)
    store = opened(folder)
    for identity in IDS[:2]:
        store.put(sample_payload(identity))
    for _ in range(1000):
        store.prefetch(IDS[0])
        store.prefetch(IDS[1])
    assert steps.acquire(timeout=60)  # else it may be dropped for those that follow
    for number in range(1000):
        store.prefetch(f"{number:064x}")
    assert len(store._prefetches._pending) <= prefetch.MAX_PENDING
    closing = threading.Thread(target=store.close)
    closing.start()
    until = time.monotonic() + 60
    while not store._prefetches._closed and time.monotonic() < until:
        time.sleep(0.01)
    go.set()  # not before: a job that goes on earlier is right to take its second step
    closing.join(60)
    assert not closing.is_alive()
    assert len(begun) == 1  # neither its second step nor another job


EXIT = """
import sys, time
import prefix_index.file as file
from tests.prefix_index.samples import sample_identity, sample_payload
def slow(fd):
    time.sleep(10)
    return iter(())
file.read_ahead = slow
store = file.FileStore(sys.argv[1], create=True)
store.open()
for i in range(60):
    store.prefetch(store.put(sample_payload(sample_identity(range(i, i + 32)))).digest)
"""


def test_a_process_with_prefetches_under_way_ends(folder: Path) -> None:
    """Without doing them all: that takes ten minutes, ten seconds each."""
    with python(EXIT, folder) as process:
        assert process.wait(300) == 0
