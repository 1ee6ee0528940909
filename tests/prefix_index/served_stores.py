"""What the tests of the store service share: a prompt to take identities from, waiting, a service of one's own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from prefix_index.service import Depot, Limits, ServedFolder, StoreServer

PROMPT = tuple(range(64))


def eventually(holds: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


@contextlib.contextmanager
def served(tmp_path: Path, depot: Depot | None = None, limits: Limits | None = None) -> Iterator[str]:
    """A service in another thread; gives its endpoint. Without a depot: of ``tmp_path/store`` alone."""
    (tmp_path / "run").mkdir(mode=0o700)
    endpoint = f"ipc://{tmp_path}/run/s"
    server = StoreServer(depot or Depot(ServedFolder(tmp_path / "store", create=True)), endpoint, limits)
    server.open()
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield endpoint
    finally:
        server.stop()
        thread.join()
        server.close()
