"""The store service's clients: while it or a folder goes and comes back, forks, time limits, what comes from DRAM."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from prefix_index import (
    ArrayKey,
    FileStore,
    IndexPayload,
    LazyArray,
    StoreClosed,
    StoreFolderError,
    StoreFull,
    StoreUnavailable,
)
from prefix_index.folder import come_back
from prefix_index.service import StoreClient, StoreServer, messages
from prefix_index.service.client import Link
from tests.prefix_index.samples import fill_of, read_fill, sample_identity, sample_payload
from tests.prefix_index.small_stores import SOON, balanced, fork, reap, remove
from tests.prefix_index.tiers import PATIENCE_S, Service, endpoint_in, eventually, patient, served, two_tiers


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
    with pytest.raises(StoreUnavailable, match="expected Welcome of protocol version 2, found Status"):
        link.ask(messages.GetStatus(), messages.Welcome, PATIENCE_S)
    monkeypatch.setattr("prefix_index.service.client.decode_answer", lambda _: messages.decode_answer(b"\xc1"))
    with pytest.raises(StoreUnavailable, match="expected a message of protocol version 2"):
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
