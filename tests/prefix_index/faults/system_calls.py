"""Short reads and writes, EMFILE, EIO and ENOSPC in whatever system call of a store's operation they may meet."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from prefix_index import FileStore, IndexCorrupt, IndexForeign, IndexMismatch, IndexNotFound, IndexStoreError, Retention

from .naming import FAR, outlasts
from .outcome import Campaign, Outcome
from .refusals import KINDS, Refusals, refusing
from .tools import SMALL, Tally, fill_of, folder, identity_of, opened, payload_of

NUMBERS = 10
PINNABLE = 3
HOLDS = 7
"""Indexes that fit under the cap: those that may be pinned always do."""
DEFAULT = Retention()
ASKED = (None, DEFAULT, Retention(expires=FAR), Retention(expires=FAR + 100))
PINS = (Retention(pinned=True), Retention(pinned=True, expires=FAR))
EXPIRED = Retention(expires=1.0)
VERDICTS = (IndexNotFound, IndexCorrupt, IndexForeign, IndexMismatch)
"""What no refusal may be taken for: the index is there and whole."""


class Held(NamedTuple):
    fill: int
    kept: Retention


class Store:
    """A store under a cap on which the system is refusing, and one that sees what is really there."""

    def __init__(self, path: Path, tally: Tally, rng: random.Random) -> None:
        with opened(path) as empty:
            nbytes = empty.put(payload_of(0, 0, SMALL)).nbytes
            empty.delete(identity_of(0))
        self.store = FileStore(path, max_bytes=HOLDS * nbytes + nbytes // 2, partial_grace_s=0.0)
        self.store.open()
        self.seen = FileStore(path)
        self.seen.open()
        self.tally, self.rng = tally, rng
        self.held: dict[int, Held] = {}
        self.counts: Counter[str] = Counter()
        self.operations = 0
        self._fill = 0
        self._calls: dict[tuple[str, str], int] = {}
        self._descriptors = _descriptors()

    def close(self) -> None:
        self.store.close()
        self.seen.close()

    def step(self) -> None:
        """One operation in which the system refuses something, then a look at what is there."""
        name = self.rng.choices(("put", "get", "retain", "lease", "collect"), (8, 4, 6, 3, 3))[0]
        kind = self.rng.choice(list(KINDS))
        number = self.rng.randrange(NUMBERS)
        first = self.rng.randrange(self._calls.get((name, kind), 0) + 1)
        refusals = Refusals(kind, first, self.rng.choice((1, 1, 2, 1000)))
        operation: Callable[[int, Refusals], None] = getattr(self, f"_{name}")
        self.operations += 1
        operation(number, refusals)
        self._calls[name, kind] = max(refusals.asked - 1, 0)
        if refusals.refused:
            self.tally.tried += 1
            self.counts[f"{name} {kind}"] += 1
        leaked = _descriptors() - self._descriptors
        if leaked:
            self.counts["leaked"] += len(leaked)
            self.tally.err(f"{name} with {kind} leaked {sorted(leaked)}")
            self._descriptors = _descriptors()
        self._same_books(name, kind)

    def _try(self, call: Callable[[], object], refusals: Refusals, *, there: bool) -> bool:
        """Whether it did what it should. One that the system hindered raises an error of the store that says so."""
        try:
            with refusing(refusals):
                call()
            return True
        except IndexStoreError as err:
            if there and isinstance(err, VERDICTS):
                self.tally.err(f"{type(err).__name__} of an index that is there: {err}")
            elif not refusals.refused and (there or not isinstance(err, IndexNotFound)):
                self.tally.err(f"{type(err).__name__} although nothing was refused: {err}")
        except Exception as err:
            self.tally.err(f"{type(err).__name__} instead of an error of the store: {err}")
        return False

    def _put(self, number: int, refusals: Refusals) -> None:
        self._fill += 1
        fill = self._fill
        asked = self.rng.choice((*ASKED, *(PINS if number < PINNABLE else ())))
        before = self.held.get(number)
        over = before is None or before.kept == EXPIRED
        wanted = asked if asked is not None else DEFAULT if over or before is None else before.kept
        payload = payload_of(number, fill, SMALL)
        done = self._try(lambda: self.store.put(payload, retention=asked), refusals, there=False)
        new = Held(fill, wanted)

        def fine(found: Held | None) -> bool:
            if done:
                return found == new
            if found is None:
                return over or self._may_leave(number)
            if found.fill == fill:
                return over or outlasts(found.kept, wanted)
            return before is not None and found.fill == before.fill and (over or outlasts(found.kept, before.kept))

        self._look(f"put {asked} over {before}, {done=}", {number: fine}, evicts=True)

    def _get(self, number: int, refusals: Refusals) -> None:
        before = self.held.get(number)
        there = before is not None and before.kept != EXPIRED
        got: list[int] = []

        def read() -> None:
            with self.store.get(identity_of(number)) as index:
                got.append(fill_of(index))

        if self._try(read, refusals, there=there) and got != ([before.fill] if before else []):
            self.tally.err(f"read {got} of {before}")
        if there and not self.store.contains(identity_of(number)):
            self.tally.lose(f"{before} is offered no more after a get")
        self._look("get", {})

    def _retain(self, number: int, refusals: Refusals) -> None:
        asked = self.rng.choice((*ASKED[1:], EXPIRED, *(PINS * 2 if number < PINNABLE else ())))
        before = self.held.get(number)
        there = before is not None and before.kept != EXPIRED
        done = self._try(lambda: self.store.retain(identity_of(number), asked), refusals, there=there)

        def fine(found: Held | None) -> bool:
            if before is None or not there:
                return found in (before, None)
            after = before._replace(kept=asked)
            return found == after if done else found in (before, after)

        self._look(f"retain {asked} over {before}, {done=}", {number: fine})

    def _lease(self, number: int, refusals: Refusals) -> None:
        def hold() -> None:
            lease = self.store.lease(identity_of(number))
            if lease is None:
                self.tally.err("nobody holds the lease, and it is not given")
            else:
                lease.release()

        self._try(hold, refusals, there=False)
        lease = self.store.lease(identity_of(number))
        self.tally.expect(lease is not None, "the lease is not free afterwards")
        if lease is not None:
            lease.release()
        self._look("lease", {})

    def _collect(self, number: int, refusals: Refusals) -> None:
        self._try(self.store.collect, refusals, there=False)
        self._look("collect", {}, evicts=True)

    def _may_leave(self, number: int) -> bool:
        before = self.held.get(number)
        return before is None or not before.kept.pinned

    def _look(self, after: str, changed: dict[int, Callable[[Held | None], bool]], *, evicts: bool = False) -> None:
        """What is on disk must be as before, or what ``changed`` allows; only what is not pinned leaves."""
        found: dict[int, Held] = {}
        self.seen.rescan()
        for digest, entry in self.seen._books.catalog.all_held():
            number = NUMBER_OF[digest]
            with FileStore.get(self.seen, digest) if entry.retention != EXPIRED else _EXPIRED as index:
                fill = self.held[number].fill if index is None else fill_of(index)
            found[number] = Held(fill, entry.retention)
        for number in range(NUMBERS):
            now, before = found.get(number), self.held.get(number)
            gone = now is None and before is not None and evicts and self._may_leave(number)
            if number in changed:
                right = changed[number](now)
            else:
                right = now == before or gone
            if not right:
                self.tally.lose(f"{after}: index {number} was {before}, is {now}")
        self.held = found

    def _same_books(self, name: str, kind: str) -> None:
        """With nothing refused any more, the store knows all there is, after a look."""
        self.store.rescan()
        mine, real = self.store.list(), self.seen.list()
        if [(e.digest, e.retention) for e in mine] != [(e.digest, e.retention) for e in real]:
            self.tally.err(f"{name} with {kind}: {len(mine)} of {len(real)} listed after it, or kept otherwise")


class _Nothing:
    """Of an index that has expired, which nobody opens."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        pass


_EXPIRED = _Nothing()
NUMBER_OF = {identity_of(number).digest: number for number in range(NUMBERS)}


def _descriptors() -> set[str]:
    """What this process has open, but for what it opens to see that."""
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue
    return links


def system_calls(count: int, seed: int) -> Outcome:
    """Short reads and writes, EMFILE, EIO and ENOSPC in any system call of put, get, retain, lease and collect: an
    error of the store or what was asked for, no pin and no retention lost, no descriptor leaked.
    """
    tally, rng = Tally("system_calls"), random.Random(seed)
    with folder() as path:
        tried = Store(path / "store", tally, rng)
        while tally.tried < count:
            tried.step()
        tried.close()
    leaked = tried.counts.pop("leaked", 0)
    kinds = Counter[str]()
    for what, number in tried.counts.items():
        kinds[what.split()[1]] += number
    each = ", ".join(f"{number:,} {kind}" for kind, number in sorted(kinds.items()))
    made = f"{tried.operations:,} operations, in {tally.tried:,} of them the system refused something ({each}); "
    return tally.outcome(f"{made}{tally.lost} lost retentions or indexes, {leaked} leaked descriptors")


CAMPAIGNS = {"system_calls": Campaign(system_calls, full=20_000, quick=400)}
