"""Clocks that jump, files with impossible times."""

from __future__ import annotations

import os
import random
from pathlib import Path

from prefix_index import FileStore, IndexNotFound, IndexStoreError, Retention
from tests.prefix_index.balance import balanced

from .outcome import Campaign, Outcome
from .tools import SMALL, Clock, Tally, folder, identity_of, opened, payload_of, read_fill

YEAR = 365 * 86_400.0
NOW = 1.8e9
KEYS = 12


class JumpingClock(Clock):
    def jump(self, rng: random.Random) -> None:
        """Mostly ahead by a little, sometimes by years, either way; before 1970 never."""
        step = rng.choice((0.0, 1e-6, 1.0, 60.0, 3600.0, -1.0, -3600.0, YEAR, -YEAR, 10 * YEAR, -10 * YEAR))
        self.now = min(max(self.now + step * rng.random(), 0.0), 2.0 * NOW)


def clock_jumps(count: int, seed: int) -> Outcome:
    """Whatever the clock says: an index is there until its ``expires``, and a miss from then on; none is lost."""
    tally, rng, clock = Tally("clock_jumps"), random.Random(seed), JumpingClock(NOW)
    with folder() as path, opened(path, clock=clock) as store:
        model: dict[int, tuple[int, float | None]] = {}
        for step in range(count):
            clock.jump(rng)
            tally.tried += 1
            number = rng.randrange(KEYS)
            try:
                act(store, clock, model, number, step, rng)
                compare(tally, store, clock, model, step)
            except IndexStoreError as err:
                tally.err(f"step {step}: {type(err).__name__}: {err}")
        reopen_and_compare(tally, path, clock, model)
    return tally.outcome(f"{count:,} jumps of up to 10 years, {KEYS} indexes with and without expiry")


def act(
    store: FileStore,
    clock: Clock,
    model: dict[int, tuple[int, float | None]],
    number: int,
    step: int,
    rng: random.Random,
) -> None:
    """One change. What expired and was collected is gone for good, though the clock may go back."""
    expires = rng.choice((None, clock.now + rng.uniform(1, YEAR), max(clock.now - rng.uniform(1, YEAR), 0.0)))
    match rng.randrange(5):
        case 0 | 1:
            store.put(payload_of(number, step), retention=Retention(expires=expires))
            model[number] = (step, expires)
        case 2:
            there = number in model and not expired(model[number], clock.now)
            try:
                store.retain(identity_of(number), Retention(expires=expires))
                assert there, f"step {step}: retain of an expired index {number}"
                model[number] = (model[number][0], expires)
            except IndexNotFound:
                assert not there, f"step {step}: retain says there is no index {number}"
        case 3:
            gone = {e.digest for e in store.collect()}
            for other in [n for n, kept in model.items() if expired(kept, clock.now)]:
                assert identity_of(other).digest in gone, f"step {step}: expired index {other} was not collected"
                gone.discard(identity_of(other).digest)
                del model[other]
            assert not gone, f"step {step}: {len(gone)} collected that had not expired"
        case _:
            store.rescan(full=rng.random() < 0.3)


def expired(kept: tuple[int, float | None], now: float) -> bool:
    return kept[1] is not None and kept[1] <= now


def compare(
    tally: Tally, store: FileStore, clock: Clock, model: dict[int, tuple[int, float | None]], step: int
) -> None:
    live = {number: fill for number, (fill, expires) in model.items() if not expired((fill, expires), clock.now)}
    listed = {e.digest for e in store.list()}
    wanted = {identity_of(number).digest for number in live}
    if wanted - listed:
        tally.lose(f"step {step} at {clock.now}: {len(wanted - listed)} indexes not listed")
    tally.expect(not listed - wanted, f"step {step} at {clock.now}: {len(listed - wanted)} expired indexes listed")
    for number in model:
        contained = store.contains(identity_of(number))
        if number in live:
            if not contained:
                tally.lose(f"step {step} at {clock.now}: index {number} with {model[number]}")
            elif step % 10 == 0:
                tally.expect(read_fill(store, number) == live[number], f"step {step}: bytes of {number}")
        else:
            tally.expect(not contained, f"step {step} at {clock.now}: expired index {number} is contained")
    if step % 10 == 0:
        balanced(store)


def reopen_and_compare(tally: Tally, path: Path, clock: Clock, model: dict[int, tuple[int, float | None]]) -> None:
    with opened(path, clock=clock) as store:
        model = {number: kept for number, kept in model.items() if not expired(kept, clock.now)}
        compare(tally, store, clock, model, 0)


def lru_after_jumps(count: int, seed: int) -> Outcome:
    """After each jump of the clock the index used last still stays longest, and the cap holds."""
    tally, rng, clock = Tally("lru_after_jumps"), random.Random(seed), JumpingClock(NOW)
    with folder() as path:
        with opened(path) as store:
            cap = 4 * store.put(payload_of(0, 0)).nbytes
        for policy in ("lru", "cost_aware"):
            clock.now, step = NOW, 0
            store = FileStore(path, max_bytes=cap, eviction=policy, clock=clock)
            store.open()
            while step < count // 2:
                clock.jump(rng)
                numbers = rng.sample(range(KEYS), 3)
                for number in numbers:
                    step += 1
                    tally.tried += 1
                    clock.now += 1.0
                    store.put(payload_of(number, step))
                    total = sum(e.nbytes for e in store.list())
                    tally.expect(total <= cap, f"step {step} ({policy}): {total} bytes, cap {cap}")
                    tally.expect(read_fill(store, number) == step, f"step {step} ({policy}): bytes of {number}")
                    clock.now += 1.0
                there = [number for number in numbers if store.contains(identity_of(number))]
                if len(there) < 3:
                    tally.lose(f"step {step} ({policy}): of the last 3 of 4 used, {len(there)} stayed")
                if rng.random() < 0.2:
                    store.close()
                    store.open()
                balanced(store)
            store.close()
    return tally.outcome(f"room for 4 indexes, {KEYS} wanted, jumps of up to 10 years, both policies")


def odd_times(count: int, seed: int) -> Outcome:
    """Files and folders with times in 1970 or 2106: a second store learns of every change all the same."""
    tally, rng = Tally("odd_times"), random.Random(seed)
    times = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, int(NOW), 2 * int(NOW))
    with folder() as path, opened(path) as here, opened(path) as there:
        for step in range(count):
            tally.tried += 1
            number = rng.randrange(KEYS)
            if rng.random() < 0.3:
                there.delete(identity_of(number))
            else:
                there.put(payload_of(number, step, rng.choice((SMALL, 8 * SMALL))))
            for one in rng.choices([path, *path.glob("*/*"), *path.glob("*")], k=2):
                moment = rng.choice(times) * 10**9 + rng.randrange(10**9)
                os.utime(one, ns=(moment, moment))
            here.rescan()
            there.rescan()
            mine, theirs = ({(e.digest, e.nbytes) for e in store.list()} for store in (here, there))
            if theirs - mine:
                tally.lose(f"step {step}: {len(theirs - mine)} indexes not learnt of")
            tally.expect(not mine - theirs, f"step {step}: {len(mine - theirs)} deleted indexes still listed")
            for digest, _ in mine:
                if digest == identity_of(number).digest:
                    tally.expect(read_fill(here, number) == step, f"step {step}: bytes of {number}")
            balanced(here)
        there.collect()
        tally.expect(not here.problems(), f"problems: {here.problems()[:1]}")
    return tally.outcome("times from 1970 to 2106 on files and folders")


CAMPAIGNS = {
    "clock_jumps": Campaign(clock_jumps, full=4_000, quick=400),
    "lru_after_jumps": Campaign(lru_after_jumps, full=3_000, quick=300),
    "odd_times": Campaign(odd_times, full=2_000, quick=150),
}
