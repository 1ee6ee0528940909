"""What the tests of remote stores, and of those that share, have in common: object stores, a bad network, damage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from prefix_index import SharedStore
from prefix_index.remote import BlobMissing, Blobs, BlobsFailed, BlobTooLong, ObjectBlobs, RemoteStore
from tests.prefix_index import s3_server
from tests.prefix_index.samples import find, sample_identity
from tests.prefix_index.small_stores import SOON
from tests.prefix_index.tiers import eventually

LONG = tuple(range(64))
CHUNK_NBYTES = 16 << 10
DIGEST = sample_identity().digest
MANIFEST = f"prefix_index/{DIGEST}.manifest"


def file_blobs(folder: Path) -> ObjectBlobs:
    return ObjectBlobs((folder / "objects").as_uri())


OBJECT_STORES: dict[str, Callable[[Path], ObjectBlobs]] = {
    "memory": lambda folder: ObjectBlobs("memory:///"),
    "file": file_blobs,
    "s3": lambda folder: s3_server.new_bucket(),
}
#: Of fixtures; the server of S3 takes its time.
OBJECT_STORE_NAMES = ["memory", "file", pytest.param("s3", marks=pytest.mark.full)]


def check_values(blobs: Blobs, folder: str) -> None:
    """What every store does with named values: none is cut in silence, one missing is no failure."""
    name = f"{folder}/x"
    for call in (lambda: blobs.fetch(name, 10), lambda: blobs.size(name)):
        with pytest.raises(BlobMissing):
            call()
    blobs.write(name, memoryview(bytes(range(100))))
    assert blobs.size(name) == 100
    assert blobs.fetch(name, 100) == bytes(range(100))
    with pytest.raises(BlobTooLong, match="100 bytes"):
        blobs.fetch(name, 99)
    for value in (b"longer" * 1000, b"short"):
        blobs.write(name, memoryview(value))
        assert blobs.fetch(name, 10_000) == value
    assert blobs.names(folder).keys() == {name}
    blobs.delete(name)
    blobs.delete(name)
    assert blobs.names(folder) == {}


def machine(blobs: Blobs, **options: Any) -> RemoteStore:
    """One machine's store, of small chunks: a sample index has three."""
    return RemoteStore(blobs, **{"chunk_nbytes": CHUNK_NBYTES, "timeout_s": 60, **options})


def chunks_of(blobs: ObjectBlobs, digest: str = DIGEST) -> list[str]:
    return sorted(n for n in blobs.names("prefix_index") if n.startswith(f"prefix_index/{digest}.") and n[-1].isdigit())


def damage(blobs: ObjectBlobs, name: str, change: Callable[[bytearray], object]) -> None:
    raw = bytearray(blobs.fetch(name, 1 << 30))
    change(raw)
    blobs.write(name, memoryview(bytes(raw)))


def flip_bit(bit: int) -> Callable[[bytearray], object]:
    def change(raw: bytearray) -> None:
        raw[bit // 8] ^= 1 << bit % 8

    return change


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


def _shaky(name: str) -> Callable[..., Any]:
    def call(self: Shaky, *args: Any) -> Any:
        self.reach(name, str(args[0]) if args else "")
        return getattr(ObjectBlobs, name)(self, *args)

    return call


for _name in ("open", "fetch", "size", "write", "create", "delete", "names"):
    setattr(Shaky, _name, _shaky(_name))
Make = Callable[..., SharedStore]


def reached(store: SharedStore) -> bool:
    """Has it rescan the remote store until that answered in time."""

    def answered() -> bool:
        store.rescan(full=True)
        return not store.problems()

    eventually(answered)
    return True


def longest(store: SharedStore, tokens: Sequence[int] = LONG) -> int:
    """Of how many tokens the index is that it finds."""
    found = find(store, tokens)
    return 0 if found is None else found.identity.num_tokens


def flushed(store: SharedStore) -> bool:
    def told() -> bool:
        store.rescan()
        return store.flush(SOON)

    eventually(told)
    return True
