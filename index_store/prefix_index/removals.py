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

from .folder import give_mode
from .format import IndexIdentity
from .store import IndexEntry

NAME: Final = ".removed"
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
    with contextlib.suppress(OSError):
        path = folder / NAME
        lines = _lines(path)
        if sum(map(len, lines)) > MAX_NBYTES:
            partial = folder / f"{NAME}-{os.getpid()}"
            _append(partial, b"".join(lines[len(lines) // 2 :]), mode)
            os.replace(partial, path)
        _append(path, msgspec.json.encode(removal) + b"\n", mode)


def _append(path: Path, data: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        give_mode(fd, mode)
        os.write(fd, data)
    finally:
        os.close(fd)


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []


def read_removals(folder: str | os.PathLike[str]) -> Sequence[Removal]:
    """What left the folder, the newest first, each digest once; none where nobody wrote it down."""
    found: dict[str, Removal] = {}
    with contextlib.suppress(OSError):
        for line in reversed(_lines(Path(folder) / NAME)):
            with contextlib.suppress(msgspec.MsgspecError, ValueError):  # cut off, or somebody else's
                removal = _DECODER.decode(line)
                found.setdefault(removal.identity.digest, removal)
    return tuple(found.values())
