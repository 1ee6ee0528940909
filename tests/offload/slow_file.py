"""A file that takes as long to open as a test wants, in this and any other process."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def slow(path: Path) -> Iterator[None]:
    """Whoever opens the file within the block goes on behind it, or after the kernel's 45 s: it has a lease."""
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # which nobody has to handle
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(file)
