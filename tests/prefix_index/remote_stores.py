"""What the tests of remote stores, and of those that share, have in common: object stores, a bad network, damage."""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefix_index import IndexNotFound, SharedStore
from prefix_index.remote import BlobMissing, Blobs, BlobsFailed, BlobTooLong, ObjectBlobs, RemoteStore
from prefix_index.remote.values import HEADER, value_header
from prefix_index.remote.values import MANIFEST as MANIFEST_KIND
from tests.prefix_index.samples import find, sample_identity
from tests.prefix_index.small_stores import SOON, python
from tests.prefix_index.tiers import eventually, new_bucket

LONG = tuple(range(64))
CHUNK_NBYTES = 16 << 10
DIGEST = sample_identity().digest
MANIFEST = f"prefix_index/{DIGEST}.manifest"


def file_blobs(folder: Path) -> ObjectBlobs:
    return ObjectBlobs((folder / "objects").as_uri())


OBJECT_STORES: dict[str, Callable[[Path], ObjectBlobs]] = {
    "memory": lambda folder: ObjectBlobs("memory:///"),
    "file": file_blobs,
    "s3": lambda folder: new_bucket(),
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


def forge_manifest(blobs: ObjectBlobs, **changes: Any) -> None:
    """The manifest with other fields and right checksums."""
    body: dict[str, Any] = json.loads(blobs.fetch(MANIFEST, 1 << 20)[HEADER.size :])
    raw = json.dumps(body | changes).encode()
    blobs.write(MANIFEST, memoryview(value_header(MANIFEST_KIND, DIGEST, body["generation"], 0, raw) + raw))


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


def killed_writers(count: int, store: RemoteStore, blobs: str, *arguments: str) -> Iterator[bool]:
    """Processes that put and delete in a loop are killed, one after another: whether an index is there then, whole.

    ``blobs`` is what they write to, in Python, with ``arguments`` as ``sys.argv[1:]``.
    """
    code = (
        "import sys, itertools; from prefix_index.remote import *; from tests.prefix_index.samples import *\n"
        f"store = RemoteStore({blobs}, folder={store.folder!r}, chunk_nbytes=4096, timeout_s=60); store.open()\n"
        "print('up', flush=True)\n"
        "for fill in itertools.count(): store.put(sample_payload(fill=fill % 250)); store.delete(sample_identity())\n"
    )
    rng = random.Random(0)
    for _ in range(count):
        with python(code, *arguments, stderr=subprocess.DEVNULL) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "up\n"
            time.sleep(rng.uniform(0, 0.1))
            writer.kill()
        try:
            with store.get(DIGEST) as index:
                index.verify()
                assert index.stats == {"fill": int(index.array("channels")[0])}
            yield True
        except IndexNotFound:
            yield False


Make = Callable[..., SharedStore]


def reached(store: SharedStore) -> bool:
    """Has it rescan the remote store until that answered in time."""

    def answered() -> bool:
        store.rescan(full=True)
        return not store.problems()

    eventually(answered)
    return True


def longest(store: SharedStore) -> int:
    """Of how many tokens the index is that it finds."""
    found = find(store, LONG)
    return 0 if found is None else found.identity.num_tokens


def flushed(store: SharedStore) -> bool:
    def told() -> bool:
        store.rescan()
        return store.flush(SOON)

    eventually(told)
    return True
