"""What the tests of the tiered store share: slow tiers that hang, are cut off or know their checksums, and damage."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prefix_index import (
    FileStore,
    IndexEntry,
    IndexFile,
    IndexPayload,
    IndexStore,
    MemoryStore,
    Retention,
    StoreUnavailable,
)
from prefix_index.store import IndexLookup
from prefix_index.testing import sample_payload
from prefix_index.tiered import TieredStore

SOON = 60.0


class GatedStore(FileStore):
    """A folder on a disk that answers the promoter's threads only while ``gate`` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, create=True)
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.background_reads = 0

    def get(self, key: IndexLookup) -> IndexFile:
        if threading.current_thread().name.startswith("prefix_index-promoter"):
            self.background_reads += 1
            self.entered.set()
            self.gate.wait()
        return super().get(key)


class FarStore(FileStore):
    """A folder behind a line that can be cut; counts how often it is asked for an index."""

    cut = False
    asked = 0

    def get(self, key: IndexLookup) -> IndexFile:
        self.asked += 1
        self._check_line()
        return super().get(key)

    def contains(self, key: IndexLookup) -> bool:
        self._check_line()
        return super().contains(key)

    def _check_line(self) -> None:
        if self.cut:
            raise StoreUnavailable("far store", expected="an answer", found="none", remedy="ask again later")


class CatalogStore(FarStore):
    """A far store that knows its checksums, as of the last put or ``rescan()``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, create=True)
        self.sums: dict[str, str] = {}

    def put(self, payload: IndexPayload, *, retention: Retention | None = None) -> IndexEntry:
        entry = super().put(payload, retention=retention)
        self._learn_sums()
        return entry

    def rescan(self, *, full: bool = False) -> None:
        super().rescan(full=full)
        self._learn_sums()

    def checksum(self, key: IndexLookup) -> str | None:
        return self.sums.get(key if isinstance(key, str) else key.digest)

    def _learn_sums(self) -> None:
        self.sums = {}
        for entry in self.list():
            with FileStore.get(self, entry.digest) as index:
                self.sums[entry.digest] = index.checksum


@contextlib.contextmanager
def opened(fast: IndexStore, slow: IndexStore, **options: Any) -> Iterator[TieredStore]:
    with TieredStore(fast, slow, **options) as store:
        try:
            yield store
        finally:
            if isinstance(slow, GatedStore):
                slow.gate.set()
        store.check_integrity()


def memory() -> MemoryStore:
    return MemoryStore(64 << 20)


def fill_of(index: IndexFile) -> int:
    with index:
        index.verify()
        return int(index.array("channels")[0])


def in_memory(index: IndexFile) -> bool:
    with index:
        return index.path is None


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


def put_elsewhere(folder: Path, **changes: Any) -> None:
    with FileStore(folder, create=True) as other:
        other.put(sample_payload(**changes))


def flip(path: Path, offset: int) -> None:
    """Flips a bit in place, as a bad disk would; readers that have it mapped see it too."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes((byte ^ 1,)))


def array_offset(path: Path, name: str = "channels") -> int:
    """Where in the file the values of an array lie: sought by its bytes."""
    with IndexFile.open(path) as index:
        record = next(index.record(k) for k in index.keys if k.name == name)
        last = max(index.record(k).offset + 4096 for k in index.keys if index.record(k).nbytes)
        return index.nbytes - 4096 - last + record.offset
