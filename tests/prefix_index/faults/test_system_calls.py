"""Short reads and writes, EMFILE, EIO and ENOSPC in whatever system call of a store's operation they may meet.

The real calls are made on real files, but for the one that is refused. So errors come where a kernel may give them, in
each order, and what was done before them is there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from prefix_index import FileStore, IndexCorrupt, IndexForeign, IndexMismatch, IndexNotFound, IndexStoreError, Retention
from tests.examples import examples
from tests.prefix_index.samples import fill_of, identity_of, payload_of
from tests.prefix_index.small_stores import ONE, SOON, fork, opened, outlasts, reap

_OPENING: Final = ("open", "dup", "scandir")
_READING: Final = ("read", "pread", "preadv")
_LOOKING: Final = ("stat", "lstat", "fstat", "statvfs", "scandir", "open", "dup")
_CHANGING: Final = ("mkdir", "rename", "unlink", "fsync", "utime", "posix_fallocate", "flock", "write", "file.write")

KINDS: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "EMFILE": (errno.EMFILE, _OPENING),
    "EIO": (errno.EIO, (*_READING, *_LOOKING, *_CHANGING)),
    "ENOSPC": (errno.ENOSPC, ("mkdir", "rename", "fsync", "posix_fallocate", "write", "file.write", "open")),
    "short": (0, (*_READING, "write", "file.write")),
}
"""Error number (0: less is done than was asked for), and the calls that may end so."""


class Refusals:
    """What the system refuses: calls of ``kind`` from number ``first`` on, ``number`` of them."""

    def __init__(self, kind: str, first: int, number: int) -> None:
        self.error, self._names = KINDS[kind]
        self._first, self._number = first, number
        self.asked = 0
        """Calls that could have been refused."""
        self.refused = 0

    def refuses(self, name: str) -> bool:
        if name not in self._names:
            return False
        self.asked += 1
        if not self._first < self.asked <= self._first + self._number:
            return False
        self.refused += 1
        return True

    def call(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name == "open" and self.error == errno.ENOSPC and not args[1] & os.O_CREAT:
            return real(*args, **kwargs)
        if not self.refuses(name):
            return real(*args, **kwargs)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return _less(name, real, *args, **kwargs)


def _less(name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call for about half of the bytes, one at least."""
    match name:
        case "read" | "pread":
            fd, nbytes, *rest = args
            return real(fd, max(1, nbytes // 2), *rest, **kwargs)
        case "preadv":
            fd, (out,), *rest = args
            nbytes = len(out) // 2 // 4096 * 4096 or max(1, len(out) // 2)  # whole sectors, for O_DIRECT
            return real(fd, [memoryview(out)[:nbytes]], *rest, **kwargs)
    *before, data = args
    return real(*before, memoryview(data)[: max(1, len(data) // 2)])


@contextlib.contextmanager
def refusing(what: Refusals) -> Iterator[None]:
    """In the block the system refuses. For a process of one thread."""
    patched: list[tuple[Any, str, Any]] = []

    def patch(module: Any, name: str) -> None:
        real = getattr(module, name)
        patched.append((module, name, real))
        setattr(module, name, lambda *args, **kwargs: what.call(name, real, *args, **kwargs))

    class File(io.FileIO):
        def write(self, data: Any, /) -> int:
            return int(what.call("file.write", super().write, data))

    for name in dict.fromkeys((*_READING, *_LOOKING, *_CHANGING)):
        if name == "flock":
            patch(fcntl, name)
        elif name != "file.write":
            patch(os, name)
    patched.append((io, "FileIO", io.FileIO))
    io.FileIO = File  # type: ignore[misc]
    try:
        yield
    finally:
        for module, name, real in patched:
            setattr(module, name, real)


NUMBERS = 10
PINNABLE = 3
HOLDS = 7
"""Indexes that fit under the cap: those that may be pinned always do."""
FAR = 4e9
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

    def __init__(self, path: Path, rng: random.Random) -> None:
        self.store = opened(path, max_bytes=HOLDS * ONE + ONE // 2, partial_grace_s=0.0)
        self.seen = opened(path)
        self.rng = rng
        self.held: dict[int, Held] = {}
        self.hindered = 0
        self._fill = 0
        self._calls: dict[tuple[str, str], int] = {}
        """The most that an operation made of those that may be refused: each of them is, in the course of time."""

    def step(self) -> None:
        """One operation in which the system refuses something, then a look at what is there."""
        operations = {self.put: 8, self.get: 4, self.retain: 6, self.delete: 2}
        operations |= {self.lease: 3, self.collect: 3, self.rescan: 2, self.reopen: 2}
        operation: Callable[[int, Refusals], None] = self.rng.choices([*operations], [*operations.values()])[0]
        kind = self.rng.choice(list(KINDS))
        at = operation.__name__, kind
        refusals = Refusals(kind, self.rng.randrange(self._calls.get(at, 0) + 1), self.rng.choice((1, 1, 2, 1000)))
        descriptors = _descriptors()
        operation(self.rng.randrange(NUMBERS), refusals)
        self._calls[at] = max(self._calls.get(at, 0), refusals.asked)
        self.hindered += refusals.refused > 0
        assert _descriptors() - descriptors == set(), at
        self.store.rescan()  # with nothing refused any more, the store knows all there is
        mine, real = self.store.list(), self.seen.list()
        assert [(e.digest, e.retention) for e in mine] == [(e.digest, e.retention) for e in real], at

    def attempt(self, call: Callable[[], object], refusals: Refusals, *, there: bool) -> bool:
        """Whether it did what it should. One that the system hindered raises an error of the store that says so."""
        try:
            with refusing(refusals):
                call()
            return True
        except IndexStoreError as err:
            if there and isinstance(err, VERDICTS):
                raise AssertionError("a verdict about an index that is there") from err
            if not refusals.refused and (there or not isinstance(err, IndexNotFound)):
                raise AssertionError("an error although nothing was refused") from err
        return False

    def put(self, number: int, refusals: Refusals) -> None:
        self._fill += 1
        asked = self.rng.choice((*ASKED, *(PINS if number < PINNABLE else ())))
        before = self.held.get(number)
        over = before is None or before.kept == EXPIRED
        wanted = asked if asked is not None else DEFAULT if over or before is None else before.kept
        payload, new = payload_of(number, self._fill), Held(self._fill, wanted)
        done = self.attempt(lambda: self.store.put(payload, retention=asked), refusals, there=False)

        def fine(found: Held | None) -> bool:
            if done:
                return found == new
            if found is None:
                return over or self.may_leave(number)
            if found.fill == new.fill:
                return over or outlasts(found.kept, wanted)
            return before is not None and found.fill == before.fill and (over or outlasts(found.kept, before.kept))

        self.look(f"put {asked} over {before}, {done=}", {number: fine}, evicts=True)

    def get(self, number: int, refusals: Refusals) -> None:
        before = self.held.get(number)
        there = before is not None and before.kept != EXPIRED

        def read() -> None:
            with self.store.get(identity_of(number)) as index:
                index.read_many()
                assert before is not None
                assert fill_of(index) == before.fill

        self.attempt(read, refusals, there=there)
        assert self.store.contains(identity_of(number)) or not there
        self.look("get", {})

    def retain(self, number: int, refusals: Refusals) -> None:
        asked = self.rng.choice((*ASKED[1:], EXPIRED, *(PINS * 2 if number < PINNABLE else ())))
        before = self.held.get(number)
        there = before is not None and before.kept != EXPIRED
        done = self.attempt(lambda: self.store.retain(identity_of(number), asked), refusals, there=there)

        def fine(found: Held | None) -> bool:
            if before is None or not there:
                return found in (before, None)
            after = before._replace(kept=asked)
            return found == after if done else found in (before, after)

        self.look(f"retain {asked} over {before}, {done=}", {number: fine})

    def lease(self, number: int, refusals: Refusals) -> None:
        def hold() -> None:
            lease = self.store.lease(identity_of(number))
            assert lease is not None
            with lease:
                assert self.store.lease(identity_of(number)) is None

        self.attempt(hold, refusals, there=False)
        hold()
        self.look("lease", {})

    def collect(self, number: int, refusals: Refusals) -> None:
        self.attempt(self.store.collect, refusals, there=False)
        self.look("collect", {}, evicts=True)

    def delete(self, number: int, refusals: Refusals) -> None:
        before = self.held.get(number)
        done = self.attempt(lambda: self.store.delete(identity_of(number)), refusals, there=False)
        self.look("delete", {number: lambda found: found is None or (not done and found == before)})

    def rescan(self, number: int, refusals: Refusals) -> None:
        self.attempt(lambda: self.store.rescan(full=number % 2 == 0), refusals, there=False)
        self.look("rescan", {})

    def reopen(self, number: int, refusals: Refusals) -> None:
        self.store.close()
        self.attempt(self.store.open, refusals, there=False)
        self.store.open()
        self.look("reopen", {})

    def may_leave(self, number: int) -> bool:
        before = self.held.get(number)
        return before is None or not before.kept.pinned

    def look(self, after: str, changed: dict[int, Callable[[Held | None], bool]], *, evicts: bool = False) -> None:
        """What is on disk must be as before, or what ``changed`` allows; only what is not pinned leaves."""
        found: dict[int, Held] = {}
        self.seen.rescan()
        for digest, entry in self.seen._books.catalog.all_held():
            number = NUMBER_OF[digest]
            over = entry.retention == EXPIRED  # nobody opens that
            fill = self.held[number].fill if over else fill_of(FileStore.get(self.seen, digest))
            found[number] = Held(fill, entry.retention)
        for number in range(NUMBERS):
            now, before = found.get(number), self.held.get(number)
            gone = now is None and before is not None and evicts and self.may_leave(number)
            right = changed[number](now) if number in changed else now == before or gone
            assert right, f"{after}: index {number} was {before}, is {now}"
        self.held = found


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


def hinder(path: Path, count: int) -> None:
    tried = Store(path, random.Random(7))
    while tried.hindered < count:
        tried.step()


def test_what_the_system_refuses_costs_an_error_and_no_index_pin_retention_or_descriptor(tmp_path: Path) -> None:
    """In each operation, in a child of one thread."""
    assert reap(fork(partial(hinder, tmp_path / "store", examples(2_000, 250))), 10 * SOON) == 0
