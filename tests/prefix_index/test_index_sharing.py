"""Several processes in one folder: they keep one cap, and one that hangs or is killed harms nobody."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prefix_index import Retention
from prefix_index.testing import sample_identity, sample_payload
from tests.prefix_index.small_stores import IDS, ONE, opened


def test_a_store_that_somebody_keeps_locked_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefix_index.folder._EXCLUSIVE_WAIT_S", 0.05)
    with opened(folder, max_bytes=2 * ONE) as store:
        fd = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            for identity in IDS[:3]:
                store.put(sample_payload(identity))
            store.retain(IDS[2], Retention(expires=1.0))
            assert [e.identity for e in store.collect()] == [IDS[2]]
            assert len(store.list()) == 1
            store.check_integrity()
        finally:
            os.close(fd)


# Each index is written once: while one is replaced, the old and the new file are there, above the cap.
WRITER = """
import sys
from prefix_index import FileStore, IndexNotFound, folder
from prefix_index.testing import sample_identity, sample_payload
folder._EXCLUSIVE_WAIT_S = 120.0  # who gives up waiting may exceed the cap: here nobody does, however slow
with FileStore(sys.argv[1], max_bytes=int(sys.argv[3])) as store:
    for step in range(60):
        i = 1000 * int(sys.argv[2]) + step
        store.put(sample_payload(sample_identity(range(i, i + 32)), fill=i))
        for entry in store.list():
            try:
                with store.get(entry.digest) as index:
                    index.verify()
            except IndexNotFound:
                pass
        if step % 10 == 0:
            store.collect()
    assert not store.problems(), store.problems()
"""


def test_processes_keep_one_cap_together(folder: Path) -> None:
    cap = 5 * ONE + 100
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with opened(folder) as store:
        command = [sys.executable, "-c", WRITER, str(folder)]
        children = [subprocess.Popen([*command, str(i), str(cap)], env=env) for i in range(3)]
        most = 0
        fd = os.open(folder, os.O_RDONLY)
        running = True
        while running:
            running = any(child.poll() is None for child in children)  # so the last look is at what they leave
            fcntl.flock(fd, fcntl.LOCK_EX)  # so that nothing gets a name, or takes room, while files are counted
            sizes = 0
            for path in (*folder.rglob("*.pfxindex"), *folder.rglob(".partial-*")):
                with contextlib.suppress(FileNotFoundError):
                    sizes += path.stat().st_size
            fcntl.flock(fd, fcntl.LOCK_UN)
            most = max(most, sizes)
            time.sleep(0.03)
        os.close(fd)
        assert [child.wait() for child in children] == [0, 0, 0]
        store.rescan()
        assert store.used_bytes <= cap
        assert cap - ONE < most <= cap
        assert list(folder.rglob(".partial-*")) == []
        store.check_integrity()


KEEPER = """
import sys
from prefix_index import FileStore, Retention
from prefix_index.testing import sample_payload
with FileStore(sys.argv[1]) as store:
    print("ready", flush=True)
    fill = int(sys.argv[2])
    while True:
        store.put(sample_payload(fill=fill), retention=Retention(pinned=True, expires=5e9))
        store.retain(sample_payload().identity, Retention(expires=4e9))
        store.put(sample_payload(fill=fill + 1), retention=Retention())
        fill += 2
"""


def test_killed_at_random_moments_of_keeping(folder: Path) -> None:
    legal = {Retention(), Retention(expires=4e9), Retention(pinned=True, expires=5e9)}
    legal.add(Retention(pinned=True))  # the longer of two, of a put that was killed between two names
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    rng = random.Random(0)
    with opened(folder) as store:
        store.put(sample_payload(fill=1))
    for round_ in range(10):
        command = [sys.executable, "-c", KEEPER, str(folder), str(1000 * round_)]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0, 0.05))
            child.kill()
        with opened(folder, partial_grace_s=0.0) as store:
            assert list(store.problems()) == []
            assert {e.retention for e in store.list()} <= legal
            with store.get(sample_identity()) as index:
                index.verify()
            store.check_integrity()
            assert list(folder.rglob(".partial-*")) == []
