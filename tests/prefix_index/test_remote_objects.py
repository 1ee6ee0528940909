"""The remote tier over object stores (obstore's local and memory stores, moto's S3 server over real sockets): damage,
edges, and several machines on one, their leases, and writers that are killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from prefix_index import IndexCorrupt, IndexForeign, IndexFormatError, IndexNotFound, IndexTooNew, Retention
from prefix_index.remote import BlobsFailed, ObjectBlobs, RemoteStore
from prefix_index.remote import store as remote_store
from prefix_index.remote.values import CHUNK, HEADER, LEASE, LEASES, unpack_record, value_header
from tests.prefix_index.remote_stores import (
    DIGEST,
    MANIFEST,
    OBJECT_STORE_NAMES,
    OBJECT_STORES,
    check_values,
    chunks_of,
    damage,
    file_blobs,
    flip_bit,
    forge_manifest,
    killed_writers,
    machine,
)
from tests.prefix_index.samples import read_fill, sample_identity, sample_payload
from tests.prefix_index.small_stores import Clock, balanced, in_threads, of_version, python
from tests.prefix_index.tiers import eventually


@pytest.fixture(params=OBJECT_STORE_NAMES)
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectBlobs]:
    made = OBJECT_STORES[request.param](tmp_path)
    made.open(60)
    yield made
    made.close()


@pytest.fixture
def store(blobs: ObjectBlobs) -> Iterator[RemoteStore]:
    with machine(blobs) as store:
        yield store


def test_values(blobs: ObjectBlobs) -> None:
    check_values(blobs, "a")
    assert blobs.create("a/x", memoryview(b"one")) is True
    assert blobs.create("a/x", memoryview(b"two")) is False
    assert blobs.fetch("a/x", 10) == b"one"
    before = blobs.names("a")
    blobs.write("a/x", memoryview(b"three"))
    assert blobs.names("a").keys() == before.keys()
    assert blobs.names("a") != before


def test_every_bit_of_a_chunk_header_and_of_the_manifest_counts(tmp_path: Path) -> None:
    blobs = file_blobs(tmp_path)
    with machine(blobs) as store:
        store.put(sample_payload())
        tried = 0
        for name, bits in (
            (chunks_of(blobs)[0], range(HEADER.size * 8)),
            (MANIFEST, range(0, blobs.size(MANIFEST) * 8, 11)),
            (chunks_of(blobs)[1], range(HEADER.size * 8, blobs.size(chunks_of(blobs)[1]) * 8, 8009)),
        ):
            for bit in bits:
                damage(blobs, name, flip_bit(bit))
                with pytest.raises(IndexFormatError):
                    store.get(DIGEST)
                damage(blobs, name, flip_bit(bit))
                tried += 1
        assert tried > 900
        with store.get(DIGEST) as index:
            index.verify()


def test_chunks_that_belong_elsewhere(store: RemoteStore, blobs: ObjectBlobs) -> None:
    store.put(sample_payload(fill=1))
    store.put(sample_payload(sample_identity(range(64)), fill=2))
    mine, others = chunks_of(blobs), chunks_of(blobs, sample_identity(range(64)).digest)
    values = {name: blobs.fetch(name, 1 << 20) for name in (*mine, others[1], MANIFEST)}
    body = values[mine[1]][HEADER.size :]
    older = value_header(CHUNK, DIGEST, "0" * 16, 1, body) + body
    swaps = ((mine[1], values[mine[0]]), (mine[1], values[others[1]]), (mine[0], values[MANIFEST]), (mine[1], older))
    for name, other in swaps:
        blobs.write(name, memoryview(other))
        with pytest.raises(IndexCorrupt, match=r"\(kind, index, digest, generation, length, xxh3\) of chunk \d: exp"):
            store.get(DIGEST)
        blobs.write(name, memoryview(values[name]))
    store.get(DIGEST).verify()
    blobs.write(MANIFEST, memoryview(blobs.fetch(MANIFEST.replace(DIGEST, others[0].split("/")[1][:64]), 1 << 20)))
    with pytest.raises(IndexCorrupt, match="of manifest: expected"):
        store.get(DIGEST)


def test_a_newer_version_and_somebody_elses_value(store: RemoteStore, blobs: ObjectBlobs) -> None:
    store.put(sample_payload())
    blobs.write(MANIFEST, memoryview(of_version(2, blobs.fetch(MANIFEST, 1 << 20))))
    with pytest.raises(IndexTooNew, match=r"version of manifest: expected at most 1, found 2 \(written by a newer"):
        store.get(DIGEST)
    assert not store.put(sample_payload()), "a newer version's stays"
    blobs.write(MANIFEST, memoryview(b"GIF89a and so on, for a good many bytes, more than there are in a header"))
    with pytest.raises(IndexForeign, match="manifest type: expected a prefix index"):
        store.get(DIGEST)
    assert store.delete(DIGEST)
    assert MANIFEST not in blobs.names("prefix_index"), "its chunks are for sweep()"


def test_a_manifest_with_more_fields_is_read(store: RemoteStore, blobs: ObjectBlobs) -> None:
    """It had the retention, too."""
    store.put(sample_payload())
    forge_manifest(blobs, retention={"pinned": True})
    store.get(DIGEST).verify()
    assert [entry.retention for entry in store.list()] == [Retention()]


def test_a_manifest_that_speaks_of_something_else(store: RemoteStore, blobs: ObjectBlobs) -> None:
    store.put(sample_payload())
    true, identity = blobs.fetch(MANIFEST, 1 << 20), msgspec.to_builtins(sample_identity(range(64)))
    info = msgspec.to_builtins(sample_payload().info)
    for wrong in ({"generation": "0" * 16}, {"entry": {"identity": identity, "info": info}}):
        blobs.write(MANIFEST, memoryview(true))
        forge_manifest(blobs, **wrong)
        with pytest.raises(IndexCorrupt, match="identity digest and generation: expected"):
            store.get(DIGEST)


def test_a_manifest_too_long_is_not_read(tmp_path: Path) -> None:
    blobs = file_blobs(tmp_path)
    with machine(blobs) as store:
        blobs.write(MANIFEST, memoryview(bytes(5 << 20)))
        with pytest.raises(IndexCorrupt, match="manifest: expected at most 4194304 bytes, found 5242880 bytes"):
            store.get(DIGEST)


def test_lost_chunks_are_a_miss_and_then_garbage(store: RemoteStore, blobs: ObjectBlobs) -> None:
    store.put(sample_payload())
    store.put(sample_payload(sample_identity(range(64))))
    blobs.delete(chunks_of(blobs)[1])
    with pytest.raises(IndexNotFound, match=r"index: expected .*, found chunk 1 gone \(evicted"):
        store.get(DIGEST)
    assert not store.contains(DIGEST)
    store.rescan()
    assert [e.digest for e in store.list()] == [sample_identity(range(64)).digest]
    assert "2 of its 3 chunks" in str(store.problems()[0].error)
    balanced(store)
    store.sweep()
    assert list(store.problems()) == []
    assert chunks_of(blobs) == []


def test_a_full_disk_is_a_full_store(tmp_path: Path) -> None:
    """As a disk says it, through obstore: a limit on the size of this process's files."""
    code = (
        "import resource, signal, sys; from prefix_index import StoreFull; from prefix_index.remote import *\n"
        "from tests.prefix_index.samples import *\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "store = RemoteStore(ObjectBlobs(sys.argv[1])); store.open()\n"
        "store.put(sample_payload(fill=1))\n"
        "no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, no_limit[1]))\n"
        "try: store.put(sample_payload(sample_identity(range(64))))\n"
        "except StoreFull as err: print('full', err)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)\n"
        "print(int(store.get(sample_identity()).array('channels')[0]), len(store.problems()))\n"
    )
    with python(code, (tmp_path / "o").as_uri()) as process:
        told, _ = process.communicate()
    assert told.startswith("full file://")
    assert "expected room for the index, found" in told
    assert told.endswith("1 0\n")


def test_credentials_show_nowhere() -> None:
    assert ObjectBlobs("s3://key:secret@bucket/x?token=hidden").name == "s3://bucket/x"
    blobs = ObjectBlobs("s3://bucket/x", no_such_option="hidden-value")
    with pytest.raises(BlobsFailed) as caught:
        blobs.open(1)
    assert "hidden-value" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("full", [False, True])
def test_a_listing_that_took_long_does_not_undo_what_happened_meanwhile(full: bool) -> None:
    class Slow(ObjectBlobs):
        """While the names come in, this process goes on."""

        meanwhile: Callable[[], object] | None = None

        def names(self, folder: str) -> Any:
            names = super().names(folder)
            call, self.meanwhile = self.meanwhile, None
            if call is not None:
                call()
            return names

    blobs = Slow("memory:///")
    with machine(blobs) as store:
        blobs.meanwhile = lambda: store.put(sample_payload())
        store.rescan(full=full)
        assert [e.digest for e in store.list()] == [DIGEST]
        blobs.meanwhile = lambda: store.delete(DIGEST)
        store.rescan(full=full)
        assert list(store.list()) == list(store.problems()) == []
        balanced(store)


def test_two_writers_of_one_key_on_two_machines(tmp_path: Path) -> None:
    """The first index stays, whole, and nothing of the other one."""
    blobs = file_blobs(tmp_path)
    with machine(blobs) as one, machine(blobs) as two:
        for turn in range(10):
            put: dict[int, bool] = {}

            def write(i: int, put: dict[int, bool] = put) -> None:
                put[i] = (one, two)[i].put(sample_payload(fill=i + 1))

            in_threads(partial(write, 0), partial(write, 1))
            assert sorted(put.values()) == [False, True]
            assert len(chunks_of(blobs)) == 3
            for store in (one, two):
                with store.get(DIGEST) as index:
                    index.verify()
                    assert put[int(index.array("channels")[0]) - 1]
            assert (one, two)[turn % 2].delete(DIGEST)


def test_readers_under_a_writer_on_another_machine(tmp_path: Path) -> None:
    blobs = file_blobs(tmp_path)
    with machine(blobs) as writer, machine(blobs) as reader:
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                with contextlib.suppress(IndexNotFound), reader.get(DIGEST) as index:
                    assert index.stats == {"fill": int(index.array("channels")[0])}
                    index.verify()
                reader.rescan()

        def write() -> None:
            try:
                for fill in range(1, 40):
                    assert writer.put(sample_payload(fill=fill))
                    assert writer.delete(DIGEST)
            finally:
                done.set()

        in_threads(write, read, read, read)


def test_sweep_leaves_a_put_under_way_alone(tmp_path: Path) -> None:
    """By the writer's clock; one that ran backwards only keeps garbage longer."""
    blobs = file_blobs(tmp_path)
    blobs.open(5)
    clock = Clock()
    with machine(blobs, grace_s=100, clock=clock) as store:
        store.put(sample_payload())
        for age, kept in ((0, True), (99, True), (101, False), (-1e6, True)):
            generation = f"{int(clock.now - age):08x}00000000"
            name = f"prefix_index/{DIGEST}.{generation}.000000"
            blobs.write(name, memoryview(b"x"))
            store.sweep()
            assert (name in blobs.names("prefix_index")) == kept
        with store.get(DIGEST) as index:
            index.verify()


def test_a_writer_killed_at_any_moment_leaves_an_index_or_none(tmp_path: Path) -> None:
    """Processes put and delete in a loop and are killed; what is there afterwards is always whole."""
    blobs = file_blobs(tmp_path)
    with machine(blobs) as store:
        for _ in killed_writers(8, store, "ObjectBlobs(sys.argv[1])", (tmp_path / "objects").as_uri()):
            store.rescan()
            assert list(store.problems()) == []
        store.put(sample_payload())
    with machine(blobs, grace_s=-10) as store:
        store.sweep()
        (entry,) = store.list()
        assert len(chunks_of(blobs)) in (3, -(-entry.nbytes // 4096))
        read_fill(store)


def test_a_lease_outlives_its_time_only_while_its_holder_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of this machine that the test sets: how soon the holder gets its turn does not matter."""
    blobs, clock = file_blobs(tmp_path), Clock()
    monkeypatch.setattr(remote_store, "time", SimpleNamespace(time=clock))
    code = (
        "import sys, time; from prefix_index.remote import *\n"
        "store = RemoteStore(ObjectBlobs(sys.argv[1]), lease_ttl_s=0.6); store.open()\n"
        "lease = store.lease(sys.argv[2]); print(lease is not None, flush=True); time.sleep(600)\n"
    )

    def expires() -> float:
        return unpack_record(LEASE, DIGEST, blobs.fetch(f"prefix_index/{DIGEST}.lease", 1 << 20), LEASES)[1].expires

    with machine(blobs, lease_ttl_s=0.6, grace_s=0) as store:
        with python(code, (tmp_path / "objects").as_uri(), DIGEST) as holder:
            try:
                assert holder.stdout is not None
                assert holder.stdout.readline() == "True\n"
                first, deadline = expires(), time.monotonic() + 60
                while expires() == first:
                    assert time.monotonic() < deadline, "the holder does not renew it"
                    time.sleep(0.05)
                os.kill(holder.pid, signal.SIGSTOP)
                os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
                last = expires()
                clock.now = last - 0.001
                assert clock.now > first
                assert store.lease(DIGEST) is None
            finally:
                holder.kill()
        clock.now = last
        lease = store.lease(DIGEST)
        assert lease is not None
        lease.release()


def test_a_broken_or_absurd_lease_stops_nobody(tmp_path: Path) -> None:
    blobs = file_blobs(tmp_path)
    with machine(blobs, grace_s=0) as store:
        blobs.write(f"prefix_index/{DIGEST}.lease", memoryview(b"garbage"))
        with store.lease(DIGEST) or pytest.fail("held"):
            pass
        blobs.write(f"prefix_index/{DIGEST}.lease", memoryview(b"garbage"))
        store.sweep()
        assert blobs.names("prefix_index") == {}


def test_a_forgotten_lease_ends(tmp_path: Path) -> None:
    with machine(file_blobs(tmp_path), lease_ttl_s=3600) as store:
        store.lease(DIGEST)
        eventually(lambda: store.lease(DIGEST))
