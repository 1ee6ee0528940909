"""What the tests of the remote tier share: object stores to test on, small stores, and damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefix_index.remote import BlobMissing, Blobs, BlobTooLong, ObjectBlobs, RemoteStore
from tests.prefix_index import s3_server
from tests.prefix_index.samples import sample_identity

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


def flip(bit: int) -> Callable[[bytearray], object]:
    def change(raw: bytearray) -> None:
        raw[bit // 8] ^= 1 << bit % 8

    return change
