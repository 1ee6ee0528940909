"""The store service killed under load, and its clients killed while they put."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from prefix_index import IndexStoreError, StoreUnavailable
from prefix_index.folder import PARTIAL
from prefix_index.writer import PartialFile
from tests.prefix_index.balance import balanced

from .outcome import Campaign, Outcome
from .service_process import CALL_S, Service, client_of, hasty_client_of
from .tools import (
    SMALL,
    SOON,
    Line,
    Tally,
    folder,
    fork,
    opened,
    payload_of,
    read_fill,
    reap,
    stored_files,
)

CLIENTS = 4
KEYS = 3
LIFE_S = 10 * SOON
"""Of who stands still until it is killed."""


def work(service: Service, line: Line, me: int, seed: int, until: Path) -> None:
    """A client: puts, gets and looks up its own keys until the file ``until`` is there and it has done both. Says what
    came of it.
    """
    rng = random.Random(seed * 100 + me)
    said: Counter[str] = Counter()
    bad: list[str] = []
    may: dict[int, set[int]] = {}
    fills = itertools.count(1)
    client = hasty_client_of(service)
    began = 0.0
    while True:
        with contextlib.suppress(StoreUnavailable):
            client.open()
            break
    while not (until.exists() and said["puts"] and said["gets"]):
        number = me * KEYS + rng.randrange(KEYS)
        began = time.monotonic()
        try:
            if rng.random() < 0.4 or number not in may:
                fill = next(fills)
                client.put(payload_of(number, fill, rng.choice((SMALL, 1 << 16, 1 << 19))))
                may[number] = {fill}
                said["puts"] += 1
            elif rng.random() < 0.8:
                found = read_fill(client, number)
                said["gets"] += 1
                if found not in may[number]:
                    bad.append(f"wrong: index {number} has fill {found}, may be {sorted(may[number])}")
                may[number] = {found}
            else:
                client.rescan()
                said["rescans"] += 1
        except (IndexStoreError, AssertionError) as err:
            bad.append(f"lost: index {number}: {type(err).__name__}: {err}")
        if time.monotonic() - began > CALL_S:
            bad.append(f"stuck: {time.monotonic() - began:.1f} s")
    line.say(json.dumps({"said": said, "bad": bad[:5], "may": {n: sorted(f) for n, f in may.items()}}))


def kill_service_under_load(count: int, seed: int) -> Outcome:
    """``kill -9`` of the service at random moments, with CLIENTS processes at work on it all the time."""
    tally, rng, said = Tally("service_killed_under_load"), random.Random(seed), Counter[str]()
    with folder() as path, Service(path) as service:
        line, until = Line(), path / "stop"
        pids = [fork(lambda me=me: work(service, line, me, seed, until)) for me in range(CLIENTS)]  # type: ignore[misc]
        for i in range(count):
            time.sleep(rng.choice((0.02, 0.1, 0.3)) * rng.random())
            service.kill()
            tally.tried += 1
            time.sleep(rng.choice((0.0, 0.0, 0.2)) * rng.random())
            if not service.start():
                tally.hang(f"kill {i}: the service did not start again")
        time.sleep(0.5)
        until.touch()
        for pid in pids:
            code = reap(pid, 2 * SOON)
            if code is None:
                tally.hang("a client did not end")
            tally.expect(code in (0, None), f"a client ended with {code}")
        tally.expect(service.stop() == 0, "the service did not end well")
        results = [json.loads(text) for text in line.close()]
        tally.expect(len(results) == CLIENTS, f"{len(results)} of {CLIENTS} clients said what they did")
        with opened(path / "store", create=False) as store:
            for result in results:
                said.update(result["said"])
                for text in result["bad"]:
                    {"lost": tally.lose, "wrong": tally.err, "stuck": tally.hang}[text.split(":")[0]](text)
                for number, fills in result["may"].items():
                    try:
                        tally.expect(read_fill(store, int(number)) in fills, f"index {number} is none of {fills}")
                    except (IndexStoreError, AssertionError) as err:
                        tally.lose(f"in the end: index {number}: {err}")
            balanced(store)
        service.start()
    for what in ("puts", "gets"):
        tally.expect(said[what] > 0, f"no {what}")
    return tally.outcome(
        f"kill -9 of the service, {CLIENTS} clients: " + ", ".join(f"{n} {w}" for w, n in said.items())
    )


def kill_client_mid_put(count: int, seed: int) -> Outcome:
    """``kill -9`` of a writer: after its reservation, while it writes, before its commit. Nothing of it stays."""
    tally, rng, said = Tally("service_client_killed_mid_put"), random.Random(seed), Counter[str]()
    phases = ("reserved", "load", "synced")
    with folder() as path, Service(path) as service, client_of(service) as good:
        for number in range(KEYS):
            good.put(payload_of(number, 1, 1 << 18))
        for i in range(count):
            phase, number = phases[i % len(phases)], rng.randrange(KEYS)
            line = Line()
            pid = fork(lambda: put_and_hang(service, line, phase, number, i))  # noqa: B023
            if not line.wait_for(f"at {phase}", SOON):
                tally.hang(f"try {i}: the writer never was at {phase}")
            os.kill(pid, signal.SIGKILL)
            reap(pid, SOON)
            line.close()
            tally.tried += 1
            said[f"at {phase}"] += 1
            tally.expect(read_fill(good, number) == 1, f"try {i}: index {number} changed")
        deadline = time.monotonic() + SOON
        while left := [name for name in stored_files(path / "store") if name.startswith(PARTIAL)]:
            if time.monotonic() > deadline:
                tally.err(f"partial files stay: {left[:2]}")
                break
            time.sleep(0.05)
        while good.status().reservations and time.monotonic() < deadline:
            time.sleep(0.05)
        tally.expect(good.status().reservations == 0, "reservations stay")
        for number in range(KEYS):
            try:
                tally.expect(read_fill(good, number) == 1, f"index {number} changed")
                good.put(payload_of(number, 2, 1 << 18))
                tally.expect(read_fill(good, number) == 2, f"index {number} could not be replaced")
            except IndexStoreError as err:
                tally.lose(f"index {number}: {err}")
        balanced(good)
    return tally.outcome("writers killed " + ", ".join(f"{n} {what}" for what, n in said.items()))


def put_and_hang(service: Service, line: Line, phase: str, number: int, fill: int) -> None:
    """In a child: a put that stands still at ``phase`` until it is killed."""

    def stand(*_: Any) -> Any:
        line.say(f"at {phase}")
        time.sleep(LIFE_S)

    payload = payload_of(number, fill + 10, 1 << 18)
    if phase == "load":
        object.__setattr__(list(payload.arrays.values())[-1], "load", stand)
    elif phase == "synced":
        os.fsync = stand
    else:
        PartialFile.write = stand  # type: ignore[method-assign]
    with client_of(service) as client:
        client.put(payload)


CAMPAIGNS = {
    "service_killed_under_load": Campaign(kill_service_under_load, full=300, quick=16),
    "service_client_killed_mid_put": Campaign(kill_client_mid_put, full=150, quick=18),
}
