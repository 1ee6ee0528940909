"""What the campaigns of the store service share: a service that can be killed, its clients, and their limits."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import tempfile
from pathlib import Path

from prefix_index import Copies, FileStore
from prefix_index.service import Limits, StoreClient, StoreServer

from .tools import SOON, Line, fork, reap

CALL_S = SOON
"""Longer than any call of these clients may take, on the slowest of machines."""
MAX_GROWTH = 96 << 20


class Service:
    """A service in a forked process, which can be killed and started again at the same place."""

    def __init__(self, path: Path, *, rescan_s: float = 0.1, grace_s: float = 0.3, max_file: int = 0) -> None:
        self._socket_folder = tempfile.TemporaryDirectory(prefix="svc-")
        self.endpoint = f"ipc://{self._socket_folder.name}/s"
        self.pid = -1
        self._path = path
        self._options = rescan_s, grace_s, max_file

    def start(self) -> bool:
        """Whether it listens."""
        line = Line()
        self.pid = fork(lambda: self._serve(line))
        up = line.wait_for("up", SOON)
        os.close(line.writer)
        os.close(line.reader)
        return up

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        reap(self.pid, SOON)

    def stop(self) -> int | None:
        """Its exit status, None where SIGTERM did not end it."""
        os.kill(self.pid, signal.SIGTERM)
        return reap(self.pid, SOON)

    def rss(self) -> int:
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self) -> Service:
        assert self.start(), "the service did not start"
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.kill()
        self._socket_folder.cleanup()

    def _serve(self, line: Line) -> None:
        rescan_s, grace_s, max_file = self._options
        if max_file:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_file, max_file))
        copies = Copies(self._path / "dram", keeper=FileStore(self._path / "dram", create=True, max_bytes=8 << 20))
        store = FileStore(self._path / "store", create=True, copies=copies, partial_grace_s=grace_s)
        server = StoreServer(store, self.endpoint, Limits(rescan_s=rescan_s, collect_s=5 * rescan_s))
        signal.signal(signal.SIGTERM, lambda *_: server.stop())
        server.open()
        line.say("up")
        server.serve()
        server.close()


def client_of(service: Service) -> StoreClient:
    """One that takes no stall of the machine for a service that is away."""
    return StoreClient(service.endpoint, timeout_s=CALL_S / 2)


def hasty_client_of(service: Service) -> StoreClient:
    """One with the limits of real life, for whom a service may be away."""
    return StoreClient(service.endpoint, timeout_s=2.0)
