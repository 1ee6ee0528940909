"""The store service: its limits, who listens on which socket and is asked, its command. And its clients: while it or a
folder goes and comes back, forks, time limits, what comes from DRAM.
"""

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
import numpy as np
import pytest
import zmq

from prefix_index import (
    ArrayKey,
    FileStore,
    IndexNotFound,
    IndexPayload,
    InvalidPayload,
    LazyArray,
    Retention,
    StoreClosed,
    StoreFolderError,
    StoreFull,
    StoreUnavailable,
)
from prefix_index.connect import open_store
from prefix_index.folder import come_back
from prefix_index.service import Limits, StoreClient, StoreServer, messages
from prefix_index.service.client import Link
from prefix_index.service.endpoint import SocketPlace, most_connections, raise_descriptor_limit, socket_path
from prefix_index.service.server import _leases
from sglang_ext.cli.store import file_system, memory_name
from tests.prefix_index.samples import fill_of, read_fill, sample_identity, sample_payload
from tests.prefix_index.small_stores import SOON, balanced, fork, reap, remove
from tests.prefix_index.tiers import PATIENCE_S, Service, endpoint_in, eventually, patient, served, two_tiers

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
            assert not any("before this service started" in text for text in told.clients), "who asks is no client"
            shown = status_of()
            assert f"pid {served.pid}" in shown
            assert "1 leases held" in shown
            again = ran(*serve)
            assert (again.returncode, "expected no running service" in again.stderr) == (1, True)
        served.send_signal(signal.SIGTERM)
        _, said = served.communicate(timeout=300)
        assert served.returncode == 0
        assert "store INFO serves" in said
        assert ("expected the DRAM tier's folder on a tmpfs" in said) == (file_system(tmp_path) != "tmpfs")
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


def test_a_service_outlives_a_request_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path) as endpoint, patient(endpoint) as client:
        with monkeypatch.context() as broken:
            broken.setattr(StoreServer, "status", lambda _: 1 // 0)
            with pytest.raises(StoreUnavailable, match="a defect of the service, ZeroDivisionError: see its log"):
                client.status()
        assert client.status().counts["defects"] == 1


def test_one_connection_too_many_is_told_so_and_given_back(tmp_path: Path) -> None:
    with served(tmp_path, limits=Limits(connections=2)) as endpoint, patient(endpoint) as a, patient(endpoint) as b:
        a.put(sample_payload())
        with pytest.raises(StoreUnavailable, match=r"at most 2 connections .*found 3 of them"):
            patient(endpoint).open()
        assert a.status().counts["refused"] >= 1
        b.close()
        eventually(lambda: a.status().connections == 1)
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
                patient(endpoint, timeout_s=1.0).open()
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


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_while_the_service_is_away_or_hangs_the_folder_is_used_all_the_same(process: Service, how: str) -> None:
    with patient(process.endpoint) as client:
        client.put(sample_payload(fill=7))
        if how == "killed":
            process.kill()
        else:
            os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert read_fill(client) == 7
        client.put(sample_payload(fill=8))
        for _ in range(200):
            assert read_fill(client) == 8
        assert client.contains(sample_identity())
        with client.lease(sample_identity()) or pytest.fail("no lease"):
            assert client.lease(sample_identity()) is None
        client.rescan(full=True)
        assert list(client.collect()) == []
        balanced(client)
        assert time.monotonic() - began < PATIENCE_S / 2
        eventually(lambda: len(client.problems()) == (how == "killed"))
        client._timeout_s = 0.2
        with pytest.raises(StoreUnavailable, match="start `sglang-ext store serve`"):
            client.status()
        client._timeout_s = PATIENCE_S
        if how == "killed":
            assert process.start()
        else:
            os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: client.status().indexes == 1)
        assert list(client.problems()) == []
        assert client.delete(sample_identity())


def test_no_service_at_all(tmp_path: Path) -> None:
    client = StoreClient(f"ipc://{tmp_path}/none", timeout_s=0.2)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"no service within 0.2 s; start `sglang-ext store serve`"):
        client.open()
    assert time.monotonic() - began < 30.0
    with pytest.raises(StoreClosed):
        client.list()


def test_a_service_that_does_not_answer_and_one_that_says_something_else(
    process: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(StoreUnavailable, match=r"expected an answer of the service, found no.* within 0.3 s"):
        StoreClient(process.endpoint, timeout_s=0.3).open()
    os.kill(process.pid, signal.SIGCONT)
    link = Link(process.endpoint)
    with pytest.raises(StoreUnavailable, match="expected Welcome of protocol version 3, found Status"):
        link.ask(messages.GetStatus(), messages.Welcome, PATIENCE_S)
    monkeypatch.setattr("prefix_index.service.client.decode_answer", lambda _: messages.decode_answer(b"\xc1"))
    with pytest.raises(StoreUnavailable, match="expected a message of protocol version 3"):
        link.ask(messages.GetStatus(), messages.Status, PATIENCE_S)
    link.close()


def test_the_services_limits_hold_for_its_clients(tmp_path: Path) -> None:
    options = {"max_bytes": 5000, "min_free_bytes": 7}
    with served(tmp_path, two_tiers(tmp_path, **options)) as endpoint, patient(endpoint) as client:
        assert (client.max_bytes, client.min_free_bytes) == (5000, 7)
        with pytest.raises(StoreFull, match="max_bytes=5000, min_free_bytes=7"):
            client.put(sample_payload())


def test_services_and_clients_of_before_say_and_read_a_policy_of_eviction() -> None:
    fields: dict[str, Any] = {"version": 2, "folder": "/f", "memory": None, "max_bytes": 1, "min_free_bytes": 0}
    before = {"type": "Welcome", **fields, "eviction": "cost_aware"}
    assert isinstance(messages.decode_answer(messages.encode(before)), messages.Welcome)
    assert msgspec.msgpack.decode(messages.encode(messages.Welcome(**fields))) == {**before, "eviction": "lru"}


def test_a_client_that_may_only_read_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path, two_tiers(tmp_path)) as endpoint:
        with patient(endpoint) as client:
            client.put(sample_payload(fill=3))
        monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
        with patient(endpoint) as client:
            assert read_fill(client) == 3


def test_a_forked_child_uses_the_folder_and_tells_nobody(process: Service) -> None:
    with patient(process.endpoint) as client:
        client.put(sample_payload(fill=4))

        def child() -> None:
            assert read_fill(client) == 4
            with pytest.raises(StoreUnavailable, match="expected a connection of this process"):
                client.status()
            client.close()
            client.open()
            assert read_fill(client) == 4
            client.close()

        assert reap(fork(child), SOON) == 0
        assert read_fill(client) == 4
        assert client.status().counts.get("bad_messages", 0) == 0


def test_a_child_forked_during_a_put_keeps_nothing_of_a_dead_writer(process: Service) -> None:
    reader, writer = os.pipe()

    def die() -> np.ndarray[Any, Any]:
        child = os.fork()
        if child == 0:
            time.sleep(10 * SOON)
            os._exit(0)
        os.write(writer, str(child).encode())
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def put() -> None:
        with patient(process.endpoint) as client:
            client.put(IndexPayload(sample_identity(), {ArrayKey("kv"): LazyArray("uint8", (4096,), die)}))

    reap(fork(put), SOON)
    child = int(os.read(reader, 20))
    try:
        with patient(process.endpoint) as client:
            eventually(lambda: client.status().reservations == 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


def test_a_child_forked_during_a_put_leaves_it_to_its_parent(tmp_path: Path) -> None:
    class InChildError(Exception):
        pass

    parent = os.getpid()

    def load() -> np.ndarray[Any, Any]:
        child = os.fork()
        if child == 0:
            raise InChildError
        assert reap(child, SOON) == 0
        return np.full(4096, 7, np.uint8)

    with FileStore(tmp_path / "store", create=True) as store:
        try:
            store.put(IndexPayload(sample_identity(), {ArrayKey("kv"): LazyArray("uint8", (4096,), load)}))
        except BaseException as err:
            if os.getpid() != parent:
                os._exit(not isinstance(err, InChildError))
            raise
        assert store.get(sample_identity()).array("kv")[0] == 7


def test_a_used_index_is_served_from_dram_and_a_replaced_one_never_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefix_index.copies._AGAIN_S", 0.1)
    own = two_tiers(tmp_path)

    def tier() -> str:
        index = client.get(sample_identity())
        assert fill_of(index) == fill
        return index.tier

    with served(tmp_path, own) as endpoint, patient(endpoint) as client:
        for fill in (1, 2, 3):
            client.put(sample_payload(fill=fill))
            eventually(lambda: tier() == "dram")
        eventually(lambda: client.status().tiers[0].indexes == 1)
        assert client.status().tiers[0].hits > 0
        # Somebody who knows nothing of the service replaces it: the next get sees it.
        assert own._copier.settle(60.0)  # a copy that comes late uses the index
        fill = 4
        with FileStore(tmp_path / "store") as other:
            other.put(sample_payload(fill=fill))
        assert tier() == "disk"
        eventually(lambda: tier() == "dram")


def test_a_dram_tier_that_cannot_be_used_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = StoreServer(two_tiers(tmp_path), endpoint_in(tmp_path))

    def tend() -> list[str | None]:
        server._look_after(collect=True)
        return [tier.error for tier in server.status().tiers]

    server.open()
    with caplog.at_level("WARNING", "prefix_index.service"):
        remove(tmp_path / "dram")
        server.store.copies.not_before["of the folder that went"] = float("inf")  # type: ignore[union-attr]
        assert tend() == [None, None]
        assert server.store.copies.not_before == {}  # type: ignore[union-attr]
        assert [record.message for record in caplog.records] == [
            f"{tmp_path}/dram: the DRAM tier's folder was gone, with all copies; it was made anew"
        ]
        remove(tmp_path / "dram")
        (tmp_path / "dram").touch()
        for _ in range(3):
            errors = tend()
        (message,) = [record.message for record in caplog.records[1:]]
        assert message == errors[0]
        assert "index store: expected an existing folder, found something that is not a folder" in message
        (tmp_path / "dram").unlink()
        tend()
        assert tend() == [None, None]
    server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_dram_folder_is_not_made_below_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, -1)
    with pytest.raises(StoreFolderError, match="folder's parent: expected one of user 0, found user 12345's"):
        come_back(tmp_path / "theirs" / "dram")
    assert not (tmp_path / "theirs" / "dram").exists()


def test_what_expired_in_a_service_is_not_fetched_from_a_folder_that_is_shared(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o700)
    with served(tmp_path) as endpoint, open_store([endpoint, f"file://{tmp_path}/shared"]) as store:
        store.put(sample_payload())
        assert store.flush(PATIENCE_S)
        store.retain(sample_identity(), Retention(expires=1.0))
        with pytest.raises(IndexNotFound):
            store.get(sample_identity())
