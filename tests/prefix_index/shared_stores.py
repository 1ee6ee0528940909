"""What the tests of SharedStore share: a remote store behind a bad network, and waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prefix_index import Ask, FileStore, SharedStore, link, namespace_digest, page_hashes
from prefix_index.remote import BlobsFailed, ObjectBlobs, RemoteStore
from prefix_index.store import IndexSource
from tests.prefix_index.remote_stores import CHUNK_NBYTES, DIGEST
from tests.prefix_index.samples import sample_model
from tests.prefix_index.tiers import eventually

SOON = 60.0
LONG = tuple(range(64))


class Shaky(ObjectBlobs):
    """A real object store behind a network that fails, hangs while ``answers`` is cleared, or waits for ``gate`` before
    it gives or takes bytes; ``calls`` counts what came to it, ``reading`` and ``writing`` say that it came so far.
    """

    def __init__(self, url: str = "memory:///") -> None:
        super().__init__(url)
        self.fails = False
        self.calls = 0
        self.answers = threading.Event()
        self.answers.set()
        self.gate = threading.Event()
        self.gate.set()
        self.reading = threading.Event()
        self.writing = threading.Event()

    def reach(self, name: str, value: str = "") -> None:
        """The way of a call to the store."""
        self.calls += 1
        self.answers.wait(2 * SOON)
        if self.fails:
            raise BlobsFailed("the network is gone")
        if name == "write" or (name == "fetch" and value[-1].isdigit()):
            (self.reading if name == "fetch" else self.writing).set()
            self.gate.wait(SOON)

    def wipe(self) -> None:
        for name in self.names("prefix_index"):
            super().delete(name)


def _shaky(name: str) -> Callable[..., Any]:
    def call(self: Shaky, *args: Any) -> Any:
        self.reach(name, str(args[0]) if args else "")
        return getattr(ObjectBlobs, name)(self, *args)

    return call


for _name in ("open", "fetch", "size", "write", "create", "delete", "names"):
    setattr(Shaky, _name, _shaky(_name))
Make = Callable[..., SharedStore]


@contextmanager
def machines(folder: Path, blobs: Shaky, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Machines on one remote store, each with a folder of its name, open; hardly a pause after failures."""
    monkeypatch.setattr(link, "FIRST_AWAY_S", 0.0)
    stores: list[SharedStore] = []

    def machine(name: str = "a", *, on: ObjectBlobs = blobs, remote: Any = None, **options: Any) -> SharedStore:
        limits = {key: options.pop(key) for key in ("max_bytes",) if key in options}
        local = FileStore(folder / name, create=True, **limits)
        over = RemoteStore(on, chunk_nbytes=CHUNK_NBYTES, **{"timeout_s": SOON, **(remote or {})})
        store = SharedStore(local, [over], **{"timeout_s": SOON, "rescan_s": 0.0, **options})
        store.open()
        stores.append(store)
        return store

    yield machine
    blobs.fails = False
    blobs.answers.set()
    blobs.gate.set()
    for store in stores:
        store.close()


def reached(store: SharedStore) -> bool:
    """Has it rescan the remote store until that answered in time."""

    def answered() -> bool:
        store.rescan(full=True)
        return not store.problems()

    eventually(answered)
    return True


def find(store: SharedStore, tokens: Sequence[int] = LONG) -> int:
    found = store.longest(Ask(namespace_digest({"extra_key": None}), page_hashes(tokens), sample_model(), "profile-1"))
    return 0 if found is None else found.identity.num_tokens


def fill_of(store: IndexSource, key: Any = DIGEST) -> int:
    with store.get(key) as index:
        index.verify()
        return int(index.array("channels")[0])


def flushed(store: SharedStore) -> bool:
    def told() -> bool:
        store.rescan()
        return store.flush(SOON)

    eventually(told)
    return True
