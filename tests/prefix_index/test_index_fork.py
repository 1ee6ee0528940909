"""Background work of a store across a fork, and at the end of a process."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from prefix_index import FileStore, background
from tests.prefix_index.samples import IDS, sample_payload
from tests.prefix_index.small_stores import fork, opened, python, reap
from tests.prefix_index.tiers import copies_in


class SlowInParent(FileStore):
    """Copying from it begins, and does not end before ``go``; not so in a child."""

    parent = os.getpid()
    began, go = threading.Event(), threading.Event()

    def _copy(self, digest: str, check: background.Check) -> None:
        if os.getpid() == self.parent and threading.current_thread().name.startswith("prefix_index-promoter"):
            self.began.set()
            assert self.go.wait(200)  # longer than the child may take
        super()._copy(digest, check)


def test_a_child_does_its_own_jobs_and_waits_for_none_of_its_parent_s(folder: Path) -> None:
    with opened(folder) as writer:
        writer.put(sample_payload(IDS[0]))
    slow = SlowInParent(folder, copies=copies_in(folder.parent / "dram"))
    with slow as store:
        store._copier.request(IDS[0].digest)
        assert slow.began.wait(60)
        job = store._copier.request(IDS[0].digest)

        def work() -> None:
            signal.alarm(60)
            assert not job.wait()
            store._copier.request(IDS[0].digest)
            assert store._copier.settle(60)
            with store.get(IDS[0]) as index:
                assert "/dram/" in str(index.path)
            store.close()

        assert reap(fork(work), 120) == 0
        slow.go.set()


def test_jobs_are_one_a_digest_few_and_cancelled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Semaphore(0), threading.Event()
    steps: list[str] = []

    def slow(self: FileStore, digest: str, check: background.Check) -> None:
        steps.append(digest)
        begun.release()
        assert go.wait(60)
        check()
        steps.append("second")

    monkeypatch.setattr(FileStore, "_copy", slow)
    store = opened(folder)
    for _ in range(1000):
        for identity in IDS[:2]:
            store._copier.request(identity.digest)
    assert begun.acquire(timeout=60)  # else it may be dropped for those that follow
    for number in range(1000):
        store._copier.request(f"{number:064x}")
    assert len(store._copier._pending) <= background.MAX_PENDING
    closing = threading.Thread(target=store.close)
    closing.start()
    until = time.monotonic() + 60
    while not store._copier._closed and time.monotonic() < until:
        time.sleep(0.01)
    go.set()  # not before: a job that goes on earlier is right to take its second step
    closing.join(60)
    assert not closing.is_alive()
    assert len(steps) == 1  # neither its second step nor another job


EXIT = """
import sys, time
from prefix_index import FileStore
FileStore._copy = lambda *_: time.sleep(10)
store = FileStore(sys.argv[1], create=True)
store.open()
for i in range(60):
    store._copier.request(f"{i:064x}")
"""


def test_a_process_with_jobs_under_way_ends(folder: Path) -> None:
    """Without doing them all: that takes ten minutes, ten seconds each."""
    with python(EXIT, folder) as process:
        assert process.wait(300) == 0
