"""What the campaigns share: folders, payloads whose every byte is known, counting, and real child processes."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prefix_index import ArrayKey, BuildInfo, FileStore, IndexFile, IndexIdentity, IndexPayload, LazyArray
from tests.prefix_index.samples import sample_identity

from .outcome import Outcome

SOON = 60.0
"""Seconds for what happens in any case, on the slowest of machines; longer is a hang."""
SMALL = 1 << 12
MEDIUM = 1 << 20


class Clock:
    """Seconds since the Unix epoch that pass when a test says so."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Tally:
    """Counts faults and what came of them; keeps the first few things that went wrong."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tried = self.lost = self.wrong = self.stuck = 0
        self._said: list[str] = []

    def lose(self, text: str) -> None:
        self.lost += 1
        self._say(f"lost: {text}")

    def err(self, text: str) -> None:
        self.wrong += 1
        self._say(f"wrong: {text}")

    def hang(self, text: str) -> None:
        self.stuck += 1
        self._say(f"stuck: {text}")

    def expect(self, holds: bool, text: str) -> None:
        if not holds:
            self.err(text)

    def raises(self, expected: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> None:
        """One fault: ``call`` must raise ``expected``, neither another error nor none."""
        self.tried += 1
        try:
            result = call()
        except expected:
            return
        except Exception as err:
            self.err(f"{type(err).__name__} instead of {_names(expected)}: {str(err)[:150]}")
        else:
            self.err(f"no {_names(expected)} but {str(result)[:100]}")

    def outcome(self, made: str) -> Outcome:
        return Outcome(
            self.name, self.tried, self.lost, self.wrong, self.stuck, "; ".join(filter(None, [made, *self._said]))
        )

    def _say(self, text: str) -> None:
        if len(self._said) < 3:
            self._said.append(text)


def _names(kinds: type[Exception] | tuple[type[Exception], ...]) -> str:
    return "/".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder of its own on the file system of the temporary folder (``TMPDIR``)."""
    path = Path(tempfile.mkdtemp(prefix="store-faults-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
    """A folder, while somebody may be writing there."""
    while path.exists():
        shutil.rmtree(path, ignore_errors=True)


def identity_of(number: int) -> IndexIdentity:
    return sample_identity(range(1000 * number, 1000 * number + 32))


def array_of(number: int, fill: int, part: int, nbytes: int) -> Any:
    """The bytes of one array: no two of (number, fill, part) share a word."""
    words = np.arange(nbytes // 8, dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64((number << 48) + (fill << 8) + part)
    return words.view(np.uint8)


def payload_of(number: int, fill: int, nbytes: int = SMALL, *, parts: int = 4, seconds: float = 1.5) -> IndexPayload:
    """An index of ``parts`` lazy arrays of about ``nbytes`` together, all told by (number, fill)."""
    size = max(8, nbytes // parts // 8 * 8)
    arrays = {
        ArrayKey("kv", part): LazyArray("uint8", (size,), partial(array_of, number, fill, part, size))
        for part in range(parts)
    }
    stats = {"number": number, "fill": fill, "size": size}
    return IndexPayload(identity_of(number), arrays, stats=stats, info=BuildInfo(created=1.7e9, build_seconds=seconds))


def fill_of(index: IndexFile) -> int:
    """Compares every byte with what was put, after ``verify()``. Returns the fill; raises AssertionError."""
    index.verify()
    number, fill, size = (int(index.stats[name]) for name in ("number", "fill", "size"))
    assert index.identity == identity_of(number), f"identity of {number}"
    for key in index.keys:
        assert np.array_equal(index.array(*key), array_of(number, fill, key.layer, size)), f"bytes of {tuple(key)}"
    return fill


def read_fill(store: Any, number: int) -> int:
    with store.get(identity_of(number)) as index:
        assert index.stats["number"] == number, f"index {index.stats['number']} for {number}"
        return fill_of(index)


def stored_files(path: Path) -> list[str]:
    """Names of everything in the shards of a store's folder, hidden names included."""
    return sorted(p.name for p in path.glob("*/*"))


def opened(path: Path, **options: Any) -> FileStore:
    store = FileStore(path, **{"create": True, **options})
    store.open()
    return store


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
    with contextlib.closing(_Descriptor(os.pidfd_open(pid))) as child:
        if not select.select([child.fd], [], [], seconds)[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class _Descriptor:
    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        os.close(self.fd)


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


def in_child(work: Callable[[], str], seconds: float) -> str | None:
    """What ``work`` returned in a forked child, its error as text, or the signal that ended it; None when it did not
    end in time.
    """
    line = Line()

    def run() -> None:
        try:
            text = work()
        except BaseException as err:
            text = f"{type(err).__name__}: {err}"
        line.say(text.replace("\n", " ")[:4000])

    code = reap(fork(run), seconds)
    said = "".join(line.close())
    return None if code is None else said or (signal.Signals(-code).name if code < 0 else f"exit {code}")
