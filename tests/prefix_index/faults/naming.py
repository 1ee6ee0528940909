"""``kill -9`` between any two changes of names of one put: index and retention are two files, so two names."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from prefix_index import FileStore, IndexPayload, IndexStoreError, Retention
from tests.prefix_index.balance import balanced

from .outcome import Campaign, Outcome
from .tools import SOON, Tally, folder, fork, opened, payload_of, read_fill, reap, stored_files

FAR = 4e9
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
    if code not in (0, -signal.SIGKILL):
        raise AssertionError(f"the writer ended with {code}")
    return code != 0


def _dying(real: Callable[..., Any], calls: itertools.count[int], step: int, *args: Any, **kwargs: Any) -> Any:
    if next(calls) == step:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)


def what_is_wrong(path: Path, before: Retention, asked: Retention | None, *, killed: bool) -> str | None:
    """Of an index that had fill 1 and ``before``, after a put of fill 2 and ``asked`` that may have been killed."""
    with opened(path, partial_grace_s=0.0) as store:
        over = before.expires == 1.0
        wanted = asked if asked is not None else Retention() if over else before
        store.collect()
        listed = store.list()
        left = [name for name in stored_files(path) if name.startswith(".") or (not listed and "keep" in name)]
        if left or store.problems():
            return f"left {left}, problems {store.problems()}"
        balanced(store)
        if not listed:
            return None if over or (wanted.expires == 1.0 and not killed) else "the index is gone"
        found = listed[0].retention
        try:
            fill = read_fill(store, 0)
        except (IndexStoreError, AssertionError) as err:
            return str(err)
        if fill == 1 and over:
            return "the index that had expired is back"
        if found.name not in ((before.name, wanted.name) if fill == 1 else (wanted.name,)):
            return f"fill {fill} is called {found.name}, before {before}, asked {asked}"
        if not outlasts(found, before if fill == 1 else wanted):
            return f"fill {fill} has {found}, before {before}, asked {asked}"
        if found not in (before, wanted) and not (outlasts(found, before) and outlasts(found, wanted)):
            return f"nobody asked for {found}, before {before}, asked {asked}"
        return None


def outlasts(a: Retention, b: Retention) -> bool:
    """Whether ``a`` keeps an index at least as long as ``b``."""
    return a.pinned >= b.pinned and (a.expires is None or (b.expires is not None and a.expires >= b.expires))


def kill_between_names(count: int, seed: int) -> Outcome:
    """`kill -9` before each rename and removal of a put that replaces an index and its retention: the old index keeps
    at least its own, the new one at least the one asked for; nothing else is left.
    """
    tally, rng = Tally("kill_between_names"), random.Random(seed)
    cases = [(before, asked, step) for before in RETENTIONS for asked in (None, *RETENTIONS) for step in range(4)]
    killed = 0
    with folder() as path:
        for before, asked, step in cases if count >= len(cases) else rng.sample(cases, count):
            tally.tried += 1
            with opened(path) as store:
                store.put(payload_of(0, 1), retention=before)
            died = put_and_die(path, step, payload_of(0, 2), asked)
            killed += died
            wrong = what_is_wrong(path, before, asked, killed=died)
            if wrong is not None:
                (tally.lose if "gone" in wrong else tally.err)(f"step {step} of {before} to {asked}: {wrong}")
    return tally.outcome(f"{killed} killed, the others done before that step")


CAMPAIGNS = {"kill_between_names": Campaign(kill_between_names, full=1000, quick=168)}
