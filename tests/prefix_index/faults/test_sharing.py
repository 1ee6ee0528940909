"""Several processes in one folder: eight that do everything, some that are killed, and many who want one lease."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from prefix_index import FileStore, IndexFile, IndexNotFound, IndexWriter, Retention, StoreUnavailable
from prefix_index.service import StoreClient
from tests.examples import examples
from tests.prefix_index.samples import SMALL, fill_of, identity_of, payload_of, read_fill
from tests.prefix_index.small_stores import SOON, Line, balanced, fork, opened, reap, stored_files
from tests.prefix_index.tiers import Service

PROCESSES = 8
KEPT, CHANGING = 4, 24
"""Keys 0..KEPT-1 are replaced but never deleted; the others come and go."""
LARGE = 8 * SMALL
CAP = 12 * IndexWriter(payload_of(0, 0, LARGE)).nbytes
"""Bytes: room for what is pinned and a file of each writer; less than half of what all indexes take together."""


class Hammer:
    """One of many on ``store``: everything a store can do, at random. Raises on anything wrong."""

    def __init__(self, store: FileStore, seed: int) -> None:
        self.store, self.rng, self.seed = store, random.Random(seed), seed
        self.held: list[tuple[IndexFile, int]] = []
        self.hits = 0

    def run(self, stop: Path) -> None:
        """Until that file is there."""
        while True:
            with contextlib.suppress(StoreUnavailable):
                self.store.open()
                break
        for step in itertools.takewhile(lambda _: not stop.exists(), itertools.count()):
            began = time.monotonic()
            self.step(step, self.rng.randrange(KEPT + CHANGING))
            assert time.monotonic() - began < SOON
            if len(self.held) > 4 and self.rng.random() < 0.2:
                self.read_held()
        while not self.hits:
            self.step(0, 0)
        while self.held:
            self.read_held()
        self.store.close()

    def read_held(self) -> None:
        """An index that was opened some steps ago, replaced, deleted or evicted since, gives what it gave then."""
        index, fill = self.held.pop(0)
        assert fill_of(index) == fill

    def step(self, step: int, number: int) -> None:
        store, rng, identity = self.store, self.rng, identity_of(number)
        match rng.randrange(14):
            case 0 | 1 | 2:
                store.put(payload_of(number, self.seed % 100 * 100_000 + step, rng.choice((SMALL, LARGE))))
            case 3 if number >= KEPT:
                store.delete(identity)
            case 4:
                store.rescan(full=rng.random() < 0.1)
                assert [problem for problem in store.problems() if not problem.path.startswith("ipc:")] == []
            case 5:
                store.rescan()
                assert not {identity_of(n).digest for n in range(KEPT)} - {e.digest for e in store.list()}
            case 6:
                assert store.contains(identity) or number >= KEPT
            case 7:
                expires = time.time() + 1000 if number < KEPT else time.time() + rng.uniform(-0.1, 0.1)
                with contextlib.suppress(*self.absence(number)):
                    store.retain(identity, Retention(pinned=number < KEPT, expires=expires))
            case 8:
                assert not {e.digest for e in store.collect()} & {identity_of(n).digest for n in range(KEPT)}
            case 9:
                lease = store.lease(identity)
                if lease is not None:
                    lease.release()
            case 10 | 11:
                with contextlib.suppress(*self.absence(number)):
                    index = store.get(identity)
                    self.held.append((index, int(index.stats["fill"])))
            case _:
                with contextlib.suppress(*self.absence(number)):
                    read_fill(store, number)
                    self.hits += 1

    def absence(self, number: int) -> tuple[type[Exception], ...]:
        return () if number < KEPT else (IndexNotFound,)


def prepare(path: Path) -> None:
    with opened(path) as store:
        for number in range(KEPT):
            store.put(payload_of(number, 1), retention=Retention(pinned=True))


def check_after(path: Path, cap: int | None) -> None:
    """What must hold once everybody has left."""
    with opened(path, partial_grace_s=0.0, max_bytes=cap) as store:
        store.collect()
        balanced(store)
        assert list(store.problems()) == []
        listed = {entry.digest: entry.nbytes for entry in store.list()}
        for number in range(KEPT + CHANGING):
            if number < KEPT:
                read_fill(store, number)
            elif identity_of(number).digest in listed:
                with contextlib.suppress(IndexNotFound):  # its time may come just now
                    read_fill(store, number)
        assert cap is None or sum(listed.values()) <= cap
        assert [name for name in stored_files(path) if name.startswith(".")] == []


def test_every_few_milliseconds_one_is_killed_and_another_one_takes_its_place(tmp_path: Path) -> None:
    folder, stop, rng = tmp_path / "store", tmp_path / "stop", random.Random(7)
    prepare(folder)

    def start(seed: int) -> int:
        return fork(partial(Hammer(FileStore(folder, max_bytes=CAP), seed).run, stop))

    pids = [start(seed) for seed in range(PROCESSES)]
    for seed in range(examples(200, 60)):
        time.sleep(rng.uniform(0, 0.04))
        victim = pids.pop(rng.randrange(PROCESSES))
        os.kill(victim, signal.SIGKILL)
        assert reap(victim, SOON) == -signal.SIGKILL
        pids.append(start(seed + PROCESSES))
    time.sleep(0.5)
    stop.touch()
    assert [reap(pid, SOON) for pid in pids] == [0] * PROCESSES
    check_after(folder, CAP)


def test_a_service_is_killed_under_its_clients(tmp_path: Path) -> None:
    folder, stop, rng = tmp_path / "store", tmp_path / "stop", random.Random(7)
    with Service(tmp_path) as service:
        prepare(folder)
        clients = [Hammer(StoreClient(service.endpoint), seed) for seed in range(4)]
        pids = [fork(partial(client.run, stop)) for client in clients]
        for _ in range(examples(100, 16)):
            time.sleep(rng.choice((0.02, 0.1, 0.3)) * rng.random())
            service.kill()
            time.sleep(rng.choice((0.0, 0.0, 0.2)) * rng.random())
            assert service.start()
        time.sleep(0.5)
        stop.touch()
        assert [reap(pid, 2 * SOON) for pid in pids] == [0] * 4
        assert service.stop() == 0
        check_after(folder, None)
        service.start()


def hold(path: Path, line: Line, kind: str) -> None:
    """The victim. It holds a lease when it says so, and has a child that outlives it, or takes and gives for ever."""
    with opened(path) as store:
        if kind == "taking and releasing":
            line.say("held")
            while True:
                lease = store.lease(identity_of(0))
                if lease is not None:
                    lease.release()
        lease = store.lease(identity_of(0))
        assert lease is not None
        if kind == "with a forked child":
            line.say(f"child {fork(lambda: time.sleep(10 * SOON))}")
        elif kind == "with a subprocess":
            line.say(f"child {subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid}")
        line.say("held")
        time.sleep(10 * SOON)


@pytest.mark.parametrize("kind", ["alone", "with a forked child", "taking and releasing", "with a subprocess"])
def test_a_lease_is_its_holder_s_and_free_once_that_was_killed(tmp_path: Path, kind: str) -> None:
    rng = random.Random(kind)
    with opened(tmp_path, partial_grace_s=0.0) as store:
        for _ in range(examples(60, 6)):
            line = Line()
            pid = fork(partial(hold, tmp_path, line, kind))
            assert line.wait_for("held", SOON)
            store.collect()  # which clears away what the dead left
            if kind != "taking and releasing":
                assert store.lease(identity_of(0)) is None
            time.sleep(rng.uniform(0, 0.003))
            os.kill(pid, signal.SIGKILL)
            reap(pid, SOON)
            lease, deadline = store.lease(identity_of(0)), time.monotonic() + SOON
            while lease is None and kind == "with a forked child" and time.monotonic() < deadline:
                time.sleep(0.001)  # a child lets go as soon as it runs at all
                lease = store.lease(identity_of(0))
            assert lease is not None
            lease.release()
            for text in line.heard.decode().splitlines():
                if text.startswith("child "):  # it has the pipe's other end
                    os.kill(int(text.split()[1]), signal.SIGKILL)
            line.close()
        store.rescan(full=True)
        assert list(store.problems()) == []
        balanced(store)


def test_a_lease_that_eight_want_is_never_two_processes_and_each_gets_it(tmp_path: Path) -> None:
    """They clear away what the dead left meanwhile."""
    opened(tmp_path / "store").close()

    def want(seed: int) -> None:
        rng, held, deadline = random.Random(seed), 0, time.monotonic() + 5 * SOON
        with opened(tmp_path / "store", partial_grace_s=0.0) as store:
            while held < examples(500, 100):
                assert time.monotonic() < deadline, f"only {held} leases in time"
                if rng.random() < 0.05:
                    store.collect()
                lease = store.lease(identity_of(0))
                if lease is None:
                    time.sleep(rng.uniform(0, 0.001))
                    continue
                with lease:
                    os.close(os.open(tmp_path / "inside", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                    held += 1
                    if rng.random() < 0.1:
                        time.sleep(0.001)
                    (tmp_path / "inside").unlink()

    pids = [fork(partial(want, seed)) for seed in range(PROCESSES)]
    assert [reap(pid, 6 * SOON) for pid in pids] == [0] * PROCESSES
