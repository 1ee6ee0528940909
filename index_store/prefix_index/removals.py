"""What has left a store's folder: a short record beside the indexes, so that people can be told that there was one.

A file `.removed` of one JSON object a line, the newest last, at most `MAX_NBYTES`. It is advice: a removal that cannot
be written down is none the less one, and no look-up reads it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from .folder import closing_fd, folder_fd, give_mode, open_regular, remove_unlocked
from .format import IndexIdentity
from .store import IndexEntry

NAME: Final = ".removed"
PARTIAL: Final = f"{NAME}-"
MAX_NBYTES: Final = 1 << 20
"""About 1,500 removals; then the older half goes."""

Why = Literal["expired", "evicted", "removed"]
"""Its time was over; others needed its bytes; somebody removed it."""


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """One index that left. ``removed`` is in seconds since the Unix epoch."""

    identity: IndexIdentity
    name: str | None
    removed: float
    why: Why


_DECODER: Final = msgspec.json.Decoder(Removal)


def note_removal(folder: Path, entry: IndexEntry, why: Why, *, mode: int) -> None:
    """Writes down that an index left; raises nothing. Call it while nobody else changes the folder (``exclusive``)."""
    removal = Removal(identity=entry.identity, name=entry.retention.name, removed=time.time(), why=why)
    with contextlib.suppress(Exception):  # nothing here is worth a put or a collection
        path = folder / NAME
        if path.is_file() and path.stat().st_size > MAX_NBYTES:
            lines = _lines(path)
            partial = folder / f"{PARTIAL}{os.getpid()}"
            _write(partial, b"".join(lines[len(lines) // 2 :]), mode, os.O_TRUNC)  # of a process that died: its number
            os.replace(partial, path)
        _write(path, msgspec.json.encode(removal) + b"\n", mode, os.O_APPEND)


def _write(path: Path, data: bytes, mode: int, how: int) -> None:
    with closing_fd(open_regular(path, os.O_RDWR | os.O_CREAT | how, mode)) as fd:
        give_mode(fd, mode)
        last = os.pread(fd, 1, max(os.fstat(fd).st_size - 1, 0))
        data = data if last in (b"", b"\n") else b"\n" + data  # a full disk cut the last line short
        while data:  # to its end, or an error of the disk: what is cut short takes no record's place
            data = data[os.write(fd, data) :]


def _lines(path: Path) -> list[bytes]:
    """The last of a record that is too long: somebody else's. Raises OSError."""
    try:
        with closing_fd(open_regular(path, os.O_RDONLY)) as fd, open(fd, "rb", closefd=False) as file:
            file.seek(max(os.fstat(fd).st_size - 2 * MAX_NBYTES, 0))
            return file.read(2 * MAX_NBYTES).splitlines(keepends=True)
    except FileNotFoundError:
        return []


def removals_behind(folder: Path, last: bytes) -> tuple[list[Removal], bytes]:
    """What left behind the line ``last``, of all that is still in the record; and its last line now, ``last`` where
    there is none.
    """
    news: list[Removal] = []
    with contextlib.suppress(OSError):
        lines = [line for line in _lines(folder / NAME) if line.endswith(b"\n")]  # others are being written
        for line in lines[lines.index(last) + 1 if last in lines else 0 :]:
            last = line
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                news.append(_DECODER.decode(line))
    return news, last


def clean_removals(folder: Path, grace_s: float) -> None:
    """Removes what processes left that died while they shortened a record; raises nothing."""
    with contextlib.suppress(OSError), folder_fd(folder) as fd:
        remove_unlocked(fd, PARTIAL, grace_s=grace_s)


def read_removals(folder: str | os.PathLike[str]) -> Sequence[Removal]:
    """What left the folder, the newest first, each digest once; none where nobody wrote it down."""
    found: dict[str, Removal] = {}
    with contextlib.suppress(OSError):
        for line in reversed(_lines(Path(folder) / NAME)):
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):  # cut off, or somebody else's
                removal = _DECODER.decode(line)
                found.setdefault(removal.identity.digest, removal)
    return tuple(found.values())
