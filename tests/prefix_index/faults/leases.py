"""Build leases whose holders die, and many who want one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

from tests.prefix_index.balance import balanced

from .outcome import Campaign, Outcome
from .sharing import PROCESSES, run_all
from .tools import SOON, Line, Tally, folder, fork, identity_of, opened, reap

LIFE_S = 10 * SOON
"""Of who holds a lease until it is killed: a lease that is free before was not freed by the end of its holder."""


def hold(path: Path, line: Line, kind: str) -> None:
    """The victim. It holds a lease when it says so, and has a child that outlives it, or takes and gives for ever."""
    with opened(path, create=False) as store:
        if kind == "taking and releasing":
            line.say("held")
            while True:
                lease = store.lease(identity_of(0))
                if lease is not None:
                    lease.release()
        lease = store.lease(identity_of(0))
        if lease is None:
            line.say("refused")
            return
        if kind == "with a forked child":
            line.say(f"child {fork(lambda: time.sleep(LIFE_S))}")
        elif kind == "with a subprocess":
            line.say(f"child {subprocess.Popen([sys.executable, '-c', f'import time; time.sleep({LIFE_S})']).pid}")
        line.say("held")
        time.sleep(LIFE_S)


KINDS = ("alone", "with a forked child", "taking and releasing", "with a subprocess")


def kill_lease_holder(count: int, seed: int) -> Outcome:
    """`kill -9` of the holder of a build lease: nobody else gets it before, and the next who asks does after."""
    tally, rng, seen = Tally("kill_lease_holder"), random.Random(seed), Counter[str]()
    with folder() as path, opened(path, partial_grace_s=0.0) as store:
        for i in range(count):
            kind = KINDS[i % (4 if i % 8 == 3 else 3)]
            seen[kind] += 1
            tally.tried += 1
            line = Line()
            pid = fork(partial(hold, path, line, kind))
            if not line.wait_for("held", SOON):
                tally.hang(f"try {i}: a free lease was refused: {line.heard!r}")
            store.collect()  # which clears away what the dead left
            if kind != "taking and releasing":
                tally.expect(store.lease(identity_of(0)) is None, f"try {i}: a second holder beside one {kind}")
            time.sleep(rng.uniform(0, 0.003))
            os.kill(pid, signal.SIGKILL)
            reap(pid, SOON)
            lease = store.lease(identity_of(0))
            until = time.monotonic() + (SOON if kind == "with a forked child" else 0.0)
            while lease is None and time.monotonic() < until:  # a child lets go as soon as it runs at all
                time.sleep(0.001)
                lease = store.lease(identity_of(0))
            tally.expect(lease is not None, f"try {i}: not free after the death of one {kind}")
            if lease is not None:
                lease.release()
            for text in line.heard.decode().splitlines():
                if text.startswith("child "):  # it has the pipe's other end
                    os.kill(int(text.split()[1]), signal.SIGKILL)
            line.close()
        store.rescan(full=True)
        tally.expect(not store.problems(), f"problems: {store.problems()[:1]}")
        balanced(store)
    return tally.outcome(", ".join(f"{n} {kind}" for kind, n in seen.items()))


def lease_contention(count: int, seed: int) -> Outcome:
    """Eight processes want one lease all the time and clear away what the dead left: never two at once, and each gets
    it now and then.
    """
    tally = Tally("lease_contention")
    each = count // PROCESSES
    with folder() as path:
        opened(path / "store").close()

        def want(number: int) -> str:
            rng, held = random.Random(seed * PROCESSES + number), 0
            until = time.monotonic() + 5 * SOON + count * 0.05
            with opened(path / "store", partial_grace_s=0.0) as store:
                while held < each:
                    assert time.monotonic() < until, f"only {held} leases in time"
                    if rng.random() < 0.05:
                        store.collect()
                    lease = store.lease(identity_of(0))
                    if lease is None:
                        time.sleep(rng.uniform(0, 0.001))
                        continue
                    with lease:
                        marker = os.open(path / "inside", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
                        os.close(marker)
                        held += 1
                        if rng.random() < 0.1:
                            time.sleep(0.001)
                        (path / "inside").unlink()
            return f"held {held}"

        workers = [partial(want, i) for i in range(PROCESSES)]
        said = run_all(tally, workers, 6 * SOON + count * 0.06)
        tally.tried += sum(int(text.split()[-1]) for text in said if "held" in text and "error" not in text)
        tally.expect(tally.tried == each * PROCESSES, f"{tally.tried} leases held of {each * PROCESSES}")
    return tally.outcome(f"{PROCESSES} processes, one lease")


CAMPAIGNS = {
    "kill_lease_holder": Campaign(kill_lease_holder, full=200, quick=24),
    "lease_contention": Campaign(lease_contention, full=8_000, quick=800),
}
