"""A real Mooncake cluster for tests: a master and holders of memory, in a network namespace with only loopback.

Mooncake has no authentication, and some of its ports listen everywhere: so nothing of it runs outside such a
namespace. ``run_inside()`` runs a command in one; there ``is_inside()`` is true and ``shared()`` starts a cluster.
As a program (``python mooncake_cluster.py hold ...``) it is one holder, or the way into the namespace.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import itertools
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prefix_index.remote import MooncakeBlobs

INSIDE = "PREFIX_INDEX_MOONCAKE_NAMESPACE"
HOST = "127.0.0.1"
_QUIET = {"MC_TCP_BIND_ADDRESS": HOST, "GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}
_ports = itertools.count()


def is_inside() -> bool:
    return os.environ.get(INSIDE) == "1"


def why_not() -> str | None:
    """What is missing to run Mooncake here, or None."""
    if find_spec("mooncake") is None:
        return "mooncake-transfer-engine is not installed"
    if _master() is None:
        return "mooncake_master is not beside this Python, nor on PATH"
    with contextlib.suppress(OSError):
        import ctypes

        ctypes.CDLL("libibverbs.so.1")
        return None if _unshare() else "unshare cannot make a network namespace here"
    return "libibverbs1 is not installed"


def run_inside(command: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a command in a fresh network namespace, its output in one stream; kills all of it when time is up."""
    enter = ["timeout", "--signal=KILL", str(timeout_s), *_unshare(), sys.executable, __file__, "enter", *command]
    env = {**os.environ, **_QUIET, INSIDE: "1"}
    return subprocess.run(enter, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


class Cluster:
    """One master and its holders, for a ``with`` block."""

    def __init__(self, *, segment_nbytes: int = 256 << 20, master_flags: Sequence[str] = ()) -> None:
        self._segment_nbytes = segment_nbytes
        self._flags = master_flags
        self._ports = _free_port(), _free_port()
        self.address, self.listing_url = f"{HOST}:{self._ports[0]}", f"http://{HOST}:{self._ports[1]}"
        self.master: subprocess.Popen[bytes]
        self.holders: list[subprocess.Popen[bytes]] = []

    def start_master(self) -> None:
        flags = {"rpc_address": HOST, "rpc_port": self._ports[0], "rpc_thread_num": 2}
        flags |= {"metrics_host": HOST, "metrics_port": self._ports[1], "client_ttl": 2}
        command = [str(_master()), *(f"--{name}={value}" for name, value in flags.items()), *self._flags]
        self.master = _spawn(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60.0
        while not self._is_up():
            assert time.monotonic() < deadline, "the master did not start within 60 s"
            time.sleep(0.05)

    def start_holder(self) -> None:
        command = [sys.executable, __file__, "hold", self.address, str(self._segment_nbytes)]
        holder = _spawn(command, stdout=subprocess.PIPE)
        assert holder.stdout is not None
        self.holders.append(holder)
        assert holder.stdout.readline() == b"holding\n", "the holder of memory did not start"

    def kill_master(self) -> None:
        self.master.kill()
        self.master.wait()

    def kill_holders(self) -> None:
        for holder in self.holders:
            holder.kill()
            holder.wait()
        self.holders.clear()

    def pause_holders(self) -> None:
        for holder in self.holders:
            holder.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, holder.pid, os.WSTOPPED)  # until it stands still

    def resume_holders(self) -> None:
        for holder in self.holders:
            holder.send_signal(signal.SIGCONT)

    def blobs(self, **options: Any) -> MooncakeBlobs:
        return MooncakeBlobs(self.address, listing_url=self.listing_url, host=HOST, **options)

    def __enter__(self) -> Cluster:
        self.start_master()
        self.start_holder()
        return self

    def __exit__(self, *_: object) -> None:
        self.resume_holders()
        self.kill_holders()
        self.kill_master()

    def _is_up(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.listing_url}/health", timeout=10):
            return True
        return False


@functools.lru_cache(maxsize=1)
def shared() -> Cluster:
    """The cluster that the tests of one process share; tests keep apart by the store's folder."""
    assert is_inside()
    everything = contextlib.ExitStack()
    atexit.register(everything.close)
    return everything.enter_context(Cluster())


class _Kept(MooncakeBlobs):
    """One client for many stores: Mooncake takes most of a second to end one."""

    def open(self, timeout_s: float) -> None:
        if self._client is None:
            super().open(timeout_s)

    def close(self) -> None:
        """At the end of the process."""


@functools.lru_cache(maxsize=1)
def shared_blobs() -> MooncakeBlobs:
    """A client of the shared cluster that stays connected when a store is closed."""
    cluster = shared()
    return _Kept(cluster.address, listing_url=cluster.listing_url, host=HOST)


def _spawn(command: Sequence[str], *, stdout: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env={**os.environ, **_QUIET}, stdout=stdout, stderr=subprocess.DEVNULL)


def _master() -> str | None:
    beside = Path(sys.executable).with_name("mooncake_master")
    return str(beside) if beside.is_file() else shutil.which("mooncake_master")


@functools.lru_cache(maxsize=1)
def _unshare() -> list[str]:
    """The command that makes a namespace: as root, or as the root of a user namespace; empty where neither works."""
    if shutil.which("unshare") is not None:
        for options in (["--net"], ["--net", "--user", "--map-root-user"]):
            if subprocess.run(["unshare", *options, "true"], capture_output=True, check=False).returncode == 0:
                return ["unshare", *options]
    return []


def _free_port() -> int:
    """One that nobody else takes before it is used: below those that the kernel gives out (from 32768 on), above those
    that Mooncake seeks for itself (up to 17000), and another one for each process and call.
    """
    while True:
        port = 20_000 + (os.getpid() * 16 + next(_ports)) % 12_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


def _loopback_up() -> None:
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(control, get_flags, request))[1]
        fcntl.ioctl(control, set_flags, struct.pack("16sh14x", b"lo", flags | up))


def _hold(master: str, segment_nbytes: int) -> None:
    from mooncake.store import MooncakeDistributedStore

    holder = MooncakeDistributedStore()
    if holder.setup(f"{HOST}:{_free_port()}", "P2PHANDSHAKE", segment_nbytes, 16 << 20, "tcp", "", master):
        raise SystemExit("no segment")
    print("holding", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "enter":
        _loopback_up()
        os.execvp(sys.argv[2], sys.argv[2:])
    _hold(sys.argv[2], int(sys.argv[3]))
