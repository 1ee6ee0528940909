"""Files that are written whole or not at all, whoever else writes the same one meanwhile."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def partial_file(path: str | Path, *, private: bool = False) -> Iterator[Path]:
    """An empty file beside `path` that no other writer has; behind the block it takes the name. None is left behind by
    a block that raises.

    Args:
        path: of the file to be.
        private: for this user alone, and for a process that runs now. Another one is whole also when the machine stops.

    Raises:
        OSError: the folder is missing, full or cannot be written to.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        partial.touch(0o600 if private else 0o666, exist_ok=False)
        yield partial
        if private:
            partial.chmod(0o600)  # should a library write another file than the one that was there
        else:
            _sync(partial, os.O_RDONLY)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if not private:
        _sync(path.parent, os.O_RDONLY | os.O_DIRECTORY)


def write_whole(path: str | Path, content: bytes) -> None:
    """As `partial_file`, of bytes."""
    with partial_file(path) as partial:
        partial.write_bytes(content)


def _sync(path: Path, flags: int) -> None:
    opened = os.open(path, flags)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
