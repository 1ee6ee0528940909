"""The store service's process: its limits, how many connect, who listens on which socket and is asked, its command."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from prefix_index import FileStore, InvalidPayload, StoreFolderError, StoreUnavailable
from prefix_index.service import Limits, StoreClient, StoreServer, messages
from prefix_index.service.endpoint import SocketPlace, most_connections, raise_descriptor_limit, socket_path
from prefix_index.service.server import _leases
from sglang_ext.cli.store import memory_name
from tests.prefix_index.samples import sample_identity, sample_payload
from tests.prefix_index.small_stores import SOON
from tests.prefix_index.tiers import Service, endpoint_in, eventually, patient, served

OTHER = sample_identity(range(64))


def test_who_was_heard_from_least_recently_is_forgotten_first(tmp_path: Path) -> None:
    with (
        served(tmp_path, limits=Limits(clients=2)) as endpoint,
        patient(endpoint, name="a") as a,
        patient(endpoint, name="b"),
    ):
        a.status()
        with patient(endpoint, name="c") as c:
            eventually(lambda: sorted(text.split("(")[1][0] for text in c.status().clients) == ["a", "c"])


def test_a_service_that_was_restarted_hears_from_its_clients_again(process: Service) -> None:
    with patient(process.endpoint, name="stays") as client:
        client.put(sample_payload(fill=1))
        process.kill()
        assert process.start()

        def heard() -> bool:
            client.get(sample_identity()).close()
            return any("before this service started" in text for text in client.status().clients)

        eventually(heard)


def test_leases_are_told_while_somebody_waits_for_another_lock(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", create=True) as folder, (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wait = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX)"
        waiter = subprocess.Popen([sys.executable, "-c", wait, tmp_path / "lock"])
        try:
            eventually(lambda: f"{os.stat(tmp_path / 'lock').st_ino} 0 EOF" in waiting())
            with folder.lease(sample_identity()) or pytest.fail("held"):
                assert _leases(folder.folder) == [sample_identity().digest]
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
            waiter.wait()


def waiting() -> str:
    lines = Path("/proc/locks").read_text().splitlines()
    return "\n".join(line.replace(":", " ") for line in lines if "->" in line)


NETWORK = "expected a Unix socket, found .*, a network address: the service knows no authentication"
NO_PATH = "service endpoint: expected ipc:// and an absolute path"


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        *((name, NETWORK) for name in ("tcp://127.0.0.1:5555", "tcp://*:5555", "udp://x", "ws://x")),
        *((name, NO_PATH) for name in ("", "ipc://", "ipc://relative", "ipc://@abstract", "ipc:///a/", "/a/b")),
        ("ipc:///a\n", NO_PATH),
        ("ipc:///" + "a" * 200, "expected a path of at most 107 bytes, found 201 bytes"),
    ],
)
def test_only_absolute_socket_paths(endpoint: str, message: str) -> None:
    with pytest.raises(InvalidPayload, match=message):
        StoreClient(endpoint)


def test_a_place_that_cannot_be_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SocketPlace, "take", lambda self: None)
    one = StoreServer(FileStore(tmp_path / "store", create=True), f"ipc://{tmp_path}/none/s")
    message = "service socket: expected a place that can be bound, found No such file"
    with pytest.raises(StoreFolderError, match=message):
        one.open()
    one.close()


def test_a_folder_that_cannot_be_told_to_clients(tmp_path: Path) -> None:
    server = StoreServer(FileStore(tmp_path / "a\nb", create=True), endpoint_in(tmp_path))
    with pytest.raises(StoreFolderError, match="index store: expected a printable path"):
        server.open()


def test_an_open_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(StoreFolderError, match=r"socket's folder: expected mode 0700 .* chmod 700"):
        SocketPlace(tmp_path / "open" / "s").take()
    (tmp_path / "file").touch()
    with pytest.raises(StoreFolderError, match="expected a usable folder"):
        SocketPlace(tmp_path / "file" / "s").take()
    with pytest.raises(StoreFolderError, match=r"/file/x: socket's folder: expected .*, found Not a directory; give"):
        StoreClient(f"ipc://{tmp_path}/file/x/store").open()


def test_a_live_service_keeps_its_socket_and_a_dead_ones_is_replaced(process: Service) -> None:
    path = socket_path(process.endpoint)
    with pytest.raises(StoreFolderError, match=f"expected no running service, found process {process.pid}"):
        SocketPlace(path).take()
    process.kill()
    assert path.exists()
    assert process.start()
    with patient(process.endpoint) as client:
        client.put(sample_payload())


def test_a_file_in_the_sockets_place_stays(tmp_path: Path) -> None:
    path = socket_path(endpoint_in(tmp_path))
    path.write_text("mine")
    with pytest.raises(StoreFolderError, match="expected a socket or nothing, found another file"):
        SocketPlace(path).take()
    assert path.read_text() == "mine"
    path.unlink()
    place = SocketPlace(path)
    place.take()
    place.give_back()


def test_each_store_has_a_dram_folder_of_its_own() -> None:
    folders = ("/srv/a-b/c", "/srv/a/b-c", "/srv/a-b-c", "/x" * 100 + "/s", "/y" * 100 + "/s")
    names = {memory_name(path) for path in folders}
    assert len(names) == 5
    assert memory_name("/srv/a/../a-b/c/") in names
    assert all("/" not in name and len(name) < 100 for name in names)


def test_the_command_serves_and_tells(tmp_path: Path) -> None:
    endpoint = endpoint_in(tmp_path)
    command = [sys.executable, "-m", "sglang_ext.cli", "store"]
    serve = [*command, "serve", "--endpoint", endpoint, "--dir", tmp_path / "store", "--max-bytes", "1G"]
    serve += ["--memory-dir", tmp_path / "dram", "--memory-bytes", "1M"]

    def ran(*asked: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(asked, capture_output=True, text=True, check=False)

    def status_of(*flags: str) -> str:
        """The command waits two seconds for an answer, which may come later than that: then it is asked again."""
        deadline = time.monotonic() + 60
        while (told := ran(*command, "status", "--endpoint", endpoint, *flags)).returncode:
            assert "expected an answer of the service" in told.stderr, told.stderr
            assert time.monotonic() < deadline, told.stderr
        return told.stdout

    served = subprocess.Popen(serve, stderr=subprocess.PIPE, text=True)
    try:
        with patient(endpoint, timeout_s=300.0, name="test") as client:
            client.put(sample_payload())
            lease = client.lease(OTHER)
            assert lease is not None

            def status() -> messages.Status:
                return msgspec.json.decode(status_of("--json"), type=messages.Status)

            eventually(lambda: status().leases)  # it looks at its folders every two seconds
            told = status()
            assert (told.pid, told.indexes) == (served.pid, 1)
            assert [(t.name, t.max_bytes) for t in told.tiers] == [("dram", 1 << 20), ("ssd", 1 << 30)]
            assert told.leases == [OTHER.digest]
            assert any("(test)" in text for text in told.clients)
            shown = status_of()
            assert f"pid {served.pid}" in shown
            assert "1 leases held" in shown
            again = ran(*serve)
            assert (again.returncode, "expected no running service" in again.stderr) == (1, True)
        served.send_signal(signal.SIGTERM)
        _, said = served.communicate(timeout=300)
        assert served.returncode == 0
        assert "store INFO serves" in said
        assert "ends after" in said
        assert "Traceback" not in said
    finally:
        served.kill()
        served.wait()
    missing = ran(*command, "status", "--endpoint", endpoint)
    assert missing.returncode == 1
    assert "start `sglang-ext store serve`" in missing.stderr


@pytest.mark.parametrize("digest", ["../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n", ""])
def test_what_is_no_digest_is_no_message(digest: str) -> None:
    with pytest.raises(messages.BadMessageError):
        messages.decode_request(messages.encode({"type": "Used", "digest": digest}))


def test_a_client_of_another_protocol_version_is_told(tmp_path: Path) -> None:
    with served(tmp_path) as endpoint:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(endpoint)

        def told(body: bytes) -> messages.Failed:
            socket.send(b"12345678" + body)
            assert socket.poll(60_000)
            answer = socket.recv()
            assert answer[:8] == b"12345678"
            failed = messages.decode_answer(answer[8:])
            assert isinstance(failed, messages.Failed)
            return failed

        try:
            failed = told(messages.encode(messages.Hello(version=99, pid=1)))
            assert (failed.expected, failed.found) == (f"protocol version {messages.PROTOCOL}", "version 99")
            failed = told(messages.encode({"type": "Changes", "epoch": "", "since": 0}))  # of version 1
            assert "one frame of an id and a message of protocol version" in failed.expected
            assert "from a client of this version" in failed.expected
        finally:
            socket.close(linger=0)


def test_one_connection_too_many_is_told_so_and_given_back(tmp_path: Path) -> None:
    with served(tmp_path, limits=Limits(connections=2)) as endpoint, patient(endpoint) as a, patient(endpoint) as b:
        a.put(sample_payload())
        with pytest.raises(StoreUnavailable, match=r"at most 2 connections .*found 3 of them"):
            patient(endpoint).open()
        assert a.status().counts["refused"] >= 1
        b.close()
        eventually_connected(endpoint)


def eventually_connected(endpoint: str) -> None:
    with contextlib.ExitStack() as opened:
        eventually(lambda: opened.enter_context(patient(endpoint)), but=(StoreUnavailable,))


def test_the_bound_leaves_descriptors_for_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(0, 0)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[0])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.__setitem__(0, new))
    endless = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    for before, after, most in (
        ((1024, 1024), (1024, 1024), 448),
        ((1024, 1 << 20), (1 << 16, 1 << 20), 4096),
        ((20, 20), (20, 20), 1),
        (endless, endless, 4096),
    ):
        limits[0] = before
        raise_descriptor_limit()
        assert limits[0] == after
        assert most_connections(4096) == most


def test_a_service_outlives_more_connections_than_it_may_have_descriptors(tmp_path: Path) -> None:
    """Under a hard limit of 1,024, which is as far as the soft one can be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this process may not have as many descriptors itself")
    endpoint = endpoint_in(tmp_path)
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
            client.put(sample_payload(OTHER))
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
            client.get(OTHER).close()
            eventually_connected(endpoint)
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
        assert stat.S_IMODE(socket_path(endpoint).stat().st_mode) == 0o600
        client.put(sample_payload(OTHER))
        folder.chmod(mode)
        message = rf"/run: socket's folder: expected one that only user .* can write to, found mode {mode:04o}; chmod"
        for call in (patient(endpoint).open, client.status):
            with pytest.raises(StoreFolderError, match=message):
                call()
        client.get(OTHER).close()  # which tells nobody
        folder.chmod(0o700)
        client.get(OTHER).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_somebody_elses_socket_and_one_in_somebody_elses_folder_are_not_asked(tmp_path: Path) -> None:
    (tmp_path / "s").touch()
    os.chown(tmp_path / "s", 12345, -1)
    with pytest.raises(StoreFolderError, match="service socket: expected owner 0, found owner 12345"):
        StoreClient(f"ipc://{tmp_path}/s").open()
    with served(tmp_path) as endpoint, patient(endpoint) as client:
        folder = socket_path(endpoint).parent
        (tmp_path / "link").symlink_to(folder)
        os.chown(tmp_path / "link", 12345, -1, follow_symlinks=False)
        with pytest.raises(StoreFolderError, match="socket's folder: expected owner 0, found owner 12345"):
            patient(f"ipc://{tmp_path}/link/s").open()
        os.chown(folder, 12345, -1)
        for call in (patient(endpoint).open, client.status):
            with pytest.raises(StoreFolderError, match="socket's folder: expected owner 0, found owner 12345"):
                call()
        os.chown(folder, 0, -1)
