"""How many connections a service takes, and whose sockets a client talks to."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prefix_index import StoreFolderError, StoreUnavailable
from prefix_index.service import Limits
from prefix_index.service.endpoint import most_connections, raise_descriptor_limit, socket_path
from prefix_index.testing import sample_payload
from tests.prefix_index.faults.tools import SOON
from tests.prefix_index.served_stores import patient, served
from tests.prefix_index.tiers import eventually


def test_one_connection_too_many_is_told_so_and_given_back(tmp_path: Path) -> None:
    with served(tmp_path, limits=Limits(connections=2)) as endpoint, patient(endpoint) as a, patient(endpoint) as b:
        a.put(sample_payload())
        with pytest.raises(StoreUnavailable, match=r"at most 2 connections .*found 3 of them"):
            patient(endpoint).open()
        assert a.status().counts["refused"] >= 1
        b.close()
        with contextlib.ExitStack() as opened:

            def fits() -> bool:
                with contextlib.suppress(StoreUnavailable):
                    opened.enter_context(patient(endpoint))
                    return True
                return False

            eventually(fits)


def test_the_bound_leaves_descriptors_for_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 1024)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[0])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.__setitem__(0, new))
    assert most_connections(4096) == 448
    limits[0] = (1024, 1 << 20)
    raise_descriptor_limit()
    assert limits[0] == (1 << 16, 1 << 20)
    assert most_connections(4096) == 4096
    limits[0] = (20, 20)
    raise_descriptor_limit()
    assert limits[0] == (20, 20)
    assert most_connections(4096) == 1
    limits[0] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    raise_descriptor_limit()
    assert most_connections(4096) == 4096


def test_a_service_outlives_more_connections_than_it_may_have_descriptors(tmp_path: Path) -> None:
    """Under a hard limit of 1,024, which is as far as the soft one can be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this process may not have as many descriptors itself")
    (tmp_path / "run").mkdir(mode=0o700)
    endpoint = f"ipc://{tmp_path}/run/s"
    command = [sys.executable, "-m", "sglang_ext.cli", "store", "serve", "--dir", str(tmp_path / "store")]
    service = subprocess.Popen(
        [*command, "--endpoint", endpoint],
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024)),
    )
    held: list[socket.socket] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        with patient(endpoint) as client:
            client.put(sample_payload())
            for number in range(1200):
                one = socket.socket(socket.AF_UNIX)
                held.append(one)
                one.settimeout(SOON)
                with contextlib.suppress(OSError):
                    one.connect(str(socket_path(endpoint)))
                if number % 20 == 0:
                    time.sleep(0.02)  # its loop has a turn
                    assert service.poll() is None, f"the service ended at connection {number}"
            assert client.status().counts["cut"] > 0
            with pytest.raises(StoreUnavailable):
                patient(endpoint, timeout_s=5.0).open()
            for one in held:
                one.close()
            client.get(sample_payload().identity).close()

            def answers() -> bool:
                with contextlib.suppress(StoreUnavailable), patient(endpoint):
                    return True
                return False

            eventually(answers)
    finally:
        for one in held:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        service.terminate()
        status = service.wait(SOON)
    assert status == 0


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_no_place_for_a_socket(tmp_path: Path, mode: int) -> None:
    """They could rename the socket away and back. Also once a client is connected."""
    with served(tmp_path) as endpoint, patient(endpoint) as client:
        folder = socket_path(endpoint).parent
        client.put(sample_payload())
        folder.chmod(mode)
        message = rf"/run: socket's folder: expected one that only user .* can write to, found mode {mode:04o}; chmod"
        for call in (patient(endpoint).open, client.status):
            with pytest.raises(StoreFolderError, match=message):
                call()
        client.get(sample_payload().identity).close()  # which tells nobody
        folder.chmod(0o700)
        client.get(sample_payload().identity).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_socket_in_somebody_elses_folder_is_not_asked(tmp_path: Path) -> None:
    with served(tmp_path) as endpoint, patient(endpoint) as client:
        folder = socket_path(endpoint).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (tmp_path / "link").symlink_to(folder)
        os.chown(tmp_path / "link", 12345, -1, follow_symlinks=False)
        with pytest.raises(StoreFolderError, match="socket's folder: expected owner 0, found owner 12345"):
            patient(f"ipc://{tmp_path}/link/s").open()
        os.chown(folder, 12345, -1)
        for call in (patient(endpoint).open, client.status):
            with pytest.raises(StoreFolderError, match="socket's folder: expected owner 0, found owner 12345"):
                call()
        os.chown(folder, 0, -1)
