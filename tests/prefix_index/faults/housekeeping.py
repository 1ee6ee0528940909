"""``kill -9`` while a store evicts, retains, deletes and collects; damage to the files that hold retentions."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from prefix_index import FileStore, IndexNotFound, IndexStoreError, Retention
from tests.prefix_index.balance import balanced

from .crashes import announce
from .outcome import Campaign, Outcome
from .tools import (
    SMALL,
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

CAP = 40 * 32 * 1024
SIZES = (SMALL, 8 * SMALL)
PINNED, CACHED, DELETED = range(4), range(4, 60), range(60, 64)
PHASES = ("any", "unlink", "rename", "fsync", "utime")
LATEST_S = {"any": 0.03, "unlink": 0.002, "rename": 0.002, "fsync": 0.004, "utime": 0.002}
FAR = 4e9


def housekeep(path: Path, line: Line, phase: str, seed: int, first_fill: int) -> None:
    """The victim: changes retentions, puts what evicts others, deletes, collects; tells before and after each."""
    rng = random.Random(seed)
    store = FileStore(path, max_bytes=CAP)
    store.open()
    if phase != "any":
        announce(line, phase)
    fill = first_fill
    line.say("ready")
    while True:
        fill += 1
        match rng.randrange(6):
            case 0:
                number = rng.choice(PINNED)
                line.say(f"begin retain {number} {fill}")
                store.retain(identity_of(number), Retention(pinned=True, expires=FAR + fill))
                line.say(f"done retain {number} {fill}")
            case 1:
                number = rng.choice(PINNED)
                line.say(f"begin put {number} {fill}")
                store.put(payload_of(number, fill, rng.choice(SIZES)))
                line.say(f"done put {number} {fill}")
            case 2 | 3:
                store.put(payload_of(rng.choice(CACHED), fill, rng.choice(SIZES)))
            case 4:
                number = rng.choice(DELETED)
                store.put(payload_of(number, fill), retention=Retention(expires=rng.choice((1.0, FAR))))
                store.delete(identity_of(number))
            case _:
                retention = Retention(expires=time.time() - 1)
                store.put(payload_of(rng.choice(CACHED), fill), retention=retention)
                store.collect()


@dataclass
class Acknowledged:
    """What the pinned indexes must be: fill and last retention, and the one of each that was in flight."""

    fill: dict[int, int] = field(default_factory=dict)
    expires: dict[int, float] = field(default_factory=dict)

    def learn(self, lines: list[str]) -> tuple[str, int, int] | None:
        """Takes over what was done; returns what was begun and not done."""
        begun: tuple[str, int, int] | None = None
        for text in lines:
            word, *rest = text.split()
            if word == "begin":
                begun = (rest[0], int(rest[1]), int(rest[2]))
            elif word == "done" and begun is not None:
                self.take(begun)
                begun = None
        return begun

    def take(self, change: tuple[str, int, int]) -> None:
        kind, number, fill = change
        if kind == "put":
            self.fill[number] = fill
        else:
            self.expires[number] = FAR + fill


def kill_housekeeping(count: int, seed: int) -> Outcome:
    """`kill -9` while a store evicts, retains, deletes, collects: pinned indexes stay with their last retention, the
    cap holds, nothing half, nothing left over.
    """
    tally, seen, acked = Tally("kill_housekeeping"), Counter[str](), Acknowledged()
    with folder() as path:
        with opened(path, max_bytes=CAP) as store:
            for number in PINNED:
                store.put(payload_of(number, 1), retention=Retention(pinned=True, expires=FAR))
                acked.fill[number], acked.expires[number] = 1, FAR
        for i in range(count):
            rng = random.Random(seed * 1_000_003 + i)
            phase, line = PHASES[i % len(PHASES)], Line()
            pid = fork(partial(housekeep, path, line, phase, seed + i, 1000 * (i + 1)))
            fine = line.wait_for("ready" if phase == "any" else f"at {phase}", SOON)
            for _ in range(rng.randrange(12) if phase != "any" else 0):
                time.sleep(0.001)
            time.sleep(rng.choice((0.0, rng.uniform(0, LATEST_S[phase]))))
            os.kill(pid, signal.SIGKILL)
            fine = reap(pid, SOON) == -signal.SIGKILL and fine
            tally.tried += 1
            seen[phase] += 1
            said = line.close()
            if not fine:
                tally.hang(f"try {i}: the victim ended otherwise: {said[-2:]}")
            check_after_kill(tally, f"try {i} ({phase})", path, acked, acked.learn(said), seen)
    return tally.outcome(", ".join(f"{n} {what}" for what, n in seen.items()))


def check_after_kill(
    tally: Tally, where: str, path: Path, acked: Acknowledged, begun: tuple[str, int, int] | None, seen: Counter[str]
) -> None:
    with opened(path, max_bytes=CAP, partial_grace_s=0.0) as store:
        tally.expect(not store.problems(), f"{where}: {store.problems()[:1]}")
        entries = {e.digest: e for e in store.list()}
        for number in PINNED:
            entry = entries.get(identity_of(number).digest)
            if entry is None:
                tally.lose(f"{where}: pinned index {number}")
                continue
            seen["changes done but not acknowledged"] += settle(tally, where, store, number, acked, begun)
        for number in (*CACHED, *DELETED):
            if identity_of(number).digest in entries:
                try:
                    read_fill(store, number)
                except (IndexStoreError, AssertionError) as err:
                    tally.err(f"{where}: listed index {number}: {err}")
        store.collect()
        total = sum(e.nbytes for e in store.list())
        tally.expect(total <= CAP, f"{where}: {total} bytes after collect(), cap {CAP}")
        for number in DELETED:
            store.delete(identity_of(number))
            entry = store.put(payload_of(number, 5))
            again = entry.retention == Retention() and store.contains(identity_of(number))
            tally.expect(
                again, f"{where}: index {number} came back with the retention of a deleted one: {entry.retention}"
            )
            store.delete(identity_of(number))
        balanced(store)
        left = [name for name in stored_files(path) if name.startswith(".")]
        tally.expect(not left, f"{where}: files stay: {left[:2]}")


def settle(
    tally: Tally, where: str, store: FileStore, number: int, acked: Acknowledged, begun: tuple[str, int, int] | None
) -> bool:
    """Fill and retention are the acknowledged ones or those in flight; whether it was the latter."""
    try:
        fill = read_fill(store, number)
    except (IndexStoreError, AssertionError) as err:
        tally.lose(f"{where}: pinned index {number}: {err}")
        return False
    retention = next(e.retention for e in store.list() if e.digest == identity_of(number).digest)
    found = {"put": fill, "retain": retention.expires}
    wanted = {"put": acked.fill[number], "retain": acked.expires[number]}
    tally.expect(retention.pinned, f"{where}: index {number} is not pinned any more: {retention}")
    flying = False
    for kind in ("put", "retain"):
        if found[kind] != wanted[kind]:
            late = begun == (kind, number, found[kind] if kind == "put" else (found[kind] or 0.0) - FAR)
            tally.expect(
                late, f"{where}: {kind} of {number}: {found[kind]}, acknowledged {wanted[kind]}, begun {begun}"
            )
            flying = flying or late
    acked.fill[number], acked.expires[number] = fill, retention.expires or 0.0
    return flying


def flip_sidecar(count: int, seed: int) -> Outcome:
    """Every flipped bit, every cut, and garbage in the file of a retention: the index stays, and no retention that
    nobody set is believed.
    """
    tally, rng = Tally("flip_sidecar"), random.Random(seed)
    with folder() as path, opened(path) as store:
        retention = Retention(pinned=True, expires=time.time() + 1e7)
        at = Path(store.put(payload_of(0, 1), retention=retention).path or "").with_suffix(".pfxkeep")
        raw = at.read_bytes()
        damaged = [bytes([*raw[: i // 8], raw[i // 8] ^ 1 << i % 8, *raw[i // 8 + 1 :]]) for i in range(len(raw) * 8)]
        damaged += [raw[:n] for n in range(len(raw))]
        damaged += [
            b"[" * 4000,
            b'{"pinned":' * 300,
            b"\xff" * 5000,
            b"null",
            b"{}",
            b'{"expires":NaN}',
            b'{"expires":-1}',
        ]
        damaged += [rng.randbytes(rng.randrange(200)) for _ in range(100)]
        for data in damaged if count >= len(damaged) else rng.sample(damaged, count):
            tally.tried += 1
            at.write_bytes(data)
            store.rescan(full=True)
            for kind, one in (("open", store), ("new", FileStore(path))):
                one.open()
                try:
                    one.collect()
                    tally.expect(read_fill(one, 0) == 1, f"{kind} store with sidecar {data[:80]!r}")
                    kept = next((e.retention for e in one.list()), None)
                    harmless = (retention, Retention())
                    tally.expect(kept in harmless, f"{kind} store takes {kept} from sidecar {data[:80]!r}")
                    balanced(one)
                except (IndexNotFound, AssertionError) as err:
                    tally.lose(f"{kind} store with sidecar {data[:80]!r}: {err}")
                    store.put(payload_of(0, 1), retention=retention)
                except IndexStoreError as err:
                    tally.err(f"{kind} store with sidecar {data[:80]!r}: {err}")
            at.write_bytes(raw)
            store.rescan(full=True)
    return tally.outcome(f"{len(raw) * 8} bits, {len(raw)} cuts, 107 kinds of garbage")


CAMPAIGNS = {
    "kill_housekeeping": Campaign(kill_housekeeping, full=200, quick=20),
    "flip_sidecar": Campaign(flip_sidecar, full=1 << 20, quick=400),
}
