"""Every store that the conformance suite runs against: name -> (tmp_path) -> context of a store, not yet open. And the
service in a process of its own, which can be killed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import resource
import secrets
import signal
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

from prefix_index import Copies, FileStore, IndexStore, SharedStore
from prefix_index.remote import Blobs, ObjectBlobs, RemoteStore
from prefix_index.service import Limits, StoreClient, StoreServer
from tests.prefix_index import mooncake_cluster
from tests.prefix_index.small_stores import SOON, Line, fork, reap

Tier: TypeAlias = Callable[[Path], AbstractContextManager[IndexStore]]
PATIENCE_S = 60.0
"""Of stores whose time limits are not what is tested: no stall of the machine is an answer that did not come."""


def eventually(
    holds: Callable[[], object], seconds: float = PATIENCE_S, *, but: tuple[type[Exception], ...] = ()
) -> None:
    """Waits until ``holds`` says so; it may raise ``but`` until then."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(*but):
            if holds():
                return
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


@functools.lru_cache(maxsize=1)
def s3_endpoint() -> str:
    """A real S3 protocol over loopback: moto's server, in a thread that ends with this process."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    atexit.register(server.stop)
    host, port = server.get_host_and_port()
    return f"http://{host}:{port}"


def new_bucket() -> ObjectBlobs:
    """An empty bucket, and a folder in it."""
    set_credentials()
    name, endpoint = f"bucket-{secrets.token_hex(6)}", s3_endpoint()
    request = urllib.request.Request(f"{endpoint}/{name}", method="PUT")
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60).close()
    options = {"endpoint": endpoint, "region": "us-east-1", "client_options": {"allow_http": True}}
    return ObjectBlobs(f"s3://{name}/fleet", **options)


def set_credentials() -> None:
    """Where obstore finds them in real life. Without any it would ask the cloud's metadata service."""
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "test-key")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "test-secret")


def copies_in(folder: Path, max_bytes: int = 150 << 10) -> Copies:
    """In a second folder, in real life on a tmpfs, with room for two of the suite's indexes."""
    return Copies(folder, keeper=FileStore(folder, create=True, max_bytes=max_bytes))


@contextlib.contextmanager
def shared_file_file(tmp_path: Path) -> Iterator[IndexStore]:
    """A folder of this machine, and one that others share."""
    local, remote = FileStore(tmp_path / "store", create=True), FileStore(tmp_path / "shared", create=True)
    with FileStore(tmp_path / "shared", create=True):
        yield SharedStore(local, [remote], timeout_s=PATIENCE_S)


def shared_with(blobs: Callable[[Path], Blobs]) -> Tier:
    """A folder of this machine and a remote store, of several chunks an index."""

    @contextlib.contextmanager
    def tier(tmp_path: Path) -> Iterator[IndexStore]:
        remote = RemoteStore(blobs(tmp_path), folder=tmp_path.name, chunk_nbytes=16 << 10, timeout_s=PATIENCE_S)
        yield SharedStore(FileStore(tmp_path / "store", create=True), [remote], timeout_s=PATIENCE_S)

    return tier


@contextlib.contextmanager
def service(tmp_path: Path) -> Iterator[IndexStore]:
    """A client of a service in another thread, with both of its tiers."""
    with served(tmp_path, two_tiers(tmp_path)) as endpoint:
        yield patient(endpoint)


def patient(endpoint: str, **options: Any) -> StoreClient:
    """A client that takes no stall of the machine for a service that is away."""
    return StoreClient(endpoint, **{"timeout_s": PATIENCE_S, **options})


def two_tiers(tmp_path: Path, **options: Any) -> FileStore:
    """``options`` are those of the durable folder."""
    return FileStore(tmp_path / "store", create=True, copies=copies_in(tmp_path / "dram"), **options)


def endpoint_in(tmp_path: Path) -> str:
    """A place where a service may listen."""
    (tmp_path / "run").mkdir(mode=0o700)
    return f"ipc://{tmp_path}/run/s"


@contextlib.contextmanager
def served(tmp_path: Path, own: FileStore | None = None, limits: Limits | None = None) -> Iterator[str]:
    """A service in another thread; gives its endpoint. By default of ``tmp_path/store`` alone, and one that collects
    nothing by itself: how long a test takes does not matter.
    """
    endpoint = endpoint_in(tmp_path)
    own = own or FileStore(tmp_path / "store", create=True)
    server = StoreServer(own, endpoint, limits or Limits(collect_s=3600.0))
    server.open()
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield endpoint
    finally:
        server.stop()
        thread.join()
        server.close()


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
        copies = copies_in(self._path / "dram", 8 << 20)
        store = FileStore(self._path / "store", create=True, copies=copies, partial_grace_s=grace_s)
        server = StoreServer(store, self.endpoint, Limits(rescan_s=rescan_s, collect_s=5 * rescan_s))
        signal.signal(signal.SIGTERM, lambda *_: server.stop())
        server.open()
        line.say("up")
        server.serve()
        server.close()


TIERS: dict[str, Tier] = {
    "file": lambda folder: contextlib.nullcontext(FileStore(folder / "store", create=True)),
    "copied": lambda folder: contextlib.nullcontext(two_tiers(folder)),
    "service": service,
    "shared-file": shared_file_file,
    "shared-memory": shared_with(lambda folder: ObjectBlobs("memory:///")),
    "shared-s3": shared_with(lambda folder: new_bucket()),
}
if mooncake_cluster.is_inside():  # test_remote_objects.py runs the suite again in a network namespace of its own
    TIERS["shared-mooncake"] = shared_with(lambda folder: mooncake_cluster.shared_blobs())
