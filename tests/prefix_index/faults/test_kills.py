"""``kill -9`` at any moment of what a store does to its folder, and between any two changes of names of one put."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefix_index import FileStore, IndexPayload, LazyArray, Retention
from tests.examples import examples
from tests.prefix_index.samples import MEDIUM, SMALL, identity_of, payload_of, read_fill
from tests.prefix_index.small_stores import SOON, Line, balanced, fork, opened, outlasts, reap, stored_files

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
