"""Several processes in one folder: eight that do everything."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from prefix_index import IndexFile, IndexNotFound, Retention
from tests.prefix_index.balance import balanced

from .outcome import Campaign, Outcome
from .tools import (
    SMALL,
    SOON,
    Line,
    Tally,
    fill_of,
    folder,
    fork,
    identity_of,
    opened,
    payload_of,
    read_fill,
    reap,
)
from .tools import stored_files as names_in

PROCESSES = 8
KEPT, CHANGING = 4, 8
"""Keys 0..KEPT-1 are replaced but never deleted; the others come and go."""


def run_all(tally: Tally, workers: Sequence[Callable[[], str]], seconds: float) -> list[str]:
    """Runs each in a process of its own. Whoever is not done in time is stuck; errors are wrong."""
    line = Line()
    pids = []
    for number, work in enumerate(workers):

        def guarded(number: int = number, work: Callable[[], str] = work) -> None:
            try:
                said = work()
            except BaseException as err:
                said = f"error {type(err).__name__}: {err}".replace("\n", " ")[:500]
            line.say(f"{number} {said}")

        pids.append(fork(guarded))
    until = time.monotonic() + seconds
    for number, pid in enumerate(pids):
        if reap(pid, max(0.1, until - time.monotonic())) is None:
            tally.hang(f"process {number} after {seconds:.0f} s")
    said = line.close()
    for text in said:
        if " error " in text:
            tally.err(f"process {text}")
    return said


CAP = 12 * 40_960
"""Bytes; less than half of what the capped hammer's indexes take together."""


class Hammer:
    """One of the eight: everything a store can do, at random. Raises on anything wrong."""

    def __init__(self, path: Path, seed: int, cap: int | None) -> None:
        self.rng = random.Random(seed)
        self.who = seed % PROCESSES + 1
        self.cap = cap
        self.store = opened(path) if cap is None else opened(path, max_bytes=cap)
        self.hits = 0
        self.held: list[tuple[IndexFile, int]] = []

    def run(self, steps: int) -> str:
        changing = CHANGING if self.cap is None else 3 * CHANGING
        with self.store:
            for step in range(steps):
                self.step(step, self.rng.randrange(KEPT + changing))
                if len(self.held) > 4 and self.rng.random() < 0.2:
                    self.read_held()
            while self.held:
                self.read_held()
        return f"hits {self.hits}"

    def read_held(self) -> None:
        """An index that was opened some steps ago, replaced, deleted or evicted since, gives what it gave then."""
        index, fill = self.held.pop(0)
        with index:
            found = fill_of(index)
            assert found == fill, f"an open index changed from {fill} to {found}"

    def step(self, step: int, number: int) -> None:
        store, rng = self.store, self.rng
        match rng.randrange(14):
            case 0 | 1 | 2:
                store.put(payload_of(number, self.who * 100_000 + step, rng.choice((SMALL, 8 * SMALL))))
            case 3 if number >= KEPT:
                store.delete(identity_of(number))
            case 4:
                store.rescan(full=rng.random() < 0.1)
                assert not store.problems(), str(store.problems()[0])
            case 5:
                store.rescan()
                missing = {identity_of(n).digest for n in range(KEPT)} - {e.digest for e in store.list()}
                assert not missing, f"lost from the list: {missing}"
            case 6:
                assert store.contains(identity_of(number)) or number >= KEPT, f"index {number} is not contained"
            case 7:
                expires = time.time() + 1000 if number < KEPT else time.time() + rng.uniform(-0.1, 0.1)
                with contextlib.suppress(IndexNotFound):
                    store.retain(identity_of(number), Retention(pinned=number < KEPT, expires=expires))
                    return
                assert number >= KEPT, f"index {number} is lost for retain"
            case 8:
                gone = {e.digest for e in store.collect()} & {identity_of(n).digest for n in range(KEPT)}
                assert not gone, f"collected, though pinned: {gone}"
            case 9:
                lease = store.lease(identity_of(number))
                if lease is not None:
                    lease.release()
            case 10 | 11:
                with contextlib.suppress(IndexNotFound):
                    index = store.get(identity_of(number))
                    self.held.append((index, int(index.stats["fill"])))
            case _:
                with contextlib.suppress(IndexNotFound):
                    read_fill(store, number)
                    self.hits += 1
                    return
                assert number >= KEPT, f"index {number} is lost"


def hammering(path: Path, seed: int, cap: int | None, steps: int) -> str:
    return Hammer(path, seed, cap).run(steps)


def hammered(name: str, count: int, seed: int, cap: int | None) -> Outcome:
    tally, options = Tally(name), {} if cap is None else {"max_bytes": cap}
    with folder() as path:
        with opened(path, **options) as store:
            for number in range(KEPT):
                store.put(payload_of(number, 1), retention=Retention(pinned=True))
        steps = count // PROCESSES
        workers = [partial(hammering, path, seed * PROCESSES + i, cap, steps) for i in range(PROCESSES)]
        said = run_all(tally, workers, 5 * SOON + count * 0.05)
        tally.tried += steps * sum("hits" in text for text in said)
        after(tally, path, options)
    hits = sum(int(text.split()[-1]) for text in said if "hits" in text)
    return tally.outcome(f"{PROCESSES} processes, {tally.tried:,} calls, {hits:,} indexes read and compared")


def hammer(count: int, seed: int) -> Outcome:
    """Eight processes: what nobody deletes is always there, every byte read is one that was put."""
    return hammered("hammer", count, seed, None)


def hammer_capped(count: int, seed: int) -> Outcome:
    """The same with a byte cap that makes every second put evict something; what is pinned stays."""
    return hammered("hammer_capped", count, seed, CAP)


def hammer_killed(count: int, seed: int) -> Outcome:
    """The same, and every few milliseconds one of the eight is killed and another one takes its place."""
    tally, rng, line = Tally("hammer_killed"), random.Random(seed), Line()
    options = {"max_bytes": CAP}
    with folder() as path:
        with opened(path, **options) as store:
            for number in range(KEPT):
                store.put(payload_of(number, 1), retention=Retention(pinned=True))

        def work(who: int) -> None:
            try:
                hammering(path, who, CAP, 1_000_000)
            except BaseException as err:
                line.say(f"{type(err).__name__}: {err}".replace("\n", " ")[:500])

        pids = [fork(partial(work, seed * 1_000_000 + i)) for i in range(PROCESSES)]
        for i in range(count):
            time.sleep(rng.uniform(0, 0.04))
            victim = pids.pop(rng.randrange(PROCESSES))
            os.kill(victim, signal.SIGKILL)
            if reap(victim, SOON) is None:
                tally.hang(f"process {victim}")
            tally.tried += 1
            pids.append(fork(partial(work, seed * 1_000_000 + PROCESSES + i)))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            reap(pid, SOON)
        for text in line.close():
            tally.err(text)
        after(tally, path, options)
    return tally.outcome(f"{PROCESSES} processes at any time, {tally.tried} killed")


def after(tally: Tally, path: Path, options: dict[str, int]) -> None:
    """What must hold once everybody has left."""
    with opened(path, partial_grace_s=0.0, **options) as store:
        store.collect()
        balanced(store)
        tally.expect(not store.problems(), f"problems: {store.problems()[:1]}")
        listed = {e.digest: e.nbytes for e in store.list()}
        for number in range(KEPT + 3 * CHANGING):
            if identity_of(number).digest in listed:
                with contextlib.suppress(*(() if number < KEPT else (IndexNotFound,))):  # its time may come just now
                    read_fill(store, number)
            elif number < KEPT:
                tally.lose(f"index {number}")
        total = sum(listed.values())
        tally.expect(total <= options.get("max_bytes", total), f"{total} bytes stay of {options}")
        left = [name for name in names_in(path) if name.startswith(".")]
        tally.expect(not left, f"files stay: {left[:2]}")


CAMPAIGNS = {
    "hammer_killed": Campaign(hammer_killed, full=500, quick=60),
    "hammer": Campaign(hammer, full=40_000, quick=2_400),
    "hammer_capped": Campaign(hammer_capped, full=20_000, quick=2_400),
}
