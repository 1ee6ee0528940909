"""What the tests of eviction and retention share: indexes of one size, and folders to keep a few of them in."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefix_index import BuildInfo, FileStore, IndexIdentity, IndexPayload, IndexWriter, Retention
from prefix_index.testing import sample_identity, sample_payload

IDS = [sample_identity(range(i, i + 32)) for i in range(8)]
PINNED = Retention(pinned=True, name="tools")
ONE = IndexWriter(sample_payload()).nbytes


def opened(folder: Path, **options: Any) -> FileStore:
    store = FileStore(folder, **{"create": True, **options})
    store.open()
    return store


def keep_file(folder: Path, identity: IndexIdentity) -> Path:
    return folder / identity.digest[:2] / f"{identity.digest}.pfxkeep"


def index_file(folder: Path, identity: IndexIdentity) -> Path:
    return keep_file(folder, identity).with_suffix(".pfxindex")


def built_in(seconds: float, identity: IndexIdentity, values_per_array: int = 16) -> IndexPayload:
    payload = sample_payload(identity, values_per_array=values_per_array)
    return IndexPayload(identity, payload.arrays, payload.dtypes, info=BuildInfo(created=1.0, build_seconds=seconds))


def held(store: FileStore) -> set[int]:
    """Which of IDS the store has."""
    return {IDS.index(e.identity) for e in store.list()}


@contextlib.contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """This process may open ``left`` more files; then the system says EMFILE. For a process of one thread: others
    could close files meanwhile.
    """
    gc.collect()  # nor may files of objects that nobody has any more be closed then
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(len(os.listdir("/proc/self/fd")) + 32, hard), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(left):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def resident_bytes(path: Path) -> int:
    """How much of a file, in whole pages, is in the page cache (mincore)."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        pages = (ctypes.c_ubyte * (len(mapping) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapping)
        libc = ctypes.CDLL(None, use_errno=True)
        address, nbytes = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapping))
        assert libc.mincore(address, nbytes, pages) == 0
        del first
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


def settled(folder: Path) -> None:
    """As if nobody had changed the folder for a minute: a store then believes its shards' modification times."""
    for shard in folder.iterdir():
        os.utime(shard, (shard.stat().st_atime, shard.stat().st_mtime - 60))
