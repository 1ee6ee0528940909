"""Values in Mooncake Store, which SGLang's users run below HiCache: without authentication, on trusted networks only.

What it holds may vanish at any time. Its client library hangs on a dead machine for up to 30 s and crashes when it is
called after ``close``; ``RemoteStore`` keeps both away from its callers.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import mmap
import os
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

import numpy as np

from ..errors import InvalidPayload
from .blobs import BlobMissing, BlobsFailed, BlobsFull, BlobTooLong

_MISSING: Final = -704
_BEING_WRITTEN: Final = -703
_NO_ROOM: Final = (-200, -2)
_OUT_OF_RANGE: Final = -600
_LEASE_EXPIRED: Final = -707
_MAX_LISTING_NBYTES: Final = 1 << 30
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(eq=False)
class MooncakeBlobs:
    """A ``Blobs`` in the Mooncake Store of the master at ``master`` (``host:port``).

    ``metadata``     address of the metadata service, or ``P2PHANDSHAKE``
    ``listing_url``  the master's HTTP port, which can list names (``--metrics_port``; its client library cannot)
    ``host``         this machine's address for the others; by default the one that reaches the master
    ``protocol``     ``tcp``, or ``rdma`` with ``devices``
    ``segment_nbytes``  memory of this process that it lends to the store; 0 lends none
    ``replicas``     copies of each value, on different machines

    The constructor raises InvalidPayload for an address that is none.
    """

    master: str
    metadata: str = "P2PHANDSHAKE"
    _: KW_ONLY
    listing_url: str | None = None
    host: str | None = None
    protocol: str = "tcp"
    devices: str = ""
    segment_nbytes: int = 0
    local_buffer_nbytes: int = 16 << 20
    replicas: int = 1

    def __post_init__(self) -> None:
        _address(self.master)
        self.name = f"mooncake://{self.master}"
        self._timeout_s = 5.0
        self._client: Any = None
        self._config: Any = None

    def open(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        try:
            library = importlib.import_module("mooncake.store")
        except ImportError as err:
            raise BlobsFailed(f"{err}: install mooncake-transfer-engine and libibverbs1") from None
        # ``setup`` asks an absent master for 90 s and stops every thread of this process meanwhile.
        self._ask("health")
        try:
            socket.create_connection(_address(self.master), timeout=timeout_s).close()
        except OSError as err:
            raise BlobsFailed(f"no master at {self.master}: {err}") from None
        config = library.ReplicateConfig()
        config.replica_num = self.replicas
        client = library.MooncakeDistributedStore()
        host, memory = self.host or _address_towards(self.master), (self.segment_nbytes, self.local_buffer_nbytes)
        if code := client.setup(host, self.metadata, *memory, self.protocol, self.devices, self.master):
            raise BlobsFailed(f"setup of the client: error {code}")
        self._client, self._config = client, config

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def fetch(self, name: str, limit: int) -> bytes:
        nbytes = self.size(name)
        if nbytes > limit:
            raise BlobTooLong(f"{nbytes} bytes")
        buffer = mmap.mmap(-1, nbytes + mmap.PAGESIZE)
        with self._registered(memoryview(buffer)) as pointer:
            got = _patiently(lambda p, n: self._open().get_into(name, p, n), pointer, len(buffer))
        if got < 0:
            raise _failed(got)
        return bytes(buffer[:got])

    def size(self, name: str) -> int:
        nbytes = _patiently(lambda: self._open().get_size(name))
        if nbytes < 0:
            raise _failed(nbytes)
        return nbytes

    def write(self, name: str, value: memoryview) -> None:
        deadline = time.monotonic() + self._timeout_s / 2
        with self._registered(value) as pointer:
            # ``put`` would keep an old value. A full store evicts when it is asked, but answers before it has.
            while code := _patiently(lambda: self._open().upsert_from(name, pointer, len(value), self._config)):
                if code not in _NO_ROOM:
                    raise _failed(code)
                if time.monotonic() > deadline:
                    raise BlobsFull(f"error {code}: no segment has room")
                time.sleep(0.05)

    def create(self, name: str, value: memoryview) -> bool | None:
        """None: a put on an existing value succeeds without a word, and values may vanish."""
        return None

    def delete(self, name: str) -> None:
        # Forced: a value that was read lately could not be removed otherwise.
        code = _patiently(lambda: self._open().remove(name, True))
        if code not in (0, _MISSING):
            raise _failed(code)

    def names(self, folder: str) -> Mapping[str, str]:
        start = f"{folder}/".encode()
        names = (line for line in self._ask("get_all_keys").split(b"\n") if line.startswith(start))
        return {name.decode("ascii", "replace"): "" for name in names}

    def _ask(self, what: str) -> bytes:
        listing_url = self.listing_url or f"http://{self.master.rpartition(':')[0]}:9003"
        url = f"{listing_url}/{what}"
        try:
            with _OPENER.open(url, timeout=self._timeout_s) as reply:
                raw: bytes = reply.read(_MAX_LISTING_NBYTES + 1)
        except (OSError, http.client.HTTPException) as err:
            raise BlobsFailed(f"{url}: {err}") from None
        if len(raw) > _MAX_LISTING_NBYTES:
            raise BlobsFailed(f"{url}: more than {_MAX_LISTING_NBYTES} bytes")
        return raw

    def _open(self) -> Any:
        if self._client is None:
            raise BlobsFailed("the client is closed")
        return self._client

    @contextlib.contextmanager
    def _registered(self, memory: memoryview) -> Iterator[int]:
        """The memory's address, known to the transfer engine while the block runs."""
        client, pointer = self._open(), np.frombuffer(memory, np.uint8).ctypes.data
        if code := client.register_buffer(pointer, len(memory)):
            raise BlobsFailed(f"registering {len(memory)} bytes: error {code}")
        try:
            yield pointer
        finally:
            client.unregister_buffer(pointer)


def _address(master: str) -> tuple[str, int]:
    host, _, port = master.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()):
        remedy = "give the master's address, for instance 10.0.0.1:50051"
        raise InvalidPayload("Mooncake master", "host:port", repr(master)[:100], remedy)
    return host.strip("[]"), int(port)


def _address_towards(master: str) -> str:
    if bound := os.environ.get("MC_TCP_BIND_ADDRESS"):
        return bound
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_address(master))
            return str(probe.getsockname()[0])
    except OSError as err:
        raise BlobsFailed(f"no way to {master}: {err}") from None


def _patiently(call: Callable[..., int], *args: Any) -> int:
    """The call's code, asked again for half a second while somebody else is writing the value."""
    deadline = time.monotonic() + 0.5
    while (code := int(call(*args))) == _BEING_WRITTEN and time.monotonic() < deadline:
        time.sleep(0.002)
    return code


def _failed(code: int) -> BlobMissing | BlobsFailed:
    # Out of range: it was deleted, and a longer one put. Expired: it may have been evicted while it was read.
    if code in (_MISSING, _BEING_WRITTEN, _OUT_OF_RANGE, _LEASE_EXPIRED):
        return BlobMissing("no such value, or not yet")
    return BlobsFailed(f"error {code} of Mooncake")
