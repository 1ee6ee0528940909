"""What the tests of the store service share: a prompt for identities, waiting, clients, a service of one's own."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefix_index import TieredStore
from prefix_index.service import Depot, Limits, ServedFolder, StoreClient, StoreServer
from tests.prefix_index.tiers import PATIENCE_S

PROMPT = tuple(range(64))


def eventually(holds: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def remove(folder: Path) -> None:
    while folder.exists():  # the service may be writing there
        shutil.rmtree(folder, ignore_errors=True)


def patient(endpoint: str, **options: Any) -> StoreClient:
    """A client that takes no stall of the machine for a service that is away."""
    return StoreClient(endpoint, **{"timeout_s": PATIENCE_S, **options})


def two_tiers(tmp_path: Path, **options: Any) -> Depot:
    """``options`` are those of the durable tier."""
    slow = ServedFolder(tmp_path / "store", create=True, **options)
    return Depot(slow, ServedFolder(tmp_path / "dram", create=True, max_bytes=150 << 10))


def copied(own: Depot) -> None:
    """Until nothing is on its way to DRAM: a copy that comes late uses the index, and meets what a test does to it."""
    store = own.store
    assert isinstance(store, TieredStore)
    eventually(lambda: not (store._promoter._pending or store._promoter.busy()))


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
