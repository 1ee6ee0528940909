"""What the tests of copies in DRAM share: a folder with copies in another, waiting for them, and damage."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefix_index import FileStore, IndexFile
from prefix_index.testing import sample_identity, sample_payload
from tests.prefix_index.tiers import copies_in

SOON = 60.0


@contextlib.contextmanager
def opened(folder: Path, *, max_bytes: int = 64 << 20, **options: Any) -> Iterator[FileStore]:
    """A store of ``folder`` with copies in ``dram`` beside it."""
    with FileStore(
        folder, **{"create": True, "copies": copies_in(folder.parent / "dram", max_bytes), **options}
    ) as store:
        yield store
        store.check_integrity()


def copied(store: FileStore, key: Any = None) -> bool:
    """Asks for a copy, and waits until that is made, or could not be. Whether ``get`` opens one then."""
    store.prefetch(key or sample_identity())
    assert store._prefetches.settle(SOON)
    with store.get(key or sample_identity()) as index:
        return in_dram(index)


def in_dram(index: IndexFile) -> bool:
    return "/dram/" in str(index.path)


def copies(folder: Path) -> set[str]:
    """Digests of the copies that there are."""
    return {path.stem for path in (folder.parent / "dram").glob("*/*.pfxindex")}


def fill_of(index: IndexFile) -> int:
    with index:
        index.verify()
        return int(index.array("channels")[0])


def remove(folder: Path) -> None:
    while folder.exists():  # somebody may be writing there
        shutil.rmtree(folder, ignore_errors=True)


def put_elsewhere(folder: Path, **changes: Any) -> None:
    with FileStore(folder, create=True) as other:
        other.put(sample_payload(**changes))


def array_offset(path: Path, name: str = "channels") -> int:
    """Where in the file the values of an array lie: sought by its bytes."""
    with IndexFile.open(path) as index:
        record = next(index.record(k) for k in index.keys if k.name == name)
        last = max(index.record(k).offset + 4096 for k in index.keys if index.record(k).nbytes)
        return index.nbytes - 4096 - last + record.offset
