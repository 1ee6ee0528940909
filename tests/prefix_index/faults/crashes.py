"""``kill -9`` at random moments: of a write, and of what a store does to its folder besides."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prefix_index import FileStore, IndexStoreError
from prefix_index.folder import PARTIAL
from tests.prefix_index.balance import balanced

from .outcome import Campaign, Outcome
from .tools import (
    MEDIUM,
    SOON,
    Line,
    Tally,
    folder,
    fork,
    identity_of,
    opened,
    payload_of,
    read_fill,
    reap,
    stored_files,
)

KEYS = 4
SIZES = (MEDIUM // 2, 2 * MEDIUM, 4 * MEDIUM)
PHASES = ("any", "load", "posix_fallocate", "fsync", "rename")
LATEST_S = {"any": 0.06, "load": 0.003, "posix_fallocate": 0.002, "fsync": 0.008, "rename": 0.002}


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


def write_for_ever(path: Path, line: Line, phase: str, seed: int, first_fill: int) -> None:
    """The victim: puts one of KEYS after the other, telling before and after each."""
    rng = random.Random(seed)
    store = FileStore(path)
    store.open()
    if phase not in ("any", "load"):
        announce(line, phase)
    fill = first_fill
    line.say("ready")
    while True:
        number, nbytes = rng.randrange(KEYS), rng.choice(SIZES)
        payload = payload_of(number, fill, nbytes)
        if phase == "load":
            loud(payload.arrays, line)
        line.say(f"begin {number} {fill}")
        store.put(payload)
        line.say(f"done {number} {fill}")
        fill += 1


def loud(arrays: Any, line: Line) -> None:
    """Says ``at load`` whenever the writer asks for the next array, so that kills hit between two of them."""
    for array in arrays.values():
        real = array.load

        def load(real: Callable[[], Any] = real) -> Any:
            line.say("at load")
            return real()

        object.__setattr__(array, "load", load)


def told(lines: list[str]) -> Iterator[tuple[str, int, int]]:
    for line in lines:
        words = line.split()
        if words[0] in ("begin", "done"):
            yield words[0], int(words[1]), int(words[2])


def kill_writer(path: Path, phase: str, seed: int, first_fill: int) -> tuple[list[str], bool]:
    """Forks the victim, kills it at a random moment of ``phase``. Returns what it said, and whether it was fine."""
    rng = random.Random(seed)
    line = Line()
    pid = fork(lambda: write_for_ever(path, line, phase, seed, first_fill))
    started = line.wait_for("ready" if phase == "any" else f"at {phase}", SOON)
    time.sleep(rng.choice((0.0, rng.uniform(0, LATEST_S[phase]))))
    os.kill(pid, signal.SIGKILL)
    code = reap(pid, SOON)
    return line.close(), started and code == -signal.SIGKILL


def kill_during_write(count: int, seed: int) -> Outcome:
    """`kill -9` at a random moment of a put: a new store finds all that was acknowledged, whole, a replaced index as
    before or after, and no partial file.
    """
    tally, seen = Tally("kill_during_write"), Counter[str]()
    with folder() as path:
        acked: dict[int, int] = {}
        with opened(path) as store:
            for number in range(KEYS):
                store.put(payload_of(number, 1, MEDIUM))
                acked[number] = 1
        for i in range(count):
            phase = PHASES[i % len(PHASES)]
            said, fine = kill_writer(path, phase, seed * 1_000_003 + i, 1000 * (i + 1))
            tally.tried += 1
            if not fine:
                tally.hang(f"try {i}: the writer said {said[-3:]!r}")
            in_flight: tuple[int, int] | None = None
            for word, number, fill in told(said):
                in_flight = (number, fill) if word == "begin" else None
                if word == "done":
                    acked[number] = fill
            seen[f"killed at {phase}"] += 1
            seen["partial files left"] += sum(name.startswith(PARTIAL) for name in stored_files(path))
            check_after_kill(tally, f"try {i} ({phase})", path, acked, in_flight, seen)
    return tally.outcome(", ".join(f"{n} {what}" for what, n in seen.items()))


def check_after_kill(
    tally: Tally, where: str, path: Path, acked: dict[int, int], in_flight: tuple[int, int] | None, seen: Counter[str]
) -> None:
    """Old or new, whole, none half, no partial left; ``acked`` is brought up to date."""
    with opened(path, create=False, partial_grace_s=0.0) as store:
        if store.problems():
            tally.err(f"{where}: {store.problems()[0]}")
        listed = {e.digest for e in store.list()}
        if listed != {identity_of(number).digest for number in acked}:
            tally.lose(f"{where}: {len(acked)} acknowledged, {len(listed)} listed")
        for number, fill in acked.items():
            try:
                found = read_fill(store, number)
            except (IndexStoreError, AssertionError) as err:
                tally.lose(f"{where}: index {number}: {err}")
                continue
            if found != fill and in_flight == (number, found):
                seen["renamed but not yet acknowledged"] += 1
                acked[number] = found
            elif found != fill:
                tally.err(f"{where}: index {number} has fill {found}, acknowledged {fill}, in flight {in_flight}")
        left = [name for name in stored_files(path) if name.startswith(PARTIAL)]
        tally.expect(not left, f"{where}: partial files stay: {left[:2]}")
        balanced(store)


CAMPAIGNS = {"kill_during_write": Campaign(kill_during_write, full=300, quick=20)}
