"""What tests of folders share: files, a system that refuses, a clock, child processes, and books that balance."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefix_index import (
    ArrayKey,
    Ask,
    FileStore,
    IndexFile,
    IndexIdentity,
    IndexPayload,
    IndexStore,
    IndexUnreadable,
    IndexWriter,
    Retention,
    SharedStore,
    StoreUnavailable,
)
from prefix_index.folder import shard_fd
from prefix_index.format import ALIGN, aligned, sealed
from prefix_index.remote import RemoteStore
from prefix_index.remote.values import Manifest
from prefix_index.retention import read_retention
from prefix_index.store import IndexSource
from tests.prefix_index.samples import IDS, sample_payload

ONE = IndexWriter(sample_payload()).nbytes
SOON = 60.0
"""Seconds for what happens in any case, on the slowest of machines; longer is a hang."""


def python(code: str, *arguments: object, **options: Any) -> subprocess.Popen[Any]:
    """Runs a program in a process that finds the packages which this one finds. Its output is text, in a pipe."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, **{"env": env, "stdout": subprocess.PIPE, "text": True, **options})


def in_threads(*works: Callable[[], object]) -> None:
    """Does each in a thread of its own, all at the same time. Raises the first error once all have ended."""
    with ThreadPoolExecutor(len(works)) as pool:
        for work in [pool.submit(work) for work in works]:
            work.result()


def refuse(
    patch: pytest.MonkeyPatch, what: str | Path, error: int, when: Callable[..., bool] = lambda *_: True
) -> None:
    """From now on a call of ``os`` fails where ``when`` says so of its arguments; or that of opening a path does."""
    name = what if isinstance(what, str) else "open"
    real = getattr(os, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args) if isinstance(what, str) else Path(args[0]).name == what.name and not args[1] & os.O_CREAT:
            raise OSError(error, os.strerror(error))
        return real(*args, **kwargs)

    patch.setattr(os, name, call)


@contextlib.contextmanager
def refused(what: str | Path, when: Callable[..., bool] = lambda *_: True, error: int = errno.EIO) -> Iterator[None]:
    """The same in the block."""
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, what, error, when)
        yield


def flip(path: Path, at: int) -> None:
    """Changes a bit where it lies, as a bad disk would: the file's times stay, and who has it mapped sees it."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def keep_file(folder: Path, identity: IndexIdentity) -> Path:
    return folder / identity.digest[:2] / f"{identity.digest}.pfxkeep"


def index_file(folder: Path, identity: IndexIdentity) -> Path:
    return keep_file(folder, identity).with_suffix(".pfxindex")


def dump(payload: IndexPayload) -> bytes:
    """The container of an index."""
    out, writer = io.BytesIO(), IndexWriter(payload)
    writer.write(out)
    assert writer.nbytes == len(out.getvalue())
    return out.getvalue()


def of_version(version: int, raw: bytes) -> bytes:
    """A file, or a value of a remote store, that says so, with the right checksum."""
    return sealed(raw[:8] + bytes([version]) + raw[9:64]) + raw[64:]


def drop_from_page_cache(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_memory(raw: bytes) -> IndexFile:
    """A container that lies in memory, open."""
    file = io.FileIO(os.memfd_create("index"), "w+b")
    file.write(raw)
    return IndexFile(file)


def place_of(index: IndexFile, key: ArrayKey) -> int:
    """Where in the file the values of an array begin."""
    data_nbytes = sum(aligned(index.record(k).nbytes) for k in index.keys)
    return index.nbytes - ALIGN - data_nbytes + index.record(key).offset


def held(store: FileStore) -> set[int]:
    """Which of IDS the store has."""
    return {IDS.index(e.identity) for e in store.list()}


def settled(folder: Path) -> None:
    """As if nobody had changed the folder for a minute: a store then believes its shards' modification times."""
    for shard in folder.iterdir():
        os.utime(shard, (shard.stat().st_atime, shard.stat().st_mtime - 60))


class Clock:
    """Seconds since the Unix epoch that pass when a test says so."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def opened(path: Path, **options: Any) -> FileStore:
    store = FileStore(path, **{"create": True, **options})
    store.open()
    return store


def holding(path: Path, *identities: IndexIdentity, retention: Retention | None = None, **options: Any) -> FileStore:
    """A store that is open, and has these."""
    store = opened(path, **options)
    for identity in identities:
        store.put(sample_payload(identity), retention=retention)
    return store


def filled(path: Path, count: int, clock: Clock | None = None, **options: Any) -> FileStore:
    """A store that is open, and was given the first of IDS, one every ten seconds."""
    clock = clock or Clock()
    store = opened(path, clock=clock, **options)
    for identity in IDS[:count]:
        clock.now += 10
        store.put(sample_payload(identity))
    return store


def stored_files(path: Path) -> list[str]:
    """Names of everything in the shards of a store's folder, hidden names included."""
    return sorted(p.name for p in path.glob("*/*"))


def remove(path: Path) -> None:
    """A folder, while somebody may be writing there."""
    while path.exists():
        shutil.rmtree(path, ignore_errors=True)


def fork(work: Callable[[], None]) -> int:
    """A child process that does ``work`` and leaves at once; its status is 0 unless ``work`` raised."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def reap(pid: int, seconds: float) -> int | None:
    """The exit code of a child (negative: a signal); None when it had to be killed after ``seconds``."""
    fd = os.pidfd_open(pid)
    ended = select.select([fd], [], [], seconds)[0]
    os.close(fd)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if ended else None


class Line:
    """A pipe of text lines from children that may be killed at any time. ``heard`` is all that came so far."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.heard = b""

    def say(self, text: str) -> None:
        os.write(self.writer, (text + "\n").encode())

    def wait_for(self, text: str, seconds: float) -> bool:
        """Whether the line ``text`` was said, or is within ``seconds`` of silence."""
        while f"{text}\n".encode() not in self.heard:
            if not select.select([self.reader], [], [], seconds)[0]:
                return False
            self.heard += os.read(self.reader, 1 << 16)
        return True

    def close(self) -> list[str]:
        """All lines. The children must have ended."""
        os.close(self.writer)
        while part := os.read(self.reader, 1 << 16):
            self.heard += part
        os.close(self.reader)
        return self.heard.decode(errors="replace").splitlines()


def outlasts(a: Retention, b: Retention) -> bool:
    """Whether ``a`` keeps an index at least as long as ``b``."""
    return a.pinned >= b.pinned and (a.expires is None or (b.expires is not None and a.expires >= b.expires))


def balanced(store: IndexSource) -> None:
    """Raises AssertionError with both sides. Meaningful while nobody else changes what is there."""
    if isinstance(store, SharedStore):
        balanced(store.local)
        if store._teller.settle(60):
            for link in store._links:
                with contextlib.suppress(StoreUnavailable):
                    link.ask(partial(balanced, link.store))
    elif isinstance(store, FileStore):
        store.rescan()
        _files(store)
    elif isinstance(store, RemoteStore):
        _values(store)
    for entry in store.list() if isinstance(store, IndexStore) else ():
        identity = entry.identity
        hashes = [*[bytes(32)] * (identity.num_tokens // identity.page_tokens - 1), bytes.fromhex(identity.prefix_hash)]
        ask = Ask(identity.namespace, hashes, identity.model, identity.profile_digest, identity.page_tokens)
        assert store.longest(ask) is not None, f"{entry.digest} is listed only"


def _files(store: FileStore) -> None:
    """Names, sizes and retentions, but for what the system refused: of that, what was known stays."""
    problems = {
        problem.path: problem.error for problem in store.problems() if problem.path not in store._books.unremovable
    }
    shards = [
        path for path in store.folder.iterdir() if len(path.name) == 2 and path.is_dir() and not path.is_symlink()
    ]
    files = [path for shard in shards if str(shard) not in problems for path in shard.glob("[!.]*.pfxindex")]
    there = {path.stem: path.lstat().st_size for path in files if str(path) not in problems}
    held = {d: e for d, e in store.catalog.all_held() if str(store.path_of(d).parent) not in problems}
    assert {digest: entry.nbytes for digest, entry in held.items()} == there, "files"
    for digest, entry in held.items():
        problem = problems.get(str(store.path_of(digest).with_suffix(".pfxkeep")))
        if not isinstance(problem, IndexUnreadable):
            with shard_fd(store.folder, digest[:2]) as fd:
                kept = Retention() if problem is not None else read_retention(fd, digest)
            assert entry.retention == kept, f"retention of {digest}"


def _values(store: RemoteStore) -> None:
    found = store._scan(full=False)
    outcomes = store._values.manifests([d for d, names in found.items() if names.tag is not None])
    there = {d: m.listed for d, m in outcomes.items() if isinstance(m, Manifest) and d not in store.catalog.problems}
    assert dict(store.catalog.all_held()) == there, "entries"
