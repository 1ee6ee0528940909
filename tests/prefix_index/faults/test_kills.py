"""``kill -9`` at any moment of what a store does to its folder, and between any two changes of names of one put.

And several processes in one folder: eight that do everything, some that are killed, and many who want one lease.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefix_index import (
    FileStore,
    IndexFile,
    IndexNotFound,
    IndexPayload,
    IndexWriter,
    LazyArray,
    Retention,
    StoreUnavailable,
)
from prefix_index.service import StoreClient
from tests.examples import examples
from tests.prefix_index.samples import MEDIUM, SMALL, fill_of, identity_of, payload_of, read_fill
from tests.prefix_index.small_stores import SOON, Line, balanced, fork, opened, outlasts, reap, stored_files
from tests.prefix_index.tiers import Service

CAP = 5 * MEDIUM
"""Bytes: the pinned indexes always fit, the cached ones do not."""
PINNED, CACHED, DELETED = range(4), range(4, 60), range(60, 64)
LATEST_S = {
    "any": 0.06,
    "load": 0.003,
    "posix_fallocate": 0.002,
    "unlink": 0.002,
    "rename": 0.002,
    "fsync": 0.008,
    "utime": 0.002,
}
FAR = 4e9
Begun = tuple[tuple[str, int], int] | None


def announce(line: Line, phase: str) -> None:
    """In a child: says ``phase`` whenever the store enters that system call, and makes the real one a little later,
    so that a kill hits before it as often as after it.
    """
    real = getattr(os, phase)

    def call(*args: Any, **kwargs: Any) -> Any:
        line.say(f"at {phase}")
        time.sleep(random.uniform(0, 0.001))
        return real(*args, **kwargs)

    setattr(os, phase, call)


def loud(payload: IndexPayload, say: Callable[[], object]) -> IndexPayload:
    """Calls ``say`` whenever the writer asks for the next array, so that kills hit between two of them."""

    def load(array: Any) -> Any:
        say()
        return array

    arrays: Any = payload.arrays
    lazy = {key: LazyArray(array.dtype.name, array.shape, partial(load, array)) for key, array in arrays.items()}
    return replace(payload, arrays=lazy, dtypes={})


def housekeep(path: Path, line: Line, phase: str, seed: int, first_fill: int) -> None:
    """The victim: changes retentions, puts what evicts others, deletes, collects; tells before and after each."""
    rng = random.Random(seed)
    store = opened(path, max_bytes=CAP)
    if phase not in ("any", "load"):
        announce(line, phase)
    line.say("at any")
    for fill in itertools.count(first_fill):
        number, cached, deleted = (rng.choice(some) for some in (PINNED, CACHED, DELETED))
        match rng.randrange(6):
            case 0:
                line.say(f"begin retain {number} {fill}")
                store.retain(identity_of(number), Retention(pinned=True, expires=FAR + fill))
                line.say("done")
            case 1 | 2:
                payload = payload_of(number, fill, rng.choice((SMALL, MEDIUM)))
                line.say(f"begin put {number} {fill}")
                store.put(loud(payload, lambda: line.say("at load")) if phase == "load" else payload)
                line.say("done")
            case 3:
                store.put(payload_of(cached, fill, rng.choice((SMALL, MEDIUM // 4))))
            case 4:
                store.put(payload_of(deleted, fill), retention=Retention(expires=rng.choice((1.0, FAR))))
                store.delete(identity_of(deleted))
            case _:
                store.put(payload_of(cached, fill), retention=Retention(expires=time.time() - 1))
                store.collect()


@pytest.mark.parametrize("phase", LATEST_S)
def test_what_was_acknowledged_outlives_a_kill(tmp_path: Path, phase: str) -> None:
    """Pinned indexes are there, whole, with their last fill and retention; the cap holds, nothing is left over."""
    acked = {("put", number): 1 for number in PINNED} | {("retain", number): 0 for number in PINNED}
    with opened(tmp_path, max_bytes=CAP) as store:
        for number in PINNED:
            store.put(payload_of(number, 1), retention=Retention(pinned=True, expires=FAR))
    rng = random.Random(phase)
    for turn in range(examples(40, 5)):
        line = Line()
        pid = fork(partial(housekeep, tmp_path, line, phase, turn, 1000 * (turn + 1)))
        assert line.wait_for(f"at {phase}", SOON)
        if phase not in ("any", "load"):
            time.sleep(rng.randrange(12) / 1000)
        time.sleep(rng.choice((0.0, rng.uniform(0, LATEST_S[phase]))))
        os.kill(pid, signal.SIGKILL)
        assert reap(pid, SOON) == -signal.SIGKILL
        begun: Begun = None
        for text in line.close():
            word, *rest = text.split()
            if word == "begin":
                begun = (rest[0], int(rest[1])), int(rest[2])
            elif word == "done" and begun is not None:
                acked[begun[0]] = begun[1]
                begun = None
        check_after_kill(tmp_path, acked, begun)


def check_after_kill(path: Path, acked: dict[tuple[str, int], int], begun: Begun) -> None:
    """``acked`` is brought up to date: what was in flight may be done."""
    with opened(path, max_bytes=CAP, partial_grace_s=0.0) as store:
        assert list(store.problems()) == []
        listed = {entry.digest: entry.retention for entry in store.list()}
        for number in PINNED:
            kept = listed[identity_of(number).digest]
            assert kept.pinned
            found = {"put": read_fill(store, number), "retain": int((kept.expires or 0) - FAR)}
            for what, value in found.items():
                assert value == acked[what, number] or begun == ((what, number), value), (what, number, value, begun)
                acked[what, number] = value
        for number in (*CACHED, *DELETED):
            if identity_of(number).digest in listed:
                read_fill(store, number)
        store.collect()
        assert sum(entry.nbytes for entry in store.list()) <= CAP
        for number in DELETED:
            store.delete(identity_of(number))
            assert store.put(payload_of(number, 5)).retention == Retention(), "that of a deleted one"
            assert store.contains(identity_of(number))
            store.delete(identity_of(number))
        balanced(store)
        assert [name for name in stored_files(path) if name.startswith(".")] == []


# Index and retention are two files, so two names.

RETENTIONS = (
    Retention(pinned=True, name="tools"),
    Retention(),
    Retention(expires=FAR),
    Retention(expires=FAR + 100),
    Retention(pinned=True, expires=FAR),
    Retention(expires=1.0),
)


def put_and_die(path: Path, step: int, payload: IndexPayload, retention: Retention | None) -> bool:
    """Puts in a child that is killed just before its change of a name number ``step``; whether it came that far."""

    def work() -> None:
        store = FileStore(path)
        store.open()
        calls = itertools.count()
        for name in ("rename", "unlink"):
            setattr(os, name, partial(_dying, getattr(os, name), calls, step))
        store.put(payload, retention=retention)

    code = reap(fork(work), SOON)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def _dying(real: Callable[..., Any], calls: itertools.count[int], step: int, *args: Any, **kwargs: Any) -> Any:
    if next(calls) == step:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)


@pytest.mark.parametrize("step", range(4))
def test_a_kill_between_two_names(tmp_path: Path, step: int) -> None:
    """The old index keeps at least its own retention, the new one the one asked for, and nothing else is left."""
    for before, asked in itertools.product(RETENTIONS, (None, *RETENTIONS)):
        with opened(tmp_path) as store:
            store.put(payload_of(0, 1), retention=before)
        killed = put_and_die(tmp_path, step, payload_of(0, 2), asked)
        check_names(tmp_path, before, asked, killed)


def check_names(path: Path, before: Retention, asked: Retention | None, killed: bool) -> None:
    """An index that had fill 1 and ``before``, after a put of fill 2 and ``asked`` that may have been killed."""
    with opened(path, partial_grace_s=0.0) as store:
        over = before.expires == 1.0
        wanted = asked if asked is not None else Retention() if over else before
        store.collect()
        listed = store.list()
        assert [name for name in stored_files(path) if name.startswith(".") or (not listed and "keep" in name)] == []
        assert list(store.problems()) == []
        balanced(store)
        if not listed:
            assert over or (wanted.expires == 1.0 and not killed), "the index is gone"
            return
        found, fill = listed[0].retention, read_fill(store)
        told = f"fill {fill} has {found}, before {before}, asked {asked}"
        assert fill == 2 or not over, "the index that had expired is back"
        assert found.name in ((before.name, wanted.name) if fill == 1 else (wanted.name,)), told
        assert outlasts(found, before if fill == 1 else wanted), told
        assert found in (before, wanted) or (outlasts(found, before) and outlasts(found, wanted)), told


PROCESSES = 8
KEPT, CHANGING = 4, 24
"""Keys 0..KEPT-1 are replaced but never deleted; the others come and go."""
LARGE = 8 * SMALL
ROOM = 12 * IndexWriter(payload_of(0, 0, LARGE)).nbytes
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
        return fork(partial(Hammer(FileStore(folder, max_bytes=ROOM), seed).run, stop))

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
    check_after(folder, ROOM)


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
            while held < examples(500, 50):
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
