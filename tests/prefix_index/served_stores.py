"""What the tests of the store service share: a prompt for identities, waiting, clients, a service of one's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefix_index import FileStore
from prefix_index.service import Limits, StoreClient
from tests.prefix_index.tiers import PATIENCE_S, copies_in, running

PROMPT = tuple(range(64))


def patient(endpoint: str, **options: Any) -> StoreClient:
    """A client that takes no stall of the machine for a service that is away."""
    return StoreClient(endpoint, **{"timeout_s": PATIENCE_S, **options})


def two_tiers(tmp_path: Path, **options: Any) -> FileStore:
    """``options`` are those of the durable folder."""
    return FileStore(tmp_path / "store", create=True, copies=copies_in(tmp_path / "dram"), **options)


def copied(own: FileStore) -> None:
    """Until nothing is on its way to DRAM: a copy that comes late uses the index, and meets what a test does to it."""
    assert own._prefetches.settle(60.0)


@contextlib.contextmanager
def served(tmp_path: Path, own: FileStore | None = None, limits: Limits | None = None) -> Iterator[str]:
    """A service in another thread; gives its endpoint. By default of ``tmp_path/store`` alone."""
    (tmp_path / "run").mkdir(mode=0o700)
    with running(own or FileStore(tmp_path / "store", create=True), f"ipc://{tmp_path}/run/s", limits) as endpoint:
        yield endpoint
